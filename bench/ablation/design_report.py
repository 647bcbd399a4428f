"""What a factorial and a scale design add to a report: tables and figures."""

import math

import numpy as np
from matplotlib.figure import Figure
from scipy import stats as scipy_stats

from bench.ablation import factorial
from bench.ablation.effects import beside, cells_of, runs_one_by_one
from bench.ablation.figures import BLUE, GREY, INK, MARKS, OPEN_MARK, WIDTH
from bench.ablation.sentences import DASH, signed
from bench.ablation.significance import ALPHA
from bench.ablation.tables import Cell, Table, interval_cell, number, ratio_cell


def additions_of(section):
    """(tables, [(function, title, caption)] of plots) that a factorial adds to its report, whose
    verdicts are its effects, and a scale to that of its smallest size."""
    tables, plots = [], []
    if section.effects:
        tables = [alone_table(section), beside_table(section), aliases_table(section)]
        plots = [(half_normal, "Half-normal plot", HALF_NORMAL)]
    if section.scale:
        tables.append(scale_table(section.scale))
        plots.append((effects_against_compute, "Effect against compute", SCALE))
    return [table for table in tables if table], plots


def effect_cell(effect):
    """The cell of a Contrast."""
    return interval_cell(float(effect.mean), *map(float, effect.interval()))


# ---------------------------------------------------------------- a factorial

NAME_HEIGHT = 13  # points from one name in the half-normal plot to the next
BESIDE = ("alone", "average")  # the effects of a factorial that are compared

HALF_NORMAL = (
    "The effects by size against what noise alone would give: noise lies on the line through the"
    " origin, whose slope is the standard error; an effect stands above it. An interaction counts"
    " half, so that all have the same error."
)


def alone_table(section):
    """Each factor's effect on average, and on the base alone, and the time of its step."""
    rows, effects = [], section.effects
    for verdict in section.main.verdicts:
        if not verdict.interaction:
            alone, ratio = effects.alone.get(verdict.arm), effects.step_ratios.get(verdict.arm)
            average = interval_cell(verdict.mean, verdict.low, verdict.high)
            cells = [average, effect_cell(alone) if alone else Cell(), ratio_cell(ratio)]
            rows.append([Cell(verdict.arm, kind="arm"), *cells])
    return Table(
        "alone",
        "On average, and alone",
        "The effect of a factor over all combinations of the others, and where all others are as in"
        " the base: the latter is what a sweep of one part at a time measures."
        + runs_note(effects),
        ["arm", "on average [95 %]", "alone [95 %]", "step, times its low level's [95 %]"],
        rows,
    ).without_empty_columns()


def runs_note(effects):
    """How many runs the design took, and how many one part at a time takes for the same errors."""
    alone = [one for one in effects.alone.values() if one]
    if not alone or not 0 < effects.model.fit.scale < math.inf:
        return ""
    parts, runs = len(effects.alone), len(effects.model.losses)
    ses = [max(one.se for one in effects.verdicts if not one.interaction)]
    ses.append(max(float(one.se) for one in alone))
    needed = [runs_one_by_one(parts, se**2 / effects.model.fit.scale) for se in ses]
    return (
        f" From {runs} runs, an effect on average has a standard error of {ses[0]:.4f}, for which"
        f" one part at a time takes {needed[0]} runs; an effect alone has {ses[1]:.4f}, for which"
        f" one part at a time takes {needed[1]}."
    )


def beside_table(section):
    """The effects of a factorial beside those of one part at a time; None without such a sweep."""
    rows = []
    for factor, one, pairs in beside(section, section.single) if section.single else ():
        agree = [name for name, (_, gap) in zip(BESIDE, pairs, strict=True) if gap.p() > ALPHA]
        row = [Cell(factor, kind="arm"), effect_cell(one)]
        for effect, gap in pairs:
            z = float(gap.mean / gap.se)
            row += [effect_cell(effect), Cell(signed(z, 2), z), number(float(gap.p()), ".2g")]
        rows.append([*row, Cell(" and ".join(agree) or "neither")])
    if not rows:
        return None
    headings = ["arm", "one at a time [95 %]"]
    for name in BESIDE:
        headings += [f"{name} [95 %]", f"z, {name}", f"p, {name}"]
    single, folder = section.single, section.single.folders[0].name
    runs = sum(len(single.runs.ended(arm)) for arm in single.runs.done)
    return Table(
        "beside",
        "Beside one part at a time",
        f"One at a time: the {runs} runs of {folder}. z: the factorial's effect minus this one,"
        " over its standard error, with allowance for runs of the base that both share; p: by"
        " Welch's approximation, each difference by itself. They agree where p is above 5 %."
        " Interactions make an effect on average differ from the effect alone.",
        [*headings, "agree"],
        rows,
    )


def aliases_table(section):
    """What the fraction mixes."""
    cells = list(cells_of(section.sweep).values())
    mixed = [line.partition(" = ") for line in factorial.aliases(cells)]
    rows = [[Cell(first, kind="arm"), Cell(rest)] for first, _, rest in mixed]
    note = f"{len(cells)} of {2 ** len(cells[0])} cells. "
    if rows:
        resolution = factorial.resolution_of(factorial.design_of(cells))
        note += f"Resolution {resolution}: each effect includes those that are mixed with it."
    else:
        note += "No effect is mixed with another."
    left_out = [f"{arm} ({count} runs diverged)" for arm, count in section.effects.left_out.items()]
    if left_out:
        note += f" Left out, so that more is mixed than this: {', '.join(left_out)}."
    rows = rows or [[Cell("none", kind="arm"), Cell()]]
    return Table("aliases", "What is mixed", note, ["effect", "mixed with"], rows)


def half_normal(section, tips):
    """The effects of a factorial, by size, against the quantiles of a half-normal distribution."""
    sizes = sorted((abs(value), name) for name, value in section.effects.contrasts.items())
    if len(sizes) < 3:
        return None
    verdicts = {verdict.arm: verdict for verdict in section.main.verdicts}
    large = [name for size, name in sizes if not size <= 2 * section.effects.se]
    figure = Figure(figsize=(WIDTH, max(3.6, 1 + 0.2 * len(large))))
    axes, ends = figure.subplots(), []
    axes.set_ylim(0, 1.08 * sizes[-1][0])
    quantiles = scipy_stats.halfnorm.ppf((np.arange(len(sizes)) + 0.5) / len(sizes))
    if math.isfinite(section.effects.se):
        axes.plot([0, quantiles[-1]], [0, section.effects.se * quantiles[-1]], color=GREY)
    for x, (y, name) in zip(quantiles, sizes, strict=True):
        mark, color = MARKS.get(verdicts[name].word, OPEN_MARK)
        (dot,) = axes.plot(x, y, mark, color=color, markersize=6)
        tips.add(dot, f"{name}: {verdicts[name].word}, {y:.4f}")
        if name in large:
            ends.append(((x, y), name, color))
    axes.set(xlabel="half-normal quantile", ylabel="size of the effect, nats per token")
    axes.set_xlim(left=0)
    name_points(axes, ends)
    return figure


def name_points(axes, ends):
    """Write the names of points at the right edge of their axes, which no point hides, as far apart
    as their text is high; a line joins each with its point. ends: [((x, y), name, colour)]."""
    figure = axes.get_figure()
    figure.draw_without_rendering()  # the layout is known from here on
    edge = axes.get_window_extent()
    free = -math.inf  # where the next name may stand, in pixels
    for (x, y), name, color in sorted(ends, key=lambda end: end[0][1]):
        point = axes.transData.transform((x, y))
        place = max(point[1], free)
        free = place + NAME_HEIGHT * figure.dpi / 72
        pixels = [point, (edge.x1, point[1]), (edge.x1 + 12, place), (edge.x1 + 16, place)]
        *line, start = axes.transData.inverted().transform(pixels)
        axes.plot(*np.transpose(line), color=color, linewidth=0.5, clip_on=False, zorder=0.5)
        axes.text(*start, name, color=color, fontsize=9, va="center")


# ---------------------------------------------------------------- a scale

SCALE = (
    "The effect of each arm at each size, with its 95 % interval, and the fitted line. Below zero"
    " the arm is better than the base of its size."
)
PANEL = 1.5  # inches


def scale_table(scale):
    """The slope of each arm, with its verdict."""
    rows = []
    for one in scale.slopes:
        tip = one.why or f"p (Holm) {one.p_holm:.2g}, p (tie) {one.p_tie:.2g}"
        kind = {"cannot tell": "undecided", "holds": "tie"}.get(one.word, one.word)
        slope = interval_cell(one.mean, one.low, one.high)
        at_sizes = [effect_cell(effect) for effect in one.effects]
        at_sizes = at_sizes or [Cell() for _ in scale.names]
        rows.append([Cell(one.arm, kind="arm"), Cell(one.word, 0, kind, tip), slope, *at_sizes])
        rows[-1].append(Cell(one.why or DASH))
    sizes = ", ".join(
        f"{name} {parameters:,} parameters and {flops:.2g} FLOPs"
        for name, parameters, flops in zip(scale.names, scale.parameters, scale.flops, strict=True)
    )
    margin = "There is no margin, so no effect can be said to hold."
    if math.isfinite(scale.margin):
        margin = (
            f'"Holds" means that over this range of compute the effect changes by less than'
            f" {scale.margin:.4f} nats, the mean of the margins of the sizes."
        )
    return Table(
        "scale",
        "Effect against scale",
        f"Differences from the base of the same size, nats per token. Slope: per factor of ten of"
        f" the base's training compute; Holm's method corrects for the arms. {margin} Sizes:"
        f" {sizes}.",
        ["arm", "verdict", "slope [95 %]", *scale.names, "note"],
        rows,
    )


def effects_against_compute(section, tips):
    """One panel for each arm: its effects at the sizes, and the fitted line."""
    scale = section.scale
    shown = scale.slopes
    if not any(one.effects for one in shown):
        return None
    rows = math.ceil(len(shown) / 2)
    figure = Figure(figsize=(WIDTH, 0.8 + PANEL * rows))
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).ravel()
    ticks = [f"{name}\n{flops:.1e}" for name, flops in zip(scale.names, scale.flops, strict=True)]
    for axes, one in zip(panels, shown, strict=False):
        axes.set_title(f"{section.named(one.arm)}: {one.word}", fontsize=10)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(scale.flops, ticks, fontsize=8)
        axes.minorticks_off()
        if not one.effects:
            middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
            axes.text(0.5, 0.5, one.why, fontsize=9, **middle)
            continue
        mean = [float(effect.mean) for effect in one.effects]
        ends = np.array([effect.interval() for effect in one.effects], float)  # [sizes, 2]
        axes.plot(scale.flops[[0, -1]], one.line, color=BLUE, linewidth=1.4)
        lengths = abs(ends.T - mean)
        bars = axes.errorbar(scale.flops, mean, lengths, fmt="o", color=GREY, markersize=5)
        tips.add(bars.lines[0], f"{section.named(one.arm)}: {one.word}")
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel("training compute of the base, FLOPs", fontsize=10)
    figure.supylabel("difference, nats per token", fontsize=10)
    return figure
