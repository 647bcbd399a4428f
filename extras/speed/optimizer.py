"""
Time a step of AdamW and of Muon, ours and torch's, for our LLaMA in two sizes:

    python -m extras.speed optimizer

AdamW and our Muon come from training/optim.py. All use the same gradients, in turn. In bfloat16
our Muon multiplies in it, as in a run; torch's always does.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from bench.ablation.step_times import ratio
from common.configurator import PositiveInt
from common.runtime import Runtime
from extras.speed.results import Rounds, finished, times_in_turn
from extras.speed.train import SHAPES, Side, fast_dtypes, ours
from training.optim import make_optimizers
from training.settings import TrainConfig

WARM_UP = 3  # rounds that are not timed
LABELS = {
    "model": "forward and backward",
    "adamw": "AdamW",
    "muon": "Muon",
    "torch": "torch's Muon",
}


@dataclass
class SpeedConfig:
    steps: Rounds = 40  # rounds that are timed, after three that are not
    threads: PositiveInt = 1
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None  # None: bfloat16 where the device has it


def make_sets(model, runtime):
    """{name: optimizers}: AdamW, our Muon with AdamW, and torch's Muon with AdamW."""
    sets = {
        name: make_optimizers(model, TrainConfig(optimizer=name), runtime)
        for name in ("adamw", "muon")
    }
    our_muon, *rest = sets["muon"]
    matrices = our_muon.param_groups[0]["params"]
    torchs = torch.optim.Muon(matrices, lr=1e-4, adjust_lr_fn="match_rms_adamw")
    sets["torch"] = [torchs, *rest]
    return sets


def time_shape(shape, steps, runtime):
    """{"model", "adamw", "muon", "torch": seconds of each round}: forward and backward, and a step
    of each set of optimizers."""
    side = Side(partial(ours, "llama", shape), shape, runtime)

    def backward():
        side.model.zero_grad()
        with runtime.autocast():
            value = side.loss(side.x, side.y)
        value.backward()

    def seconds(functions):
        began = time.perf_counter()
        for function in functions:
            function()
        return finished(runtime.device) - began

    backward()
    sides = {"model": partial(seconds, [backward])}
    for name, optimizers in make_sets(side.model, runtime).items():
        sides[name] = partial(seconds, [optimizer.step for optimizer in optimizers])
    return times_in_turn(sides, steps, WARM_UP)


def measure(config, device):
    runtime = Runtime(device, config.dtype or fast_dtypes(device)[-1], 0, 1)
    for name in ("S", "M"):
        times = time_shape(SHAPES[name], config.steps, runtime)
        step_with_muon = times["model"] + times["muon"]
        step_with_adamw = times["model"] + times["adamw"]
        row = {"what": f"our LLaMA, {runtime.dtype}"}
        for key, label in LABELS.items():
            row[f"{label}, ms"] = 1000 * float(np.median(times[key]))
        row["torch's Muon / Muon"] = ratio(times["torch"] / times["muon"])
        row["step with Muon / with AdamW"] = ratio(step_with_muon / step_with_adamw)
        yield {"name": name, "about": f"Eager; {config.steps} rounds.", "rows": [row]}
