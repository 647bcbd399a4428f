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


def sweep(cells=FIVE, seeds=4, mains=EFFECTS, pairs=PAIRS, sd=0.008, seed=0, ends=None, **more):
    """(runs, plan). A run's loss is 2, plus half of each main effect times its level (-1 or 1),
    plus a quarter of each interaction times both levels, plus noise. ends: {(arm, seed): how it
    ends}."""
    random, arms, lines = np.random.default_rng(seed), {}, []
    for levels in sorted(cells, key=sum):
        level = dict(zip(mains, levels, strict=True))
        name = "+".join(factor for factor in level if level[factor] > 0) or "base"
        arms[name] = {"cell": {factor: int(value > 0) for factor, value in level.items()}}
        loss = 2 + sum(effect / 2 * level[factor] for factor, effect in mains.items())
        for pair, effect in pairs.items():
            loss += effect / 4 * np.prod([level[factor] for factor in pair.split(":")])
        for number in range(seeds):
            line = {"arm": name, "seed": number, "lr": 1, "purpose": "report", "status": "done"}
            line |= dict.fromkeys(rows.LOSSES.values(), loss + random.normal(0, sd))
            lines.append(line | (ends or {}).get((name, number), {}))
    plan = {"base": next(iter(arms)), "arms": arms, "margin": 0.01, "seeds": seeds} | more
    plan = rows.complete(plan)
    return rows.table(lines, plan), plan


DIVERGED = {"status": "diverged", "final_report": None}
STUCK = {"final_val_loss": 2.5, "final_report": 2.5}


def effects(**given):
    return factorial.effects(*sweep(**given)).set_index("name")


def test_known_effects_are_found_without_noise():
    frame = effects(sd=1e-9)
    assert list(frame.index) == [*EFFECTS, *map(":".join, combinations(EFFECTS, 2))]
    for name, effect in (EFFECTS | PAIRS).items():
        assert frame.difference[name] == pytest.approx(effect, abs=1e-8)
    assert frame.n["a"] == frame.n_control["a"] == 32
    assert frame.reset_index()[verdicts.COLUMNS].shape == (15, len(verdicts.COLUMNS))


def test_the_effect_alone_is_not_the_average():
    """With a:b in the model a's effect on the base is -0.035; on average it is -0.05."""
    a = effects(seeds=16).loc["a"]
    assert a.alone == pytest.approx(-0.035, abs=0.004)
    assert a.difference == pytest.approx(-0.05, abs=0.003)
    assert not a.alone_low <= a.difference <= a.alone_high


def test_the_verdicts_of_a_factorial():
    frame = effects(pairs=PAIRS | {"c:d": 0.02})
    expected = {"a": "better", "a:b": "better", "b": "worse", "c:d": "worse"}
    expected |= dict.fromkeys("cde", "tie")
    assert frame.verdict[list(expected)].to_dict() == expected
    assert "tie" not in set(effects(margin=None).verdict)
    screened = effects(screening=True).verdict
    assert screened["a"] == "larger than the noise" and screened["c"] == "not seen"


def test_a_mixed_effect_says_so():
    """At resolution III what is planted in an interaction shows in a main effect."""
    mains = dict.fromkeys(EFFECTS, 0.0)
    frame = effects(cells=THREE, mains=mains, pairs={"b:d": 0.04}, sd=1e-6)
    moved = frame[frame.difference.abs() > 0.01]
    assert list(moved.index) == ["a"] and moved.reason["a"] == "mixed with other effects"
    assert np.isnan(frame.alone["a"]) and not effects().reason.str.contains("mixed").any()


@pytest.mark.parametrize(("end", "key"), [(DIVERGED, "diverged"), (STUCK, "stuck")])
def test_a_factor_with_runs_that_do_not_learn_is_not_better(end, key):
    given = {"cells": FULL, "sd": 1e-4, "ngrams": {"trigrams": 2.4}}
    assert set(effects(**given).verdict[["a", "a:b"]]) == {"better"}
    frame = effects(**given, ends={("a+b+c", seed): end for seed in range(4)})
    assert set(frame.verdict[["a", "b", "e", "a:b"]]) == {"undecided"}
    assert frame.reason["a"] == ("runs diverged" if key == "diverged" else "runs did not learn")
    assert (frame[key]["a"], frame[key]["a:d"]) == (4, 0)
    assert (frame.n["a"], frame.n_control["a"]) == (64, 64)
    # The design is no longer orthogonal: differences of means are wrong, the model's are right.
    assert frame.difference[["a", "a:b"]].to_list() == pytest.approx([-0.05, -0.03], abs=1e-3)
    with_d = [arm for arm in sweep(cells=FULL)[1]["arms"] if "d" in arm]
    frame = effects(**given, ends={(arm, 0): end for arm in with_d})
    assert frame.verdict["d"] == "fails 16 of 64" and frame.verdict["b"] == "undecided"


def test_a_fraction_that_loses_a_cell_leaves_out_a_term():
    frame = effects(ends={("a+b", seed): DIVERGED for seed in range(4)})
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


def test_a_cell_is_not_compared_by_itself():
    runs, plan = sweep()
    assert verdicts.judge(runs, plan).empty
    assert looks.planned_runs(plan, 4) == dict.fromkeys(plan["arms"], 4)
