"""The verdicts of a sweep against simulated sweeps whose truth is known. A simulation of a wrong
statistic stands beside the right one, so that the check is seen to tell them apart."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from bench.ablation import significance, stats
from bench.ablation.caveats import caveats
from helpers.sweeps import make_sweep


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """multipletests collects garbage at each call: a tenth of a second, in simulations a thousand
    times over."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def by_arm(analysis):
    return {verdict.arm: verdict for verdict in analysis.verdicts if not verdict.interaction}


def analyse(sweep, rows, costs=None, measure=None):
    return stats.analyse(sweep, stats.sort_rows(sweep, rows), costs, measure)


def sweeps(n, arms=7, number=1000, seed=0, effect=0.0, sds=1.0, base_sd=1.0):
    """Losses (arm, base) [n, number, arms] of simulated sweeps; the arms of a sweep share its base
    and the weather of a seed."""
    random = np.random.default_rng(seed)
    weather, base = random.normal(0, 1, (n, number, 1)), random.normal(0, base_sd, (n, number, 1))
    return weather + random.normal(0, 1, (n, number, arms)) * sds + effect, np.broadcast_to(
        weather + base, (n, number, arms)
    )


def words(x, base, margin, looks):
    """What each arm of each sweep is called, [number, arms], when an arm gets no more seeds once it
    is decided. Holm's method makes no p-value smaller, so a sweep in which none is at most ALPHA
    makes no claim and is not judged."""
    test = significance.compare(x, base, margin, looks, len(looks))
    found = np.full(test["mean"].shape, "no claim", dtype="U9")
    for place in np.flatnonzero((test["p_differ"] <= significance.ALPHA).any(1)):
        parts = (test[key][place] for key in ("p_differ", "p_tie", "mean"))
        found[place] = significance.judge(*parts)[0]
    return found


def claims(found):
    return np.isin(found, ["better", "worse"])


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("sd", [0.3, 3.0])
def test_the_interval_covers_the_truth_95_times_in_100(n, sd):
    x, base = sweeps(n, arms=1, number=20000, effect=0.4, sds=sd)
    test = significance.compare(x, base, 1.0, [n], 1)
    assert np.mean((test["low"] <= 0.4) & (test["high"] >= 0.4)) == pytest.approx(0.95, abs=0.005)
    half = 1.96 * test["sd"] / np.sqrt(n)  # the normal distribution's interval, which is too short
    assert np.mean(abs(test["mean"] - 0.4) <= half) < 0.94


@pytest.mark.parametrize("looks", [[5], [3], [3, 5, 8], [2, 3, 4, 5, 6, 8, 10]])
@pytest.mark.parametrize("sds", [1.0, np.geomspace(0.2, 5, 7)])
def test_no_claim_about_arms_that_equal_the_base_in_95_sweeps_of_100(looks, sds):
    x, base = sweeps(max(looks), number=4000, sds=sds)
    assert claims(words(x, base, 0.0, looks)).any(1).mean() <= 0.05 + 2 * np.sqrt(
        0.05 * 0.95 / 4000
    )


def test_without_the_corrections_there_are_false_claims():
    """What the test above would see if Holm, or the correction for the looks, were missing."""
    x, base = sweeps(10, number=1000)
    single = scipy_stats.ttest_1samp(x - base, 0).pvalue
    assert (single <= 0.05).any(1).mean() > 0.15
    peeked = significance.compare(x, base, 0.0, [2, 3, 4, 5, 6, 8, 10], 1)[
        "p_differ"
    ]  # seven looks that call themselves one
    assert (
        np.mean([claims(significance.judge(p, np.ones(7), np.ones(7))[0]).any() for p in peeked])
        > 0.10
    )


def test_a_claim_is_never_taken_back_at_a_later_look():
    x, base = sweeps(10, number=500, effect=-1.0)
    early, late = (significance.compare(x, base, 0.0, counts, 3) for counts in ([4], [4, 7, 10]))
    assert (late["p_differ"] <= early["p_differ"]).all() and (late["p_tie"] <= early["p_tie"]).all()
    assert (late["p_differ"] < early["p_differ"]).any()


def test_a_planted_effect_is_found_and_an_equal_arm_is_not_called_better():
    x, base = sweeps(
        5, number=500, sds=0.008, base_sd=0.006, effect=np.array([-0.05, 0, 0, 0, 0, 0, 0.05])
    )  # sd of a difference .01
    found = words(x, base, 0.006, [5])
    assert (found[:, 0] == "better").mean() > 0.98 and (found[:, 6] == "worse").mean() > 0.98
    assert claims(found[:, 1:6]).any(1).mean() <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 500)


def test_an_equal_arm_ties_and_one_at_the_margin_does_not():
    x, base = sweeps(
        30, number=1000, arms=2, effect=np.array([0.0, 1.0])
    )  # margin 1, sd of a difference 1.41
    ties = significance.compare(x, base, 1.0, [30], 1)["p_tie"] <= significance.ALPHA
    assert ties[:, 0].mean() > 0.95
    assert ties[:, 1].mean() == pytest.approx(0.05, abs=0.015)
    peeked = significance.compare(x, base, 1.0, [10, 20, 30], 3)["p_tie"] <= significance.ALPHA
    assert peeked[:, 1].mean() <= 0.065


def test_the_tests_are_the_textbook_s():
    x, base = np.array([1.0, 1.2, 0.9, 1.4, 1.1]), np.array([1.3, 1.35, 1.3, 1.5, 1.45])
    test = significance.compare(x, base, 0.1, [5], 1)
    reference = scipy_stats.ttest_rel(x, base)
    assert (test["p"], test["p_differ"]) == pytest.approx((reference.pvalue,) * 2)
    assert (test["low"], test["high"]) == pytest.approx(tuple(reference.confidence_interval(0.95)))
    above, below = (
        scipy_stats.ttest_rel(x, base - 0.1, alternative="greater").pvalue,
        scipy_stats.ttest_rel(x, base + 0.1, alternative="less").pvalue,
    )
    assert test["p_tie"] == pytest.approx(max(above, below))
    assert significance.judge([0.01, 0.04, 0.03, 0.9], [1, 1, 1, 0.02], [1, 1, -1, 1]) == (
        ["worse", "undecided", "undecided", "tie"],
        pytest.approx([0.04, 0.09, 0.09, 0.9]),
    )


def test_sign_flips_have_a_floor_and_see_what_is_there():
    for n in (3, 5, 6, 10):
        assert significance.sign_flip(np.arange(1.0, n + 1)) == pytest.approx(2 / 2**n)
    assert significance.sign_flip(np.array([1.0, -1.1, 0.9, -0.8, 1.2, -1.2])) > 0.5
    random = np.random.default_rng(1)
    assert (
        np.mean([significance.sign_flip(random.normal(0, 1, 7)) <= 0.05 for _ in range(300)]) < 0.09
    )


def test_the_bootstrap_is_there_from_ten_seeds_on(tmp_path):
    for seeds, there in ((9, False), (10, True)):
        found = by_arm(analyse(*make_sweep(tmp_path / str(seeds), seeds=seeds)[:2]))["rope"]
        assert (found.bootstrap is not None) == there
    low, high = found.bootstrap
    assert (
        low < found.mean < high
        and (low, high) == pytest.approx((found.low, found.high), abs=0.006)
        and (low, high) != (found.low, found.high)
    )


def test_a_whole_sweep(tmp_path):
    sweep, rows, costs = make_sweep(tmp_path)
    analysis = analyse(sweep, rows, costs)
    found = by_arm(analysis)
    assert {arm: verdict.word for arm, verdict in found.items()} == {
        "base-again": "noise",
        "rope": "better",
        "alibi": "better",
        "rmsnorm": "tie",
        "swiglu": "undecided",
        "untied": "worse",
        "gqa": "undecided",
        "post": "failed",
    }
    base = [
        row["final_val_loss"] for row in rows if row["arm"] == "base" and row["purpose"] == "report"
    ]
    assert analysis.base_sd == analysis.margin == pytest.approx(np.std(base, ddof=1))
    rope = [
        row["final_val_loss"] for row in rows if row["arm"] == "rope" and row["purpose"] == "report"
    ]
    assert found["rope"].mean == pytest.approx(np.mean(np.subtract(rope, base)))
    assert found["rope"].correlation == pytest.approx(np.corrcoef(rope, base)[0, 1])
    assert (
        found["rope"].p < found["rope"].p_holm == pytest.approx(7 * found["rope"].p)
    )  # seven claims, one of them on an arm that failed
    assert analysis.floor is found["base-again"] and np.isnan(analysis.floor.p_holm)
    assert "step 412" in found["post"].why and found["post"].seeds == []
    assert found["gqa"].seeds == [1, 2, 3, 4, 5]  # the stale row's .5 is nowhere
    assert str(found["gqa"]).startswith("undecided (about ") and found["gqa"].more >= 1
    assert dict(stats.undecided(sweep, rows)) == {arm: found[arm].more for arm in ("swiglu", "gqa")}


def test_the_last_row_of_a_run_counts_and_others_are_left_out(tmp_path):
    sweep, rows, _ = make_sweep(tmp_path, stale=False)
    before = by_arm(analyse(sweep, rows))["rope"].mean
    rope = next(row for row in rows if row["arm"] == "rope" and row["purpose"] == "report")
    for change, stale, failed in (
        ({"lr": 2}, 1, 0),
        ({"seed": 9, "code_hash": "other"}, 1, 0),
        ({"seed": 9, "config_hash": "other"}, 1, 0),
        ({"seed": 9, "final_val_loss": float("nan")}, 0, 1),
    ):
        changed = rows + [rope | {"final_val_loss": 9.9} | change]
        runs = stats.sort_rows(sweep, changed)
        assert (len(runs.stale), len(runs.failed) - 5) == (stale, failed)
        assert by_arm(analyse(sweep, changed))["rope"].mean == before
    assert (
        by_arm(analyse(sweep, rows + [rope | {"final_val_loss": 9.9, "code_hash": "other"}]))[
            "rope"
        ].mean
        == before
    )  # a stale row hides no valid one
    assert by_arm(analyse(sweep, rows + [rope | {"final_val_loss": 9.9}]))["rope"].mean > before + 1
    assert by_arm(analyse(sweep, rows + [rope | {"status": "failed", "reason": "killed"}]))[
        "rope"
    ].seeds == [2, 3, 4, 5]


def test_one_seed_gives_no_verdict(tmp_path):
    analysis = analyse(*make_sweep(tmp_path, seeds=1, stale=False)[:2])
    assert (
        {verdict.word for verdict in analysis.verdicts} == {"undecided", "noise", "failed"}
        and np.isnan(analysis.margin)
        and analysis.visible is None
    )
    assert all(verdict.more == 1 for verdict in analysis.verdicts if verdict.word == "undecided")
    assert by_arm(analysis)["rope"].mean < 0 and np.isnan(by_arm(analysis)["rope"].low)


def test_nothing_is_decided_before_the_first_look(tmp_path):
    sweep, rows, _ = make_sweep(tmp_path, seeds=6, looks=[6], stale=False)
    early = [row for row in rows if row["seed"] != 6]
    assert by_arm(analyse(sweep, rows))["rope"].word == "better"
    rope = by_arm(analyse(sweep, early))["rope"]
    assert (
        rope.word == "undecided" and rope.more >= 1 and rope.p < 0.01 and "5 of the 6" in rope.why
    )
    # a failed seed has been tried: the look is taken with what there is
    failed = early + [
        row | {"status": "failed", "reason": "killed"} if row["arm"] == "rope" else row
        for row in rows
        if row["seed"] == 6
    ]
    assert by_arm(analyse(sweep, failed))["rope"].word == "better"
    # two planned looks cost a factor of two
    both = by_arm(analyse(sweep | {"looks": [5, 6]}, rows))["rope"]
    first = by_arm(analyse(sweep | {"looks": [5, 6]}, early))["rope"]
    assert first.p_holm == pytest.approx(2 * 7 * rope.p) and both.p_holm <= first.p_holm


def test_arms_without_noise_do_not_break_anything(tmp_path):
    sweep, rows, _ = make_sweep(tmp_path, noise=0.0, stale=False, failed=())
    found = by_arm(analyse(sweep, rows))
    assert found["rope"].word == "better" and found["rope"].p_holm < 1e-6
    same = [
        row | {"final_val_loss": 1.75} if row["arm"] in ("rmsnorm", "base") else row for row in rows
    ]
    found = by_arm(analyse(sweep | {"margin": 0.01}, same))["rmsnorm"]
    assert found.word == "tie" and found.mean == 0 and found.p == 1


def test_small_but_certain_is_better_and_says_so(tmp_path):
    sweep, rows, _ = make_sweep(tmp_path, noise=1e-4, margin=0.05)
    found = by_arm(analyse(sweep, rows))["swiglu"]
    assert found.word == "better" and found.why == "smaller than the margin"


def test_a_ladder_compares_each_rung_with_the_one_before(tmp_path):
    sweep, rows, _ = make_sweep(
        tmp_path,
        effects={"base": 0.0, "rope": -0.1, "swiglu": -0.16},
        arms={"swiglu": {"against": "rope"}},
        failed=(),
        stale=False,
    )
    found = by_arm(analyse(sweep, rows))
    assert (
        found["swiglu"].against == "rope"
        and found["swiglu"].mean == pytest.approx(-0.06, abs=0.02)
        and found["swiglu"].word == "better"
    )


def test_the_interaction_is_what_two_swaps_do_beyond_each_alone(tmp_path):
    effects = {"base": 0.0, "rope": -0.1, "swiglu": -0.05, "rope+swiglu": -0.3}
    sweep, rows, _ = make_sweep(
        tmp_path,
        effects=effects,
        arms={"rope+swiglu": {"interaction_of": ["rope", "swiglu"]}},
        failed=(),
        stale=False,
        seeds=8,
    )
    analysis = analyse(sweep, rows)
    contrast = analysis.verdicts[-1]
    assert contrast.interaction and contrast.word == "better"
    ends = {
        arm: np.array(
            [
                row["final_val_loss"]
                for row in rows
                if row["arm"] == arm and row["purpose"] == "report"
            ]
        )
        for arm in effects
    }
    differences = ends["rope+swiglu"] - ends["rope"] - ends["swiglu"] + ends["base"]
    assert contrast.mean == pytest.approx(differences.mean()) and contrast.sd == pytest.approx(
        differences.std(ddof=1)
    )
    assert contrast.mean == pytest.approx(-0.15, abs=0.03)
    assert contrast.p_holm == pytest.approx(contrast.p * 1, rel=4)  # in the family of four


def test_equal_time_reads_the_slower_arm_where_the_faster_ends():
    def row(curve):
        return {"curve": curve, "final_val_loss": curve[-1][1], "best_val_loss": 1.0}

    runs = stats.Runs(
        {
            "slow": {1: row([[0, 4.0], [100, 2.0]])},
            "base": {1: row([[0, 4.0], [50, 3.0], [100, 2.5]])},
            "unpriced": {1: row([[0, 4.0]])},
        }
    )
    costs = {
        arm: {"milliseconds_per_step": {"median": cost}}
        for arm, cost in (("slow", 20.0), ("base", 10.0))
    }
    seeds, x, reference = stats.pairs(runs, "slow", "base", "equal_time", costs)
    assert (seeds, x, reference) == (
        [1],
        [3.0],
        [2.5],
    )  # base ends at 1 s, where the slow arm is at its step 50
    assert [
        found.tolist() for found in stats.pairs(runs, "base", "slow", "equal_time", costs)[1:]
    ] == [[2.5], [3.0]]
    assert stats.pairs(runs, "unpriced", "base", "equal_time", costs)[0] == []


def test_more_seeds_are_as_many_as_the_power_needs():
    from statsmodels.stats.power import TTestPower

    needed = TTestPower().solve_power(effect_size=0.8, alpha=0.05, power=0.8)
    assert significance.more_seeds(0.8, 1.0, None, 5, 1, 1) == int(np.ceil(needed)) - 5
    assert significance.more_seeds(0.8, 1.0, None, 5, 7, 2) > significance.more_seeds(
        0.8, 1.0, None, 5, 1, 1
    )
    assert (
        significance.more_seeds(0.0, 1.0, None, 5, 1, 1) is None
        and significance.more_seeds(0.0, 1.0, 1.0, 5, 1, 1) < 10
        and significance.more_seeds(5.0, 1.0, None, 5, 1, 1) == 1
    )
    assert significance.smallest_visible(1.0, 5, 1, 1) == pytest.approx(
        TTestPower().solve_power(nobs=5, alpha=0.05, power=0.8), rel=0.01
    )
    assert significance.smallest_visible(1.0, 1, 1, 1) is None


CLEAN = {
    "effects": {"base": 0.0, "base-again": 0.0, "rope": -0.1},
    "failed": (),
    "stale": False,
    "seeds": 6,
    "margin": 0.02,
}


@pytest.fixture
def said(tmp_path):
    """The caveats of a synthetic sweep as one text. `row_of` and `cost_of` change rope's rows and
    costs, `again` is the time per step of the base's second copy, `load` the machine's."""

    def make(again=36.0, load=0.1, row_of=None, cost_of=None, **keys):
        sweep, rows, costs = make_sweep(tmp_path, **keys)
        for cost in costs.values():
            cost["load_average"] = load
        if "base-again" in costs:
            costs["base-again"]["milliseconds_per_step"]["median"] = again
        rows = [row | row_of if row_of and row["arm"] == "rope" else row for row in rows]
        if cost_of:
            costs["rope"] |= cost_of
        runs = stats.sort_rows(sweep, rows)
        return "\n".join(caveats(sweep, runs, costs, stats.analyse(sweep, runs, costs)))

    return make


def test_a_sweep_with_many_faults_has_many_caveats(said):
    text = said()
    for words in (
        "5 failed runs: post seed 1 2 3 4 5 (the loss is not finite at step 412)",
        "1 stale row left out: gqa seed 6",
        "cannot fall below 0.0625",
        "These arms overfit",
        "untied (at 6",
        "edge of the grid, so a better one may lie outside: untied (2 x)",
        "within 0.5 %: untied (+0.80 %)",
        "one standard deviation of the base's runs",
        "spread over seeds more than twice as much as the base: untied",
    ):
        assert words in text, words


def test_a_clean_sweep_has_no_caveat(said):
    assert said(**CLEAN) == ""


CHANGES = {  # of the clean sweep -> what must be said then
    "the same model, but their times per step differ by +25%": {"again": 45.0},
    "The machine was busy": {"load": 3.0},
    "not re-tuned": {"lr_grid": [1]},
    "may stop early. It decides at 4, 8 and 12 seeds, and each p-value is multiplied by the number"
    " of planned looks, 3": {"looks": [4, 8, 12]},
    "too few seeds: 3": {"seeds": 3},
    "With one seed there is no interval": {"seeds": 1},
    "Nothing was matched": {"match": "none"},
    "costs of these arms were not measured: base, base-again and rope": {"costs": False},
    "no second copy of the base": {"effects": {"base": 0.0, "rope": -0.1}},
    "The best loss is chosen on the split": {"metric": "best_val_loss"},
    "No learning rate has been chosen yet": {"chosen_lr": {}},
    "The base differs from its second copy by +0.5": {
        "effects": CLEAN["effects"] | {"base-again": 0.5}
    },
    "not paired batch by batch and may see another number of tokens: rope": {
        "arms": {"rope": {"changes": {"batch_size": 4}}}
    },
    "different hardware: H200 and Xeon": {"row_of": {"hardware": "H200"}},
    "of these pairs were made on different hardware: rope seed 1": {"row_of": {"hardware": "H200"}},
    "The costs were measured on different hardware": {"cost_of": {"hardware": "H200"}},
    "measured with other code than the sweep's": {"cost_of": {"code_hash": "old"}},
    "in closed form": {"cost_of": {"peak_memory": "closed form"}},
}


@pytest.mark.parametrize("words", CHANGES)
def test_caveats_are_computed_from_the_data(said, words):
    assert words in said(**CLEAN | CHANGES[words])
