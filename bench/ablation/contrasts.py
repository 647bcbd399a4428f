"""
The tests behind a verdict, on arrays: of the losses [runs] of one sweep, or [runs, ...] of many
simulated sweeps at once.

A contrast of two groups of runs, Fisher's test of the runs that did not learn, Holm's correction,
and the verdicts of a family. comparisons.py lists the groups.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import special, stats

ALPHA = 0.05  # the error of a whole sweep


class Contrast(NamedTuple):
    """An estimate, its standard error and its degrees of freedom: arrays of one shape, or numbers.
    The last two are nan where a group has one run."""

    difference: np.ndarray
    se: np.ndarray
    df: np.ndarray

    def p(self):
        """Two-sided, against no difference; 1 where it is unknown, as where all runs are equal."""
        with np.errstate(all="ignore"):
            p = 2 * special.stdtr(self.df, -abs(self.difference) / self.se)
        return np.nan_to_num(np.where(self.se > 0, p, 1), nan=1)

    def p_tie(self, margin):
        """Of two one-sided tests that the difference is below the margin; 1 where it is unknown."""
        with np.errstate(all="ignore"):
            p = special.stdtr(self.df, (abs(self.difference) - margin) / self.se)
        return np.nan_to_num(np.where(self.se > 0, p, 1), nan=1)

    def columns(self):
        """The columns of a verdict, with the 95 % interval of this comparison alone."""
        half = special.stdtrit(self.df, 1 - ALPHA / 2) * self.se
        return {
            "difference": float(self.difference),
            "se": float(self.se),
            "df": float(self.df),
            "low": float(self.difference - half),
            "high": float(self.difference + half),
            "p": float(self.p()),
        }


def contrast(groups, pooled=None):
    """The Contrast of the means of two independent groups, [n, ...] and [m, ...], by Welch's test
    over the runs that learned. scipy's would loop over slices, which have gaps. `pooled` (variance,
    degrees of freedom) replaces the groups' own variances."""
    n, mean, variance = moments(groups[0])
    m, other_mean, other_variance = moments(groups[1])
    if pooled:
        variance = pooled[0]
        other_variance = pooled[0]
    with np.errstate(all="ignore"):
        own = variance / n  # of the mean of the group
        other = other_variance / m
        total = own + other
        if pooled:
            df = pooled[1]
        else:
            df = total**2 / (own**2 / np.maximum(n - 1, 1) + other**2 / np.maximum(m - 1, 1))
    return Contrast(
        difference=mean - other_mean,
        se=np.sqrt(total),
        df=np.where(total == 0, np.inf, df),
    )


def moments(group):
    """(number, mean, unbiased variance) of the finite values of a sample [n, ...]; nan where there
    are too few."""
    known = np.isfinite(group)
    n = known.sum(0)
    with np.errstate(all="ignore"):
        mean = np.where(known, group, 0).sum(0) / n
        squares = np.where(known, np.subtract(group, mean), 0) ** 2
        return n, mean, np.where(n > 1, squares.sum(0) / (n - 1), math.nan)


def finite(values):
    return values[np.isfinite(values)]


def pooled_variance(groups):
    """(variance, degrees of freedom) within groups, each [n, ...]. With few runs, a screening finds
    with it what Welch's test cannot; the simulation shows its error where variances differ."""
    known = [moments(group) for group in groups]
    df = sum(np.maximum(n - 1, 0) for n, *_ in known)
    squares = sum(np.where(n > 1, (n - 1) * s2, 0) for n, _, s2 in known)
    return squares / np.maximum(df, 1), df


def compare(groups, margin, least=2):
    """(p, p of a tie, direction) of groups of losses [n, ...] and [m, ...], infinite where a run
    did not learn; not corrected. (1, 1, 0) where a group has fewer than `least` runs. A positive
    direction is worse."""
    if min(map(len, groups)) < least:
        shape = np.shape(groups[0])[1:]
        return np.ones(shape), np.ones(shape), np.zeros(shape)
    welch = contrast(groups)
    student = contrast(groups, pooled=pooled_variance(groups))
    p = np.maximum(welch.p(), student.p())
    p_tie = np.maximum(welch.p_tie(margin), student.p_tie(margin))
    return outcome(p, p_tie, welch.difference, failures(groups))


def failures(groups):
    """(k, n, c, m): k of the n runs of the first group did not learn, and c of the m runs of the
    second."""
    first, second = groups
    return np.isinf(first).sum(0), len(first), np.isinf(second).sum(0), len(second)


def outcome(p, p_tie, difference, counts):
    """(p, p of a tie, direction) of a test of the runs that learned, adjusted for the runs that
    did not learn. counts: as `failures` returns them. An arm with such runs can only be worse: by
    Fisher's p, or by the p of its other runs, unless more of the base's runs did not learn. An arm
    without any, beside a base with some, can only be better. Neither is a tie."""
    k, n, c, m = counts
    worse = difference > 0
    arm_failed = k > 0
    base_failed_more = k * m < c * n  # k/n < c/m
    p = np.where(worse & base_failed_more, 1, p)
    p_of_others = np.where(worse, p, 1)  # of the arm's runs that learned
    p_of_failing = np.minimum(fisher(*counts), p_of_others)
    p = np.where(arm_failed, p_of_failing, p)
    p_tie = np.where(arm_failed | (c > 0), 1, p_tie)
    direction = np.where(arm_failed, 1, difference)  # never better
    return p, p_tie, direction


@functools.cache
def fisher_of(k, n, c, m):
    table = [[k, n - k], [c, m - c]]
    return float(stats.fisher_exact(table).pvalue) if k * m > c * n else 1.0


def fisher(k, n, c, m):
    """The two-sided p of Fisher's exact test of k of n runs against c of m, arrays or numbers; 1
    where k of n are no more often."""
    return np.vectorize(fisher_of, otypes=[float])(k, n, c, m)


def holm(p, family=0):
    """Holm's corrected p, along the last axis; of `family` hypotheses the others have p = 1. Many
    sweeps at once: statsmodels corrects one at a time, and the simulation has half a million."""
    p = np.asarray(p, float)
    order = np.argsort(p, axis=-1)
    factors = max(family, p.shape[-1]) - np.arange(p.shape[-1])
    corrected = np.maximum.accumulate(np.take_along_axis(p, order, -1) * factors, -1)
    return np.take_along_axis(np.minimum(corrected, 1), np.argsort(order, -1), -1)


def family_verdicts(p, p_tie, difference, family=0):
    """The verdicts of a family of comparisons. p, p_tie and difference are [..., family], not
    corrected, with p = 1 where a comparison has too few runs.

    Returns a dict of arrays [..., family]: verdict, and the p-values of a difference and of a tie,
    corrected for the family (p_holm, p_tie)."""
    p_holm = holm(p, family)
    p_tie_holm = holm(p_tie, family)
    differs = p_holm <= ALPHA
    cases = [differs & (difference < 0), differs, p_tie_holm <= ALPHA]
    verdict = np.select(cases, ["better", "worse", "tie"], "undecided")
    return {"verdict": verdict, "p_holm": p_holm, "p_tie": p_tie_holm}
