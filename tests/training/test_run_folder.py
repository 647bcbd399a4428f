"""Run folders: places that cannot be one, locks, damaged logs, disks that refuse."""

import csv
import errno
import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import train
from common import files
from common.errors import Failure
from helpers.checkpoints import copy_run, prepare_words, resume
from helpers.runs import arguments, losses, made, new_run, same_runs
from helpers.texts import message
from training import optim, run_folder, terminal
from training.settings import TrainConfig
from training.terminal import RunLog
from weights import checkpoint


@pytest.mark.parametrize("name", ["a\0b", "n" * 300, "\ud800"])
def test_a_name_that_no_folder_can_have(tmp_path, name):
    assert "choose another" in message(run_folder.open_out_dir, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_leftovers_of_interrupted_writes_are_removed(tmp_path):
    mine = tmp_path / "log.jsonl.tmp"
    for path in (mine, *(files.partial(tmp_path / name) for name in run_folder.WRITTEN)):
        path.touch()
    run_folder.open_out_dir(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "log.jsonl.tmp"]


def test_a_lock_file_of_another_user(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(files, "lock", Mock(side_effect=denied))
    said = message(run_folder.check_out_dir, tmp_path)
    assert f"cannot lock this folder: Permission denied (out_dir={tmp_path})" in said


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    unknown = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(files.fcntl, "flock", Mock(side_effect=unknown))
    run_folder.open_out_dir(tmp_path).close()
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    assert "without locks: start only one process" in capsys.readouterr().err


TRAIN_STEP = train.train_step


def train_on(data_dir, out, *changes):
    """Train five steps in `out`; call each of some functions before the third one."""

    def step(run):
        if run.step == 2:
            for change in changes:
                change()
        return TRAIN_STEP(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", step)
        return train.main([*arguments(data_dir, out, "--max_iters=5"), "--eval_interval=2"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows where a folder is now")
def test_a_run_owns_its_folder_and_not_its_path(data_dir, tmp_path, capsys):
    """After `mv A A2`, a second run in A keeps what it saves, and the first goes on in A2."""
    one = tmp_path / "A"
    two = tmp_path / "A2"
    result = train_on(data_dir, one, lambda: one.rename(two), lambda: train_on(data_dir, one))
    assert result.folder == two / "ckpt/000005" and f"is now {two}" in capsys.readouterr().err
    for folder in (one, two):
        assert checkpoint.steps(folder) == [4, 5] and len(losses(folder)) == 5
        assert len(losses(folder, "val_loss")) == 4 and (folder / "loss.png").exists()
    assert checkpoint.read(result.folder)[1]["out_dir"] == str(two)
    same_runs(one, two)


def test_a_folder_that_takes_the_name_is_left_alone(data_dir, tmp_path):
    """Where the own one is gone, or no system knows where it is."""
    out = tmp_path / "A"
    make_another = lambda: [shutil.rmtree(out), out.mkdir(), (out / "mine").touch()]
    with pytest.raises(Failure, match="another one now has its name"):
        train_on(data_dir, out, make_another)
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize("name", [".", "log.jsonl", "lock"])
def test_what_is_removed_while_it_trains_is_made_again(data_dir, tmp_path, capsys, name):
    """With all rows of the log, and a lock that holds."""
    out = tmp_path / "A"
    seen = []
    seen_locked = lambda: seen.append(message(run_folder.check_out_dir, out, True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save", lambda *_, real=train.save: [real(*_), seen_locked()])
        train_on(data_dir, out, lambda: files.remove(out / name))
    assert len(losses(out)) == 5 and checkpoint.steps(out)[-1] == 5
    assert json.loads((out / "config.json").read_text())["max_iters"] == 5
    assert all(f"process {os.getpid()} is training here" in said for said in seen)
    assert name == "lock" or "removed" in capsys.readouterr().err


def test_nothing_is_written_through_a_link(data_dir, tmp_path):
    """A link that came with a folder is replaced, or the folder is refused."""
    out = tmp_path / "run"
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine/file"
    mine.write_text("mine")
    train_on(data_dir, out)
    linked = ("loss.png", "log.csv", "log.jsonl", "latest", "best", "config.json")
    for name in linked:
        files.remove(out / name)
        (out / name).symlink_to(mine)
    assert not resume(out, data_dir, "--max_iters=8", "--log=csv")
    assert not any((out / name).is_symlink() for name in linked)
    files.remove(out / "ckpt")
    (out / "ckpt").touch()
    assert f"this is not a folder ({out}/ckpt)" in message(run_folder.open_out_dir, out, True)
    for name in ("lock", "ckpt", "tensorboard"):
        files.remove(out / name)
        (out / name).symlink_to(mine if name == "lock" else mine.parent)
        said = message(run_folder.open_out_dir, out, True)
        assert re.search(f"this is a symlink.*{out / name}", said)
        (out / name).unlink()
    (out / "rows.jsonl").symlink_to(mine)
    with pytest.raises(Failure, match="in the place of the link"):
        files.append(out / "rows.jsonl", {})
    with pytest.raises(OSError):
        files.lock(out / "rows.jsonl")
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["mine"]


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


def test_a_log_that_finds_the_disk_full(tmp_path, monkeypatch):
    log = run_folder.LogFile(new_run(TrainConfig(out_dir=str(tmp_path))))
    log.keep({"step": 1, "loss": 1.0})
    real = os.write
    monkeypatch.setattr(run_folder.os, "write", lambda number, data: real(number, data[:9]))
    words = r"cannot write: No space left on device \(.*log.jsonl\): free the disk.*resume"
    with pytest.raises(Failure, match=words):
        log.keep({"step": 2, "loss": 1.0})
    monkeypatch.undo()
    log.close()
    assert run_folder.read_log(tmp_path / "log.jsonl") == [{"step": 1, "loss": 1.0}]


def test_drawing_warns_once(tmp_path, whole_end, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = RunLog(new_run(TrainConfig(out_dir=str(tmp_path))))
    for step in (1, 2, 3):
        log.evaluation({"step": step, "train_loss": 1.0, "val_loss": 1.0, "bits_per_byte": 1.0})
    log.close()
    assert capsys.readouterr().err.count("warning: no ") == 1


@pytest.mark.parametrize("at", ["start", "log", "close"])
def test_a_logger_that_fails_never_stops_a_run(tmp_path, monkeypatch, capsys, at):
    """In whatever it does. It warns once; log.jsonl has all rows."""
    broken = Mock(side_effect=OSError("no network"))
    starts = {
        "start": broken,
        "log": lambda *more: (broken, lambda: None),
        "close": lambda *more: (lambda row: None, broken),
    }
    monkeypatch.setitem(run_folder.LOGGERS, "csv", starts[at])
    log = run_folder.LogFile(new_run(TrainConfig(out_dir=str(tmp_path), log="csv,csv")))
    for step in (1, 2, 3):
        log.keep({"step": step, "loss": 1.0})
    log.close()
    err = capsys.readouterr().err
    assert err.count("warning: csv ") == err.count("warning") == 1 and "no network" in err
    assert len(run_folder.read_log(tmp_path / "log.jsonl")) == 3


def test_wandb_is_finished_before_the_process_ends(start, monkeypatch):
    """And told of an error. A rank ends at once, without what Python does on exit."""
    charts = Mock(id="an id")
    init = Mock(return_value=charts)
    monkeypatch.setitem(sys.modules, "wandb", Mock(init=init))
    assert not start("run", "--max_iters=1 --log=wandb")
    charts.finish.assert_called_once_with(exit_code=0)
    assert not start("run", "--max_iters=2 --init_from=resume")  # the same charts
    assert [call.kwargs["id"] for call in init.mock_calls] == [None, "an id"]
    monkeypatch.setattr(train, "train_step", Mock(side_effect=Failure("no", "a", "step")))
    with pytest.raises(Failure):
        start("failed", "--max_iters=1 --log=wandb")
    charts.finish.assert_called_with(exit_code=1)


def test_tensorboard_and_csv_hold_the_rows_of_the_log(tmp_path, capsys):
    """Also of a run that is resumed after steps that were logged and not saved."""
    out = copy_run(tmp_path / "run")
    first = asdict(TrainConfig(out_dir=str(out)))
    for name in ("tensorboard", "csv"):
        rows = run_folder.read_log(out / "log.jsonl")
        write, close = run_folder.LOGGERS[name](first, {}, rows)
        write({"step": 23, "loss": 9.0})
        close()
    data_dir = prepare_words(tmp_path / "data")
    assert not resume(out, data_dir, "--max_iters=24", "--log=tensorboard,csv")
    assert "warning: tensorboard" not in capsys.readouterr().err

    rows = run_folder.read_log(out / "log.jsonl")
    with open(out / "log.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert terminal.MEASURES.keys() <= table[0].keys()
    assert [int(line["step"]) for line in table] == [row["step"] for row in rows]
    for line, row in zip(table, rows, strict=True):
        values = {key: row[key] for key in line if row.get(key) is not None}
        assert {key: float(line[key]) for key in line if line[key]} == values

    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = events.EventAccumulator(str(out / "tensorboard")).Reload()
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row and row["step"] > 20]
    found = [(each.step, each.value) for each in shown.Scalars("loss")]
    assert found == [(step, pytest.approx(loss)) for step, loss in losses]
    assert [each.step for each in shown.Scalars("val_loss")] == [24]


def test_the_legend_names_each_curve(whole_end):
    rows = [{"step": 0, "train_loss": 2.0, "val_loss": 3.0}, {"step": 1, "loss": 1.0}]
    legend = [line.get_label() for line in run_folder.curves(rows, "").axes[0].lines]
    assert legend == ["training batches 1.000", "train split 2.000", "validation split 3.000"]


def test_the_name_of_a_folder_is_no_formula(tmp_path, whole_end, capsys):
    folder = tmp_path / "$x_{$"
    folder.mkdir()
    run_folder.draw([{"step": 1, "loss": 2.0}], folder / "loss.png", {})
    assert (folder / "loss.png").exists() and not capsys.readouterr().err


def test_a_row_of_the_log_is_of_its_step(data_dir, tmp_path, monkeypatch, capsys):
    """The clock is read after step 1 and with every row; each step takes 0.25 s on it."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(terminal, "time", clock)

    def step(run):
        clock.now += 0.25
        return TRAIN_STEP(run)

    monkeypatch.setattr(train, "train_step", step)
    more = ["--max_iters=4", "--log_interval=2", "--gradient_accumulation_steps=2"]
    argv = arguments(data_dir, tmp_path / "run", *more, "--warmup_iters=2")
    rows = [row for row in train.main(argv).rows if "lr" in row]
    printed = capsys.readouterr().out
    assert "1 s of training, 512 tokens/s" in printed
    assert re.findall(r"iter (\d+): .*, (\S+ \w+) left", printed) == [("2", "0.5 s")]
    again = made(argv)
    for row in rows:
        TRAIN_STEP(again)
        loss, norm = TRAIN_STEP(again)
        assert row == dict(
            step=again.step,
            loss=loss.item(),
            lr=optim.learning_rate(again.step - 1, again.config),
            grad_norm=norm.item(),
            tokens=again.step * 2 * 4 * 16,  # micro-batches of 4 rows of 16 tokens
            seconds=again.step * 0.25,
            milliseconds=250.0,
            tokens_per_second=2 * 4 * 16 / 0.25,
        )
    assert len(rows) == 2
