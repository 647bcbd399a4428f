"""
The figures of a report that show effects, drawn with matplotlib. Each function takes a section
and a Tips, and returns a Figure, or None if the sweep has no data for it; its description is the
caption. Each arm keeps its colour, mark and dash in all figures; arms without losses are named.
"""

import math
import textwrap

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.ablation.sentences import arm_name, arms_of, comparisons
from bench.ablation.significance import contrast

INK, MUTED, FAINT = "#1c2128", "#57606a", "#d0d7de"
# The page's --c0 to --c6: grey, and the colours of Okabe and Ito (2008) that show on white. They
# differ for readers who do not see red or green.
COLORS = ("#6e7781", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY, BLUE, RED, GREEN = COLORS[:4]
ARM_COLORS = COLORS[1:]
ARM_MARKERS = "osD^vPX*"  # as many as keep the pairs of colour and mark distinct for 24 arms
DASHES = ("-", "--", ":", "-.")
MARKS = {
    "better": ("<", GREEN),
    "worse": (">", RED),
    "tie": ("s", BLUE),
    "larger than the noise": ("D", BLUE),
}
OPEN_MARK = ("o", GREY)  # nothing is decided
WIDTH = 4.4  # inches, the width of a phone's column, so that the text stays readable
BAND = {"alpha": 0.13, "linewidth": 0}
LOSS = "validation loss, nats per token"  # the label of an axis


class Tips(dict):
    """{id of a mark: the text to show when the pointer is over it}."""

    def add(self, artist, text):
        artist.set_gid(f"tip-{len(self)}")
        self[artist.get_gid()] = text


# --- what all figures share


def style_of(section, arm):
    """The base and its second copy are grey. Every other arm keeps its colour, mark and dash in all
    figures."""
    if arm == section.sweep["base"]:
        return {"color": GREY, "linewidth": 2, "marker": "o"}
    if any(map(section.sweep["arms"][arm].get, ("again", "replicate"))):
        return {"color": GREY, "linewidth": 1.4, "marker": "o", "linestyle": "--"}
    return style_at(arms_of(section).index(arm) - 1)


def style_at(place):
    """The style of one of several lines, by its place from 0: 24 of them differ."""
    return {
        "color": ARM_COLORS[place % len(ARM_COLORS)],
        "marker": ARM_MARKERS[place % len(ARM_MARKERS)],
        "linestyle": DASHES[place // len(ARM_COLORS) % len(DASHES)],
        "linewidth": 1.4,
    }


def legend(figure, section, shown, reasons=None, labelled=False):
    """Below the figure: the arms shown, unless `labelled` in it, and why the others are not."""
    missing, lines = {}, []
    for arm in arms_of(section):
        if arm not in shown:
            why = (reasons or {}).get(arm) or absent(section, arm)
            missing.setdefault(why, []).append(section.named(arm))
    for why, arms in missing.items():
        lines += textwrap.wrap(f"{', '.join(arms)}: {why}", 56)
    if labelled and not lines:
        return

    longest = max(len(section.named(arm)) for arm in shown)
    columns = 3 if longest < 14 else 2 if longest < 26 else 1
    rows = len(lines) + (0 if labelled else math.ceil(len(shown) / columns))
    figure.set_figheight(figure.get_figheight() + 0.18 * max(0, rows - 3))
    marks = [Line2D([], [], label=section.named(arm), **style_of(section, arm)) for arm in shown]
    box = figure.legend(
        handles=[] if labelled else marks,
        loc="outside lower center",
        ncols=columns,
        title="\n".join(lines) or None,
        title_fontsize=9,
    )
    box.get_title().set_color(MUTED)


def copies(section, why):
    """{the base's second copy: why a figure does not show it}; empty if there is none."""
    return {
        arm: why
        for arm in arms_of(section)
        if any(map(section.sweep["arms"][arm].get, ("again", "replicate")))
    }


def log_axis(axes, places, labels):
    """A logarithmic x axis with ticks at these places alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, labels)
    axes.minorticks_off()


def absent(section, arm):
    """Why a figure does not show an arm."""
    if section.runs.done.get(arm):
        return "no data"
    if section.runs.diverged.get(arm):
        return "diverged"
    return "failed" if any(row["arm"] == arm for row in section.runs.failed) else "not run"


# --- effects


def forest(section, tips):
    """A mark shows the loss of an arm minus that of the runs that it is compared with, a bar its
    95 % interval, a small dot a single run. The grey band is the margin of a tie. An open mark is
    undecided."""
    verdicts, margin = comparisons(section), section.main.margin
    figure = Figure(figsize=(WIDTH, 1.2 + 0.38 * len(verdicts)))
    axes = figure.subplots()
    if margin and margin > 0:
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.45, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, verdict in enumerate(verdicts):
        if verdict.n and np.isfinite(verdict.mean):
            interval(axes, place, verdict, tips)
            continue
        why = absent(section, verdict.arm)
        if verdict.diverged:
            why = f"{verdict.word}: {verdict.diverged} of {verdict.n} diverged"
        position = {"va": "center", "transform": axes.get_yaxis_transform()}
        axes.text(0.02, place, why, color=RED, fontsize=9, **position)

    axes.set(ylim=(len(verdicts) - 0.4, -0.6), xlabel="nats per token (left is better)")
    names = [arm_name(one).replace(": beyond", " beyond\n") for one in verdicts]
    axes.set_yticks(range(len(verdicts)), names)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="y", visible=False)
    if section.main.curve:
        tokens_axis(axes, section.main.curve)
    return figure


def interval(axes, place, verdict, tips):
    """One line of the forest plot: the interval, a mark at the mean, and below a dot per run."""
    mark, color = MARKS.get(verdict.word, OPEN_MARK)
    runs = np.array(verdict.differences, float)
    runs = runs[np.isfinite(runs)]
    axes.plot(runs, np.full(len(runs), place + 0.26), ".", color=color, markersize=4, alpha=0.6)

    low, high = verdict.mean, verdict.mean
    if np.isfinite(verdict.low):
        low, high = verdict.low, verdict.high
    bar = {"linewidth": 2.2, "solid_capstyle": "round"}
    (line,) = axes.plot([low, high], [place, place], color=color, **bar)
    inside = color if verdict.word in MARKS else "white"
    style = {"markersize": 7, "markerfacecolor": inside, "markeredgewidth": 1.6}
    (dot,) = axes.plot(verdict.mean, place, mark, color=color, **style)
    numbers = f"{verdict.mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    for artist in (line, dot):
        tips.add(artist, f"{verdict.arm}: {verdict.word} — {numbers} over {verdict.n} runs")


def tokens_axis(axes, curve):
    """An upper axis with the differences that multiples of the training tokens make to the base."""
    low, high = axes.get_xlim()
    multiples = [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4]
    known = [k for k in multiples if curve.points[0][0] <= k <= curve.points[-1][0]]
    places = {k: curve.loss_at(k) - curve.loss_at(1) for k in known}
    shown, last = [], None
    for k, place in sorted(places.items(), key=lambda item: item[1]):
        if low <= place <= high and (last is None or place - last > 0.14 * (high - low)):
            shown.append(k)
            last = place
    upper = axes.twiny()
    upper.set(xlim=(low, high), xlabel="worth in tokens")
    upper.set_xticks([places[k] for k in shown], [f"{k:g}×" for k in shown])
    upper.grid(visible=False)
    upper.spines["top"].set_visible(True)


def tokens(section, tips):
    """The grey line shows the base trained on fewer and on more tokens. Each arm stands where the
    base has the same loss; its bar is the interval of that multiple."""
    curve = section.main.curve
    if not curve or len(curve.points) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 4.4))
    axes = figure.subplots()
    multiples = np.array([point[0] for point in curve.points])
    grid = np.geomspace(multiples[0], multiples[-1], 200)
    axes.plot(grid, [curve.loss_at(k) for k in grid], color=GREY, linewidth=1.6)
    for k, mean, se, n in curve.points:
        (dot,) = axes.plot(k, mean, "o", color=GREY, markersize=6)
        tips.add(dot, f"base at {k:g}× the tokens: {mean:.4f}, se {se:.4f}, {n} runs")
        axes.plot([k, k], [mean - 1.96 * se, mean + 1.96 * se], color=GREY, linewidth=1.6)

    shown = [section.sweep["base"]]
    for verdict in section.main.verdicts:
        if not verdict.interaction and verdict.worth and np.isfinite(verdict.loss):
            read_off(axes, section, verdict, multiples, tips)
            shown.append(verdict.arm)
    log_axis(axes, multiples, [f"{k:g}×" for k in multiples])
    axes.set(xlabel="training tokens of the base, times its own", ylabel=LOSS)
    legend(figure, section, shown, copies(section, "part of the base at 1×"))
    return figure


def read_off(axes, section, verdict, multiples, tips):
    """An arm at its loss, where the base's curve has that loss; an arrow where it does not."""
    style, worth = style_of(section, verdict.arm), verdict.worth
    ends = worth.k, *(worth.k if math.isnan(end) else end for end in (worth.low, worth.high))
    k, low, high = np.clip(ends, multiples[0], multiples[-1])
    axes.plot([low, high], [verdict.loss] * 2, color=style["color"], linewidth=1.4)
    (mark,) = axes.plot(
        k, verdict.loss, style["marker"], color=style["color"], markersize=7, clip_on=False
    )
    name = section.named(verdict.arm)
    tips.add(mark, f"{name}: loss {verdict.loss:.4f}, worth {worth} the tokens")


# --- curves


def curves(section, tips):
    """The upper panel shows the mean loss over runs after the warm-up, on the reported half of the
    text, with a band of one sd. The lower panel shows differences of means, with their 95 % band.
    """
    shown = curves_of(section)
    longest = max((len(curve) for runs in shown.values() for curve in runs), default=0)
    if longest < 2:
        return None
    figure = Figure(figsize=(WIDTH, 6.6))
    above, below = figure.subplots(2, sharex=True)
    end = max(curve[-1, 0] for runs in shown.values() for curve in runs)
    start = max(section.sweep["base_values"].get("warmup_iters") or 0, 0.2 * end)

    for arm, runs in shown.items():
        steps = min(runs, key=len)[:, 0]
        steps = steps[(steps >= start) | (steps == steps[-1])]
        losses = at_steps(runs, steps)
        # Marks that are far apart do not hide the line.
        style = style_of(section, arm) | {"markersize": 4, "markevery": 0.25}
        name = section.named(arm)
        draw_mean(above, style, name, steps, losses, tips)
        against = section.sweep["arms"][arm].get("against")
        if arm != section.sweep["base"] and against in shown:
            draw_difference(below, style, name, steps, losses, shown[against], tips)

    below.axhline(0, color=GREY, linewidth=1)
    above.set(ylabel=LOSS)
    below.set(ylabel="difference, nats per token", xlabel="step")
    below.locator_params(axis="x", nbins=6)
    legend(figure, section, list(shown))
    return figure


def curves_of(section):
    """arm -> [curve [points, 2] of steps and losses] of the runs that have one. The last column is
    the half of the validation text that is reported."""
    found = {}
    for arm in arms_of(section):
        rows = section.runs.done.get(arm, {}).values()
        runs = [np.array(row["curve"], float)[:, [0, -1]] for row in rows if row["curve"]]
        if runs:
            found[arm] = runs
    return found


def at_steps(runs, steps):
    """[runs, steps] losses of curves at some steps."""
    return np.array([np.interp(steps, *curve.T) for curve in runs])


def draw_mean(axes, style, name, steps, losses, tips):
    mean = losses.mean(0)
    sd = losses.std(0, ddof=1) if len(losses) > 1 else np.zeros_like(mean)
    (line,) = axes.plot(steps, mean, **style)
    tips.add(line, f"{name}: ends at {mean[-1]:.4f}, sd {sd[-1]:.4f}")
    axes.fill_between(steps, mean - sd, mean + sd, color=style["color"], **BAND)


def draw_difference(axes, style, name, steps, losses, others, tips):
    """Draw the difference of two means over runs, with Welch's interval."""
    last = min(curve[-1, 0] for curve in others)  # with match=time one may end earlier
    losses, steps = losses[:, steps <= last], steps[steps <= last]
    references = at_steps(others, steps)
    mean = losses.mean(0) - references.mean(0)
    (line,) = axes.plot(steps, mean, **style)
    if len(mean):
        tips.add(line, f"{name}: {mean[-1]:+.4f} at the end")
    if min(len(losses), len(references)) > 1:
        low, high = contrast([losses, references]).interval()
        axes.fill_between(steps, low, high, color=style["color"], **BAND)


# --- learning rates


def learning_rates(section, tips):
    """Each line shows the mean loss of the tuning runs on the half of the text that is not
    reported, each dot a single run. A ring marks the chosen rate."""
    found = section.tuning()
    found = {arm: dict(sorted(found[arm].items())) for arm in arms_of(section) if arm in found}
    rates = sorted({lr for by_rate in found.values() for lr in by_rate})
    if len(rates) < 2:
        return None

    figure = Figure(figsize=(WIDTH, 4.2))
    axes, base_rate = figure.subplots(), section.sweep["base_values"]["learning_rate"]
    for arm, by_rate in found.items():
        style = style_of(section, arm)
        means = {lr: np.mean(losses) for lr, losses in by_rate.items()}
        xs = [lr * base_rate for lr in means]
        (line,) = axes.plot(xs, list(means.values()), **style | {"markersize": 5})
        parts = (f"{lr:g}×: {mean:.3f}" for lr, mean in means.items())
        tips.add(line, f"{section.named(arm)}: {', '.join(parts)}")
        for lr, losses in by_rate.items():
            axes.plot([lr * base_rate] * len(losses), losses, ".", color=style["color"], alpha=0.5)
        chosen = section.sweep["chosen_lr"].get(arm)
        if chosen in means:
            ring = {"markersize": 11, "markerfacecolor": "none", "color": style["color"]}
            axes.plot(chosen * base_rate, means[chosen], "o", **ring)
    rates = [lr * base_rate for lr in rates]
    log_axis(axes, rates, [f"{rate:.3g}" for rate in rates])
    axes.set(xlabel="learning rate", ylabel=LOSS)
    legend(figure, section, list(found), copies(section, "at the base's rate"))
    return figure
