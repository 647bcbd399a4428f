"""The page of the answer, from simulated settings: it says what the sweeps say of each part, if an
arm puts it in and if one takes it out, and what has not learned is not on it."""

import re
import runpy

import numpy as np
import pytest

from bench.ablation import comparisons, estimates, figures, page, page_tables, report, worth
from common.files import ROOT
from helpers.sweeps import make_sweep

CALM = {"diverged": (), "stale": False, "seeds": 6, "noise": 0.003}
EFFECTS = {"base": 0.0, "base-again": 0.0, "rope": -0.06, "swiglu": 0.0, "no biases": 0.04}
BETTER, FASTER = ("less loss", "better", "Su", "https://a"), ("less time", None, "Su", "https://b")
PARTS = {
    "Biases": dict(into={"gpt2": "no biases"}, claims=[BETTER]),
    "RoPE": dict(into={"gpt2": "rope"}, out_of={"llama": "no biases"}, claims=[BETTER, FASTER]),
    "SwiGLU": dict(into={"gpt2": "swiglu", "llama": "swiglu"}, claims=[]),
    "Experts": dict(into={"llama": "experts"}, claims=[]),
}
SETTINGS = ["llama", "llama/small", "llama/python", "llama/adamw"]
CONFIG = {
    "settings": {name: ("llama", f"<{name}>") for name in SETTINGS} | {"gpt2": ("gpt2", "G")},
    "model_of": "llama",
    "first": {"llama": "llama", "gpt2": "gpt2"},
    "first_name": "plays",
    "parts": {name: facts | {"swap": f"<{name}>"} for name, facts in PARTS.items()},
    "recipe": {"llama/adamw": "round 1", "recipe": "round 2"},
    "example": ("gpt2", "RoPE"),
    **dict.fromkeys(("rates", "contexts"), ("gpt2", ["RoPE", "SwiGLU"])),
    "multiples": {"RoPE": 1.3},
}


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Few resamples, and reports without figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparisons, "RESAMPLES", 99)
        patch.setattr(worth, "DRAWS", 200)
        patch.setattr(report, "ITEMS", [item for item in report.ITEMS if item[2] == "first"])
        patch.setattr(figures, "saved", lambda *_, **__: b"a picture")
        yield


def sections_of(out, names, **keys):
    """{folder: Section} of sweeps with some effects."""
    found = {}
    for steps, name in enumerate(names, 1000):
        usual = {"effects": EFFECTS, "curve_points": 5, **CALM}
        make_sweep(out / name, max_iters=steps, **usual | keys)
        (found[name],) = report.judge([out / name])
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, Page) of four settings of LLaMA and one of GPT-2, written."""
    out = tmp_path_factory.mktemp("answer")
    for steps, name in enumerate([*SETTINGS, "gpt2"], 1000):
        effects = EFFECTS | {"no biases": 0.03 + steps % 10 / 200}
        make_sweep(
            out / name, max_iters=steps, curve_points=5, test_split=True, effects=effects, **CALM
        )
    pages = []
    kind = page.Page

    def make(*given, **more):
        pages.append(kind(*given, **more))
        return pages[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "Page", make)
        page.write(CONFIG, [out / name for name in [*SETTINGS, "gpt2"]], out)
    return out, pages[0]


@pytest.fixture
def out(written):
    return written[0]


@pytest.fixture
def made(written):
    return written[1]


def test_everything_is_told_of_the_part(made, out):
    """RoPE is taken out of LLaMA, which is worse without it, and put into GPT-2."""
    rope = made.parts[0]
    assert rope.name == "RoPE" and [found.taken_out for found in rope.estimates] == [True] * 4 + [0]
    assert {found.word for found in rope.estimates} == {"helps"}
    for found in rope.estimates:
        assert found.row["difference"] < 0 < found.row["test_low"] * found.row["test_high"]
        assert found.row["low"] < found.row["difference"] < found.row["high"]
        assert 1 < found.row["worth_low"] < found.row["worth"] < found.row["worth_high"]
    taken_out = rope.at("llama")
    assert taken_out.row["worth"] == pytest.approx(1 / taken_out.arm["worth"])
    assert taken_out.ratio("parameters") == pytest.approx(800_000 / 804_000)
    assert (rope.word, rope.effect.n_helps, rope.effect.n_settings) == ("helps", 4, 4)

    html = (out / "index.html").read_text()
    row_and_card = html.partition(">RoPE</summary>")[2].partition(">SwiGLU</summary>")[0]
    assert "helps" in row_and_card and not re.search("hurts|worse", row_and_card)
    assert html.count('<tr class="row">') == html.count('<tr class="card">') == len(made.parts)
    text = (out / "index.md").read_text()
    assert "| RoPE | helps | 4 of 4 |" in text and "| SwiGLU |" in text
    assert f"| {rope.at('gpt2').worth().split(' [')[0]} |" in text


def test_a_log_worth_has_the_error_of_its_interval(made):
    for found in made.parts[0].estimates:
        worth = found.log_worth()
        assert worth["log_worth"] == pytest.approx(np.log(found.row["worth"]))
        width = np.log(found.row["worth_high"] / found.row["worth_low"])
        assert worth["se"] == pytest.approx(width / 2 / 1.96) and worth["censored"] == 0
    beyond = estimates.Estimate("A", made.settings[0], {**found.arm, "worth": np.inf}, True)
    assert (beyond.log_worth()["censored"], beyond.log_worth()["log_worth"]) == (-1, -np.log(2))
    lost = dict.fromkeys(("worth", "worth_low", "worth_high", "se"), np.nan)
    diverged = {**found.arm, **lost, "verdict": "fails 6 of 6"}
    worth = estimates.Estimate("A", made.settings[0], diverged, False).log_worth()
    assert (worth["censored"], worth["log_worth"]) == (-1, np.log(0.25))
    assert (
        estimates.Estimate("A", made.settings[0], {**found.arm, **lost}, False).log_worth() is None
    )


def test_fewer_than_four_settings_predict_nothing(made):
    biases = made.parts[-1]
    assert biases.name == "Biases" and biases.effect is None and biases.word == "too few settings"
    assert made.unmeasured == ["Experts"]


def test_a_part_has_one_colour_and_a_setting_its_row(made, out):
    gpt2, llama = made.settings[-1].section, made.settings[0].section
    assert figures.style_of(gpt2, "rope") == figures.style_of(llama, "no biases")
    tables = page_tables.made(made)
    assert list(tables["settings"]["setting"]) == [name for _, name in CONFIG["settings"].values()]
    assert "round 2" not in str(tables["recipe"])
    assert made.scores == {}  # four settings: three predict nothing
    for name in ("html", "md"):
        assert not re.search(r"\b(nan|inf|None)\b", (out / f"index.{name}").read_text())
    assert "&lt;llama&gt;" in (out / "index.html").read_text()
    pictures = {path.stem for path in out.glob("*.png")}
    assert {"example", "settings", "rates"} <= pictures


def test_what_has_not_learned_or_not_run_is_said(tmp_path):
    counted = {"best": [5, 1.7], "trigrams": 1.8}  # the base ends at 1.75
    sections = sections_of(tmp_path, ["llama"], ngrams=counted)
    sections |= sections_of(tmp_path, ["gpt2"], ngrams={"best": [5, 1.6], "trigrams": 1.7})
    made = page.Page(CONFIG, sections)
    assert [setting.folder for setting in made.admitted] == ["llama"]
    assert len(made.settings) == 2 and not any(part.at("gpt2") for part in made.parts)
    (words,) = made.warnings("unfinished", "little", "differs")
    assert words == "<llama>. little"
    assert page.Page(CONFIG, {}).parts == []


def test_every_arm_of_a_shelf_is_in_the_row_of_one_part():
    answer = ROOT / "config/answer"
    parts = runpy.run_path(str(answer / "page.py"))["parts"].values()
    for base in ("llama", "gpt2"):
        arms = [part.get(way, {}).get(base) for part in parts for way in ("into", "out_of")]
        assert sorted(filter(None, arms)) == sorted(runpy.run_path(f"{answer}/{base}.py")["arms"])


def test_words_beside_published_ones_and_the_digits_of_a_probability():
    assert page.beside("better", "helps") == "the same here"
    assert page.beside("worse", "helps") == "opposite"
    assert page.beside("tie", "hurts") == "not confirmed here"
    assert page.beside("tie", "no difference") == "the same here"
    assert page.beside(None, "helps") == "cannot be tested here"
    assert page.beside("better", "not known") == "not known here"
    texts = {0.897: "0.897", 0.8996: "0.8996", 0.9: "0.90", 0.951: "0.95", 0.102: "0.102"}
    assert {p: page.chance(p) for p in texts} == texts


def test_the_page_in_a_browser(browser, out):
    """Each table sorts by any column, a word filters the parts, an address opens a card, nothing is
    requested. Without JavaScript the page is plain, and an address still opens its card."""
    from playwright.sync_api import expect

    address = (out / "index.html").as_uri()
    page = browser.new_page(viewport={"width": 420, "height": 800})
    requested = []
    complaints = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{address}#swiglu")
    expect(page.locator("#swiglu")).to_be_visible()
    expect(page.locator("#rope")).to_be_hidden()
    for width in (420, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    names = page.locator("tr.row summary")
    head = page.get_by_role("columnheader", name="mean × tokens")
    head.get_by_role("button").press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    assert names.all_text_contents() == ["RoPE", "SwiGLU", "Biases"]
    head.get_by_role("button").press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert names.all_text_contents() == ["SwiGLU", "RoPE", "Biases"]  # unknown: last again
    page.get_by_role("columnheader", name="part").get_by_role("button").click()
    assert names.all_text_contents() == ["Biases", "RoPE", "SwiGLU"]
    steps = page.get_by_role("columnheader", name="steps")  # of the table of settings
    steps.get_by_role("button").click()
    column = steps.evaluate("head => head.cellIndex") + 1
    rows = page.locator("table", has=steps).locator(f"tbody td:nth-child({column})")
    assert rows.all_text_contents() == ["1,004", "1,003", "1,002", "1,001", "1,000"]

    page.get_by_role("searchbox").fill("ROPE")
    expect(names.locator("visible=true")).to_have_text(["RoPE"])
    expect(page.locator("#swiglu")).to_be_hidden()
    assert not complaints
    assert all(url.startswith("file:") for url in requested)

    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(f"{address}#rope")
    expect(plain.locator("#rope")).to_be_visible()
    expect(plain.get_by_role("searchbox")).to_be_hidden()
    expect(plain.get_by_role("button")).to_have_count(0)
