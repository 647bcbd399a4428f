"""The tables of a report for a paper: CSV with every digit, and LaTeX in the style of booktabs."""

import math

import pandas

LATEX = {"\u2212": "$-$", "\u2013": "--", "×": r"$\times$", "\u202f": r"\,"}


def table_files(table):
    """{name: content} of a table as CSV and LaTeX."""
    name = f"paper/{table.key}"
    return {f"{name}.csv": csv(table).encode(), f"{name}.tex": latex(table).encode()}


def csv(table):
    """The columns as they are shown, numbers with every digit, an interval's ends in their own."""
    headings, columns = [], []
    for heading, cells in zip(table.headings, zip(*table.rows, strict=True), strict=True):
        headings.append(heading)
        columns.append([exact(cell) for cell in cells])
        if any(cell.ends for cell in cells):
            headings += [f"{heading}: low", f"{heading}: high"]
            columns += zip(*(cell.ends or ("", "") for cell in cells), strict=True)
    frame = pandas.DataFrame(dict(enumerate(columns)))
    return frame.to_csv(index=False, header=headings, lineterminator="\n")


def exact(cell):
    """A cell's number, or its text where it is none."""
    is_number = cell.text[:1] in "+\u22120123456789" and math.isfinite(cell.key)
    return f"{cell.key:.17g}" if is_number else cell.text


def latex(table):
    """A tabular of booktabs, each column left-aligned."""
    rows = [[cell.text for cell in row] for row in table.rows]
    frame = pandas.DataFrame(rows, columns=table.headings)
    text = frame.to_latex(index=False, escape=True, column_format="l" * len(table.headings))
    for character, command in LATEX.items():
        text = text.replace(character, command)
    return text
