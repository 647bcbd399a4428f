"""Sides that are timed in turn, and the ratio of their times with its interval."""

import numpy as np
from scipy.stats import bootstrap


def turns(names, rounds):
    """Yield (round, name). In each round every side takes one turn. The order rotates and reverses
    from round to round, so that no side always follows the same one, and other work slows all of
    them equally."""
    names = list(names)
    for number in range(rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        if number % 2 == 0:
            order.reverse()
        for name in order:
            yield number, name


def ratio(rounds):
    """The median of the rounds' ratios with its 95 % bootstrap interval: {"ratio", "low",
    "high"}."""
    resampled = bootstrap((rounds,), np.median, confidence_level=0.95, method="percentile", rng=0)
    low, high = resampled.confidence_interval
    return {"ratio": float(np.median(rounds)), "low": float(low), "high": float(high)}
