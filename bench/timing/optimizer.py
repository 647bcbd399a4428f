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
    """{name: optimizers}: AdamW, our Muon with AdamW, and torch's Muon with AdamW."""
    settings = dict(learning_rate=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.99)
    sets = {}
    for name in ("adamw", "muon"):
        config = SimpleNamespace(optimizer=name, **settings)
        sets[name] = make_optimizers(model, config, SimpleNamespace(device=device, dtype="float32"))
    our_muon, *rest = sets["muon"]
    matrices = our_muon.param_groups[0]["params"]
    torchs = torch.optim.Muon(matrices, lr=1e-4, adjust_lr_fn="match_rms_adamw")
    sets["torch"] = [torchs, *rest]
    return sets


def time_shape(c, steps, device):
    """{"model", "adamw", "muon", "torch": seconds of each round}: forward and backward, then a step
    of each set of optimizers."""
    torch.manual_seed(0)
    model, loss = ours("llama", c)
    model.to(device)
    x, y = torch.randint(c.vocab_size, (2, c.batch_size, c.block_size), device=device)
    sets = make_sets(model, device)
    times = {name: [] for name in ("model", *sets)}

    def timed(name, functions):
        began = time.perf_counter()
        for function in functions:
            function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times[name].append(time.perf_counter() - began)

    for number, name in turns(sets, steps + WARM_UP):
        if len(times["model"]) == number:  # the first of this round
            model.zero_grad()
            timed("model", [lambda: loss(x, y).backward()])
        timed(name, [optimizer.step for optimizer in sets[name]])
    return {name: np.array(seconds[WARM_UP:]) for name, seconds in times.items()}


def measure(config, device):
    rows = []
    for shape in ("S", "M"):
        times = time_shape(shape_of(shape), config.steps, device)
        model, adamw, muon, torchs = (1000 * np.median(seconds) for seconds in times.values())
        value = f"{torchs:.2f} / {muon:.2f} ms"
        rows.append(row(f"{shape}: torch's Muon / ours", value, times["torch"] / times["muon"]))
        value = f"{model:.1f} ms forward and backward, {muon:.2f} / {adamw:.2f} ms"
        steps = times["model"] + times["muon"], times["model"] + times["adamw"]
        what = f"{shape}: the whole step with Muon / AdamW"
        rows.append(row(what, value, steps[0] / steps[1]))
    return {
        "name": "optimizer",
        "about": f"Our LLaMA, eager; {config.steps} rounds.",
        "unit": "time",
        "rows": rows,
    }
