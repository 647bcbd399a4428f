"""
Is a run healthy?

    python -m extras.doctor
    python -m extras.doctor config/gpt2_124m.py --compile=False

checks device, disk, data, model and optimizer, and prints a line for each, with a fix if something
is wrong. The arguments are train.py's; without a config file, a dataset or weights, it checks the
run of README's first command. It takes steps by train.train_step, on copies of the run, and writes
nothing but a small dataset that is missing.
"""

import copy
import math
import os
import tempfile
import time
from dataclasses import replace

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.doctor")

import safetensors.torch
import torch

import train
from common import errors
from common.errors import UserError, folded, one_line
from training import ranks, terminal
from training.description import describe
from training.net import Loss, recompute_blocks
from training.optim import make_optimizers
from training.run_folder import check_out_dir
from training.settings import read_config
from training.step_costs import room, size

QUICKSTART = "config/llama_shakespeare.py"  # README's first command
SEARCHED = 20_000_000  # tokens of the train split searched for validation text
OVERFIT_STEPS = 200
OVERFIT_SECONDS = 60


def read(argv):
    """The Settings of a command line; of the QUICKSTART if it names nothing to train."""
    keys = {word.partition("=")[0] for word in argv}
    has_file = any(word.endswith(".py") and not word.startswith("-") for word in argv)
    if not has_file and keys.isdisjoint({"--dataset", "--init_from"}):
        argv = [QUICKSTART, *argv]
    return read_config(argv, __doc__, program="extras.doctor")


def main(argv):
    """Check the run of a command line. Returns the exit status."""
    settings = read(argv)
    runtime = train.start_runtime(settings)
    if runtime.world_size > 1:
        fix = "start it with python, not with torchrun"
        raise UserError("the doctor checks a single process", "torchrun", fix)
    run = train.make_run(settings, runtime)
    describe(run)
    with terminal.explained(run):
        return doctor(run)


# ---------------------------------------------------------------- copies of a run


def like(run, samples=None, **changed):
    """A new, eager run on a copy of the weights of `run`, with other settings or samples."""
    config = replace(run.config, **changed)
    model = copy.deepcopy(run.model)
    if config.activation_checkpointing:  # or a block would compute with the weights of `run`
        for block in model.blocks:
            del block.forward
        recompute_blocks(model, run.runtime)
    kind = run.runtime.device_kind
    scale = 256.0  # of a float16 loss: so low that nothing overflows
    return replace(
        run,
        config=config,
        model=model,
        loss_module=Loss(model),
        net=Loss(model),
        optimizers=make_optimizers(model, config, run.runtime),
        scaler=torch.amp.GradScaler(kind, init_scale=scale, enabled=run.scaler.is_enabled()),
        samples=samples or run.samples,
        state={},
        unread=[],
    )


class Fixed:
    """The same n samples, x and y (n, block_size), repeated endlessly."""

    def __init__(self, x, y):
        self.x = x
        self.y = y
        self.masked = bool((y < 0).any())

    def get(self, first, count):
        rows = [k % len(self.x) for k in range(first, first + count)]
        return self.x[rows], self.y[rows]


def first_batch(run):
    """x and y (batch_size, block_size) of the first batch, on the device."""
    batch = run.samples.get(0, run.config.batch_size)
    return [torch.from_numpy(part).to(run.runtime.device) for part in batch]


def without_dropout(model):
    """Turn off the dropout of a model, even in training mode."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def rounding(runtime):
    """The relative rounding error of a matrix product in this number format; TF32 keeps 10 bits."""
    if runtime.dtype == "float32" and runtime.device.startswith("cuda"):
        return 2**-10
    return torch.finfo(getattr(torch, runtime.dtype)).eps


# ---------------------------------------------------------------- the checks
# Each takes a run and returns (whether the check passes, a description of the result).


def check_device(run):
    """Compare a matrix product with the same one in float64."""
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    with run.runtime.autocast():
        product = a.to(run.runtime.device) @ b.to(run.runtime.device)
    exact = a.double() @ b.double()
    error = ((product.cpu().double() - exact).norm() / exact.norm()).item()
    where = f"{run.runtime.device}, {run.runtime.dtype}"
    good = error < 10 * rounding(run.runtime)
    return good, f"{where}: a matrix product is {error:.0e} off one in float64"


def check_compile(run):
    """Compare the loss of the compiled model with the loss of the eager one."""
    runtime = run.runtime
    if not runtime.compile:
        return True, "not compiled"
    x, y = first_batch(run)
    losses = []
    # Both in training mode. The blocks of run.model are compiled in place on a CPU.
    for net in (run.net, like(run).net):
        torch.manual_seed(0)  # of the dropout
        with runtime.autocast():
            losses.append(net(x, y).item())
    compiled, eager = losses

    drops = getattr(run.model.config, "dropout", 0)  # compiled, it draws other random numbers
    limit = 0.02 if drops else min(0.02, 100 * rounding(runtime))
    return abs(compiled / eager - 1) < limit, f"loss {compiled:.6f} compiled, {eager:.6f} eager"


def check_disk(run):
    """Check that runs can be written to out_dir, that a flushed write works, and that four
    checkpoints fit. A finished run in out_dir is no fault."""
    check_out_dir(run.config.out_dir, resuming=True)
    folder, free, needed = room(run)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    return free > needed, f"{size(free)} free in {folder}, {size(needed)} needed"


def check_data(run):
    """Look for about a hundred pieces of the validation text in the start of the train split."""
    text = run.data.splits["train"].learned[:SEARCHED]
    val = run.data.splits["val"].learned
    length = min(64, len(val))
    starts = range(0, len(val) - length + 1, max(1, (len(val) - length) // 100))
    searched = text.tobytes()
    places = [searched.find(val[i : i + length].tobytes()) for i in starts]
    copies = sum(place >= 0 and place % text.dtype.itemsize == 0 for place in places)
    good = copies < max(2, len(starts) / 10)
    return good, f"{copies} of {len(starts)} pieces of validation text are in the train split"


@torch.no_grad()
def check_initial_loss(run):
    """Check that the loss before training is ln V plus the contribution of the logits' spread,
    which is log Σ exp - mean - ln V for targets that do not depend on the logits."""
    model = run.model
    x, y = first_batch(run)
    with run.runtime.autocast():
        logits, loss = model.eval()(x, y)
    model.train()

    loss = loss.item()
    uniform = math.log(model.config.vocab_size)
    spreads = []
    for row in logits:  # (T, V); the whole batch in float64 may not fit into memory
        row = row.cpu().double()  # Metal has no float64
        spreads.append((row.logsumexp(-1) - row.mean(-1)).mean().item())
    spread = sum(spreads) / len(spreads) - uniform
    text = f"loss {loss:.3f}, ln V {uniform:.3f}, the logits' spread adds {spread:.3f}"
    if run.step or run.config.init_from != "scratch":
        return loss < uniform, f"{text} (weights are trained)"
    return spread < 0.5 and abs(loss - uniform - spread) < 0.2, text


def check_overfit(run):
    """Train on one batch of at most four samples, at the peak learning rate, until its loss is a
    tenth of ln V."""
    x, y = run.samples.get(0, min(4, run.config.batch_size))
    changed = dict(batch_size=len(x), gradient_accumulation_steps=1, schedule="constant")
    changed |= dict(warmup_iters=10, max_iters=OVERFIT_STEPS, lr_decay_iters=None)
    tiny = like(run, Fixed(x, y), **changed)
    tiny.step = 0
    without_dropout(tiny.model)

    goal = 0.1 * math.log(run.model.config.vocab_size)
    began = time.perf_counter()
    losses = [train.train_step(tiny)[0].item()]
    while losses[-1] > goal and len(losses) < OVERFIT_STEPS:
        if time.perf_counter() - began > OVERFIT_SECONDS:
            break
        losses.append(train.train_step(tiny)[0].item())

    # A large model on a slow device passes if its loss falls by a tenth.
    slow = len(losses) < OVERFIT_STEPS and losses[-1] < 0.9 * losses[0]
    fall = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"
    text = f"{fall} at learning_rate={run.config.learning_rate} (goal: {goal:.3f})"
    return losses[-1] <= goal or slow, text


class Gradients(torch.optim.SGD):
    """An optimizer that keeps the gradients and leaves the weights as they are."""

    def step(self):
        self.kept = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])


def check_accumulation(run):
    """Compare the loss and gradient of one batch of four samples with the sums over four
    micro-batches of one. The first two samples have few targets."""
    config = run.model.config
    balanced = getattr(config, "mlp", "").startswith("moe") and config.moe_balance == "loss"
    if balanced or getattr(config, "norm", "") == "batchnorm":
        what = "the experts' balance loss" if balanced else "batchnorm"
        return True, f"not compared: {what} depends on what else is in a batch"
    x, y = run.samples.get(0, 4)
    first = (y >= 0).argmax(1)  # the first target of each row, which stays
    y[0, first[0] + 1 :] = -1
    y[1, max(first[1] + 1, y.shape[1] // 2) :] = -1

    results = []
    for batch_size, count in ((4, 1), (1, 4)):
        sizes = dict(batch_size=batch_size, gradient_accumulation_steps=count, grad_clip=0.0)
        other = like(run, Fixed(x, y), **sizes)
        other.optimizers = [Gradients(other.model.parameters(), lr=1.0)]
        without_dropout(other.model)
        results.append((train.train_step(other)[0].item(), other.optimizers[0].kept))
    (loss, gradient), (loss4, gradient4) = results

    error = ((gradient4 - gradient).norm() / gradient.norm()).item()
    limit = min(0.05, 100 * rounding(run.runtime))
    losses = f"loss {loss:.6f} at once, {loss4:.6f} in four micro-batches"
    good = error < limit and abs(loss4 / loss - 1) < limit
    return good, f"{losses}; gradients {error:.0e} apart"


def same_weights(run, other):
    """Whether two runs have the same weights. On a CPU, where sums have a fixed order, they must
    agree bit for bit."""
    limit = 0 if run.runtime.device == "cpu" else 100 * rounding(run.runtime)
    for parameter, its_twin in zip(run.model.parameters(), other.model.parameters(), strict=True):
        p = parameter.cpu().double()
        if (p - its_twin.cpu().double()).norm() > limit * p.norm():
            return False
    return True


def check_repeat(run):
    """Take the same two steps twice, and compare the weights."""
    runs = [like(run), like(run)]
    losses = [
        " ".join(f"{train.train_step(copy)[0].item():.6f}" for _ in range(2)) for copy in runs
    ]
    return same_weights(*runs), f"two steps, twice: losses {losses[0]} and {losses[1]}"


def check_resume(run):
    """Take two steps, without and with a checkpoint in memory between them, and compare the
    weights."""
    straight = like(run)
    stopped = like(run)
    resumed = like(run)
    train.train_step(straight)
    train.train_step(stopped)

    tensors = ranks.gather(stopped.model, stopped.optimizers, stopped.runtime)
    weights, moments = (safetensors.torch.load(safetensors.torch.save(part)) for part in tensors)
    resumed.model.load_state_dict(weights, strict=False)  # a tied weight is stored once
    ranks.scatter(resumed.model, resumed.optimizers, moments)
    resumed.scaler.load_state_dict(stopped.scaler.state_dict())
    resumed.step = stopped.step

    without, after = (train.train_step(other)[0].item() for other in (straight, resumed))
    losses = f"the step after a checkpoint: loss {after:.6f}, without one {without:.6f}"
    return same_weights(straight, resumed), losses


CHECKS = {  # name: (check, what to do when it fails)
    "device": (check_device, "try --dtype=float32, then --device=cpu"),
    "compile": (check_compile, "train with --compile=False, or install another compiler"),
    "disk": (check_disk, "free space, or choose another --out_dir"),
    "data": (check_data, "split the text by document, and prepare it again"),
    "initial loss": (check_initial_loss, "see init_weights; if it is below ln V, targets leak"),
    "one batch": (check_overfit, "change --learning_rate, or look for weights without a gradient"),
    "accumulation": (check_accumulation, "weigh a micro-batch by its targets: see train_step"),
    "determinism": (check_repeat, "let (seed, step) determine all random numbers of a new part"),
    "resume": (check_resume, "state is missing from the checkpoint: see ranks.gather"),
}


def doctor(run):
    """Print a line for every check, with the fix if it fails. Returns 1 if one fails, else 0."""
    failed = 0
    print()
    for name, (check, fix) in CHECKS.items():
        try:
            good, text = check(run)
        except Exception as error:  # of any kind: finding errors is the purpose of a check
            good = False
            text = f"{type(error).__name__}: {one_line(error)}"
            fix = "" if isinstance(error, UserError) else fix  # it says itself what to do
        failed += not good
        text = text if good or not fix else f"{text}: {fix}"
        print(folded(f"{name:<14}{'ok' if good else 'FAILED':<8}{text}", 22), flush=True)
    count = len(CHECKS)
    print(f"{failed} of {count} checks failed" if failed else f"all {count} checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    errors.run(main)
