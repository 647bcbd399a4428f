"""The figures of the page of the answer: functions that return a matplotlib Figure, or None where
the data lack."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.ablation.figures import (
    BLUE,
    FAINT,
    GREY,
    INK,
    LOSS,
    MUTED,
    RED,
    WIDTH,
    log_axis,
    yardsticks,
)
from bench.ablation.tables import known, multiple

ARROW = {"arrowstyle": "->", "color": MUTED, "linewidth": 1}
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10)  # of multiples


def example(section, arm, name):
    """The worth of one arm, as it is read off the base's curve. name: of the part in it."""
    (row,) = [row for row in section.verdicts.to_dict("records") if row["arm"] == arm]
    curve = section.facts.curve
    loss = row["val_loss_report"]
    worth = row["worth"]
    if not (curve and known(worth)):
        return None
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots()
    axes.plot(curve.grid, [curve.loss_at(k) for k in curve.grid], color=GREY, linewidth=1.6)
    errors = 1.96 * curve.errors[:, 0]
    axes.errorbar(curve.multiples, curve.means[:, 0], errors, fmt="o", color=GREY, markersize=6)
    yardsticks(axes, section)
    runs = section.reported(arm)["val_loss_report"]
    axes.plot(np.full(len(runs), 1), runs, ".", color=BLUE, alpha=0.6)
    bottom, top = axes.get_ylim()
    axes.plot([1, worth, worth], [loss, loss, bottom], "--", color=BLUE, linewidth=1.2)
    axes.plot(worth, loss, "o", color=BLUE, markersize=7)
    log_axis(axes, curve.multiples, [f"{k:g}×" for k in curve.multiples])
    xlabel = "training tokens of the base (1×: as many as each part has)"
    axes.set(xlabel=xlabel, ylabel=LOSS, ylim=(bottom, top))

    few = 1.6 * curve.multiples[0]
    notes = (  # (text, its place, the point that it is about)
        ("1. The base, trained\non fewer and more tokens", 0.5, 0.85, (few, curve.loss_at(few))),
        (f"2. Each dot is a run\nwith {name}", 0.4, 0.12, (0.98, loss)),
        ("3. The base reaches\ntheir mean here", 1.6, 0.29, (worth, loss)),
        (f"4. {multiple(row)} × the tokens", 0.8, 0.04, (worth, bottom)),
    )
    for text, x, y, point in notes:
        place = x, bottom + y * (top - bottom)
        arrow = ARROW if y > 0.1 else None
        axes.annotate(text, point, place, arrowprops=arrow, ha="center", va="center", fontsize=9)
    return figure


def across(parts, rows):
    """The worth of each part in each planned setting, with its interval; the mean over the settings
    (the diamond), and the 95 % interval for a new setting (the band). rows: of worths.csv."""
    shown = [part for part in parts if known(part.effect.mean)]
    if not shown:
        return None
    rows = rows[rows["planned"] == 1]
    most = rows["part"].value_counts().max()
    figure = Figure(figsize=(WIDTH, 1.3 + len(shown) * max(0.42, 0.04 * most)))
    axes = figure.subplots()
    for place, part in enumerate(shown):
        ends = np.exp(part.ends)
        axes.barh(place, ends[1] - ends[0], left=ends[0], height=0.8, color=FAINT, alpha=0.6)
        own = rows[rows["part"] == part.name].sort_values(["base", "worth"])
        heights = place + np.linspace(-0.36, 0.36, len(own) + 2)[1:-1]
        for row, y in zip(own.to_dict("records"), heights, strict=True):
            color = BLUE if row["base"] == "gpt2" else RED
            axes.plot([row["low"], row["high"]], [y, y], color=color, linewidth=1.2)
            axes.plot(row["worth"], y, "o", color=color, markersize=4)
        axes.plot(np.exp(part.effect.mean), place, "D", color=INK, markersize=5, zorder=5)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(
        ylim=(len(shown) - 0.5, -0.5), xlabel="worth, times the tokens (right: the part helps)"
    )
    axes.set_yticks(range(len(shown)), [part.name for part in shown])
    axes.grid(axis="y", visible=False)
    ends = np.exp([part.ends for part in shown])
    low = max(min(rows["low"].min(), ends.min()), TICKS[0]) / 1.05
    high = min(max(rows["high"].max(), ends.max()), TICKS[-1]) * 1.05
    ticks = [k for k in TICKS if low <= k <= high]
    log_axis(axes, ticks, [f"{k:g}" for k in ticks])
    axes.set_xlim(low, high)
    handles = [
        Line2D([], [], label="in GPT-2", color=BLUE, marker="o"),
        Line2D([], [], label="in LLaMA", color=RED, marker="o"),
        Line2D([], [], label="mean", color=INK, marker="D", linestyle=""),
        Line2D([], [], label="new setting", color=FAINT, linewidth=7),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure
