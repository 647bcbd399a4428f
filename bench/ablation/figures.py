"""
The figures of a report, drawn with matplotlib. Each function takes a section and a Tips, and
returns a Figure, or None if the sweep has no data for it.
"""

import numpy as np
from matplotlib.figure import Figure
from scipy import stats as scipy_stats

INK, FAINT = "#1c2128", "#d0d7de"
COLORS = (  # the page's --c0 to --c9
    *("#6e7781", "#0b66c3", "#d1495b", "#2a8f5a", "#b26a00"),
    *("#7d4fc4", "#0f8b8d", "#c2409a", "#8a7a00", "#46607a"),
)
GREY, BLUE, RED, GREEN = COLORS[:4]
ARM_COLORS = COLORS[1:]
DASHES = ("-", "--", ":", "-.")
MARKS = {
    "better": ("<", GREEN),
    "worse": (">", RED),
    "tie": ("s", BLUE),
    "undecided": ("o", GREY),
    "noise": ("D", GREY),
    "larger than the noise": ("o", BLUE),
    "not seen": ("o", GREY),
    "no verdict": ("o", GREY),
}
WIDTH = 4.4  # inches, the width of a phone's column, so that the text stays readable
BAND = {"alpha": 0.13, "linewidth": 0}


class Tips(dict):
    """{id of a mark: the text to show when the pointer is over it}."""

    def add(self, artist, text):
        artist.set_gid(f"tip-{len(self)}")
        self[artist.get_gid()] = text


def style_of(section, arm):
    """The base is grey. Every other arm keeps its colour and dash in all plots of a sweep."""
    if arm == section.sweep["base"]:
        return {"color": GREY, "linewidth": 2}
    place = list(section.sweep["arms"]).index(arm) - 1
    return {
        "color": ARM_COLORS[place % len(ARM_COLORS)],
        "linestyle": DASHES[place // len(ARM_COLORS) % len(DASHES)],
        "linewidth": 1.4,
    }


# --- effects


def forest(section, tips):
    """Differences with their 95 % intervals, in the sweep's order. The band is the tie margin."""
    verdicts, margin = section.main.verdicts, section.main.margin
    figure = Figure(figsize=(WIDTH, 0.9 + 0.34 * len(verdicts)))
    axes = figure.subplots()
    if margin > 0:
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.45, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, verdict in enumerate(verdicts):
        if verdict.n and np.isfinite(verdict.mean):
            interval(axes, place, verdict, tips)
        else:
            position = {"va": "center", "transform": axes.get_yaxis_transform()}
            axes.text(0.02, place, verdict.word, color=RED, fontsize=9, **position)

    axes.set(
        yticks=range(len(verdicts)),
        ylim=(len(verdicts) - 0.4, -0.6),
        xlabel="nats per token (left: better)",
    )
    axes.set_yticklabels([("× " if one.interaction else "") + one.arm for one in verdicts])
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="y", visible=False)
    return figure


def interval(axes, place, verdict, tips):
    """One line of the forest plot: the interval and a mark at the mean."""
    mark, color = MARKS[verdict.word]
    low, high = verdict.mean, verdict.mean
    if np.isfinite(verdict.low):
        low, high = verdict.low, verdict.high
    (line,) = axes.plot(
        [low, high], [place, place], color=color, linewidth=2.2, solid_capstyle="round"
    )
    (dot,) = axes.plot(
        verdict.mean,
        place,
        mark,
        color=color,
        markersize=7,
        markerfacecolor="none"
        if verdict.word in ("undecided", "noise", "not seen", "no verdict")
        else color,
        markeredgewidth=1.6,
    )
    numbers = f"{verdict.mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    for artist in (line, dot):
        tips.add(artist, f"{verdict.arm}: {verdict} — {numbers} over {verdict.n} seeds")


# --- curves


def curves(section, tips):
    """Above: the mean validation loss over steps, with a band of one sd. Below: each arm's paired
    difference from the arm it is compared with, with a 95 % band."""
    shown = curves_of(section)
    if not any(len(curve) > 1 for by_seed in shown.values() for curve in by_seed.values()):
        return None
    figure = Figure(figsize=(WIDTH, 6.4))
    above, below = figure.subplots(2, sharex=True)

    ends = []  # losses that the upper plot must show: the lowest, and the one after 20 % of the run
    for arm, by_seed in shown.items():
        mean = mean_curve(above, section, arm, by_seed, tips)
        ends += [mean.min(), mean[int(0.2 * len(mean))]]
        against = section.sweep["arms"][arm].get("against")
        if arm != section.sweep["base"] and against in shown:
            difference_curve(below, section, arm, by_seed, shown[against], tips)

    low, high = min(ends), max(ends)
    late = [line.get_ydata()[len(line.get_ydata()) // 4 :] for line in below.lines]
    room = max((abs(values).max() for values in late), default=0.1) * 1.6 or 0.1
    below.axhline(0, color=GREY, linewidth=1)
    above.set(ylabel="validation loss", ylim=(low - 0.03 * (high - low + 0.01), high + 0.02))
    below.set(ylabel="difference", xlabel="step", ylim=(-room, room))
    below.locator_params(axis="x", nbins=6)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def curves_of(section):
    """arm -> {seed: curve [points, 2] of steps and losses} of the runs that have one."""
    by_arm = {}
    for arm, rows in section.runs.done.items():
        by_seed = {
            seed: np.array(row["curve"], float)[:, :2] for seed, row in rows.items() if row["curve"]
        }
        if by_seed:
            by_arm[arm] = by_seed
    return by_arm


def mean_curve(axes, section, arm, by_seed, tips):
    """Draw the mean over seeds at the steps of the shortest curve, and return it [steps]."""
    style = style_of(section, arm)
    steps = min(by_seed.values(), key=len)[:, 0]
    losses = np.array([np.interp(steps, *curve.T) for curve in by_seed.values()])
    mean = losses.mean(0)
    sd = losses.std(0, ddof=1) if len(losses) > 1 else np.zeros_like(mean)
    (line,) = axes.plot(steps, mean, label=arm, **style)
    tips.add(line, f"{arm}: ends at {mean[-1]:.4f}, sd {sd[-1]:.4f}")
    axes.fill_between(steps, mean - sd, mean + sd, color=style["color"], **BAND)
    return mean


def difference_curve(axes, section, arm, by_seed, references, tips):
    """Draw the mean difference over the seeds that both arms have."""
    seeds = sorted(by_seed.keys() & references.keys())
    if not seeds:
        return
    style = style_of(section, arm)
    steps = min(by_seed.values(), key=len)[:, 0]
    last = min(references[seed][-1, 0] for seed in seeds)  # with match=time one may end earlier
    steps = steps[steps <= last]
    differences = np.array(
        [
            np.interp(steps, *by_seed[seed].T) - np.interp(steps, *references[seed].T)
            for seed in seeds
        ]
    )
    mean = differences.mean(0)
    (line,) = axes.plot(steps, mean, **style)
    tips.add(line, f"{arm}: {mean[-1]:+.4f} at the end")
    if len(seeds) > 1:
        half = scipy_stats.sem(differences) * scipy_stats.t.ppf(0.975, len(seeds) - 1)
        axes.fill_between(steps, mean - half, mean + half, color=style["color"], **BAND)


# --- costs


def pareto(section, tips):
    """Loss against an arm's cost: decoding time and peak memory. The line joins the arms that no
    other arm beats in both loss and cost."""
    figure = Figure(figsize=(WIDTH, 6.4))
    panels = (
        ("decode_ms_per_token", 1, "decoding, ms per token"),
        ("peak_memory_bytes", 1e-6, "peak memory of training, MB"),
    )
    empty = True
    for axes, (key, scale, label) in zip(figure.subplots(2), panels, strict=True):
        points = costs_and_losses(section, key, scale)
        front = [
            point[:2]
            for place, point in enumerate(points)
            if all(point[1] < cheaper[1] for cheaper in points[:place])
        ]
        if front:
            empty = False
            costs, losses = zip(*front, strict=True)
            axes.step(costs, losses, where="post", color=GREY, linewidth=1, linestyle="--")
        for cost, loss, arm in points:
            (dot,) = axes.plot(cost, loss, "o", color=style_of(section, arm)["color"], markersize=7)
            tips.add(dot, f"{arm}: {cost:.4g} {label.split(', ')[1]}, loss {loss:.4f}")
        label_points(axes, points)
        axes.set(xlabel=label, ylabel="final validation loss")
        axes.margins(0.14, 0.14)
    return None if empty else figure


def costs_and_losses(section, key, scale):
    """[(cost, mean final loss, arm)] of the arms that have both, cheapest first."""
    points = []
    for arm, rows in section.runs.done.items():
        cost = section.costs.get(arm, {}).get(key)
        if rows and cost is not None:
            cost = cost["median"] if isinstance(cost, dict) else cost
            loss = np.mean([row["final_val_loss"] for row in rows.values()])
            points.append((cost * scale, float(loss), arm))
    return sorted(points)


SPOTS = (  # offsets of a label from its point, as fractions of the axes, and its alignment
    (0.025, 0, "left"),
    (0, 0.075, "center"),
    (0, -0.075, "center"),
    (-0.025, 0, "right"),
    (0.025, 0.06, "left"),
    (0.025, -0.06, "left"),
)


def label_points(axes, points):
    """Label each point with its name: to the right, or where that is occupied, above or below. The
    last few labels may still touch others."""
    if not points:
        return
    xs, ys = (np.array([point[axis] for point in points]) for axis in (0, 1))
    width, height = np.ptp(xs) or 1, np.ptp(ys) or 1
    taken = [(x / width, y / height, 0.03) for x, y in zip(xs, ys, strict=True)]
    for x, y, arm in points:
        length = 0.022 * len(arm)
        here = x / width, y / height
        others = [mark for mark in taken if mark[:2] != here]
        clear = [clearance(here, spot, length, others) for spot in SPOTS]
        dx, dy, side = best = SPOTS[int(np.argmax(np.minimum(clear, 1)))]
        axes.text(x + dx * width, y + dy * height, arm, ha=side, va="center", fontsize=9)
        taken.append((middle(here, best, length), y / height + dy, length / 2))


def middle(point, spot, length):
    """The middle of a label along x."""
    dx, _, side = spot
    return point[0] + dx + {"left": length / 2, "center": 0, "right": -length / 2}[side]


def clearance(point, spot, length, others):
    """Distance of a label at a spot from the nearest of the others (x, y, half its width). Below
    1 they may touch."""
    x, y = middle(point, spot, length), point[1] + spot[1]
    distances = (
        abs(y - other_y) / 0.07 + max(abs(x - other_x) - length / 2 - half, 0) / 0.03
        for other_x, other_y, half in others
    )
    return min(distances, default=9)


# --- lines over multiples


def extrapolation(section, tips):
    """The mean loss beyond the training context."""
    found = {}
    for arm, rows in section.runs.done.items():
        for row in rows.values():
            for times, entry in (row.get("extrapolation") or {}).items():
                if entry.get("loss") is not None:
                    found.setdefault(arm, {}).setdefault(int(times), []).append(entry["loss"])
    return lines(section, tips, found, "context, times that of training", "loss on the same tokens")


def learning_rates(section, tips):
    """The mean loss of the tuning runs over learning rates."""
    found, metric = {}, section.sweep["metric"]
    for row in section.runs.tuning:
        found.setdefault(row["arm"], {}).setdefault(row["lr"], []).append(
            row["final_tune" if metric == "final_val_loss" else "best_tune"]
        )
    return lines(
        section, tips, found, "learning rate, times the base's", "validation loss, tuning seeds"
    )


def lines(section, tips, values, xlabel, ylabel):
    """One line per arm through the means of {arm: {x: [losses]}}; None if no arm has a line."""
    values = {
        arm: dict(sorted(values[arm].items()))
        for arm in section.sweep["arms"]
        if len(values.get(arm, ())) > 1
    }
    if not values:
        return None
    figure = Figure(figsize=(WIDTH, 3.7))
    axes = figure.subplots()
    for arm, points in values.items():
        means = [np.mean(losses) for losses in points.values()]
        style = {"marker": "o", "markersize": 5} | style_of(section, arm)
        (line,) = axes.plot(list(points), means, label=arm, **style)
        parts = (f"{x:g}×: {mean:.3f}" for x, mean in zip(points, means, strict=True))
        tips.add(line, f"{arm}: {', '.join(parts)}")
    ticks = sorted({x for points in values.values() for x in points})
    axes.set_xscale("log", base=2)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(ticks, [f"{x:g}×" for x in ticks])
    figure.legend(loc="outside lower center", ncols=3)
    return figure
