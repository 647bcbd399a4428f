"""What timings share: the order of the sides, intervals, and the rows that a measurement stores.

Each measurement appends one line to speed.jsonl, from which bench/timing/page.py writes speed.md.
Both are in bench/results, or in the folder that the environment variable BENCH_RESULTS names.
"""

import os
import time
from pathlib import Path

import numpy as np

from common import files
from common.errors import UserError
from common.runtime import versions


def turns(names, rounds):
    """Yield (round, name). In each round every side takes one turn; the order rotates and turns
    round, so that no side always follows the same one, and other work slows all of them equally."""
    names = list(names)
    for number in range(rounds):
        shift = number % len(names)
        order = names[shift:] + names[:shift]
        for name in order if number % 2 else reversed(order):
            yield number, name


def times_in_turn(sides, rounds, warm_up=0):
    """{name: times [rounds]} of sides {name: function that returns the time of one call}, which
    take turns. The rounds of the warm-up come first and do not count."""
    times = {name: [] for name in sides}
    for _, name in turns(sides, warm_up + rounds):
        times[name].append(sides[name]())
    return {name: np.array(seconds[warm_up:]) for name, seconds in times.items()}


def ratio_text(ratio, low, high, form=".2f"):
    """A ratio and its interval: 1.20 (1.15 to 1.26)."""
    return f"{ratio:{form}} ({low:{form}} to {high:{form}})"


def interval(numbers):
    """(median, low, high): the 95 % bootstrap interval of the median."""
    from scipy.stats import bootstrap

    resampled = bootstrap((numbers,), np.median, confidence_level=0.95, method="percentile", rng=0)
    return float(np.median(numbers)), *map(float, resampled.confidence_interval)


def check_steps(steps, key="steps"):
    """Raise UserError if there are too few steps for an interval."""
    if steps < 2:
        raise UserError(f"too few {key} to compare", f"{key}={steps}", "give 2 or more")


def threads_text(threads):
    return f"{threads} thread{'s' if threads > 1 else ''}"


def command_text(argv):
    """The command line without this machine's paths."""
    words = [f"{arg.partition('=')[0]}=PATH" if "/" in arg else arg for arg in argv]
    return f"`python bench/speed.py {' '.join(words)}`"


def row(what, value, ratios=None):
    """A row of a measurement: {"what", "value", "ratio", "low", "high"}. `value` is text;
    `ratios` the ratio of each round, None for a row without one."""
    ratio, low, high = (None,) * 3 if ratios is None else interval(np.asarray(ratios))
    return {"what": what, "value": value, "ratio": ratio, "low": low, "high": high}


def folder():
    return Path(os.environ.get("BENCH_RESULTS") or files.ROOT / "bench/results")


def record(measured, device, config, argv):
    """Append {"name", "about", "unit", "rows"} to speed.jsonl with the facts that it depends on."""
    facts = versions()
    line = measured | {
        "hardware": facts["hardware"],
        "device": device.split(":")[0],
        "threads": None if device.startswith("cuda") else config.threads,
        "dtype": getattr(config, "dtype", "float32"),
        "torch": facts["torch"],
        "commit": facts["git_commit"],
        "command": command_text(argv),
        "date": time.strftime("%Y-%m-%d"),
    }
    folder().mkdir(parents=True, exist_ok=True)
    files.append(folder() / "speed.jsonl", line)


def write(lines, name):
    """Write a page of its own, <name>.md."""
    folder().mkdir(parents=True, exist_ok=True)
    files.write(folder() / f"{name}.md", "\n".join(lines) + "\n")
