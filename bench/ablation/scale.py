"""
Design `scale`: the same arms at several sizes. Each size is a sweep of its own, in its own folder,
with its own base, control group, curve and margin; its tokens are in proportion to its parameters.

The effect of an arm is fitted against the logarithm of the base's training compute by least squares
(statsmodels), weighted by the numbers of runs. The slope is a contrast of independent groups of
runs, the arm's and the control group's at each size, and is tested like any other
(significance.py). Holm's method corrects for the arms.

- grows, fades: the slope is not zero, and the fitted effect is larger, smaller, at the largest size
  than at the smallest.
- changes sign: the slope is not zero, and the arm helps at one end and hurts at the other.
- holds: over the whole range of sizes the effect changes by less than the margin.
- cannot tell: neither is shown.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import statsmodels.api as sm

from bench.ablation.history import control_group, judged_arms, planned_runs
from bench.ablation.losses import Losses
from bench.ablation.settings import variant_config
from bench.ablation.significance import ALPHA, Contrast, contrast, holm, share_of
from common import files
from parts import costs

FILE = "scale.json"  # in the folder of a scale: {"sizes": [folder of each]}
LEAST_SIZES = 3


def folders_of(folder):
    """The folders of the sizes of a scale, the smallest first; [] for another folder."""
    path = Path(folder) / FILE
    if not path.exists():
        return []
    return [Path(folder) / name for name in files.read_json(path, "run the scale again")["sizes"]]


# ---------------------------------------------------------------- the analysis


@dataclass
class Slope:
    """An arm's effect against compute."""

    arm: str
    word: str  # grows | holds | fades | changes sign | cannot tell
    effects: list  # of Contrast, at each size
    mean: float  # nats per factor of ten of compute
    low: float
    high: float
    p: float
    p_looks: float  # corrected for the looks alone, as is that of a tie
    p_tie_looks: float
    line: tuple  # fitted effects at the smallest and at the largest size
    why: str = ""
    p_holm: float = math.nan  # corrected for the looks and the arms, as is that of a tie
    p_tie: float = math.nan
    p_page: float = math.nan  # corrected for all that the page claims
    test: Contrast | None = None  # of the slope, not corrected


@dataclass
class Scale:
    """The slopes of all arms over the sizes of a scale."""

    names: list  # of the sizes
    flops: np.ndarray  # [sizes] of the base's training
    parameters: list  # of the base, at each size
    margin: float  # the change over the range of sizes that counts; nan: none
    slopes: list


def training_flops(sweep):
    """(FLOPs of a run of the base, its parameters)."""
    values = sweep["base_values"]
    config = variant_config(values)
    tokens = values["max_iters"] * values["batch_size"] * values["gradient_accumulation_steps"]
    tokens *= config.block_size
    per_token = costs.training_flops_per_token(config, config.block_size)
    return per_token * tokens, costs.parameters(config)


def analyse(sections):
    """The Scale of sections that are the sizes of one scale."""
    flops, parameters = zip(*(training_flops(section.sweep) for section in sections), strict=True)
    margins = [section.main.margin for section in sections]
    scale = Scale(
        names=[section.folders[0].name for section in sections],
        flops=np.array(flops, float),
        parameters=list(parameters),
        margin=float(np.mean(margins)),  # nan if a size has none
        slopes=[],
    )
    judged = [judged_arms(section.sweep) for section in sections]
    arms = [arm for arm in judged[0] if all(arm in others for others in judged)]
    scale.slopes = [fit(arm, sections, np.log10(flops), scale.margin) for arm in arms]
    tested = [one for one in scale.slopes if one.effects]
    corrected = [holm([getattr(one, key) for one in tested]) for key in ("p_looks", "p_tie_looks")]
    for one, p, p_tie in zip(tested, *corrected, strict=True):
        one.p_holm, one.p_tie = float(p), float(p_tie)
        settle(one)
    return scale


def groups_of(arm, sections):
    """([losses of an arm, losses of the control group] at each size, why they cannot be used)."""
    found, why = [], ""
    for section in sections:
        sweep, runs = section.sweep, section.runs
        control, planned = control_group(sweep), planned_runs(sweep, min(sweep["looks"]))
        pair = Losses(sweep, runs, section.main.measure, {}).groups([[arm], control])
        wanted = [planned[arm], sum(planned[name] for name in control)]
        if any(len(group) < max(2, count) for group, count in zip(pair, wanted, strict=True)):
            why = why or "planned runs are missing"
        elif not np.isfinite(np.concatenate(pair)).all():
            why = "runs diverged"
        found.append(pair)
    return found, why


def fit(arm, sections, x, margin):
    """The Slope of an arm, corrected for the looks but not yet for the other arms. x [sizes] is the
    logarithm of compute."""
    groups, why = groups_of(arm, sections)
    if why:
        return Slope(arm, "cannot tell", [], *[math.nan] * 6, (), why)

    # Weights by the numbers of runs alone: weights from variances of few runs make the test too
    # liberal (4 runs, one size with four times the sd: error 6.6 % against 5.5 %).
    effects = [contrast(pair) for pair in groups]
    weights = np.array([1 / sum(1 / len(group) for group in pair) for pair in groups])
    columns = sm.add_constant(x)
    model = sm.WLS([effect.mean for effect in effects], columns, weights=weights).fit()

    # The slope as a weighted sum of the groups' means, with the variance of each group.
    shares = np.linalg.pinv(columns * np.sqrt(weights)[:, None])[1] * np.sqrt(weights)
    signed = [(share, -share) for share in shares]
    slope = contrast([group for pair in groups for group in pair], np.ravel(signed))
    line = tuple(model.predict(columns)[[0, -1]].tolist())
    numbers = map(float, (model.params[1], *slope.interval(), slope.p()))
    tests = float(slope.p()), float(slope.p_within(margin / np.ptp(x)))
    corrected = [min(1.0, p / share_of(planned=1)) for p in tests]
    return Slope(arm, "", effects, *numbers, *corrected, line, test=slope)


def settle(slope):
    """Set the word of a slope, and why."""
    first, last = slope.line
    if slope.p_holm <= ALPHA:
        slope.word = "grows" if abs(last) > abs(first) else "fades"
        if first * last < 0:
            slope.word = "changes sign"
            slope.why = (
                f"by the fitted line {'better' if last < 0 else 'worse'} at the largest size"
            )
    elif slope.p_tie <= ALPHA:
        slope.word = "holds"
    else:
        slope.word = "cannot tell"
