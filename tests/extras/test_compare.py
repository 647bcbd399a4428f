"""extras/compare.py: the table, the picture, and folders that are no runs or unfinished."""

import json
import math
import os
from dataclasses import asdict

import pytest
import safetensors.torch

import train
from common.errors import UserError
from extras import compare
from helpers.runs import arguments
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
    rows[-2]["whole_val_loss"] = losses[-1] + 0.01  # of the last evaluation alone
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    if data:
        saved = folder / "ckpt" / f"{10 * (len(losses) - 1):06d}"
        saved.mkdir(parents=True)
        (saved / "state.json").write_text(json.dumps({"data": data}))
    return folder


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def printed(capsys, *argv):
    compare.main(list(map(str, argv)))
    return capsys.readouterr().out


def test_the_table_holds_what_the_logs_say_and_fits_a_terminal(tmp_path, capsys):
    make_run(tmp_path / "out-a", lr_decay_iters=40)
    big = [value + 10 for value in LOSSES]
    make_run(tmp_path / "out-b", big, learning_rate=1e-3, n_layer=3, position="alibi")
    lines = printed(capsys, "out-a", "out-b").splitlines()
    assert lines[1].split() == ["out-a", "1.9600", "1.9000", "2.8133", "0.06", "M", "30", "641"]
    assert "best and bits/byte of the tokens that each" in " ".join(lines)
    assert max(map(len, lines)) <= 80
    cells = {line.split()[0]: line.split()[1:] for line in lines[4:-1]}
    assert cells["learning_rate"] == ["0.0006", "0.001"] and cells["position"] == ["rope", "alibi"]
    assert cells["lr_decay_iters"] == ["40", "None"]
    assert "out_dir" not in cells and "versions" not in cells and lines[-1] == "compare.png"


def test_names_and_values_of_others_are_text(tmp_path, capsys):
    """No markup of rich, no formula of matplotlib, no escape sequence."""
    make_run(tmp_path / "[b]$x_{$", seed="[/red]\x1b[2J")
    make_run(tmp_path / "out-b\x1b[2J")
    shown = printed(capsys, "[b]$x_{$", "out-b\x1b[2J")
    assert "[b]$x_{$" in shown and r"[/red]\x1b[2J" in shown and r"out-b\x1b[2J" in shown
    assert "\x1b" not in shown


def test_idle_keys_and_unnamed_slots_are_no_difference(tmp_path):
    made = [make_run(tmp_path / "out-a"), make_run(tmp_path / "out-b", norm="rmsnorm")]
    read = [compare.read_run(folder, folder.name) for folder in made]
    assert compare.differing(read).empty
    assert read[0].parameters == read[1].parameters


def test_curves_are_against_steps_tokens_and_seconds(tmp_path):
    run = compare.read_run(make_run(tmp_path / "_a", gradient_accumulation_steps=2), "_a")
    figure = compare.figure_of([run], "val_loss")
    assert [text.get_text() for text in figure.axes[-1].get_legend().get_texts()] == ["_a"]
    drawn = [axes.lines[0].get_xdata().tolist() for axes in figure.axes]
    assert drawn == [[0, 10, 20, 30], [0, 1280, 2560, 3840], [0, 10, 20, 30]]
    assert all(axes.lines[0].get_ydata().tolist() == LOSSES for axes in figure.axes)
    assert 2.0 < figure.axes[0].get_ylim()[1] < 2.2  # the first losses may lie above


STRANGE = {  # name: (a file of a run, its new text, None to remove it; the sentence)
    "empty": ("config.json", None, "is left out: no run here."),
    "garbled": ("config.json", "{", "is left out: this is not JSON"),
    "lacking": ("config.json", "{}", "is left out: this run cannot be"),
    "no log": ("log.jsonl", None, "out-b is at step 0 of 30."),
    "cut": ("log.jsonl", '{"step": 5, "loss": 3.0}\n{"ste', "out-b is at step 5 of 30."),
    "no number": ("log.jsonl", '{"step": 5, "val_loss": null}\n', "out-b is at step 5 of 30."),
    "diverged": ("diverged.json", "{}", "diverged after step 30."),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_folder_gets_a_sentence_and_the_others_are_compared(name, tmp_path, capsys):
    make_run(tmp_path / "out-a")
    file, text, sentence = STRANGE[name]
    path = make_run(tmp_path / "out-b") / file
    path.unlink() if text is None else path.write_text(text)
    out = " ".join(printed(capsys, "out-a", "out-b").split())
    assert out.count(sentence) == 1 and "out-a 1.9600" in out


def test_runs_of_different_data_are_compared_in_bits_per_byte(tmp_path, capsys):
    make_run(tmp_path / "out-a", dataset="plays")
    make_run(tmp_path / "out-b", dataset="words", data="other")
    assert "different data" in printed(capsys, "out-a", "out-b")
    runs, _ = compare.read_runs(["out-a", "out-b"])
    assert compare.measure_of(runs)[0] == "bits_per_byte"
    assert compare.measure_of(runs[:1])[0] == "val_loss"


def test_a_file_that_is_not_ours_is_never_replaced(tmp_path, capsys):
    make_run(tmp_path / "out-a")
    (tmp_path / "compare.png").write_text("mine")
    with pytest.raises(UserError, match="was not written by extras/compare.py .out=compare.png"):
        compare.main(["out-a"])
    assert (tmp_path / "compare.png").read_text() == "mine"
    for _ in range(2):  # our own file is renewed
        assert "sizes.png" in printed(capsys, "out-a", "--out=sizes.png")


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "no run folders"),
        (["out-none"], "no run here .out-none.*: name "),
        (["out-none", "out-nil"], "no run in 2 folders: out-none is left out: no run here"),
        (["out-a", "--out=none/x.png"], "out=none/x.png"),
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
    (tmp_path / "x/config.json").write_text('{"model_type": "gpt2"}')
    runs, remarks = compare.read_runs(["x/out/", "y/out", "out-b", "./out-b", "x"])
    assert [run.name for run in runs] == ["x/out", "y/out", "out-b"]
    assert remarks == ["x is left out: no run here."]


def test_a_run_of_train_py_is_read_as_it_is(tmp_path, data_dir, capsys):
    out = tmp_path / "out-real"
    train.main(arguments(data_dir, out, "--max_iters=4", "--eval_interval=2"))
    capsys.readouterr()
    run = compare.read_run(out, "out-real")
    tensors = safetensors.torch.load_file(checkpoint.find(out) / "model.safetensors")
    assert run.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert run.evaluations["step"].tolist() == [0, 2, 4] and run.remarks == []
    before = sorted(path for path in out.rglob("*"))
    printed(capsys, out)
    assert sorted(path for path in out.rglob("*")) == before
