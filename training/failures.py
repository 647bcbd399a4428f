"""Failures of a run: each is reported in one line, and no step is lost."""

import json
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from common import files
from common.errors import Failure
from weights import checkpoint

DIVERGED = "diverged.json"  # in the folder of a run whose loss or gradient was not finite


@contextmanager
def explained(run):
    """Turn an expected kind of error into a Failure of one line. Of a loss that is not finite, the
    run folder keeps a note until the run is continued: a sweep counts it as a result."""
    try:
        yield
    except (FloatingPointError, RuntimeError) as error:
        if isinstance(error, FloatingPointError) and run.config.trains and run.runtime.main:
            note = {"step": run.step, "reason": str(error)}
            with suppress(Failure):  # a full disk
                files.write(Path(run.config.out_dir) / DIVERGED, json.dumps(note))
        failure = explain(error, run)
        if failure is None:
            raise
        raise failure from error


@contextmanager
def no_step_lost(run, save):
    """Call save(run) if reading or writing a file fails between two steps, such as a log on a full
    disk. With several ranks nothing is saved: that needs all of them, and one has failed."""
    try:
        yield
    except Failure:
        if run.runtime.world_size == 1 and run.step > (run.saved or 0):
            with suppress(Failure):  # the failure may have been a save
                save(run)
                print(f"saved step {run.step}: --init_from=resume continues from it")
        raise


def explain(error, run):
    """The Failure that describes what ended a run; None if `error` is of an unexpected kind."""
    config, text = run.config, str(error)
    saved = checkpoint.steps(config.out_dir)
    good = "no checkpoint yet"
    if saved:
        good = f"last good checkpoint: {Path(config.out_dir) / 'ckpt' / f'{saved[-1]:06d}'}"

    if isinstance(error, FloatingPointError):
        return Failure(text, good, "nothing of this step was kept; try a lower learning_rate")

    if isinstance(error, torch.OutOfMemoryError) or "alloc_cpu" in text:
        half = max(1, config.batch_size // 2)
        steps = config.gradient_accumulation_steps * config.batch_size // half
        smaller = f"--batch_size={half} --gradient_accumulation_steps={steps}"
        fix = f"{smaller} takes the same steps in less memory"
        if config.batch_size == 1:
            fix = "choose a smaller block_size or model, or --activation_checkpointing"
        sizes = f"batch_size={config.batch_size}, block_size={run.learner.model.config.block_size}"
        return Failure("out of memory", sizes, fix)

    words = ("onnection", "peer", "NCCL")
    if run.runtime.world_size > 1 and any(word in text for word in words):
        lost = f"rank {run.runtime.rank} lost another rank"
        return Failure(lost, good, "continue with --init_from=resume")
    return None
