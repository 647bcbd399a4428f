"""README's first screen: each of its numbers is the one on the page of the answer, which follows
from the stored rows (test_answer.py)."""

import re

import pytest

from bench.lesson import CHANGES
from common.files import ROOT


def rows_of(path):
    """{first cell: the other cells} of the tables of a Markdown file."""
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows.setdefault(name, cells)
    return rows


@pytest.fixture(scope="module")
def text():
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page():
    """{part: {heading: cell}} of the page's first table."""
    rows = rows_of(ROOT / "bench/results/answer/index.md")
    return {name: dict(zip(rows["part"], cells, strict=False)) for name, cells in rows.items()}


def test_the_table_of_the_five_changes(page):
    shown = rows_of(ROOT / "README.md")
    for change, part in CHANGES.items():
        cells = page[part]
        wanted = [cells["GPT-2, plays"], "not measured", "", ""]
        if part != "All five together":
            mean = cells["mean × tokens"].split(" [")[0]
            chance = f"{cells['P(helps)']}: {cells['verdict']}"
            wanted[1:] = [cells["helps in"], f"{mean} ×", chance]
        found = [cell.removesuffix(" settings") for cell in shown[change]]
        assert found == wanted, change


def test_the_text_beside_the_table(text, page):
    worth = page["RoPE"]["GPT-2, plays"]
    assert f"{worth} means: without RoPE, GPT-2 needs {worth.removesuffix(' ×')} times" in text
    assert f"needs {page['Muon']['LLaMA, plays']} the tokens of Muon in LLaMA" in text


def test_the_lines_of_the_two_models(text):
    for name in ("model.py", "model_llama.py"):
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert re.search(rf"`{name}` is [\w-]+ in {lines}\b", text), (name, lines)
