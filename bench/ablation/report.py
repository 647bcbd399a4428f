"""
The report of a sweep, from its stored rows:

    python bench/report.py OUT [OUT2 ...]
    python bench/report.py OUT --paper    # also OUT/paper: SVG, PDF, LaTeX and CSV

Writes report.md and its figures (PNG) into each folder.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.ablation import figures, plans, rows, tables, verdicts
from bench.ablation.caveats import caveats
from common.configurator import print_help
from common.errors import UserError, printable
from common.files import write as write_file

# The tables and figures of a report, each as (function, title, place). The function takes a Section
# and returns a DataFrame of texts, a Figure, or None if it has no content. Its docstring is the
# caption, with what tables.EXPLAINED says of the columns that are there.
ITEMS = (
    (tables.missing_table, "UNFINISHED: planned runs are missing", "first"),
    (tables.verdicts_table, "What was found", "first"),
    (tables.noise_table, "The noise, and what the sweep can see", "first"),
    (figures.forest, "Differences", "figures"),
    (figures.curves, "Loss curves", "figures"),
    (figures.learning_rates, "Learning rates", "figures"),
    (figures.extrapolation, "Longer contexts", "figures"),
    (tables.tests_table, "Losses and tests", "details"),
    (tables.costs_table, "Costs", "details"),
)

LATEX = str.maketrans({"\u2212": "$-$", "\u2013": "--", "×": r"$\times$", "±": r"$\pm$"})


@dataclass
class Section:
    """One sweep: the argument of every table and figure."""

    plan: dict
    folder: Path
    runs: pd.DataFrame  # rows.load
    costs: pd.DataFrame  # rows.costs
    verdicts: pd.DataFrame  # verdicts.judge
    facts: verdicts.Facts  # verdicts.judge

    @property
    def arms(self):
        """The names of the arms, without the base at other numbers of tokens."""
        return [arm for arm, facts in self.plan["arms"].items() if not facts["curve"]]

    @property
    def tuned(self):
        """The runs that chose learning rates."""
        runs = self.runs
        return runs[(runs["purpose"] == "tune") & (runs["status"] == "done") & runs["current"]]

    @property
    def curve_ends(self):
        """The multiples of the tokens [2] between which the base's losses are known."""
        curve = self.facts.curve
        return curve.multiples[[0, -1]] if curve else np.array([-math.inf, math.inf])

    @property
    def replicate(self):
        """The comparison of the base with its replicate; no row if there is none."""
        return self.verdicts[self.verdicts["kind"] == "replicate"]

    @property
    def swaps(self):
        """The verdicts of the arms that have run."""
        table = self.verdicts
        return table[(table["kind"] == "swap") & (table["n"] > 0)].to_dict("records")

    @property
    def is_tuned(self):
        """Whether each arm has chosen its learning rate."""
        taken_over = self.plan["also"] and self.plan["chosen_lr"]
        return bool(taken_over) or len(self.plan["lr_grid"]) > 1

    @property
    def verdict_heading(self):
        """The heading of the column of verdicts. It names the rate if none was to be chosen."""
        if self.facts.screening:
            return "what was seen"
        return "verdict" if self.is_tuned else "verdict at the base's rate"

    def time_ends(self, arm):
        """The multiples of the base's time [2] between which the worth of an arm is known."""
        return self.curve_ends / self.cost(arm, "step_ratio")

    @property
    def ended(self):
        """The reported runs that count, also those that diverged."""
        runs = self.runs[self.runs["current"] & (self.runs["status"] != "failed")]
        return runs[runs["purpose"] == "report"]

    def reported(self, arm):
        """The runs of an arm that have a loss, by seed."""
        runs = self.ended[self.ended["arm"] == arm]
        return runs[runs["status"] == "done"].sort_values("seed")

    def command_of(self, arm):
        """The command of one reported run of an arm, however it ended."""
        runs = self.runs[(self.runs["arm"] == arm) & (self.runs["purpose"] == "report")]
        return runs["command"].iloc[0]

    def times_rate(self, arm):
        """The learning rate of an arm, as a multiple of the one that the base chose."""
        rates = self.plan["chosen_lr"]
        return rates.get(arm, 1) / rates.get(self.plan["base"], 1)

    def cost(self, arm, column):
        """A cost of an arm on the machine that timed most arms; nan where it was not measured."""
        values = self.runs.loc[self.runs["arm"] == arm, column].dropna()
        return float(values.iloc[0]) if len(values) else math.nan

    def is_replicate(self, arm):
        return self.plan["arms"][arm]["replicate"]

    def missing(self):
        """[(arm, planned runs, ended runs)] of the arms whose planned runs have not all ended."""
        ended = self.ended["arm"].value_counts()
        planned = plans.planned_runs(self.plan, self.plan["seeds"])
        counts = [(arm, count, int(ended.get(arm, 0))) for arm, count in planned.items()]
        return [entry for entry in counts if entry[2] < entry[1]]


def judge(folders):
    """[Section] of the sweeps in some folders, with the verdicts on their arms. Raises UserError
    where there is no sweep."""
    sections = []
    for folder in map(Path, folders):
        plan = plans.plan(folder)
        runs = rows.load(folder)
        table, facts = verdicts.judge(runs, plan)
        sections.append(
            Section(
                plan=plan,
                folder=folder,
                runs=runs,
                costs=rows.costs(folder, plan),
                verdicts=table,
                facts=facts,
            )
        )
    return sections


# ---------------------------------------------------------------- contents


@dataclass
class Shown:
    """A table or figure of a report, made."""

    key: str  # the name of its files
    title: str
    caption: str
    content: object  # a DataFrame of texts, or the bytes of a PNG

    @property
    def is_table(self):
        return isinstance(self.content, pd.DataFrame)


def items_of(place, section, paper):
    """[Shown] of the items of a place that have something to show. Their files, for a paper, go to
    the folder `paper`, if there is one."""
    shown = []
    with matplotlib.rc_context(figures.STYLE):
        for make, title, where in ITEMS:
            content = make(section) if where == place else None
            if content is None:
                continue
            key = make.__name__.removesuffix("_table")
            if paper:
                write_paper(paper / key, content)
            caption = caption_of(make, content)
            if isinstance(content, Figure):
                content = figures.saved(content, "png", dpi=150)
            shown.append(Shown(key, title, caption, content))
    return shown


def caption_of(make, content):
    """The docstring of an item's function, and what its columns (or the rows of a table of two
    columns) mean, or the label of its figure."""
    sentences = [make.__doc__]
    if isinstance(content, Figure):
        sentences.append(content.get_label())
    if isinstance(content, pd.DataFrame):
        names = [*content.columns]
        if content.shape[1] == 2:
            names += [*content.iloc[:, 0]]
        sentences += [tables.EXPLAINED[name] for name in names if name in tables.EXPLAINED]
    return " ".join(" ".join(sentences).split())


def write_paper(path, content):
    """Write a figure as SVG and PDF, a table as CSV and LaTeX."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, Figure):
        for kind in ("svg", "pdf"):
            write_file(path.with_suffix(f".{kind}"), figures.saved(content, kind))
    else:
        write_file(path.with_suffix(".csv"), content.to_csv(index=False))
        latex = content.to_latex(index=False, escape=True).translate(LATEX)
        write_file(path.with_suffix(".tex"), latex)


def contents_of(section, paper):
    """The content of a report, for the templates."""
    runs = section.runs[section.runs["current"] & (section.runs["status"] != "failed")]
    samples = section.ended[section.ended["sample"] != ""].drop_duplicates("arm")
    return {
        "section": section,
        "plan": section.plan,
        "question": section.plan["question"] or section.plan["name"],
        "parameters": tables.number(section.cost(section.plan["base"], "parameters"), tables.short),
        "unfinished": bool(section.missing()),
        "caveats": caveats(section),
        "first": items_of("first", section, paper),
        "figures": items_of("figures", section, paper),
        "details": items_of("details", section, paper),
        "samples": samples.set_index("arm")["sample"].str.rstrip().to_dict(),
        "runs": runs,
    }


def render(name, **values):
    """A template of templates/ filled in; text in HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values).lstrip()


# ---------------------------------------------------------------- files


def write(sections, paper=False):
    """Write the report of each sweep. Returns the path of the first one."""
    return [write_report(section, paper) for section in sections][0]


def write_report(section, paper=False):
    """Write report.md and its figures into the folder of a sweep, and its paper/. Returns the path
    of report.md."""
    out = section.folder
    content = contents_of(section, out / "paper" if paper else None)
    for item in content["figures"]:
        write_file(out / f"{item.key}.png", item.content)
    write_file(out / "report.md", render("report.md.j2", **content))
    if paper:
        write_file(out / "paper/numbers.csv", section.verdicts.to_csv(index=False))
    return out / "report.md"


# ---------------------------------------------------------------- the terminal

STYLES = {"better": "green", "worse": "red", "tie": "blue"}


def terminal(sections):
    """The verdicts of sweeps as a text of 80 columns, coloured where stdout is a terminal."""
    console = Console(highlight=False, width=80)
    with console.capture() as capture:
        for section in sections:
            title = section.plan["question"] or section.plan["name"]
            frame = columns_of(section)
            if section.missing():
                title = f"UNFINISHED: {title}"
            console.print(Text(printable(title)), style="bold")
            if frame is not None:
                console.print(rich_table(frame))
            if section.facts.screening:
                console.print("A screening: it ranks the arms and decides nothing.")
            for text, what in caveats(section):
                console.print(Text(printable(f"- {text} {', '.join(what)}".rstrip())))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def columns_of(section):
    """The columns of the verdicts that a terminal has room for."""
    shown = section.verdicts.to_dict("records")
    columns = {
        "change": [row["name"].replace("+", " +") for row in shown],
        "difference [95 %]": [tables.difference(row, 3) for row in shown],
        "worth": [tables.multiple(row, ends=section.curve_ends).split()[0] for row in shown],
        section.verdict_heading: [row["verdict"] for row in shown],
    }
    return tables.without_empty_columns(pd.DataFrame(columns))


def rich_table(frame):
    """A table, whose last column is the verdict. Texts wrap, but no word is broken."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in frame:
        cells = [name, *frame[name]]
        full_width = max(map(len, cells))
        least_width = full_width
        if name in (frame.columns[0], frame.columns[-1]):  # texts, which may wrap between words
            least_width = max(map(len, " ".join(cells).split()))
        is_rigid = least_width == full_width  # rich must know it, or it takes width from this one
        table.add_column(Text(name), min_width=least_width, no_wrap=is_rigid, overflow="fold")
    for texts in frame.itertuples(index=False):
        table.add_row(*[Text(printable(text)) for text in texts], style=STYLES.get(texts[-1]))
    return table


def main(argv):
    print_help(argv, __doc__, [])
    folders = [argument for argument in argv if argument != "--paper"]
    if not folders or any(folder.startswith("-") for folder in folders):
        what = "name folders of sweeps; the one option is --paper"
        where = " ".join(folders) or "OUT"
        raise UserError(what, where, "type python bench/report.py OUT [OUT2 ...]")
    sections = judge(folders)
    page = write(sections, paper="--paper" in argv)
    print(terminal(sections), f"\n{printable(str(page))}", sep="\n")
