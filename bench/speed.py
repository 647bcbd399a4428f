"""
How long a training step takes with each part swapped, whole models against whole models:

    python bench/speed.py slots      # a Variant filled as a corner beside the readable model: the slots cost nothing
    python bench/speed.py norm       # all words of a slot, each beside its base (any slot of variants.py)
    python bench/speed.py decode     # how fast it writes, beside the peers (and gqa: what sharing keys buys): speed_decode.py
    python bench/speed.py norm --compile --model=gpt2 --n_layer=6 --n_embd=384 --block_size=256 --batch_size=8
    python bench/speed.py train --help  # beside other libraries (speed_train.py); optimizer: speed_optimizer.py

Two models take steps in turn, so that a busy machine slows both alike; a ratio is the median over the pairs, with
the 95 % bootstrap interval of that median (scipy). Writes bench/results/speed_<what>.md.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

import repo_root  # noqa: F401

from bench.timing import decode, train
from bench.timing import optimizer as speed_optimizer
from common.configurator import allowed, build, keys, load
from common.errors import UserError, run
from common.files import ROOT
from common.runtime import find_device, versions
from parts.architectures import choose
from parts.variant import VariantConfig
from training.optim import parameter_groups


@dataclass
class SpeedConfig:
    model: Literal["gpt2", "llama"] = "llama"  # the base
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    batch_size: int = 12
    vocab_size: int = 65
    multiple_of: int = 8
    steps: int = 60  # pairs of steps that are timed, after five that are not
    threads: int = 1
    compile: bool = False
    device: str = "auto"


def make_step(arm, config, device):
    """A function that takes one training step of a model and returns its seconds."""
    torch.manual_seed(0)
    config_class, model_class, values = choose(vars(config) | arm)
    model = model_class(build(config_class, values)).to(device)
    net = torch.compile(model, dynamic=False) if config.compile else model
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3, fused=True)
    x, y = torch.randint(
        config.vocab_size, (2, config.batch_size, config.block_size), device=device
    )

    def step():
        began = time.perf_counter()
        net(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step


def compare(arm, base, config, device):
    """(median ms of the arm, of the base, their ratio pair by pair: median, low, high)."""
    from scipy.stats import bootstrap

    steps = make_step(arm, config, device), make_step(base, config, device)
    times = []
    for i in range(config.steps + 5):
        pair = [step() for step in (steps if i % 2 else steps[::-1])]  # who goes first alternates
        times.append(pair if i % 2 else pair[::-1])
    times = np.array(times[5:])
    ratios = times[:, 0] / times[:, 1]
    interval = bootstrap(
        (ratios,), np.median, confidence_level=0.95, method="percentile", rng=0
    ).confidence_interval
    return (
        *(statistics.median(column) * 1000 for column in times.T),
        float(np.median(ratios)),
        interval.low,
        interval.high,
    )


def arms_of(what, config):
    """{name: (arm, base)} that a word of the command line asks for."""
    base = {"arch": config.model}
    if what == "slots":
        return {
            f"{word} as a Variant": ({"model": word, "arch": word}, {"model": word})
            for word in ("gpt2", "llama")
        }
    words = allowed(keys(VariantConfig)[what])[1] if what in keys(VariantConfig) else []
    if not words:
        slots = [slot for slot, kind in keys(VariantConfig).items() if allowed(kind)[1]]
        raise UserError(
            f"cannot time {what!r}", "command line", "choose slots, or a slot: " + ", ".join(slots)
        )
    more = {"position": "rope", "rope_factor": 4.0} if what == "rope_scaling" else {}
    return {word: (base | {what: word} | (more if word != "none" else {}), base) for word in words}


def main(argv):
    for word, script in {
        "train": train,
        "optimizer": speed_optimizer,
        "decode": decode,
        "gqa": decode,
    }.items():
        if word in argv:
            return script.main(argv)
    values, words = load(argv, [SpeedConfig], __doc__)
    if len(words) != 1:
        raise UserError(
            "one thing at a time, please",
            "command line",
            "python bench/speed.py slots, or a slot such as norm",
        )
    config, what = build(SpeedConfig, values), words[0]
    if config.steps < 2:
        raise UserError("too few steps to compare", f"steps={config.steps}", "give 2 or more")
    device = find_device(config.device)
    torch.set_num_threads(config.threads)
    facts = versions()
    lines = [
        f"# Time of a training step: {what}",
        "",
        f"{facts['hardware']}, {device}, {config.threads} thread{'s' * (config.threads > 1)}, torch {facts['torch']}, {'compiled' if config.compile else 'eager'}, float32; commit {facts['git_commit']}.",
        f"{config.n_layer} layers, {config.n_embd} wide, context {config.block_size}, batch {config.batch_size}; {config.steps} pairs of steps. `python bench/speed.py {' '.join(argv)}`",
        "",
        "| | ms | its base, ms | ratio | 95 % interval | |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, (arm, base) in arms_of(what, config).items():
        try:
            mine, other, ratio, low, high = compare(arm, base, config, device)
        except UserError as error:
            lines.append(f"| {name} | | | | | {error} |")
        else:
            verdict = "as fast" if low <= 1 <= high else "slower" if ratio > 1 else "faster"
            lines.append(
                f"| {name} | {mine:.1f} | {other:.1f} | {ratio:.3f} | {low:.3f} to {high:.3f} | {verdict} |"
            )
        print(lines[-1], flush=True)
    suffix = f"_{what}" + "_compiled" * config.compile + f"_{config.n_embd}"
    (ROOT / "bench" / "results").mkdir(exist_ok=True)
    (ROOT / "bench" / "results" / f"speed{suffix}.md").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    run(main)
