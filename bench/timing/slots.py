"""Time a training step with each word of a slot beside that of the base."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from bench.timing.results import (
    check_steps,
    command_text,
    facts_text,
    interval,
    threads_text,
    turns,
    write,
)
from bench.timing.side import Side, our_model
from common.configurator import PositiveInt, allowed, build, keys, load
from common.errors import UserError
from common.runtime import find_device
from parts.architectures import configure
from parts.catalogue import needed
from parts.variant import VariantConfig

WARM_UP = 5  # pairs of steps that are not timed


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
    threads: PositiveInt = 1
    compile: bool = False
    device: str = "auto"


def compare(arm, base, config, device):
    """(median ms of the arm, of the base, median of their ratios, its low, its high). The two take
    steps in turn, so that a busy machine slows both alike."""
    sides = []
    for values in (arm, base):
        side = Side(lambda values=values: our_model(vars(config) | values), config, device)
        compiled = torch.compile(side.loss, dynamic=False) if config.compile else side.loss
        sides.append((side, compiled))
    times = np.zeros((config.steps + WARM_UP, 2))  # seconds of the arm and of the base
    for pair, which in turns((0, 1), len(times)):
        side, loss = sides[which]
        times[pair, which] = side.step(loss)
    times = times[WARM_UP:]
    return *(1000 * np.median(times, axis=0)), *interval(times[:, 0] / times[:, 1])


def arms_of(what, config):
    """{name: (values of the arm, of its base)} for a word of the command line: slots, or a slot."""
    if what == "slots":
        return {
            f"{word} as a Variant": ({"model": word, "arch": word}, {"model": word})
            for word in ("gpt2", "llama")
        }
    slots = {key: allowed(kind)[1] for key, kind in keys(VariantConfig).items() if allowed(kind)[1]}
    if what not in slots:
        fix = "choose slots, or a slot: " + ", ".join(slots)
        raise UserError(f"cannot time {what!r}", "command line", fix)
    base, arms = {"arch": config.model}, {}
    here = configure(vars(config) | base)
    for word in slots[what]:
        values = base | {what: word} | needed(what, word, here)
        if what == "rope_scaling" and word != "none":
            values |= {"position": "rope", "rope_factor": 4.0}
        arms[word] = (values, base)
    return arms


def row(name, arm, base, config, device):
    """A line of the table: the times of an arm, or why it cannot be made."""
    try:
        own, other, ratio, low, high = compare(arm, base, config, device)
    except UserError as error:
        return f"| {name} | | | | | {error} |"
    verdict = "slower" if ratio > 1 else "faster"
    if low <= 1 <= high:
        verdict = "as fast"
    times = f"{own:.1f} | {other:.1f} | {ratio:.3f} | {low:.3f} to {high:.3f}"
    return f"| {name} | {times} | {verdict} |"


def main(argv, usage):
    values, words = load(argv, [SpeedConfig], usage)
    if len(words) != 1:
        fix = "python bench/speed.py slots, or a slot such as norm"
        raise UserError("give exactly one measurement", "command line", fix)
    config, what = build(SpeedConfig, values), words[0]
    check_steps(config.steps)
    device = find_device(config.device)
    torch.set_num_threads(config.threads)
    mode = "compiled" if config.compile else "eager"
    lines = [
        f"# Time of a training step: {what}",
        "",
        facts_text(f"{device}, {threads_text(config.threads)}", f"{mode}, float32"),
        f"{config.n_layer} layers, {config.n_embd} wide, context {config.block_size}, "
        f"batch {config.batch_size}; {config.steps} pairs of steps. {command_text(argv)}",
        "",
        "| | ms | its base, ms | ratio | 95 % interval | |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, (arm, base) in arms_of(what, config).items():
        lines.append(row(name, arm, base, config, device))
        print(lines[-1], flush=True)
    compiled = "_compiled" if config.compile else ""
    write(lines, f"speed_{what}{compiled}_{config.n_embd}")
