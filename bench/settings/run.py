"""
One run of a setting, in a worker process that makes many: train.py's steps and one evaluation at
the end. torch is imported once, not once for each run. Nothing is written but the row, and, of a
run that takes longer than SAVED, a checkpoint from which the next command continues it.
"""

import contextlib
import math
import multiprocessing
import signal
import time
from multiprocessing.connection import wait

import torch

import train
from bench.ablation.fingerprint import start_run
from bench.ablation.runs import LIBC, die_with_parent
from common.errors import one_line
from training import evaluation
from weights import checkpoint

CHECKED = 50  # steps between two checks of the losses
SAVED = 300  # seconds between two checkpoints


def run_once(values, out_dir):
    """The result of a run with these keys of train.py. It continues from its checkpoint in out_dir,
    if there is one.

    {"status": done or diverged, "reason", "val_loss", "val_loss_tune", "val_loss_report",
    "bits_per_byte", "seconds", "cpu_seconds"}

    The losses are in nats per token: of the eval_tokens, of the half of them that chooses rates,
    and of the half that is reported. A run has diverged if a loss or a gradient is not finite, or
    if it ends above the loss of guessing each token alike."""
    began = time.perf_counter()
    cpu_began = time.process_time()
    if checkpoint.steps(out_dir):
        values = {"init_from": "resume"}
    run = start_run(values | {"out_dir": out_dir})
    began -= run.state["seconds"]  # before it was interrupted
    cpu_began -= run.state.get("cpu_seconds", 0.0)
    reason = None
    row = {}
    saved = time.perf_counter()
    try:
        while run.step < run.config.max_iters:
            train.train_step(run)
            if run.step % CHECKED == 0 or run.step == run.config.max_iters:
                train.read_steps(run)
            if time.perf_counter() - saved > SAVED:
                run.state["seconds"] = time.perf_counter() - began
                run.state["cpu_seconds"] = time.process_time() - cpu_began
                train.save(run)
                saved = time.perf_counter()
        row = score(run)
        if not row["val_loss"] <= math.log(run.data.vocab_size):
            reason = f"it ends at {row['val_loss']:.4g} nats, above the loss of guessing"
    except FloatingPointError as error:
        reason = one_line(error)
    return row | {
        "status": "diverged" if reason else "done",
        "reason": reason,
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - cpu_began, 2),
    }


def score(run):
    """The losses of a trained run on eval_tokens of the validation split."""
    val = run.data.splits["val"]
    sums = train.evaluate(run, val, run.config.eval_tokens)
    loss = evaluation.mean_loss(sums)
    halves = evaluation.halves(sums)
    return {
        "val_loss": loss,
        "val_loss_tune": halves.get("val_loss_tune", loss),
        "val_loss_report": halves.get("val_loss_report", loss),
        "bits_per_byte": loss * run.data.bits_per_byte,
    }


# ---------------------------------------------------------------- workers


def serve(connection):
    """A worker process: receive the values of a run, send its result, until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the driver ends the workers
    if LIBC:
        die_with_parent()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            values, out_dir = connection.recv()
            try:
                result = run_once(values, out_dir)
            except Exception as error:  # one run must not end the others
                what = f"{type(error).__name__}: {one_line(error)}"
                result = {"status": "failed", "reason": what}
            connection.send(result)


class Worker:
    """A process that makes one run after the other, each on one thread."""

    def __init__(self):
        self.job = None
        self.begin()

    def begin(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job):
        """Start a job: its `values` are the keys of train.py, and `out_dir` its folder."""
        self.job = job
        if not self.process.is_alive():  # it was killed while it waited
            self.begin()
        self.connection.send((job.values, job.out_dir))

    def result(self):
        """(job, its result), once it has ended. A worker that died is replaced."""
        try:
            result = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            status = self.process.exitcode
            result = {"status": "failed", "reason": f"its process ended with status {status}"}
            self.begin()
        job = self.job
        self.job = None
        return job, result


def ended(workers, seconds):
    """The workers whose job has ended, after at most so many seconds."""
    busy = {worker.connection: worker for worker in workers if worker.job}
    return [busy[connection] for connection in wait(list(busy), seconds)]
