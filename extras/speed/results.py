"""
What the measurements share: turns with the times of each side, and the stored line.

Each measurement appends one line to speed.jsonl, from which extras/speed/page.py writes speed.md.
Both are in bench/results, or in the folder that the environment variable BENCH_RESULTS names.
"""

import os
import shlex
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from bench.ablation.step_times import turns
from common import files
from common.commands import ROOT
from common.configurator import Range
from common.runtime import versions

Rounds = Annotated[int, Range(least=2)]  # an interval needs two


def finished(device):
    """The time when a device has done all its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def peak_bytes(work):
    """The most bytes of a GPU that a function allocates, beside those that are held before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def times_in_turn(sides, rounds, warm_up=0):
    """{name: times [rounds]} of sides {name: function that returns the time of one call}, which
    take turns. The rounds of the warm-up come first and do not count."""
    times = {name: [] for name in sides}
    for _, name in turns(sides, warm_up + rounds):
        times[name].append(sides[name]())
    return {name: np.array(seconds[warm_up:]) for name, seconds in times.items()}


def command_text(argv):
    """The command line without this machine's paths."""
    words = [f"{word.partition('=')[0]}=PATH" if "/" in word else word for word in argv]
    return f"python -m extras.speed {shlex.join(words)}"


def folder():
    return Path(os.environ.get("BENCH_RESULTS") or ROOT / "bench/results")


def record(kind, measured, device, command, threads=None):
    """Append {"name", "about", "rows"}, a measurement of a kind (train, decode, ...), with the
    facts that it depends on, to speed.jsonl. A row is {column: text, number, list of numbers (one
    of each round), ratio, or None (not measured)}; "what" comes first. Returns the line."""
    facts = versions(device)
    line = {
        "kind": kind,
        **measured,
        "hardware": facts["hardware"],
        "device": device.split(":")[0],
        "threads": None if device.startswith("cuda") else threads,
        "torch": facts["torch"],
        "commit": facts["git_commit"],
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
    }
    folder().mkdir(parents=True, exist_ok=True)
    files.append(folder() / "speed.jsonl", line)
    return line
