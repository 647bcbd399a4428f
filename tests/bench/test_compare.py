"""bench/compare.py: the table, the page, and folders that are no runs, unfinished, or cut short."""

import json
import math
import os
from dataclasses import asdict

import compare
import numpy as np
import pytest
import safetensors.torch

import train
from bench.comparison import page, runs
from common.errors import UserError
from parts.architectures import configure
from training.settings import TrainConfig
from weights import checkpoint

LOSSES = [4.2, 2.0, 1.9, 1.95]  # at steps 0, 10, 20, 30
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 65}


def make_run(folder, losses=LOSSES, data="abcd", max_iters=30, model="llama", **values):
    """A run folder with an evaluation every 10 steps of 4 x 16 tokens, a second each."""
    ours = {key: values.pop(key) for key in [*values] if hasattr(TrainConfig, key)}
    config = TrainConfig(model=model, max_iters=max_iters, warmup_iters=2, batch_size=4, **ours)
    model_config = configure({"model": model} | SIZES | values)
    folder.mkdir()
    stored = asdict(config) | asdict(model_config) | {"versions": {"git_commit": "0ff"}}
    (folder / "config.json").write_text(json.dumps(stored))
    rows = []
    for number, loss in enumerate(losses):
        step = 10 * number
        row = {"step": step, "val_loss": loss, "bits_per_byte": loss / math.log(2)}
        rows.append(row | {"seconds": float(step), "val_blocks": [loss, loss]})
        rows.append({"step": step + 5, "loss": loss, "tokens_per_second": 640.0 + number})
    text = "".join(json.dumps(row) + "\n" for row in rows[:-1])
    (folder / "log.jsonl").write_text(text)
    if data:
        saved = folder / "ckpt" / f"{10 * (len(losses) - 1):06d}"
        saved.mkdir(parents=True)
        (saved / "state.json").write_text(json.dumps({"data": data}))
    return folder


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_figures(monkeypatch):
    """Tests of words need no pictures, which take a second."""
    png = b"\x89PNG Software\0" + page.OURS.encode()
    monkeypatch.setattr(page, "pictures", lambda runs, measure: (png, []))


def printed(capsys, *argv):
    compare.main(list(map(str, argv)))
    return capsys.readouterr().out


def test_the_table_holds_what_the_logs_say_and_fits_a_terminal(tmp_path, capsys, no_figures):
    make_run(tmp_path / "out-a")
    name = "out-" + "a-long-name-" * 4
    big = [value + 10 for value in LOSSES]
    make_run(tmp_path / name, big, learning_rate=1e-3, n_layer=3, position="alibi")
    out = printed(capsys, "out-a", name)
    lines = out.splitlines()
    assert lines[0].split() == [*page.ON_TERMINAL]
    assert lines[1].split() == ["out-a", "1.9500", "1.9000", "2.8133", "61.7", "k", "30", "641"]
    assert max(map(len, lines)) <= 80
    assert "out-a: learning_rate=0.0006, n_layer=2, position=rope\n" in out
    assert f"{name}: learning_rate=0.001, n_layer=3, position=alibi" in " ".join(out.split())
    assert "out_dir" not in out and "0ff" not in out and lines[-1] == "compare.png, compare.html"


def test_idle_keys_and_unnamed_slots_are_no_difference(tmp_path):
    made = [make_run(tmp_path / "out-a"), make_run(tmp_path / "out-b", norm="rmsnorm")]
    stored = json.loads((made[1] / "config.json").read_text())
    assert stored["norm"] == "rmsnorm" and stored["position"] == "rope"
    read = [runs.read_run(folder, folder.name) for folder in made]
    assert runs.differing(read) == {}
    assert read[0].parameters == read[1].parameters


def test_curves_are_against_steps_tokens_and_seconds(tmp_path):
    run = runs.read_run(make_run(tmp_path / "out-a", gradient_accumulation_steps=2), "out-a")
    assert run.steps.tolist() == [0, 10, 20, 30] and run.losses.tolist() == LOSSES
    assert run.tokens.tolist() == [0, 1280, 2560, 3840]
    assert run.seconds.tolist() == [0, 10, 20, 30] and run.finished


def test_the_page_holds_all_and_needs_no_other_file(tmp_path, capsys):
    make_run(tmp_path / "out-a")
    make_run(tmp_path / "out-b", [4.2, 2.4], seed=7)
    printed(capsys, "out-a", "out-b")
    text = (tmp_path / "compare.html").read_text(encoding="utf-8")
    for words in ("Against steps", "Against tokens", "Against seconds", "What differs", "1.9500"):
        assert words in text
    assert text.count("<svg") == 3 and "http-equiv" not in text
    assert not any(word in text for word in ("<img", "<link", " src=", "@import"))
    for ending in ("out-a 1.950", "out-b 2.400"):  # on the lines, in each panel
        assert text.count(f">{ending}<") == 3
    png = (tmp_path / "compare.png").read_bytes()
    assert png.startswith(b"\x89PNG") and compare.is_ours(tmp_path / "compare.png")


def test_a_figure_shows_the_end_of_curves(tmp_path):
    run = runs.read_run(make_run(tmp_path / "out-a"), "out-a")
    low, high = page.shown_range([run], "losses")
    assert low < 1.9 and 2.0 < high < 2.2
    one = runs.read_run(make_run(tmp_path / "out-b", [4.2], max_iters=40), "out-b")
    assert page.shown_range([one], "losses") == (4.15, 4.25)


STRANGE = {  # name: (what is done to the folder of a run, the sentence)
    "empty": (lambda f: (f / "config.json").unlink(), "is left out: no run here."),
    "sweep": (lambda f: (f / "sweep.json").write_text("{}"), "left out: this is a sweep, not a"),
    "garbled": (lambda f: (f / "config.json").write_text("{"), "is left out: this is not JSON:"),
    "typed": (
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace('"batch_size": 4', '"batch_size": "4"')
        ),
        "is left out: batch_size must be int, not '4'.",
    ),
    "lacking": (lambda f: (f / "config.json").write_text("{}"), "config.json lacks dataset."),
    "no log": (lambda f: (f / "log.jsonl").unlink(), "has no log yet."),
    "no evaluation": (
        lambda f: (f / "log.jsonl").write_text('{"step": 5, "loss": 3.0}\n'),
        "has no evaluation yet, so it has no curve.",
    ),
    "not a number": (
        lambda f: (f / "log.jsonl").write_text('{"step": 5, "val_loss": null}\n'),
        "has no evaluation yet, so it has no curve.",
    ),
    "diverged": (
        lambda f: (
            (f / "diverged.json").write_text("{}"),
            (f / "log.jsonl").write_text('{"step": 5, "loss": 3.0}\n'),
        ),
        "diverged after step 5 of 30.",
    ),
    "old word": (
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace('"n_head": 2', '"n_head": 3')
        ),
        "its parameters are unknown: n_embd=32 is not divisible by n_head=3.",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_folder_gets_one_line_and_the_others_are_compared(
    name, tmp_path, capsys, no_figures
):
    make_run(tmp_path / "out-a")
    change, sentence = STRANGE[name]
    change(make_run(tmp_path / "out-b"))
    out = " ".join(printed(capsys, "out-a", "out-b").split())
    assert out.count(sentence) == 1 and "out-a 1.9500" in out


def test_a_log_that_is_cut_in_a_line_is_read_up_to_there(tmp_path, capsys, no_figures):
    folder = make_run(tmp_path / "out-a")
    text = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(text[: text.rindex('"val_blocks"')])
    out = " ".join(printed(capsys, "out-a").split())
    assert "out-a: the last line of its log is cut off, and left out." in out
    assert "out-a is not finished: step 25 of 30; no process on this machine trains it" in out
    assert out.split("tokens/s ")[1].startswith("out-a 1.9000 1.9000")


def test_a_run_that_is_still_going_says_so(tmp_path, capsys, no_figures):
    folder = make_run(tmp_path / "out-a", LOSSES[:2])
    (folder / "lock").write_text(str(os.getpid()))
    assert "out-a is still going: step 10 of 30." in printed(capsys, "out-a")
    for stale in ("", "-1", "9" * 30, "some words"):
        (folder / "lock").write_text(stale)
        assert "out-a is not finished: step 10 of 30;" in printed(capsys, "out-a")


def sentences_of(*folders):
    read = [runs.read_run(folder, folder.name) for folder in folders]
    return runs.comparable(read)


def test_runs_of_different_data_are_not_compared(tmp_path, capsys, no_figures, monkeypatch):
    a = make_run(tmp_path / "out-a", dataset="plays")
    b = make_run(tmp_path / "out-b", dataset="words", data="other")
    assert sentences_of(a, b) == (
        False,
        False,
        [
            "The runs have different data (plays and words): losses cannot be compared, bits per"
            " byte only on the same text."
        ],
    )
    assert "losses cannot be compared" in printed(capsys, a, b)
    monkeypatch.setattr(runs, "text_of", lambda config, data: (("source", 1000),))
    same_tokens, same_text, (sentence,) = sentences_of(a, b)
    assert (same_tokens, same_text) == (False, True)
    assert sentence.endswith("losses cannot be compared, bits per byte can be.")
    assert sentences_of(a, make_run(tmp_path / "out-c", dataset="plays")) == (True, True, [])
    no_save = make_run(tmp_path / "out-d", dataset="plays", data=None)
    assert sentences_of(a, no_save)[2] == []
    other = make_run(tmp_path / "out-e", dataset="plays", eval_tokens=99)
    assert "evaluations of different lengths" in sentences_of(a, other)[2][0]


def test_different_data_are_drawn_in_bits_per_byte(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "pictures", lambda runs, measure: drawn.append(measure) or (b"", []))
    a, b = (make_run(tmp_path / f"out-{data}", data=data) for data in "ab")
    for folders in ((a, a), (a, b)):
        page.contents([runs.read_run(folder, "run") for folder in folders], [], "")
    assert drawn == ["losses", "bits"]


def test_a_file_that_is_not_ours_is_never_replaced(tmp_path, capsys, no_figures):
    make_run(tmp_path / "out-a")
    for name in ("compare.png", "compare.html"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match=f"was not written by compare.py .{name}"):
            compare.main(["out-a"])
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    assert os.listdir(tmp_path) == ["out-a"]
    for _ in range(2):  # our own files are renewed
        assert "sizes.png, sizes.html" in printed(capsys, "out-a", "--out=sizes.html")
    (tmp_path / "figures").mkdir()
    assert "figures/compare.html" in printed(capsys, "out-a", "--out=figures")


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "no run folders"),
        (["out-none"], "no such folder .out-none"),
        (["out-none", "out-nil"], "no run in 2 folders: out-none is left out: no such folder"),
        (["out-a", "--out=none/x"], "no such folder .none"),
        (["out-a", "--out="], "no name for the files"),
        (["out-a", "--wacth"], "did you mean watch"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_writes_nothing(argv, words, tmp_path):
    make_run(tmp_path / "out-a")
    with pytest.raises(UserError, match=words):
        compare.main(argv)
    assert os.listdir(tmp_path) == ["out-a"]


def test_a_folder_counts_once_and_names_are_unique(tmp_path):
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        make_run(tmp_path / place / "out")
    make_run(tmp_path / "out-b")
    names = compare.names_of(["x/out/", "y/out", "out-b", "./out-b"])
    assert list(names.values()) == ["x/out", "y/out", "out-b"]


def test_watching_renews_the_page_until_the_last_run_has_ended(
    tmp_path, capsys, no_figures, monkeypatch
):
    folder, pages = make_run(tmp_path / "out-a", LOSSES[:2]), []

    def sleep(seconds):
        pages.append((tmp_path / "compare.html").read_text(encoding="utf-8"))
        if len(pages) == 2:
            row = {"step": 30, "val_loss": 1.5, "bits_per_byte": 2.0, "seconds": 30.0}
            with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    monkeypatch.setattr(compare.time, "sleep", sleep)
    out = printed(capsys, "out-a", "--watch")
    assert len(pages) == 2 and all('http-equiv="refresh" content="10"' in text for text in pages)
    assert out.count("tokens/s") == 2  # not where nothing has changed
    text = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "1.5000" in text and "http-equiv" not in text


def test_a_run_of_train_py_is_read_as_it_is(tmp_path, data_dir, capsys, no_figures):
    out = tmp_path / "out-real"
    sizes = [f"--{key}={value}" for key, value in SIZES.items() if key != "vocab_size"]
    where = ["--dataset=words", f"--data_dir={data_dir}", f"--out_dir={out}", "--device=cpu"]
    steps = ["--max_iters=4", "--eval_interval=2", "--log_interval=1", "--warmup_iters=1"]
    train.main([*sizes, *where, *steps, "--batch_size=4", "--gradient_accumulation_steps=1"])
    capsys.readouterr()
    run = runs.read_run(out, "out-real")
    tensors = safetensors.torch.load_file(checkpoint.find(out) / "model.safetensors")
    assert run.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert run.finished and run.steps.tolist() == [0, 2, 4] and run.remarks == []
    assert run.tokens[-1] == 4 * 4 * 16 and np.isfinite([run.losses, run.bits]).all()
    assert run.data and run.text[0][1] > 0  # the dataset is at hand, so its text is known
    before = sorted(path for path in out.rglob("*"))
    printed(capsys, out)
    assert sorted(path for path in out.rglob("*")) == before
