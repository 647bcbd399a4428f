"""
`python train.py CONFIG --dry_run` prints what a run would cost. Sizes and operations come from the
closed forms of parts/costs.py. Times are measured on steps and an evaluation whose results are
discarded.
"""

import math
import shutil
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from parts.architectures import configure
from parts.costs import activation_bytes, parameters, training_flops_per_token
from parts.variant import VariantConfig
from training.run_folder import duration

STEPS = 20  # timed, after the first


# ---------------------------------------------------------------- sizes


def variant(run):
    """The model's configuration as a VariantConfig, which parts/costs.py reads."""
    c, word = run.learner.model.config, run.config.model
    if isinstance(c, VariantConfig):
        return c
    return configure(asdict(c) | {"model": word, "arch": word})


def memory(run):
    """(bytes of weights, gradients and moments, bytes of activations) on one device."""
    c, config = variant(run), run.config
    item = 4 if run.runtime.dtype == "float32" else 2  # bytes of a number
    if config.activation_checkpointing:  # all of one block, and the inputs of the others
        kept = activation_bytes(replace(c, n_layer=1), config.batch_size, c.block_size, item)
        kept += item * (c.n_layer - 1) * config.batch_size * c.block_size * c.n_embd
    else:
        kept = activation_bytes(c, config.batch_size, c.block_size, item)
    shards = run.runtime.world_size if config.parallel == "fsdp" else 1
    return 16 * parameters(c) // shards, kept


def checkpoint_bytes(run):
    """Bytes of one checkpoint: weights and moments; AdamW has two moments per weight, Muon one."""
    model = run.learner.model
    total = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    for optimizer in run.learner.optimizers:
        moments = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        total += sum(
            moments * p.nbytes for group in optimizer.param_groups for p in group["params"]
        )
    return total


def room(run):
    """(out_dir or the nearest folder above it that exists, bytes free in it, bytes that the run's
    checkpoints need: the last two, the best, and the one being written)."""
    out_dir = Path(run.config.out_dir).absolute()
    folder = next(path for path in (out_dir, *out_dir.parents) if path.exists())
    return folder, shutil.disk_usage(folder).free, 4 * checkpoint_bytes(run)


def size(count):
    """Bytes as text, such as 1.2 GB."""
    power = min(4, int(math.log(max(count, 1), 1000)))
    digits = 1 if power else 0
    return f"{count / 1000**power:.{digits}f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


# ---------------------------------------------------------------- times


def timed(work, *args):
    """The seconds that work(*args) takes."""
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


def time_evaluation(run, score, eval_train_tokens):
    """The seconds of an evaluation, extrapolated from a small one: a full evaluation may read a
    thousand times the tokens of a step."""
    config, block_size = run.config, run.learner.model.config.block_size
    sources = run.data.sources
    val_tokens = [config.eval_tokens or len(source.splits["val"].tokens) for source in sources]
    few = min(
        *val_tokens, eval_train_tokens, 4 * config.batch_size * block_size * run.runtime.world_size
    )
    small = replace(run, config=replace(config, eval_tokens=few))
    score(small)  # warms up
    tokens = sum(val + min(val, eval_train_tokens) for val in val_tokens)
    return timed(score, small) * tokens / (2 * few * len(sources))


def dry_run(run, train_step, score, eval_train_tokens):
    """Print what the run would cost from here on; returns the exit status 0. train_step(run) and
    score(run) are train.py's; score reads up to eval_train_tokens of the train split."""
    config, runtime, c, begin = run.config, run.runtime, variant(run), run.step
    first, *times = [timed(train_step, run) for _ in range(1 + STEPS)]
    step = statistics.median(times)
    start = max(0.0, first - step)
    evaluation = time_evaluation(run, score, eval_train_tokens)

    steps = max(0, config.max_iters - begin)
    evaluations = 1 + sum(n >= begin for n in range(0, config.max_iters, config.eval_interval))
    seconds = steps * step + evaluations * evaluation + start
    tokens = steps * run.step_tokens
    train_tokens = sum(len(source.splits["train"].tokens) for source in run.data.sources)
    (fixed, kept), (folder, free, needed) = memory(run), room(run)
    flops = training_flops_per_token(c, c.block_size)
    if not runtime.main:
        return 0

    speed, slowest = flops * run.step_tokens / step / 1e9, max(times) * 1000
    rows = {
        "parameters": f"{parameters(c):,}",
        "operations": f"{flops / 1e6:,.2f} MFLOP per token, forward and backward; "
        f"{flops * tokens:.2g} FLOP in all",
        "memory": f"{size(fixed + kept)}: weights, gradients and moments {size(fixed)}, "
        f"activations {size(kept)} if eager; the backward pass and libraries take some more",
        "tokens": f"{tokens:,} in {steps:,} steps: {tokens / train_tokens:.2f} epochs",
        "time": f"{duration(seconds)}: {steps:,} steps of {step * 1000:.1f} ms, "
        f"{evaluations} evaluations of {duration(evaluation)}, "
        f"{'compiling' if runtime.compile else 'the first step'} {duration(start)} more",
        "speed": f"{run.step_tokens / step:,.0f} tokens/s, {speed:,.1f} GFLOP/s "
        f"(median of {STEPS} steps of {min(times) * 1000:.1f} to {slowest:.1f} ms)",
        "checkpoints": f"{size(checkpoint_bytes(run))} each, at most four at a time: "
        f"{size(needed)}; {size(free)} free in {folder}",
    }
    print("\nWhat this run would cost (the timed steps are discarded, nothing was written):")
    for name, text in rows.items():
        print(f"  {name:<12} {text}")
    return 0
