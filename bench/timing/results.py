"""What timings share: the order of the sides, intervals, and the line that a measurement stores.

Each measurement appends one line to speed.jsonl, from which bench/timing/page.py writes speed.md.
Both are in bench/results, or in the folder that the environment variable BENCH_RESULTS names.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import numpy as np

from common import files
from common.configurator import Range
from common.runtime import cpu_name, versions

Rounds = Annotated[int, Range(least=2)]  # as many as an interval needs


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


def interval(numbers):
    """(median, low, high): the 95 % bootstrap interval of the median."""
    from scipy.stats import bootstrap

    resampled = bootstrap((numbers,), np.median, confidence_level=0.95, method="percentile", rng=0)
    return float(np.median(numbers)), *map(float, resampled.confidence_interval)


def ratio(rounds):
    """A ratio with its interval, from the ratio of each round."""
    return dict(zip(("ratio", "low", "high"), interval(np.asarray(rounds)), strict=True))


def threads_text(threads):
    return f"{threads} thread{'s' if threads > 1 else ''}"


def command_text(script, argv):
    """The command line without this machine's paths."""
    words = [f"{arg.partition('=')[0]}=PATH" if "/" in arg else arg for arg in argv]
    return " ".join(["python", f"bench/{script}", *words])


def folder():
    return Path(os.environ.get("BENCH_RESULTS") or files.ROOT / "bench/results")


def record(kind, measured, device, command, threads=None):
    """Append {"name", "about", "rows"}, a measurement of a kind (train, decode, ...), with the
    facts that it depends on, to speed.jsonl. A row is {column: text, number, list of numbers (one
    of each round), ratio, or None (not measured)}; "what" comes first. Returns the line."""
    on_gpu, facts = device.startswith("cuda"), versions()
    line = {"kind": kind} | measured
    line |= {
        "hardware": facts["hardware"] if on_gpu else cpu_name(),
        "device": device.split(":")[0],
        "threads": None if on_gpu else threads,
        "torch": facts["torch"],
        "commit": facts["git_commit"],
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
    }
    folder().mkdir(parents=True, exist_ok=True)
    files.append(folder() / "speed.jsonl", line)
    return line
