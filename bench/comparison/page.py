"""The tables and figures of runs side by side, and the page that holds both."""

import time

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from bench.ablation import plots, report
from bench.ablation.figures import INK, WIDTH, Tips, style_at
from bench.ablation.sentences import DASH
from bench.ablation.tables import Cell, Table, number, short
from bench.comparison.runs import comparable, differing
from training.run_folder import duration, name_lines

OURS = "bench/compare.py"  # in both files, so that they are known as ours and may be replaced
AXES = (  # attribute of a Run, the title of its panel, the axis
    ("steps", "Against steps", "steps"),
    ("tokens", "Against tokens", "training tokens"),
    ("seconds", "Against seconds", "seconds of training steps"),
)
UNITS = {"losses": "validation loss, nats per token", "bits": "validation, bits per byte"}
LONGEST = 22  # characters of a name, and of a value on a terminal
EARLY = 0.2  # the share of a run whose losses may lie above the figure


# ---------------------------------------------------------------- tables


def runs_table(runs):
    """Each run with its losses and costs."""
    rows = []
    for run in runs:
        best, final = Cell(), [Cell() for _ in range(3)]
        if len(run.steps):
            place = int(np.argmin(run.losses))
            best = number(float(run.losses[place]), ".4f", tip=f"at step {run.steps[place]:,.0f}")
            final = [run.losses[-1], run.bits[-1], run.seconds[-1]]
            final = [number(float(v), form) for v, form in zip(final, FORMS, strict=True)]
            final[2].tip = duration(float(run.seconds[-1])) if final[2].text != DASH else ""
        rows.append(
            [
                Cell(clipped(run.name), kind="arm", tip=run.name),
                final[0],
                best,
                final[1],
                number(run.parameters, short, tip=f"{run.parameters:,.0f}"),
                Cell(f"{run.last_step:,}", run.last_step),
                final[2],
                number(run.tokens_per_second, ",.0f"),
            ]
        )
    return Table(
        "runs",
        "Losses and costs",
        "Final and best: nats per token of the validation split, at the last and at the best"
        " evaluation; bits per byte at the last one. Seconds: of training steps, without"
        " evaluations, up to there. Tokens/s: the median over the log.",
        ["run", "final", "best", "bits/byte", "params", "steps", "seconds", "tokens/s"],
        rows,
    )


FORMS = (".4f", ".4f", ",.0f")  # of a loss, of bits per byte, of seconds
ON_TERMINAL = ("run", "final", "best", "bits/byte", "params", "seconds", "tokens/s")


def differences_table(runs):
    """What differs in the configurations of runs, one row for each key; None if nothing does."""
    found = differing(runs)
    if not found:
        return None
    rows = [
        [Cell(key, kind="arm"), *[Cell(DASH if v is None else str(v)) for v in values]]
        for key, values in found.items()
    ]
    note = f"Keys that all runs share are left out. {DASH}: not set, or unknown to the run."
    return Table(
        "differences", "What differs", note, ["key", *[clipped(run.name) for run in runs]], rows
    )


def differences_lines(runs):
    """The same for a terminal: a line for each run."""
    found, lines = differing(runs), []
    for place, run in enumerate(runs):
        values = [(key, str(values[place])) for key, values in found.items()]
        texts = [f"{key}={clipped(v)}" for key, v in values if v != "None"]
        lines.append(f"{run.name}: {', '.join(texts)}")
    return ["What differs", *lines] if found else []


def clipped(text):
    """A text without its middle, if it is too long."""
    half = LONGEST // 2 - 1
    return text if len(text) <= LONGEST else f"{text[:half]}\u2026{text[-half:]}"


# ---------------------------------------------------------------- figures


def draw_panel(axes, runs, measure, axis, tips):
    """The curves of some runs: `measure` of each evaluation against an attribute of Run."""
    ends = []
    for place, run in enumerate(runs):
        xs, ys = getattr(run, axis), getattr(run, measure)
        known = np.isfinite(xs) & np.isfinite(ys)
        if not known.any():
            continue
        xs, ys = xs[known], ys[known]
        style = style_at(place) | {"markersize": 3.5}
        (line,) = axes.plot(xs, ys, **style)
        tips.add(line, f"{run.name}: {ys[-1]:.4f} at {xs[-1]:,.0f} {axis}")
        ends.append(((xs[-1], ys[-1]), f"{clipped(run.name)} {ys[-1]:.3f}", style["color"]))
    axes.set_ylim(*shown_range(runs, measure))
    axes.set_xlim(left=0)
    if axis != "seconds":
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylabel(UNITS[measure], color=INK)
    name_lines(axes, ends)


def shown_range(runs, measure):
    """(low, high) of the y axis. The first EARLY of each run may lie above it."""
    losses, late = [], []
    for run in runs:
        values = getattr(run, measure)
        known = np.isfinite(values)
        losses.extend(values[known])
        late.extend(values[known & (run.steps >= EARLY * max(run.steps, default=0))])
    low, high = min(losses), max(late or losses)
    margin = 0.06 * (high - low) or 0.05
    return low - margin, high + margin


def figure_of(runs, measure, axes_shown, tips):
    """A figure with a panel for each of some AXES, side by side."""
    height = 3.4 + 0.12 * max(0, len(runs) - 6)
    figure = Figure(figsize=(1.12 * WIDTH * len(axes_shown), height))
    panels = figure.subplots(1, len(axes_shown), squeeze=False)[0]
    for axes, (axis, _, label) in zip(panels, axes_shown, strict=True):
        draw_panel(axes, runs, measure, axis, tips)
        axes.set_xlabel(label)
    return figure


def pictures(runs, measure):
    """(the PNG of all panels, [(title, SVG for the page)])."""
    with matplotlib.rc_context(plots.STYLE):
        figure = figure_of(runs, measure, AXES, Tips())
        png = plots.saved(figure, "png", dpi=110, metadata={"Software": OURS})
        drawn = []
        for axis in AXES:
            tips = Tips()
            svg = plots.saved(figure_of(runs, measure, [axis], tips), "svg", transparent=True)
            drawn.append((axis[1], plots.inline(svg.decode(), axis[0], axis[1], tips)))
    return png, drawn


# ---------------------------------------------------------------- the whole


def contents(runs, remarks, command, renewed=None):
    """{suffix: content} of both files, without the PNG if no run has an evaluation."""
    same_tokens, _, notes = comparable(runs)
    measure = "losses"
    if not same_tokens and any(np.isfinite(run.bits).any() for run in runs):
        measure = "bits"
    drawn, files = [], {}
    if any(np.isfinite(getattr(run, measure)).any() for run in runs):
        files[".png"], drawn = pictures(runs, measure)

    early = f"The first {EARLY:.0%} of a run may lie above the figure."
    caption = f"Each mark is an evaluation; a name stands at the height of its last one. {early}"
    values = {
        "title": f"{len(runs)} run{'' if len(runs) == 1 else 's'} side by side",
        "remarks": [*notes, *remarks],
        "tables": list(filter(None, [runs_table(runs), differences_table(runs)])),
        "plots": drawn,
        "caption": caption,
        "command": command,
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "renewed": renewed,
    }
    files[".html"] = report.render("runs.html", **values)
    return files


def for_terminal(runs, remarks):
    """The table, what differs and what to know, in 80 columns."""
    lines = [*comparable(runs)[2], *remarks]
    parts = [(runs_table(runs), ON_TERMINAL), "\n".join(differences_lines(runs)), "\n".join(lines)]
    return report.for_terminal(*parts)
