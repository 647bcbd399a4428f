"""The verdicts of a sweep: on synthetic sweeps whose truth is known, and on cases that a simpler
rule gets wrong. Where that rule is short, the test computes it, too, and shows that it fails."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_ind

from bench.ablation import comparisons, contrasts, estimates, power, rows, verdicts, worth
from bench.ablation.contrasts import compare, contrast, fisher, holm, pooled_variance
from helpers.sweeps import CALM, ROPE, judge, judged, make_sweep, reported, with_runs, write_lines

DIVERGED = {"status": "diverged", "final_report": None}


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


def test_holm_is_the_library_s():
    p = np.random.default_rng(2).uniform(0, 0.1, (5, 6))
    for line, corrected in zip(p, holm(p), strict=True):
        assert corrected == pytest.approx(multipletests(line, 0.05, "holm")[1])
    wider = multipletests([*p[0], 1, 1], 0.05, "holm")[1][:6]
    assert holm(p[0], family=8) == pytest.approx(wider)


def test_a_difference_needs_both_tests_and_enough_runs():
    """Four runs that agree by chance: Welch's test alone would decide. And 4 of 12 arms."""
    control = stats.norm.ppf(np.linspace(0.02, 0.98, 24))
    calm, wide = np.full(4, 1.4) + [0, 0, 0.01, -0.01], np.array([-6, 6, 7, 8])
    for group in (calm, wide):
        tests = [stats.ttest_ind(group, control, equal_var=equal).pvalue for equal in (0, 1)]
        assert compare([group, control], 1)[0] == pytest.approx(max(tests))
        ties = [ttost_ind(group, control, -2, 2, usevar=var)[0] for var in ("unequal", "pooled")]
        assert compare([group, control], 2)[1] == pytest.approx(max(ties))
    assert stats.ttest_ind(calm, control, equal_var=False).pvalue < 1e-5
    assert compare([calm, control], 1, least=5)[:2] == (1, 1)
    assert [power.least_runs(family) for family in (6, 7, 25, 26)] == [5, 8, 8, 12]


def test_fisher_s_test_is_the_library_s_where_an_arm_fails_more_often():
    p = stats.fisher_exact([[3, 5], [1, 39]]).pvalue
    assert fisher(3, 8, 1, 40) == p and fisher(4, 40, 3, 8) == 1
    assert fisher(np.array([3, 0]), 8, 1, 40) == pytest.approx([p, 1])


def test_a_sweep(tmp_path):
    sweep, lines, prices = make_sweep(tmp_path)
    frame, found, facts = judge(sweep, lines, prices.values())
    assert list(frame.columns) == comparisons.COLUMNS
    words = ["better", "better", "undecided", "worse", "worse", "fails 5 of 5", "noise"]
    assert frame.verdict.to_list() == words
    control, rope = reported(lines, "base", "base-again"), reported(lines, "rope")
    assert facts.base_mean == pytest.approx(control.mean())  # the half that chose nothing
    assert (facts.base_n, facts.family) == (13, 6)
    whole = reported(lines, "base", "base-again", key="final_val_loss")
    assert facts.base_whole == pytest.approx(whole.mean())
    assert found["rope"]["difference"] == pytest.approx(rope.mean() - control.mean())
    p, student = (stats.ttest_ind(rope, control, equal_var=var).pvalue for var in (False, True))
    assert found["rope"]["p"] == pytest.approx(p)
    assert found["rope"]["p_both"] == pytest.approx(max(p, student))
    swaps = frame[frame.kind == "swap"]
    assert swaps.p_holm.to_list() == pytest.approx(multipletests(swaps.p_both, method="holm")[1])
    assert (facts.margin, facts.margin_source) == (0.0052, sweep["margin_source"])
    assert found["gqa"]["n"] == 5  # the stale row's .5 is nowhere

    (swiglu,) = frame[frame.verdict == "undecided"].to_dict("records")
    assert swiglu["arm"] == "swiglu" and swiglu["seeds_to_decide"] >= 5


def test_a_command_that_names_fewer_arms_makes_no_verdict_surer(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, noise=0.02)
    found = judge(sweep, lines)[1]
    for arm in ("rope", "alibi", "swiglu", "gqa", "post"):
        names = ("base", "base-again", arm)
        fewer = sweep | {"arms": {name: sweep["arms"][name] for name in names}}
        _, alone, facts = judge(fewer, lines)
        assert facts.family == 6 and alone[arm]["p_holm"] >= found[arm]["p_holm"]


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
    frame, found, facts = judged(tmp_path, seeds=8, effects=effects, **CALM, noise=noise)
    assert found["same"]["verdict"] == verdict
    assert (facts.tie_power > 0.9) == (verdict == "tie")


@pytest.mark.parametrize("screening", [False, True])
def test_one_seed_gives_no_verdict_and_no_number_of_seeds(tmp_path, screening):
    frame, _, facts = judged(tmp_path, seeds=1, stale=False, screening=screening)
    swaps = frame[frame.kind == "swap"]
    assert set(swaps.verdict) == {"no verdict"} and swaps.seeds_to_decide.isna().all()
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
    found = judged(tmp_path, noise=1e-4, margin=0.05, **CALM)[1]
    for arm, word in (("swiglu", "better"), ("gqa", "worse")):
        assert (found[arm]["verdict"], found[arm]["reason"]) == (word, "smaller than the margin")


def test_a_ladder_compares_each_rung_with_the_one_before(tmp_path):
    effects = {"base": 0.0, "rope": -0.1, "swiglu": -0.16}
    rung = {"swiglu": {"against": "rope"}}
    swiglu = judged(tmp_path, effects=effects, arms=rung, **CALM)[1]["swiglu"]
    assert (swiglu["against"], swiglu["n_control"], swiglu["verdict"]) == ("rope", 5, "better")
    sweep, lines, _ = make_sweep(tmp_path / "cut", effects=effects, arms=rung, **CALM)
    for runs in (0, 1):  # of the rung below
        kept = [line for line in lines if line["arm"] != "rope" or line["seed"] < runs]
        assert judge(sweep, kept)[1]["swiglu"]["verdict"] == "no verdict"
    assert swiglu["difference"] == pytest.approx(-0.06, abs=0.02) and math.isnan(swiglu["worth"])


def test_a_screening_says_on_which_side_an_arm_lies_or_not_seen(tmp_path):
    """Or that its runs fail, in however few runs of however many arms."""
    effects = ROPE | {"gqa": 0.0, "alibi": 0.2, "post": 0.2}
    sweep, lines, _ = make_sweep(tmp_path, 3, effects, screening=True, stale=False)
    rope = judge(sweep, [line for line in lines if line["arm"] != "alibi"])[1]["rope"]
    assert rope["p_holm"] == pytest.approx(4 * rope["p"])  # alibi has yet to run
    _, found, facts = judge(sweep, lines)
    visible = facts.smallest_visible / found["gqa"]["se"]  # whose groups are the median arm's
    assert power.to_differ(visible, 1, found["gqa"]["df"], 0.05 / 4) == pytest.approx(0.8, abs=0.01)
    words = {arm: row["verdict"] for arm, row in found.items()}
    assert words["rope"] == "better, by more than the noise" and words["gqa"] == "not seen"
    assert words["alibi"] == "worse, by more than the noise"
    assert estimates.of_part(found["rope"])["verdict"] == words["alibi"]
    assert words["post"] == "fails 3 of 3" and words["base-again"] == "noise"
    two = [line for line in lines if line["seed"] < 2]
    assert judge(sweep, two)[1]["post"]["verdict"] == "fails 2 of 2"


NGRAMS = {"ngrams": {"trigrams": 1.9, "best": [5, 1.8]}}  # GPT-2 of these sweeps: 1.75
STUCK = {"final_val_loss": 1.95, "final_report": 1.93}


def failing(sweep, lines, arm, count, change):
    """The row of an arm whose first runs end as `change` says."""
    lines = with_runs(lines, arm, lambda seed: change if seed < count else {})
    return judge(sweep, lines)[1]["rope"], lines


@pytest.mark.parametrize(("change", "key"), [(DIVERGED, "diverged"), (STUCK, "stuck")])
def test_an_arm_whose_runs_do_not_learn_is_never_better(tmp_path, change, key):
    """To drop those runs, and test the others, would call it better."""
    sweep, lines, _ = make_sweep(tmp_path, seeds=8, effects=ROPE, **CALM, **NGRAMS)
    rope, changed = failing(sweep, lines, "rope", 2, change)
    reason = "runs diverged" if key == "diverged" else "runs did not learn"
    assert (rope["verdict"], rope["reason"]) == ("undecided", reason)
    assert (rope["n"], rope[key], rope["diverged"] + rope["stuck"]) == (8, 2, 2)
    learned, control = reported(changed, "rope")[2:], reported(lines, "base", "base-again")
    test = stats.ttest_ind(learned, control, equal_var=False)
    assert rope["p"] == pytest.approx(test.pvalue) and test.pvalue < 0.01
    assert rope["difference"] == pytest.approx(learned.mean() - control.mean())
    assert rope["text_low"] < rope["difference"] < rope["text_high"]
    p = stats.fisher_exact([[2, 6], [0, len(control)]]).pvalue
    assert (rope["p_not_learned"], rope["p_both"]) == pytest.approx((p, p))

    worst, changed = failing(sweep, lines, "rope", 6, change)
    assert worst["verdict"] == "fails 6 of 8" and worst["p_holm"] < 0.05
    if change is DIVERGED:  # it stays a result
        assert judge(sweep, changed + lines)[1]["rope"]["diverged"] == 6
    assert failing(sweep, lines, "rope", 8, change)[0]["verdict"] == "fails 8 of 8"


@pytest.mark.parametrize(("effect", "verdict"), [(-0.1, "better"), (0.1, "undecided")])
def test_beside_a_base_that_fails_an_arm_can_only_be_better(tmp_path, effect, verdict):
    effects = ROPE | {"rope": effect}
    sweep, lines, _ = make_sweep(tmp_path, seeds=8, effects=effects, **CALM, **NGRAMS)
    rope, changed = failing(sweep, lines, "base", 1, STUCK)
    curve = worth.curve_of(rows.table(changed, sweep))
    learned = reported(changed, "base", "base-again")
    assert curve.means[2] == pytest.approx(np.sort(learned)[:-1].mean())
    reason = "runs of the other side did not learn"
    assert (rope["verdict"], rope["reason"], rope["p_not_learned"]) == (verdict, reason, 1)
    assert math.isnan(rope["seeds_to_decide"])
    tied, _ = failing(sweep, lines, "base", 0, STUCK)
    assert tied["verdict"] == ("better" if effect < 0 else "worse")


@pytest.mark.parametrize(
    ("trigrams", "best", "wanted"),
    [(1.9, 1.8, (False, False)), (1.9, 1.7, (False, True)), (1.7, 1.6, (True, False))],
)
def test_the_base_is_held_against_n_grams(tmp_path, trigrams, best, wanted):
    ngrams = {"trigrams": trigrams, "best": [5, best]}
    sweep, lines, _ = make_sweep(tmp_path, seeds=8, effects=ROPE, **CALM, ngrams=ngrams)
    frame, found, facts = judge(sweep, lines)
    assert (facts.screening, facts.marked) == wanted
    verdict = "better, by more than the noise" if wanted[0] else "better"
    assert (found["rope"]["verdict"], found["rope"]["stuck"]) == (verdict, 0)


def test_a_run_that_the_machine_killed_is_counted_apart(tmp_path):
    rope = judged(tmp_path, killed=("rope",), effects=ROPE, **CALM)[1]["rope"]
    assert (rope["verdict"], rope["diverged"], rope["reason"]) == ("failed", 0, "runs failed")


def test_a_verdict_that_does_not_hold_on_every_text_says_so(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, effects=ROPE, **CALM)
    rope = judge(sweep, lines)[1]["rope"]
    arms = (("rope",), ("base", "base-again"))
    arm, control = (reported(lines, *names, key="blocks").mean(0) for names in arms)
    half = 1.96 * (arm - control).std() / math.sqrt(len(arm))
    ends = (rope["difference"] - half, rope["difference"] + half)
    assert (rope["text_low"], rope["text_high"]) == pytest.approx(ends, abs=1e-4)
    for line in lines:
        if line["arm"] == "rope" and line["purpose"] == "report":  # one scene makes the difference
            gain = np.zeros(len(line["blocks"]))
            gain[3] = -0.1 * len(gain)
            line["blocks"] = (np.array(line["blocks"]) + 0.13 + gain).tolist()
    rope = judge(sweep, lines)[1]["rope"]
    assert (rope["verdict"], rope["reason"]) == ("better", "not on every text")
    assert rope["text_high"] > 0
    rope = judge(sweep | {"margin": 0.5}, lines)[1]["rope"]
    assert rope["reason"] == "smaller than the margin; not on every text"


def test_fewer_than_50_blocks_give_no_interval_over_the_text(tmp_path):
    """Two blocks whose differences are alike would give one of +-0.001."""
    sweep, lines, _ = make_sweep(tmp_path, effects=ROPE, **CALM)
    for count, known in ((50, True), (49, False), (2, False), (0, False)):
        cut = [line | {"blocks": line["blocks"][:count]} for line in lines]
        assert math.isfinite(judge(sweep, cut)[1]["rope"]["text_low"]) == known


def test_the_seeds_to_decide_are_as_many_as_the_power_needs(tmp_path):
    effects = ROPE | {"swiglu": -0.010}
    _, found, facts = judged(tmp_path, effects=effects, noise=0.01, seeds=5, **CALM)
    row = found["swiglu"]
    seeds = row["seeds_to_decide"]
    assert row["verdict"] == "undecided" and 5 <= seeds < 300
    noise = power.welch(row["sd"], seeds, facts.base_sd, seeds + 2)
    z = stats.norm.isf(0.05 / 2)  # in a sweep of its own
    assert stats.norm.sf(z - abs(row["difference"]) / noise[0]) == pytest.approx(0.8, abs=0.06)
    few = judged(tmp_path, effects=effects, noise=0.01, seeds=4, margin=0.1, **CALM)
    assert math.isnan(few[2].smallest_visible) and math.isnan(few[2].tie_power)
    assert few[1]["swiglu"]["seeds_to_decide"] >= 5
    sd = np.median([found[arm]["sd"] for arm in ("rope", "swiglu")])
    noise = power.welch(sd, 5, facts.base_sd, facts.base_n)
    chance = power.to_differ(facts.smallest_visible, *noise, 0.05 / 2)
    assert chance == pytest.approx(0.8, abs=0.01)


def test_the_power_is_that_of_the_noncentral_t_and_a_tie_decides_too():
    chance = power.to_differ(2.0, 1.0, 10, 0.05)
    assert chance == pytest.approx(stats.nct.sf(stats.t.isf(0.025, 10), 10, 2.0))
    noise_of = lambda seeds: ((5 / seeds) ** 0.5, 200 * seeds)
    seeds = 5 * ((stats.norm.isf(0.05) + stats.norm.isf(0.2)) / (1 - 0.5)) ** 2
    assert power.seeds_to_decide(0.5, noise_of, 1.0, 1) == pytest.approx(seeds, abs=2)  # a tie


def test_a_verdict_is_of_the_runs_that_were_planned(tmp_path):
    """Word and interval: seeds that were added to an arm later move neither."""
    sweep, lines, _ = make_sweep(tmp_path, seeds=8, effects=ROPE, **CALM)
    planned, _ = verdicts.judge(rows.load(tmp_path), sweep)
    rope = next(line for line in lines if line["arm"] == "rope" and line["purpose"] == "report")
    more = [rope | {"seed": seed, "final_report": 9.9} for seed in range(100, 104)]
    write_lines(tmp_path, [*lines, *more])
    assert verdicts.judge(rows.load(tmp_path), sweep)[0].equals(planned)


def test_a_run_that_diverged_does_not_rescue_an_arm():
    """One of five runs diverged, and the others are clearly worse; or clearly better."""
    p, p_tie, direction = contrasts.outcome(1e-6, 0.01, np.array([0.05, -0.05]), (1, 5, 0, 5))
    assert p[0] == 1e-6 and p[1] == 1.0
    assert (p_tie == 1).all() and (direction > 0).all()
    p, _, _ = contrasts.outcome(1e-6, 0.01, np.array([0.05]), (1, 5, 3, 5))
    assert p[0] == 1.0  # more of the base's runs diverged
    p, _, _ = contrasts.outcome(1e-6, 0.01, np.array([0.05]), (1, 5, 2, 20))
    assert p[0] == 1e-6  # more, but a smaller share
    assert contrasts.outcome(1.0, 0.01, np.array([0.0]), (0, 5, 1, 5))[1] == 1  # no tie
