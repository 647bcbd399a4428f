"""What a sweep of this size can find, and how many more seeds would decide what is open."""

import math

import numpy as np
from scipy import special

from bench.ablation.significance import (
    ALPHA,
    MOST_SEEDS,
    POWER,
    power_to_differ,
    power_to_tie,
    share_of,
    welch_se,
)


def look_ahead(sweep, verdicts, analysis, pooled=None):
    """Fill in what the sweep can find, by the median arm's noise, and how many more seeds would
    decide the undecided. `pooled` is the variance of a screening and its degrees of freedom."""
    if pooled:
        n = [verdict.n for verdict in verdicts if math.isfinite(verdict.mean)]
        if n and pooled[1] and pooled[0] > 0 and analysis.family:
            analysis.visible = visible_in_screening(
                *pooled, int(np.median(n)), analysis.base_n, analysis.family
            )
        return
    spread = [verdict for verdict in verdicts if verdict.loss_sd > 0]
    if not spread or not analysis.base_sd > 0:
        return
    sd = float(np.median([verdict.loss_sd for verdict in spread]))
    n = int(np.median([verdict.n for verdict in spread]))
    level = ALPHA * max(look.share for look in analysis.looks) / analysis.family

    se, df = welch_se(sd, n, analysis.base_sd, analysis.base_n)
    effects = np.geomspace(0.05, 200, 2000) * sd
    analysis.visible = first(effects, power_to_differ(effects, se, df, level) >= POWER)
    if analysis.margin > 0:
        analysis.tie_power = float(power_to_tie(0, se, df, analysis.margin, level))
        numbers = np.arange(2, MOST_SEEDS + 1)
        se, df = welch_se(sd, numbers, analysis.base_sd, numbers * analysis.base_n / n)
        analysis.tie_seeds = first(
            numbers, power_to_tie(0, se, df, analysis.margin, level) >= POWER
        )

    for verdict in verdicts:
        if verdict.word == "undecided" and math.isfinite(verdict.mean):
            verdict.more = more_seeds(verdict, analysis, sorted(sweep["looks"]))


def visible_in_screening(variance, df, n, base_n, family):
    """The smallest effect that POWER of all screenings find: n runs of the arm and base_n of the
    base, a variance pooled over all arms with df degrees of freedom, and the first step of Holm's
    method over the family. A screening has no looks, so the whole of ALPHA is for it."""
    se = math.sqrt(variance * (1 / n + 1 / base_n))
    critical = special.stdtrit(df, 1 - ALPHA / family / 2)
    effects = np.geomspace(0.05, 200, 8000) * se
    return first(effects, 1 - special.nctdtr(df, effects / se, critical) >= POWER)


def more_seeds(verdict, analysis, looks):
    """About how many more seeds would decide a comparison, with 80 % power at the observed
    difference: to differ or to tie, at the level of the next look; 0 if over MOST_SEEDS. At least
    as many as lead to the next look."""
    ahead = [look for look in looks if look > verdict.n]
    unplanned = sum(0 < look.share < 1.5 * share_of(unplanned=1) for look in analysis.looks)
    share = share_of(len(looks)) if ahead else share_of(unplanned=unplanned + 1)
    level, numbers = ALPHA * share / analysis.family, np.arange(verdict.n + 1, MOST_SEEDS + 1)

    # The control group grows with the arm.
    se, df = verdict.se * np.sqrt(verdict.n / numbers), verdict.n_against + numbers - 2
    enough = deciding(numbers, verdict.mean, se, df, analysis.margin, level)
    return max(enough, *ahead[:1], 0) - verdict.n if enough else 0


def deciding(numbers, effect, se, df, margin, level):
    """The first of some numbers of runs, with these standard errors and degrees of freedom, with
    which an effect is shown to differ or to tie; None if there is none."""
    decides = power_to_differ(effect, se, df, level) >= POWER
    if margin > 0:
        decides |= power_to_tie(effect, se, df, margin, level) >= POWER
    return first(numbers, decides)


def first(values, found):
    """The first value for which something is found, or None."""
    return values[np.argmax(found)].item() if found.any() else None
