"""
Time a step of AdamW and of Muon, ours and torch's, for our LLaMA in two sizes:

    python bench/speed.py optimizer

AdamW and our Muon are those of training/optim.py. All use the same gradients, in turn. Writes
bench/results/speed_optimizer.md.
"""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from bench.timing.results import (
    command_text,
    facts_text,
    interval,
    ratio_text,
    threads_text,
    turns,
    write,
)
from bench.timing.train import ours, shape_of
from common.configurator import PositiveInt, build, load
from common.errors import UserError
from common.runtime import find_device
from training.optim import make_optimizers

WARM_UP = 3  # rounds that are not timed


@dataclass
class OptimizerSpeedConfig:
    steps: int = 40  # rounds that are timed, after three that are not
    threads: PositiveInt = 1
    device: str = "auto"


def make_sets(model, device):
    """{name: the optimizers of the model}: AdamW, our Muon with AdamW, and torch's Muon with
    AdamW."""
    settings = dict(learning_rate=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.99)
    sets = {}
    for name in ("adamw", "muon"):
        config = SimpleNamespace(optimizer=name, **settings)
        sets[name] = make_optimizers(model, config, device)
    ours, *rest = sets["muon"]
    matrices = ours.param_groups[0]
    adjust = matrices["adjust_lr_fn"]
    sets["torch"] = [torch.optim.Muon(matrices["params"], lr=1e-4, adjust_lr_fn=adjust), *rest]
    return sets


def step_all(optimizers):
    for optimizer in optimizers:
        optimizer.step()


def time_shape(c, steps, device):
    """{"model", "adamw", "muon", "torch": seconds of each round}: forward and backward, then a step
    of each set of optimizers."""
    torch.manual_seed(0)
    model, loss = ours("llama", c)
    model.to(device)
    x, y = torch.randint(c.vocab_size, (2, c.batch_size, c.block_size), device=device)
    sets = make_sets(model, device)
    times = {name: [] for name in ("model", *sets)}

    def timed(name, function, *args):
        began = time.perf_counter()
        function(*args)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times[name].append(time.perf_counter() - began)

    for number, name in turns(sets, steps + WARM_UP):
        if len(times["model"]) == number:  # the first of this round
            model.zero_grad()
            timed("model", lambda: loss(x, y).backward())
        timed(name, step_all, sets[name])
    return {name: np.array(seconds[WARM_UP:]) for name, seconds in times.items()}


def row(shape, times):
    """A line of the table, for the times of a shape."""
    ratio, low, high = interval(times["torch"] / times["muon"])
    whole = interval((times["model"] + times["muon"]) / (times["model"] + times["adamw"]))
    ms = {name: 1000 * np.median(seconds) for name, seconds in times.items()}
    own = f"{ms['model']:.1f} | {ms['adamw']:.2f} | {ms['muon']:.2f} | {ms['torch']:.2f}"
    compared = f"{ratio:.2f} | {low:.2f} to {high:.2f}"
    more = f"{ratio_text(*whole)} times as long as with AdamW"
    return f"| {shape} | {own} | {compared} | {more} |"


def main(argv):
    values, words = load(argv, [OptimizerSpeedConfig], __doc__)
    config = build(OptimizerSpeedConfig, values)
    if words != ["optimizer"] or config.steps < 2:
        fix = "python bench/speed.py optimizer, with two steps or more"
        raise UserError("cannot compare that", "command line", fix)
    device = find_device(config.device)
    torch.set_num_threads(config.threads)
    lines = [
        "# Time of a step of the optimizer",
        "",
        facts_text(f"{device}, {threads_text(config.threads)}", "float32"),
        f"Our LLaMA, eager; medians of {config.steps} rounds. {command_text(argv)}",
        "",
        "| shape | forward and backward, ms | AdamW, ms | Muon, ms | torch's Muon, ms "
        "| torch's / ours | 95 % interval | the whole step with Muon |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in ("S", "M"):
        lines.append(row(shape, time_shape(shape_of(shape), config.steps, device)))
    print("\n".join(lines))
    write(lines, "speed_optimizer")
