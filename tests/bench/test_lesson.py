"""docs/gpt2_to_llama.md: its lines of code stand in the two models, its numbers follow from the
stored rows, its claims stand in config/answer/page.py, its pictures come from the notebook."""

import json
import re
import runpy

import pandas as pd
import pytest

from bench import answer, lesson
from bench.settings import worths
from common.files import ROOT

PAGE = lesson.PAGE.read_text(encoding="utf-8")
BASES = {"gpt2": "GPT-2", "llama": "LLaMA"}


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
    assert lesson.filled(PAGE, table) == PAGE, "run `python -m bench.lesson`"
    more = pd.concat([table, table[table.part == "RoPE"].assign(beyond=0, worth=9.0)])
    assert "to 9.00 ×" in lesson.filled(PAGE, more) != PAGE


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


def test_what_the_page_says_in_words(table):
    """The sentences that the rows could contradict."""

    def of(part, base=None):
        return table[(table.part == part) & table.base.isin([base] if base else BASES)].worth

    small = ["RMSNorm", "No biases", "Untied head"]
    assert (of("RoPE") > 1).all(), "which helped in every setting"
    assert (of("SwiGLU", "llama") > 1).all(), "In LLaMA it always did"
    assert of("SwiGLU", "gpt2").min() < 1 < of("SwiGLU", "gpt2").max(), "it goes either way"
    assert all(of("RoPE").median() > of(part).median() for part in [*small, "SwiGLU"])
    assert all((abs(of(part) - 1) < 0.1).mean() > 0.5 for part in small), "in most settings"
    rms = table[table.part == "RMSNorm"]
    assert ((rms.low < 1) & (rms.high > 1)).all(), "all its intervals contain one"
    assert 0.9 < of("No biases", "llama").median() < 1 and (of("No biases", "llama") < 1.005).all()
    lowest = table.loc[of("Untied head").idxmin()]
    assert (lowest.text, lowest.optimizer) == ("python", "adamw") and lowest.high < 0.8, "far down"
    assert of("Untied head").max() > 1.1, "untying goes either way"
    assert (of("QK norm", "llama") > 1).all() and of("QK norm", "gpt2").max() < 1.02
    timed = [table[table.part == part] for part in re.findall("<!--step_time (.*?)-->", PAGE)]
    assert {rows[rows.step_time.notna()].iloc[0].setting for rows in timed} == {"plays"}
    assert of("Muon").median() == max(of(part).median() for part in set(table.part))
    rows = table[table.part == "Value residual"].groupby("text").worth.median()
    assert rows["python"] > 1.1 > rows["plays"]
    convolution = table[table.part == "Convolution"]
    assert (convolution[convolution.text == "python"].worth > 1).all() and (
        of("Convolution", "gpt2") > 1
    ).all()
    plays = table[(table.text == "plays") & (table.optimizer == "muon") & (table.base == "llama")]
    assert (plays[plays.part == "Convolution"].worth < 1).all()


def test_the_table_of_worths_is_that_of_the_cards(table):
    """And of the planned settings."""
    page = (answer.ANSWER / "index.md").read_text(encoding="utf-8")
    cards = dict(re.findall(r"<summary>(.*?): .*?\n(.*?)</details>", page, re.DOTALL))
    planned = worths.load(answer.ANSWER / "settings")
    _, found = worths.table(planned)
    names = [each.name for each in planned]
    rows = sum(card.count(" % |\n") for card in cards.values())
    assert len(table) == rows + len(found)
    for row in table[~table.setting.isin(names)].itertuples():
        setting = rf"^\| {re.escape(row.setting)}(?:, by taking it out|, at [\d.]+ × [^|]*)? \|.*"
        (line,) = re.findall(setting, cards[row.part], re.MULTILINE)
        assert f"| {lesson.BEYOND[row.beyond]}{row.worth:.2f}" in line, (row, line)


def test_the_pictures_are_those_of_the_notebook():
    stored = lesson.pictures_of(json.loads(lesson.NOTEBOOK.read_text(encoding="utf-8")))
    names = re.findall(r"\]\(gpt2_to_llama/(\w+)\.png\)", PAGE)
    assert sorted(names) == sorted(stored) == sorted(p.stem for p in lesson.PICTURES.iterdir())
    cells = json.loads(lesson.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (cell,) = [cell for cell in cells if cell["id"] == "picture-head"]
    (printed,) = ["".join(each["text"]) for each in cell["outputs"] if "text" in each]
    assert re.findall(r"(\d+\.\d) % in the head", printed) == re.findall(r"`(\d+\.\d) %`", PAGE)
    for name, content in stored.items():
        path = lesson.PICTURES / f"{name}.png"
        assert path.read_bytes() == content, "run `python -m bench.lesson`"
        assert 5_000 < len(content) < 100_000
