"""What the runs of a sweep can find."""

import math

import numpy as np
from scipy import special

from bench.ablation.contrasts import ALPHA

POWER = 0.8  # the chance of what a sweep is said to find
MOST_SEEDS = 300  # an estimate above this is too uncertain to be useful


def welch(sd, n, control_sd, control_n):
    """(standard error, degrees of freedom) of Welch's test for these groups; arrays or numbers."""
    arm = sd**2 / n
    control = control_sd**2 / control_n
    df = (arm + control) ** 2 / (arm**2 / (n - 1) + control**2 / (control_n - 1))
    return np.sqrt(arm + control), df


def to_differ(effect, se, df, level):
    """The chance that a two-sided t test at this level finds an effect, on its own side; arrays or
    numbers."""
    critical = special.stdtrit(df, 1 - level / 2)
    return 1 - special.nctdtr(df, np.abs(effect) / se, critical)


def to_tie(effect, se, df, margin, level):
    """The chance that two one-sided tests at this level show that an effect is below the margin."""
    critical = special.stdtrit(df, 1 - level)
    above = (margin - effect) / se - critical
    below = (margin + effect) / se - critical
    return np.maximum(special.stdtr(df, above) + special.stdtr(df, below) - 1, 0)


def least_runs(family):
    """The runs that an arm needs for a verdict in a family. With fewer, arms that spread twice as
    much as the base are called better or worse in more than 6 sweeps of 100 (simulation.md)."""
    if family <= 6:
        return 5
    if family <= 25:
        return 8
    return 12


def smallest_visible(se, df, level):
    """The smallest effect that 80 of 100 sweeps find at this level; nan if none."""
    effects = np.geomspace(0.05, 200, 4000) * se
    return first(effects, to_differ(effects, se, df, level) >= POWER)


def smallest_tie(se, df, level):
    """The smallest margin within which 80 of 100 sweeps show a tie of two arms that are alike."""
    margins = np.geomspace(0.05, 200, 4000) * se
    return first(margins, to_tie(0, se, df, margins, level) >= POWER)


def seeds_to_decide(difference, noise_of, margin, family):
    """About how many seeds of an arm decide a comparison with 80 % power at the difference seen, to
    differ or to tie; inf if over MOST_SEEDS. noise_of(seeds) gives its standard error and df."""
    numbers = np.arange(least_runs(family), MOST_SEEDS + 1)
    se, df = noise_of(numbers)
    level = ALPHA / family
    decides = to_differ(difference, se, df, level) >= POWER
    if margin > 0:
        decides |= to_tie(difference, se, df, margin, level) >= POWER
    enough = first(numbers, decides)
    return math.inf if math.isnan(enough) else enough


def first(values, holds):
    """The first value where a condition holds, or nan."""
    return float(values[np.argmax(holds)]) if np.any(holds) else math.nan
