"""
Is all in order? `python train.py CONFIG --doctor` looks at device, disk, data, model and optimizer, a line each, with the fix
where something is wrong. Steps are those of train.py's own train_step, on copies of the run; nothing is written.
"""

import copy
import math
import os
import tempfile
import time
from dataclasses import replace

import safetensors.torch
import torch

from common.errors import UserError, one_line
from tokens.token_files import FULL_SCAN
from training import parallel
from training.dry_run import room, size
from training.optim import make_optimizers
from training.run_folder import check_out_dir

SEARCHED = 20_000_000  # tokens; a few seconds


def like(run, **changed):
    """A new run from the weights of `run`, which it leaves as they are: eager, with other settings."""
    config, model = replace(run.config, **changed), copy.deepcopy(run.model)
    scaler = torch.amp.GradScaler(
        run.runtime.device.split(":")[0], init_scale=256.0, enabled=run.scaler.is_enabled()
    )  # low: no overflow
    return replace(
        run,
        config=config,
        model=model,
        net=model,
        optimizers=make_optimizers(model, config, run.runtime.device),
        scaler=scaler,
        state={},
    )


def without_dropout(model):
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0


def rounding(runtime):
    """The relative error of a number of a matrix product: TF32 keeps 10 bits."""
    return (
        2**-10
        if runtime.dtype == "float32" and runtime.device.startswith("cuda")
        else torch.finfo(getattr(torch, runtime.dtype)).eps
    )


# ---------------------------------------------------------------- the checks: each returns (whether all is in order, what was found)


def check_device(run, train_step):
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    with run.runtime.autocast():
        c = a.to(run.runtime.device) @ b.to(run.runtime.device)
    exact = a.double() @ b.double()
    error = ((c.cpu().double() - exact).norm() / exact.norm()).item()
    return (
        error < 10 * rounding(run.runtime),
        f"{run.runtime.device}, {run.runtime.dtype}: a matrix product is {error:.0e} off one in float64",
    )


def check_compile(run, train_step):
    if not run.runtime.compile:
        return True, f"not compiled ({run.runtime.reasons[-1].partition('(')[2]}"
    x, y = (
        torch.from_numpy(part).to(run.runtime.device)
        for part in run.batches.get(0, run.config.batch_size)
    )
    losses = []
    for net in (
        run.net,
        run.model,
    ):  # in training mode, as it will run; the seed is that of the dropout
        torch.manual_seed(0)
        with run.runtime.autocast():
            losses.append(net(x, y)[1].item())
    limit = (
        0.02 if getattr(run.model.config, "dropout", 0) else min(0.02, 100 * rounding(run.runtime))
    )  # compiled dropout draws other numbers
    return abs(
        losses[0] / losses[1] - 1
    ) < limit, f"loss {losses[0]:.6f} compiled, {losses[1]:.6f} eager"


def check_disk(run, train_step):
    check_out_dir(run.config.out_dir, run.folder is not None, run.config.overwrite)
    folder, free, needed = room(run)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    return (
        free > needed,
        f"{size(free)} free in {folder}, {size(needed)} needed for four checkpoints",
    )


def check_data(run, train_step):
    """A hundred stretches of each validation split are looked for in its train split, as far as that is searched."""
    good, said = True, [f"fingerprint {run.state['data']}"]
    for source in run.sources:
        tokens = {name: split.learned for name, split in source.splits.items()}
        train, val = tokens["train"][:SEARCHED], tokens["val"]
        text, width, length = train.tobytes(), train.dtype.itemsize, min(64, len(val))
        starts = range(0, len(val) - length + 1, max(1, (len(val) - length) // 100))
        found = sum(
            text.find(val[i : i + length].tobytes()) % width == 0 for i in starts
        )  # -1: nowhere
        good = good and found < max(2, len(starts) / 10)
        where = (
            "the train split"
            if len(tokens["train"]) <= SEARCHED
            else f"the first {SEARCHED:,} tokens of the train split"
        )
        said += [
            "tokens as their sha256 says"
            if len(tokens["train"]) <= FULL_SCAN
            else "tokens too many to hash",
            f"{found} of {len(starts)} stretches of {length} validation tokens are in {where}",
        ]
    return good, "; ".join(said)


@torch.no_grad()
def check_initial_loss(run, train_step):
    """Before training the loss is ln V and what the spread of the logits adds: log Σ exp - mean, whatever the targets are."""
    x, y = (
        torch.from_numpy(part).to(run.runtime.device)
        for part in run.batches.get(0, run.config.batch_size)
    )
    with run.runtime.autocast():
        logits, loss = run.model.eval()(x, y)
    run.model.train()
    logits, loss, even = logits.double(), loss.item(), math.log(run.model.config.vocab_size)
    spread = (logits.logsumexp(-1) - logits.mean(-1)).mean().item() - even
    said = f"loss {loss:.3f}, ln V {even:.3f}, the logits' spread adds {spread:.3f}"
    if run.step or run.config.init_from != "scratch":
        return loss < even, said + " (weights are trained)"
    return spread < 0.5 and abs(loss - even - spread) < 0.2, said


class Fixed:
    """In place of a run's batches: the same n samples, x and y (n, block_size), again and again."""

    def __init__(self, x, y):
        self.x, self.y, self.masked = x, y, bool((y < 0).any())

    def get(self, first, count):
        rows = [k % len(self.x) for k in range(first, first + count)]
        return self.x[rows], self.y[rows]

    def drawn(self, first, count):
        """Nothing is drawn from the data sets of a mixture."""
        return {}


def check_overfit(run, train_step):
    """One batch of at most four samples, at the peak learning rate, until its loss is a tenth of ln V; a minute at most."""
    x, y = run.batches.get(0, min(4, run.config.batch_size))
    tiny = like(
        run,
        batch_size=len(x),
        gradient_accumulation_steps=1,
        schedule="constant",
        warmup_iters=10,
        max_iters=200,
        lr_decay_iters=None,
    )
    tiny.batches, tiny.step = Fixed(x, y), 0
    without_dropout(tiny.model)
    losses, goal, began = [], 0.1 * math.log(run.model.config.vocab_size), time.perf_counter()
    while (
        len(losses) < 200 and (not losses or losses[-1] > goal) and time.perf_counter() - began < 60
    ):
        losses.append(train_step(tiny)[0])
    slow = len(losses) < 200 and losses[-1] < 0.9 * losses[0]  # a large model on a slow device
    return (
        losses[-1] <= goal or slow,
        f"{len(x)} samples: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps at learning_rate={run.config.learning_rate} (wanted: {goal:.3f})",
    )


class Gradients(torch.optim.SGD):
    """In place of an optimizer: keeps the gradients and leaves the weights as they are."""

    def step(self):
        self.kept = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])


def check_accumulation(run, train_step):
    """One batch of four and four micro-batches of one, of which the first have few targets: the same loss, the same gradient."""
    if getattr(run.model.config, "norm", "") == "batchnorm":
        return True, "not compared: batchnorm knows what else is in a batch"
    x, y = run.batches.get(0, 4)
    first = (y >= 0).argmax(1)  # of a pair the answer's; each row keeps that one
    y[0, first[0] + 1 :], y[1, max(first[1] + 1, y.shape[1] // 2) :] = -1, -1
    found = []
    for batch, parts in ((4, 1), (1, 4)):
        other = like(run, batch_size=batch, gradient_accumulation_steps=parts, grad_clip=0.0)
        other.batches, other.optimizers = Fixed(x, y), [Gradients(other.model.parameters(), lr=1.0)]
        without_dropout(other.model)
        found.append((train_step(other)[0], other.optimizers[0].kept))
    (loss, gradient), (loss4, gradient4) = found
    error = ((gradient4 - gradient).norm() / gradient.norm()).item()
    limit = min(0.05, 100 * rounding(run.runtime))
    return (
        error < limit and abs(loss4 / loss - 1) < limit,
        f"loss {loss:.6f} at once, {loss4:.6f} in four micro-batches; gradients {error:.0e} apart",
    )


def same(run, other):
    """Whether two runs have the same weights; on a CPU, where sums have one order, to the last bit."""
    limit = 0 if run.runtime.device == "cpu" else 100 * rounding(run.runtime)
    return all(
        (p.double() - q.double()).norm() <= limit * p.double().norm()
        for p, q in zip(run.model.parameters(), other.model.parameters())
    )


def check_repeat(run, train_step):
    runs = [like(run), like(run)]
    losses = [[train_step(again)[0] for _ in range(2)] for again in runs]
    return (
        same(*runs),
        f"two steps, twice: losses {losses[0][0]:.6f} {losses[0][1]:.6f} and {losses[1][0]:.6f} {losses[1][1]:.6f}",
    )


def check_resume(run, train_step):
    """A step, the bytes of a checkpoint, another step; beside two steps at once."""
    straight, stopped, resumed = like(run), like(run), like(run)
    train_step(straight), train_step(stopped)
    state = [
        safetensors.torch.load(safetensors.torch.save(part))
        for part in parallel.gather(stopped.model, stopped.optimizers, stopped.runtime)
    ]
    resumed.model.load_state_dict(state[0], strict=False)  # a tied weight comes once
    parallel.scatter(resumed.model, resumed.optimizers, state[1])
    resumed.scaler.load_state_dict(stopped.scaler.state_dict())
    resumed.step = stopped.step
    losses = [train_step(again)[0] for again in (straight, resumed)]
    return same(
        straight, resumed
    ), f"the step after a checkpoint: loss {losses[1]:.6f}, without one {losses[0]:.6f}"


CHECKS = {  # name: (check, what to do when it fails)
    "device": (
        check_device,
        "try --dtype=float32, then --device=cpu; other programs' errors on this device would settle it",
    ),
    "compile": (
        check_compile,
        "train with --compile=False, or install a C++ compiler that this torch supports",
    ),
    "disk": (check_disk, "free space, or choose another --out_dir"),
    "data": (
        check_data,
        "a validation loss on text that was trained on says nothing: split by document, and prepare again",
    ),
    "initial loss": (
        check_initial_loss,
        "see init_weights and the last norm; a loss below the other two means that targets leak into the input",
    ),
    "one batch": (
        check_overfit,
        "change --learning_rate (10 times less or more); if none does it, a gradient does not reach the weights",
    ),
    "accumulation": (
        check_accumulation,
        "weigh a micro-batch by its targets, not by its being one of k: see train_step",
    ),
    "determinism": (
        check_repeat,
        "something draws random numbers outside of (seed, step): dropout, batches, or a part of your own",
    ),
    "resume": (
        check_resume,
        "state is missing from the checkpoint: see parallel.gather, and buffers of a part of your own",
    ),
}


def doctor(run, train_step):
    """Print a line for every check, with the fix where one fails. Returns 1 if one does, else 0."""
    if run.runtime.world_size > 1:
        raise UserError(
            "the doctor looks at one process",
            "doctor=True",
            "start it with python, not with torchrun",
        )
    failed = 0
    print()
    for name, (check, fix) in CHECKS.items():
        try:
            good, said = check(run, train_step)
        except Exception as error:  # of any kind: that is what is being looked for
            good, said = False, f"{type(error).__name__}: {one_line(error)}"
        failed += not good
        print(
            f"{name:<14}{'ok    ' if good else 'FAILED'}  {said}" + ("" if good else f": {fix}"),
            flush=True,
        )
    print(
        f"{failed} of {len(CHECKS)} checks failed" if failed else f"all {len(CHECKS)} checks passed"
    )
    return int(failed > 0)
