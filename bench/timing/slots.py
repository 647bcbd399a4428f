"""Time a training step with each word of a slot beside that of the base."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from bench.timing.results import row, times_in_turn
from bench.timing.side import Side, our_model
from common.configurator import PositiveInt, allowed, keys
from common.errors import UserError
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


def compare(name, arm, base, config, device):
    """The row of an arm. The two take steps in turn, so that a busy machine slows both alike."""
    steps = {}
    for which, values in (("arm", arm), ("base", base)):
        side = Side(partial(our_model, vars(config) | values), config, device)
        loss = torch.compile(side.loss, dynamic=False) if config.compile else side.loss
        steps[which] = partial(side.step, loss)
    of_arm, of_base = times_in_turn(steps, config.steps, WARM_UP).values()
    value = f"{1000 * np.median(of_arm):.1f} / {1000 * np.median(of_base):.1f} ms"
    return row(name, value, of_arm / of_base)


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


def measure(what, config, device):
    rows = []
    for name, (arm, base) in arms_of(what, config).items():
        try:
            rows.append(compare(name, arm, base, config, device))
        except UserError as error:
            rows.append(row(name, str(error)))
    mode = "compiled" if config.compile else "eager"
    return {
        "name": f"{what}, {config.n_embd} wide, {mode}",
        "about": f"{config.n_layer} layers, {config.n_embd} wide, context {config.block_size}, "
        f"batch {config.batch_size}; {config.steps} pairs of steps.",
        "unit": "time of a step, over that of its base",
        "rows": rows,
    }
