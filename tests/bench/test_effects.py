"""The analysis of a factorial against simulated runs whose effects are known."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from bench.ablation import design_report, effects, factorial, history, stats
from bench.ablation.losses import sort_rows

EFFECTS = {"a": -0.05, "b": 0.02, "c": 0.0, "d": 0.0, "e": 0.0}
PAIRS = {"a:b": -0.03, "c:d": 0.0}
SD = 0.008


def section(
    resolution=5,
    seeds=4,
    mains=EFFECTS,
    pairs=PAIRS,
    sd=SD,
    seed=0,
    text=False,
    diverged=(),
    **changed,
):
    """An analysed sweep. A run's loss is 2, plus half of each main effect times its level (-1 or
    1), plus a quarter of each interaction times both levels, plus noise."""
    random = np.random.default_rng(seed)
    design = factorial.fraction(len(mains), resolution)
    arms, rows = {}, []
    for place, levels in enumerate(design):
        cell = {factor: int(level > 0) for factor, level in zip(mains, levels, strict=True)}
        name = "+".join(factor for factor, level in cell.items() if level) or "base"
        arms[name] = {"cell": cell, "against": None, "config_hash": f"c{place}"}
        arms[name]["changes"] = {factor: 1 for factor, level in cell.items() if level}
        level = dict(zip(mains, levels, strict=True))
        loss = 2 + sum(effect / 2 * level[factor] for factor, effect in mains.items())
        for pair, effect in pairs.items():
            first, second = pair.split(":")
            loss += effect / 4 * level[first] * level[second]
        for number in range(seeds):
            rows.append(row(name, number, place, loss + random.normal(0, sd), text and random))
            if (name, number) in diverged:
                rows[-1] |= {"status": "diverged", "final_report": None}
    sweep = {"base": "base", "arms": arms, "metric": "final_val_loss", "margin": 0.01}
    sweep |= {"looks": [seeds], "chosen_lr": {}, "screening": False, "seeds": seeds} | changed
    runs = sort_rows(sweep, rows)
    analysis = stats.analyse(sweep, runs)
    return SimpleNamespace(sweep=sweep, runs=runs, analysis=analysis, rows=rows)


def row(name, number, place, loss, text):
    return {
        **{"arm": name, "seed": number, "lr": 1, "purpose": "report", "status": "done"},
        **{"code_hash": "code", "config_hash": f"c{place}", "final_report": loss},
        "best_report": loss,
        "blocks": list(loss + text.normal(0, 0.02, 32)) if text else None,
    }


def analysed(**given):
    part = section(**given)
    return effects.analyse(part.sweep, part.runs, part.analysis)


def verdicts(**given):
    return {one.arm: one for one in analysed(**given).verdicts}


# ---------------------------------------------------------------- numbers


def test_known_effects_are_found_without_noise():
    found = verdicts(sd=1e-9)
    assert list(found) == [*EFFECTS, *(":".join(pair) for pair in combinations(EFFECTS, 2))]
    for name, effect in (EFFECTS | PAIRS).items():
        assert found[name].mean == pytest.approx(effect, abs=1e-8)
    assert found["a"].n == found["a"].n_against == 32


@pytest.mark.slow
def test_intervals_cover_the_truth_95_times_in_100():
    """Also those of the effects alone. Without the interactions in the model they do not."""
    covered, alone = [], []
    truth = EFFECTS | dict.fromkeys((":".join(p) for p in combinations(EFFECTS, 2)), 0.0) | PAIRS
    a_alone = EFFECTS["a"] - PAIRS["a:b"] / 2
    for seed in range(80):
        found = analysed(seed=seed, seeds=2)
        covered += [one.low <= truth[one.arm] <= one.high for one in found.verdicts]
        low, high = found.alone["a"].interval()
        alone.append(low <= a_alone <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)
    assert np.mean(alone) == pytest.approx(0.95, abs=0.06)


def test_a_model_that_forgets_the_interaction_misses_the_effect_alone():
    """With a:b in the model a's effect on the base is -0.035; without it -0.05."""
    found = analysed(seeds=16)
    assert found.alone["a"].mean == pytest.approx(-0.035, abs=0.004)
    main = next(one for one in found.verdicts if one.arm == "a")
    assert main.mean == pytest.approx(-0.05, abs=0.003)
    low, high = found.alone["a"].interval()
    assert not low <= main.mean <= high


# ---------------------------------------------------------------- words


def test_the_words_of_a_factorial():
    found = verdicts(pairs=PAIRS | {"c:d": 0.02}, text=True)
    words = {name: one.word for name, one in found.items()}
    assert words["a"] == words["a:b"] == "better"
    assert words["b"] == words["c:d"] == "worse"
    assert words["c"] == words["d"] == words["e"] == "tie"
    assert found["a"].holds_on_text and found["a"].text_low < found["a"].mean < found["a"].text_high


def test_a_family_without_effects_makes_no_claim_in_95_sweeps_of_100():
    """The main effects are one family, and the interactions another."""
    none = dict.fromkeys(EFFECTS, 0.0)
    claims = {False: [], True: []}
    for seed in range(100):
        found = analysed(mains=none, pairs={}, seeds=2, seed=seed, margin=None)
        for kind in claims:
            of_kind = [one.word for one in found.verdicts if one.interaction == kind]
            claims[kind].append(bool({"better", "worse"} & set(of_kind)))
    for kind in claims:
        assert np.mean(claims[kind]) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 100)


def test_without_a_margin_there_is_no_tie_and_a_screening_only_ranks():
    assert "tie" not in {one.word for one in verdicts(margin=None).values()}
    words = {name: one.word for name, one in verdicts(screening=True).items()}
    assert words["a"] == "larger than the noise" and words["c"] == "not seen"


def test_a_mixed_effect_is_named():
    """At resolution III a = -b:d or the like: what is planted in the interaction shows in the main
    effect. The note of that effect names the interaction."""
    mains = dict.fromkeys(EFFECTS, 0.0)
    plain = analysed(resolution=3, mains=mains, pairs={"b:d": 0.04}, sd=1e-6)
    moved = [one for one in plain.verdicts if abs(one.mean) > 0.01]
    assert moved and all("b:d" in one.why or one.arm == "b:d" for one in moved)
    assert {one.arm for one in moved} != {"b:d"}
    assert plain.alone["a"] is None
    assert not any("mixed" in one.why for one in verdicts().values())


def test_a_cell_whose_runs_diverged_is_left_out_and_its_factors_are_not_better():
    name = "a+b+c+d+e"
    everything = dict(resolution="full", sd=1e-4)
    assert {verdicts(**everything)[arm].word for arm in ("a", "a:b")} == {"better"}
    diverged = [("a+b+c", 0), ("a+b+c", 2)]
    found = analysed(diverged=diverged, **everything)
    assert found.left_out == {"a+b+c": 2} and name not in found.left_out
    by_name = {one.arm: one for one in found.verdicts}
    assert by_name["a"].word == by_name["a:b"].word == "undecided"
    assert by_name["a"].why.startswith("2 runs diverged at its high level: a+b+c")
    assert by_name["b"].word == "worse" and by_name["a:d"].diverged == 0
    # The design is no longer orthogonal: differences of means are wrong, the model's are right.
    assert by_name["a"].mean == pytest.approx(-0.05, abs=1e-3)
    assert by_name["a:b"].mean == pytest.approx(-0.03, abs=1e-3)
    assert by_name["a"].n == 60 and by_name["a"].n_against == 64


def test_a_fraction_that_loses_a_cell_says_which_term_it_takes_as_nothing():
    found = verdicts(diverged=[("a+b", 1)])
    assert len(found) == 14 and "d:e" not in found
    assert all("mixed with" in one.why for one in found.values())


def test_an_unfinished_factorial_has_no_verdict():
    part = section()
    runs = sort_rows(part.sweep, part.rows[:-3])
    found = effects.analyse(part.sweep, runs, stats.analyse(part.sweep, runs))
    assert found.missing == 3
    assert {one.word for one in found.verdicts} == {"no verdict"}
    assert found.verdicts[0].why == "3 planned runs are missing"


def test_one_run_of_each_cell_of_a_saturated_design_has_no_verdict():
    found = analysed(seeds=1)
    assert {one.word for one in found.verdicts} == {"no verdict"}
    assert "estimate the noise" in found.verdicts[0].why
    assert np.isnan(found.se) and np.isfinite(list(found.contrasts.values())).all()
    assert design_report.runs_note(found) == ""


def test_the_time_of_a_step_is_a_geometric_mean_over_the_cells():
    """Each cell takes 1.2 times the base's time where a is high, and 0.9 times where b is."""
    part = section()
    cells, costs = effects.cells_of(part.sweep), {}
    for arm, cell in cells.items():
        ratio = 1.2 ** cell["a"] * 0.9 ** cell["b"]
        costs[arm] = {"step_ratio": {"ratio": ratio, "low": ratio / 1.02, "high": ratio * 1.02}}
    found = effects.analyse(part.sweep, part.runs, part.analysis, costs).step_ratios
    assert [found[name][0] for name in "abc"] == pytest.approx([1.2, 0.9, 1])
    # 15 of 16 cells with an error, each with a weight of 1/8; the base's time has none
    half = 1.02 ** (15**0.5 / 8)
    assert found["a"][1:] == pytest.approx((1.2 / half, 1.2 * half))
    del costs["a+b"]
    again = effects.analyse(part.sweep, part.runs, part.analysis, costs)
    assert again.step_ratios["a"] is None


# ---------------------------------------------------------------- beside one part at a time


def sections(seed=0, seeds=8, shared=4, pairs=PAIRS, off=0.0):
    """A factorial, and a sweep of one part at a time with 18 runs of the base, of which some are
    the factorial's. Its effects are those of the factorial alone, and of a by `off` more."""
    part = section(seed=seed, pairs=pairs)
    part.effects = effects.analyse(part.sweep, part.runs, part.analysis)
    random = np.random.default_rng(1000 + seed)
    base = 2 - sum(EFFECTS.values()) / 2 + sum(pairs.values()) / 4
    arms = {"base": (0, 0.0, 9), "base again": (0, 0.0, 9)}
    for place, (factor, effect) in enumerate(EFFECTS.items(), 100):
        mixed = sum(value / 2 for pair, value in pairs.items() if factor in pair.split(":"))
        arms[factor] = (place, effect - mixed + off * (factor == "a"), seeds)
    described, rows = {}, []
    for name, (place, effect, runs) in arms.items():
        described[name] = {"config_hash": f"c{place}", "against": "base", "changes": {}}
        described[name] |= {"again": True} if name == "base again" else {}
        described[name] |= {"changes": {name: 1}} if place else {}
        for number in range(runs):
            rows.append(row(name, number, place, random.normal(base + effect, SD), False))
    same = [each for each in part.rows if each["arm"] == "base"][:shared]
    rows = same + [each for each in rows if each["arm"] != "base" or each["seed"] >= shared]
    sweep = part.sweep | {"arms": described, "looks": [seeds], "seeds": seeds}
    runs = sort_rows(sweep, rows)
    single = SimpleNamespace(sweep=sweep, runs=runs, main=stats.analyse(sweep, runs))
    return part, single


def test_effects_stand_beside_those_of_one_part_at_a_time():
    part, single = sections()
    found = {factor: (one, pairs) for factor, one, pairs in effects.beside(part, single)}
    assert list(found) == list(EFFECTS)
    one, ((alone, gap), (average, _)) = found["a"]
    verdict = next(v for v in single.main.verdicts if v.arm == "a")
    assert (one.mean, *one.interval()) == pytest.approx((verdict.mean, verdict.low, verdict.high))
    assert alone.mean == part.effects.alone["a"].mean
    assert average.mean == part.effects.verdicts[0].mean
    assert gap.mean == alone.mean - one.mean and gap.p() > 0.05

    # Of 64 runs, those of the base weigh (2 + 4 * 2) / 64 in an effect alone and 2 / 64 in an
    # average; four of them are also among the 18 runs of the base of the other sweep.
    variance = part.effects.model.fit.scale
    for (effect, gap), weight in zip(found["a"][1], (10 / 64, 2 / 64), strict=True):
        both = 2 * 4 * weight / 18 * variance
        assert gap.se**2 == pytest.approx(effect.se**2 + one.se**2 - both)
    apart = {factor: pairs for factor, _, pairs in effects.beside(*sections(shared=0))}
    effect, gap = apart["b"][0]
    assert gap.se > effect.se


@pytest.mark.slow
def test_sweeps_that_agree_are_found_to_differ_5_times_in_100():
    gaps = [pairs[0][1] for seed in range(60) for *_, pairs in effects.beside(*sections(seed))]
    z = np.array([gap.mean / gap.se for gap in gaps])
    assert len(z) == 300 and z.std() == pytest.approx(1, abs=0.12)
    assert np.mean([gap.p() <= 0.05 for gap in gaps]) == pytest.approx(0.05, abs=0.035)


def test_sweeps_that_differ_are_found_to_and_an_interaction_moves_the_average():
    (_, _, pairs), *_ = effects.beside(*sections(off=0.04))
    assert all(gap.p() < 1e-3 for _, gap in pairs)
    (_, _, pairs), *_ = effects.beside(*sections(pairs={"a:b": -0.06}))
    assert pairs[0][1].p() > 0.05 and pairs[1][1].p() < 1e-3


def test_the_runs_that_one_part_at_a_time_takes():
    """An effect on average has the variance 4 / 64, alone 4 * 5 / 64, in units of a run's. With n
    runs of each of 5 parts and sqrt(5) n of the base it is (1 + 1 / sqrt(5)) / n."""
    assert effects.runs_one_by_one(5, 4 / 64) == 24 * 5 + 54  # 23 and 52 miss it by 0.0002
    assert effects.runs_one_by_one(5, 20 / 64) == 5 * 5 + 12
    for parts, variance in ((5, 4 / 64), (3, 0.1), (1, 0.02)):
        ideal = (1 + parts**0.5) ** 2 / variance
        assert ideal <= effects.runs_one_by_one(parts, variance) < ideal + 2 * parts + 2


def test_a_cell_is_not_compared_by_itself():
    part = section()
    assert not part.analysis.verdicts
    assert history.planned_runs(part.sweep, 4) == dict.fromkeys(part.sweep["arms"], 4)
