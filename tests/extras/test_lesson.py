"""docs/gpt2_to_llama.md: its lines of code stand in the two models, its numbers follow from the
stored rows, its claims stand in config/answer/page.py, its pictures come from the notebook. And
README's first screen: each of its numbers is the one on the page of the answer, which follows from
the stored rows (test_answer.py)."""

import json
import re
import runpy

import numpy as np
import pandas as pd
import pytest

from bench import answer
from bench.ablation.page_worths import BEYOND
from common.commands import ROOT
from extras import lesson

PAGE = lesson.PAGE.read_text(encoding="utf-8")
README = lesson.README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def table():
    return pd.read_csv(lesson.WORTHS)


def test_the_lines_of_the_diff_are_lines_of_the_models():
    """A line with a minus stands in model.py alone, a line with a plus in model_llama.py alone, a
    line with a space in both."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("model.py", "model_llama.py")]
    gpt2, llama = (text.splitlines() for text in texts)
    shown = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 6
    for line in "".join(shown).splitlines():
        if line.startswith("-"):
            assert line[1:] in gpt2 and line[1:] not in llama, line
        elif line.startswith("+"):
            assert line[1:] in llama and line[1:] not in gpt2, line
        elif line.startswith(" "):
            assert line[1:] in gpt2 and line[1:] in llama, line
        else:
            assert re.fullmatch("@@ .* @@", line), line


def test_the_numbers_are_those_of_the_rows(table):
    assert lesson.filled(PAGE, table) == PAGE, "run `python -m extras.lesson`"
    more = pd.concat([table, table[table.part == "RoPE"].assign(beyond=0, worth=9.0, planned=1)])
    assert "to >9.00 ×" in lesson.filled(PAGE, more) != PAGE


def test_no_number_is_typed():
    """Outside of the filled places, claims, code, addresses and the plan of a lesson there are only
    names with digits."""
    text = re.sub(r"## For teachers.*?\n## ", "", PAGE, flags=re.DOTALL)
    text = re.sub(r"<!--[^/].*?<!--/-->|```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    text = re.sub(r"^\*\*Published:.*?\n\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|^## \d\. ", "", text, flags=re.MULTILINE)
    text = re.sub(r"GPT-2|LLaMA (?:[23]|7B)|Mamba-2|95 % interval|step [23]", "", text)
    assert not re.findall(r".*\d.*", text)
    assert not re.findall(r"[^\n]\n<!--[^/]", PAGE)  # there, it ends a paragraph


def test_the_claims_are_the_configs():
    parts = runpy.run_path(str(answer.CONFIG))["parts"]
    shown = re.findall(r"\*\*Published:\*\* (.*?)\.\n\n", PAGE, re.DOTALL)
    for part, text in zip([*list(lesson.CHANGES.values())[:5], "GQA"], shown, strict=True):
        claims = [f"{says} ([{who}]({where}))" for says, _, who, where in parts[part]["claims"]]
        assert text.replace("\n", " ") == "; ".join(claims), part


def test_what_the_pages_say_in_words(table):
    """The sentences of the lesson and of README that the rows could contradict."""
    worth = {part: rows.worth for part, rows in table[table.planned == 1].groupby("part")}
    rope, *four = [worth[part] for part in list(lesson.CHANGES.values())[:5]]
    assert "RoPE helped in every setting" in README and "cost under a fifth of the" in README
    assert (rope > 1).all() and "RoPE, which helped in every setting" in PAGE
    newer = (worth["Convolutions at four sites"] > 1).tolist()
    assert f"convolutions help most: in {sum(newer)} of {len(newer)} settings" in README
    for each in four:
        mean = np.exp(np.log(each).mean())
        assert 0.85 < mean < 1.2 and each.min() < 1 < each.max()
        assert mean < np.exp(np.log(rope).mean()) / 1.2 and "Most of the gain is one" in PAGE
    assert "by less than a fifth; it helps in some settings and hurts in others" in PAGE
    assert 0.95 < np.exp(np.log(worth["RMSNorm"]).mean()) < 1.05 and "hardly anything" in PAGE
    five = np.log(worth["All five together"]).mean()
    assert abs(five - np.log(rope).mean()) < 0.15 and "about as much as all five" in README
    assert "about as much alone as all five together" in PAGE
    multiplied = sum(np.log(each).mean() for each in (rope, *four))
    assert abs(five - multiplied) < 0.1 and "that is nearly their worth together" in PAGE
    medians = table[~table.part.isin(lesson.CHANGES.values())].groupby("part").worth.median()
    assert medians.idxmax() == "Muon" and "nothing else in this list is worth as much" in PAGE
    timed = [table[table.part == part] for part in re.findall("<!--step_time (.*?)-->", PAGE)]
    assert {rows[rows.step_time.notna()].iloc[0].setting for rows in timed} == {"plays"}


def test_the_table_of_worths_is_that_of_the_cards(table):
    page = (answer.ANSWER / "index.md").read_text(encoding="utf-8")
    cards = dict(re.findall(r"<summary>(.*?): .*?\n(.*?)</details>", page, re.DOTALL))
    shown = [re.findall(r" % \|$|^\| \[[ch]\d+\]", card, re.MULTILINE) for card in cards.values()]
    assert len(table) == sum(map(len, shown))
    for row in table.itertuples():
        name = re.escape(row.setting)
        setting = rf"^\| \[?{name}(?:\]\S*|, by taking it out|, at [\d.]+ × [^|]*)? \|.*"
        (line,) = re.findall(setting, cards[row.part], re.MULTILINE)
        assert f"| {BEYOND[row.beyond]}{row.worth:.2f}" in line, (row, line)


def test_the_pictures_are_those_of_the_notebook():
    stored = lesson.pictures_of(json.loads(lesson.NOTEBOOK.read_text(encoding="utf-8")))
    names = re.findall(r"\]\(gpt2_to_llama/(\w+)\.png\)", PAGE)
    assert sorted(names) == sorted(stored) == sorted(p.stem for p in lesson.PICTURES.iterdir())
    cells = json.loads(lesson.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (cell,) = [cell for cell in cells if cell["id"] == "picture-head"]
    printed = "".join("".join(each.get("text", "")) for each in cell["outputs"])  # in pieces
    assert re.findall(r"(\d+\.\d) % in the head", printed) == re.findall(r"`(\d+\.\d) %`", PAGE)
    for name, content in stored.items():
        path = lesson.PICTURES / f"{name}.png"
        assert path.read_bytes() == content, "run `python -m extras.lesson`"
        assert 5_000 < len(content) < 100_000


def test_the_table_of_the_five_changes_is_that_of_the_page(table):
    """It counts the marks of the picture below it."""
    assert lesson.filled(README, table) == README, "run `python -m extras.lesson`"
    rows = [line.split(" | ") for line in README.splitlines() if line.startswith("| ")]
    planned = table[table.planned == 1]
    page = lesson.ANSWER.read_text(encoding="utf-8")
    for change, part in list(lesson.CHANGES.items())[:5]:
        (shown,) = [row for row in rows if row[0] == f"| {change}"]
        mine = planned[planned.part == part]
        assert shown[1] == f"{(mine.worth > 1).sum()} of {len(mine)}"
        said = re.search(rf"^\| \[{part}\]\S+ \| .*", page, re.MULTILINE)[0]
        chance, _, verdict = shown[3].removesuffix(" |").partition(": ")
        assert all(f" {each} " in said for each in (verdict, shown[2][:-2], chance)), change

    muon = table.query("part == 'Muon' and setting == 'plays'").worth.item()
    assert f"needs {muon:.2f} × the tokens of Muon" in README
