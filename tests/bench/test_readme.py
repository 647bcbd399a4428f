"""README's first screen: each of its numbers is the one on the page of the answer, which follows
from the stored rows (test_answer.py)."""

import pandas as pd
import pytest

from bench.lesson import CHANGES, WORTHS
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


@pytest.fixture(scope="module")
def worths():
    return pd.read_csv(WORTHS)


def test_the_table_of_the_five_changes(page, worths):
    """It counts the marks of the picture below it; the chance is that of the page."""
    shown = rows_of(ROOT / "README.md")
    for change, part in CHANGES.items():
        mine = worths[worths.part == part]
        gpt2 = mine[mine.base == "gpt2"].worth
        llama = mine[mine.base == "llama"].worth
        wanted = [f"{(gpt2 > 1).sum()} of {len(gpt2)}", "not measured", "", ""]
        if len(llama):
            assert f"helped GPT-2, of {len(gpt2)} settings" in shown["change"]
            assert f"helped LLaMA, of {len(llama)}" in shown["change"]
            wanted[0] = f"{(gpt2 > 1).sum()}"
            chance = f"{page[part]['P(helps)']}: {page[part]['verdict']}"
            wanted[1:] = [f"{(llama > 1).sum()}", f"{llama.median():.2f} ×", chance]
        assert shown[change] == wanted, change


def test_the_text_beside_the_table(text, page, worths):
    worth = worths[(worths.part == "RoPE") & (worths.base == "llama")].worth.median()
    assert f"{worth:.2f} × means: without RoPE, LLaMA needs {worth:.2f} times" in text
    assert f"needs {page['Muon']['LLaMA, plays']} the tokens of Muon" in text
    assert page["RoPE"]["helps in"].endswith("of 5") and "from five of them" in text
