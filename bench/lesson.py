"""
Fill in the numbers and the pictures of docs/gpt2_to_llama.md.

    python bench/answer.py       # writes bench/results/answer/worths.csv from the rows
    jupyter execute --inplace docs/gpt2_to_llama.ipynb
    python -m bench.lesson

On the page, this script writes what stands between <!--NAME--> and <!--/-->, from worths.csv. The
pictures are the outputs of the notebook's cells whose ids begin with "picture-".
"""

from common import early

if __name__ == "__main__":
    early.need(*early.ABLATE)

import base64
import json
import re

import pandas as pd

from common.configurator import print_help
from common.errors import run
from common.files import ROOT, write

PAGE = ROOT / "docs/gpt2_to_llama.md"
NOTEBOOK = ROOT / "docs/gpt2_to_llama.ipynb"
PICTURES = ROOT / "docs/gpt2_to_llama"
WORTHS = ROOT / "bench/results/answer/worths.csv"
CHANGES = {  # a change of the page: the part of config/answer/page.py
    "learned positions → RoPE": "RoPE",
    "GELU → SwiGLU": "SwiGLU",
    "LayerNorm → RMSNorm": "RMSNorm",
    "biases → none": "No biases",
    "tied → untied head": "Untied head",
    "all five together": "All five together",
}
BEYOND = {-1: "<", 0: "", 1: ">"}


def span(rows):
    """The lowest and the highest worth of some rows, as a text."""
    ends = rows.sort_values("worth").iloc[[0, -1]]
    low, high = [f"{BEYOND[row.beyond]}{row.worth:.2f}" for row in ends.itertuples()]
    return low if low == high else f"{low} to {high}"


def helps(rows):
    """In how many of some rows the worth is above 1."""
    return f"{(rows.worth > 1).sum()} of {len(rows)}"


def table(worths):
    """In how many settings each change helps either base, and its worth there."""
    lines = [
        "\n| change | in GPT-2, helps in: worth | in LLaMA, helps in: worth |",
        "|---|---|---|",
    ]
    for change, part in CHANGES.items():
        cells = [change]
        for base in ("gpt2", "llama"):
            rows = worths[(worths.part == part) & (worths.base == base)]
            cells.append(f"{helps(rows)}: {span(rows)}" if len(rows) else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def text_of(name, worths):
    """What stands on the page at a NAME: a word, and the part that it is about."""
    word, _, part = name.partition(" ")
    rows = worths[worths.part == part]
    if word == "table":
        return table(worths)
    if word == "settings":
        return str(worths[worths.part.isin(CHANGES.values())].setting.nunique())
    if word == "worth":
        return f"{span(rows)} ×"
    if word == "helps":
        return helps(rows)
    return f"{rows[word].dropna().iloc[0]:.2f}"  # a cost, in the first setting that has it


def filled(page, worths):
    """The text of the page with the numbers of a table of worths."""

    def fill(match):
        return f"<!--{match[1]}-->{text_of(match[1], worths)}<!--/-->"

    return re.sub(r"<!--([^/].*?)-->.*?<!--/-->", fill, page, flags=re.DOTALL)


def pictures_of(notebook):
    """{name: PNG} of the pictures that a notebook has stored."""
    found = {}
    for cell in notebook["cells"]:
        if cell["id"].startswith("picture-"):
            (picture,) = [each["data"] for each in cell["outputs"] if "data" in each]
            found[cell["id"].removeprefix("picture-")] = base64.b64decode(picture["image/png"])
    return found


def main(argv):
    """Write the page and its pictures."""
    print_help(argv, __doc__, [])
    write(PAGE, filled(PAGE.read_text(encoding="utf-8"), pd.read_csv(WORTHS)))
    for name, content in pictures_of(json.loads(NOTEBOOK.read_text(encoding="utf-8"))).items():
        write(PICTURES / f"{name}.png", content)
    print(PAGE)


if __name__ == "__main__":
    run(main)
