"""The analysis of factorials against simulated runs whose effects are known."""

from itertools import combinations, product

import numpy as np
import pytest

from bench.ablation import factorial, looks, rows, verdicts

EFFECTS = {"a": -0.05, "b": 0.02, "c": 0.0, "d": 0.0, "e": 0.0}
PAIRS = {"a:b": -0.03, "c:d": 0.0}
FULL = list(product((-1, 1), repeat=5))
FIVE = [levels for levels in FULL if np.prod(levels) == -1]  # resolution V
THREE = [(*x, -x[0] * x[1], -x[0] * x[2]) for x in product((-1, 1), repeat=3)]  # resolution III


def row(arm, seed, loss, **more):
    return {
        **{"arm": arm, "seed": seed, "lr": 1, "purpose": "report", "status": "done"},
        **dict.fromkeys(rows.LOSSES.values(), loss),
        **more,
    }


def sweep(
    cells=FIVE, seeds=4, mains=EFFECTS, pairs=PAIRS, sd=0.008, seed=0, blocks=0, diverged=(), **more
):
    """(runs, plan). A run's loss is 2, plus half of each main effect times its level (-1 or 1),
    plus a quarter of each interaction times both levels, plus noise."""
    random, arms, lines, prices = np.random.default_rng(seed), {}, [], []
    for levels in sorted(cells, key=sum):
        level = dict(zip(mains, levels, strict=True))
        name = "+".join(factor for factor in level if level[factor] > 0) or "base"
        arms[name] = {"cell": {factor: int(value > 0) for factor, value in level.items()}}
        loss = 2 + sum(effect / 2 * level[factor] for factor, effect in mains.items())
        for pair, effect in pairs.items():
            loss += effect / 4 * np.prod([level[factor] for factor in pair.split(":")])
        for number in range(seeds):
            line = row(name, number, loss + random.normal(0, sd))
            line["blocks"] = list(loss + random.normal(0, 0.02, blocks))
            gone = {"status": "diverged", "final_report": None}
            lines.append(line | (gone if (name, number) in diverged else {}))
        # A cell takes 1.2 times the base's time where a is high, and 0.9 times where b is.
        ratio = 1.2 ** (level["a"] > 0) * 0.9 ** (level["b"] > 0)
        limits = {"ratio": ratio, "low": ratio / 1.02, "high": ratio * 1.02}
        prices.append({"arm": name, "parameters": 1, "step_ratio": limits})
    plan = {"base": next(iter(arms)), "arms": arms, "margin": 0.01, "seeds": seeds} | more
    plan = rows.complete(plan)
    return rows.table(lines, plan, prices), plan


def effects(**given):
    return factorial.effects(*sweep(**given)).set_index("name")


# ---------------------------------------------------------------- a factorial


def test_known_effects_are_found_without_noise():
    frame = effects(sd=1e-9)
    assert list(frame.index) == [*EFFECTS, *map(":".join, combinations(EFFECTS, 2))]
    for name, effect in (EFFECTS | PAIRS).items():
        assert frame.difference[name] == pytest.approx(effect, abs=1e-8)
    assert frame.n["a"] == frame.n_control["a"] == 32
    assert frame.reset_index()[verdicts.COLUMNS].shape == (15, len(verdicts.COLUMNS))


@pytest.mark.slow
def test_intervals_cover_the_truth_95_times_in_100():
    """Also those of the effects alone. Without the interactions in the model they do not."""
    covered, alone = [], []
    truth = dict.fromkeys(map(":".join, combinations(EFFECTS, 2)), 0.0) | EFFECTS | PAIRS
    for seed in range(400):
        frame = effects(seed=seed, seeds=2)
        covered += [line.low <= truth[line.Index] <= line.high for line in frame.itertuples()]
        low, high = frame.loc["a", ["alone_low", "alone_high"]]
        alone.append(low <= EFFECTS["a"] - PAIRS["a:b"] / 2 <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)
    assert np.mean(alone) == pytest.approx(0.95, abs=0.06)


def test_the_effect_alone_is_not_the_average():
    """With a:b in the model a's effect on the base is -0.035; on average it is -0.05."""
    a = effects(seeds=16).loc["a"]
    assert a.alone == pytest.approx(-0.035, abs=0.004)
    assert a.difference == pytest.approx(-0.05, abs=0.003)
    assert not a.alone_low <= a.difference <= a.alone_high


def test_the_verdicts_of_a_factorial():
    frame = effects(pairs=PAIRS | {"c:d": 0.02}, blocks=64)
    expected = {"a": "better", "a:b": "better", "b": "worse", "c:d": "worse"}
    expected |= dict.fromkeys("cde", "tie")
    assert frame.verdict[list(expected)].to_dict() == expected
    a = frame.loc["a"]
    assert a.text_low < a.difference < a.text_high < 0
    assert "tie" not in set(effects(margin=None).verdict)
    screened = effects(screening=True).verdict
    assert screened["a"] == "larger than the noise" and screened["c"] == "not seen"


def test_a_family_without_effects_makes_no_claim_in_95_sweeps_of_100():
    """The main effects are one family, and the interactions another."""
    none, claims = dict.fromkeys(EFFECTS, 0.0), []
    for seed in range(40):
        frame = effects(mains=none, pairs={}, seeds=2, seed=seed, margin=None)
        claimed = frame.verdict.isin(["better", "worse"])
        claims.append([claimed[frame.kind == kind].any() for kind in ("effect", "interaction")])
    assert (np.mean(claims, 0) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 40)).all()


def test_a_mixed_effect_says_so():
    """At resolution III what is planted in an interaction shows in a main effect."""
    mains = dict.fromkeys(EFFECTS, 0.0)
    frame = effects(cells=THREE, mains=mains, pairs={"b:d": 0.04}, sd=1e-6)
    moved = frame[frame.difference.abs() > 0.01]
    assert list(moved.index) == ["a"] and moved.reason["a"] == "mixed with other effects"
    assert np.isnan(frame.alone["a"]) and not effects().reason.str.contains("mixed").any()


def test_a_cell_whose_runs_diverged_is_left_out_and_its_factors_are_not_better():
    complete = effects(cells=FULL, sd=1e-4)
    assert set(complete.verdict[["a", "a:b"]]) == {"better"}
    frame = effects(cells=FULL, sd=1e-4, diverged=[("a+b+c", 0), ("a+b+c", 2)])
    assert set(frame.verdict[["a", "a:b"]]) == {"undecided"} and frame.verdict["b"] == "worse"
    assert frame.reason["a"] == "runs diverged at its high level"
    assert (frame.diverged["a"], frame.diverged["a:d"]) == (2, 0)
    # The design is no longer orthogonal: differences of means are wrong, the model's are right.
    assert frame.difference[["a", "a:b"]].to_list() == pytest.approx([-0.05, -0.03], abs=1e-3)
    assert (frame.n["a"], frame.n_control["a"]) == (60, 64)


def test_a_fraction_that_loses_a_cell_leaves_out_a_term():
    frame = effects(diverged=[("a+b", 1)])
    assert len(frame) == 14 and "d:e" not in frame.index
    assert frame.reason.str.contains("mixed").all()


def test_an_unfinished_or_saturated_factorial_has_no_verdict():
    runs, plan = sweep()
    frame = factorial.effects(runs[:-3], plan)
    assert set(frame.verdict) == {"no verdict"}
    assert set(frame.reason) == {"planned runs are missing"}
    frame = effects(seeds=1)
    assert set(frame.verdict) == {"no verdict"} and frame.se.isna().all()
    assert frame.reason.str.contains("estimate the noise").all()
    assert np.isfinite(frame.difference).all()
    assert factorial.effects(runs[:0], plan).empty


def test_the_time_of_a_step_is_a_geometric_mean_over_the_cells():
    runs, plan = sweep()
    model = factorial.model_at(factorial.cells_of(plan), verdicts.losses_of(runs, "loss"))
    ratios = [factorial.step_ratio(model, name, runs) for name in "abc"]
    assert [ratio[0] for ratio in ratios] == pytest.approx([1.2, 0.9, 1])
    half = 1.02 ** (15**0.5 / 8)  # 15 of 16 cells with an error, each with a weight of 1/8
    assert ratios[0][1:] == pytest.approx((1.2 / half, 1.2 * half), rel=1e-2)
    runs.loc[runs.arm == "a+b", "step_ratio"] = np.nan
    assert np.isnan(factorial.step_ratio(model, "a", runs)).all()


def test_a_cell_is_not_compared_by_itself():
    runs, plan = sweep()
    assert verdicts.judge(runs, plan).empty
    assert looks.planned_runs(plan, 4) == dict.fromkeys(plan["arms"], 4)
