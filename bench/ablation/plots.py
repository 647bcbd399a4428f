"""
The plots of a report, each drawn once: as PNG for Markdown, and as SVG for the page. The SVG's
colours are the page's variables (light and dark), and its marks carry titles for hovering.
"""

import html
import io
import re
from dataclasses import dataclass

import matplotlib

from bench.ablation import figures
from bench.ablation.figures import COLORS, FAINT, INK, Tips

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
PLOTS = (  # function, title, caption
    (
        figures.forest,
        "Effects",
        "Difference of each arm from the arm it is compared with, 95 % interval. The band is the"
        " margin of a tie; open marks are undecided.",
    ),
    (
        figures.curves,
        "Loss curves",
        "Above: mean over seeds, with a band of one sd. Below: paired differences, with their 95 %"
        " band.",
    ),
    (
        figures.pareto,
        "Loss against cost",
        "The dashed line joins the arms that no other arm beats in both.",
    ),
    (
        figures.extrapolation,
        "Beyond the training context",
        "Mean loss over seeds at 1 to 8 times the training context.",
    ),
    (
        figures.learning_rates,
        "Learning rate",
        "Mean loss of the tuning runs at each multiple of the base's learning rate.",
    ),
)


@dataclass
class Plot:
    key: str  # the name of its file, and the beginning of its ids in the page
    title: str
    caption: str
    png: bytes
    svg: str


def draw(section, prefix):
    """[Plot] of the figures that this sweep has something for."""
    drawn = []
    with matplotlib.rc_context(STYLE):
        for function, title, caption in PLOTS:
            tips = Tips()
            figure = function(section, tips)
            if figure is not None:
                key = prefix + function.__name__
                png, svg = as_png(figure), inline(as_svg(figure), key, title, tips)
                drawn.append(Plot(key, title, caption, png, svg))
    return drawn


def as_png(figure):
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return png.getvalue()


def as_svg(figure):
    svg = io.StringIO()
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return svg.getvalue()


def inline(svg, key, title, tips):
    """An SVG that can stand among others in a page: its ids are its own, its colours the page's."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for mark, text in tips.items():
        group = f'<g id="{mark}"'
        svg = svg.replace(f"{group}>", f'{group} class="tip"><title>{html.escape(text)}</title>')
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", svg)

    variables = {INK: "ink", FAINT: "faint"}
    variables |= {color: f"c{place}" for place, color in enumerate(COLORS)}
    for color, variable in variables.items():
        svg = svg.replace(color, f"var(--{variable})")

    # The page gives the width; the height follows.
    label = f'<svg role="img" aria-label="{html.escape(title)}"'
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', rf"{label} \1", svg, count=1)
    return svg.replace(' height="', ' data-height="', 1)
