"""
Time a step of AdamW and of Muon, ours and torch's, for our LLaMA in two sizes:

    python bench/speed.py optimizer

AdamW and our Muon are those of training/optim.py. All use the same gradients, in turn.
"""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from bench.timing.results import row, turns
from bench.timing.train import ours, shape_of
from common.configurator import PositiveInt
from training.optim import make_optimizers

WARM_UP = 3  # rounds that are not timed


@dataclass
class SpeedConfig:
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
        sets[name] = make_optimizers(model, config, SimpleNamespace(device=device, dtype="float32"))
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


def measure(what, config, device):
    rows = []
    for shape in ("S", "M"):
        times = time_shape(shape_of(shape), config.steps, device)
        model, adamw, muon, torchs = (1000 * np.median(seconds) for seconds in times.values())
        steps = times["model"] + times["muon"], times["model"] + times["adamw"]
        rows += [
            row(
                f"{shape}: torch's Muon / ours",
                f"{torchs:.2f} / {muon:.2f} ms",
                times["torch"] / times["muon"],
            ),
            row(
                f"{shape}: the whole step with Muon / AdamW",
                f"{model:.1f} ms forward and backward, {muon:.2f} / {adamw:.2f} ms",
                steps[0] / steps[1],
            ),
        ]
    return {
        "name": "optimizer",
        "about": f"Our LLaMA, eager; {config.steps} rounds.",
        "unit": "time",
        "rows": rows,
    }
