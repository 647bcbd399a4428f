"""
The worths of all parts in all settings, from their files alone: settings.json, rows.jsonl and
costs.jsonl in the folder of each setting.

The worth of a part is a multiple of tokens: without it, a model needs so many times the tokens. In
a setting it is read off the curve of the base, at the loss of the arm. Where the arm takes the part
out, the worth of the part is the inverse.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

from bench.ablation.arms import BASE
from bench.ablation.rows import cost_of, is_cost
from bench.ablation.worth import DRAWS, Curve, Z
from bench.settings import rates
from bench.settings.setting import current_rows
from common import files
from training.run_folder import read_rows

NEAR = (math.log(0.7), math.log(1.4))  # the rates among which an arm's best one is sought
AT_BEST = 0.01  # a log rate that differs less from the log of r* is r*, rounded


@dataclass
class Measured:
    """One setting as it was measured."""

    name: str
    facts: dict  # of settings.json
    rows: list  # current rows, without failed ones
    costs: dict = field(default_factory=dict)  # {arm: {cost: its value}}; a step time is relative

    @property
    def admitted(self):
        return bool((self.facts["admission"] or {}).get("admitted"))

    def cost(self, part, key):
        """A cost with a part over the cost without it; nan if it was not measured."""
        if part not in self.costs or BASE not in self.costs:
            return math.nan
        ratio = self.costs[part][key] / self.costs[BASE][key]
        return 1 / ratio if self.facts["arms"][part]["taken_out"] else ratio

    def points(self, arm, half):
        """[(log of the rate over r*, loss on a half of the text)] of an arm at the full tokens,
        within a factor of two of r*."""
        points = []
        for row in self.rows:
            if row["arm"] == arm and row["purpose"] in ("rate", "base", "arm"):
                x = math.log(row["learning_rate"] / self.facts["best_rate"])
                if abs(x) <= math.log(2.05):
                    points.append((x, math.inf if row["status"] == "diverged" else row[half]))
        return points

    def curve_rows(self):
        """{multiple of the tokens: [loss on the reported half]} of the base at r*."""
        losses = {}
        for row in self.rows:
            if row["purpose"] in ("base", "curve") and row["status"] == "done":
                losses.setdefault(row["multiple"], []).append(row[rates.REPORTED])
        return losses

    @cached_property
    def stage(self):
        """In an admitted setting: (the base's tokens over those at which it passes the trigrams; 1
        where its curve ends and the true number is larger, -1 where it is smaller, else 0)."""
        curve = Curve(self.curve_rows())
        trigrams = self.facts["admission"]["trigrams"]
        log_share, _, beyond = log_worth_at(curve, np.zeros(len(curve.grid)), trigrams, 0)
        return math.exp(-log_share), -beyond


@dataclass
class Worth:
    """The worth of a part in one setting, as its logarithm."""

    part: str
    setting: str
    log_worth: float
    se: float
    censored: int  # 1: it is above log_worth, where the curve ends; -1: below; 0: measured
    runs: int


# ---------------------------------------------------------------- reading


def load(folder):
    """[Measured] of the settings below a folder, by their names."""
    measured = []
    for path in sorted(Path(folder).glob("*/settings.json")):
        facts = files.read_json(path, "move it away: bench/ablate.py writes another one")
        arms = facts["arms"]
        rows = current_rows(path.parent, arms)
        costs = {}
        for row in read_rows(path.with_name("costs.jsonl"), is_cost):
            arm = arms.get(row["arm"], {})
            is_timed = row["step_ratio"] or row["arm"] == BASE
            if is_timed and arm.get("code_hash") == row.get("code_hash"):
                costs[row["arm"]] = cost_of(row, is_base=row["arm"] == BASE)
        measured.append(Measured(path.parent.name, facts, list(rows.values()), costs))
    return measured


def first_pass(measured):
    """A Measured setting without the runs of its second pass."""
    rows = [row for row in measured.rows if row["purpose"] != "arm" or row["multiple"] == 1]
    return replace(measured, rows=rows)


def at_best_rate(measured):
    """A Measured setting without the runs at other rates than r*."""
    best = measured.facts["best_rate"]
    rows = [row for row in measured.rows if abs(math.log(row["learning_rate"] / best)) < AT_BEST]
    return replace(measured, rows=rows)


# ---------------------------------------------------------------- worths


def worths_of(measured):
    """[Worth] of the parts that have run in an admitted setting."""
    part_points = {}  # {part: its points on the reported half}, of the parts that have run
    for name, arm in measured.facts["arms"].items():
        if arm["part"]:
            points = measured.points(name, rates.REPORTED)
            if points:
                part_points[name] = points
    is_first_pass = all(len({x for x, _ in points}) == 1 for points in part_points.values())
    if is_first_pass:  # each part ran at r* alone: then the base counts at r* alone, too
        measured = at_best_rate(measured)
    base_points = measured.points(BASE, rates.REPORTED)
    curvatures = {}  # {half: its curvature, or None}
    for half in (rates.CHOOSING, rates.REPORTED):
        curves = [measured.points(name, half) for name in (BASE, *part_points)]
        curvatures[half] = rates.common_curvature(curves)
    noise = noise_of(measured, base_points, part_points, curvatures[rates.REPORTED])
    base_loss, base_share = best_of(measured, BASE, base_points, curvatures)
    curve, curve_errors = curve_at(measured, base_loss, noise, base_share)
    found = []
    for name, points in part_points.items():
        loss, share = best_of(measured, name, points, curvatures)
        error = noise * math.sqrt(share)
        log_worth, se, censored = log_worth_at(curve, curve_errors, loss, error)
        if measured.facts["arms"][name]["taken_out"]:
            log_worth = -log_worth
            censored = -censored
        found.append(
            Worth(
                part=name,
                setting=measured.name,
                log_worth=log_worth,
                se=se,
                censored=censored,
                runs=len(points),
            )
        )
    return found


def best_of(measured, name, points, curvatures):
    """(loss at the best rate, its share of a run's variance) of an arm."""
    choosing = measured.points(name, rates.CHOOSING)
    place = rates.best_place(choosing, curvatures[rates.CHOOSING], *NEAR)
    if place is None or not rates.before_divergence(points):
        return math.inf, 0.0
    return rates.value_at(points, curvatures[rates.REPORTED], place)


def noise_of(measured, base_points, part_points, curvature):
    """The standard deviation of a run's loss, pooled over the base, its curve and the arms. Since
    the runs are few, it is multiplied by the ratio of the 97.5 % quantiles of t and normal."""
    curves = [base_points, *part_points.values()]
    groups = [rates.residuals(points, curvature) for points in curves]
    for multiple, losses in measured.curve_rows().items():
        if multiple != 1:
            groups.append((float(np.var(losses) * len(losses)), len(losses) - 1))
    squares = sum(square for square, _ in groups)
    degrees = sum(degree for _, degree in groups)
    if curvature is not None:
        degrees -= 1  # it was fitted to all of them
    return math.sqrt(squares / degrees) * stdtrit(degrees, 0.975) / Z if degrees else math.nan


def curve_at(measured, base_loss, noise, base_share):
    """(the base's Curve, with base_loss at the full tokens; the standard error of its loss at each
    point of its grid [STEPS + 1])."""
    losses = measured.curve_rows()
    losses[1.0] = [base_loss]
    curve = Curve(losses)
    shares = [base_share if k == 1 else 1 / len(losses[k]) for k in curve.multiples]
    errors = noise * np.sqrt(shares)[:, None]  # [points, 1]
    random = np.random.default_rng(0)
    drawn = curve.means + errors * random.standard_normal((len(errors), DRAWS))
    return curve, curve.losses(drawn).std(axis=1)


def log_worth_at(curve, curve_errors, loss, error):
    """(log worth, its standard error, censored) of an arm with a loss that has an error."""
    first = curve.loss_at(curve.multiples[0])
    last = curve.loss_at(curve.multiples[-1])
    slope = (first - last) / math.log(curve.multiples[-1] / curve.multiples[0])
    if loss >= first:
        return math.log(curve.multiples[0]), math.hypot(error, curve_errors[0]) / slope, -1
    if loss <= last:
        return math.log(curve.multiples[-1]), math.hypot(error, curve_errors[-1]) / slope, 1
    worth = float(curve.multiple(np.array([loss]), curve.means)[0])
    step = 0.1  # of the log multiple, for the slope at this place
    low = max(worth * math.exp(-step), curve.multiples[0])
    high = min(worth * math.exp(step), curve.multiples[-1])
    slope = (curve.loss_at(low) - curve.loss_at(high)) / math.log(high / low)
    error = math.hypot(error, np.interp(worth, curve.grid, curve_errors))
    return math.log(worth), error / max(slope, 1e-9), 0


def table(measured, held_out=False):
    """{column: [values]} of all worths, for effects.fit, and the list of Worth: of the planned
    settings, or of those that are held out for the test."""
    chosen = [each for each in measured if each.facts["held_out"] == held_out]
    found = [worth for each in chosen if each.admitted for worth in worths_of(each)]
    names = ("part", "setting", "log_worth", "se", "censored")
    return {name: [getattr(worth, name) for worth in found] for name in names}, found
