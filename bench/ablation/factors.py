"""The factors of the settings (text, optimizer, ...) on which the worth of a part depends."""

import numpy as np
import pandas as pd
from scipy.special import logsumexp

from bench.ablation import effects

SHIFTS = np.linspace(-4, 4, 33)  # effects of a factor, in units of the part's spread
STEPS = np.linspace(-8, 8, 17)  # of the grid of the mean; enough for an integral
ERROR = 0.05  # the chance to name any factor of a part that depends on none
ENOUGH = 12  # planned settings; fewer cannot tell the factors apart


def levels_of(measured, settings):
    """A table with a row for each of some settings, and a column for each factor of two levels."""
    levels = pd.DataFrame({each.name: each.facts["factors"] for each in measured}).T
    levels = levels.loc[list(dict.fromkeys(settings))]
    return levels.loc[:, levels.nunique() == 2]


def depends_on(worths, factors):
    """{part: {factor: its two levels, the better one first}} of the factors whose main effect on
    the log worth of a part is decided. worths: as effects.fit takes them. factors: {factor:
    {setting: level}}, or a pandas table with a row for each setting. Only factors of two levels are
    judged, and none of a part whose settings are too few to tell them apart."""
    found = {}
    for part, posterior in effects.posteriors(worths).items():
        settings = posterior.rows["setting"]
        signs = {}  # {factor: 0.5 for each setting at the level of the first setting, else -0.5}
        for factor in factors:
            levels = [factors[factor][setting] for setting in settings]
            if len(set(levels)) == 2:
                signs[factor] = np.array([level == levels[0] for level in levels]) - 0.5
        design = np.column_stack([np.ones(len(settings)), *signs.values()])
        rank = np.linalg.matrix_rank(design)
        can_be_told_apart = rank == 1 + len(signs) and rank < len(settings)
        found[part] = {}
        if not can_be_told_apart:
            continue
        for factor, sign in signs.items():
            better_sign = more_with(posterior, sign, ERROR / len(signs))
            if better_sign:
                better = settings[np.argmax(sign == better_sign)]
                worse = settings[np.argmax(sign != better_sign)]
                found[part][factor] = [factors[factor][better], factors[factor][worse]]
    return found


def more_with(posterior, sign, error):
    """The sign, 0.5 or -0.5, of the level with which a part is worth more; 0 if that is not
    decided. The effect has a flat prior; the part's own mean and tau are integrated out. sign: of
    the level of each setting."""
    evidence = []
    for shift in SHIFTS * effects.spread(posterior.rows):
        *_, log_likelihood = effects.grid(posterior.rows, posterior.taus, STEPS, shift * sign)
        evidence.append(logsumexp(logsumexp(log_likelihood, 1) + np.log(posterior.prior)))
    weights = np.exp(evidence - max(evidence))
    weights /= weights.sum()
    for level in (0.5, -0.5):
        if weights[SHIFTS * level > 0].sum() > 1 - error / 2:
            return level
    return 0
