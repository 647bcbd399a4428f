"""The figures of the answer page that no report of a single sweep has. As in figures.py, each
returns a Figure, or None without data, and its description is the caption."""

import math

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from bench.ablation.answer import noise_of
from bench.ablation.figures import BLUE, FAINT, GREEN, GREY, INK, OPEN_MARK, RED, WIDTH
from bench.ablation.losses import REPORTED
from bench.ablation.worth import Curve

TICKS = (0.25, 0.5, 1, 2)
MARKS = {  # right is better here
    "better": (">", GREEN),
    "worse": ("<", RED),
    "tie": ("s", BLUE),
    "larger than the noise": ("D", BLUE),
}
BAR = 96, 18, 1.3  # width and height of a bar in a table, and its reach in doublings of the tokens
ARROW = 1.25  # the multiple of the tokens that an arrow spans
BASES = {"gpt2": "GPT-2", "llama": "LLaMA"}


def noise(sections, tips):
    """Each dot is one run of a base, or of its second copy (hollow), minus their mean: the same
    model, and another seed. The bar is two standard deviations of a run to each side; in a
    factorial they come from the runs of all cells."""
    shown = [section for section in sections if section.main.base_n > 1]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 0.9 + 0.26 * len(shown)))
    axes = figure.subplots()
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, section in enumerate(shown):
        mean, (sd, runs) = section.main.base_mean, noise_of(section)
        (bar,) = axes.plot([-2 * sd, 2 * sd], [place] * 2, color=FAINT, linewidth=7, zorder=0.5)
        tips.add(bar, f"{section.label}: sd {sd:.4f} over {runs} runs")
        for arm, fill in base_copies(section):
            rows = section.runs.done.get(arm, {}).values()
            losses = [row[column_of(section)] - mean for row in rows]
            style = {"color": GREY, "markersize": 5, "markerfacecolor": GREY if fill else "white"}
            axes.plot(losses, [place] * len(losses), "o", **style)
    axes.set(
        yticks=range(len(shown)),
        yticklabels=[section.label for section in shown],
        ylim=(len(shown) - 0.4, -0.6),
        xlabel="loss of a run minus the mean, nats per token",
    )
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="y", visible=False)
    return figure


def base_copies(section):
    """[(arm, whether it is the base)] of the base and its second copy."""
    arms = section.sweep["arms"]
    copies = [arm for arm, facts in arms.items() if (facts.get("again") or facts.get("replicate"))]
    return [(section.sweep["base"], True), *((arm, False) for arm in copies)]


def column_of(section):
    """The column of a row that holds the sweep's metric on the reported half of the text."""
    return REPORTED[section.sweep["metric"]]


def noise_worth(section):
    """(k below, k above): what two standard deviations of a run are worth in tokens, to each side;
    None without a curve."""
    analysis, (sd, _) = section.main, noise_of(section)
    if not analysis.curve or not math.isfinite(sd):
        return None
    ends = (analysis.curve.loss_at(1) + side * 2 * sd for side in (1, -1))
    low, high = (multiple_of_loss(analysis.curve, end) for end in ends)
    return low, high


def multiple_of_loss(curve: Curve, loss):
    """The multiple of the tokens at which the base has a loss, not beyond the curve's ends."""
    means = np.array([[point[1]] for point in curve.points], float)
    return float(np.clip(curve.multiple(loss, means)[0], *curve.multiples[[0, -1]]))


def worths(parts, tips):
    """What each part is worth: so many times the training tokens, with the 95 % interval. The grey
    band is two standard deviations of one run to each side, the noise of a single seed, in the
    median over the parts. Filled marks are decided after the correction over the whole page: green
    better, red worse, blue a tie. An arrow leads beyond the tokens that were measured. A stroke is
    the worth where each arm has its own learning rate, if another experiment chose one."""
    shown = [part for part in parts if part.claim.subject.worth]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 0.9 + 0.23 * (len(shown) + 1)))
    axes = figure.subplots()
    band = typical([noise_worth(part.claim.section) for part in shown])
    if band is not None:
        axes.axvspan(*band, color=FAINT, alpha=0.5, linewidth=0)
        axes.text(band[1] * 1.04, 0, "noise of one run", va="center", fontsize=9)
    axes.axvline(1, color=INK, linewidth=0.8)
    for place, part in enumerate(shown, 1):
        draw_worth(axes, place, part, tips)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [f"{k:g}×" for k in TICKS])
    axes.minorticks_off()
    axes.set(
        yticks=range(len(shown) + 1),
        yticklabels=["the same model", *(part.name for part in shown)],
        ylim=(len(shown) + 0.6, -0.6),
        xlim=(0.19, 2.6),
        xlabel="worth, times the training tokens (right is better)",
    )
    axes.tick_params(axis="y", labelsize=9)
    axes.grid(axis="y", visible=False)
    return figure


def typical(bands):
    """The band between the medians of all lower and of all upper ends; None if there is none."""
    known = [band for band in bands if band]
    return np.median(known, axis=0) if known else None


def ends_of(worth):
    """The ends of a worth's interval; the worth itself in place of one that is unknown."""
    return [worth.k if math.isnan(end) else end for end in (worth.low, worth.high)]


def draw_worth(axes, place, part, tips):
    subject = part.claim.subject
    worth, (mark, color) = subject.worth, MARKS.get(subject.word, OPEN_MARK)
    ends = ends_of(worth)
    k, low, high = np.clip((worth.k, *ends), worth.least, worth.most)
    axes.plot([low, high], [place] * 2, color=color, linewidth=2.2, solid_capstyle="round")
    for end, beyond, factor in ((low, ends[0] < low, 1 / ARROW), (high, ends[1] > high, ARROW)):
        if beyond:
            arrow_style = {"arrowstyle": "->", "color": color}
            axes.annotate("", (end * factor, place), (end, place), arrowprops=arrow_style)
    fill = color if subject.word in MARKS else "white"
    style = {"color": color, "markersize": 7, "markerfacecolor": fill, "markeredgewidth": 1.6}
    (dot,) = axes.plot(k, place, mark, **style)
    tips.add(dot, f"{part.name}: {subject.word}, worth {worth} the tokens")
    own = part.estimate(own_rate=True)
    if own and own is not part.claim:
        worth, color = own.subject.worth, MARKS.get(own.subject.word, OPEN_MARK)[1]
        k = np.clip(worth.k, worth.least, worth.most)
        (stroke,) = axes.plot(k, place, "|", color=color, markersize=11, markeredgewidth=1.8)
        tips.add(stroke, f"{part.name}: {own.subject.word}, worth {worth} at its own learning rate")


def bar(worth, word):
    """A worth as a picture as high as a line of text, on a logarithmic scale: 1 × is in the middle,
    and what lies beyond the reach is at its end."""
    width, height, reach = BAR

    def place(k):
        doublings = np.clip(math.log2(k) if k > 0 else -reach, -reach, reach)
        return float(width / 2 * (1 + 0.9 * doublings / reach))

    k, low, high = map(place, (worth.k, *ends_of(worth)))
    middle = height / 2
    filled = ' class="open"' if word not in MARKS else ""
    return Markup(
        f'<svg class="bar {word.replace(" ", "-")}" viewBox="0 0 {width} {height}" '
        f'aria-hidden="true"><path class="axis" d="M{width / 2} 0V{height}"/>'
        f'<path class="span" d="M{low:.1f} {middle}H{max(high, low + 0.1):.1f}"/>'
        f'<circle{filled} cx="{k:.1f}" cy="{middle}" r="4"/></svg>'
    )
