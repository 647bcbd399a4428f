"""
How good the predictions for a new setting are, over simulated parts whose truth is known:

    PYTHONPATH=.:tests python tests/helpers/simulate_settings.py

writes the tables of bench/results/simulation_settings.md between its paragraphs. The functions that
judge the real settings judge the simulated ones.
"""

import itertools
from dataclasses import dataclass
from unittest import mock

import numpy as np

from bench.ablation import effects, predictions
from common.commands import ROOT
from helpers.simulate import page, table

PAGE = ROOT / "bench/results/simulation_settings.md"
STUDIES = 60  # of PARTS parts, for each figure
PARTS = 8
NOISE = 0.02  # of a run, in log worth
OF_HALF = 0.005  # of one half of the validation text beside the other
BASE_RUNS = 5
RATES = np.log([0.7, 1.0, 1.4])  # of an arm, over the base's best
END = np.log(4)  # of the curve: a worth beyond it is censored


@dataclass
class World:
    """How parts differ between settings, and how runs behave. Everything is in log worth."""

    name: str
    shape: str = "normal"  # of the deviations between settings
    parts: int = PARTS
    means: float = 0.12  # standard deviation between parts
    tau: float = 0.08  # median standard deviation between settings
    steep: bool = False  # the loss rises fast below the best rate, which differs between settings
    diverged: float = 0.0  # chance that an arm diverges in a setting
    curve_end: float = END
    noise: float = NOISE


WORLDS = (
    World("normal"),
    World("heavy tails", shape="heavy"),
    World("bimodal", shape="bimodal"),
    World("steep left side", steep=True),
    World("5 % diverge", diverged=0.05),
    World("worths end at 1.25", curve_end=np.log(1.25)),
    World("runs with 0.1", noise=0.1),
    World("two parts", parts=2),
    World("one part", parts=1),
    World("parts that do nothing", means=0.01, tau=0.02),
)


def deviations(random, shape, tau, size):
    """Deviations [size] of a part between settings with a standard deviation of tau."""
    if shape == "heavy":
        return tau * random.standard_t(3, size) / np.sqrt(3)
    if shape == "bimodal":
        return tau * (random.choice([-1, 1], size) * 0.97 + 0.24 * random.standard_normal(size))
    return tau * random.standard_normal(size)


def draw(random, world, settings):
    """The true log worths [parts, settings + 1] at the best rate; -inf where an arm diverges. The
    last setting is the new one."""
    means = random.normal(0, world.means, world.parts)
    taus = world.tau * np.exp(random.normal(0, 0.7, world.parts))
    shape = (world.parts, settings + 1)
    truth = means[:, None] + deviations(random, world.shape, taus[:, None], shape)
    return np.where(random.random(shape) < world.diverged, -np.inf, truth)


def measured(random, world, truth, runs):
    """(log worths as they are measured, their errors), [parts, settings] each."""
    base = random.normal(0, world.noise / np.sqrt(BASE_RUNS), truth.shape[1])
    if not world.steep:
        y = truth + base + random.normal(0, world.noise / np.sqrt(runs), truth.shape)
        return y, np.full(truth.shape, world.noise * np.sqrt(1 / runs + 1 / BASE_RUNS))

    # One run at the base's rate, or three at RATES, and the vertex of their quadratic.
    rates = RATES[[1]] if runs == 1 else RATES
    away = rates - random.normal(0, 0.15, truth.shape)[..., None]  # from the arm's best rate
    falls = np.where(away < 0, 2.0, 0.3) * away**2
    y = truth[..., None] - falls + random.normal(0, world.noise, falls.shape)
    halves = [y + random.normal(0, OF_HALF, y.shape) for _ in range(2)]
    if runs == 1:
        return halves[1][..., 0] + base, np.full(
            truth.shape, world.noise * np.sqrt(1 + 1 / BASE_RUNS)
        )
    _, slope, curvature = quadratic(halves[0])
    curvature = np.minimum(curvature.mean(0), -0.05)  # pooled over the arms of a setting
    place = np.clip(-slope / (2 * curvature), RATES[0], RATES[2])
    level, slope, _ = quadratic(halves[1], curvature)
    value = level + slope * place + curvature * place**2
    lever = 1 / 3 + place**2 / (2 * RATES[2] ** 2)
    return value + base, world.noise * np.sqrt(lever + 1 / BASE_RUNS)


def quadratic(y, curvature=None):
    """(level, slope, curvature) of y [..., 3] at RATES, by least squares."""
    if curvature is None:
        coefficients = np.linalg.solve(np.vander(RATES, 3), y[..., None])[..., 0]
        curvature = coefficients[..., 0]
    rest = y - np.expand_dims(np.broadcast_to(curvature, y.shape[:-1]), -1) * RATES**2
    slope = rest @ RATES / (RATES**2).sum()
    return rest.mean(-1), slope, curvature


def tables_of(world, y, se):
    """A table of worths of `y` [parts, settings]."""
    part, setting = np.indices(y.shape)
    low = -END
    high = world.curve_end
    return {
        "part": part.ravel(),
        "setting": setting.ravel(),
        "log_worth": np.clip(y, low, high).ravel(),
        "se": se.ravel(),
        "censored": ((y > high).astype(int) - (y < low)).ravel(),
    }


def study(random, world, settings, runs):
    """[Prediction] of the parts of one study in a new setting, beside the truth there."""
    truth = draw(random, world, settings)
    y, se = measured(random, world, truth[:, :settings], runs)
    new = tables_of(world, truth[:, settings:], np.zeros((world.parts, 1)))
    return predictions.predict(tables_of(world, y, se), new)


def scores(world, settings, runs, studies=STUDIES, seed=0):
    """predictions.scores of many studies. A study takes the place of a setting."""
    found = []
    random = np.random.default_rng(seed)
    for number in range(studies):
        predicted = study(random, world, settings, runs)
        for each in predicted:
            each.setting = str(number)
        found += predicted
    return predictions.scores(found)


def row_of(world, settings, runs, studies):
    """A row of a table: of a world, of studies with so many settings and runs."""
    found = scores(world, settings, runs, studies * PARTS // world.parts)
    called = f"{100 * found['called'] / found['n']:.0f}"
    wrong = float(found["wrong"]) if found["called"] else "none called"
    brier = f"{found['brier']:.3f}"
    return [world.name, settings, runs, float(found["coverage"]), wrong, called, brier]


def tables(studies):
    """The tables of simulation_settings.md, in its order."""
    headings = ["world", "settings", "runs", "coverage", "wrong", "called", "Brier"]
    for worlds in (WORLDS[:3], WORLDS[3:]):
        cases = itertools.product(worlds, (4, 8, 16), (1, 3))
        yield table(headings, [row_of(*case, studies) for case in cases])
    with mock.patch.object(effects, "LEAST_SETTINGS", 2):
        cases = itertools.product((*WORLDS[:3], WORLDS[4], WORLDS[8]), (2, 3), (1,))
        yield table(headings, [row_of(*case, studies) for case in cases])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), tables(STUDIES)), encoding="utf-8")
