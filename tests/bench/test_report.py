"""The reports of simulated sweeps: they say what the rows say and what is missing, nothing breaks
where rows are few, and a clean sweep has no caveat."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from bench.ablation import figures, report, tables
from bench.ablation.caveats import CAVEATS, caveats
from helpers.sweeps import DIVERGED, EFFECTS, make_sweep, with_runs, write_lines

FEW = {"effects": {"base": 0.0, "base-again": 0.0, "rope": -0.1}, "diverged": (), "stale": False}


@pytest.fixture
def tables_alone(monkeypatch):
    """Reports without figures."""
    items = [item for item in report.ITEMS if item[2] != "figures"]
    monkeypatch.setattr(report, "ITEMS", items)


@pytest.fixture
def not_saved(monkeypatch):
    """Figures are drawn, with their layout and warnings, but not saved."""

    def saved(figure, kind, **keys):
        figure.draw_without_rendering()
        return b"a picture"

    monkeypatch.setattr(figures, "saved", saved)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report for a paper. Of the pictures for print, which take long, the first is real."""
    out = tmp_path_factory.mktemp("sweep")
    make_sweep(out, seeds=8, killed=("gqa",), test_split=True)
    real = figures.saved
    made = []

    def saved(figure, kind, **keys):
        made.append(kind)
        return real(figure, kind, **keys) if kind == "png" or made.count(kind) == 1 else b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "saved", saved)
        assert report.write(report.judge([out]), paper=True) == out / "report.md"
    return out


def text_of(folder, name="report.md"):
    return (folder / name).read_text(encoding="utf-8")


def section_of(folder):
    (section,) = report.judge([folder])
    return section


def titles_of(folder):
    return re.findall(r"^#+ (.+)", text_of(folder), re.MULTILINE)


def tables_of(folder):
    """[{first cell: {heading: cell}}] of the tables of a report."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text_of(folder), re.MULTILINE):
        cells = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in block.splitlines()]
        heading, _, *body = cells
        tables.append({row[0]: dict(zip(heading, row, strict=True)) for row in body})
    return tables


def table_of(folder, *headings):
    """The first table of a report that has these headings."""
    return next(
        made for made in tables_of(folder) if set(headings) <= next(iter(made.values())).keys()
    )


def test_the_report_says_first_what_is_missing_and_what_was_found(written):
    assert titles_of(written)[:3] == [
        "UNFINISHED: Which piece of LLaMA helps a character-level GPT-2 at 0.8 M parameters?",
        "UNFINISHED: planned runs are missing",
        "What was found",
    ]
    assert tables_of(written)[0] == {"gqa": {"arm": "gqa", "planned": "8", "ended": "0"}}


def test_the_table_of_verdicts_says_what_the_frame_of_verdicts_says(written):
    shown, section = table_of(written, "change", "verdict"), section_of(written)
    rope = section.verdicts.set_index("arm").loc["rope"]
    assert list(shown)[0] == "base" and shown["base"]["test loss"] != "–"
    assert rope.test == pytest.approx(rope.difference)  # whose text is harder by the same
    assert shown["rope"] == {
        "change": "rope",
        "verdict": "better",
        "difference [95 %]": tables.difference(rope),
        "worth × tokens": tables.multiple(rope, ends=section.curve_ends),
        "step time": "1.08 [1.06, 1.10]",
        "parameters": "802 k",
        "runs": "8",
        "test loss": f"{section.reported('rope')['test_loss'].mean():.4f}",
    } | {key: shown["rope"][key] for key in shown["rope"] if key == "seeds to decide"}
    assert shown["rope"]["difference [95 %]"].startswith("−0.0")
    assert shown["post"]["runs"] == "8, 8 diverged" and shown["gqa"]["verdict"] == "failed"


def test_the_details_say_what_the_rows_say(written):
    tests = table_of(written, "p (Holm)")["rope"]
    assert tests["what changes"] == "position=rope" and "(0.0" in tests["loss (sd)"]
    section = section_of(written)
    rope = section.verdicts.set_index("arm").loc["rope"]
    assert tests["bits/byte"] == f"{1.4427 * rope.val_loss_report:.4f}"
    assert (tests["p (Holm)"], tests["p (tie)"]) == (f"{rope.p_holm:.2g}", f"{rope.p_tie:.2g}")
    assert section.time_ends("rope") == pytest.approx(np.array([0.25, 2]) / (1 + 2 / 24))
    untied = table_of(written, "p (Holm)")["untied"]
    assert untied["what changes"] == "tie_embeddings=False, mlp_width=512, learning rate 2 ×"
    noise = table_of(written, "noise", "")
    visible = noise["difference that 80 of 100 such sweeps find"][""]
    assert visible == f"{section.facts.smallest_visible:.4f}"
    assert "loss of the base, on the reported half" in noise
    costs = table_of(written, "KV bytes/token")
    assert costs["gqa"]["KV bytes/token"] == "2,048"
    contexts = tables.contexts(section, "alibi")
    assert contexts["8"][2] - contexts["8"][1] == pytest.approx(0.04)
    assert list(tables.contexts(section, "base")) == ["1"]  # learned positions end there
    two = SimpleNamespace(arms=["base", "alibi"], reported=section.reported)
    assert figures.extrapolation(two) is None


def test_a_report_holds_what_reproduces_the_sweep(written):
    text = text_of(written)
    assert "- matched: `params`" in text and "match=" not in text  # the base's is not the sweep's
    for words in (
        "`gqa: killed by signal 9 (out of memory?) (8)`",
        "fingerprint 5f2b8c81aa01",
        "Xeon 2.1 GHz",
        "0123456789ab",
        "What say you, sir? the alibi",
        "python bench/ablate.py config/ablate_shakespeare.py",
    ):
        assert words in text, words


def test_text_explains_the_columns_that_are_there(written, tmp_path, tables_alone):
    explained = ["1.4 times the tokens", "Step time:", "Seeds to decide:"]
    explained += ["within the margin", "corrected"]
    assert all(words in text_of(written) for words in explained)
    few = {"screening": True, "seeds": 3, "lr_grid": [1], "chosen_lr": {}, "curve": []}
    make_sweep(tmp_path, **FEW | few, costs=False)
    report.write(report.judge([tmp_path]))
    assert [words for words in explained if words in text_of(tmp_path)] == ["corrected"]
    assert "| what was seen |" in text_of(tmp_path) and "| verdict |" not in text_of(tmp_path)


def test_pictures_are_files(written):
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", text_of(written))
    assert pictures == [f"{name}.png" for name in FIGURES]
    assert all((written / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_figures_draw_what_the_rows_say(written):
    section = section_of(written)
    base, rope = (section.reported(arm)["val_loss_report"].mean() for arm in ("base", "rope"))
    drawn = [line.get_ydata()[-1] for line in figures.curves(section).axes[1].lines]
    assert min(np.abs(np.subtract(drawn, rope - base))) < 1e-9
    lines = figures.extrapolation(section).axes[0].lines
    assert lines[1].get_ydata() == pytest.approx([-0.01, 0.02, 0.24, 0.69])  # of rope
    panels = {axes.get_title(): axes for axes in figures.learning_rates(section).axes}
    tuned = section.tuned.query("arm == 'untied'").groupby("rate").val_loss_tune.mean()
    assert panels["untied"].lines[3].get_ydata() == pytest.approx(tuned.to_numpy())  # not base


def test_bars_in_names_are_escaped(tmp_path, tables_alone):
    make_sweep(tmp_path, effects={"base": 0.0, "a|b": -0.1}, diverged=(), stale=False)
    report.write(report.judge([tmp_path]))
    assert "| a\\|b | better |" in text_of(tmp_path)


FIGURES = ("forest", "curves", "learning_rates", "extrapolation")


def test_files_for_a_paper_are_written_on_request(written):
    names = {path.name for path in (written / "paper").iterdir()}
    assert {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "pdf")} <= names
    assert text_of(written / "paper", "forest.svg").startswith("<?xml")
    assert (written / "paper/forest.pdf").read_bytes().startswith(b"%PDF")
    assert {"verdicts.csv", "verdicts.tex", "numbers.csv"} <= names
    latex = text_of(written / "paper", "verdicts.tex")
    assert "\\toprule" in latex and latex.isascii()


def test_the_same_rows_give_the_same_files(tmp_path, monkeypatch):
    with_one_figure = [item for item in report.ITEMS if item[2] != "figures"]
    with_one_figure.append((figures.forest, "Differences", "figures"))
    monkeypatch.setattr(report, "ITEMS", with_one_figure)
    for name in ("a", "b"):
        make_sweep(tmp_path / name / "sweep", **FEW)
        report.write(report.judge([tmp_path / name / "sweep"]))
    assert (tmp_path / "a/sweep/forest.png").exists()
    for path in (tmp_path / "a/sweep").iterdir():
        assert path.read_bytes() == (tmp_path / "b/sweep" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    "keys",
    [
        {"seeds": 1},
        {"costs": False, "lr_grid": [1], "chosen_lr": {}},
        {"diverged": ("base", "rope")},
        {"killed": ("base", "base-again")},
        {"curve": [], "margin": None, "margin_source": None, "curve_points": 1},
        {"noise": 0.0},
        {"effects": {"base": 0.0}},
        {"screening": True, "seeds": 3, "lr_grid": [1], "chosen_lr": {}, "curve": []},
    ],
    ids=str,
)
def test_a_poor_sweep_still_gets_its_report(tmp_path, keys, recwarn, not_saved):
    make_sweep(tmp_path, **FEW | keys)
    report.main([str(tmp_path)])
    assert not re.search(r"\b(nan|inf|None)\b", text_of(tmp_path))
    assert [str(warning.message) for warning in recwarn] == []


def test_an_arm_is_told_with_its_changes_and_one_beyond_the_edge_is_an_arrow(tmp_path):
    rates = dict.fromkeys(EFFECTS, 2) | {"untied": 1}
    arms = {"untied": {"against": "rope"}}
    make_sweep(tmp_path, 6, EFFECTS | {"alibi": 9.0}, arms, curve=[], chosen_lr=rates)
    (section,) = report.judge([tmp_path])
    shown = tables.tests_table(section).set_index("change")["what changes"]
    assert shown["rope"] == "position=rope" and "learning rate 0.5 ×" in shown["untied"]
    figure = figures.forest(section)  # alibi is an arrow
    assert figure.axes[0].get_xlim()[1] < 2 and "arrow" in figure.get_label()


def test_no_rows_yet(tmp_path, tables_alone):
    make_sweep(tmp_path, **FEW)
    (tmp_path / "rows.jsonl").write_text("")
    report.write(report.judge([tmp_path]))
    assert table_of(tmp_path, "change")["rope"]["verdict"] == "not run"


def test_wrong_answers_stand_beside_the_loss(tmp_path, tables_alone):
    _, rows, _ = make_sweep(tmp_path, **FEW)
    wrong = [0.0 if row["arm"] == "rope" else 0.6 for row in rows]
    shares = [{"wrong_answers": share, "wrong_tokens": share / 2} for share in wrong]
    write_lines(tmp_path, [row | share for row, share in zip(rows, shares, strict=True)])
    report.write(report.judge([tmp_path]))
    assert table_of(tmp_path, "change")["rope"]["wrong answers"] == "0.0%"


def test_each_folder_gets_its_own_report(tmp_path, tables_alone):
    make_sweep(tmp_path / "c", **FEW, question="Another?", max_iters=1000)
    make_sweep(tmp_path / "d", **FEW, screening=True)
    sweeps = report.judge([tmp_path / "c", tmp_path / "d"])
    assert report.write(sweeps) == tmp_path / "c/report.md"
    assert titles_of(tmp_path / "c")[0] == "Another?"
    assert (tmp_path / "d/report.md").exists()


@pytest.mark.parametrize("name", ["rope", "position=rope+mlp=swiglu+norm=rmsnorm", "a" * 29])
def test_a_terminal_of_80_columns_breaks_no_word(tmp_path, name):
    effects = {"base": 0.0, "base-again": 0.0, name: -0.1}
    make_sweep(tmp_path, effects=effects, diverged=(), stale=False, screening=True)
    text = report.terminal(report.judge([tmp_path]))
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.split(r"[\s+]+", text))
    assert {*name.split("+"), "better,", "by", "more", "than", "the", "noise"} <= words
    row = section_of(tmp_path).verdicts.set_index("arm").loc[name]
    assert tables.difference(row, 3) in text


def test_a_report_tells_that_its_base_diverged_and_which_arms_were_not_named(tmp_path):
    _, lines, _ = make_sweep(tmp_path, **FEW, seeds=3)
    lines = with_runs(lines, "base", lambda seed: DIVERGED if seed < 2 else {})
    write_lines(tmp_path, [*lines, lines[-1] | {"arm": "old"}])
    section = section_of(tmp_path)
    section.verdicts["seeds_to_decide"] = np.inf  # of an arm that is close to the base
    shown = tables.verdicts_table(section).set_index("change")
    assert shown["runs"]["base"] == "3, 2 diverged" and shown["seeds to decide"]["rope"] == ">300"
    text = report.terminal([section]).replace("\n", " ")
    assert "2 of 5 runs of the base and base again" in text and "not name. 2 arms" in text
    assert "left out. old: not named by the command (1)" in text


CLEAN = FEW | {"noise": 0.002}
CHANGES = {  # what must be said -> the change of the clean sweep
    "at the base's learning rate, which favours": {"lr_grid": [1]},
    "Base again differs from the base": {"effects": FEW["effects"] | {"base-again": 0.5}},
    "Base again differs from the base. ": {"effects": FEW["effects"] | {"base-again": -0.5}},
    "training text more than once; fresh text could change the result. 2 times": {
        "base_values": {"max_iters": 5, "batch_size": 4, "block_size": 25, "learning_rate": 1e-3}
        | {"gradient_accumulation_steps": 2},
        "data": {"train_tokens": 500, "val_tokens": 1, "dataset": "x", "fingerprint": "y"},
    },
    "of the text that it sees. So this is a screening, and uses the words of a screening. 1.751"
    " on the whole validation text, beside 1.700 of trigrams, 1.600 of 5-grams": {
        "ngrams": {"trigrams": 1.7, "best": [5, 1.6]}
    },
    "it beats trigrams, but not the best n-grams of its text. 1.751": {
        "ngrams": {"trigrams": 1.8, "best": [5, 1.6]}
    },
}


def said(folder, **keys):
    """The caveats of a sweep as a text."""
    make_sweep(folder, **keys)
    return "\n".join(f"{text} {', '.join(what)}" for text, what in caveats(section_of(folder)))


def test_a_sweep_with_many_faults_has_many_caveats_and_a_clean_one_has_none(tmp_path):
    text = said(tmp_path, killed=("swiglu",))
    for words in (
        "no mean includes them. swiglu: killed by signal 9 (out of memory?) (5)",
        "left out. gqa: other code or another configuration (1)",
        "edge of the grid; try beyond it. untied (2 ×)",
    ):
        assert words in text, words
    assert len(CAVEATS) <= 15
    assert said(tmp_path, **CLEAN) == ""


@pytest.mark.parametrize("words", CHANGES)
def test_caveats_are_computed_from_the_data(tmp_path, words):
    assert words in said(tmp_path, **CLEAN | CHANGES[words])
