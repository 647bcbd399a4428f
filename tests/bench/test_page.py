"""The page of the answer, from simulated shelves: its table says what the sweeps say, and what has
not learned or not run is not on it."""

import runpy
import shutil

import pytest

from bench.ablation import comparisons, figures, page, report, tables, worth
from common.files import ROOT
from helpers.sweeps import make_sweep, write_lines

EFFECTS = {"base": 0.0, "base-again": 0.0, "rope": -0.06, "swiglu": 0.0, "no biases": 0.04}
BETTER, FASTER = ("less loss", "better", "Su", "https://a"), ("less time", None, "Su", "https://b")
PARTS = {
    "RoPE": dict(into={"gpt2": "rope"}, out_of={"llama": "no biases"}, claims=[BETTER, FASTER]),
    "SwiGLU": dict(into={"gpt2": "swiglu"}, claims=[]),
    "Biases": dict(into={"gpt2": "no biases"}, claims=[BETTER]),
    "Experts": dict(into={"llama": "experts"}, claims=[]),
}
CONFIG = {
    "shelves": {"gpt2": "gpt2", "llama": "llama"},
    "columns": {"smaller": "small", "text": "python", "adamw": "adamw", "larger": "large"},
    "beside": {"smaller": "", "text": "", "adamw": "", "larger": "text"},
    "parts": {name: facts | {"swap": f"<{name}>"} for name, facts in PARTS.items()},
    "recipe": {"llama/adamw": "round 1", "recipe": "round 2"},
    "example": ("gpt2", "RoPE"),
    **dict.fromkeys(("rates", "sizes", "contexts"), ["RoPE"]),
    "multiples": {"RoPE": 1.3, "SwiGLU": 1.1, "Biases": 0.9, "Experts": 1.2},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few resamples, and reports without figures."""
    monkeypatch.setattr(comparisons, "RESAMPLES", 99)
    monkeypatch.setattr(worth, "DRAWS", 200)
    items = [item for item in report.ITEMS if item[2] == "first"]
    monkeypatch.setattr(report, "ITEMS", items)
    monkeypatch.setattr(figures, "saved", lambda *_, **__: b"a picture")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes the page of tmp_path, and returns its content."""
    pages = []
    kind = page.Page

    def make(config, sections):
        pages.append(kind(config, sections))
        return pages[-1]

    def write():
        folders = sorted(path.parent for path in tmp_path.rglob("sweep.json"))
        page.write(CONFIG, folders, tmp_path)
        return pages[-1]

    monkeypatch.setattr(page, "Page", make)
    return write


@pytest.fixture
def without_pictures(monkeypatch):
    """The page has no pictures. Returns the function that draws them."""
    draw = page.pictures_of
    monkeypatch.setattr(page, "pictures_of", lambda made: {})
    return draw


def shelf(out, steps=2000, **keys):
    usual = {"effects": EFFECTS, "diverged": (), "stale": False, "seeds": 6, "noise": 0.003}
    return make_sweep(out, max_iters=steps, curve_points=5, **usual | keys)


def test_the_page_says_what_the_sweeps_say(written, tmp_path):
    for steps, name in enumerate(("gpt2", "llama", "gpt2/small", "llama/adamw"), 1000):
        shelf(tmp_path / name, steps, noise=0.1 if name == "llama/adamw" else 0.003)
    rope, swiglu, bias = (made := written()).measured
    assert [part.word for part in made.measured] == ["helps in both", swiglu.word, "hurts GPT-2"]
    assert [claim[1] for claim in rope.published] == ["seen", "cannot be tested here"]
    assert [claim[1] for claim in bias.published] == ["opposite at our scale"]
    out = rope.at("llama")
    assert out.row["name"] == "RoPE taken out" and out.sign == 1 and out.row["difference"] > 0
    assert out.taken_out and out.ratio("parameters") == pytest.approx(800_000 / 804_000)

    html, text = ((tmp_path / f"index.{kind}").read_text() for kind in ("html", "md"))
    assert "&lt;RoPE&gt;" in html and "<RoPE>" not in html
    for shown in (html, text):
        assert f"{rope.at('gpt2').row['worth']:.2f} × [" in shown and "helps in both" in shown
    for shown in (html, text):  # columns and rounds that have not run are left out
        assert "round 1" in shown and "round 2" not in shown
        assert "with AdamW" in shown and "on Python files" not in shown.partition("How to read")[0]
    assert "- **Undecided for LLaMA with AdamW, helps with Muon**: RoPE\n" in text
    assert "✓" in html and rope.at("gpt2").row["badge"]
    assert (tmp_path / "gpt2/small/report.md").exists() and "gpt2/small/report.md" in html
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert {"example", "swaps", "rates", "worths", "published"} <= pictures


def test_what_the_test_split_or_another_optimizer_does_not_show_is_marked(
    written, tmp_path, without_pictures
):
    shelf(tmp_path / "gpt2", test_split=True)
    _, lines, _ = shelf(tmp_path / "llama", 1000, test_split=True)
    for line in lines:
        line["test_loss"] -= 0.04 * (line["arm"] == "no biases")  # its effect
    write_lines(tmp_path / "llama", lines)
    shelf(tmp_path / "llama/adamw", 1500, effects=EFFECTS | {"no biases": -0.04})
    made = written()
    marked = [
        (part.name, base)
        for part in made.measured
        for base, found in part.estimates.items()
        if tables.only_on_validation(found.row)
    ]
    assert marked == [("RoPE", ("llama", ""))]
    text = (tmp_path / "index.md").read_text()
    assert "RoPE\u2020" in text and "\u2021 | hurts, " in text
    assert "- **Hurts LLaMA with AdamW, helps with Muon**: RoPE\n" in text
    title = without_pictures(made)["tests"].axes[0].get_title("left")
    assert "Of 3 differences" in title and "show 2, do not show 1, and contradict 0" in title


def test_another_size_is_beside_its_text_even_if_it_is_a_screening(tmp_path):
    """Titles of the figure: what the other size agrees with, contradicts and adds."""
    small = EFFECTS | {"rope": 0.06, "swiglu": -0.05}
    worse = EFFECTS | dict.fromkeys(("rope", "swiglu", "no biases"), 0.05)
    shelf(tmp_path / "gpt2")
    shelf(tmp_path / "other", 1000, effects=small, screening=True, curve=[])
    shelf(tmp_path / "plays", 1500, effects=worse)
    folders = [tmp_path / name for name in ("gpt2", "other", "plays")]
    first, other, plays = (report.judge([folder])[0] for folder in folders)
    smaller = {"gpt2": first, "gpt2/small": other}
    larger = {"gpt2": plays, "gpt2/python": first, "gpt2/large": other}
    for column, sections in (("smaller", smaller), ("larger", larger)):
        made = page.Page(CONFIG, sections)
        assert ("gpt2", column) not in made.shelves
        title = page.pictures_of(made)[column].axes[0].get_title("left")
        assert "Of 2 decisions of" in title
        assert "agrees with 1\nand contradicts 1. It adds 1" in title
        assert "Rank correlation \u22120.50 of 3 parts." in title


def test_what_has_not_learned_or_not_run_is_not_on_the_page(written, tmp_path, without_pictures):
    counted = {"best": [5, 1.7], "trigrams": 1.8}  # the base ends at 1.75
    shelf(tmp_path / "gpt2", ngrams=counted, diverged=("swiglu",))
    shelf(tmp_path / "llama", 1000, screening=True, curve=[])
    shelf(tmp_path / "llama/adamw", 1500)  # a column whose shelf is not on the page
    made = written()
    assert list(made.here) == ["gpt2"] and not made.has_answer()
    assert "5-grams of this text" in (tmp_path / "index.html").read_text()
    shutil.rmtree(tmp_path / "llama")
    shelf(tmp_path / "gpt2", ngrams={"best": [5, 1.6], "trigrams": 1.7})
    assert written().measured == []
    assert "Nothing to show yet." in (tmp_path / "index.md").read_text()


def test_every_arm_of_a_shelf_is_in_the_row_of_one_part():
    answer = ROOT / "config/answer"
    parts = runpy.run_path(str(answer / "page.py"))["parts"].values()
    for base in page.BASES:
        arms = [part.get(way, {}).get(base) for part in parts for way in ("into", "out_of")]
        assert sorted(filter(None, arms)) == sorted(runpy.run_path(f"{answer}/{base}.py")["arms"])


def test_words_of_rows():
    words = {
        "helps in both": {"gpt2": 1, "llama": 1},
        "helps GPT-2, not LLaMA": {"gpt2": 1, "llama": 0},
        "helps GPT-2": {"gpt2": 1, "llama": None},
        "helps LLaMA": {"llama": 1},
        "hurts LLaMA": {"gpt2": None, "llama": -1},
        "helps LLaMA, hurts GPT-2": {"gpt2": -1, "llama": 1},
        "no difference": {"gpt2": 0, "llama": 0},
        "no difference in GPT-2": {"gpt2": 0, "llama": None},
        "undecided": {"gpt2": None},
    }
    assert {page.word_of(signs): signs for signs in words.values()} == words
    assert page.beside("tie", {"gpt2": 1, "llama": 0}) == "better in GPT-2, seen in LLaMA"
