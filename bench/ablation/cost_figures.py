"""The figures of a report that show costs, and losses beyond the training context."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from bench.ablation.figures import BAND, GREY, LOSS, WIDTH, legend, log_axis, style_of
from bench.ablation.sentences import arms_of
from bench.ablation.tables import contexts_of, why_not

PANELS = (  # key of a row of costs.jsonl, scale, label
    ("decode_ms_per_token", 1, "decoding, ms per token"),
    ("peak_memory_bytes", 1e-6, "peak memory of training, MB"),
)


def pareto(section, tips):
    """The dashed line joins the arms that no other arm beats in both loss and cost."""
    figure = Figure(figsize=(WIDTH, 7.4))
    panels = figure.subplots(2)
    shown = set()
    for axes, (key, scale, label) in zip(panels, PANELS, strict=True):
        points = costs_and_losses(section, key, scale)
        front = [
            (cost, loss)
            for place, (cost, loss, _) in enumerate(points)
            if all(loss < cheaper[1] for cheaper in points[:place])
        ]
        if front:
            line = {"color": GREY, "linewidth": 1, "linestyle": "--"}
            axes.step(*zip(*front, strict=True), where="post", **line)
        for cost, loss, arm in points:
            style = style_of(section, arm)
            (dot,) = axes.plot(cost, loss, style["marker"], color=style["color"], markersize=7)
            tips.add(dot, f"{arm}: {cost:.4g} {label.split(', ')[1]}, loss {loss:.4f}")
            shown.add(arm)
        axes.set(xlabel=label, ylabel=LOSS)
        axes.margins(0.2, 0.16)
    if not shown:
        return None

    if len(section.machines) > 1:
        figure.suptitle(f"costs on {section.machine}", fontsize=9)
    legend(figure, section, shown, labelled=True)
    figure.draw_without_rendering()  # the layout is known from here on
    for axes, (key, scale, _) in zip(panels, PANELS, strict=True):
        label_points(axes, costs_and_losses(section, key, scale))
    return figure


def costs_and_losses(section, key, scale):
    """[(cost, mean loss, arm)] of the arms that have both, cheapest first."""
    losses = {verdict.arm: verdict.loss for verdict in section.verdicts.values()}
    losses[section.sweep["base"]] = section.main.base_mean
    points = []
    for arm in arms_of(section):
        cost, loss = section.costs.get(arm, {}).get(key), losses.get(arm, np.nan)
        if cost is not None and np.isfinite(loss):
            cost = cost["median"] if isinstance(cost, dict) else cost
            points.append((cost * scale, loss, arm))
    return sorted(points)


def label_points(axes, points):
    """Write each point's name beside it, where it overlaps least with marks, lines and names."""
    frame = axes.get_window_extent()
    marks = [axes.transData.transform(point[:2]) for point in points]
    occupied = [Bbox.from_bounds(x - 8, y - 8, 16, 16) for x, y in marks]
    for line in axes.lines:
        occupied += segments(axes.transData.transform(line.get_xydata()), line)

    for (x, y), (_, _, arm) in zip(marks, points, strict=True):
        text = axes.text(0, 0, arm, fontsize=8.5, transform=None, va="bottom", ha="left")
        size = text.get_window_extent()
        text.set_in_layout(False)
        best = min(spots(x, y, size.width, size.height), key=lambda box: cost(box, occupied, frame))
        text.set(transform=axes.transData, position=axes.transData.inverted().transform(best.p0))
        occupied.append(best)


def segments(corners, line):
    """Thin boxes along a line of steps, given its points in pixels."""
    if line.get_marker() != "None" or len(corners) < 2:
        return []
    boxes = []
    for (x0, y0), (x1, y1) in zip(corners[:-1], corners[1:], strict=True):
        boxes += [
            Bbox([[x0, y0 - 1], [x1, y0 + 1]]),
            Bbox([[x1 - 1, min(y0, y1)], [x1 + 1, max(y0, y1)]]),
        ]
    return boxes


def spots(x, y, width, height):
    """Boxes for a name around a point in pixels, the nearest and most usual first."""
    for gap in (9, 16, 26, 38):
        for side, rise in ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            left = x + (side - 1) * width / 2 + side * gap
            bottom = y + (rise - 1) * height / 2 + rise * gap
            yield Bbox.from_bounds(left, bottom, width, height)


def cost(box, occupied, frame):
    """How much of a box lies on something else or outside the frame, in square pixels."""
    overlaps = (Bbox.intersection(box, other) for other in occupied)
    covered = sum(found.width * found.height for found in overlaps if found)
    inside = Bbox.intersection(box, frame)
    outside = box.width * box.height - (inside.width * inside.height if inside else 0)
    return covered + 10 * outside


# --- beyond the training context


def extrapolation(section, tips):
    """Each line shows the mean loss over runs with 1 to 8 times the training context, with its 95 %
    interval over the text. A dotted line shows the loss on the same tokens where the model sees
    only the last training context."""
    found = {arm: contexts_of(section, arm) for arm in arms_of(section)}
    shown = [arm for arm, losses in found.items() if len(losses) > 1]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 4.4))
    axes = figure.subplots()
    for arm in shown:
        style, times = style_of(section, arm), sorted(found[arm])
        mean, low, high, window = np.array([found[arm][each] for each in times]).T
        (line,) = axes.plot(times, mean, **style | {"markersize": 5})
        parts = (f"{each}×: {loss:.3f}" for each, loss in zip(times, mean, strict=True))
        tips.add(line, f"{section.named(arm)}: {', '.join(parts)}")
        axes.fill_between(times, low, high, color=style["color"], **BAND)
        axes.plot(times, window, ":", color=style["color"], linewidth=1.2)
    ticks = sorted({each for arm in shown for each in found[arm]})
    log_axis(axes, ticks, [f"{each}×" for each in ticks])
    axes.set(xlabel="context, times that of training", ylabel="loss, nats per token")
    legend(figure, section, shown, {arm: why_not(section, arm) for arm in found})
    return figure
