"""python -m extras.lesson

Fill in the numbers and the pictures of docs/gpt2_to_llama.md, and README's table, after

    python bench/answer.py       # writes bench/results/answer/worths.csv from the rows
    jupyter execute --inplace docs/gpt2_to_llama.ipynb

In both pages, this script writes what stands between <!--NAME--> and <!--/-->, from the page of the
answer and worths.csv beside it. The pictures are the outputs of the notebook's cells whose ids
begin with "picture-".
"""

from common import early

if __name__ == "__main__":
    early.need(*early.ABLATE)

import base64
import json
import re

import pandas as pd

from bench.ablation.page_tables import CHANGES, steps_of
from bench.ablation.page_worths import helps, lowest_to_highest
from common.commands import ROOT
from common.configurator import print_help
from common.errors import run
from common.files import write

PAGE = ROOT / "docs/gpt2_to_llama.md"
NOTEBOOK = ROOT / "docs/gpt2_to_llama.ipynb"
PICTURES = ROOT / "docs/gpt2_to_llama"
WORTHS = ROOT / "bench/results/answer/worths.csv"
ANSWER = ROOT / "bench/results/answer/index.md"
README = ROOT / "README.md"


def markdown(rows):
    """A table of lists of cells, the first of which is its head."""
    head, *others = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(["", head, "|---" * len(rows[0]) + "|", *others, ""])


def answer():
    """What the first table of the page of the answer says of each change."""
    first, _, _ = ANSWER.read_text(encoding="utf-8").partition("\n## ")
    rows = [line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("| ")]
    shown = [["change", "helped in", "worth on average", "chance that it helps elsewhere"]]
    *five, _ = CHANGES.items()
    for change, part in five:
        mine = [row for row in rows if row[0].startswith(f"[{part}]")]
        for _, verdict, count, mean, _, chance, *_ in mine:
            known = chance != "–"  # else too few settings
            worth = f"{mean.split()[0]} ×" if known else ""
            shown.append([change, count, worth, f"{chance}: {verdict}" if known else verdict])
    return markdown(shown)


def text_of(name, worths):
    """What stands on the page at a NAME: a word, and the part that it is about. Worths are of the
    planned settings, where the part has run in them."""
    word, _, part = name.partition(" ")
    rows = worths[worths.part == part]
    planned = rows[rows.planned == 1] if (rows.planned == 1).any() else rows
    if word == "answer":
        return answer()
    if word == "table":
        table = steps_of(worths)
        return markdown([list(table.columns), *table.values.tolist()])
    if word == "settings":
        return str(worths[worths.planned == 1].setting.nunique())
    if word == "worth":
        return f"{lowest_to_highest(planned)} ×"
    if word == "helps":
        return helps(planned)
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
    """Write the page and its pictures, and README."""
    print_help(argv, __doc__, [])
    worths = pd.read_csv(WORTHS)
    for path in (PAGE, README):
        write(path, filled(path.read_text(encoding="utf-8"), worths))
    for name, content in pictures_of(json.loads(NOTEBOOK.read_text(encoding="utf-8"))).items():
        write(PICTURES / f"{name}.png", content)
    print(PAGE)


if __name__ == "__main__":
    run(main)
