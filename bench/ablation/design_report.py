"""What a factorial and a scale design add to a report: tables and figures."""

import math

import numpy as np
from matplotlib.figure import Figure
from scipy import stats as scipy_stats

from bench.ablation import factorial
from bench.ablation.effects import cells_of
from bench.ablation.figures import GREY, MARKS, OPEN_MARK, WIDTH
from bench.ablation.tables import Cell, Table, interval_cell

# ---------------------------------------------------------------- a factorial

HALF_NORMAL = (
    "The effects by size against what noise alone would give: noise lies on the line through the"
    " origin, whose slope is the standard error; an effect stands above it. An interaction counts"
    " half, so that all have the same error."
)


def of_factorial(section):
    """(sentences, tables, plots) of a factorial. Its effects stand in the report as verdicts."""
    if not section.effects:
        return [], [], []
    plot = (half_normal, "Half-normal plot", HALF_NORMAL)
    return [], [alone_table(section), aliases_table(section)], [plot]


def of_scale(section):
    return [], [], []


def alone_table(section):
    """Each factor's effect on average, and on the base alone."""
    rows = []
    for verdict in section.main.verdicts:
        if not verdict.interaction:
            alone = section.effects.alone.get(verdict.arm)
            ends = (float(alone.mean), *map(float, alone.interval())) if alone else (math.nan,) * 3
            average = interval_cell(verdict.mean, verdict.low, verdict.high)
            rows.append([Cell(verdict.arm, kind="arm"), average, interval_cell(*ends)])
    return Table(
        "alone",
        "On average, and alone",
        "The effect of a factor over all combinations of the others, and where all others are as in"
        " the base: the latter is what a sweep of one part at a time measures.",
        ["arm", "on average [95 %]", "alone [95 %]"],
        rows,
    )


def aliases_table(section):
    """What the fraction mixes."""
    cells = list(cells_of(section.sweep).values())
    rows = [[Cell(first, kind="arm"), Cell(rest)] for first, _, rest in split(cells)]
    note = f"{len(cells)} of {2 ** len(cells[0])} cells. "
    if rows:
        resolution = factorial.resolution_of(factorial.design_of(cells))
        note += f"Resolution {resolution}: an effect also holds what it is mixed with."
    else:
        note += "No effect is mixed with another."
    left_out = [f"{arm} ({count} runs diverged)" for arm, count in section.effects.left_out.items()]
    if left_out:
        note += f" Left out, so that more is mixed than this: {', '.join(left_out)}."
    return Table("aliases", "What is mixed", note, ["effect", "mixed with"], rows)


def split(cells):
    return [line.partition(" = ") for line in factorial.aliases(cells)]


def half_normal(section, tips):
    """The effects of a factorial, by size, against the quantiles of a half-normal distribution."""
    sizes = sorted((abs(value), name) for name, value in section.effects.contrasts.items())
    if len(sizes) < 3:
        return None
    verdicts = {verdict.arm: verdict for verdict in section.main.verdicts}
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots()
    quantiles = scipy_stats.halfnorm.ppf((np.arange(len(sizes)) + 0.5) / len(sizes))
    if math.isfinite(section.effects.se):
        axes.plot([0, quantiles[-1]], [0, section.effects.se * quantiles[-1]], color=GREY)
    for x, (y, name) in zip(quantiles, sizes, strict=True):
        mark, color = MARKS.get(verdicts[name].word, OPEN_MARK)
        (dot,) = axes.plot(x, y, mark, color=color, markersize=6)
        tips.add(dot, f"{name}: {verdicts[name].word}, {y:.4f}")
        if not y <= 2 * section.effects.se:  # up and to the left of a point there is no other
            axes.annotate(name, (x, y), rotation=-30, ha="right", va="bottom", fontsize=9)
    axes.set(xlabel="half-normal quantile", ylabel="size of the effect, nats per token")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return figure
