"""
The statistical tests behind a verdict, on arrays of losses. SciPy and statsmodels compute them;
this module says which of them decides what:

- A paired t test gives the mean difference, its 95 % interval and its p-value. The interval is
  not corrected for the number of arms.
- A sweep that may stop at n1, n2, ... seeds looks at its data L times. Its p-value is L times the
  smallest at the looks reached so far (Bonferroni over the L planned looks). By the union bound
  this holds however the arms to continue with are chosen, and needs no model.
- Holm's method corrects for the family of all planned comparisons. Those that failed or have not
  run count with p = 1. This corrected p-value decides.
- Two one-sided t tests against the margin show equivalence (Schuirmann 1987), so a tie is a
  result. They are corrected for the looks, not for the family.
- The sign-flip p-value, which cannot fall below 2/2^n, and the BCa bootstrap from ten seeds on
  (with five seeds it covers about 84 %) stand beside them and decide nothing.
"""

import math
import warnings

import numpy as np
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

ALPHA, POWER = 0.05, 0.8
MOST_SEEDS = 300  # an estimate above this is too uncertain to be useful
MOST_PAIRS_FLIPPED = 13  # up to here every flip is tried, 2^13 of them
LARGEST_EFFECT = 10  # in standard deviations; the power is 1 beyond it


def quietly(function, *args, **keys):
    """Call without warnings: SciPy warns when all differences are equal. Their p-value is then
    0, or nan if they are all 0."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return function(*args, **keys)


def compare(x, reference, margin, counts, looks):
    """Compare losses x with reference, both [n, ...] and paired along the first axis; margin is a
    number or [...]. `counts` holds the number of pairs at each look reached, of `looks` planned.

    Returns a dict of arrays [...]: mean, low, high, sd and p of all n pairs; p_differ and p_tie
    corrected for the looks.
    """
    x, reference = np.asarray(x, float), np.asarray(reference, float)
    differences = x - reference
    whole = quietly(scipy_stats.ttest_1samp, differences, 0)
    low, high = quietly(whole.confidence_interval, 1 - ALPHA)

    p_differ = np.ones(differences.shape[1:])
    p_tie = np.ones(differences.shape[1:])
    for count in counts:
        if count < 2:  # one pair has no variance
            continue
        p = quietly(scipy_stats.ttest_1samp, differences[:count], 0).pvalue
        p_differ = np.fmin(p_differ, looks * p)  # fmin ignores nan: equal losses show no difference
        p_tie = np.fmin(p_tie, looks * equivalence(x[:count], reference[:count], margin))

    return {
        "mean": differences.mean(0),
        "low": low,
        "high": high,
        "sd": quietly(differences.std, axis=0, ddof=1),
        "p": np.nan_to_num(whole.pvalue, nan=1),
        "p_differ": p_differ,
        "p_tie": p_tie,
    }


def equivalence(x, reference, margin):
    """The p-value [...] of two one-sided paired t tests that x and reference [n, ...] differ by
    less than the margin."""
    n, *shape = x.shape
    bound = np.broadcast_to(margin, shape).ravel()
    columns = x.reshape(n, -1), reference.reshape(n, -1)  # statsmodels takes no third axis
    return quietly(ttost_paired, *columns, -bound, bound)[0].reshape(shape)


def judge(p_differ, p_tie, mean):
    """(words, p_holm) of one family of comparisons, all [family]. A difference that is
    significant but smaller than the margin is better or worse, not a tie."""
    differs, p_holm = multipletests(p_differ, ALPHA, "holm")[:2]
    direction = np.where(np.asarray(mean) < 0, "better", "worse")
    otherwise = np.where(np.asarray(p_tie) <= ALPHA, "tie", "undecided")
    return np.where(differs, direction, otherwise).tolist(), p_holm


def sign_flip(differences):
    """The two-sided p-value of the mean of differences [n] if each sign were a coin flip: exact up
    to 13 pairs, from 9999 random flips beyond."""
    exact = len(differences) <= MOST_PAIRS_FLIPPED
    test = scipy_stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        axis=-1,
        n_resamples=np.inf if exact else 9999,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def bca(differences):
    """The 95 % BCa bootstrap interval (low, high) of the mean of differences [n]; None if they are
    all equal."""
    bootstrap = quietly(
        scipy_stats.bootstrap,
        (differences,),
        np.mean,
        confidence_level=1 - ALPHA,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    interval = bootstrap.confidence_interval
    return tuple(map(float, interval)) if np.isfinite(interval).all() else None


def more_seeds(mean, sd, margin, n, family, looks):
    """Estimate how many more pairs would decide a comparison that has n: 80 % power at the
    observed mean and sd, to differ at the level of Holm's first step or to tie, whichever needs
    fewer. None if that takes more than MOST_SEEDS. The observed effect is itself uncertain, so this
    is a hint only."""
    if not sd > 0:
        return 1
    numbers, power = np.arange(3, MOST_SEEDS + 1), TTestPower().power
    level = ALPHA / looks
    effect = min(abs(mean) / sd, LARGEST_EFFECT)
    decides = quietly(power, effect, numbers, level / family) >= POWER

    room = (margin - abs(mean)) / sd if margin else 0
    if room > 0:
        room = min(room, LARGEST_EFFECT)
        each = (1 + POWER) / 2  # both one-sided tests must pass: 90 % each makes 80 % together
        decides |= quietly(power, room, numbers, level, alternative="larger") >= each

    if not decides.any():
        return None
    return max(int(numbers[decides][0]) - n, 1)


def smallest_visible(sd, n, family, looks):
    """The smallest difference that n pairs with this sd find in 80 of 100 sweeps, at the level of
    Holm's first step; None with fewer than two pairs."""
    if n < 2 or not sd > 0:
        return None
    effects = np.geomspace(0.05, 200, 2000)
    found = quietly(TTestPower().power, effects, n, ALPHA / looks / family) >= POWER
    return float(effects[np.argmax(found)] * sd) if found.any() else None


def sample_sd(values):
    """The standard deviation of a sample [n]; nan with fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def correlation(x, reference):
    """The correlation of pairs, both [n]; nan if one of them does not vary."""
    return float(quietly(np.corrcoef, x, reference)[0, 1])
