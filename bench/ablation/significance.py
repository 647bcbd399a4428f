"""
The statistics behind a verdict, on arrays, so that a simulation runs the very code of a report.

- A contrast of independent groups of runs: Welch's t test with Satterthwaite's degrees of freedom.
  Nothing is paired and no variance is pooled, so that an arm that spreads more than the base costs
  power and not validity.
- Looks: 90 % of ALPHA is shared equally by the looks planned before the first report; the j-th look
  that nobody planned gets 10 % x 2^-j of it. A comparison's p is the least of p / share over its
  looks. By the union bound this holds however the arms to continue with are chosen (history.py).
- Holm's method corrects for all planned comparisons of the sweep. Those that have not run count
  with p = 1.
- A verdict must still stand at the end: if the difference of all runs points the other way, or its
  own 95 % interval includes zero, the word is "undecided".
- A tie is two one-sided tests against the margin (Schuirmann 1987), corrected in the same way.
- Runs that diverged have no loss, but a rank: the last. Arms that have some are compared by ranks.

tests/helpers/simulate.py measures the error and the power of all of this.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special
from scipy import stats as scipy_stats

ALPHA, POWER = 0.05, 0.8
PLANNED = 0.9  # share of ALPHA for the planned looks
MOST_SEEDS = 300  # an estimate above this is too uncertain to be useful
PERMUTATIONS = 19_999


@dataclass
class Contrast:
    """An estimate, its standard error and its degrees of freedom: arrays of one shape, or numbers.
    The last two are nan where a group has one run."""

    mean: np.ndarray
    se: np.ndarray
    df: np.ndarray

    def p(self):
        """Two-sided, against no difference; 1 where it is unknown."""
        with np.errstate(all="ignore"):
            p = 2 * special.stdtr(self.df, -abs(self.mean) / self.se)
        return np.nan_to_num(p, nan=1.0)

    def p_within(self, margin):
        """The p-value of two one-sided tests that the difference is smaller than the margin; 1
        where it is unknown."""
        with np.errstate(all="ignore"):
            p = special.stdtr(self.df, (abs(self.mean) - margin) / self.se)
        return np.nan_to_num(p, nan=1.0)

    def interval(self):
        """(low, high) at 95 %, not corrected for other comparisons."""
        half = special.stdtrit(self.df, 1 - ALPHA / 2) * self.se
        return self.mean - half, self.mean + half


def contrast(groups, weights=(1, -1), pooled=None):
    """The Contrast of the weighted means of independent groups, each [n, ...]. `pooled` (variance,
    degrees of freedom) replaces the groups' own variances."""
    pairs = list(zip(weights, groups, strict=True))
    with np.errstate(all="ignore"):
        mean = sum(w * np.mean(group, 0) for w, group in pairs)
        one = pooled and pooled[0]
        parts = [w**2 * (one if pooled else variance(group)) / len(group) for w, group in pairs]
        dfs = [len(group) - 1 if len(group) > 1 else math.nan for group in groups]
        df = pooled[1] if pooled else satterthwaite(parts, dfs)
    return Contrast(mean, np.sqrt(sum(parts)), df)


def satterthwaite(parts, dfs):
    """The degrees of freedom of a sum of independent variances, given those of each; arrays or
    numbers."""
    with np.errstate(all="ignore"):
        total = sum(parts)
        df = total**2 / sum(part**2 / each for part, each in zip(parts, dfs, strict=True))
    return np.where(total > 0, df, np.where(total == 0, np.inf, np.nan))


def difference(one, other, covariance=0.0):
    """The Contrast of two estimates, one minus other, with this covariance."""
    variances = [one.se**2, other.se**2]
    se = np.sqrt(sum(variances) - 2 * covariance)
    return Contrast(one.mean - other.mean, se, satterthwaite(variances, [one.df, other.df]))


def variance(group):
    """The unbiased variance of a sample [n, ...]; nan if n is 1."""
    return np.var(group, 0, ddof=1) if len(group) > 1 else np.full(np.shape(group)[1:], math.nan)


def sample_sd(values):
    """The standard deviation of a sample [n]; nan with fewer than two values."""
    return float(np.sqrt(variance(values))) if len(values) else math.nan


def rank_test(x, reference):
    """(p, direction) of a rank-sum test of losses x [n] and reference [m], infinite where a run
    diverged, by random permutations (Phipson and Smyth 2010). A positive direction is worse."""
    ranks = scipy_stats.rankdata(np.concatenate([x, reference]))
    observed = ranks[: len(x)].mean() - ranks.mean()
    null = shuffled_means(tuple(np.sort(ranks)), len(x))
    extreme = len(null) - np.searchsorted(null, abs(observed) - 1e-9)
    return float((extreme + 1) / (len(null) + 1)), float(observed)


@lru_cache
def shuffled_means(ranks, n):
    """How far the mean of n random ones of some ranks is from the mean of all, sorted."""
    shuffled = np.random.default_rng(0).permuted(np.tile(ranks, (PERMUTATIONS, 1)), axis=1)
    return np.sort(abs(shuffled[:, :n].mean(1) - np.mean(ranks)))


# --- many comparisons, many looks


def holm(p, family=None):
    """Holm's corrected p, along the last axis; of `family` hypotheses the others have p = 1."""
    p = np.asarray(p, float)
    count = p.shape[-1]
    order = np.argsort(p, axis=-1)
    steps = max(family or 0, count) - np.arange(count)
    corrected = np.maximum.accumulate(np.take_along_axis(p, order, -1) * steps, -1)
    result = np.empty_like(p)
    np.put_along_axis(result, order, np.minimum(corrected, 1), -1)
    return result


def share_of(planned=None, unplanned=None):
    """The share of ALPHA of one of the `planned` looks, or of the unplanned look with this number,
    from 1."""
    return PLANNED / planned if planned else (1 - PLANNED) / 2**unplanned


def judge(p, p_tie, mean, shares, tie_shares=None, family=None):
    """The words of a family of comparisons. p, p_tie and mean are [looks, ..., family], not
    corrected, with p = 1 where a comparison has not reached a look; shares [looks], for ties
    tie_shares. The last look is at all data, with a share of 0 if it may decide nothing.

    Returns a dict of arrays [..., family]: word, seen (the word that a look gave, also where it no
    longer stands), look (the one that gave it), and the p-values of a difference and of a tie,
    corrected for the looks (p_looks, p_tie_looks) and for the family, too (p_holm, p_tie).
    """
    mean = np.asarray(mean)
    by_look = over_share(p, shares)
    tie_by_look = over_share(p_tie, shares if tie_shares is None else tie_shares)
    look, tie_look = by_look.argmin(0), tie_by_look.argmin(0)
    p_looks, p_tie_looks = by_look.min(0), tie_by_look.min(0)
    p_holm, p_tie_holm = holm(p_looks, family), holm(p_tie_looks, family)

    differs, ties = p_holm <= ALPHA, p_tie_holm <= ALPHA
    then = np.take_along_axis(mean, look[None], 0)[0]  # the difference at the deciding look
    seen = np.select([differs & (then < 0), differs, ties], ["better", "worse", "tie"], "undecided")
    stands = np.where(differs, (p[-1] <= ALPHA) & (mean[-1] * then > 0), p_tie[-1] <= ALPHA)
    return {
        "word": np.where(stands, seen, "undecided"),
        "seen": seen,
        "look": np.where(differs, look, tie_look),
        "p_looks": p_looks,
        "p_tie_looks": p_tie_looks,
        "p_holm": p_holm,
        "p_tie": p_tie_holm,
    }


def over_share(p, shares):
    """p-values [looks, ...] at the level of their looks' shares; 1 where a share is 0."""
    shares = np.reshape(shares, (-1,) + (1,) * (np.ndim(p) - 1))
    with np.errstate(all="ignore"):
        return np.where(shares > 0, np.minimum(p / shares, 1), 1.0)


def pooled_variance(groups):
    """(variance, degrees of freedom) within groups, each [n, ...]. With few runs, a screening finds
    with it what Welch's test cannot; the simulation shows its error where variances differ."""
    groups = [group for group in groups if len(group) > 1]
    df = sum(len(group) - 1 for group in groups)
    return sum((len(group) - 1) * variance(group) for group in groups) / max(df, 1), df


# --- how many runs


def welch_se(sd, n, control_sd, control_n):
    """(standard error, degrees of freedom) of Welch's test for these groups; arrays or numbers."""
    parts = sd**2 / n, control_sd**2 / control_n
    return np.sqrt(sum(parts)), satterthwaite(parts, (n - 1, control_n - 1))


def power_to_differ(effect, se, df, level):
    """The chance that a two-sided t test at this level finds an effect; arrays or numbers."""
    critical = special.stdtrit(df, 1 - level / 2)
    return special.stdtr(df, np.abs(effect) / se - critical)


def power_to_tie(effect, se, df, margin, level):
    """The chance that two one-sided tests at this level show that an effect is below the margin."""
    critical = special.stdtrit(df, 1 - level)
    above, below = (margin - effect) / se - critical, (margin + effect) / se - critical
    return np.maximum(special.stdtr(df, above) + special.stdtr(df, below) - 1, 0)
