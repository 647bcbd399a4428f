"""README's first screen: each of its numbers is the one on the page of the answer, which follows
from the stored rows (test_answer.py)."""

import re

import pytest

from common.files import ROOT

CHANGES = {  # row of the table: the part on the page
    "learned positions → RoPE": "RoPE",
    "GELU → SwiGLU": "SwiGLU",
    "LayerNorm → RMSNorm": "RMSNorm",
    "biases → none": "No biases",
    "tied → untied output matrix": "Untied head",
    "all five": "All five together",
}


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
        wanted = [cells["GPT-2, plays"], "", "", "", ""]
        if part != "All five together":
            mean = cells["mean × tokens"].split(" [")[0]
            assert cells["helps in"].endswith(" of 5")
            wanted[1:] = [cells["helps in"].removesuffix(" of 5"), f"{mean} ×"]
            wanted.append(cells["in a new LLaMA setting"])
            wanted.append(cells["verdict"])
        assert shown[change] == wanted, change


def test_the_text_beside_the_table(text, page):
    assert f"Muon is worth {page['Muon']['LLaMA, plays']} in LLaMA" in text
    assert f"RoPE's {page['RoPE']['GPT-2, plays']}: plain GPT-2 needs" in text


def test_the_lines_of_the_two_models(text):
    for name in ("model.py", "model_llama.py"):
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert re.search(rf"`{name}` is [\w-]+ in {lines}\b", text), (name, lines)
