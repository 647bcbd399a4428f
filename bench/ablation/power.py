"""What a sweep of this size can find, and how many more seeds would decide what is open."""

import math

import numpy as np
from scipy import special

from bench.ablation.looks import share_of

ALPHA, POWER = 0.05, 0.8
MOST_SEEDS = 300  # an estimate above this is too uncertain to be useful


def welch(sd, n, control_sd, control_n):
    """(standard error, degrees of freedom) of Welch's test for these groups; arrays or numbers."""
    arm, control = sd**2 / n, control_sd**2 / control_n
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
    above, below = (margin - effect) / se - critical, (margin + effect) / se - critical
    return np.maximum(special.stdtr(df, above) + special.stdtr(df, below) - 1, 0)


def least_runs(family):
    """The runs that an arm needs for a verdict in a family. With fewer, arms that spread twice as
    much as the base are called better or worse in more than 6 sweeps of 100 (simulation.md)."""
    return 5 if family <= 6 else 8 if family <= 25 else 12


def smallest_visible(se, df, level):
    """The smallest effect that 80 of 100 sweeps find at this level; nan if none."""
    effects = np.geomspace(0.05, 200, 4000) * se
    return first(effects, to_differ(effects, se, df, level) >= POWER)


def smallest_tie(se, df, level):
    """The smallest margin within which 80 of 100 sweeps show a tie of two arms that are alike."""
    margins = np.geomspace(0.05, 200, 4000) * se
    return first(margins, to_tie(0, se, df, margins, level) >= POWER)


def more_seeds(row, looks, planned, margin, family):
    """About how many more seeds would decide a comparison, with 80 % power at the difference seen:
    to differ or to tie, at the level of the next look; inf if over MOST_SEEDS. At least as many as
    lead to the next look. The control group grows with the arm."""
    n, numbers = row["n"], np.arange(row["n"] + 1, MOST_SEEDS + 1)
    ahead = [look for look in planned if look > n]
    # An unplanned look has a share of 5 % or less, a planned one (of up to 11) of more than 7.5 %.
    unplanned = sum(0 < look.share < 1.5 * share_of(unplanned=1) for look in looks)
    share = share_of(len(planned)) if ahead else share_of(unplanned=unplanned + 1)
    se, df = row["se"] * np.sqrt(n / numbers), row["n_control"] + numbers - 2
    level = ALPHA * share / family
    decides = to_differ(row["difference"], se, df, level) >= POWER
    if margin > 0:
        decides |= to_tie(row["difference"], se, df, margin, level) >= POWER
    enough = first(numbers, decides)
    return max(enough, *ahead[:1], least_runs(family)) - n if math.isfinite(enough) else math.inf


def first(values, holds):
    """The first value where a condition holds, or nan."""
    return float(values[np.argmax(holds)]) if np.any(holds) else math.nan
