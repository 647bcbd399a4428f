"""
What would a run cost?

    python -m extras.dry_run config/gpt2_124m.py --batch_size=8

prints parameters, operations, memory, time and disk. The arguments are train.py's. It writes
nothing but a small dataset that is missing. Parameters and operations are counted by
parts/costs.py. What the backward pass keeps is counted on the model itself, so that it is right for
every part, number format and device, eager or compiled. Times are measured on steps and an
evaluation whose results are discarded.
"""

import statistics
from dataclasses import replace

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.dry_run")

import torch

import train
from common import errors
from parts.costs import parameters, training_flops_per_token
from training import terminal
from training.description import describe, variant_config
from training.run_folder import duration
from training.settings import read_config
from training.step_costs import checkpoint_bytes, kept_bytes, room, size, timed

STEPS = 20  # timed, after the first


def read(argv):
    """The Settings of a command line."""
    return read_config(argv, __doc__, program="extras.dry_run")


def main(argv):
    """Print what the run of a command line would cost. Returns the exit status."""
    settings = read(argv)
    run = train.make_run(settings, train.start_runtime(settings))
    if run.runtime.main:
        describe(run)
    with terminal.explained(run):
        return dry_run(run)


# ---------------------------------------------------------------- sizes


def memory(run):
    """An estimate of the bytes that a step holds on one device, by kind. The backward pass starts
    with all activations, and with "loss": what its first operations make. "block" is what it makes
    when activation checkpointing runs a block again; 0 without. Muon's temporaries are left out."""
    config = run.config
    runtime = run.runtime
    model = run.model
    c = model.config
    item = 4 if runtime.dtype == "float32" else 2  # bytes of a number in a matrix product
    tokens = config.batch_size * c.block_size
    block = 0
    activations = kept_bytes(run, run.net)

    # Eager, the loss is in float32, with two gradients at once: its own and its input's. The
    # compiled backward pass makes one, in the format of the logits. With a small vocabulary, the
    # gradients inside the last MLP, 4C wide, take more.
    inside = 2 * item * tokens * 4 * c.n_embd
    loss = tokens * c.vocab_size * (item if runtime.compile else 8)

    if config.activation_checkpointing:
        activations += 4 * c.n_layer * tokens * c.n_embd  # the inputs of the blocks
        recomputed = kept_bytes(run, model)
        first = model.blocks[0]
        checkpointed = first.forward
        first.forward = checkpointed.args[0]
        block = kept_bytes(run, model) - recomputed + inside
        first.forward = checkpointed

    shards = runtime.world_size if config.parallel == "fsdp" else 1
    return {
        "weights and moments": checkpoint_bytes(run) // shards,
        "gradients": 4 * parameters(variant_config(run)) // shards,
        "activations": activations,
        "loss": max(loss, inside),
        "block": block,
    }


def peak(run, parts):
    """The most bytes that a step holds at once: at the start of the backward pass, or at its end,
    when it has made all gradients. They exist at its start too, after an earlier micro-batch or in
    the buckets of DDP."""
    gradients = parts["gradients"]
    block = parts["block"]
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


# ---------------------------------------------------------------- times


def time_evaluation(run):
    """(the seconds of an evaluation, how many more the last one takes if it alone scores the whole
    split), extrapolated from a small one: a full evaluation may read a thousand times the tokens
    of a step."""
    config = run.config
    whole = len(run.data.splits["val"].tokens)
    limit = config.eval_tokens or whole
    val_tokens = min(limit, whole)
    batch = config.batch_size * run.model.config.block_size
    few = min(val_tokens, train.EVAL_TRAIN_TOKENS, 4 * batch * run.runtime.world_size)
    small = replace(run, config=replace(config, eval_tokens=few))
    train.score(small)  # warms up
    per_token = timed(train.score, small) / (2 * few)
    seconds = per_token * (val_tokens + min(val_tokens, train.EVAL_TRAIN_TOKENS))
    last = per_token * whole if limit < whole else 0.0
    return seconds, last


def dry_run(run):
    """Print what the run would cost from here on; returns the exit status 0."""
    config = run.config
    runtime = run.runtime
    begin = run.step
    first, *times = [timed(train.train_step, run) for _ in range(1 + STEPS)]
    measured = None
    if runtime.device.startswith("cuda"):
        measured = torch.cuda.max_memory_allocated(runtime.device)
    step = statistics.median(times)
    start = max(0.0, first - step)
    evaluation, last = time_evaluation(run)

    c = variant_config(run)
    steps = max(0, config.max_iters - begin)
    next_due = begin
    if run.state.get("evaluated") == begin:
        next_due += 1
    evaluations = sum(n >= next_due for n in range(0, config.max_iters, config.eval_interval))
    if next_due <= config.max_iters:
        evaluations += 1  # the last one
    else:
        last = 0.0
    seconds = duration(steps * step + evaluations * evaluation + last + start)
    tokens = steps * run.step_tokens
    flops = training_flops_per_token(c, c.block_size)
    memory_row = memory_text(run, measured)
    folder, free, needed = room(run)
    if not runtime.main:
        return 0

    evaluated = f"{evaluations} evaluations of {duration(evaluation)}"
    if last:
        evaluated += f" and {duration(last)} more for the last"
    extra = f"{'compiling' if runtime.compile else 'the first step'} {duration(start)} more"
    per_second = f"{run.step_tokens / step:,.0f} tokens/s"
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
    print("\nWhat this run would cost (the timed steps are discarded):")
    for name, text in rows.items():
        print(errors.printable(f"  {name:<12} {text}"))
    return 0


if __name__ == "__main__":
    errors.run(main)
