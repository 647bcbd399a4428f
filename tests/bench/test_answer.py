"""bench/answer.py on made-up sweeps: its words follow the rows, its correction covers everything
that it claims, each number leads to its rows, and the page needs nothing but itself."""

import html.parser
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from statsmodels.stats.multitest import multipletests

from bench import answer as script
from bench.ablation import answer, answer_page, answer_sentences, answer_tables
from bench.ablation.scale import FILE
from bench.ablation.significance import ALPHA
from common.errors import UserError
from helpers.sweeps import make_sweep

ROOT = Path(__file__).resolve().parent.parent.parent
EFFECTS = {"base": 0.0, "base-again": 0.0, "rope": -0.06, "rmsnorm": 0.0}
CONFIG = """# 3 minutes.
#   python bench/ablate.py config/answer/waiting.py
question = "Does it run?"
"""
LOW, HIGH = ("base", "swiglu"), ("rope", "rope+swiglu")  # cells without and with rope
CLAIM = {"id": "X1", "claim": "rope helps", "source": "a paper", "kind": "trained"}


def configs(folder):
    """A folder of configs with one that has not run."""
    (folder / "answer").mkdir(parents=True)
    (folder / "answer/waiting.py").write_text(CONFIG)
    return folder


def make(folder, effects=EFFECTS, **keys):
    """A small sweep; returns its folder."""
    keys = {"diverged": (), "stale": False, "seeds": 4, "lr_grid": [1], "curve_points": 3} | keys
    make_sweep(folder, effects=effects, chosen_lr={}, **keys)
    return folder


def make_scale(folder, first=-0.3, step=0.1):
    """Three sizes of one scale, each with a base of its own; RoPE's effect at the first, and what
    each further size adds to it."""
    for place, width in enumerate((32, 64, 128)):
        values = {"n_embd": width, "vocab_size": 65, "n_head": 2, "batch_size": 8}
        values |= {"model": "gpt2", "n_layer": 2, "block_size": 64, "max_iters": 100 * width}
        values |= {"gradient_accumulation_steps": 1}
        effects = EFFECTS | {"rope": first + step * place}
        make(folder / f"w{width}", effects, base_values=values, code_hash="code1")
    (folder / FILE).write_text(json.dumps({"sizes": ["w32", "w64", "w128"]}))


def make_factorial(folder):
    """Two factors, whose times were disturbed; returns {cell: tokens per second}."""
    words, effects, arms = {"rope": "position", "swiglu": "mlp"}, {}, {}
    for levels in itertools.product((0, 1), repeat=2):
        high = [word for word, level in zip(words, levels, strict=True) if level]
        name = "+".join(high) or "base"
        effects[name] = sum({"rope": -0.06, "swiglu": -0.03}[word] for word in high)
        cell = dict(zip(words.values(), levels, strict=True))
        arms[name] = {"cell": cell, "changes": {words[word]: word for word in high}}
        arms[name]["against"] = None if high else "base"
    make(folder, effects, arms=arms)
    costs = [json.loads(line) for line in (folder / "costs.jsonl").read_text().splitlines()]
    disturbed = {"step_ratio": None, "disturbed": "other work kept 12% of the cores busy"}
    lines = [json.dumps(cost | disturbed) + "\n" for cost in costs]
    (folder / "costs.jsonl").write_text("".join(lines))
    return {cost["arm"]: cost["tokens_per_second"] for cost in costs}


def without_links(text):
    """A sentence of the page or of the README, as plain words."""
    plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", re.sub(r"<.*?>", "", text))
    return html.unescape(plain)


def claims_in(results):
    found = answer.experiments(results, results / "none")
    answer_page.label(found)
    return answer.claims_of(found)


def words(results):
    return {claim.subject.arm: claim.subject.word for claim in claims_in(results)}


# ---------------------------------------------------------------- what it claims


def test_a_word_follows_the_rows(tmp_path):
    make(tmp_path / "one")
    assert words(tmp_path)["rope"] == "better"
    make(tmp_path / "one", EFFECTS | {"rope": 0.06})
    assert words(tmp_path)["rope"] == "worse"
    make(tmp_path / "one", EFFECTS | {"rope": 0.0}, noise=0.05)
    assert words(tmp_path)["rope"] == "undecided"


def test_one_correction_covers_every_claim(tmp_path):
    for number in range(3):
        make(tmp_path / f"sweep{number}")
    make(tmp_path / "screening", EFFECTS | {"swiglu": -0.05}, screening=True)
    make_scale(tmp_path / "scale")
    claims = claims_in(tmp_path)
    assert len(claims) == 3 * 2 + 3 + 3 * 2 + 2  # arms of all sweeps and sizes, and two slopes
    assert len({id(claim.subject) for claim in claims}) == len(claims)

    differences = multipletests([claim.p for claim in claims], method="holm")[1]
    ties = multipletests([claim.p_tie for claim in claims], method="holm")[1]
    for claim, p, p_tie in zip(claims, differences, ties, strict=True):
        expected = p_tie if claim.own in answer.OF_EQUALITY else p
        assert claim.subject.p_page == pytest.approx(expected)
        assert claim.subject.p_page >= claim.p * (1 - 1e-9) or claim.own in answer.OF_EQUALITY
        decided = claim.subject.word in answer.OF_DIFFERENCE | answer.OF_EQUALITY
        assert not decided or claim.subject.p_page <= ALPHA


def test_the_page_takes_back_what_only_its_sweep_decides(tmp_path):
    weak = EFFECTS | {"rope": -0.025}
    make(tmp_path / "a", weak, noise=0.0055)
    assert words(tmp_path)["rope"] == "better"
    for number in range(12):
        make(tmp_path / f"more{number}", EFFECTS | {"rope": 0.0}, noise=0.05)
    (claim,) = (
        one
        for one in claims_in(tmp_path)
        if one.experiment.name == "a" and one.subject.arm == "rope"
    )
    assert claim.own == "better" and claim.taken_back and claim.subject.word == "undecided"
    assert claim.subject.p_holm <= ALPHA < claim.subject.p_page
    assert "better by its own sweep, not by the correction" in claim.subject.why


def test_the_surest_estimate_of_a_part_counts(tmp_path):
    make(tmp_path / "few", seeds=3, noise=0.02)
    make(tmp_path / "many", seeds=12)
    parts = answer.parts_of(claims_in(tmp_path))
    assert [part.name for part in parts] == ["RoPE", "RMSNorm"]
    assert all(part.claim.experiment.name == "many" and len(part.claims) == 2 for part in parts)
    assert parts[0].time and parts[0].memory > 1 and parts[0].cache == 1
    assert parts[0].claim.subject.worth.k > 1.2


def test_the_page_shows_every_estimate_of_a_part_that_several_sweeps_measured(tmp_path):
    make(tmp_path / "few", seeds=3, noise=0.02)
    make(tmp_path / "many", seeds=12)
    make(tmp_path / "once", {"base": 0.0, "swiglu": -0.1})
    make(tmp_path / "screening", screening=True)
    made = answer_tables.estimates_table(answer.parts_of(claims_in(tmp_path)))
    named = [(row[0].text, row[1].text) for row in made.table.rows]
    arms = "RoPE in GPT-2", "RMSNorm in GPT-2"
    assert named == [(arm, sweep) for arm in arms for sweep in ("many", "few")]
    assert made.links == ["many", "few"] * 2
    setting = made.table.rows[0][2].text
    assert setting == "shakespeare_char, 2,000 steps, 800 k parameters, learning rate 0.001"


def test_a_part_of_a_factorial_has_the_costs_of_its_cells(tmp_path):
    speeds = make_factorial(tmp_path / "factorial")
    parts = {part.name: part for part in answer.parts_of(claims_in(tmp_path))}
    assert set(parts) == {"RoPE", "SwiGLU"}
    low, high = (math.prod(speeds[arm] for arm in arms) for arms in (LOW, HIGH))
    ratio, *ends = parts["RoPE"].time
    assert ratio == pytest.approx(math.sqrt(low / high)) and all(map(math.isnan, ends))
    assert parts["RoPE"].memory > 1 and parts["RoPE"].cache == 1

    (table,) = answer_tables.parts_tables(list(parts.values()))
    cells = dict(zip(table.table.headings, table.table.rows[0], strict=False))
    assert cells["time of a step"].text == f"about {ratio:.2f} ×"
    assert "12% of the cores" in cells["time of a step"].tip
    assert cells["part"].tip == "position=None to rope"


@pytest.mark.parametrize(
    "changes, arm, name",
    [
        ({"attn_extra": "value_residual"}, "attn_extra=value_residual", "value residual"),
        ({"n_kv_head": 2}, "gqa", "2 key heads"),
        ({"norm": "rmsnorm"}, "norm", "RMSNorm"),
        ({"norm": "dyt"}, "norm", "dyt"),
        ({"low_rank": 32}, "rank 32", "rank 32"),
        ({"low_rank": 32}, "low_rank=32", "low rank 32"),
        ({"block": "sandwich"}, "norms before and after", "norms before and after"),
        ({"n_layer": 12, "n_embd": 36}, "deep", "deeper and narrower"),
    ],
)
def test_a_change_has_a_name_that_people_say(changes, arm, name):
    assert answer.shown_name(changes, arm) == name


def test_a_planned_experiment_without_rows_has_not_run(tmp_path):
    make(tmp_path / "results/one")
    planned = configs(tmp_path / "config")
    found = answer.experiments(tmp_path / "results", planned)
    assert {one.name: one.folder is None for one in found} == {"one": False, "waiting": True}
    assert found[-1].question == "Does it run?"
    assert found[-1].command == "python bench/ablate.py config/answer/waiting.py"


def test_a_base_again_is_no_claim(tmp_path):
    make(tmp_path / "one")
    assert set(words(tmp_path)) == {"rope", "rmsnorm"}


# ---------------------------------------------------------------- the page


class Page(html.parser.HTMLParser):
    """Collects ids, links, the cells of tables with their links, and whatever would be fetched."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.fetched, self.bare = set(), [], [], []
        self.cell, self.linked, self.text = False, False, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "a":
            self.links.append(given["href"])
            self.linked = True
        elif tag in ("script", "link", "img", "iframe", "object", "use"):
            self.fetched += [given[key] for key in ("src", "href", "data") if key in given]
            self.fetched = [each for each in self.fetched if not each.startswith("#")]
        if tag in ("td", "th"):
            self.cell, self.linked, self.text = "scope" not in given or tag == "td", False, ""

    def handle_endtag(self, tag):
        if tag == "td":
            if re.search(r"\d", self.text) and not self.linked:
                self.bare.append(self.text)
            self.cell = False

    def handle_data(self, data):
        if self.cell:
            self.text += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder of the page, text of the page) of a sweep, a scale, a screening and a ledger."""
    folder = tmp_path_factory.mktemp("page")
    make(folder / "results/one")
    make(folder / "results/screening", EFFECTS | {"swiglu": -0.05}, screening=True)
    make_scale(folder / "results/growing")
    numbers = {"quantity": "difference", "measured": "-0.0612 (-0.07 to -0.05)", "holds": "-1 to 0"}
    rows = [CLAIM | {"verdict": "contradicted", "note": "two sizes"} | numbers]
    (folder / "results/claims.json").write_text(json.dumps({"facts": {}, "claims": rows}))
    (folder / "README.md").write_text(
        "before\n<!-- answer -->\nold\n<!-- end of answer -->\nafter\n"
    )
    page = answer_page.write(folder / "results", configs(folder / "config"), folder / "README.md")
    return page.parent, page.read_text(encoding="utf-8")


def test_every_number_leads_to_its_rows_and_its_command(written):
    out, text = written
    page = Page(text)
    assert page.bare == []
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert link == "index.md" or (out / link).exists()
    top, noise = text.partition('id="noise"')[::2]
    found = re.findall(r'<p class="answer">(.*?)</p>', top)
    found += re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", noise.partition('id="parts_gpt2"')[0])
    open_questions = text.partition('id="unknown"')[2].partition("</ul>")[0]
    found += re.findall(r"<li>(.*?)</li>", open_questions)
    assert len(found) > 6
    for sentence in found:
        bare = html.unescape(re.sub(r"<a .*?</a>|GPT-2|x0", "", sentence))
        assert not re.search(r"\d", bare), sentence
    for name in ("one", "screening", "growing"):
        assert f"#at-{name}" in page.links
        section = text[text.index(f'id="at-{name}"') :].partition("</section>")[0]
        assert "rows.jsonl" in section and "<pre>python bench/ablate.py" in section


def test_the_page_asks_no_third_party_for_anything(written):
    out, text = written
    assert Page(text).fetched == []
    assert not re.search(r"url\((?!#)|@import|src=|https?://(?!www\.w3\.org)", text)
    assert (out / "index.md").exists() and (out / "parts_gpt2.png").exists()


def test_the_page_says_what_has_not_run_and_what_was_published(written):
    out, text = written
    assert "not run yet" in text and "Does it run?" in text
    assert "contradicted" in text and "rope helps" in text
    assert "difference: -0.0612 (-0.07 to -0.05); claimed: -1 to 0; two sizes" in text
    markdown = (out / "index.md").read_text(encoding="utf-8")
    for line in markdown.splitlines():
        assert not line.startswith("|") or line.endswith("|")
    table = markdown.partition('id="parts_gpt2"')[2].partition("<a id=")[0]
    rows = [line for line in table.splitlines() if line.startswith("| RoPE |")]
    assert len(rows) == 1 and "better" in rows[0] and "](#at-" in rows[0]


def test_without_a_ledger_it_says_so(tmp_path):
    make(tmp_path / "one")
    page = answer_page.write(tmp_path, tmp_path / "none", None)
    after = page.read_text(encoding="utf-8").partition('id="ledger"')[2]
    assert after.partition("</p>")[0].endswith("Not measured.")


def test_the_readme_gets_the_sentences_of_the_page(written):
    out, text = written
    readme = (out.parent.parent / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("before\n<!-- answer -->\n") and readme.endswith("\nafter\n")
    assert "old" not in readme and "bench/results/answer/parts_gpt2.png" in readme
    assert "](bench/results/answer/index.md#at-" in readme
    for line in re.findall(r"<li>(.*?)</li>", text.partition('id="surprises"')[2])[:1]:
        assert without_links(line) in without_links(readme)


def test_the_page_is_made_from_the_rows_alone(tmp_path, written):
    """The same rows give the same page, byte for byte."""
    out, text = written
    again = tmp_path / "again"
    shutil.copytree(out.parent.parent, again)
    page = answer_page.write(again / "results", again / "config", None)
    assert page.read_text(encoding="utf-8") == text


def test_no_sweep_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="no sweep has rows"):
        answer_page.write(tmp_path, tmp_path, None)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="takes no words"):
        script.main(["out"])


# ---------------------------------------------------------------- sentences


def facts_of(claims):
    found = {claim.experiment.name: claim.experiment for claim in claims}
    return answer_sentences.Facts(list(found.values()), claims, answer.parts_of(claims), [])


def test_sentences_are_computed(tmp_path):
    make(tmp_path / "one", seeds=8)
    claims = claims_in(tmp_path)
    facts = facts_of(claims)
    first = without_links(answer_sentences.answer(facts)["gpt2"][0])
    rope = next(claim.subject for claim in claims if claim.subject.arm == "rope")
    gained = (
        r"With one rate for all arms, GPT-2 of [\d. k]+ parameters gains most from RoPE \((.*)\)\."
    )
    assert re.match(gained, first)[1] == str(rope.worth).replace(" (", ", ").rstrip(")")
    assert math.isfinite(rope.p_page)
    assert answer_sentences.surprises(facts) == answer_sentences.surprises(facts)


def test_a_part_on_which_experiments_disagree_is_named_as_such(tmp_path):
    make(tmp_path / "sure", EFFECTS | {"untied": 0.2}, seeds=16)
    make(tmp_path / "other", EFFECTS | {"untied": -0.2}, seeds=8)
    claims = claims_in(tmp_path)
    parts = {part.name: part for part in answer.parts_of(claims)}
    assert parts["untied head"].elsewhere == ["better"] and not parts["RoPE"].elsewhere
    assert parts["untied head"].claim.subject.word == "worse"
    facts = facts_of(claims)
    second = answer_sentences.answer(facts)["gpt2"][-1]
    assert "it depends on the experiment: [untied head](#estimates)." in second.lower()
    assert second.count("ntied") == 1


def test_costs_are_those_of_the_newest_timing(tmp_path):
    """More seeds give the better estimate, newer code the costs; disturbed times are left out."""
    make(tmp_path / "older", seeds=16, started="2026-01-01T00:00:00")
    make(tmp_path / "newer", started="2026-02-01T00:00:00")
    make(tmp_path / "disturbed", started="2026-03-01T00:00:00")
    path = tmp_path / "disturbed/costs.jsonl"
    costs = [json.loads(line) | {"step_ratio": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(cost) + "\n" for cost in costs))

    part, *_ = answer.parts_of(claims_in(tmp_path))
    assert (part.claim.experiment.name, part.priced.experiment.name) == ("older", "newer")
    tokens, time = part.claim.subject.worth, part.worth_time
    assert time.k * part.time[0] == pytest.approx(tokens.k)
    assert time.high * part.time[0] == pytest.approx(tokens.high)


def test_two_scales_that_contradict_each_other_are_both_named(tmp_path):
    make_scale(tmp_path / "fading")
    (line,) = slope_lines(tmp_path)
    assert line.startswith(
        "The effect of RoPE fades from the smallest size to the largest, from −0.2"
    )
    assert "in an experiment of" not in line

    make_scale(tmp_path / "growing", first=-0.05, step=-0.15)
    (line,) = slope_lines(tmp_path)
    steps = (
        "in an experiment of 2,000 steps at the largest, not 2,000, it fades, from −0.2.* to −0.0"
    )
    assert re.search(f"grows from the smallest .*, from −0.0.*; {steps}", line)
    assert line.count("RoPE") == 1


def test_what_changes_at_ones_own_rate(tmp_path):
    """Twice the rate makes the base 0.03 nats better, and RoPE worse."""
    keys = {"lr_grid": [0.5, 1, 2], "chosen_lr": {"base": 2, "base-again": 2}}
    make_sweep(tmp_path / "one", 8, EFFECTS, diverged=(), stale=False, curve_points=3, **keys)
    facts = facts_of(claims_in(tmp_path))
    (line,) = (without_links(text) for text in answer_sentences.surprises(facts) if "rate" in text)
    found = re.search(r"2 × the shared one; .* by (\S*) nats with RoPE \(not (\S*)\)\.$", line)
    own, shared = (float(text.replace("−", "-")) for text in found.groups())
    assert own == pytest.approx(-0.06, abs=0.01) and shared == pytest.approx(-0.09, abs=0.01)
    make(tmp_path / "surer", seeds=16, noise=0.004)
    tuned, shared, *_ = answer_sentences.answer(facts_of(claims_in(tmp_path)))["gpt2"]
    assert tuned.startswith("With the best learning rate for each arm") and "(#at-one)" in tuned
    assert shared.startswith("With one rate for all arms") and "(#at-surer)" in shared

    shutil.rmtree(tmp_path / "surer")
    make(tmp_path / "one", seeds=8)  # without tuning
    assert "rate" not in " ".join(answer_sentences.surprises(facts_of(claims_in(tmp_path))))


def slope_lines(folder):
    claims = claims_in(folder)
    facts = facts_of(claims)
    lines = map(without_links, answer_sentences.surprises(facts))
    return [line for line in lines if "smallest size" in line]


def test_the_readme_holds_what_the_page_says():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "bench/results/answer/readme.md").read_text(encoding="utf-8")
    block = readme.partition(answer_page.MARKS[0])[2].partition(answer_page.MARKS[1])[0]
    assert block.replace("bench/results/answer/", "").strip() == page.strip()
