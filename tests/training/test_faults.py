"""Checkpoints that are old, new, crafted or half written, disks that refuse; and the faults from outside, in short."""

import collections
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
import train
from common import files
from common.errors import Failure, UserError
from prepare import prepare
from training import run_folder
from weights import checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
FORMAT_1 = (
    ROOT / "tests" / "checkpoints" / "format1"
)  # 20 of 40 steps by the code of FORMAT 1, and the text it trained on
LOSSES = {
    21: 1.463037,
    22: 1.461660,
    30: 1.303072,
    40: 1.282067,
}  # of that code without an interruption


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare("words", input=str(FORMAT_1 / "text.txt"), tokenizer="char", data_dir=str(folder))
    return folder


@pytest.fixture
def out(tmp_path):
    """A copy of the checkpoint of FORMAT 1 as a run folder."""
    return Path(shutil.copytree(FORMAT_1, tmp_path / "run"))


def resume(out, data_dir, *more):
    return train.main(
        [
            "--init_from=resume",
            f"--out_dir={out}",
            f"--data_dir={data_dir}",
            "--max_iters=40",
            *more,
        ]
    )


def reseal(folder):
    """Make the checksums those of the files as they are now, as whoever crafts a checkpoint would."""
    names = [path.name for path in folder.iterdir() if path.name != "checksums.json"]
    (folder / "checksums.json").write_text(
        json.dumps({name: checkpoint.sha256_of(folder / name) for name in sorted(names)})
    )


def step_aside(out, step):
    """A second, later checkpoint, by copying the one there is."""
    new = shutil.copytree(out / "ckpt" / "000020", out / "ckpt" / f"{step:06d}")
    (new / "state.json").write_text(
        json.dumps(json.loads((new / "state.json").read_text()) | {"step": step})
    )
    reseal(new)
    return new


# ---------------------------------------------------------------- formats


def test_format_1_samples(out, capsys):
    sample.main(
        [
            f"--out_dir={out}",
            "--device=cpu",
            "--start=the k",
            "--temperature=0",
            "--num_samples=1",
            "--max_new_tokens=24",
        ]
    )
    assert capsys.readouterr().out.startswith("the k she she she she she she")


def test_format_1_resumes(out, data_dir):
    assert not resume(out, data_dir)
    rows = {
        row["step"]: row["loss"] for row in run_folder.read_rows(out / "log.jsonl") if "loss" in row
    }
    assert {step: rows[step] for step in LOSSES} == pytest.approx(LOSSES, abs=1e-4)
    assert checkpoint.FORMAT == 1, (
        "keep a checkpoint of the format before in tests/checkpoints, and a test like this one"
    )


def test_a_newer_format_is_refused(out, data_dir):
    folder = checkpoint.find(out)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format": checkpoint.FORMAT + 1}))
    reseal(folder)
    for read in (lambda: resume(out, data_dir), lambda: checkpoint.open_run(out)):
        with pytest.raises(
            UserError, match=f"has format 2, this code reads 1 .*{folder}.*update this repo"
        ):
            read()


# ---------------------------------------------------------------- crafted checkpoints, whose checksums fit


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def edit_json(name, change):
    def edit(folder):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return edit


def edit_tensors(name, change):
    def edit(folder):
        path = folder / f"{name}.safetensors"
        save_file(change(load_file(path)), path)

    return edit


def without(key, values):
    return {name: value for name, value in values.items() if name != key}


WQ = "blocks.0.attn.wq.weight"
SPOILT = {  # name: (how, what the error says, whether sampling finds it as well)
    "pickle for weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb())),
        "weights do not fit the model",
        True,
    ),
    "torch.save for weights": (
        lambda folder: torch.save({"x": Bomb()}, folder / "model.safetensors"),
        "weights do not fit the model",
        True,
    ),
    "pickle for moments": (
        lambda folder: (folder / "optimizer.safetensors").write_bytes(pickle.dumps(Bomb())),
        "no safetensors file.*optimizer",
        False,
    ),
    "state is a list": (edit_json("state", lambda state: [1]), "no checkpoint of ours", True),
    "state without an entry": (
        edit_json("state", lambda state: without("best_step", state)),
        "state.json without best_step",
        True,
    ),
    "format is a word": (
        edit_json("state", lambda state: state | {"format": "x"}),
        "no checkpoint of ours",
        True,
    ),
    "config without model": (
        edit_json("config", lambda config: without("model", config)),
        "no checkpoint of ours.*model",
        True,
    ),
    "unknown model": (edit_json("config", lambda config: config | {"model": "rnn"}), "rnn", True),
    "not json": (
        lambda folder: (folder / "config.json").write_text("{"),
        "no checkpoint of ours",
        True,
    ),
    "a weight too few": (
        edit_tensors("model", lambda tensors: without(WQ, tensors)),
        f"weights do not fit the model.*{WQ}",
        True,
    ),
    "a weight too many": (
        edit_tensors("model", lambda tensors: tensors | {"module.x": torch.zeros(1)}),
        "weights do not fit the model.*module.x",
        True,
    ),
    "a weight of another shape": (
        edit_tensors("model", lambda tensors: tensors | {WQ: torch.zeros(3, 8)}),
        f"weights do not fit the model.*{WQ}",
        True,
    ),
    "four weights too few": (
        edit_tensors("model", lambda tensors: dict(list(tensors.items())[4:])),
        "weights do not fit the model",
        True,
    ),
    "a moment too few": (
        edit_tensors(
            "optimizer",
            lambda tensors: {name: value for name, value in tensors.items() if WQ not in name},
        ),
        f"optimizer state does not fit.*{WQ}",
        False,
    ),
    "a moment of no weight": (
        edit_tensors("optimizer", lambda tensors: tensors | {"module.x/exp_avg": torch.zeros(1)}),
        "optimizer state does not fit.*module.x",
        False,
    ),
    "a moment of another shape": (
        edit_tensors("optimizer", lambda tensors: tensors | {f"{WQ}/exp_avg": torch.zeros(3, 8)}),
        f"optimizer state does not fit.*{WQ}",
        False,
    ),
}


@pytest.mark.parametrize("spoil, words, sampled", SPOILT.values(), ids=SPOILT.keys())
def test_what_a_crafted_checkpoint_lacks_is_named(
    out, data_dir, tmp_path, monkeypatch, spoil, words, sampled
):
    monkeypatch.chdir(tmp_path)
    folder = checkpoint.find(out)
    spoil(folder)
    reseal(folder)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for read in [lambda: resume(out, data_dir)] + [lambda: checkpoint.open_run(out)] * sampled:
        with pytest.raises(UserError, match=words) as caught:
            read()
        text = str(caught.value)
        assert (
            caught.value.status == 2
            and "\n" not in text
            and str(folder) in text
            and "weights_only" not in text
            and len(text) < 600
        )
    assert {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"
    } == before
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "config.json",
        "tokenizer.json",
        "checksums.json",
    ],
)
def test_sampling_from_a_damaged_checkpoint_names_it_and_the_one_before(out, name):
    folder = step_aside(out, 40)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"(corrupt|not whole).*\({folder}.*go back to step 20"):
        checkpoint.open_run(out)
    (out / "ckpt" / "000020" / "state.json").unlink()  # that one is of no use either
    with pytest.raises(UserError, match="no other checkpoint is left"):
        checkpoint.open_run(out)


# ---------------------------------------------------------------- a save that is cut short


def test_no_room_for_a_checkpoint_is_seen_before_it_is_written(out, data_dir, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    needed = sum(
        (out / "ckpt" / "000020" / name).stat().st_size
        for name in ("model.safetensors", "optimizer.safetensors")
    )
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(10**9, 10**9, needed))
    monkeypatch.setattr(
        checkpoint.safetensors.torch, "save_file", lambda *args: pytest.fail("the write began")
    )
    with pytest.raises(
        Failure,
        match=rf"cannot save step 40: [\d,]+ bytes are needed, {needed:,} are free \({out}.*free the disk.*step 20",
    ):
        resume(out, data_dir)
    assert [path.name for path in out.glob("ckpt/*")] == ["000020"]


def test_a_folder_that_became_read_only(out, data_dir, monkeypatch):
    def refuse(path, *args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint.Path, "mkdir", refuse)
    with pytest.raises(
        Failure, match="cannot save step 40: Permission denied.*make the folder writable"
    ):
        checkpoint.save(out, 40, {}, {}, {}, {}, {}, False)


def test_killed_while_an_old_checkpoint_is_removed(out, monkeypatch):
    """What bears a step's name is whole at every instant."""
    for step in (30, 40):
        step_aside(out, step)

    def die(path, **more):
        os.unlink(Path(path) / "config.json")
        raise KeyboardInterrupt

    state = json.loads((out / "ckpt" / "000040" / "state.json").read_text()) | {"best_step": 50}
    monkeypatch.setattr(checkpoint.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(out, 50, {}, {}, state, {"model": "llama"}, {}, True)
    monkeypatch.undo()
    assert 50 in checkpoint.steps(out) and not any(
        map(checkpoint.flaw, (out / "ckpt" / f"{step:06d}" for step in checkpoint.steps(out)))
    )


def test_killed_before_the_file_best_was_written(out, monkeypatch):
    state = json.loads((out / "ckpt" / "000020" / "state.json").read_text()) | {"best_step": 40}
    real = files.write

    def die(path, data):
        if path.name == "best":
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(checkpoint, "write", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(out, 40, {}, {}, state, {"model": "llama"}, {}, True)
    monkeypatch.undo()
    assert (out / "best").read_text() == "20\n" and checkpoint.find(out, "best").name == "000040"
    checkpoint.save(out, 60, {}, {}, state, {"model": "llama"}, {}, False)
    assert (out / "best").read_text() == "40\n" and checkpoint.steps(out) == [40, 60]


def test_the_newest_checkpoint_is_found_where_it_stepped_aside(out):
    step_aside(out, 40).rename(out / "ckpt" / "000040.old")
    (out / "ckpt" / "000060.tmp").mkdir()  # of a run that may be saving right now
    assert checkpoint.find(out).name == "000040" and (out / "ckpt" / "000060.tmp").exists()


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    files.write(tmp_path / "a", "old")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(
        Failure, match=r"cannot write: No space left on device \(.*a\): free the disk"
    ):
        files.write(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_log_that_finds_the_disk_full(tmp_path, monkeypatch):
    log = run_folder.RunLog(tmp_path, None, 10)
    log.keep({"step": 1, "loss": 1.0})
    real = os.write
    monkeypatch.setattr(run_folder.os, "write", lambda number, data: real(number, data[:9]))
    with pytest.raises(
        Failure,
        match=r"cannot write: No space left on device \(.*log.jsonl\): free the disk.*resume",
    ):
        log.keep({"step": 2, "loss": 1.0})
    monkeypatch.undo()
    log.close()
    assert run_folder.read_rows(tmp_path / "log.jsonl") == [{"step": 1, "loss": 1.0}]


def test_drawing_and_wandb_warn_once(tmp_path, monkeypatch, capsys):
    class Wandb:
        id = "x"

        @classmethod
        def init(cls, **more):
            return cls()

        def log(self, *args, **more):
            raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = run_folder.RunLog(tmp_path, None, 10, run_folder.start_wandb("project", "name", {}, {}))
    for step in (1, 2, 3):
        log.evaluation({"step": step, "train_loss": 1.0, "val_loss": 1.0, "bits_per_byte": 1.0})
    log.close()
    err = capsys.readouterr().err
    assert err.count("warning: wandb") == 1 and err.count("warning: no ") == 1


# ---------------------------------------------------------------- from outside


def faults(root, *more):
    return subprocess.run(
        [sys.executable, "bench/faults.py", "--short", *more],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_faults_from_outside():
    """The short form of `python bench/faults.py`."""
    done = faults(ROOT)
    assert done.returncode == 0 and re.search(
        r"^\d\d passed, 0 failed$", done.stdout, re.MULTILINE
    ), done.stdout + done.stderr


def test_the_faults_notice_a_checkpoint_that_is_not_compared(tmp_path):
    """A copy of the repo that trusts every checksum: the flipped bit goes through, and is told."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py"), *ROOT.glob("bench/*/*.py")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    path = tmp_path / "weights" / "checkpoint.py"
    text = path.read_text()
    assert text.count("if found != expected:") == 1
    path.write_text(text.replace("if found != expected:", "if False:"))
    done = faults(tmp_path, "--only=damage")
    assert (
        done.returncode == 1
        and "FAILED a flipped bit in the latest checkpoint: exit 0, not 2" in done.stdout
    ), done.stdout + done.stderr
    assert "3 passed, 1 failed" in done.stdout
