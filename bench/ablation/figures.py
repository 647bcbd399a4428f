"""The figures of a report: a function takes a Section and returns a matplotlib Figure, or None
where the sweep lacks the data. report.py has their titles and captions. An arm keeps its
colour, mark and dash in all panels of a sweep that show several arms.
"""

import io
import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from bench.ablation.tables import contexts, known, signed
from common.errors import printable
from tokens import ngrams

INK = "#1c2128"
MUTED = "#57606a"
FAINT = "#d0d7de"
# Grey, and the colours of Okabe and Ito (2008) that show on white. They differ for readers who do
# not see red or green.
COLORS = ("#6e7781", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY, BLUE, RED, GREEN = COLORS[:4]
ARM_COLORS = COLORS[1:]
ARM_MARKERS = "osD^vPX*"  # as many as keep the pairs of colour and mark distinct for 24 arms
DASHES = ("-", "--", ":", "-.")
MARKS = {  # of a verdict; others get OPEN_MARK
    "better": ("^", GREEN),
    "worse": ("v", RED),
    "tie": ("s", BLUE),
    "better, by more than the noise": ("D", BLUE),
    "worse, by more than the noise": ("D", BLUE),
}
OPEN_MARK = ("o", GREY)
WIDTH = 5.6  # inches, of a figure
COLUMNS = 3  # of small panels
LINEAR = 0.01  # nats: below this the axis of longer contexts is linear
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


def style_of(section, arm):
    """The style of an arm: the base and its replicate are grey."""
    if arm == section.plan["base"]:
        return {"color": GREY, "linewidth": 2, "marker": "o"}
    if section.is_replicate(arm):
        return {"color": GREY, "linewidth": 1.4, "marker": "o", "linestyle": "--"}
    place = section.arms.index(arm) - 1  # 24 of them differ
    return {
        "color": ARM_COLORS[place % len(ARM_COLORS)],
        "marker": ARM_MARKERS[place % len(ARM_MARKERS)],
        "linestyle": DASHES[place // len(ARM_COLORS) % len(DASHES)],
        "linewidth": 1.4,
    }


def legend(figure, section, shown, **style):
    """Below the figure: the arms that it shows."""
    names = [printable(arm, figure=True) for arm in shown]
    columns = 3 if max(map(len, names)) < 22 else 1
    figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(shown) / columns))
    styles = [style_of(section, arm) | style for arm in shown]
    handles = [Line2D([], [], label=name, **of) for name, of in zip(names, styles, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def yardsticks(axes, section):
    """Lines at the losses of n-grams that were counted in the base's text, if they are known; the
    best on top."""
    for text, loss in reversed(ngrams.named(section.plan["ngrams"]).items()):
        axes.axhline(loss, color=MUTED, linewidth=0.8, linestyle=":")
        label = axes.annotate(f"{text}: {loss:.3f}", (1, loss), xycoords=axes.get_yaxis_transform())
        label.set(color=MUTED, fontsize=8, ha="right", va="bottom", backgroundcolor="#ffffffb0")


def log_axis(axes, places, labels):
    """A logarithmic x axis with ticks at these places alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, labels)
    axes.minorticks_off()


def forest(section):
    """The difference of each change, with its 95 % interval, and as a number at the right. A filled
    mark: better, worse or a tie; an open circle: any other verdict."""
    rows = [row for row in section.verdicts.to_dict("records") if known(row["difference"])]
    if not rows:
        return None
    # The edges are at three times the difference below which four of five rows are.
    edge = 3 * np.quantile(np.abs([row["difference"] for row in rows]), 0.8) + 1e-9
    figure, axes = dots(rows, edge)
    notes = []  # of what only some of these figures show
    if any(abs(row["difference"]) > edge for row in rows):
        notes.append("An arrow lies beyond the edge.")
    margin = section.facts.margin
    if known(margin):
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.45, linewidth=0)
        notes.append("The shaded band is the margin of a tie.")
    figure.set_label(" ".join(notes))  # the end of its caption
    return figure


def dots(rows, edge):
    """(Figure, axes) with a row for each row of verdicts: its difference with its interval, and as
    a number at the right. edge: where they are cut."""
    figure = Figure(figsize=(WIDTH, 1.2 + 0.27 * len(rows)))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        mark, color = MARKS.get(row["verdict"], OPEN_MARK)
        if row["difference"] < -edge:
            mark = "<"
        elif row["difference"] > edge:
            mark = ">"
        numbers = (row["difference"], row["low"], row["high"])
        value, low, high = np.clip(numbers, -edge, edge)
        axes.plot([low, high], [place, place], color=color, linewidth=2.2, solid_capstyle="round")
        inside = color if row["verdict"] in MARKS else "white"
        axes.plot(value, place, mark, color=color, markerfacecolor=inside, markersize=5.5)
        style = {"color": INK, "fontsize": 8.5, "va": "center", "ha": "right"}
        text = signed(row["difference"], 3)
        axes.text(1.16, place, text, transform=axes.get_yaxis_transform(), **style)
    axes.set(ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), [printable(row["name"], figure=True) for row in rows])
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="nats per token (left is better)")
    axes.locator_params(axis="x", nbins=4)
    return figure, axes


# ---------------------------------------------------------------- curves


def curves(section):
    """Above: the mean loss over runs after the warm-up, as evaluated during training, with a band
    of one standard deviation. Below: the difference from the base alone, or from the rung below,
    with its 95 % band."""
    runs_of = {arm: curves_of(section, arm) for arm in section.arms}
    losses = {arm: runs for arm, runs in runs_of.items() if runs}
    start = section.plan["base_values"].get("warmup_iters") or 0
    if not any(len(late_steps(runs, start)) > 1 for runs in losses.values()):
        return None
    figure = Figure(figsize=(WIDTH, 6.0))
    above, below = figure.subplots(2, sharex=True)
    for arm, runs in losses.items():
        steps = late_steps(runs, start)
        style = style_of(section, arm) | {"markersize": 4, "markevery": 0.25}
        mean, se = mean_at(runs, steps)
        band(above, steps, mean, se * math.sqrt(len(runs)), style)
        against = section.plan["arms"][arm].get("against")
        if arm != section.plan["base"] and against in losses:
            reference, other_se = mean_at(losses[against], steps)
            half = stats.t.ppf(0.975, max(len(runs) + len(losses[against]) - 2, 1))
            band(below, steps, mean - reference, half * np.hypot(se, other_se), style)
    yardsticks(above, section)
    below.axhline(0, color=GREY, linewidth=1)
    above.set(ylabel=LOSS)
    below.set(ylabel="difference, nats per token", xlabel="step")
    legend(figure, section, list(losses))
    return figure


def curves_of(section, arm):
    """[curve [points, 2] of steps and losses on the reported half] of an arm's runs."""
    runs = section.reported(arm)["curve"]
    return [np.array(run, float)[:, [0, -1]] for run in runs if run]


def late_steps(runs, start):
    """The steps of the shortest curve after the warm-up and the first fifth, and its last."""
    steps = min(runs, key=len)[:, 0]
    return steps[(steps >= max(start, 0.2 * steps[-1])) | (steps == steps[-1])]


def mean_at(runs, steps):
    """Mean [steps] and standard error [steps] of curves at some steps."""
    losses = np.array([np.interp(steps, *run.T) for run in runs])  # [runs, steps]
    sd = losses.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    return losses.mean(0), sd / math.sqrt(len(runs))


def band(axes, steps, mean, half, style):
    """A line with a band of this half width."""
    axes.plot(steps, mean, **style)
    axes.fill_between(steps, mean - half, mean + half, color=style["color"], **BAND)


# ---------------------------------------------------------------- learning rates, contexts


def learning_rates(section):
    """Mean loss of the runs that chose the rates, on the half of the text that is not reported; a
    dot is a single run, a ring the chosen rate. Grey: the base, or base again."""
    tuned = section.tuned
    by_arm = {arm: tuned[tuned["arm"] == arm] for arm in section.arms}
    varied = {arm: runs for arm, runs in by_arm.items() if runs["rate"].nunique() > 1}
    if not varied:
        return None
    control = [arm for arm in varied if arm == section.plan["base"] or section.is_replicate(arm)]
    shown = [arm for arm in varied if arm not in control] or control
    rows = math.ceil(len(shown) / COLUMNS)
    figure = Figure(figsize=(WIDTH, 0.5 + 1.35 * rows))
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    rates = np.sort(tuned["rate"].unique())
    for axes, arm in zip(panels, shown, strict=False):
        axes.set_title(printable(arm, figure=True), fontsize=9)
        for name in dict.fromkeys([*control[:1], arm]):
            rate_line(axes, section, name, BLUE if name == arm else GREY)
        log_axis(axes, rates, [f"{rate:.2g}×" for rate in rates])
        axes.tick_params(labelsize=8)
    figure.supxlabel("learning rate, times the given one", fontsize=9)
    figure.supylabel(LOSS, fontsize=9)
    return figure


def rate_line(axes, section, arm, color):
    """The loss of an arm against its rate."""
    runs = section.tuned[section.tuned["arm"] == arm]
    means = runs.groupby("rate")["val_loss_tune"].mean()
    chosen = section.plan["chosen_lr"].get(arm)
    axes.plot(means.index, means, color=color, linewidth=1.6)
    axes.plot(runs["rate"], runs["val_loss_tune"], ".", color=color, alpha=0.5, markersize=4)
    if chosen in means:
        axes.plot(chosen, means[chosen], "o", markersize=9, markerfacecolor="none", color=color)


def extrapolation(section):
    """Mean loss with 1 to 8 times the training context, minus the loss on the same target tokens
    where only the last training context is visible. Below zero a longer context helps; the axis is
    logarithmic beyond the two lines next to zero."""
    losses = {arm: contexts(section, arm) for arm in section.arms}
    shown = [arm for arm, by_times in losses.items() if len(by_times) > 1]
    if len(shown) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 4.0))
    axes = figure.subplots()
    axes.axhline(0, color=INK, linewidth=0.8)
    for arm in shown:
        times = sorted(losses[arm], key=int)
        mean, _, _, window = np.array([losses[arm][k] for k in times]).T
        style = style_of(section, arm) | {"markersize": 5, "linestyle": "-"}
        axes.plot([int(k) for k in times], mean - window, **style)
    ticks = sorted({int(k) for arm in shown for k in losses[arm]})
    log_axis(axes, ticks, [f"{k}×" for k in ticks])
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set(xlabel="context, times the training context", ylabel="change, nats per token")
    low, high = axes.get_ylim()
    ticks = [0, *(sign * 10**k * LINEAR for k in range(3) for sign in (-1, 1))]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter("{x:g}")
    legend(figure, section, shown, linestyle="-")
    return figure
