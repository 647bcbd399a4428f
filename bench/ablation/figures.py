"""The figures of a report: a function takes a Section and returns a matplotlib Figure, or None
where the sweep lacks the data. An arm keeps its colour, mark and dash in all figures of a sweep.
"""

import io
import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from bench.ablation.tables import contexts, known, multiple, short, sign_of, sign_on_test, signed
from common.errors import printable

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
    "larger than the noise": ("D", BLUE),
}
OPEN_MARK = ("o", GREY)
ARROW = {"arrowstyle": "->", "color": MUTED, "linewidth": 1}
TICKS = (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4)  # of an axis of multiples
NAMES = {"muon": "Muon", "adamw": "AdamW", "python_source": "Python"}  # of optimizers and texts
WIDTH = 5.6  # inches, of a figure
COLUMNS = 3  # of small panels
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


def legend(figure, section, shown, **style):
    """Below the figure: the arms that it shows."""
    names = [section.name_of(arm) for arm in shown]
    columns = 3 if max(map(len, names)) < 22 else 1
    figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(shown) / columns))
    styles = [style_of(section, arm) | style for arm in shown]
    handles = [Line2D([], [], label=name, **of) for name, of in zip(names, styles, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def yardsticks(axes, section):
    """Lines at the losses of n-grams that were counted in the base's text, if they are known."""
    for text, loss in section.ngrams:
        axes.axhline(loss, color=MUTED, linewidth=0.8, linestyle=":")
        label = axes.annotate(f"{text}: {loss:.3f}", (1, loss), xycoords=axes.get_yaxis_transform())
        label.set(color=MUTED, fontsize=8, ha="right", va="bottom", backgroundcolor="#ffffffb0")


def log_axis(axes, places, labels):
    """A logarithmic x axis with ticks at these places alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, labels)
    axes.minorticks_off()


# ---------------------------------------------------------------- effects


def forest(section, shown=None):
    """The difference of each change, with its 95 % interval: a filled mark is decided, an arrow
    lies beyond the edge. The small open diamond is the difference at the base's learning rate, in
    the runs that chose the rates. The shaded band is the margin of a tie."""
    rows = section.verdicts.to_dict("records") if shown is None else shown
    rows = [row for row in rows if known(row["difference"])]
    if not rows:
        return None
    own_heading = "own rate" if section.is_tuned else ""
    heads = (own_heading, "base's rate")
    shared = [section.at_shared_rate(row) for row in rows]
    figure, axes = differences(rows, shared, heads, share=0.8)
    margin = section.facts.margin
    if known(margin):
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.45, linewidth=0)
    return figure


def differences(rows, others, heads, share):
    """(Figure, axes) of the differences of rows of verdicts, each joined to another number. The
    edges are at three times the difference below which this share of the rows is."""
    values = [(row["difference"], row["low"], row["high"]) for row in rows]
    texts = []
    for row, other in zip(rows, others, strict=True):
        own = signed(row["difference"], 3) if heads[0] else ""
        texts.append((own, signed(other, 3)))
    edge = 3 * np.quantile(np.abs([row["difference"] for row in rows]), share) + 1e-9
    values = np.column_stack([values, np.clip(others, -edge, edge)])
    figure, axes = dots(rows, values, texts, heads, (-edge, edge))
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="nats per token (left is better)")
    axes.locator_params(axis="x", nbins=4)
    return figure, axes


def dots(rows, values, texts, heads, ends):
    """(Figure, axes) with a row for each row of verdicts. values [rows, 4]: the marked number, its
    interval, and the number joined to it, within two ends; texts: two numbers at the right."""
    figure = Figure(figsize=(WIDTH, 1.2 + 0.27 * len(rows)))
    axes = figure.subplots()
    for place, (row, numbers) in enumerate(zip(rows, values, strict=True)):
        mark, color = MARKS.get(row["verdict"], OPEN_MARK)
        if numbers[0] < ends[0]:
            mark = "<"
        elif numbers[0] > ends[1]:
            mark = ">"
        value, low, high = np.clip(numbers[:3], *ends)
        other = numbers[3]
        axes.plot([value, other], [place, place], ":", color=MUTED, linewidth=1.2)
        axes.plot(other, place, "D", color=MUTED, markerfacecolor="white", markersize=4)
        axes.plot([low, high], [place, place], color=color, linewidth=2.2, solid_capstyle="round")
        inside = color if row["verdict"] in MARKS else "white"
        axes.plot(value, place, mark, color=color, markerfacecolor=inside, markersize=5.5)
    for place, pair in enumerate([heads, *texts], -1):
        for text, x, color in zip(pair, (1.16, 1.38), (INK, MUTED), strict=True):
            style = {"color": color, "fontsize": 8.5, "va": "center", "ha": "right"}
            axes.text(x, place, text, transform=axes.get_yaxis_transform(), **style)
    axes.set(ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), [printable(row["name"], figure=True) for row in rows])
    axes.grid(axis="y", visible=False)
    return figure, axes


# ---------------------------------------------------------------- curves


def curves(section):
    """Above: the mean loss over runs after the warm-up, on the validation text that training scores
    in between, with a band of one standard deviation. Below: the difference, with its 95 % band."""
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


def learning_rates(section, arms=None):
    """Mean loss of the runs that chose the rates, on the half of the text that is not reported; a
    dot is a single run, a ring the chosen rate. Grey: the base, or its replicate."""
    tuned = section.tuned
    by_arm = {arm: tuned[tuned["arm"] == arm] for arm in arms or section.arms}
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
        axes.set_title(section.name_of(arm), fontsize=9)
        for name in dict.fromkeys([*control[:1], arm]):
            rate_line(axes, section, name, BLUE if name == arm else GREY)
        log_axis(axes, rates, [f"{rate:.2g}×" for rate in rates])
        axes.tick_params(labelsize=8)
    figure.supxlabel("learning rate, times the base's", fontsize=9)
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


def extrapolation(section, arms=None):
    """Mean loss with 1 to 8 times the training context, on the same target tokens, with a 95 %
    interval over the text. Dotted: only the last training context is visible."""
    losses = {arm: contexts(section, arm) for arm in arms or section.arms}
    shown = [arm for arm, by_times in losses.items() if len(by_times) > 1]
    if len(shown) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 4.0))
    axes = figure.subplots()
    for arm in shown:
        style = style_of(section, arm)
        times = sorted(losses[arm], key=int)
        mean, low, high, window = np.array([losses[arm][k] for k in times]).T
        places = [int(k) for k in times]
        axes.plot(places, mean, **style | {"markersize": 5, "linestyle": "-"})
        axes.fill_between(places, low, high, color=style["color"], **BAND)
        axes.plot(places, window, ":", color=style["color"], linewidth=1.2)
    ticks = sorted({int(k) for arm in shown for k in losses[arm]})
    log_axis(axes, ticks, [f"{k}×" for k in ticks])
    axes.set(xlabel="context, times the training context", ylabel="loss, nats per token")
    legend(figure, section, shown, linestyle="-")
    return figure


# ---------------------------------------------------------------- only on the page


def example(section, arm):
    """The worth of one arm, as it is read off the base's curve."""
    (row,) = [row for row in section.verdicts.to_dict("records") if row["arm"] == arm]
    curve = section.curve
    loss = row["val_loss_report"]
    worth = row["worth"]
    if not (curve and known(worth)):
        return None
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots()
    axes.plot(curve.grid, [curve.loss_at(k) for k in curve.grid], color=GREY, linewidth=1.6)
    for k, mean, se, _ in curve.points:
        axes.errorbar(k, mean, 1.96 * se, fmt="o", color=GREY, markersize=6)
    yardsticks(axes, section)
    runs = section.reported(arm)["val_loss_report"]
    axes.plot(np.full(len(runs), 1), runs, ".", color=GREEN, alpha=0.6)
    bottom, top = axes.get_ylim()
    axes.plot([1, worth, worth], [loss, loss, bottom], "--", color=GREEN, linewidth=1.2)
    axes.plot(worth, loss, "o", color=GREEN, markersize=7)
    log_axis(axes, curve.multiples, [f"{k:g}×" for k in curve.multiples])
    xlabel = "training tokens of the base (1×: as many as each part has)"
    axes.set(xlabel=xlabel, ylabel=LOSS, ylim=(bottom, top))

    few = 1.6 * curve.multiples[0]
    notes = (  # (text, its place, the point that it is about)
        ("1. The base, trained\non fewer and more tokens", 0.5, 0.85, (few, curve.loss_at(few))),
        (f"2. Each dot is a run\nwith {row['name']}", 0.4, 0.12, (0.98, loss)),
        ("3. The base reaches\ntheir mean here", 1.6, 0.29, (worth, loss)),
        (f"4. {multiple(row)} × the tokens", 0.8, 0.04, (worth, bottom)),
    )
    for text, x, y, point in notes:
        place = x, bottom + y * (top - bottom)
        arrow = ARROW if y > 0.1 else None
        axes.annotate(text, point, place, arrowprops=arrow, ha="center", va="center", fontsize=9)
    return figure


def worths(section, rows):
    """The worth of each part in tokens, with its interval, and in time."""
    rows = [row | {"ends": section.time_ends(row["arm"])} for row in rows]
    return worths_beside(rows, rows, "worth_time", ("tokens", "time"), section.curve_ends)


def worths_beside(rows, others, key, heads, ends, title=""):
    """The worth of each part in tokens, with its interval, and `key` of other rows beside it. These
    may have `ends` of their own."""
    shown = []
    values = []
    texts = []
    for row, other in zip(rows, others, strict=True):
        if not math.isnan(row["worth"]):
            other_ends = other.get("ends", ends)
            beside = np.clip(other[key], *other_ends)
            shown.append(row)
            values.append([row["worth"], row["worth_low"], row["worth_high"], beside])
            other_text = multiple(other, key, other_ends).split()[0]
            texts.append((multiple(row, ends=ends).split()[0], other_text))
    if not shown:
        return None
    figure, axes = dots(shown, values, texts, heads, ends)
    axes.axvline(1, color=INK, linewidth=0.8)
    ticks = [k for k in TICKS if axes.get_xlim()[0] <= k <= axes.get_xlim()[1]]
    log_axis(axes, ticks, [f"{k:g}×" for k in ticks])
    axes.set(xlabel="worth, times the base (right is better)")
    axes.set_title(title, fontsize=9, loc="left")
    return figure


def agreement(section, other):
    """The worth of each part in one base beside its worth in another base, of another size, text or
    optimizer; the decisions that the other base shows, and the rank correlation of differences."""
    there = {row["arm"]: row for row in other.swaps if row["n"] > 1 and known(row["difference"])}
    rows = [row for row in section.swaps if row["arm"] in there and known(row["difference"])]
    others = [there[row["arm"]] | {"ends": other.curve_ends} for row in rows]
    if len(rows) < 3:
        return None
    decided = []  # 1: the other base agrees, -1: it contradicts, 0: it is undecided
    added = 0
    for row, beside in zip(rows, others, strict=True):
        own_sign = sign_of(row)
        other_sign = sign_of(beside) or 0
        if own_sign:
            decided.append(own_sign * other_sign)
        elif other_sign:
            added += 1
    heads = [short(s.cost(s.plan["base"], "parameters")) for s in (section, other)]
    for kind, key in (("base_values", "optimizer"), ("data", "dataset")):
        words = [section.plan[kind][key], other.plan[kind][key]]
        if words[0] != words[1]:
            heads = [NAMES.get(word, word) for word in words]
    title = (
        f"Of {len(decided)} decisions of {heads[0]}, {heads[1]} agrees with {decided.count(1)}\n"
        f"and contradicts {decided.count(-1)}. It adds {added} of its own.\n"
    )
    title += rank_correlation(
        [row["difference"] for row in rows], [row["difference"] for row in others]
    )
    return worths_beside(rows, others, "worth", heads, section.curve_ends, title)


def on_test_split(rows):
    """The decided differences of rows of verdicts, beside those on the test split."""
    rows = [row for row in rows if sign_of(row) and sign_on_test(row) is not None]
    if len(rows) < 3:
        return None
    tests = [row["test"] for row in rows]
    figure, axes = differences(rows, tests, ("validation", "test"), share=0.5)
    agree = [sign_of(row) * sign_on_test(row) for row in rows]
    title = (
        f"Of {len(rows)} differences on the validation plays, the test plays\n"
        f"show {agree.count(1)}, do not show {agree.count(0)}, and contradict {agree.count(-1)}.\n"
    )
    title += rank_correlation([row["difference"] for row in rows], tests)
    axes.set_title(title, fontsize=9, loc="left")
    return figure


def rank_correlation(first, second):
    """Spearman's correlation as text; of ten parts or more with Fisher's 95 % interval."""
    result = stats.pearsonr(stats.rankdata(first), stats.rankdata(second))
    low, high = result.confidence_interval()
    ends = f" [{low:.2f}, {high:.2f}]" if len(first) >= 10 else f" of {len(first)} parts"
    return f"Rank correlation {result.statistic:.2f}{ends}.".replace("-", "\u2212")
