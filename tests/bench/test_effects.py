"""The analysis of a factorial against simulated runs whose effects are known."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from bench.ablation import effects, factorial, history, stats
from bench.ablation.losses import sort_rows

EFFECTS = {"a": -0.05, "b": 0.02, "c": 0.0, "d": 0.0, "e": 0.0}
PAIRS = {"a:b": -0.03, "c:d": 0.0}
SD = 0.008


def section(
    resolution=5, seeds=4, mains=EFFECTS, pairs=PAIRS, sd=SD, seed=0, diverged=(), **changed
):
    """An analysed sweep. A run's loss is 2, plus half of each main effect times its level (-1 or
    1), plus a quarter of each interaction times both levels, plus noise."""
    random = np.random.default_rng(seed)
    design = factorial.fraction(len(mains), resolution)
    arms, rows = {}, []
    for place, levels in enumerate(design):
        cell = {factor: int(level > 0) for factor, level in zip(mains, levels, strict=True)}
        name = "+".join(factor for factor, level in cell.items() if level) or "base"
        arms[name] = {"cell": cell, "against": None, "config_hash": f"c{place}", "changes": {}}
        level = dict(zip(mains, levels, strict=True))
        loss = 2 + sum(effect / 2 * level[factor] for factor, effect in mains.items())
        for pair, effect in pairs.items():
            first, second = pair.split(":")
            loss += effect / 4 * level[first] * level[second]
        for number in range(seeds):
            rows.append(row(name, number, place, loss + random.normal(0, sd), random))
            if (name, number) in diverged:
                rows[-1] |= {"status": "diverged", "final_report": None}
    sweep = {"base": "base", "arms": arms, "metric": "final_val_loss", "margin": 0.01}
    sweep |= {"looks": [seeds], "chosen_lr": {}, "screening": False, "seeds": seeds} | changed
    runs = sort_rows(sweep, rows)
    made = {"final_val_loss": stats.analyse(sweep, runs)}
    return SimpleNamespace(sweep=sweep, runs=runs, costs={}, analyses=made, rows=rows)


def row(name, number, place, loss, random):
    return {
        **{"arm": name, "seed": number, "lr": 1, "purpose": "report", "status": "done"},
        **{"code_hash": "code", "config_hash": f"c{place}", "final_report": loss},
        "best_report": loss,
        "blocks": list(loss + random.normal(0, 0.02, 32)),
    }


def verdicts(**given):
    return {one.arm: one for one in effects.analyse(section(**given)).verdicts}


# ---------------------------------------------------------------- numbers


def test_known_effects_are_found_without_noise():
    found = verdicts(sd=1e-9)
    assert list(found) == [*EFFECTS, *(":".join(pair) for pair in combinations(EFFECTS, 2))]
    for name, effect in (EFFECTS | PAIRS).items():
        assert found[name].mean == pytest.approx(effect, abs=1e-8)
    assert found["a"].n == found["a"].n_against == 32


def test_intervals_cover_the_truth_95_times_in_100():
    """Also those of the effects alone. Without the interactions in the model they do not."""
    covered, alone = [], []
    truth = EFFECTS | dict.fromkeys((":".join(p) for p in combinations(EFFECTS, 2)), 0.0) | PAIRS
    a_alone = EFFECTS["a"] - PAIRS["a:b"] / 2
    for seed in range(150):
        found = effects.analyse(section(seed=seed, seeds=2))
        covered += [one.low <= truth[one.arm] <= one.high for one in found.verdicts]
        low, high = found.alone["a"].interval()
        alone.append(low <= a_alone <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    assert np.mean(alone) == pytest.approx(0.95, abs=0.055)


def test_a_model_that_forgets_the_interaction_misses_the_effect_alone():
    """With a:b in the model a's effect on the base is -0.035; without it -0.05."""
    found = effects.analyse(section(seeds=16))
    assert found.alone["a"].mean == pytest.approx(-0.035, abs=0.004)
    main = next(one for one in found.verdicts if one.arm == "a")
    assert main.mean == pytest.approx(-0.05, abs=0.003)
    low, high = found.alone["a"].interval()
    assert not low <= main.mean <= high
