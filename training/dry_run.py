"""
`python train.py CONFIG --dry_run` prints what a run would cost. Parameters and operations come from
the closed forms of parts/costs.py. What the backward pass keeps is counted on the model itself, so
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
    """The bytes that the forward pass of one micro-batch keeps for the backward pass. Under
    autocast the residual stream, the norms and the loss stay in float32, and matrix products keep
    16-bit inputs, the copies of the weights among them."""
    batch = run.batches.get(0, run.config.batch_size)
    inputs = [torch.from_numpy(part).to(run.runtime.device) for part in batch]
    with run.runtime.autocast():
        return kept_of(net, *inputs)


def kept_of(net, *inputs):
    """The bytes that net(*inputs) keeps for the backward pass, besides the parameters. Each tensor
    counts once, as it is stored. Weights that fsdp gathers are gone again, their storage is
    empty."""
    whole = [p for p in net.parameters() if not hasattr(p, "full_tensor")]
    own = {p.untyped_storage().data_ptr() for p in whole}
    kept = {}  # a place in memory: the storage there

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
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
    # compiled backward pass makes one, in the format of the logits. With few words, the gradients
    # inside the last MLP, 4C wide, take more.
    inside = 2 * item * tokens * 4 * c.n_embd
    loss = tokens * c.vocab_size * (item if runtime.compile else 8)

    if config.activation_checkpointing:
        activations += 4 * c.n_layer * tokens * c.n_embd  # the inputs of the blocks
        first, without_it = model.blocks[0], kept_bytes(run, model)
        again, first.forward = first.forward, first.forward.args[0]
        block = kept_bytes(run, model) - without_it + inside
        first.forward = again

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
    model = run.model
    total = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    for optimizer in run.optimizers:
        total += sum(
            optimizer.moments * p.nbytes
            for group in optimizer.param_groups
            for p in group["params"]
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


def timed(work, run, *args):
    """The seconds that work(run, *args) takes, until a GPU has finished too."""
    began = time.perf_counter()
    work(run, *args)
    if run.runtime.device.startswith("cuda"):
        torch.cuda.synchronize(run.runtime.device)
    return time.perf_counter() - began


def time_evaluation(run, score, eval_train_tokens):
    """The seconds of an evaluation, extrapolated from a small one: a full evaluation may read a
    thousand times the tokens of a step."""
    config, block_size = run.config, run.model.config.block_size
    sources = run.sources
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
    measured = None
    if runtime.device.startswith("cuda"):
        measured = torch.cuda.max_memory_allocated(runtime.device)
    step = statistics.median(times)
    start = max(0.0, first - step)
    evaluation = time_evaluation(run, score, eval_train_tokens)

    steps = max(0, config.max_iters - begin)
    evaluations = 1 + sum(n >= begin for n in range(0, config.max_iters, config.eval_interval))
    seconds = steps * step + evaluations * evaluation + start
    tokens = steps * run.step_tokens
    train_tokens = sum(len(source.splits["train"].tokens) for source in run.sources)
    memory_row, (folder, free, needed) = memory_text(run, measured), room(run)
    flops = training_flops_per_token(c, c.block_size)
    if not runtime.main:
        return 0

    speed, slowest = flops * run.step_tokens / step / 1e9, max(times) * 1000
    rows = {
        "parameters": f"{parameters(c):,}",
        "operations": f"{flops / 1e6:,.2f} MFLOP per token, forward and backward; "
        f"{flops * tokens:.2g} FLOP in all",
        "memory": memory_row,
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
