"""
The figures of a report: a function takes a Section and returns a matplotlib Figure, or None where
the sweep has nothing to draw. report.py has their titles and captions. An arm keeps its colour,
mark and dash in all figures of a sweep.
"""

import io
import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from bench.ablation.tables import contexts, known, records

INK, MUTED, FAINT = "#1c2128", "#57606a", "#d0d7de"
# Grey, and the colours of Okabe and Ito (2008) that show on white. They differ for readers who do
# not see red or green.
COLORS = ("#6e7781", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY, BLUE, RED, GREEN = COLORS[:4]
ARM_COLORS = COLORS[1:]
ARM_MARKERS = "osD^vPX*"  # as many as keep the pairs of colour and mark distinct for 24 arms
DASHES = ("-", "--", ":", "-.")
MARKS = {  # of a verdict; others get OPEN_MARK
    "better": ("<", GREEN),
    "worse": (">", RED),
    "tie": ("s", BLUE),
    "larger than the noise": ("D", BLUE),
}
OPEN_MARK = ("o", GREY)
WIDTH = 5.6  # inches, of a figure
BAND = {"alpha": 0.13, "linewidth": 0}
LOSS = "validation loss, nats per token"
STYLE = matplotlib.rc_params_from_file(
    Path(__file__).with_name("templates") / "report.mplstyle", use_default_template=False
)
UNDATED = {  # the same rows give the same files
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


# ---------------------------------------------------------------- what all figures share


def saved(figure, kind, **keys):
    """A figure as the bytes of a file of this kind: png, svg or pdf."""
    content = io.BytesIO()
    keys = {"metadata": UNDATED[kind]} | keys
    with matplotlib.rc_context(STYLE):
        figure.savefig(content, format=kind, bbox_inches="tight", pad_inches=0.1, **keys)
    return content.getvalue()


def style_at(place):
    """The style of one of several lines, by its place from 0: 24 of them differ."""
    return {
        "color": ARM_COLORS[place % len(ARM_COLORS)],
        "marker": ARM_MARKERS[place % len(ARM_MARKERS)],
        "linestyle": DASHES[place // len(ARM_COLORS) % len(DASHES)],
        "linewidth": 1.4,
    }


def style_of(section, arm):
    """The style of an arm: the base and its replicate are grey."""
    if arm == section.plan["base"]:
        return {"color": GREY, "linewidth": 2, "marker": "o"}
    if section.is_replicate(arm):
        return {"color": GREY, "linewidth": 1.4, "marker": "o", "linestyle": "--"}
    return style_at(section.arms.index(arm) - 1)


def legend(figure, section, shown):
    """Below the figure: the arms that it shows."""
    columns = 3 if max(map(len, shown)) < 22 else 1
    rows = math.ceil(len(shown) / columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * rows)
    handles = [Line2D([], [], label=arm, **style_of(section, arm)) for arm in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def log_axis(axes, places, labels):
    """A logarithmic x axis with ticks at these places alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, labels)
    axes.minorticks_off()


# ---------------------------------------------------------------- effects


def forest(section):
    """A mark is the difference of an arm's loss, a bar its 95 % interval, a dot a single run. An
    open mark decides nothing. Where a tie has a margin, that is the shaded band around zero."""
    rows = [row for row in records(section.verdicts) if known(row["difference"])]
    if not rows:
        return None
    figure = Figure(figsize=(WIDTH, 1.2 + 0.34 * len(rows)))
    axes, margin = figure.subplots(), section.verdicts.attrs["margin"]
    if known(margin):
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.45, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, row in enumerate(rows):
        mark, color = MARKS.get(row["verdict"], OPEN_MARK)
        runs = single_differences(section, row)
        axes.plot(runs, np.full(len(runs), place + 0.25), ".", color=color, markersize=4, alpha=0.6)
        if known(row["low"]):
            ends = [row["low"], row["high"]]
            axes.plot(ends, [place, place], color=color, linewidth=2.2, solid_capstyle="round")
        inside = color if row["verdict"] in MARKS else "white"
        axes.plot(row["difference"], place, mark, color=color, markerfacecolor=inside, markersize=7)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="nats per token (left is better)")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.grid(axis="y", visible=False)
    return figure


def single_differences(section, row):
    """The loss of each run of an arm, minus the mean loss of the runs it is compared with."""
    if row["kind"] not in ("swap", "replicate"):
        return np.array([])
    losses = section.reported(row["arm"])["loss"].dropna().to_numpy()
    return losses - (row["loss"] - row["difference"])


def tokens(section):
    """The grey line is the base, trained on fewer and on more tokens. An arm stands where the base
    has the same loss; its bar is the 95 % interval of that multiple."""
    curve = section.curve
    if not curve or section.cells:
        return None
    figure = Figure(figsize=(WIDTH, 4.0))
    axes = figure.subplots()
    multiples = [point[0] for point in curve.points]
    grid = np.geomspace(multiples[0], multiples[-1], 200)
    axes.plot(grid, [curve.loss_at(k) for k in grid], color=GREY, linewidth=1.6)
    for k, mean, se, _ in curve.points:
        axes.errorbar(k, mean, 1.96 * se, fmt="o", color=GREY, markersize=6)

    shown = [section.plan["base"]]
    for row in records(section.verdicts):
        if row["kind"] == "swap" and known(row["worth"]):
            style = style_of(section, row["arm"])
            worth = [row[key] for key in ("worth", "worth_low", "worth_high")]
            place, low, high = np.clip(np.nan_to_num(worth, nan=row["worth"]), *section.curve_ends)
            axes.plot([low, high], [row["loss"]] * 2, color=style["color"], linewidth=1.4)
            axes.plot(place, row["loss"], **style | {"linestyle": "none", "markersize": 7})
            shown.append(row["arm"])
    log_axis(axes, multiples, [f"{k:g}×" for k in multiples])
    axes.set(xlabel="training tokens of the base, times its own", ylabel=LOSS)
    legend(figure, section, shown)
    return figure


def half_normal(section):
    """Effects by size against what noise alone would give: noise lies on the line. Effects of more
    than two standard errors are named. An interaction counts half."""
    effects = section.verdicts[["name", "difference", "se"]].dropna()
    if len(effects) < 3 or not section.cells:
        return None
    # An interaction is a difference of differences: halved, all effects have the same error.
    halves = np.where(section.verdicts.loc[effects.index, "kind"] == "interaction", 2, 1)
    effects = effects.assign(size=abs(effects["difference"]) / halves).sort_values("size")
    se = (effects["se"] / halves).min()
    quantiles = stats.halfnorm.ppf((np.arange(len(effects)) + 0.5) / len(effects))
    figure = Figure(figsize=(WIDTH, 4.0))
    axes, large = figure.subplots(), effects["size"] > 2 * se
    axes.plot([0, quantiles[-1]], [0, se * quantiles[-1]], color=GREY)
    axes.plot(quantiles[~large], effects["size"][~large], "o", color=GREY, markersize=6)
    for place, (x, row) in enumerate(zip(quantiles[large], records(effects[large]), strict=True)):
        style = style_at(place) | {"linestyle": "none", "markersize": 6}
        axes.plot(x, row["size"], **style, label=row["name"])
    axes.set(xlabel="half-normal quantile", ylabel="size of the effect, nats per token")
    axes.set(xlim=(0, None), ylim=(0, None))
    if large.any():
        axes.legend(loc="upper left", reverse=True, ncols=math.ceil(large.sum() / 12))
    return figure


# ---------------------------------------------------------------- curves


def curves(section):
    """Above: the mean loss over runs after the warm-up, on the reported half of the text, with a
    band of one standard deviation. Below: the difference, with its 95 % band."""
    losses = {arm: curves_of(section, arm) for arm in section.arms if not section.cells}
    losses = {arm: runs for arm, runs in losses.items() if runs}
    end = max((run[-1, 0] for runs in losses.values() for run in runs), default=0)
    start = max(section.plan["base_values"].get("warmup_iters") or 0, 0.2 * end)
    if not any((run[:, 0] >= start).sum() > 1 for runs in losses.values() for run in runs):
        return None
    figure = Figure(figsize=(WIDTH, 6.0))
    above, below = figure.subplots(2, sharex=True)
    for arm, runs in losses.items():
        steps = min(runs, key=len)[:, 0]
        steps = steps[(steps >= start) | (steps == steps[-1])]
        style = style_of(section, arm) | {"markersize": 4, "markevery": 0.25}
        mean, se = mean_at(runs, steps)
        band(above, steps, mean, se * math.sqrt(len(runs)), style)
        against = section.plan["arms"][arm].get("against")
        if arm != section.plan["base"] and against in losses:
            reference, other_se = mean_at(losses[against], steps)
            band(below, steps, mean - reference, 1.96 * np.hypot(se, other_se), style)
    below.axhline(0, color=GREY, linewidth=1)
    above.set(ylabel=LOSS)
    below.set(ylabel="difference, nats per token", xlabel="step")
    legend(figure, section, list(losses))
    return figure


def curves_of(section, arm):
    """[curve [points, 2] of steps and losses on the reported half] of an arm's runs."""
    runs = section.reported(arm)["curve"]
    return [np.array(run, float)[:, [0, -1]] for run in runs if run]


def mean_at(runs, steps):
    """Mean [steps] and standard error [steps] of curves at some steps."""
    losses = np.array([np.interp(steps, *run.T) for run in runs])  # [runs, steps]
    sd = losses.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    return losses.mean(0), sd / math.sqrt(len(runs))


def band(axes, steps, mean, half, style):
    """A line with a band of this half width."""
    axes.plot(steps, mean, **style)
    axes.fill_between(steps, mean - half, mean + half, color=style["color"], **BAND)


# ---------------------------------------------------------------- learning rates, contexts, costs


def learning_rates(section):
    """Mean loss of the runs that chose the rates, on the half of the text that is not reported; a
    dot is a single run, a ring the chosen rate."""
    tuned = section.tuned
    if tuned["rate"].nunique() < 2:
        return None
    figure = Figure(figsize=(WIDTH, 3.8))
    axes, base_rate = figure.subplots(), section.plan["base_values"].get("learning_rate", 1)
    shown = [arm for arm in section.arms if (tuned["arm"] == arm).any()]
    for arm in shown:
        runs, style = tuned[tuned["arm"] == arm], style_of(section, arm)
        means = runs.groupby("rate")["loss_tune"].mean()
        axes.plot(means.index * base_rate, means, **style | {"markersize": 5})
        axes.plot(runs["rate"] * base_rate, runs["loss_tune"], ".", color=style["color"], alpha=0.5)
        chosen = section.plan["chosen_lr"].get(arm)
        if chosen in means:
            ring = {"markersize": 11, "markerfacecolor": "none", "color": style["color"]}
            axes.plot(chosen * base_rate, means[chosen], "o", **ring)
    rates = np.sort(tuned["rate"].unique()) * base_rate
    log_axis(axes, rates, [f"{rate:.3g}" for rate in rates])
    axes.set(xlabel="learning rate", ylabel=LOSS)
    legend(figure, section, shown)
    return figure


def extrapolation(section):
    """Mean loss with 1 to 8 times the training context, on the same target tokens, with a 95 %
    interval over the text. Dotted: only the last training context is visible."""
    losses = {arm: contexts(section, arm) for arm in section.arms if not section.cells}
    shown = [arm for arm, by_times in losses.items() if len(by_times) > 1]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 4.0))
    axes = figure.subplots()
    for arm in shown:
        style, times = style_of(section, arm), sorted(losses[arm], key=int)
        mean, low, high, window = np.array([losses[arm][k] for k in times]).T
        places = [int(k) for k in times]
        axes.plot(places, mean, **style | {"markersize": 5})
        axes.fill_between(places, low, high, color=style["color"], **BAND)
        axes.plot(places, window, ":", color=style["color"], linewidth=1.2)
    ticks = sorted({int(k) for arm in shown for k in losses[arm]})
    log_axis(axes, ticks, [f"{k}×" for k in ticks])
    axes.set(xlabel="context, times that of training", ylabel="loss, nats per token")
    legend(figure, section, shown)
    return figure


PANELS = {  # column of rows.load -> label
    "step_ratio": "time of a step, times the base's",
    "memory_bytes": "memory of training, bytes",
}


def costs(section):
    """Left and down is better: a lower loss at less cost."""
    arms = [arm for arm in section.arms if not section.cells]
    prices = {key: {arm: section.cost(arm, key) for arm in arms} for key in PANELS}
    prices = {key: by_arm for key, by_arm in prices.items() if sum(map(known, by_arm.values())) > 1}
    if not prices:
        return None
    figure = Figure(figsize=(WIDTH, 2.6 * len(prices)))
    panels = figure.subplots(len(prices), squeeze=False)[:, 0]
    for axes, (key, by_arm) in zip(panels, prices.items(), strict=True):
        for arm, price in by_arm.items():
            style = style_of(section, arm) | {"linestyle": "none", "markersize": 7}
            axes.plot(price, section.reported(arm)["loss"].mean(), **style)
        axes.set(xlabel=PANELS[key], ylabel="loss, nats per token")
    legend(figure, section, arms)
    return figure
