"""What a training step on one text costs as the text grows: time and memory, for attention that
sees all, a window, or its own group, and for the mixers with a state."""

from functools import partial
from types import SimpleNamespace

import numpy as np

from bench.timing.mixers import values_of
from bench.timing.results import times_in_turn
from bench.timing.side import Side, our_model
from common.errors import one_line
from training.dry_run import kept_of

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
FITTED = 3  # the last points, to which the exponent is fitted


def keys_of(config):
    """{name: (mixer, its further keys)} of what is timed."""
    return {
        "full": ("attention", {}),
        "window": ("attention", {"window": config.window}),
        "block-local": ("attention", {"block_local": config.window}),
        "gated_delta": ("gated_delta", {}),
        "mamba2": ("mamba2", {}),
    }


def points(T, config, device):
    """{name: {"context", "seconds" of each round, "bytes"}} at the context T, or {"context",
    "why"} of what fails, usually for lack of memory."""
    shape = SimpleNamespace(vocab_size=config.vocab_size, batch_size=1, block_size=T)
    steps, found = {}, {}
    for name, (mixer, more) in keys_of(config).items():
        values = values_of(mixer, config, T) | more
        try:
            side = Side(partial(our_model, values), shape, device)
            side.step(side.loss)  # not timed
            found[name] = {"context": T, "bytes": held_bytes(side, device)}
            steps[name] = partial(side.step, side.loss)
        except RuntimeError as error:
            found[name] = {"context": T, "why": one_line(error)}
    for name, seconds in times_in_turn(steps, config.steps).items():
        found[name]["seconds"] = seconds.tolist()
    return found


def held_bytes(side, device):
    """Bytes: on a GPU the most that a step holds, elsewhere what is kept for the backward pass."""
    if device.startswith("cuda"):
        return side.gpu_bytes(side.loss)
    return kept_of(side.model, side.x, side.y)


def exponents(line):
    """(of time, of memory): p in cost = c T^p, by least squares on logarithms, of the last FITTED
    points of a line [point] that have been measured; None where there are fewer than two."""
    known = [point for point in line if "bytes" in point][-FITTED:]
    if len(known) < 2:
        return None, None
    contexts = np.log([point["context"] for point in known])
    costs = [[np.median(point["seconds"]), point["bytes"]] for point in known]
    slopes = np.polyfit(contexts, np.log(costs), 1)[0]
    return tuple(slopes.tolist())


def measure(config, device):
    """{name: [point]} of all contexts."""
    lines = {name: [] for name in keys_of(config)}
    for T in config.contexts or CONTEXTS:
        for name, point in points(T, config, device).items():
            lines[name].append(point)
            print(f"{name}, context {T:,}: {text_of(point)}", flush=True)
    return lines


def text_of(point):
    """A point as text."""
    if "why" in point:
        return point["why"]
    return f"{1000 * np.median(point['seconds']):,.0f} ms, {point['bytes'] / 1e6:,.1f} MB"
