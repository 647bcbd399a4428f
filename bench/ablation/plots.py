"""
The plots of a report, each drawn once by matplotlib: as PNG for Markdown, and as SVG for the page, where its colours are variables
(light and dark) and its marks carry titles for hovering.
"""

import html
import io
import re

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from scipy import stats as scipy_stats

INK, FAINT = "#1c2128", "#d0d7de"
COLORS = [
    "#6e7781",
    "#0b66c3",
    "#d1495b",
    "#2a8f5a",
    "#b26a00",
    "#7d4fc4",
    "#0f8b8d",
    "#c2409a",
    "#8a7a00",
    "#46607a",
]  # the page's --c0 to --c9
DASHES = ["-", "--", ":", "-."]
MARKS = {
    "better": ("<", COLORS[3]),
    "worse": (">", COLORS[2]),
    "tie": ("s", COLORS[1]),
    "undecided": ("o", COLORS[0]),
    "noise": ("D", COLORS[0]),
}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "figure.constrained_layout.use": True,
    "path.simplify": True,
}
WIDTH = 4.4  # inches: a phone's column, so that no text shrinks below what can be read


def style_of(section, arm):
    """The base is grey; an arm has its colour and dash in all plots of a sweep."""
    place = list(section.sweep["arms"]).index(arm)
    return (
        {"color": COLORS[0], "linewidth": 2}
        if arm == section.sweep["base"]
        else {
            "color": COLORS[1 + (place - 1) % (len(COLORS) - 1)],
            "linestyle": DASHES[(place - 1) // (len(COLORS) - 1) % 4],
            "linewidth": 1.4,
        }
    )


def tip(tips, artist, words):
    artist.set_gid(f"tip-{len(tips)}")
    tips[f"tip-{len(tips)}"] = words


def forest(section, tips):
    """Differences with their 95 % intervals, in the sweep's order; the band is the margin of a tie."""
    verdicts = section.main.verdicts
    figure = Figure(figsize=(WIDTH, 0.9 + 0.34 * len(verdicts)))
    axes = figure.subplots()
    if section.main.margin > 0:
        axes.axvspan(
            -section.main.margin, section.main.margin, color=FAINT, alpha=0.45, linewidth=0
        )
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, v in enumerate(verdicts):
        if not v.seeds:
            axes.text(
                0.02,
                place,
                v.word,
                va="center",
                color=COLORS[2],
                fontsize=9,
                transform=axes.get_yaxis_transform(),
            )
            continue
        mark, color = MARKS[v.word]
        low, high = (v.low, v.high) if len(v.seeds) > 1 else (v.mean, v.mean)
        (line,) = axes.plot(
            [low, high], [place, place], color=color, linewidth=2.2, solid_capstyle="round"
        )
        (dot,) = axes.plot(
            v.mean,
            place,
            mark,
            color=color,
            markersize=7,
            markerfacecolor="none" if v.word in ("undecided", "noise") else color,
            markeredgewidth=1.6,
        )
        for artist in (line, dot):
            tip(
                tips,
                artist,
                f"{v.arm}: {v} — {v.mean:+.4f} [{low:+.4f}, {high:+.4f}] over {len(v.seeds)} seeds",
            )
    axes.set(
        yticks=range(len(verdicts)),
        ylim=(len(verdicts) - 0.4, -0.6),
        xlabel="nats per token (left: better)",
    )
    axes.set_yticklabels([("× " if v.interaction else "") + v.arm for v in verdicts])
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="y", visible=False)
    return figure


def curves(section, tips):
    """Above: mean validation loss over steps with a band of one sd. Below: the paired difference from the arm each is compared with, 95 % band."""
    sweep, done = section.sweep, section.runs.done
    shown = {
        arm: {seed: np.array(row["curve"], float) for seed, row in rows.items() if row["curve"]}
        for arm, rows in done.items()
    }
    shown = {arm: rows for arm, rows in shown.items() if rows}
    if not any(len(curve) > 1 for rows in shown.values() for curve in rows.values()):
        return None
    figure = Figure(figsize=(WIDTH, 6.4))
    above, below = figure.subplots(2, sharex=True)
    ends = []
    for arm, rows in shown.items():
        grid = min(rows.values(), key=len)[:, 0]
        losses = np.array([np.interp(grid, *curve.T) for curve in rows.values()])
        style, mean, sd = (
            style_of(section, arm),
            losses.mean(0),
            losses.std(0, ddof=1) if len(losses) > 1 else losses[0] * 0,
        )
        (line,) = above.plot(grid, mean, label=arm, **style)
        tip(tips, line, f"{arm}: ends at {mean[-1]:.4f}, sd {sd[-1]:.4f}")
        above.fill_between(
            grid, mean - sd, mean + sd, color=style["color"], alpha=0.13, linewidth=0
        )
        ends += [mean.min(), mean[int(0.2 * len(grid))]]
        against = sweep["arms"][arm].get("against") if arm != sweep["base"] else None
        both = sorted(rows.keys() & shown.get(against, {}).keys())
        if both:
            grid = grid[
                grid <= min(shown[against][seed][-1, 0] for seed in both)
            ]  # with match=time one of the two may end earlier
            differences = np.array(
                [
                    np.interp(grid, *rows[seed].T) - np.interp(grid, *shown[against][seed].T)
                    for seed in both
                ]
            )
            mean = differences.mean(0)
            (line,) = below.plot(grid, mean, **style)
            tip(tips, line, f"{arm}: {mean[-1]:+.4f} at the end")
            if len(both) > 1:
                half = scipy_stats.sem(differences) * scipy_stats.t.ppf(0.975, len(both) - 1)
                below.fill_between(
                    grid, mean - half, mean + half, color=style["color"], alpha=0.13, linewidth=0
                )
    late = [line.get_ydata()[len(line.get_ydata()) // 4 :] for line in below.lines]
    room = max((abs(values).max() for values in late), default=0.1) * 1.6 or 0.1
    below.axhline(0, color=COLORS[0], linewidth=1)
    above.set(
        ylabel="validation loss",
        ylim=(min(ends) - 0.03 * (max(ends) - min(ends) + 0.01), max(ends) + 0.02),
    )
    below.set(ylabel="difference", xlabel="step", ylim=(-room, room))
    below.locator_params(axis="x", nbins=6)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def pareto(section, tips):
    """Loss against what it costs to use: decode time and peak memory. The line joins the arms that no other beats in both."""
    figure = Figure(figsize=(WIDTH, 6.4))
    panels, any_point = figure.subplots(2), False
    for axes, key, label, scale in zip(
        panels,
        ("decode_ms_per_token", "peak_memory_bytes"),
        ("decoding, ms per token", "peak memory of training, MB"),
        (1, 1e-6),
    ):
        points = []
        for arm, rows in section.runs.done.items():
            cost = section.costs.get(arm, {}).get(key)
            if rows and cost is not None:
                points.append(
                    (
                        (cost["median"] if isinstance(cost, dict) else cost) * scale,
                        float(np.mean([row["final_val_loss"] for row in rows.values()])),
                        arm,
                    )
                )
        points.sort()
        front = [
            point
            for i, point in enumerate(points)
            if all(point[1] < other[1] for other in points[:i])
        ]
        if front:
            any_point = True
            axes.step(
                *zip(*[point[:2] for point in front]),
                where="post",
                color=COLORS[0],
                linewidth=1,
                linestyle="--",
            )
        for cost, loss, arm in points:
            (dot,) = axes.plot(cost, loss, "o", color=style_of(section, arm)["color"], markersize=7)
            tip(tips, dot, f"{arm}: {cost:.4g} {label.split(', ')[1]}, loss {loss:.4f}")
        label_points(axes, points)
        axes.set(xlabel=label, ylabel="final validation loss")
        axes.margins(0.14, 0.14)
    return figure if any_point else None


def label_points(axes, points):
    """Names beside the points: to the right, or where that is taken, above or below; the last few may still touch."""
    if not points:
        return
    xs, ys = (np.array([point[i] for point in points]) for i in (0, 1))
    width, height = np.ptp(xs) or 1, np.ptp(ys) or 1
    taken = [(x / width, y / height, 0.03) for x, y in zip(xs, ys)]
    for x, y, arm in points:
        long = 0.022 * len(arm)
        spots = [
            (0.025, 0, "left"),
            (0, 0.075, "center"),
            (0, -0.075, "center"),
            (-0.025, 0, "right"),
            (0.025, 0.06, "left"),
            (0.025, -0.06, "left"),
        ]
        clear = []
        for dx, dy, side in spots:
            middle = x / width + dx + {"left": long / 2, "center": 0, "right": -long / 2}[side]
            clear.append(
                min(
                    [
                        abs(y / height + dy - b) / 0.07
                        + max(abs(middle - a) - long / 2 - w, 0) / 0.03
                        for a, b, w in taken
                        if (a, b) != (x / width, y / height)
                    ],
                    default=9,
                )
            )
        dx, dy, side = spots[int(np.argmax(np.minimum(clear, 1)))]
        axes.text(x + dx * width, y + dy * height, arm, ha=side, va="center", fontsize=9)
        taken.append(
            (
                x / width + dx + {"left": long / 2, "center": 0, "right": -long / 2}[side],
                y / height + dy,
                long / 2,
            )
        )


def lines(section, tips, values, xlabel, ylabel):
    """One line per arm through the means of {arm: {x: [losses]}}; None where there is no line."""
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
        (line,) = axes.plot(
            list(points),
            [np.mean(losses) for losses in points.values()],
            marker="o",
            markersize=5,
            label=arm,
            **style_of(section, arm),
        )
        tip(
            tips,
            line,
            f"{arm}: "
            + ", ".join(f"{x:g}×: {np.mean(losses):.3f}" for x, losses in points.items()),
        )
    ticks = sorted({x for points in values.values() for x in points})
    axes.set_xscale("log", base=2)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(ticks, [f"{x:g}×" for x in ticks])
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def extrapolation(section, tips):
    found = {}
    for arm, rows in section.runs.done.items():
        for row in rows.values():
            for times, loss in (row.get("extrapolation") or {}).items():
                if loss is not None:
                    found.setdefault(arm, {}).setdefault(int(times), []).append(loss)
    return lines(section, tips, found, "context, times that of training", "loss on the same tokens")


def learning_rates(section, tips):
    found = {}
    for row in section.runs.tuning:
        found.setdefault(row["arm"], {}).setdefault(row["lr"], []).append(
            row[section.sweep["metric"]]
        )
    return lines(
        section, tips, found, "learning rate, times the base's", "validation loss, tuning seeds"
    )


PLOTS = {
    "forest": (
        forest,
        "Effects",
        "Difference from the arm that each is compared with, 95 % interval. The band is the margin of a tie; open marks are undecided.",
    ),
    "curves": (
        curves,
        "Loss curves",
        "Mean over seeds, band of one sd; below, paired differences with their 95 % band.",
    ),
    "pareto": (
        pareto,
        "Loss against cost",
        "The dashed line joins the arms that no other beats in both.",
    ),
    "extrapolation": (
        extrapolation,
        "Beyond the training context",
        "Mean loss over seeds at 1 to 8 times the training context.",
    ),
    "learning_rates": (
        learning_rates,
        "Learning rate",
        "Mean loss of the tuning runs at each multiple of the base's learning rate.",
    ),
}


def draw(section, prefix):
    """{name: (title, caption, PNG bytes, SVG text)} of the plots that this sweep has something for."""
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for key, (plot, title, caption) in PLOTS.items():
            tips = {}
            figure = plot(section, tips)
            if figure is not None:
                png, svg = io.BytesIO(), io.StringIO()
                figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
                figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
                drawn[prefix + key] = (
                    title,
                    caption,
                    png.getvalue(),
                    inline(svg.getvalue(), prefix + key, title, tips),
                )
    return drawn


def inline(svg, key, title, tips):
    """An SVG that can stand among others in a page: its ids made its own, its colours the page's, its tips titles."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for mark, words in tips.items():
        svg = svg.replace(
            f'<g id="{mark}">', f'<g id="{mark}" class="tip"><title>{html.escape(words)}</title>'
        )
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", svg)
    for color, variable in (
        {INK: "ink", FAINT: "faint"} | {color: f"c{i}" for i, color in enumerate(COLORS)}
    ).items():
        svg = svg.replace(color, f"var(--{variable})")
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*"',
        rf'<svg role="img" aria-label="{html.escape(title)}" \1',
        svg,
        count=1,
    ).replace(' height="', ' data-height="', 1)
