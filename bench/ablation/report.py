"""
The report of a sweep, or of several, from their rows alone:

    python bench/report.py OUT [OUT2 ...]
    python bench/report.py --running OUT      # report.html and report.md, without verdicts

Writes report.md, its plots (PNG) and report.html, one file that opens from disk, into the first
folder, and paper/: plots as SVG and PDF, tables as CSV and LaTeX. Folders with the same code, base
and data are one sweep, perhaps from several machines: the report puts their rows together. Other
folders get a section each; a factorial before a sweep of one part at a time on the same base gets a
table of both. Each report is a look at the data, which history.jsonl records; stats.py reaches the
verdicts.
"""

import math
import time
from pathlib import Path

import jinja2

from bench.ablation import design_report, figures, paper, plots, sentences, tables
from bench.ablation.caveats import caveats
from bench.ablation.sentences import NOT_YET
from bench.ablation.significance import ALPHA
from bench.ablation.stats import MEASURES, counted
from bench.ablation.sweeps import gather
from common.errors import UserError
from common.files import ROOT
from common.files import write as write_file

# What a terminal of 80 columns has room for.
TERMINAL_VERDICTS = ("arm", "verdict", "difference [95 %]", "worth in tokens")
TERMINAL_COSTS = ("arm", "parameters", "tokens/s", "KV bytes/token", "decode ms/token")
TERMINAL_BESIDE = (
    ("arm", "one at a time [95 %]", "alone [95 %]", "z, alone"),
    ("arm", "average [95 %]", "z, average", "p, alone", "p, average"),
)
LONGEST_NAME = 24
TERMINAL_STYLES = {"arm": "bold", "better": "green"}  # by the kind of a cell
TERMINAL_STYLES |= dict.fromkeys(("worse", "failed", "diverged"), "red")
TERMINAL_STYLES |= dict.fromkeys(("tie", "larger-than-the-noise"), "blue")
OPEN = ("undecided", "not-seen", "not-run", "no-verdict", "not-yet", "noise")
TERMINAL_STYLES |= dict.fromkeys(OPEN, "dim")
RESULTS = ROOT / "bench/results"  # where bench/pairing.py writes what it measured
RENEWED = 30  # seconds after which the page of a running sweep loads itself again


# --- files


def write(folders, running=False):
    """Writes the report of `folders` into the first of them. Returns the path of the page. While a
    sweep is `running`, writes the page and report.md alone, without verdicts: they are no look at
    the data."""
    out, sections, contents, files = Path(folders[0]), gather(folders), [], {}
    for number, section in enumerate(sections, 1):
        if running:
            withhold_verdicts(section)
        contents.append(contents_of(section, f"{number}-" if number > 1 else ""))
    for content in [] if running else contents:
        for plot in content["first_plots"] + content["other_plots"]:
            files |= plot.files()
        for table in content["first_tables"] + content["other_tables"]:
            files |= paper.table_files(table)

    shown = {"sections": contents, "unfinished": sentences.unfinished(sections)}
    shown["renewed"] = RENEWED if running else None
    shown["when"] = time.strftime("%Y-%m-%d %H:%M")
    files |= {name: render(name, **shown) for name in ("report.html", "report.md")}
    (out / "paper").mkdir(exist_ok=True)
    for name, content in files.items():
        write_file(out / name, content)
    for section in [] if running else sections:
        section.record()
    return out / "report.html"


def withhold_verdicts(section):
    """Take back what tests have decided, and keep differences and intervals."""
    for analysis in section.analyses.values():
        for verdict in analysis.verdicts:
            verdict.p = verdict.p_holm = verdict.p_page = verdict.p_tie = math.nan
            verdict.why = ""
            if verdict.n:
                verdict.word = NOT_YET


def contents_of(section, prefix):
    """All that a report says about one sweep, as plain data for the templates. The names of its
    files begin with `prefix`."""
    more_tables, more_plots = design_report.additions_of(section)
    drawn = plots.draw(section, prefix, more_plots)
    top_figures = {figures.forest, figures.tokens, *(plot[0] for plot in more_plots)}
    on_top = [plot for plot in drawn if plot.function in top_figures]
    judged = bool(section.main.verdicts)  # a design may compare no arm with another
    first = [tables.verdicts_table(section)] * judged + more_tables
    others = [tables.tests_table(section)] * judged
    others += tables.on_each_machine(section, tables.costs_table)
    others += tables.on_each_machine(section, tables.forms_table)
    if judged:
        others += [tables.contexts_table(section), tables.measures_table(section)]
    for table in first + others:
        table.key = prefix + table.key
    return {
        "headline": sentences.headline(section),
        "screening": sentences.screening(section),
        "answer": sentences.answer(section),
        "noise_floor": sentences.noise_floor(section),
        "history": sentences.history_lines(section),
        "caveats": caveats(section),
        "first_tables": first,
        "other_tables": others,
        "first_plots": on_top,
        "other_plots": [plot for plot in drawn if plot not in on_top],
        "samples": sentences.samples_of(section),
        "method": method_of(section),
        "facts": sentences.facts_of(section),
        "commands": sentences.commands_of(section),
    }


def method_of(section):
    """How the verdicts are reached."""
    analysis = section.main
    margin = f"{analysis.margin:.4f} nats ({analysis.margin_source})"
    family = counted(analysis.family, "comparison")
    if section.effects:
        mains = sum(not verdict.interaction for verdict in analysis.verdicts)
        others = counted(len(analysis.verdicts) - mains, "interaction")
        family = f"{counted(mains, 'main effect')} and, apart, over {others}"
    return render(
        "method.txt",
        section=section,
        alpha=ALPHA,
        measure=MEASURES[analysis.measure],
        family=family,
        margin=margin if analysis.margin > 0 else "none is known",
        pairing=sentences.pairing(RESULTS),
    ).strip()


def render(name, **values):
    """A template of templates/ filled in; text in HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values).lstrip()


# --- the terminal


def table(folder):
    """The sweep in `folder` for the terminal: the answer, the verdicts, the costs."""
    (section,) = gather([folder])
    return for_terminal(
        sentences.screening(section),
        sentences.answer(section),
        (tables.verdicts_table(section), TERMINAL_VERDICTS),
        section.machine if len(section.machines) > 1 else "",
        (tables.costs_table(section, section.costs), TERMINAL_COSTS),
    )


def for_terminal(*parts):
    """Texts, and pairs of a table with the columns to show, one below the other: coloured and as
    wide as the terminal, or plain and 80 columns wide where stdout is none."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    with console.capture() as capture:
        for place, part in enumerate(filter(None, parts)):
            if place:
                console.print()
            console.print(Text(part) if isinstance(part, str) else rich_table(*part))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def rich_table(table, columns):
    """A table of some columns. Only verdicts, and names over LONGEST_NAME, take several lines."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    headings = table.headings
    places = [headings.index(column) for column in columns if column in headings]
    for place in places:
        heading = headings[place]
        width = max(len(heading), *(len(brief(row[place], heading)) for row in table.rows))
        width = min(width, LONGEST_NAME) if place == places[0] else width
        width = None if heading == "verdict" else width
        shown.add_column(Text(heading), overflow="fold", width=width)
    for row in table.rows:
        styles = [TERMINAL_STYLES.get(row[place].kind, "") for place in places]
        texts = [brief(row[place], headings[place]) for place in places]
        shown.add_row(*map(Text, texts, styles))
    return shown


def brief(cell, column):
    """The text of a cell on a terminal: what an arm is worth stands without its interval, and the
    rate of all arms beside none of them."""
    if column.startswith("worth"):
        return cell.text.partition(" (")[0]
    return cell.text.removesuffix(sentences.AT_BASE_RATE)


def main(argv):
    if argv in (["--help"], ["-h"]):
        print(__doc__.strip())
        return
    running, folders = "--running" in argv, [word for word in argv if word != "--running"]
    if not folders or any(word.startswith("-") for word in folders):
        what, where = "the folders of sweeps are missing, or there is an option", " ".join(folders)
        raise UserError(what, where or "OUT", "type python bench/report.py OUT [OUT2 ...]")
    page = write(folders, running)
    if running:
        print(page)
        return
    section = gather(folders)[0]
    beside = design_report.beside_table(section)
    more = [(beside, columns) for columns in TERMINAL_BESIDE if beside]
    print(for_terminal((tables.verdicts_table(section), TERMINAL_VERDICTS), *more))
    print(f"\n{page.with_suffix('.md')}, {page}")
