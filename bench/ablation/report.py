"""
The report of a sweep, or of several, from their rows alone:

    python bench/report.py OUT [OUT2 ...]

Writes report.md, its plots (PNG) and report.html, one file that opens from disk, into the first
folder. Folders with the same code, base and data are one sweep, perhaps from several machines: the
report puts their rows together. Other folders get a section each. stats.py reaches the verdicts.
"""

from pathlib import Path

import jinja2

from bench.ablation import plots, sentences, tables
from bench.ablation.caveats import caveats
from bench.ablation.sweeps import gather
from common.errors import UserError
from common.files import write as write_file

# What a terminal of 80 columns has room for.
TERMINAL_VERDICTS = ("arm", "verdict", "difference [95 %]", "loss (sd)")
TERMINAL_COSTS = ("arm", "parameters", "tokens/s", "KV bytes/token", "decode ms/token")
LONGEST_NAME = 24
TERMINAL_STYLES = {
    "arm": "bold",
    "better": "green",
    "worse": "red",
    "failed": "red",
    "tie": "blue",
    "undecided": "dim",
    "larger than the noise": "blue",
    "not seen": "dim",
    "no verdict": "dim",
    "not run": "dim",
    "noise": "dim",
}


# --- files


def write(folders):
    """Writes report.md, report.html and the plots into the first of `folders`. Returns the path of
    the page."""
    out, contents = Path(folders[0]), []
    for number, section in enumerate(gather(folders), 1):
        drawn = plots.draw(section, f"{number}-" if number > 1 else "")
        for plot in drawn:
            write_file(out / f"{plot.key}.png", plot.png)
        contents.append(contents_of(section, drawn))

    write_file(out / "report.md", render("report.md", contents))
    write_file(out / "report.html", render("report.html", contents))
    return out / "report.html"


def contents_of(section, drawn):
    """All that a report says about one sweep, as plain data for the templates."""
    on_top = [plot for plot in drawn if plot.key.endswith(("forest", "curves"))]
    return {
        "headline": sentences.headline(section),
        "screening": sentences.screening(section),
        "answer": sentences.answer(section),
        "noise_floor": sentences.noise_floor(section),
        "caveats": caveats(section.sweep, section.runs, section.all_costs, section.main),
        "verdicts": tables.verdicts_table(section),
        "costs": tables.costs_table(section),
        "measures": tables.measures_table(section),
        "first_plots": on_top,
        "other_plots": [plot for plot in drawn if plot not in on_top],
        "samples": sentences.samples_of(section),
        "method": sentences.method(section),
        "facts": sentences.facts_of(section),
        "commands": sentences.commands_of(section),
    }


def render(name, sections):
    """A template of templates/ filled in; text in HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(sections=sections).lstrip()


# --- the terminal


def table(folder):
    """The sweep in `folder` for the terminal: the answer, the verdicts, the costs."""
    (section,) = gather([folder])
    return for_terminal(
        sentences.screening(section),
        sentences.answer(section),
        (tables.verdicts_table(section), TERMINAL_VERDICTS),
        (tables.costs_table(section), TERMINAL_COSTS),
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


def rich_table(made, columns):
    """A table of some columns. Only verdicts, and names over LONGEST_NAME, take several lines."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    places = [made.headings.index(column) for column in columns]
    for column, place in zip(columns, places, strict=True):
        width = max(len(column), *(len(row[place].text) for row in made.rows))
        if column == "arm":
            width = min(width, LONGEST_NAME)
        shown.add_column(
            Text(column), overflow="fold", width=None if column == "verdict" else width
        )
    for row in made.rows:
        cells = (row[place] for place in places)
        shown.add_row(*(Text(cell.text, TERMINAL_STYLES.get(cell.kind, "")) for cell in cells))
    return shown


def main(argv):
    if argv in (["--help"], ["-h"]):
        print(__doc__.strip())
        return
    if not argv or any(word.startswith("-") for word in argv):
        raise UserError(
            "the folders of sweeps are missing, or there is an option",
            " ".join(argv) or "OUT",
            "type python bench/report.py OUT [OUT2 ...]",
        )
    page = write(argv)
    verdicts = tables.verdicts_table(gather(argv)[0])
    print(for_terminal((verdicts, TERMINAL_VERDICTS)))
    print(f"\n{page.with_suffix('.md')}, {page}")
