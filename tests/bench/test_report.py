"""bench/report.py on synthetic sweeps: it says what the rows say, its page needs nothing but
itself, and nothing breaks where rows are few."""

import html.parser
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.ablation import plots, report, tables
from bench.ablation.sweeps import gather
from common.errors import UserError
from helpers.sweeps import make_sweep

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench/results/ablate_shakespeare"
FEW = {"effects": {"base": 0.0, "base-again": 0.0, "rope": -0.1}, "failed": (), "stale": False}


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
            if key in given and not given[key].startswith("#")
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


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """multipletests collects garbage at each call: a tenth of a second."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.fixture
def not_saved(monkeypatch):
    """Figures are drawn, with their layout and warnings, but not saved as PNG and SVG."""

    def as_svg(figure):
        figure.draw_without_rendering()
        return '<svg width="1" height="1"></svg>'

    monkeypatch.setattr(plots, "as_svg", as_svg)
    monkeypatch.setattr(plots, "as_png", lambda figure: b"\x89PNG")


@pytest.fixture
def only_forest(not_saved, monkeypatch):
    """For tests of the text: the forest plot stands for all plots."""
    monkeypatch.setattr(plots, "PLOTS", plots.PLOTS[:1])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    make_sweep(out, screening=True)
    assert report.write([out]) == out / "report.html"
    return out


def test_the_first_lines_say_that_it_is_a_screening_and_what_came_out(written):
    lines = (written / "report.md").read_text(encoding="utf-8").splitlines()
    assert (
        lines[0]
        == "# Screening: Which piece of LLaMA helps a character-level GPT-2 at 0.8 M parameters?"
    )
    assert "5 seeds per arm: it can only detect large effects (here about 0.0" in lines[2]
    assert re.search(
        r"against the base \(gpt2\): rope \(−0\.0\d\d, .*\) and alibi \(.*\) do better,"
        r" while untied \(\+.*\) does worse\. rmsnorm ties .*; gqa and swiglu are undecided;"
        r" post failed\.",
        lines[4],
    )
    assert lines[6] == "![Effects](forest.png)"


def test_pictures_are_there_and_the_page_is_one_file(written):
    pictures = re.findall(r"\]\((.+?)\)", (written / "report.md").read_text(encoding="utf-8"))
    assert pictures == [
        "forest.png",
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
    assert len(drawings) == 5
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert (
            set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= {"#ffffff", "#000000"}
            and "var(--ink)" in drawing
        )
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for name in set(re.findall(r"var\((--[a-z]+\d?)\)", text)):
        assert text.count(f"{name}: #") == 2, name  # a light one and a dark one
    assert "tip-" not in re.sub(r'id="[\w-]*tip-\d+" class="tip"', "", "".join(drawings))


def tables_of(folder):
    """The tables of its page, as lists of rows of texts: verdicts, costs, other measures."""
    return Page((folder / "report.html").read_text(encoding="utf-8")).tables


def test_the_verdicts_say_what_the_rows_say(written):
    (section,) = gather([written])
    effects = tables_of(written)[0]
    rope = next(verdict for verdict in section.main.verdicts if verdict.arm == "rope")
    found = {row[0]: row for row in effects[1:]}
    assert list(found) == [
        "base",
        "base-again",
        "rope",
        "alibi",
        "rmsnorm",
        "swiglu",
        "untied",
        "gqa",
        "post",
    ]
    assert found["rope"] == [
        "rope",
        "better",
        f"−{-rope.mean:.4f} [−{-rope.low:.4f}, −{-rope.high:.4f}]",
        f"{rope.p_holm:.3g}",
        f"{rope.loss:.4f} ({rope.loss_sd:.4f})",
        f"{rope.loss * 1.4427:.4f}",
        "5",
        "position=rope",
    ]
    assert found["post"][1:4] == ["failed", "–", "–"] and found["swiglu"][1].startswith(
        "undecided (about"
    )
    text = (written / "report.md").read_text(encoding="utf-8")
    for row in effects[1:]:
        assert "| " + " | ".join(row) + " |" in text
    for words in (
        "post seed 1 2 3 4 5 (the loss is not finite at step 412)",
        "gqa seed 6",
        "over 7 comparisons",
        "fingerprint 5f2b8c81aa01",
        "Xeon 2.1 GHz",
        "0123456789ab",
        "What say you, sir? the alibi",
    ):
        assert words in text, words


def test_the_costs_and_other_measures_say_what_the_rows_say(written):
    _, costs, measures = tables_of(written)
    priced = {row[0]: dict(zip(costs[0], row, strict=True)) for row in costs[1:]}
    assert (
        priced["gqa"]["KV bytes/token"] == "2,048"
        and priced["gqa"]["tokens/s"] == "16,100"
        and priced["gqa"]["decode ms/token"] == "2.67"
        and priced["gqa"]["2×"] == "–"
    )
    assert float(priced["alibi"]["8×"]) == pytest.approx(
        float(priced["alibi"]["1×"]) + 0.03, abs=0.002
    )
    assert measures[0][:8] == [
        "arm",
        "final loss",
        "verdict",
        "best loss",
        "verdict",
        "at equal time",
        "verdict",
        "sign-flip p",
    ]
    assert {row[0]: row for row in measures[1:]}["rope"][7] == "0.062 (floor 0.062)"


def test_the_same_rows_give_the_same_files(written, tmp_path):
    make_sweep(tmp_path / written.name, screening=True)
    report.write([tmp_path / written.name])
    for path in written.iterdir():
        assert path.read_bytes() == (tmp_path / written.name / path.name).read_bytes(), path.name


def test_the_committed_report_s_tables_come_from_its_rows(tmp_path, only_forest):
    """The figures of a published report do not change with the code that writes it."""
    for name in ("sweep.json", "rows.jsonl", "costs.jsonl"):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    report.write([tmp_path])
    old, new = (
        [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
        for path in (RESULTS / "report.md", tmp_path / "report.md")
    )
    assert len(old) == 23 and new == old


def test_what_a_sweep_says_is_escaped(tmp_path, only_forest):
    question = 'Is <script>alert("1")</script> & co. any good?'
    effects = {"base": 0.0, "a|b": -0.1}
    make_sweep(tmp_path, question=question, effects=effects, failed=(), stale=False)
    report.write([tmp_path])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert question not in page
    assert page.count("Is &lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt; &amp; co. any good?") == 2
    assert "| a\\|b | better |" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_terminal_gets_the_answer_and_the_tables(written):
    text = report.table(written)
    assert text.startswith("This is a screening") and "do better" in " ".join(text.split())
    assert re.search(r"^rope +better +−0\.05", text, re.MULTILINE)
    assert re.search(r"^gqa +807 k +16,100 +2,048 +2\.67$", text, re.MULTILINE)
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80


def test_a_terminal_s_tables_are_coloured_and_keep_every_digit(tmp_path, monkeypatch):
    name = "position=rope+mlp=swiglu+norm=rmsnorm"
    make_sweep(tmp_path, effects={"base": 0.0, name: -0.1}, failed=(), stale=False)
    for key, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(key, value)
    text = report.table(tmp_path)
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert "\x1b[32mbetter" in text and max(map(len, plain.splitlines())) <= 80
    (verdict,) = gather([tmp_path])[0].main.verdicts
    assert tables.difference_cell(verdict).text in plain
    assert f"{verdict.loss:.4f} ({verdict.loss_sd:.4f})" in plain


def test_main_prints_the_verdicts_and_the_paths(tmp_path, capsys, only_forest):
    make_sweep(tmp_path, **FEW)
    assert report.main([str(tmp_path)]) is None
    printed = capsys.readouterr().out
    assert re.search(r"^rope +better", printed, re.MULTILINE)
    assert f"{tmp_path / 'report.md'}, {tmp_path / 'report.html'}" in printed


@pytest.mark.parametrize(
    "keys",
    [
        {"seeds": 1},
        {"costs": False, "lr_grid": [1], "chosen_lr": {}},
        {"failed": ("base", "rope")},
        {"looks": [2, 5, 9], "metric": "best_val_loss"},
        {"curve_points": 1},
        {"noise": 0.0},
    ],
)
def test_a_poor_sweep_still_gets_its_report(tmp_path, keys, recwarn, not_saved):
    make_sweep(tmp_path, **FEW | keys)
    report.write([tmp_path])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "nan" not in text and "inf " not in text
    Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [str(warning.message) for warning in recwarn] == []
    if keys == {"seeds": 1}:
        assert (
            "no arm is shown to differ" in text
            and "| rope | undecided (about 1 more seed) |" in text
        )


def test_no_rows_yet_and_a_line_cut_off(tmp_path, not_saved):
    make_sweep(tmp_path, **FEW)
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text("")
    report.write([tmp_path])
    assert "| rope | not run |" in (tmp_path / "report.md").read_text()
    (tmp_path / "rows.jsonl").write_text(rows[:-40])
    assert next(v for v in gather([tmp_path])[0].main.verdicts if v.arm == "rope").seeds == [
        1,
        2,
        3,
        4,
    ]


def test_costs_of_other_code_are_left_out(tmp_path):
    make_sweep(tmp_path, **FEW)
    other = {"arm": "rope", "code_hash": "older code", "hardware": "?", "tokens_per_second": 99999}
    with open(tmp_path / "costs.jsonl", "a") as file:  # the last line of an arm counts
        file.write(json.dumps(other) + "\n")
    (section,) = gather([tmp_path])
    assert "rope" not in section.costs and "base" in section.costs
    shown = [cell.text for row in tables.costs_table(section).rows for cell in row]
    assert "21,000" in shown and "99,999" not in shown


def test_an_interaction_and_a_ladder_have_their_lines(tmp_path, only_forest):
    make_sweep(
        tmp_path,
        effects={"base": 0.0, "rope": -0.1, "swiglu": -0.05, "both": -0.3},
        arms={"both": {"against": "rope", "interaction_of": ["rope", "swiglu"]}},
        failed=(),
        stale=False,
    )
    report.write([tmp_path])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (
        "| both: beyond rope + swiglu | better |" in text
        and "against rope; " in text
        and "what each arm is compared with" in text
        and "both: beyond rope + swiglu does not add up" in text
    )


def test_folders_of_one_sweep_are_put_together_and_others_get_a_section(tmp_path, only_forest):
    make_sweep(tmp_path / "a", **FEW)
    make_sweep(tmp_path / "b", **FEW, hardware="H200")
    rows = [
        json.loads(line) | {"code_hash": "code1"}
        for line in (tmp_path / "b/rows.jsonl").read_text().splitlines()
    ]
    (tmp_path / "b/rows.jsonl").write_text(
        "".join(
            json.dumps(row | {"seed": row["seed"] + 5}) + "\n"
            for row in rows
            if row["purpose"] == "report"
        )
    )
    make_sweep(tmp_path / "c", **FEW, question="Another?", max_iters=1000)
    sections = gather([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert [[folder.name for folder in section.folders] for section in sections] == [
        ["a", "b"],
        ["c"],
    ]
    rope = next(verdict for verdict in sections[0].main.verdicts if verdict.arm == "rope")
    assert (
        len(rope.seeds) == 10
        and rope.bootstrap
        and rope.word == "better"
        and sections[0].sweep["looks"] == [10]
    )
    report.write([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    text = (tmp_path / "a/report.md").read_text(encoding="utf-8")
    assert (
        "different hardware: H200 and Xeon" in text
        and "# Another?" in text
        and "](2-forest.png)" in text
        and (tmp_path / "a/2-forest.png").exists()
    )


def test_a_folder_without_a_sweep_is_an_error_of_one_line(tmp_path):
    for argv in ([str(tmp_path)], [], ["--wrong"]):
        with pytest.raises(UserError, match="no sweep here|missing"):
            report.main(argv)


def test_the_page_has_a_dark_twin_of_each_colour():
    text = (ROOT / "bench/ablation/templates/report.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--(c\d): (#[0-9a-f]{6})", text[: text.index("@media (prefers")]))
    assert tuple(light.values()) == plots.COLORS
