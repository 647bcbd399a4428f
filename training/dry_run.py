"""
What a run would cost, before it is begun: `python train.py CONFIG --dry_run`. Sizes and operations are those of costs.py's
closed forms; seconds are measured, on steps and an evaluation that are thrown away.
"""

import math
import shutil
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common.configurator import build
from parts.architectures import choose
from parts.costs import activation_bytes, parameters, training_flops_per_token
from parts.variant import VariantConfig

STEPS = 20  # timed, after the first


def variant(run):
    """The model's configuration as that of a Variant, in which costs.py reads all models."""
    c, word = run.model.config, run.config.model
    return (
        c
        if isinstance(c, VariantConfig)
        else build(VariantConfig, choose(asdict(c) | {"model": word, "arch": word})[2])
    )


def splits(run):
    """[{"train", "val": token ids}] of the data sets of a run."""
    return [{name: split.tokens for name, split in source.splits.items()} for source in run.sources]


def memory(run):
    """(bytes of weights, gradients and moments, bytes of activations) on one device."""
    c, config = variant(run), run.config
    number = 4 if run.runtime.dtype == "float32" else 2  # bytes
    if config.activation_checkpointing:  # what is inside one block, and what goes into the others
        kept = activation_bytes(replace(c, n_layer=1), config.batch_size, c.block_size, number)
        kept += number * (c.n_layer - 1) * config.batch_size * c.block_size * c.n_embd
    else:
        kept = activation_bytes(c, config.batch_size, c.block_size, number)
    return 16 * parameters(c) // (run.runtime.world_size if config.parallel == "fsdp" else 1), kept


def checkpoint_bytes(run):
    """Bytes of one checkpoint: weights and moments, of which AdamW has two per weight and Muon one."""
    moments = [
        (p, 1 if isinstance(optimizer, torch.optim.Muon) else 2)
        for optimizer in run.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return sum(
        p.numel() * p.element_size() * n
        for p, n in [*((p, 1) for p in (*run.model.parameters(), *run.model.buffers())), *moments]
    )


def room(run):
    """(out_dir or the nearest folder above it that is there, bytes free in it, bytes that the run's checkpoints need: the
    last two, the best, and the one being written)."""
    out_dir = Path(run.config.out_dir).absolute()
    folder = next(path for path in (out_dir, *out_dir.parents) if path.exists())
    return folder, shutil.disk_usage(folder).free, 4 * checkpoint_bytes(run)


def size(count):
    """Bytes for people, as in 1.2 GB."""
    power = min(4, int(math.log(max(count, 1), 1000)))
    return f"{count / 1000**power:.{1 if power else 0}f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds):
    """Seconds for people, as in 3.5 h."""
    unit, name = next(
        (unit, name)
        for unit, name in ((172800, "days"), (7200, "h"), (120, "min"), (0, "s"))
        if seconds >= unit
    )
    return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60, 's': 1}[name]:.{1 if seconds >= 0.1 else 3}f} {name}"


def timed(work, *args):
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


def dry_run(run, train_step, score, eval_train_tokens):
    """Print what the run would cost from here on; returns the exit status 0. train_step(run) and score(run) are train.py's;
    score reads up to eval_train_tokens of the train split."""
    config, begin, c = run.config, run.step, variant(run)
    first, *times = [timed(train_step, run) for _ in range(1 + STEPS)]
    step = statistics.median(times)
    # A small evaluation, scaled: a whole one may read a thousand times the tokens of a step. The first one warms up.
    sets = splits(run)
    whole = [config.eval_tokens or len(tokens["val"]) for tokens in sets]
    few = min(
        *whole, eval_train_tokens, 4 * config.batch_size * c.block_size * run.runtime.world_size
    )
    small = replace(run, config=replace(config, eval_tokens=few))
    score(small)
    evaluation = (
        timed(score, small)
        * sum(val + min(val, eval_train_tokens) for val in whole)
        / (2 * few * len(sets))
    )
    evaluations = 1 + sum(at >= begin for at in range(0, config.max_iters, config.eval_interval))
    steps, start = max(0, config.max_iters - begin), max(0.0, first - step)
    seconds = steps * step + evaluations * evaluation + start
    (fixed, kept), (folder, free, needed) = memory(run), room(run)
    flops = training_flops_per_token(c, c.block_size)
    if run.runtime.main:
        print(
            "\nWhat this run would cost (the steps that were timed are thrown away, nothing was written):"
        )
        for name, text in {
            "parameters": f"{parameters(c):,}",
            "operations": f"{flops / 1e6:,.2f} MFLOP per token, forward and backward; {flops * run.step_tokens * steps:.2g} FLOP in all",
            "memory": f"{size(fixed + kept)}: weights, gradients and moments {size(fixed)}, activations {size(kept)} if eager; the backward pass and libraries take some more",
            "tokens": f"{steps * run.step_tokens:,} in {steps:,} steps: {steps * run.step_tokens / sum(len(tokens['train']) for tokens in sets):.2f} epochs",
            "time": f"{duration(seconds)}: {steps:,} steps of {step * 1000:.1f} ms, {evaluations} evaluations of {duration(evaluation)}, "
            f"{'compiling' if run.runtime.compile else 'the first step'} {duration(start)} more",
            "speed": f"{run.step_tokens / step:,.0f} tokens/s, {flops * run.step_tokens / step / 1e9:,.1f} GFLOP/s (median of {STEPS} steps of {min(times) * 1000:.1f} to {max(times) * 1000:.1f} ms)",
            "checkpoints": f"{size(checkpoint_bytes(run))} each, at most four at a time: {size(needed)}; {size(free)} free in {folder}",
        }.items():
            print(f"  {name:<12} {text}")
    return 0
