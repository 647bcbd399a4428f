"""The verdicts of a sweep: on synthetic sweeps whose truth is known, and on cases that a simpler
rule gets wrong. Where that rule is short, the test computes it, too, and shows that it fails."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_ind

from bench.ablation import looks, power, rows, verdicts
from bench.ablation.verdicts import contrast, holm, pooled_variance, rank_test
from helpers.sweeps import make_sweep

CALM = {"diverged": (), "stale": False}
ROPE = {"base": 0.0, "base-again": 0.0, "rope": -0.1}


def judge(sweep, lines, prices=(), **given):
    """(frame, {name: row}) of a sweep's verdicts."""
    plan = rows.complete(sweep)
    frame = verdicts.judge(rows.table(lines, plan, list(prices)), plan, **given)
    return frame, frame.set_index("name").to_dict("index")


def reported(lines, *arms, column="final_report"):
    losses = [line[column] for line in lines if line["arm"] in arms and line["purpose"] == "report"]
    return np.array(losses, float)


def with_runs(sweep, lines, arm, change):
    """The lines, with what `change` says of the seed of each reported run of an arm."""
    is_run = [line["arm"] == arm and line["purpose"] == "report" for line in lines]
    return [
        line | (change(line["seed"]) if chosen else {})
        for line, chosen in zip(lines, is_run, strict=True)
    ]


DIVERGED = {"status": "diverged", "final_report": None}

# ---------------------------------------------------------------- the tests are the textbook's


def test_contrasts_and_ties_are_those_of_the_libraries():
    random = np.random.default_rng(0)
    x, y = random.normal(0, 1, 5), random.normal(0.3, 2, 11)
    test, welch = contrast([x, y]), stats.ttest_ind(x, y, equal_var=False)
    assert test.p() == pytest.approx(welch.pvalue)
    columns = test.columns()
    assert (columns["low"], columns["high"]) == pytest.approx(tuple(welch.confidence_interval()))
    assert test.p_tie(1.5) == pytest.approx(ttost_ind(x, y, -1.5, 1.5, usevar="unequal")[0])
    pooled = contrast([x, y], pooled=pooled_variance([x, y]))
    assert pooled.p() == pytest.approx(stats.ttest_ind(x, y).pvalue)


def test_the_contrast_of_an_interaction_is_that_of_four_groups():
    random = np.random.default_rng(1)
    groups = [random.normal(0, sd, n) for sd, n in ((1, 5), (2, 6), (1, 7), (3, 12))]
    test = contrast(groups, (1, -1, -1, 1))
    means = [group.mean() for group in groups]
    parts = [group.var(ddof=1) / len(group) for group in groups]
    squares = sum(part**2 / (len(g) - 1) for part, g in zip(parts, groups, strict=True))
    expected = (means[0] - means[1] - means[2] + means[3], np.sqrt(sum(parts)))
    assert test == pytest.approx((*expected, sum(parts) ** 2 / squares))


def test_holm_is_the_library_s():
    p = np.random.default_rng(2).uniform(0, 0.1, (5, 6))
    for line, corrected in zip(p, holm(p), strict=True):
        assert corrected == pytest.approx(multipletests(line, 0.05, "holm")[1])
    wider = multipletests([*p[0], 1, 1], 0.05, "holm")[1][:6]
    assert holm(p[0], family=8) == pytest.approx(wider)


def test_no_noise_and_single_runs_do_not_break_the_tests():
    same, other = np.full(3, 1.0), np.full(3, 2.0)
    assert contrast([same, other]).p() == 0
    equal = contrast([same, same])
    assert (equal.p(), equal.p_tie(0.1)) == (1, 0)
    assert contrast([same[:1], other]).p() == 1


def test_ranks_put_diverged_runs_last():
    random = np.random.default_rng(3)
    x, control = random.normal(0, 1, 8), random.normal(0, 1, 18)
    exact = stats.mannwhitneyu(x, control, method="exact").pvalue
    assert rank_test(x, control)[0] == pytest.approx(exact, abs=0.02)
    x[:6] = math.inf
    p, direction = rank_test(x, control)
    assert p < 0.02 and direction > 0
    # four of eight runs: the normal approximation alone says 0.02, where 2 / 70 is the least
    assert rank_test(np.full(4, math.inf), control[:4])[0] == pytest.approx(2 / 70)


# ---------------------------------------------------------------- a sweep


def test_a_sweep(tmp_path):
    sweep, lines, prices = make_sweep(tmp_path)
    frame, found = judge(sweep, lines, prices.values())
    assert list(frame.columns) == verdicts.COLUMNS
    assert frame.verdict.to_list() == [
        *("better", "better", "undecided", "undecided", "undecided", "undecided", "worse", "noise")
    ]
    control, rope = reported(lines, "base", "base-again"), reported(lines, "rope")
    assert frame.attrs["base_mean"] == pytest.approx(control.mean())  # the half that chose nothing
    assert (frame.attrs["base_n"], frame.attrs["family"]) == (14, 7)
    best = reported(lines, "base", "base-again", column="best_report")
    by_best, _ = judge(sweep, lines, measure="best_loss")
    assert by_best.attrs["base_mean"] == pytest.approx(best.mean())
    assert found["rope"]["difference"] == pytest.approx(rope.mean() - control.mean())
    p = stats.ttest_ind(rope, control, equal_var=False).pvalue
    assert found["rope"]["p"] == pytest.approx(p)
    assert found["rope"]["p_looks"] == pytest.approx(p / 0.9)
    swaps = frame[frame.kind == "swap"]
    assert swaps.p_holm.to_list() == pytest.approx(multipletests(swaps.p_looks, method="holm")[1])
    assert (frame.attrs["margin"], frame.attrs["margin_source"]) == (0.0052, sweep["margin_source"])
    assert found["gqa"]["n"] == 5  # the stale row's .5 is nowhere

    plan = rows.plan(tmp_path)
    needed = verdicts.undecided(rows.load(tmp_path), plan)
    undecided = frame[frame.verdict == "undecided"]
    assert needed == dict(zip(undecided.arm, undecided.more_seeds, strict=True))
    assert set(needed) == {"rmsnorm", "swiglu", "untied", "gqa"} and min(needed.values()) >= 1


def test_the_replicate_has_the_pooled_interval(tmp_path):
    """Its own two runs would give 12.7 standard errors on each side."""
    sweep, lines, _ = make_sweep(tmp_path, seeds=2, effects=ROPE | {"gqa": 0.0}, **CALM)
    replicate = judge(sweep, lines)[1]["base-again"]
    groups = [reported(lines, arm) for arm in ("base", "base-again", "rope", "gqa")]
    variance, df = pooled_variance(groups)
    se = math.sqrt(variance * (1 / len(groups[0]) + 1 / len(groups[1])))
    half = stats.t.ppf(0.975, df) * se
    assert df == sum(map(len, groups)) - 4
    assert replicate["high"] - replicate["difference"] == pytest.approx(half)
    assert replicate["difference"] == pytest.approx(groups[1].mean() - groups[0].mean())
    assert math.isnan(replicate["text_low"])


@pytest.mark.parametrize(("noise", "verdict"), [(2e-3, "tie"), (8e-3, "undecided")])
def test_an_equal_arm_ties_where_the_noise_allows_it(tmp_path, noise, verdict):
    effects = ROPE | {"same": 0.0}
    sweep, lines, _ = make_sweep(tmp_path, seeds=8, effects=effects, **CALM, noise=noise)
    frame, found = judge(sweep, lines)
    assert found["same"]["verdict"] == verdict
    assert (frame.attrs["tie_power"] > 0.9) == (verdict == "tie")


@pytest.mark.parametrize("screening", [False, True])
def test_one_seed_gives_no_verdict_and_no_number_of_seeds(tmp_path, screening):
    sweep, lines, _ = make_sweep(tmp_path, seeds=1, stale=False, screening=screening)
    frame, _ = judge(sweep, lines)
    swaps = frame[frame.kind == "swap"]
    assert set(swaps.verdict) == {"no verdict"} and swaps.more_seeds.isna().all()
    assert swaps.reason.str.contains("one seed").all()


def test_nothing_is_decided_before_the_planned_runs_have_ended(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, seeds=6, effects=ROPE, **CALM)
    assert judge(sweep, lines)[1]["rope"]["verdict"] == "better"
    for missing in (("rope", 5), ("base", 3)):
        early = [line for line in lines if (line["arm"], line["seed"]) != missing]
        rope = judge(sweep, early)[1]["rope"]
        assert (rope["verdict"], rope["reason"]) == ("no verdict", "planned runs are missing")
    # a run that the machine killed has been tried
    killed = [line | {"status": "failed"} if line not in early else line for line in lines]
    assert judge(sweep, killed)[1]["rope"]["verdict"] == "better"


def test_small_but_certain_is_better_and_says_so(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, noise=1e-4, margin=0.05, **CALM)
    swiglu = judge(sweep, lines)[1]["swiglu"]
    assert (swiglu["verdict"], swiglu["reason"]) == ("better", "smaller than the margin")


def test_a_ladder_compares_each_rung_with_the_one_before(tmp_path):
    effects = {"base": 0.0, "rope": -0.1, "swiglu": -0.16}
    rung = {"swiglu": {"against": "rope"}}
    sweep, lines, _ = make_sweep(tmp_path, effects=effects, arms=rung, **CALM)
    swiglu = judge(sweep, lines)[1]["swiglu"]
    assert (swiglu["against"], swiglu["n_control"], swiglu["verdict"]) == ("rope", 5, "better")
    assert swiglu["difference"] == pytest.approx(-0.06, abs=0.02) and math.isnan(swiglu["worth"])


def test_a_screening_says_larger_than_the_noise_or_not_seen(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, seeds=3, screening=True, stale=False)
    words = judge(sweep, lines)[0].set_index("arm").verdict
    assert words["rope"] == "larger than the noise" and words["rmsnorm"] == "not seen"
    assert words["post"] == "no verdict" and words["base-again"] == "noise"  # post diverged


# ---------------------------------------------------------------- looks


def test_a_claim_that_all_runs_together_do_not_bear_is_taken_back(tmp_path):
    """The direction is that of the evidence that decided. The least p over the looks, with the sign
    of all runs, would say worse."""
    random = np.random.default_rng(5)
    noise = random.normal(0, 0.004, 9)
    rope = [2.0 - 0.010 + e for e in (0.0001, -0.0001, 0.0)]
    rope += list(2.0 + 0.010 * 3 / 9 + 0.0013 + noise - noise.mean())
    near = 2.0 + np.array([0.0002, -0.0002, 0.0001, -0.0001, 0.0])
    rest = 2.0 + random.normal(0, 0.004, 8)
    losses = {"base": [*near[:3], *rest[:4]], "base-again": [*near[3:], *rest[4:]], "rope": rope}
    sweep, lines, _ = make_sweep(tmp_path, effects=dict.fromkeys(losses, 0.0), **CALM)
    sweep["looks"] = [3, 12]
    report = {line["arm"]: line for line in lines if line["purpose"] == "report"}
    lines = [
        report[arm] | {"seed": seed, "final_report": float(loss)}
        for arm, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    at_first = [line for line in lines if line["seed"] < 3]
    assert judge(sweep, at_first)[1]["rope"]["verdict"] == "better"

    rope = judge(sweep, lines)[1]["rope"]
    assert rope["verdict"] == "undecided" and rope["p_holm"] < 0.05 and rope["difference"] > 0
    assert rope["reason"] == "seen at a look, but not by all runs together"


@pytest.mark.parametrize(
    ("tests", "shares", "verdict"),  # (p, p of a tie, difference) at each look
    [
        ([(1e-4, 1, -1), (0.01, 1, -0.5)], [0.45, 0.45], "better"),
        ([(1e-4, 1, -1), (0.01, 1, 0.5)], [0.45, 0.45], "undecided"),
        ([(1e-4, 1, -1), (0.06, 1, -0.5)], [0.45, 0.45], "undecided"),
        ([(1e-4, 1, -1), (1e-6, 1, 0.5)], [0.45, 0.45], "worse"),
        ([(0.5, 1e-4, 0.1), (0.5, 0.01, 0.1)], [0.45, 0.45], "tie"),
        ([(0.5, 1e-4, 0.1), (0.5, 0.06, 0.1)], [0.45, 0.45], "undecided"),
        ([(1, 1, 0), (1e-4, 1, -1)], [0.9, 0.0], "undecided"),  # no look of its own
    ],
)
def test_the_direction_is_that_of_the_deciding_look(tests, shares, verdict):
    p, p_tie, difference = (np.array(column, float)[:, None] for column in zip(*tests, strict=True))
    assert verdicts.words(p, p_tie, difference, shares)["verdict"][0] == verdict


def look_again(folder, **keys):
    """(verdicts, lines of the history) of a report in a folder with a sweep of these settings."""
    make_sweep(folder, effects=keys.pop("effects", ROPE), **CALM, **keys)
    return report([folder]), rows.read_lines(folder / "history.jsonl", looks.is_line, [])


def report(folders):
    """The verdicts of a report of some folders, which their histories note."""
    ((plan, paths),) = rows.sweeps(folders)
    history, runs = looks.read(paths, plan), rows.load(paths)
    frame = verdicts.judge(runs, plan, history)
    looks.record(paths, plan, runs, frame, history)
    return frame


def shares_of(frame, key="share"):
    return pytest.approx([getattr(look, key) for look in frame.attrs["looks"]])


def test_each_report_adds_what_it_read_to_the_history(tmp_path):
    _, lines = look_again(tmp_path, seeds=3)
    assert len(lines) == 1 and lines[0]["arms"] == ["rope"] and lines[0]["looks"] == [3]
    assert lines[0]["runs"]["rope"] == [0, 1, 2] and lines[0]["metric"] == "final_val_loss"
    assert len(look_again(tmp_path, seeds=3)[1]) == 1  # it read nothing new
    assert len(look_again(tmp_path, seeds=3, margin=0.02)[1]) == 2


def test_more_seeds_after_a_report_are_a_look_that_nobody_planned(tmp_path):
    for seeds, shares in ((3, [0.9, 0]), (6, [0.9, 0.05, 0]), (9, [0.9, 0.05, 0.025, 0])):
        assert shares == shares_of(look_again(tmp_path, seeds=seeds)[0])
    assert shares_of(look_again(tmp_path / "new", seeds=6)[0]) == [0.9, 0]  # one planned look


def test_another_metric_margin_or_list_of_arms_leaves_its_trace(tmp_path):
    look_again(tmp_path, seeds=5)
    assert shares_of(look_again(tmp_path, seeds=5, metric="another")[0]) == [0.05, 0]
    margin, _ = look_again(tmp_path, seeds=5, margin=0.02)
    assert shares_of(margin) == [0.9, 0] and shares_of(margin, "tie_share") == [0.025, 0]
    effects = {"base": 0.0, "base-again": 0.0, "gqa": 0.0}
    assert look_again(tmp_path, effects=effects)[0].attrs["family"] == 2  # rope was there, too


def test_rows_in_another_folder_do_not_hide_a_look(tmp_path):
    look_again(tmp_path / "a", seeds=3)
    make_sweep(tmp_path / "b", seeds=6, effects=ROPE, **CALM)
    assert shares_of(report([tmp_path / "a", tmp_path / "b"])) == [0.9, 0.05, 0]
    assert len((tmp_path / "b/history.jsonl").read_text().splitlines()) == 1


def test_a_report_of_an_unfinished_sweep_spends_nothing(tmp_path):
    _, lines, _ = make_sweep(tmp_path, seeds=8, effects=ROPE, **CALM)
    for end in (2, 4, 6, 8):
        part = [line for line in lines if line["purpose"] != "report" or line["seed"] < end]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
        frame = report([tmp_path])
        assert (frame.verdict[0] == "better") == (end == 8)
    assert shares_of(frame) == [0.9, 0]


# ---------------------------------------------------------------- failure is an outcome


def test_an_arm_with_diverged_runs_is_never_better(tmp_path):
    """To drop those runs, and test the others, would call it better."""
    sweep, lines, _ = make_sweep(tmp_path, effects=ROPE, **CALM)
    two = with_runs(sweep, lines, "rope", lambda seed: DIVERGED if seed < 2 else {})
    rope = judge(sweep, two)[1]["rope"]
    assert (rope["verdict"], rope["reason"]) == ("undecided", "runs diverged")
    assert (rope["n"], rope["diverged"]) == (5, 2) and math.isnan(rope["difference"])
    survivors, control = reported(two, "rope")[2:], reported(two, "base", "base-again")
    assert stats.ttest_ind(survivors, control, equal_var=False).pvalue < 0.01
    assert judge(sweep, two + lines)[1]["rope"]["diverged"] == 2  # it stays a result
    everything = with_runs(sweep, lines, "rope", lambda seed: DIVERGED)
    assert judge(sweep, everything)[1]["rope"]["verdict"] == "worse"


def test_one_diverged_run_is_enough_even_where_ranks_say_better(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, seeds=12, effects=ROPE, **CALM)
    lines = with_runs(sweep, lines, "rope", lambda seed: DIVERGED if seed == 3 else {})
    rope = judge(sweep, lines)[1]["rope"]
    assert rope["p_holm"] < 0.05 and rope["verdict"] == "undecided"


def test_a_run_that_the_machine_killed_is_counted_apart(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, killed=("rope",), effects=ROPE, **CALM)
    rope = judge(sweep, lines)[1]["rope"]
    assert (rope["verdict"], rope["diverged"], rope["reason"]) == ("failed", 0, "runs failed")


# ---------------------------------------------------------------- the text


def test_a_verdict_that_does_not_hold_on_every_text_says_so(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, effects=ROPE, **CALM)
    rope = judge(sweep, lines)[1]["rope"]
    assert rope["text_low"] < rope["difference"] < rope["text_high"] < 0
    for line in lines:
        if line["arm"] == "rope" and line["purpose"] == "report":  # one scene makes the difference
            gain = np.zeros(len(line["blocks"]))
            gain[3] = -0.1 * len(gain)
            line["blocks"] = (np.array(line["blocks"]) + 0.13 + gain).tolist()
    rope = judge(sweep, lines)[1]["rope"]
    assert (rope["verdict"], rope["reason"]) == ("better", "not on every text")
    assert rope["text_high"] > 0


def test_fewer_than_50_blocks_give_no_interval_over_the_text(tmp_path):
    """Two blocks whose differences are alike would give one of +-0.001."""
    sweep, lines, _ = make_sweep(tmp_path, effects=ROPE, **CALM)
    for count, known in ((50, True), (49, False), (2, False), (0, False)):
        cut = [line | {"blocks": line["blocks"][:count]} for line in lines]
        assert math.isfinite(judge(sweep, cut)[1]["rope"]["text_low"]) == known


# ---------------------------------------------------------------- how many seeds


def test_more_seeds_are_as_many_as_the_power_needs(tmp_path):
    effects = ROPE | {"swiglu": -0.010}
    sweep, lines, _ = make_sweep(tmp_path, effects=effects, noise=0.01, seeds=5, **CALM)
    frame, found = judge(sweep, lines)
    row = found["swiglu"]
    assert row["verdict"] == "undecided" and 1 <= row["more_seeds"] < 300
    n = row["n"] + row["more_seeds"]
    z = stats.norm.isf(0.05 * 0.05 / 2 / 2)  # the first look beyond the plan, Holm's first step
    chance = stats.norm.sf(z - abs(row["difference"]) / (row["se"] * math.sqrt(5 / n)))
    assert chance == pytest.approx(0.8, abs=0.06)
    wide = judge(sweep | {"looks": [5, 60]}, lines)[1]["swiglu"]
    assert wide["more_seeds"] >= 55  # at least up to the next look
    assert frame.attrs["smallest_visible"] == pytest.approx(0.01 * 2.5, rel=0.5)


def test_the_power_to_differ_is_that_of_the_noncentral_t():
    chance = power.to_differ(2.0, 1.0, 10, 0.05)
    assert chance == pytest.approx(stats.nct.sf(stats.t.isf(0.025, 10), 10, 2.0))
