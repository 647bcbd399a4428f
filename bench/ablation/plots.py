"""
The plots of a report, each drawn once: as PNG for Markdown, as SVG for the page, and as SVG and PDF
for a paper. The page's SVG takes the page's colours (light and dark), and its marks carry titles
for hovering. The text of SVG and PDF stays text.
"""

import html
import io
import re
from dataclasses import dataclass

import matplotlib

from bench.ablation import cost_figures, figures
from bench.ablation.figures import COLORS, FAINT, INK, MUTED, Tips

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
    "pdf.fonttype": 42,
    "figure.constrained_layout.use": True,
    "path.simplify": True,
}
UNDATED = {  # the same rows give the same files
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
PLOTS = (  # function, whose description is the caption, and title
    (figures.forest, "Effects"),
    (figures.tokens, "Worth in tokens"),
    (figures.curves, "Loss curves"),
    (cost_figures.pareto, "Loss against cost"),
    (cost_figures.extrapolation, "Beyond the training context"),
    (figures.learning_rates, "Learning rate"),
)


@dataclass
class Plot:
    function: callable  # that drew it
    key: str  # the name of its files, and the beginning of its ids in the page
    title: str
    caption: str
    figure: object
    svg: str  # for the page

    def files(self):
        """{name: content} of its files: a PNG, and for a paper SVG and PDF."""
        with matplotlib.rc_context(STYLE):
            return {
                f"{self.key}.png": saved(self.figure, "png", dpi=150),
                f"paper/{self.key}.svg": saved(self.figure, "svg"),
                f"paper/{self.key}.pdf": saved(self.figure, "pdf"),
            }


def draw(section, prefix, more=()):
    """[Plot] of the figures that this sweep has something for. `more` holds the figures that its
    design adds, in the form of PLOTS or with a caption of their own."""
    drawn = []
    if section.effects:  # the arms of a factorial are the cells of its design
        plots = [plot for plot in PLOTS if plot[0] in (figures.forest, figures.learning_rates)]
    else:
        plots = PLOTS
    with matplotlib.rc_context(STYLE):
        for function, title, *caption in (*plots, *more):
            tips = Tips()
            figure = function(section, tips)
            if figure is not None:
                key = prefix + function.__name__
                svg = saved(figure, "svg", transparent=True).decode()
                text = " ".join((caption[0] if caption else function.__doc__).split())
                page_svg = inline(svg, key, title, tips)
                drawn.append(Plot(function, key, title, text, figure, page_svg))
    return drawn


def saved(figure, kind, **keys):
    """A figure as the bytes of a file."""
    content = io.BytesIO()
    keys = {"metadata": UNDATED[kind]} | keys
    figure.savefig(content, format=kind, bbox_inches="tight", pad_inches=0.1, **keys)
    return content.getvalue()


def inline(svg, key, title, tips):
    """An SVG that can stand among others in a page: its ids are its own, its colours the page's."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for mark, text in tips.items():
        group = f'<g id="{mark}"'
        svg = svg.replace(f"{group}>", f'{group} class="tip"><title>{html.escape(text)}</title>')
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", svg)

    variables = {INK: "ink", MUTED: "soft", FAINT: "faint", "#ffffff": "paper"}
    variables |= {color: f"c{place}" for place, color in enumerate(COLORS)}
    for color, variable in variables.items():
        svg = svg.replace(color, f"var(--{variable})")

    # The page gives the width; the height follows.
    label = f'<svg role="img" aria-label="{html.escape(title)}"'
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', rf"{label} \1", svg, count=1)
    return svg.replace(' height="', ' data-height="', 1)
