"""Checkpoints that are old, new or half written, and disks that refuse."""

import errno
import json
import os
import shutil
import stat
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch

import sample
from common import files
from common.errors import Failure, UserError
from helpers.checkpoints import FORMAT_1, copy_as, resume
from helpers.formats import replace_by_pipe
from helpers.texts import message
from training import run_folder
from weights import checkpoint, export

LOSSES = {21: 1.463037, 22: 1.461660, 30: 1.303072, 40: 1.282067}  # of FORMAT 1, uninterrupted
SAVED = FORMAT_1 / "ckpt" / "000020"


def save(out, step, best=True, **changes):
    state = json.loads((SAVED / "state.json").read_text()) | changes
    return checkpoint.save(out, step, {}, {}, state, {"model": "llama"}, {}, best)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_format_1_samples(out, capsys):
    (out / "ckpt/000020/optimizer.safetensors").unlink()  # only resuming needs it
    argv = ["--device=cpu", "--temperature=0", "--num_samples=1", "--max_new_tokens=24"]
    sample.main([f"--out_dir={out}", "--start=the k", *argv])
    assert capsys.readouterr().out.startswith("the k she she she she she she")
    copy_as(out, 40)
    sample.main([f"--out_dir={out}", "--checkpoint=20", *argv])
    assert "after 20 steps" in capsys.readouterr().err
    export.main([f"--out_dir={out}", f"--dest={out / 'hf'}", "--checkpoint=20"])
    assert "after 20 steps" in capsys.readouterr().out


def test_format_1_resumes(out, data_dir):
    assert not resume(out, data_dir)
    log = run_folder.read_log(out / "log.jsonl")
    losses = {row["step"]: row["loss"] for row in log if "loss" in row}
    assert {step: losses[step] for step in LOSSES} == pytest.approx(LOSSES, abs=1e-4)
    assert checkpoint.FORMAT == 1, "keep a checkpoint of the format before, and such a test"


@pytest.mark.parametrize("name", ["model.safetensors", "checksums.json"])
def test_a_pipe_in_a_checkpoint_does_not_hang(out, name):
    replace_by_pipe(out / "ckpt" / "000020" / name)
    assert "not whole: " in message(checkpoint.open_run, out)


def killed(after, action):
    """The exit status of a forked child that dies before its step of writing number `after`."""
    left = [after]

    def dying(function):
        def wrapped(*args, **options):
            left[0] -= 1
            if left[0] == -1:
                os._exit(9)
            return function(*args, **options)

        return wrapped

    child = os.fork()
    if child == 0:
        try:
            steps = [(os, name) for name in ("mkdir", "rename", "replace", "unlink", "rmdir")]
            for owner, name in [*steps, (safetensors.torch, "save_file"), (Path, "write_text")]:
                setattr(owner, name, dying(getattr(owner, name)))
            action()
            os._exit(0)
        finally:
            os._exit(1)  # whatever fails must not go on as a second pytest
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("step", [40, pytest.param(50, marks=pytest.mark.slow)])  # 50 is new
def test_killed_at_any_moment_of_a_save(out, tmp_path, step, monkeypatch):
    """What bears a step's name is whole, and is the best or not as its own state says."""
    monkeypatch.setattr(files, "sync", lambda path: None)
    for other in (30, 40):
        copy_as(out, other)
    bests = set()
    for after in range(100):
        copy = shutil.copytree(out, tmp_path / f"{after}")
        status = killed(after, lambda: save(copy, step, best_step=step))
        folders = checkpoint.checkpoints(copy)
        newest = max(folders)
        assert newest >= 40 and not any(map(checkpoint.flaw, folders.values()))
        best = json.loads((folders[newest] / "state.json").read_text())["best_step"]
        assert checkpoint.step_of(checkpoint.find(copy, "best")) == best
        bests.add(best)
        save(copy, 60, best=False, best_step=best)
        assert names(copy / "ckpt") == [f"{each:06d}" for each in sorted({best, newest, 60})]
        assert (copy / "best").read_text() == f"{best}\n"
        if status == 0:
            break
    assert status == 0 and after > 12 and bests == {20, step}


def test_a_best_step_that_was_not_saved(out):
    """Step 0, which an evaluation may find the best, is not saved."""
    save(out, 40, best=False, best_step=0)
    (out / "best").unlink()
    with pytest.raises(UserError, match="best step was not saved .*latest, or a step from .20, 40"):
        checkpoint.find(out, "best")


@pytest.mark.parametrize("step, name", [(40, "000040.old"), (60, ".000060.old-0123456789abcdef")])
def test_a_renamed_checkpoint_is_found_where_it_lies(out, step, name):
    """By this version or an earlier one. Reading changes nothing, as a run may be saving."""
    renamed = copy_as(out, step).rename(out / "ckpt" / name)
    (out / "ckpt" / f"{step + 1:06d}.tmp").mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in out.rglob("*")}
    assert checkpoint.steps(out) == [20, step]
    assert checkpoint.find(out) == checkpoint.find(out, step) == renamed
    assert checkpoint.open_run(out)[3]["step"] == step
    assert {path: path.is_file() and path.read_bytes() for path in out.rglob("*")} == before
    checkpoint.settle(out)
    assert names(out / "ckpt") == ["000020", f"{step:06d}"]


def test_a_checkpoint_replaced_while_it_is_read_is_read_again(out, monkeypatch):
    real, calls = checkpoint.read, []

    def read(folder):
        calls.append(folder)
        if len(calls) == 1:
            shutil.rmtree(folder)
            shutil.copytree(SAVED, out / "ckpt" / "000020")
        return real(folder)

    renamed = (out / "ckpt" / "000020").rename(out / "ckpt" / "000020.old")
    monkeypatch.setattr(checkpoint, "read", read)
    assert checkpoint.open_run(out)[3]["step"] == 20
    assert calls == [renamed, out / "ckpt" / "000020"]


def test_a_reader_beside_a_save_always_finds_a_checkpoint(out):
    """The checkpoint is replaced again and again while another thread looks for it."""
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            seen.append(checkpoint.steps(out))

    reader = threading.Thread(target=look)
    reader.start()
    for n in range(300):
        new = shutil.copytree(SAVED, out / "ckpt" / f".{n}")
        checkpoint.put_in_place(new, out / "ckpt" / "000020")
        checkpoint.settle(out)
    done.set()
    reader.join()
    assert len(seen) > 10 and all(steps == [20] for steps in seen)


@pytest.mark.parametrize("function", ["rmtree", "rename"])
def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(out, monkeypatch, capsys, function):
    save(out, 40)
    busy = OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    owner = shutil if function == "rmtree" else Path
    monkeypatch.setattr(owner, function, Mock(side_effect=busy))
    assert save(out, 60).is_dir() and save(out, 80).is_dir()
    err = capsys.readouterr().err
    assert err.count("warning: cannot remove") >= 1 and "Device or resource busy" in err
    assert checkpoint.find(out).name == "000080" and not checkpoint.flaw(checkpoint.find(out))
    monkeypatch.undo()
    save(out, 100)
    assert names(out / "ckpt") == ["000080", "000100"]


def test_what_else_lies_in_ckpt_is_left_alone(out):
    """What interrupted saves left is removed. A colleague may read what is saved."""
    root = out / "ckpt"
    for name in ("notes.old", "000030.tmp", "000050"):
        (root / name).write_text("not ours")
    for name in ("backup.old", "000020.old2", ".000020.partial"):
        (root / name).mkdir()
    before = names(root)
    for name in ("000010.tmp", ".000010.partial-0123456789abcdef"):
        (root / name).mkdir()
    shutil.copytree(root / "000020", root / "000020.old")
    folder = save(out, 60)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o666 & ~files.UMASK}
    assert names(root) == sorted([*before, "000060"])
    assert checkpoint.steps(out) == [20, 60]
    with pytest.raises(Failure, match="cannot save step 50: .*move the file or folder"):
        save(out, 50)
    for which in ("²", "newest"):
        with pytest.raises(UserError, match=f"is called {which} .checkpoint={which} of {out}.:"):
            checkpoint.find(out, which)
    assert (root / "000050").read_text() == "not ours"


def test_a_checkpoint_that_may_not_be_read(out, monkeypatch):
    path = out / "ckpt" / "000020" / "model.safetensors"

    def sha256_of(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "sha256_of", sha256_of)
    with pytest.raises(UserError, match=f"cannot read the checkpoint: Permission.*{path}.*owner"):
        checkpoint.open_run(out)
