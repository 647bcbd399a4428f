"""bench/report.py on synthetic sweeps: it says what the rows say, its page needs nothing but
itself, it says what is missing, and nothing breaks where rows are few."""

import csv
import html.parser
import itertools
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from bench.ablation import (
    cost_figures,
    design_report,
    figures,
    plots,
    report,
    tables,
)
from bench.ablation.sweeps import gather
from common.errors import UserError
from helpers.sweeps import EFFECTS, make_sweep, write

ROOT = Path(__file__).resolve().parent.parent.parent
SWEEPS = [path.parent for path in ROOT.glob("bench/results/*/history.jsonl")]
FEW = {"effects": {"base": 0.0, "base-again": 0.0, "rope": -0.1}, "diverged": (), "stale": False}


class Page(html.parser.HTMLParser):
    """Checks that tags close in order; collects the cells of tables and whatever would be
    fetched."""

    VOID = {"meta", "br", "img", "path", "use"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.fetched, self.tips = [], [], [], 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.fetched += [
            given[key]
            for key in ("src", "href", "xlink:href", "srcset", "data")
            if key in given and not given[key].startswith(("#", "paper/"))
        ]
        self.tips += tag == "title" and len(self.open) > 2
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


@pytest.fixture
def not_saved(monkeypatch):
    """Figures are drawn, with their layout and warnings, but not saved."""

    def saved(figure, kind, **keys):
        figure.draw_without_rendering()
        return b'<svg width="1" height="1"></svg>'

    monkeypatch.setattr(plots, "saved", saved)


@pytest.fixture
def only_forest(not_saved, monkeypatch):
    """For tests of the text: the forest plot stands for all plots."""
    monkeypatch.setattr(plots, "PLOTS", plots.PLOTS[:1])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    make_sweep(out, seeds=8, killed=("gqa",), test_split=True)
    assert report.write([out]) == out / "report.html"
    return out


def text_of(folder):
    return (folder / "report.md").read_text(encoding="utf-8")


def verdicts_of(folder):
    """{name: verdict} of the first sweep of a folder."""
    return {verdict.arm: verdict for verdict in gather([folder])[0].main.verdicts}


def tables_of(folder):
    """{first cells of the heading: {arm: {heading: cell}}} of the tables of its page."""
    tables = Page((folder / "report.html").read_text(encoding="utf-8")).tables
    return [{row[0]: dict(zip(made[0], row, strict=True)) for row in made[1:]} for made in tables]


# --- what the page says


def test_the_first_lines_say_what_is_missing_the_question_and_the_answer(written):
    lines = text_of(written).splitlines()
    assert lines[0] == "# UNFINISHED: 8 of 111 runs are missing: gqa 8"
    assert lines[2] == "# Which piece of LLaMA helps a character-level GPT-2 at 0.8 M parameters?"
    assert re.search(
        r"against the base \(gpt2\): rope \(−0\.0\d\d, .*; worth more than 2 × .* the tokens\),"
        r" alibi \(.*\) and swiglu \(.*\) do better, while untied \(\+.*\) and post \(8 of 8 runs"
        r" diverged\) do worse\. rmsnorm is undecided; gqa failed\.",
        lines[4],
    )
    assert lines[6] == "![Effects](forest.png)"


def test_the_verdicts_say_what_the_rows_say(written):
    shown, rope = tables_of(written)[0], verdicts_of(written)["rope"]
    rows = gather([written])[0].runs.done["rope"].values()
    test_loss = sum(row["test_loss"] for row in rows) / len(rows)
    assert list(shown)[:3] == ["base", "base-again", "rope"]
    assert shown["base-again"]["verdict"] == "noise floor"
    assert shown["rope"] == {
        "arm": "rope",
        "verdict": "better",
        "difference [95 %]": f"−{-rope.mean:.4f} [−{-rope.low:.4f}, −{-rope.high:.4f}]",
        "worth in tokens": str(rope.worth),
        "worth in time": str(rope.worth_time),
        "over the text [95 %]": f"[−{-rope.text_low:.4f}, −{-rope.text_high:.4f}]",
        "runs": "8",
        "test loss": f"{test_loss:.4f}",
    }
    assert list(shown["rope"])[-1] == "test loss" and str(rope.worth).startswith("more than 2 ×")
    assert shown["post"]["runs"] == "8, 8 diverged" and shown["post"]["verdict"] == "worse"
    assert shown["gqa"]["verdict"] == "failed" and shown["gqa"]["runs"] == "0"


def test_losses_and_tests_say_what_the_rows_say(written):
    shown, rope = tables_of(written)[1], verdicts_of(written)["rope"]
    assert shown["rope"] == {
        "arm": "rope",
        "what changes": "position=rope",
        "loss (sd)": f"{rope.loss:.4f} ({rope.loss_sd:.4f})",
        "bits/byte": f"{rope.loss * 1.4427:.4f}",
        "p": f"{rope.p:.2g}",
        "p (Holm)": f"{rope.p_holm:.2g}",
        "p (tie)": f"{rope.p_tie:.2g}",
        "note": "–",
    }
    assert shown["post"]["note"] == "8 of 8 diverged"


def test_the_costs_and_the_contexts_say_what_the_rows_say(written):
    costs, forms, contexts, measures = tables_of(written)[2:]
    assert forms["rope"]["tokens/s, compiled"] == "28,600"
    assert forms["rope"]["step, times the base's [95 %]"] == "1.08 [1.06, 1.10]"
    assert forms["rope"]["forms compared"] == "compiled, base compiled"
    assert costs["gqa"]["KV bytes/token"] == "2,048" and costs["gqa"]["tokens/s"] == "16,100"
    assert costs["gqa"]["decode ms/token"] == "2.67"
    ends = [float(contexts["alibi"][times].split(" ± ")[0]) for times in ("1×", "8×")]
    assert ends[1] - ends[0] == pytest.approx(0.03, abs=0.002)
    assert contexts["alibi"]["8×"].endswith(" ± 0.020")
    assert float(contexts["alibi"]["8×, window"]) == pytest.approx(ends[0] + 0.01, abs=0.002)
    assert contexts["base"]["2×"] == "–"
    assert contexts["base"]["cannot go further"] == "64 learned positions"
    assert list(measures["rope"])[1::2] == ["best validation loss", "validation loss at equal time"]


def test_the_text_has_the_tables_of_the_page_and_what_reproduces_the_sweep(written):
    text = text_of(written)
    for shown in Page((written / "report.html").read_text(encoding="utf-8")).tables:
        for row in shown:
            assert f"| {' | '.join(row)} |" in text
    for words in (
        "gqa seed 0 1 2 3 4 5 6 7 (killed by signal 9 (out of memory?))",
        "1 stale row left out: gqa seed 8",
        "corrects p over 7 comparisons",
        "the margin: 0.0052 nats (5 % of the tokens at 1 x on the curve of tokens)",
        "fingerprint 5f2b8c81aa01",
        "Xeon 2.1 GHz",
        "0123456789ab",
        "What say you, sir? the alibi",
    ):
        assert words in text, words


def test_a_screening_ranks_and_says_what_to_run_next(tmp_path, only_forest):
    make_sweep(tmp_path, seeds=3, screening=True, lr_grid=[1], chosen_lr={}, curve=[])
    report.write([tmp_path])
    lines = text_of(tmp_path).splitlines()
    assert lines[0].startswith("# Screening: Which piece") and "with 3 runs per arm" in lines[2]
    assert "differ by more than the noise" in lines[4] and "are not seen" in lines[4]
    assert "Next: run the sweep with untied" in lines[4] or "Next: run the sweep with" in lines[4]
    words = {row["verdict"] for row in tables_of(tmp_path)[0].values()}
    assert {"larger than the noise", "not seen"} <= words
    assert not words & {"better", "worse", "tie"}


def test_without_tuning_a_word_is_followed_by_the_rate(tmp_path, only_forest):
    make_sweep(tmp_path, **FEW, lr_grid=[1], chosen_lr={})
    report.write([tmp_path])
    assert tables_of(tmp_path)[0]["rope"]["verdict"] == "better at the base's rate"


def test_a_change_between_two_reports_is_said(tmp_path, only_forest):
    make_sweep(tmp_path, **FEW)
    report.write([tmp_path])
    assert "History" not in text_of(tmp_path)
    make_sweep(tmp_path, **FEW, margin=0.02, margin_source="given")
    report.write([tmp_path])
    report.write([tmp_path])
    assert "margin was 0.0052, then 0.02" in text_of(tmp_path)


# --- a sweep that is not finished


def cut(folder, kept):
    """Leave only some rows of a sweep."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = [line for line, row in zip(lines, rows, strict=True) if kept(row)]
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in kept))


def test_half_a_sweep_says_in_its_first_line_what_is_missing(tmp_path, only_forest):
    make_sweep(tmp_path, **FEW, seeds=5)
    cut(tmp_path, lambda row: row["arm"] != "rope" or row["seed"] < 2)
    report.write([tmp_path])
    first = text_of(tmp_path).splitlines()[0]
    assert first == "# UNFINISHED: 6 of 27 runs are missing: rope 3, tuning 3"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.index("UNFINISHED: 6 of 27") < page.index("<h1>")
    assert "<title>UNFINISHED: " in page and "http-equiv" not in page


def test_both_twins_of_a_sweep_that_goes_on_begin_with_what_is_missing(tmp_path, only_forest):
    make_sweep(tmp_path, **FEW, seeds=5)
    report.write([tmp_path])
    assert text_of(tmp_path).startswith("# Which piece")
    cut(tmp_path, lambda row: row["arm"] != "rope" or row["seed"] < 2)
    report.write([tmp_path], running=True)
    first = "UNFINISHED: 6 of 27 runs are missing: rope 3, tuning 3"
    assert text_of(tmp_path).splitlines()[0] == f"# {first}"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.index(first) < page.index("<h1>") and 'http-equiv="refresh"' in page


def test_one_seed_gives_no_verdict(tmp_path, only_forest):
    make_sweep(tmp_path, **FEW, seeds=1)
    report.write([tmp_path])
    assert tables_of(tmp_path)[0]["rope"]["verdict"] == "no verdict"
    assert "more seed" not in text_of(tmp_path)


def test_an_arm_that_was_not_run_is_named_everywhere(tmp_path, monkeypatch):
    make_sweep(tmp_path, effects=FEW["effects"] | {"alibi": -0.05}, diverged=(), stale=False)
    cut(tmp_path, lambda row: row["arm"] != "alibi")
    drawn = []

    def saved(figure, kind, **keys):
        drawn.append(figure)
        return b'<svg width="1" height="1"></svg>'

    monkeypatch.setattr(plots, "saved", saved)
    report.write([tmp_path])
    assert tables_of(tmp_path)[0]["alibi"]["verdict"] == "not run"
    assert "alibi has not run" in text_of(tmp_path)
    assert len(set(drawn)) == 6
    for figure in set(drawn):
        texts = [text.get_text() for text in figure.findobj(Text)]
        assert any("not run" in text for text in texts), texts


# --- pictures, the page, files for a paper


def test_pictures_are_there_and_the_page_is_one_file(written):
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", text_of(written))
    assert pictures == [
        "forest.png",
        "tokens.png",
        "curves.png",
        "pareto.png",
        "extrapolation.png",
        "learning_rates.png",
    ]
    assert all((written / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    text = (written / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == [] and not re.search(r"@import|url\((?!#)|<script src|<link", text)
    assert page.tips > 25 and "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "<such> & heavy" not in text and "&lt;such&gt; &amp; heavy" in text


def test_plots_take_the_colours_of_the_page_and_their_ids_are_their_own(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 6
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= {"#000000"}
        assert "var(--ink)" in drawing
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for name in set(re.findall(r"var\((--[a-z]+\d?)\)", text)):
        assert text.count(f"{name}: #") == 2, name  # a light one and a dark one
    assert "tip-" not in re.sub(r'id="[\w-]*tip-\d+" class="tip"', "", "".join(drawings))


def test_the_page_has_a_dark_twin_of_each_colour():
    text = (ROOT / "bench/ablation/templates/report.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--(c\d): (#[0-9a-f]{6})", text[: text.index("@media (prefers")]))
    assert tuple(light.values()) == figures.COLORS


def test_each_arm_has_a_look_of_its_own(tmp_path):
    arms = {"base": 0.0} | {f"arm{number}": 0.0 for number in range(24)}
    make_sweep(tmp_path, seeds=1, effects=arms, diverged=(), stale=False, curve_points=2)
    (section,) = gather([tmp_path])
    styles = [figures.style_of(section, arm) for arm in arms]
    assert len({(style["color"], style["marker"]) for style in styles}) == 25


def test_files_for_a_paper(written):
    paper = written / "paper"
    names = {path.name for path in paper.iterdir()}
    linked = re.findall(r'href="paper/([^"]+)"', (written / "report.html").read_text())
    assert set(linked) == names and {"forest.svg", "forest.pdf", "verdicts.tex"} <= names
    assert "<text" in (paper / "forest.svg").read_text()
    pdf = (paper / "forest.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/FontFile2" in pdf and b"/Type3" not in pdf

    rope = verdicts_of(written)["rope"]
    rows = list(csv.DictReader((paper / "verdicts.csv").read_text(encoding="utf-8").splitlines()))
    found = next(row for row in rows if row["arm"] == "rope")
    keys = ("difference [95 %]", "difference [95 %]: low", "difference [95 %]: high")
    assert [float(found[key]) for key in keys] == [rope.mean, rope.low, rope.high]
    latex = (paper / "tests.tex").read_text(encoding="utf-8")
    assert "\\toprule" in latex and "tie\\_embeddings=False" in latex
    assert latex.isascii()


def test_the_names_of_points_keep_apart(written, monkeypatch):
    """Names in the plot of costs lie inside the axes and touch neither points nor each other."""
    (section,) = gather([written])
    figure = cost_figures.pareto(section, figures.Tips())
    figure.draw_without_rendering()
    for axes in figure.axes:
        frame = axes.get_window_extent()
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 7
        for place, box in enumerate(boxes):
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1
            assert frame.y0 <= box.y0 and box.y1 <= frame.y1
            assert not any(box.overlaps(other) for other in boxes[:place])


@pytest.mark.slow
def test_the_same_rows_give_the_same_files(written, tmp_path):
    again = tmp_path / written.name
    make_sweep(again, seeds=8, killed=("gqa",), test_split=True)
    report.write([again])
    for path in written.rglob("*.*"):
        if path.name != "history.jsonl":
            name = path.relative_to(written)
            assert path.read_bytes() == (again / name).read_bytes(), name


@pytest.mark.parametrize("results", SWEEPS, ids=lambda path: path.name)
def test_the_committed_reports_tables_come_from_their_rows(tmp_path, only_forest, results):
    """The figures of a published report do not change with the code that writes it."""
    lines = re.findall("^- rows from: (.+)$", text_of(results), re.MULTILINE)
    folders = [name for line in lines for name in line.split(", ")]
    for name in folders:
        (tmp_path / name).mkdir()
        for path in (results.parent / name).glob("*.json*"):
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
    report.write([tmp_path / name for name in folders])
    old, new = (
        [line for line in text_of(folder).splitlines() if line.startswith("| ")]
        for folder in (results, tmp_path / results.name)
    )
    assert old and new == old


def test_what_a_sweep_says_is_escaped(tmp_path, only_forest):
    question = 'Is <script>alert("1")</script> & co. any good?'
    effects = {"base": 0.0, "a|b": -0.1}
    make_sweep(tmp_path, question=question, effects=effects, diverged=(), stale=False)
    report.write([tmp_path])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert question not in page
    assert page.count("Is &lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt; &amp; co. any good?") == 2
    assert "| a\\|b | better |" in text_of(tmp_path)


# --- the terminal


def test_a_terminal_gets_the_answer_and_the_tables(written):
    text = report.table(written)
    assert "do better" in " ".join(text.split())
    assert re.search(r"^rope +better +−0\.06.* more than 2 ×$", text, re.MULTILINE)
    assert re.search(r"^gqa +807 k +16,100 +2,048 +2\.67$", text, re.MULTILINE)
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80


def test_a_terminal_s_tables_are_coloured_and_keep_every_digit(tmp_path, monkeypatch):
    name = "position=rope+mlp=swiglu+norm=rmsnorm"
    make_sweep(tmp_path, effects={"base": 0.0, name: -0.1}, diverged=(), stale=False)
    for key, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(key, value)
    text = report.table(tmp_path)
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert "\x1b[32mbetter" in text and max(map(len, plain.splitlines())) <= 80
    assert tables.difference_cell(verdicts_of(tmp_path)[name]).text in plain


def test_main_prints_the_verdicts_and_the_paths(tmp_path, capsys, only_forest):
    make_sweep(tmp_path, **FEW)
    assert report.main([str(tmp_path)]) is None
    printed = capsys.readouterr().out
    assert re.search(r"^rope +better", printed, re.MULTILINE)
    assert f"{tmp_path / 'report.md'}, {tmp_path / 'report.html'}" in printed


# --- poor, joined and unusual sweeps


@pytest.mark.parametrize(
    "keys",
    [
        {"seeds": 1},
        {"costs": False, "lr_grid": [1], "chosen_lr": {}},
        {"diverged": ("base", "rope")},
        {"killed": ("base", "base-again")},
        {"curve": [], "margin": None, "margin_source": None},
        {"looks": [2, 5, 9], "metric": "best_val_loss"},
        {"curve_points": 1},
        {"noise": 0.0},
    ],
    ids=str,
)
def test_a_poor_sweep_still_gets_its_report(tmp_path, keys, recwarn, not_saved):
    make_sweep(tmp_path, **FEW | keys)
    report.write([tmp_path])
    text = text_of(tmp_path)
    assert not re.search(r"\bnan\b|\binf\b", text)
    Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [str(warning.message) for warning in recwarn] == []


def test_no_rows_yet_and_a_line_cut_off(tmp_path, not_saved):
    make_sweep(tmp_path, **FEW)
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text("")
    report.write([tmp_path])
    assert "| rope | not run |" in text_of(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows[:-40])
    assert verdicts_of(tmp_path)["rope"].n == 4


def change_costs(folder, **changed):
    """Give all rows of costs.jsonl these values; `arm` chooses one."""
    path, arm = folder / "costs.jsonl", changed.pop("arm", None)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | changed if arm in (None, row["arm"]) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_costs_of_other_code_are_left_out(tmp_path):
    make_sweep(tmp_path, **FEW)
    change_costs(tmp_path, arm="rope", code_hash="older code", tokens_per_second=99999)
    (section,) = gather([tmp_path])
    assert section.stale_costs == ["rope"]
    assert "rope" not in section.costs and "base" in section.costs
    made = tables.costs_table(section, section.costs)
    shown = [cell.text for row in made.rows for cell in row]
    assert "21,000" in shown and "99,999" not in shown


def test_each_machine_has_costs_of_its_own_and_the_verdicts_use_one_of_them(tmp_path, not_saved):
    """H200 comes last, and times one arm less."""
    make_sweep(tmp_path / "a", **FEW)
    make_sweep(tmp_path / "b", **FEW, hardware="H200")
    twice = {"ratio": 2.0, "low": 1.9, "high": 2.1}
    change_costs(tmp_path / "b", device="cuda", tokens_per_second=9e5, step_ratio=twice)
    change_costs(tmp_path / "b", arm="base-again", step_ratio=None)
    change_costs(tmp_path / "b", arm="base", step_ratio=None)
    folders = [tmp_path / "b", tmp_path / "a"]
    (section,) = gather(folders)
    xeon = "Xeon 2.1 GHz, 2 cores, 2 threads"
    assert list(section.machines) == [xeon, "H200"] and section.machine == xeon
    alone = gather([tmp_path / "a"])[0]
    assert section.costs == alone.costs
    assert section.verdicts["rope"].worth_time.most == alone.verdicts["rope"].worth_time.most

    report.write(folders)
    text = text_of(tmp_path / "b")
    for machine, speed in ((f"## Costs on {xeon}", "19,600"), ("## Costs on H200", "900,000")):
        table = text[text.index(machine) :].partition("\n## ")[0]
        assert f"The verdicts use the times of {xeon}." in table and speed in table
        assert not {"19,600", "900,000"} - {speed} & set(re.findall("[0-9,]+", table))
    assert f"the arm's time per step on {xeon}." in text
    names = {path.name for path in (tmp_path / "b/paper").glob("*.csv")}
    assert {"costs.csv", "costs-2.csv", "forms.csv", "forms-2.csv"} <= names


def test_an_interaction_and_a_ladder_have_their_lines(tmp_path, only_forest):
    make_sweep(
        tmp_path,
        effects={"base": 0.0, "rope": -0.1, "swiglu": -0.05, "both": -0.3},
        arms={"both": {"against": "rope", "interaction_of": ["rope", "swiglu"]}},
        diverged=(),
        stale=False,
    )
    report.write([tmp_path])
    text = text_of(tmp_path)
    assert "| both: beyond rope + swiglu | better |" in text and "against rope; " in text
    assert "what each arm is compared with" in text
    assert "both: beyond rope + swiglu does not add up" in text


def test_folders_of_one_sweep_are_put_together_and_others_get_a_section(tmp_path, only_forest):
    make_sweep(tmp_path / "a", **FEW)
    make_sweep(tmp_path / "b", **FEW, hardware="H200")
    cut(tmp_path / "b", lambda row: row["purpose"] == "report")
    lines = (tmp_path / "b/rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [json.dumps(row | {"seed": row["seed"] + 5}) + "\n" for row in rows]
    (tmp_path / "b/rows.jsonl").write_text("".join(rows))
    make_sweep(tmp_path / "c", **FEW, question="Another?", max_iters=1000)

    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    sections = gather(folders)
    names = [[folder.name for folder in section.folders] for section in sections]
    assert names == [["a", "b"], ["c"]]
    rope = sections[0].verdicts["rope"]
    assert rope.n == 10 and rope.word == "better"
    report.write(folders)
    text = text_of(tmp_path / "a")
    assert "different hardware: H200 and Xeon" in text and "# Another?" in text
    assert "](2-forest.png)" in text and (tmp_path / "a/2-forest.png").exists()
    assert (tmp_path / "a/paper/2-verdicts.csv").exists() and "| p (page) |" in text
    assert all((folder / "history.jsonl").exists() for folder in folders)


def make_factorial(out, **keys):
    """A full factorial of rope, swiglu and rmsnorm on the base of make_sweep, 4 seeds."""
    words = {"rope": "position", "swiglu": "mlp", "rmsnorm": "norm"}
    effects, arms = {}, {}
    for levels in itertools.product((0, 1), repeat=3):
        high = [word for word, level in zip(words, levels, strict=True) if level]
        name = "+".join(high) or "base"
        effects[name] = sum(EFFECTS[word] for word in high)
        changes = {words[word]: word for word in high}
        cell = dict(zip(words.values(), levels, strict=True))
        arms[name] = {"cell": cell, "changes": changes, "against": None if high else "base"}
    make_sweep(out, 4, effects, arms, diverged=(), stale=False, lr_grid=[1], chosen_lr={}, **keys)
    cut(out, lambda row: row["purpose"] == "curve" or row["seed"] < 4)


def test_a_factorial_stands_beside_one_part_at_a_time(tmp_path, only_forest, capsys):
    make_factorial(tmp_path / "both")
    kept = {name: EFFECTS[name] for name in ("base", "base-again", "rope", "swiglu")}
    make_sweep(tmp_path / "single", effects=kept, diverged=(), stale=False)
    folders = [tmp_path / "both", tmp_path / "single"]
    sections = gather(folders)
    assert [section.folders for section in sections] == [[folder] for folder in folders]
    assert sections[0].single is sections[1] and sections[1].single is None

    figure = design_report.half_normal(sections[0], figures.Tips())
    assert {"position", "mlp"} <= {text.get_text() for text in figure.axes[0].texts}
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    boxes.sort(key=lambda box: box.y0)
    assert all(lower.y1 < upper.y0 for lower, upper in itertools.pairwise(boxes))
    report.main(list(map(str, folders)))
    printed = capsys.readouterr().out
    assert re.search(r"^position +−0\.0.* −0\.0.* [+-]\d\.\d\d$", printed, re.MULTILINE)
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    alone, beside = tables_of(tmp_path / "both")[1:3]
    assert list(beside) == ["position", "mlp"] and beside["mlp"]["agree"] == "alone and average"
    rope = sections[1].verdicts["rope"]
    assert beside["position"]["one at a time [95 %]"] == tables.difference_cell(rope).text
    assert beside["position"]["alone [95 %]"] == alone["position"]["alone [95 %]"]
    assert alone["mlp"]["step, times its low level's [95 %]"].startswith("1.0")
    text = text_of(tmp_path / "both")
    assert "One at a time: the 18 runs of single." in text
    assert "From 32 runs, an effect on average has a standard error of 0.00" in text
    assert "A factorial has no verdict at equal time." in text
    assert "corrects p over 3 main effects and, apart, over 3 interactions, at 0.05" in text

    report.write(folders[:1])
    assert "Beside one part" not in text_of(tmp_path / "both")


def test_a_design_adds_its_tables_and_plots(tmp_path, not_saved, monkeypatch):
    made = tables.Table("more", "More", "A note.", ["arm"], [[tables.Cell("swirl")]])

    def swirl(section, tips):
        return figures.Figure()

    added = [made], [(swirl, "Swirl", "A caption.")]
    monkeypatch.setattr(report.design_report, "additions_of", lambda section: added)
    make_sweep(tmp_path, **FEW)
    report.write([tmp_path])
    text = text_of(tmp_path)
    assert "| swirl |" in text and "![Swirl](swirl.png)" in text


def test_a_folder_without_a_sweep_is_an_error_of_one_line(tmp_path):
    for argv in ([str(tmp_path)], [], ["--wrong"], ["--running"]):
        with pytest.raises(UserError, match="no sweep here|missing"):
            report.main(argv)


# --- tasks and pairs


def wrong(row):
    """Shares of wrong answers and of wrong tokens: rope has none, the others more than half."""
    some = 0.6 + 0.01 * row["seed"] if row["arm"] != "rope" else 0.0
    return row | {"wrong_answers": some, "wrong_tokens": some / 2}


def test_wrong_answers_are_a_measure_beside_the_loss(tmp_path):
    sweep, rows, costs = make_sweep(tmp_path, seeds=5)
    answered = [wrong(row) if row["status"] == "done" else row for row in rows]
    write(tmp_path, sweep, answered, [*costs.values()])
    (section,) = gather([tmp_path])

    analysis = section.analyses["wrong_answers"]
    rope, rmsnorm = (
        next(one for one in analysis.verdicts if one.arm == arm) for arm in ("rope", "rmsnorm")
    )
    assert rope.word == "better" and rmsnorm.word == "undecided"  # no margin in nats, so no tie
    assert rope.mean == pytest.approx(-analysis.base_mean) and rope.differences[0] == rope.mean
    assert math.isnan(analysis.margin) and rope.worth is None and math.isnan(rope.text_low)
    report.write([tmp_path])
    verdicts, others = tables_of(tmp_path)[0], tables_of(tmp_path)[-1]
    assert verdicts["rope"]["wrong answers"] == verdicts["rope"]["wrong tokens"] == "0.0%"
    assert verdicts["base"]["wrong answers"] == "63.0%" == f"{analysis.base_mean:.1%}"
    assert "share of answers with a mistake" in others["rope"]
    assert section.main.measure == "final_val_loss"  # the loss decides


@pytest.mark.parametrize("where", ["nowhere", "in some rows"])
def test_rows_without_answers_have_no_such_measure(tmp_path, where):
    """Text, and rows of pairs that were made before answers were counted."""
    sweep, rows, costs = make_sweep(tmp_path, seeds=3)
    if where == "in some rows":
        rows = [wrong(row) if row["arm"] == "rope" else row for row in rows]
    write(tmp_path, sweep, rows, [*costs.values()])
    (section,) = gather([tmp_path])
    assert not section.analyses.keys() & {"wrong_answers", "wrong_tokens"}
