"""What timings share: the order of the sides, intervals, and the page that speed.py writes."""

import numpy as np

from common.errors import UserError
from common.files import ROOT
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


def ratio_text(ratio, low, high, form=".2f"):
    """A ratio and its interval: 1.20 (1.15 to 1.26)."""
    return f"{ratio:{form}} ({low:{form}} to {high:{form}})"


def interval(numbers):
    """(median, low, high): the 95 % bootstrap interval of the median."""
    from scipy.stats import bootstrap

    result = bootstrap(
        (numbers,), np.median, confidence_level=0.95, method="percentile", rng=0
    ).confidence_interval
    return float(np.median(numbers)), float(result.low), float(result.high)


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


def facts_text(where, mode=""):
    """The first sentence of a page: hardware, device, torch's version, mode and commit."""
    facts = versions()
    words = [facts["hardware"], where, f"torch {facts['torch']}", *([mode] if mode else [])]
    return f"{', '.join(words)}; commit {facts['git_commit']}."


def write(lines, name):
    """Write bench/results/<name>.md."""
    folder = ROOT / "bench" / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
