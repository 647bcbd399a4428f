"""README's first screen: each of its numbers is the one on the page of the answer, which follows
from the stored rows (test_answer.py)."""

import re

import pandas as pd

from bench import lesson
from bench.lesson import CHANGES, README, WORTHS

TEXT = README.read_text(encoding="utf-8")


def test_the_table_of_the_five_changes_is_that_of_the_page():
    """It counts the marks of the picture below it."""
    worths = pd.read_csv(WORTHS)
    assert lesson.filled(TEXT, worths) == TEXT, "run `python -m bench.lesson`"
    rows = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    planned = worths[worths.planned == 1]
    page = lesson.ANSWER.read_text(encoding="utf-8")
    for change, part in list(CHANGES.items())[:5]:
        (shown,) = [row for row in rows if row[0] == f"| {change}"]
        mine = planned[planned.part == part]
        assert shown[1] == f"{(mine.worth > 1).sum()} of {len(mine)}"
        said = re.search(rf"^\| \[{part}\]\S+ \| .*", page, re.MULTILINE)[0]
        chance, _, verdict = shown[3].removesuffix(" |").partition(": ")
        assert all(f" {each} " in said for each in (verdict, shown[2][:-2], chance)), change


def test_the_text_beside_the_table():
    muon = pd.read_csv(WORTHS).query("part == 'Muon' and setting == 'plays'").worth.item()
    assert f"needs {muon:.2f} × the tokens of Muon" in TEXT
