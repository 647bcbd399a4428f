"""Run folders: places that cannot be one, locks, damaged logs, disks that refuse."""

import errno
import json
import os
import sys

import pytest

from common import files
from common.errors import Failure, UserError
from helpers.checkpoints import copy_run, prepare_words, resume
from tokens.batches import Batches
from training import run_folder
from weights import checkpoint


@pytest.fixture(autouse=True)
def nothing_warned():
    files.warned.clear()


@pytest.fixture
def out(tmp_path):
    """A run folder with one checkpoint."""
    return copy_run(tmp_path / "run")


# ---------------------------------------------------------------- the place


@pytest.mark.parametrize(
    "name, words",
    [
        ("a\0b", "null character"),
        ("n" * 300, "more than 255 bytes"),
        ("new/" + "é" * 150, "more than 255 bytes"),
        ("\ud800", None),
    ],
)
def test_a_name_that_no_folder_can_have(tmp_path, name, words):
    with pytest.raises(UserError, match=words) as caught:
        run_folder.open_out_dir(tmp_path / name)
    assert caught.value.status == 2 and "choose another --out_dir" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["lock", "log.jsonl", "config.json", "latest"])
def test_a_folder_where_a_run_keeps_a_file(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"a folder where a run keeps a file .*{tmp_path / name}"):
        run_folder.check_out_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", [".", "..", "../../run"])
def test_the_folder_of_the_command_is_not_moved_aside(out, monkeypatch, name):
    (out / "inside").mkdir()
    monkeypatch.chdir(out if name == "." else out / "inside")
    with pytest.raises(UserError, match=r"runs inside the folder that --overwrite moves aside"):
        run_folder.open_out_dir(name, overwrite=True)
    assert checkpoint.steps(out) == [20] and not out.with_name("run.old1").exists()


def test_leftovers_of_interrupted_writes_are_removed(tmp_path):
    mine = tmp_path / "log.jsonl.tmp"
    for path in (mine, files.partial(tmp_path / "log.jsonl"), files.partial(tmp_path / "best")):
        path.touch()
    run_folder.open_out_dir(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "log.jsonl.tmp"]


# ---------------------------------------------------------------- the lock


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    run_folder.open_out_dir(tmp_path).close()
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    assert "without locks: start only one process" in capsys.readouterr().err


def test_a_lock_that_cannot_be_opened(tmp_path, monkeypatch):
    def flock(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with pytest.raises(UserError, match="cannot lock the run folder: Input/output error .*lock"):
        run_folder.hold(tmp_path)


# ---------------------------------------------------------------- the log


DAMAGED = (
    b"""{"step": 1, "loss": 3.0}
{"step": 2, "lo\xff\xfe": 2.0}
{}
5
{"step": "3", "loss": 3.0}
{"step": 4, "loss": "text"}
"""
    + b"[" * 200_000
    + b"""

{"step": 5, "loss": 1.0}
{"step": 6, "lo"""
)


def test_a_damaged_log_is_read_without_the_damage_and_says_so_once(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_bytes(DAMAGED)
    for last_step, found in ((None, [1, 5]), (4, [1])):
        assert [row["step"] for row in run_folder.read_log(path, last_step)] == found
    err = capsys.readouterr().err
    assert err == f"warning: {path} is damaged and read without line 2, 3, 4, ...\n"
    path.write_bytes(b'{"arm": "a"}\n{"arm": "b"')  # cut short by a crash: nothing to say
    assert run_folder.read_rows(path) == [{"arm": "a"}] and not capsys.readouterr().err
    assert run_folder.read_rows(tmp_path / "none.jsonl") == []


def test_a_run_with_a_damaged_log_is_resumed(out, data_dir):
    (out / "log.jsonl").write_bytes(DAMAGED)
    assert not resume(out, data_dir, "--max_iters=24")
    lines = (out / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "lr" in line] == [21, 22, 23, 24]


def test_a_log_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=f"cannot read: Is a directory .*{tmp_path}"):
        run_folder.read_rows(tmp_path)


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
    assert run_folder.read_log(tmp_path / "log.jsonl") == [{"step": 1, "loss": 1.0}]


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


# ---------------------------------------------------------------- a failure while training


@pytest.fixture
def data_dir(tmp_path):
    return prepare_words(tmp_path / "data")


def test_a_failure_while_training_loses_no_step(out, data_dir, monkeypatch):
    """The data become unreadable after step 23: what was learnt since step 20 is saved."""
    real, parts = Batches.get, []

    def get(self, first, count):
        parts.append(first)
        if len(parts) > 2 * 3:
            raise Failure("the token file shrank", "train.bin", "prepare the data again")
        return real(self, first, count)

    monkeypatch.setattr(Batches, "get", get)
    with pytest.raises(Failure, match="the token file shrank"):
        resume(out, data_dir)
    assert checkpoint.steps(out) == [20, 23] and not checkpoint.flaw(checkpoint.find(out))
    monkeypatch.undo()
    assert not resume(out, data_dir, "--max_iters=24")
