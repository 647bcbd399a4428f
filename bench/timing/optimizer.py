"""
How long a step of AdamW takes beside one of Muon, ours and torch's, for our LLaMA at the sizes of speed_train.py:

    python bench/speed.py optimizer

AdamW and Muon are optim.py's; all work on the same gradients, in turn. Writes bench/results/speed_optimizer.md.
"""

import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from bench.timing.train import FIELDS, SHAPES, interval, ours, write
from common.configurator import build, load
from common.errors import UserError
from common.runtime import find_device, versions
from training.optim import make_optimizers


@dataclass
class OptimizerSpeedConfig:
    steps: int = 40  # rounds that are timed, after three that are not
    threads: int = 1
    device: str = "auto"


def main(argv):
    values, words = load(argv, [OptimizerSpeedConfig], __doc__)
    config = build(OptimizerSpeedConfig, values)
    if words != ["optimizer"] or config.steps < 2:
        raise UserError(
            "cannot compare that",
            "command line",
            "python bench/speed.py optimizer, with two steps or more",
        )
    device, facts = find_device(config.device), versions()
    torch.set_num_threads(config.threads)
    lines = [
        "# Time of a step of the optimizer",
        "",
        f"{facts['hardware']}, {device}, {config.threads} thread{'s' * (config.threads > 1)}, torch {facts['torch']}, float32; commit {facts['git_commit']}.",
        f"Our LLaMA, eager; medians of {config.steps} rounds. `python bench/speed.py {' '.join(argv)}`",
        "",
        "| shape | forward and backward, ms | AdamW, ms | Muon, ms | torch's Muon, ms | torch's / ours | 95 % interval | the whole step with Muon |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in ("S", "M"):
        c = SimpleNamespace(**dict(zip(FIELDS, SHAPES[shape])))
        torch.manual_seed(0)
        model, loss = ours("llama", c)
        model.to(device)
        x, y = torch.randint(c.vocab_size, (2, c.batch_size, c.block_size), device=device)
        settings = SimpleNamespace(learning_rate=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.99)
        sets = {
            name: make_optimizers(model, SimpleNamespace(optimizer=name, **vars(settings)), device)
            for name in ("adamw", "muon")
        }
        matrices = sets["muon"][0].param_groups[0]
        sets["torch"] = [
            torch.optim.Muon(matrices["params"], lr=1e-4, adjust_lr_fn=matrices["adjust_lr_fn"]),
            *sets["muon"][1:],
        ]
        times = {name: [] for name in ("model", *sets)}

        def timed(name, call):
            began = time.perf_counter()
            call()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)

        for i in range(config.steps + 3):
            model.zero_grad()
            timed("model", lambda: loss(x, y).backward())
            for name in list(sets)[:: 1 if i % 2 else -1]:
                timed(name, lambda: [each.step() for each in sets[name]])
        model_time, adamw, muon, theirs = (np.array(times[name][3:]) for name in times)
        ratio, low, high = interval(theirs / muon)
        whole = statistics.median((model_time + muon) / (model_time + adamw))
        lines.append(
            f"| {shape} | {np.median(model_time) * 1000:.1f} | {np.median(adamw) * 1000:.2f} | {np.median(muon) * 1000:.2f} | {np.median(theirs) * 1000:.2f} | {ratio:.2f} | {low:.2f} to {high:.2f} | {whole:.2f} times as long as with AdamW |"
        )
    write(lines, "speed_optimizer")
