"""What a run survives: signals, kills, full disks, broken files. Every run is tiny."""

import errno
import os
import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import train
from common import errors, files
from common.errors import Failure, UserError
from common.runtime import Runtime, StopRequest
from helpers.runs import equal, losses, refusing, same_runs, weights
from helpers.texts import message
from tokens import batches
from training import net
from weights import checkpoint


@pytest.mark.parametrize(
    "interval, words",
    [(1, "validation loss nan at step 1"), (2, r"gradient norm nan at step 2, learning rate .*")],
)
def test_a_loss_that_is_not_finite_saves_nothing(start, tmp_path, interval, words):
    """Of an evaluation or of a step. A folder without a checkpoint is free."""
    wreck = "--learning_rate=1e30 --min_lr=1e30 --grad_clip=0"
    with pytest.raises(Failure, match=rf"{words} \(no checkpoint yet\): nothing of this step"):
        start("run", f"--eval_interval={interval} {wreck}")
    assert not checkpoint.steps(tmp_path / "run")
    assert (tmp_path / "run" / "diverged.json").exists()
    start("run", "--max_iters=2")
    assert not (tmp_path / "run" / "diverged.json").exists()  # or a sweep counts it as diverged
    assert [step for step, _ in losses(tmp_path / "run", "val_loss")] == [0, 2]


@pytest.mark.parametrize(
    "method, at_call, step",
    [((batches.Batches, "get"), 6, 5), ((batches.Text, "eval_batches"), 5, 6)],
    ids=["in a step", "in an evaluation"],
)
def test_data_that_fail_lose_no_step(
    start, resume, tmp_path, monkeypatch, capsys, method, at_call, step
):
    """The steps since the last checkpoint are saved before the run ends."""
    options = "--max_iters=7 --eval_interval=3 --dropout=0.1"
    start("straight", options)
    real, calls = getattr(*method), []

    def read(*args):
        calls.append(0)
        if len(calls) == at_call:
            raise Failure("the token file shrank", "train.bin", "prepare the data again")
        return real(*args)

    monkeypatch.setattr(*method, read)
    with pytest.raises(Failure, match="the token file shrank") as caught:
        start("cut", options)
    assert f"saved step {step}: --init_from=resume continues from it" in capsys.readouterr().err
    assert caught.value.status == 1 and checkpoint.steps(tmp_path / "cut")[-1] == step
    assert not resume("cut")
    same_runs(tmp_path / "cut", tmp_path / "straight")


def test_a_signal_during_the_agreement_of_the_ranks_is_not_lost(monkeypatch):
    stop = StopRequest()

    def all_reduce(tensor, op):  # Python runs the handler as soon as the call returns
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    two = Runtime("cpu", "float32", 0, 2)
    stop.agreed(two)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: None)
    assert not stop.agreed(two, 9, every=10)  # the ranks do not ask each other at this step
    assert stop.agreed(two, 10, every=10) and stop.status == 143


def test_a_thread_that_can_have_no_signal_handlers_trains(start, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(start, "run", "--max_iters=2").result()
    assert checkpoint.steps(tmp_path / "run") == [2]


def test_a_used_folder_is_refused_or_moved_aside(start, tmp_path):
    start("run", "--max_iters=2")
    old = weights(tmp_path / "run")
    words = "out_dir already contains a run.*resume.*overwrite"
    assert re.search(words, message(start, "run", "--max_iters=2"))
    start("run", "--max_iters=2 --overwrite --seed=5")
    assert equal(weights(tmp_path / "run.old1"), old) and not equal(weights(tmp_path / "run"), old)
    (tmp_path / "run/runs").mkdir()
    words = "overwriting moves the whole of out_dir.*run/runs"
    assert re.search(words, message(start, "run", "--max_iters=2 --overwrite"))
    (tmp_path / "run/runs").rmdir()
    for name in ("log.jsonl", "log.csv", "latest", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("mine")
        assert re.search(
            f"train.py did not write this.*{name}/{name}", message(start, name, "--max_iters=1")
        )
    (tmp_path / "run/config.json").unlink()  # a folder with checkpoints is a run without it, too
    start("run", "--init_from=resume --max_iters=3")
    assert (tmp_path / "run/config.json").exists()


@pytest.mark.parametrize(
    "number, kind, broken, ends",
    [
        (signal.SIGINT, "pipe", ("stdout", "stderr"), 130),  # 2>&1 | tee log
        (signal.SIGHUP, "closed", ("stdout", "stderr"), 129),  # the terminal is closed
        (signal.SIGTERM, "full", ("stdout",), 143),
        (signal.SIGTERM, "pipe", ("stderr",), 143),
        (None, "pipe", ("stdout",), errno.EPIPE),  # | head
        (None, "full", ("stdout", "stderr"), errno.ENOSPC),
    ],
)
def test_a_stop_saves_and_says_so_whatever_its_streams_are(
    start, tmp_path, monkeypatch, capfd, number, kind, broken, ends
):
    real = train.train_step

    def step(run):
        if run.step == 3:
            for name in broken:
                monkeypatch.setattr(sys, name, refusing(kind))
            if number:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)  # as of a shell, or of `timeout`
        return real(run)

    monkeypatch.setattr(train, "train_step", step)
    options = "--max_iters=50 --eval_interval=50"
    if number:
        with pytest.raises(SystemExit) as ended:
            errors.run(lambda argv: start("run", options))
        assert ended.value.code == ends
    else:
        with pytest.raises(OSError) as caught:
            start("run", options)
        assert caught.value.errno == ends
    assert checkpoint.steps(tmp_path / "run") == [4]
    if len(broken) == 1:
        said = capfd.readouterr()
        text = said.err if "stdout" in broken else said.out
        assert re.search(r"stopped after step 4, saved; .*\n.* --init_from=resume ", text)


@pytest.mark.parametrize(
    "function, steps, saved",
    [
        ((train, "evaluate"), 50, [0]),
        ((train, "train_step"), 50, [1]),
        ((checkpoint, "write_files"), 50, [2]),
        ((checkpoint, "write_files"), 2, [2]),  # the last one
    ],
)
def test_a_stop_at_the_start_or_in_a_save(start, tmp_path, monkeypatch, function, steps, saved):
    real = getattr(*function)

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGHUP)
        return real(*arguments)

    monkeypatch.setattr(*function, signalled)
    assert start("run", f"--max_iters={steps} --eval_interval=2") == (129 if steps > 2 else 0)
    assert checkpoint.steps(tmp_path / "run") == saved


def test_a_second_signal_a_moment_later_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    stop = StopRequest()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        stop.note(number, None)
    assert stop.status == 130 and not ended
    stop.noted_at -= stop.TWICE
    stop.note(signal.SIGHUP, None)
    assert not ended
    stop.note(signal.SIGTERM, None)
    assert ended == [143]


def test_a_terminal_that_closes_does_not_stop_what_nohup_started():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == stop.note
    stop.close()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in the background of a script
    assert signal.SIGINT not in StopRequest().handlers


IN_FORWARD = (net.Loss, "forward")


@pytest.mark.parametrize(
    "error, function, norm, saved",
    [
        (OSError(5, "I/O"), IN_FORWARD, "layernorm", [2]),
        (torch.OutOfMemoryError(), IN_FORWARD, "layernorm", [2]),
        (ValueError("no"), IN_FORWARD, "batchnorm", []),
        (ValueError("no"), (train, "update_weights"), "layernorm", []),
    ],
)
def test_an_error_of_any_kind_saves_the_steps_taken(
    start, tmp_path, monkeypatch, error, function, norm, saved
):
    """Unless it left a step half done: in the update, or where the forward pass counts means."""
    calls = []

    def fail(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        return real(*arguments, **more)

    real = getattr(*function)
    monkeypatch.setattr(*function, fail)
    monkeypatch.setattr(train, "evaluate_and_save", lambda *_: None)
    with pytest.raises((Failure, type(error))):
        start("run", f"--max_iters=4 --norm={norm}")
    assert checkpoint.steps(tmp_path / "run") == saved


def test_killed_inside_a_save_leaves_the_last_checkpoint(start, resume, tmp_path, monkeypatch):
    """At whatever file the write stops: what was there is whole; leftovers and later steps go."""
    out = tmp_path / "run"
    start("run", "--max_iters=2")
    real, calls = files.sync, []

    def die(path):
        calls.extend([path] if "ckpt" in str(path) else [])
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(path)

    monkeypatch.setattr(files, "sync", die)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **more: None)  # as after kill -9
    with pytest.raises(KeyboardInterrupt):
        resume("run", "--max_iters=4")
    monkeypatch.undo()
    assert checkpoint.steps(out) == [2] and list(out.glob("ckpt/.*.partial-*"))
    with open(out / "log.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    resume("run", "--max_iters=4")
    assert checkpoint.steps(out) == [2, 4] and len(list(out.glob("ckpt/*"))) == 2
    assert [step for step, _ in losses(out)] == [1, 2, 3, 4]


def test_full_disk_is_one_line_and_the_last_checkpoint_stays(start, resume, tmp_path, monkeypatch):
    out = tmp_path / "run"
    start("run", "--max_iters=2")
    before = weights(out)

    def full(tensors, path, **more):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full)
    words = r"cannot save step 4: No space left on device \(.*000004\): free the disk.*step 2"
    with pytest.raises(Failure, match=words) as caught:
        resume("run", "--max_iters=4")
    assert caught.value.status == 1
    monkeypatch.undo()
    assert equal(weights(out), before) and [path.name for path in out.glob("ckpt/*")] == ["000002"]


@pytest.mark.parametrize(
    "batch, fix",
    [
        (4, "--batch_size=2 --gradient_accumulation_steps=2"),
        (9, "--batch_size=3 --gradient_accumulation_steps=3"),
        (1, "choose a smaller block_size"),
    ],
)
def test_out_of_memory_names_what_would_fit(start, monkeypatch, batch, fix):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
    monkeypatch.setattr(train, "train_step", Mock(side_effect=error))
    with pytest.raises(Failure, match=f"out of memory .*batch_size={batch}.*: {fix}"):
        start("run", f"--max_iters=2 --batch_size={batch}")


def test_a_compiler_that_fails_is_named_with_the_way_out(start, monkeypatch):
    class TooOld(torch._dynamo.exc.ShortenTraceback):
        pass

    error = TooOld("this GPU is too old", first_useful_frame=None)
    monkeypatch.setattr(train, "train_step", Mock(side_effect=error))
    with pytest.raises(Failure, match="fails: this GPU is too old .*: --compile=False"):
        start("run", "--max_iters=2")


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


BROKEN = {  # (file, what becomes of its bytes)
    "flipped bit": ("model.safetensors", flip),
    "flipped tokenizer": ("tokenizer.json", flip),
    "truncated": ("optimizer.safetensors", lambda data: data[:100]),
    "missing file": ("config.json", None),
    "garbage checksums": ("checksums.json", lambda data: b"{"),
    "no checksums": ("checksums.json", lambda data: b"{}"),
    "empty state": ("state.json", lambda data: b""),
}


@pytest.mark.parametrize("name, spoil", BROKEN.values(), ids=BROKEN)
def test_corrupt_checkpoint_is_named_with_the_one_before(start, resume, tmp_path, name, spoil):
    start("run", "--max_iters=4 --eval_interval=2")
    folder = checkpoint.find(tmp_path / "run")
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if spoil:
        (folder / name).write_bytes(spoil(data))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"(corrupt|not whole).*000004.*go back to step 2"):
        resume("run", "--max_iters=6")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shutil.rmtree(folder)  # as the message says
    resume("run", "--max_iters=4")
    assert checkpoint.steps(tmp_path / "run") == [2, 4]
