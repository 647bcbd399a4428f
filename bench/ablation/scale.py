"""
The same arms at several sizes. Each size is a sweep of its own, with its own base, control group,
curve and margin; its tokens are in proportion to its parameters.

The effect of an arm is fitted against the logarithm of the base's training compute by least squares
(statsmodels), weighted by the numbers of runs. The slope is a contrast of independent groups of
runs, the arm's and the control group's at each size, and is tested like any other (verdicts.py).
Holm's method corrects for the arms.

- grows, fades: the slope is not zero, and the fitted effect is larger, smaller, at the largest size
  than at the smallest.
- changes sign: the slope is not zero, and the arm helps at one end and hurts at the other.
- holds: over the whole range of sizes the effect changes by less than the margin.
- cannot tell: neither is shown.
"""

import numpy as np
import pandas as pd
import statsmodels.api as sm

from bench.ablation import looks, rows
from bench.ablation.settings import variant_config
from bench.ablation.verdicts import ALPHA, contrast, holm, losses_of, over_share, pick
from parts import costs

COLUMNS = ["arm", "slope", "low", "high", "p", "p_holm", "p_tie", "verdict", "reason", "difference"]


def slopes(sizes):
    """The DataFrame of the slopes of all arms, in nats per factor of ten of compute, with a 95 %
    interval. sizes: (runs, plan, verdicts) of each size, the smallest first. `difference` lists the
    effects at the sizes. attrs: flops of the base's training at each size, and the margin."""
    flops = np.array([training_flops(plan) for _, plan, _ in sizes])
    margin = float(np.mean([verdicts.attrs["margin"] for *_, verdicts in sizes]))
    judged = [rows.judged_arms(plan) for _, plan, _ in sizes]
    arms = [arm for arm in judged[0] if all(arm in others for others in judged)]
    lines = [fit(arm, sizes, np.log10(flops), margin) for arm in arms]
    tested = [line for line in lines if "p" in line]
    for key, column in (("p", "p_holm"), ("p_tie", "p_tie")) if tested else ():
        corrected = holm(
            over_share(np.array([[line[key] for line in tested]]), [looks.share_of(planned=1)])
        )
        for line, p in zip(tested, corrected[0].tolist(), strict=True):
            line[column] = p
    for line in tested:
        line["verdict"] = word_of(line)
    frame = pd.DataFrame([{"reason": ""} | line for line in lines], columns=COLUMNS)
    frame.attrs |= {"flops": flops.tolist(), "margin": margin}
    return frame


def training_flops(plan):
    """FLOPs of a run of the base."""
    values = plan["base_values"]
    config = variant_config(values)
    tokens = values["max_iters"] * values["batch_size"] * values["gradient_accumulation_steps"]
    per_token = costs.training_flops_per_token(config, config.block_size)
    return per_token * tokens * config.block_size


def fit(arm, sizes, x, margin):
    """The row of an arm, not corrected for the others. x [sizes]: the logarithm of compute."""
    pairs, reason = [], ""  # [losses of the arm, losses of the control group] at each size
    for runs, plan, _ in sizes:
        losses, control = losses_of(runs, "loss"), rows.control_group(plan)
        planned = looks.planned_runs(plan, plan["looks"][0])
        pairs.append([pick(losses, [arm]), pick(losses, control)])
        wanted = max(2, planned[arm]), max(2, sum(planned[name] for name in control))
        if any(len(group) < count for group, count in zip(pairs[-1], wanted, strict=True)):
            reason = "planned runs are missing"
        elif not np.isfinite(np.concatenate(pairs[-1])).all():
            reason = reason or "runs diverged"
    if reason:
        return {"arm": arm, "verdict": "cannot tell", "reason": reason, "difference": []}

    # Weights by the numbers of runs alone: weights from variances of few runs make the test too
    # liberal (4 runs, one size with four times the sd: error 6.6 % against 5.5 %).
    effects = [float(contrast(pair).difference) for pair in pairs]
    weights = np.array([1 / sum(1 / len(group) for group in pair) for pair in pairs])
    model = sm.WLS(effects, sm.add_constant(x), weights=weights).fit()

    # The slope as a weighted sum of the groups' means, with the variance of each group.
    centred = weights * (x - np.average(x, weights=weights))
    shares = centred / (centred @ x)
    signed = np.ravel([(share, -share) for share in shares])
    test = contrast([group for pair in pairs for group in pair], signed)
    columns = test.columns()
    return {
        "arm": arm,
        "reason": "",
        "slope": columns["difference"],
        **{key: columns[key] for key in ("low", "high", "p")},
        "p_tie": float(test.p_tie(margin / np.ptp(x))),
        "difference": effects,
        "ends": model.predict()[[0, -1]],
    }


def word_of(line):
    """The verdict on a slope."""
    first, last = line["ends"]
    if line["p_holm"] <= ALPHA:
        return (
            "changes sign" if first * last < 0 else "grows" if abs(last) > abs(first) else "fades"
        )
    return "holds" if line["p_tie"] <= ALPHA else "cannot tell"
