"""The page of the answer, from simulated settings: it says what the planned settings say of each
part, and below them what a sweep of one setting says; what has not learned is not on it."""

import re
import runpy
from types import SimpleNamespace

import numpy as np
import pytest

from bench.ablation import comparisons, estimates, figures, page, page_tables, report, worth
from bench.ablation.effects import Effect
from bench.settings import held_out, plan, worths
from common.commands import ROOT
from helpers.planned_settings import write_setting
from helpers.sweeps import make_sweep

CALM = {"diverged": (), "stale": False, "seeds": 6, "noise": 0.003, "curve_points": 5}
EFFECTS = {"base": 0.0, "base-again": 0.0, "rope": -0.06, "swiglu": 0.0, "no biases": 0.04}
CALM["chosen_lr"] = dict.fromkeys(EFFECTS, 2) | {"rope": 1}
BETTER, FASTER = ("less loss", "better", "Su", "https://a"), ("less time", None, "Su", "https://b")
PARTS = {
    "Biases": dict(into={"gpt2": "no biases"}, claims=[BETTER]),
    "RoPE": dict(into={"gpt2": "rope"}, out_of={"llama": "no biases"}, claims=[BETTER, FASTER]),
    "SwiGLU": dict(into={"gpt2": "swiglu", "llama": "swiglu"}, claims=[]),
    "RMSNorm": dict(claims=[FASTER]),
    "No biases": dict(claims=[BETTER]),
    "Untied head": dict(claims=[]),
    "All five together": dict(claims=[]),
    "Experts": dict(into={"llama": "experts"}, claims=[]),
}
MULTIPLES = {"RoPE": [(1.3, "Su")], "SwiGLU": [(1.1, "Su")], "RMSNorm": [(1.2, "Su"), (0.8, "Li")]}
MULTIPLES |= {"No biases": [(0.9, "Su")], "Untied head": [(1.05, "Su")]}
SWEEPS = ["llama", "gpt2"]
CONFIG = {
    "settings": {name: (name, f"<{name}>") for name in SWEEPS},
    "parts": {name: facts | {"swap": f"<{name}>"} for name, facts in PARTS.items()},
    "example": ("gpt2", "RoPE"),
    "multiples": MULTIPLES,
}
ANSWER = "config/answer/settings.py"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Few resamples, and reports without figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparisons, "RESAMPLES", 99)
        patch.setattr(worth, "DRAWS", 200)
        patch.setattr(report, "ITEMS", [item for item in report.ITEMS if item[2] == "first"])
        patch.setattr(figures, "saved", lambda *_, **__: b"a picture")
        yield


def write_settings(out, settings, test=False):
    """Write settings in which SwiGLU helps with Muon and hurts with AdamW."""
    for each in settings:
        factors = each.factors
        means = {"RoPE": 0.5, "RMSNorm": 0.02, "No biases": -0.2, "Untied head": 0.1}
        means |= {} if test else {"mine": 0.3}  # a part that the page does not show
        means["SwiGLU"] = 0.2 if factors["optimizer"] == "muon" else -0.2
        if each.name in ("c04", "c06"):
            means["All five together"] = 0.4
        if each.name == "c12" or test:
            means["RoPE"] = 1.5  # in GPT-2, beyond the curve's end
        write_setting(out / "settings", each.name, means, test, factors)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, Page) of two sweeps, sixteen planned settings and the four of the test, written."""
    out = tmp_path_factory.mktemp("answer")
    for steps, name in enumerate(SWEEPS, 1000):
        make_sweep(out / name, max_iters=steps, test_split=True, effects=EFFECTS, **CALM)
    write_settings(out, plan.read([ANSWER], "").settings)
    held_out.main([str(out / "settings")])
    write_settings(out, plan.read([ANSWER, "--settings=held_out"], "").settings, test=True)
    pages = []
    kind = page.Page

    def make(*given, **more):
        pages.append(kind(*given, **more))
        return pages[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "Page", make)
        page.write(CONFIG, [out / name for name in SWEEPS], out)
    return out, pages[0]


@pytest.fixture
def out(written):
    return written[0]


@pytest.fixture
def made(written):
    return written[1]


def cells_of(text, name):
    """The cells of the first row of a part in a text of Markdown."""
    (line, *_) = re.findall(rf"^\| \[?{name}\b\S* \| (.*) \|$", text, re.MULTILINE)
    return line.split(" | ")


def test_the_first_table_is_of_the_planned_settings(made, out):
    """Its words, counts and means follow from the worths; each base has its own mean."""
    text = (out / "index.md").read_text()
    assert [part.name for part in made.answers[:2]] == ["RoPE", "Untied head"]
    rope, swiglu = cells_of(text, "RoPE"), cells_of(text, "SwiGLU")
    assert rope[:2] == ["helps", "16 of 16"] and rope[7] == "–"
    assert swiglu[:2] == ["depends on optimizer", "8 of 16"] and swiglu[7][:7] == "Muon:\u00a01"
    assert cells_of(text, "No biases")[:2] == ["hurts", "0 of 16"]
    assert cells_of(text, "All five together")[:5] == ["too few settings", "2 of 2", "–", "–", "–"]
    rows = made.rows[(made.rows.planned == 1) & (made.rows.part == "RoPE")]
    means = np.exp(np.log(rows.worth).groupby(rows.base).mean())
    assert rope[5:7] == [f">{means['gpt2']:.2f}", f"{means['llama']:.2f}"]  # c12 lies beyond 2
    assert 1.5 < float(rope[2].split()[0]) < 1.8 and 1.5 < means["llama"] < 1.8
    low, high = map(float, rope[3].split(" to "))
    assert low < 1.6 < high and float(rope[4]) > 0.95
    assert float(rope[8]) == pytest.approx(float(rope[2].split()[0]) / float(rope[9]), abs=0.02)

    html = (out / "index.html").read_text()
    first, others = html.split('id="parts-measured-in-one-setting"')
    assert first.count('<tr class="row">') == first.count('<tr class="card">') == 6
    assert others.count('<tr class="row">') == 1  # Biases
    row = first.partition(">SwiGLU</summary>")[2].partition("</tr>")[0]
    shown = re.findall("<td.*?>(.*?)</td>", row)
    assert shown == swiglu[: len(shown)]


def test_both_passes_are_compared_with_the_first(tmp_path):
    for name, base in (("a", "llama"), ("b", "gpt2"), ("c", "gpt2")):
        write_setting(tmp_path, name, {"RoPE": 0.2, "Gate": 0.1}, False, {"base": base}, 0.02)
    write_setting(tmp_path, "d", {"RoPE": 0.2, "Gate": 0.1}, factors={"base": "gpt2"})
    planned = worths.load(tmp_path)
    parts = [SimpleNamespace(name="RoPE"), SimpleNamespace(name="Gate")]
    page = SimpleNamespace(planned=planned, worths=worths.table(planned)[1], answers=parts)
    rope, gate, all_models = page_tables.passes_table(page).to_dict("records")
    assert (rope["part"], rope["settings"], gate["settings"]) == ("RoPE", "3", "3")
    # 0.02 nats are exp(0.1) = 1.11 times the tokens: of the model without RoPE in a.
    assert gate["ratio [95 %, by setting]"] == all_models["ratio [95 %, by setting]"] == "1.11"
    assert rope["ratio [95 %, by setting]"].split()[0] == "1.03"  # exp((0.1 + 0.1 - 0.1) / 3)
    page.worths = [each for each in page.worths if each.setting == "d"]
    assert page_tables.passes_table(page) is None


def test_a_card_shows_each_setting_in_the_colour_of_the_factor_that_matters(made, out):
    html = (out / "index.html").read_text()
    card = html.partition('id="swiglu"')[2].partition("</tbody>\n<tbody>")[0]
    colours = re.findall(r'<g class="level(\d)"><text [^>]*>[^<]* × (\w+): .*?, (\w+), \d', card)
    assert len(colours) == 20 and {(c, o) for c, _, o in colours} == {("0", "AdamW"), ("1", "Muon")}
    command = (
        f'python bench/ablate.py {ANSWER} --settings=4 --arms="SwiGLU" --out_dir=out-settings<'
    )
    assert command in card.replace("&#34;", '"')
    card = page_tables.card_table(made, made.answers[0]).set_index("setting")
    assert len(card) == 20 and card.loc["c12", "worth × tokens"] == ">2.00"
    assert made.planned[0].stage == (pytest.approx(np.exp(0.5), rel=0.02), 0)
    assert list(card.loc["h3"])[1:7] == ["LLaMA", "summaries", "BPE", "Muon", "4 × 96", "128"]


def measured_at(base, losses):
    """A planned setting of some losses at the base's best rate, and a lower one at another rate."""
    facts = {"setting": base, "factors": {"base": base, "text": "plays", "tokens": "byte"}}
    facts["factors"] |= {"optimizer": "muon", "layers": 3, "width": 64}
    points = {arm: [(0.0, loss), (0.3, 1.0)] for arm, loss in losses.items()}
    return SimpleNamespace(facts=facts, admitted=True, points=lambda arm, half: points.get(arm, []))


def test_the_gains_of_the_five_and_of_the_convolutions_add_up_or_not():
    """Whichever of the four models is the base, the falls are below the loss of GPT-2."""
    five, convolutions = page_tables.TOGETHER, page_tables.CONVOLUTIONS
    gpt2 = {"base": 2.0, five: 1.8, convolutions: 1.7, "LLaMA with convolutions": 1.6}
    llama = {"base": 1.8, five: 2.0, convolutions: 1.6, "GPT-2 with convolutions": 1.7}
    not_run = {"base": 1.8, five: 2.0, convolutions: 1.6}
    planned = [
        measured_at("gpt2", gpt2),
        measured_at("llama", llama),
        measured_at("llama", not_run),
    ]
    frame = page_tables.sums_table(SimpleNamespace(planned=planned))
    assert frame["in"].tolist() == [
        f"{base}: plays, bytes, Muon, 3 × 64" for base in ("gpt2", "llama")
    ]
    assert frame.drop(columns="in").drop_duplicates().to_dict("records") == [
        {
            "loss of GPT-2": "2.000",
            "the five": "0.200",
            "convolutions": "0.300",
            "both": "0.400",
            "both ÷ their sum": "0.80",
        }
    ]
    assert page_tables.sums_table(SimpleNamespace(planned=planned[2:])) is None


def test_what_stands_below_the_first_table(made, out):
    tables = page_tables.made(made)
    marked = tables["factors"].set_index("part")
    assert "All five together" not in marked.index  # too few settings tell nothing of factors
    stars = marked.apply(lambda column: column.str.endswith("*"))
    (named,) = stars.columns[stars.loc["SwiGLU"]]
    assert named.split() == ["optimizer:", "Muon", "÷", "AdamW"]
    assert float(marked.loc["SwiGLU", named][:4]) == pytest.approx(1.49, abs=0.05)

    scores = tables["scores"].set_index("predicted")
    assert list(scores.columns) == ["the settings of the test", "each setting from the others"]
    assert list(scores.loc["settings"]) == ["4", "16"]
    test = made.scores["the settings of the test"]
    assert made.scores["each setting from the others"]["n"] == 16 * 5 and test["n"] == 4 * 5
    outside = [not each.covered for each in made.predictions]
    assert sum(outside[:20]) > 0  # RoPE's
    assert scores.loc["outside their 95 % interval"].iloc[0] == f"{sum(outside[:20])} of 20"
    assert page_tables.tiles(made)[:2] == ["16", f"{sum(outside)} of 100"]

    steps = tables["steps"].set_index("change")
    helps = list(steps["helps GPT-2 in"])
    assert helps[:2] + helps[5:] == ["8 of 8", "4 of 8", "2 of 2", "8 of 8"]
    rows = made.rows[(made.rows.planned == 1) & (made.rows.base == "llama")]
    five = rows[rows.part.isin(list(PARTS)[1:6])]
    product = np.exp(np.log(five.worth).groupby(five.setting).sum().mean())
    assert steps["worth in LLaMA"].iloc[-1] == f"{product:.2f}"
    four = made.rows[(made.rows.part != "RoPE") | (made.rows.setting != "c16")]
    assert list(page_tables.steps_of(four)["helps GPT-2 in"])[-1] == "7 of 7"  # c16 lacks one
    assert len(tables["plan"]) == 20
    published = tables["published"].set_index("part")
    assert list(published.index)[:5] == list(CONFIG["multiples"])
    assert published.loc["RMSNorm", "there"] == "1.20 (Su), 0.80 (Li)"
    assert published["here"].iloc[-1].startswith("0.70 [")  # the ranks 1 4 3 5 2 and 1 2 4 5 3
    for name in ("html", "md"):
        assert not re.search(r"\b(nan|inf|None)\b", (out / f"index.{name}").read_text())
    assert {"example", "settings"} == {path.stem for path in out.glob("*.png")}


@pytest.mark.parametrize("n", [0, 3, 6])
def test_few_settings_name_no_factor_and_predict_what_they_can(tmp_path, n):
    write_settings(tmp_path, plan.read([ANSWER], "").settings[:n])
    few = page.Page(CONFIG, {}, worths.load(tmp_path / "settings"))
    text = report.render("index.md.j2", **page.values_of(few, {}, []))
    assert "Which factors matter?" not in text and "depends on optimizer" not in text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    words = {part.word for part in few.answers}
    assert words == {0: set(), 3: {"too few settings"}}.get(n, words)
    assert page_tables.tiles(few)[0] == f"{n}" and bool(few.scores) == (n == 6)


def test_a_prediction_without_an_end_is_open_in_texts_and_cut_in_figures(tmp_path):
    for name in "abcd":
        factors = {"base": "gpt2", "text": "plays", "tokens": "byte", "optimizer": "muon"}
        factors |= {"layers": 3, "width": 64, "context": 64}
        write_setting(tmp_path, name, {"RoPE": 1.5}, factors=factors)  # the curve ends at 2
    made = page.Page(CONFIG, {}, worths.load(tmp_path))
    text = report.render("index.html.j2", **page.values_of(made, page.pictures_of(made), []))
    assert "to ∞" in text and not re.search(r"\b(nan|inf|None)\b", text)
    assert made.answers[0].ends[1] == np.log(10)


def test_a_sweep_tells_everything_of_the_part(made, out):
    """RoPE is taken out of LLaMA, which is worse without it, and put into GPT-2."""
    rope = next(part for part in made.parts if part.name == "RoPE")
    assert [found.taken_out for found in rope.estimates] == [True, False]
    for found in rope.estimates:
        assert found.word == "helps" and found.beyond == 0
        assert found.row["difference"] < 0 < found.row["test_low"] * found.row["test_high"]
        assert 1 < found.row["worth_low"] < found.row["worth"] < found.row["worth_high"]
    taken_out = rope.within("llama")
    assert taken_out.row["worth"] == pytest.approx(1 / taken_out.arm["worth"])
    assert taken_out.ratio("parameters") == pytest.approx(800_000 / 804_000)
    above = estimates.Estimate("A", made.shelves[0], {**taken_out.arm, "worth": np.inf}, True)
    assert above.beyond == -1 and above.bar()[0] == 0.5

    (biases,) = made.others
    text = (out / "index.md").read_text()
    assert re.findall(r", at (\S+) × the base's rate \| (\w+)", text) == [("0.5", "rope")]
    cells = cells_of(text, "Biases")
    assert cells[:3] == ["hurts", "–", biases.within("gpt2").worth()]
    assert made.unmeasured == ["Experts"]


def test_a_sweep_whose_base_has_not_learned_says_nothing_of_parts(tmp_path):
    make_sweep(tmp_path, effects=EFFECTS, ngrams={"best": [5, 1.6], "trigrams": 1.7}, **CALM)
    made = page.Page(CONFIG, {"gpt2": report.judge([tmp_path])[0]})  # the base ends at 1.75
    assert made.shelves == [] and made.parts == []
    make_sweep(tmp_path, effects=EFFECTS, curve=[], **CALM)  # no curve, no worths
    made = page.Page(CONFIG, {"gpt2": report.judge([tmp_path])[0]})
    assert made.rows.empty and [part.word for part in made.parts][:2] == ["hurts", "helps"]


def test_every_arm_of_a_shelf_is_in_the_row_of_one_part():
    answer = ROOT / "config/answer"
    parts = runpy.run_path(str(answer / "page.py"))["parts"].values()
    for base in ("llama", "gpt2"):
        arms = [part.get(way, {}).get(base) for part in parts for way in ("into", "out_of")]
        assert sorted(filter(None, arms)) == sorted(runpy.run_path(f"{answer}/{base}.py")["arms"])


def test_words_beside_published_ones_and_the_digits_of_a_probability():
    assert page.beside("worse", "helps") == "opposite"
    assert page.beside(None, "helps") == "cannot be tested here"
    texts = {0.897: "0.897", 0.8996: "0.8996", 0.9: "0.90", 0.951: "0.95", 0.102: "0.102"}
    assert {p: Effect("", 4, 4, p_helps=p).chance for p in texts} == texts


@pytest.mark.slow
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
    page.goto(f"{address}#biases")  # of the second table
    expect(page.locator("#biases")).to_be_visible()
    expect(page.locator("#rope")).to_be_hidden()
    for width in (420, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    names = page.locator("table.parts").first.locator("tr.row summary")
    head = page.get_by_role("columnheader", name="in GPT-2").first
    head.get_by_role("button").press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    assert names.all_text_contents()[0] == "RoPE"  # whose cell begins with >
    head.get_by_role("button").press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert names.all_text_contents()[0] == "No biases"
    page.get_by_role("searchbox").fill("optimizer")
    expect(page.locator("tr.row summary").locator("visible=true")).to_have_text(["SwiGLU"])
    page.locator("tr.row", has_text="depends on optimizer").locator("td").first.click()
    expect(page.locator("#swiglu")).to_be_visible()
    assert not complaints
    assert all(url.startswith("file:") for url in requested)

    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(f"{address}#rope")
    expect(plain.locator("#rope")).to_be_visible()
    expect(plain.get_by_role("searchbox")).to_be_hidden()
    expect(plain.get_by_role("button")).to_have_count(0)


def test_parts_of_few_settings_stand_below_the_others():
    parts = []
    for mean, n_settings in ((2.0, 4), (0.9, 15), (1.1, 12)):
        parts.append(SimpleNamespace(worth=mean, effect=SimpleNamespace(n_settings=n_settings)))
    assert [part.worth for part in sorted(parts, key=page.order)] == [1.1, 0.9, 2.0]
