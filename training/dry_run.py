"""
`python train.py CONFIG --dry_run` prints what a run would cost. Parameters and operations are
counted by parts/costs.py. What the backward pass keeps is counted on the model itself, so
that it is right for every part, number format and device, eager or compiled. Times are measured on
steps and an evaluation whose results are discarded.
"""

import math
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from parts.costs import parameters, training_flops_per_token
from training.report import variant
from training.run_folder import duration

STEPS = 20  # timed, after the first


# ---------------------------------------------------------------- sizes


def kept_bytes(run, net):
    """The bytes that the forward pass of one micro-batch keeps for the backward pass, besides the
    parameters: each tensor once, as it is stored. Under autocast the residual stream, the norms and
    the loss stay in float32, and matrix products keep 16-bit inputs, copies of weights among them.
    Weights that fsdp gathers are gone again: their storage is empty."""
    parts = run.batches.get(0, run.config.batch_size)
    parts = parts[:2] if net is run.model else parts  # the model alone takes no reference of dpo
    inputs = [torch.from_numpy(part) for part in parts]
    unsharded = [p for p in net.parameters() if not hasattr(p, "full_tensor")]
    weights = {p.untyped_storage().data_ptr() for p in unsharded}
    kept = {}  # {place in memory: the storage there}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with run.runtime.autocast(), keeping:
        inputs = [part.to(run.runtime.device) for part in inputs]
        out = net(*inputs)  # noqa: F841, alive until the end, so that no place is used twice
    return sum(storage.nbytes() for storage in kept.values())


def memory(run):
    """An estimate of the bytes that a step holds on one device, by kind. The backward pass starts
    with all activations, and with "loss": what its first operations make. "block" is what it makes
    when activation checkpointing runs a block again; 0 without. Muon's temporaries are left out."""
    config, runtime = run.config, run.runtime
    model, c = run.model, run.model.config
    item = 4 if runtime.dtype == "float32" else 2  # bytes of a number in a matrix product
    tokens, block = config.batch_size * c.block_size, 0
    activations = kept_bytes(run, run.net)

    # Eager, the loss is in float32, and its gradient and that of its input are there at once. The
    # compiled backward pass makes one, in the format of the logits. With a small vocabulary, the
    # gradients inside the last MLP, 4C wide, take more.
    inside = 2 * item * tokens * 4 * c.n_embd
    loss = tokens * c.vocab_size * (item if runtime.compile else 8)

    if config.activation_checkpointing:
        activations += 4 * c.n_layer * tokens * c.n_embd  # the inputs of the blocks
        first, recomputed = model.blocks[0], kept_bytes(run, model)
        checkpointed, first.forward = first.forward, first.forward.args[0]
        block = kept_bytes(run, model) - recomputed + inside
        first.forward = checkpointed

    shards = runtime.world_size if config.parallel == "fsdp" else 1
    return {
        "weights and moments": checkpoint_bytes(run) // shards,
        "gradients": 4 * parameters(variant(run)) // shards,
        "activations": activations,
        "loss": max(loss, inside),
        "block": block,
    }


def peak(run, parts):
    """The bytes of a step's largest moment: the start of the backward pass, or its end, when all
    gradients are there. They are there at its start too if an earlier micro-batch or the buckets of
    DDP hold them."""
    gradients, block = parts["gradients"], parts["block"]
    start = parts["activations"] + max(parts["loss"], block)
    if max(run.config.gradient_accumulation_steps, run.runtime.world_size) > 1:
        start += gradients
    return parts["weights and moments"] + max(gradients + block, start)


def memory_text(run, measured):
    """The row of the memory; `measured` is the peak on a GPU, None elsewhere."""
    parts = memory(run)
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    most = size(peak(run, parts))
    if measured is None:
        return f"about {most} at the peak, an estimate: {listed}"
    return f"{size(measured)} at the peak, measured ({most} estimated: {listed})"


def checkpoint_bytes(run):
    """Bytes of one checkpoint: weights and moments; AdamW has two moments per weight, Muon one."""
    tensors = [*run.model.parameters(), *run.model.buffers()]
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            tensors += group["params"] * optimizer.moments
    return sum(tensor.nbytes for tensor in tensors)


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


def timed(work, run):
    """The seconds that work(run) takes, until a GPU has finished too."""
    began = time.perf_counter()
    work(run)
    if run.runtime.device.startswith("cuda"):
        torch.cuda.synchronize(run.runtime.device)
    return time.perf_counter() - began


def time_evaluation(run, score, eval_train_tokens):
    """(the seconds of an evaluation, how many more the last one takes if it alone scores the whole
    split), extrapolated from a small one: a full evaluation may read a thousand times the tokens
    of a step."""
    config, batch = run.config, run.config.batch_size * run.model.config.block_size
    whole = [len(source.splits["val"].tokens) for source in run.sources]
    val_tokens = [min(config.eval_tokens or tokens, tokens) for tokens in whole]
    few = min(*val_tokens, eval_train_tokens, 4 * batch * run.runtime.world_size)
    small = replace(run, config=replace(config, eval_tokens=few))
    score(small)  # warms up
    tokens = sum(val + min(val, eval_train_tokens) for val in val_tokens)
    per_token = timed(score, small) / (2 * few * len(run.sources))
    return per_token * tokens, per_token * sum(whole) * bool(config.eval_tokens)


def dry_run(run, train_step, score, eval_train_tokens):
    """Print what the run would cost from here on; returns the exit status 0. train_step(run) and
    score(run) are train.py's; score reads up to eval_train_tokens of the train split."""
    config, runtime, c, begin = run.config, run.runtime, variant(run), run.step
    first, *times = [timed(train_step, run) for _ in range(1 + STEPS)]
    on_gpu = runtime.device.startswith("cuda")
    measured = torch.cuda.max_memory_allocated(runtime.device) if on_gpu else None
    step = statistics.median(times)
    start = max(0.0, first - step)
    evaluation, last = time_evaluation(run, score, eval_train_tokens)

    steps = max(0, config.max_iters - begin)
    next_due = begin + (run.state.get("evaluated") == begin)
    evaluations = 1 + sum(n >= next_due for n in range(0, config.max_iters, config.eval_interval))
    seconds = duration(steps * step + evaluations * evaluation + last + start)
    tokens = steps * run.step_tokens
    flops = training_flops_per_token(c, c.block_size)
    memory_row, (folder, free, needed) = memory_text(run, measured), room(run)
    if not runtime.main:
        return 0

    per_second = f"{run.step_tokens / step:,.0f} tokens/s"
    extra = f"{'compiling' if runtime.compile else 'the first step'} {duration(start)} more"
    evaluated = f"{evaluations} evaluations of {duration(evaluation)}"
    evaluated += f" and {duration(last)} more for the last" if last else ""
    rows = {
        "parameters": f"{parameters(c):,}",
        "operations": f"{flops / 1e6:,.2f} MFLOP per token, {flops * tokens:.2g} FLOP in all",
        "memory": memory_row,
        "tokens": f"{tokens:,} in {steps:,} steps",
        "time": f"{seconds}: {steps:,} steps of {step * 1000:.1f} ms, {evaluated}, {extra}",
        "speed": f"{per_second}, {flops * run.step_tokens / step / 1e9:,.1f} GFLOP/s",
        "checkpoints": f"{size(needed // 4)} each, at most four at a time; "
        f"{size(free)} free in {folder}",
    }
    print("\nWhat this run would cost (the timed steps are discarded, nothing was written):")
    for name, text in rows.items():
        print(f"  {name:<12} {text}")
    return 0
