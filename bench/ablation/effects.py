"""
What a part is worth over settings, and in a setting that nobody has measured: random effects.

    log worth of a part in a setting = the part's mean + normal(tau of the part) + normal(se)

The tau of all parts share a log-normal prior whose own parameters are averaged by their likelihood,
so that four settings suffice. A grid over tau and mean makes each probability a sum; the mean's
prior is flat, which is REML. The prediction for a new setting is the mixture of normal(mean, tau)
over that grid. Parts are judged one by one, so se includes the error of the base, which all arms of
a setting share.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp, ndtr

LEAST_SETTINGS = 4  # with fewer, no prediction is made
SURE = 0.9  # the probability that a word needs
SMALL = 0.5  # neither "helps" nor "hurts" where P(no difference) is above it
WITHIN = np.log(1.05)  # a smaller log worth makes no difference
TAUS = np.geomspace(0.02, 12, 40)  # in units of the spread of all parts
STEPS = np.linspace(-8, 8, 33)  # of the grid of the mean, in its standard errors
BLUR = 0.25  # in the same unit: each point of a grid stands for a normal, so that a sum is smooth
CENTERS = np.log(np.geomspace(0.05, 4, 24))  # of the prior of log tau
WIDTHS = np.array([0.25, 0.5, 0.75, 1.0, 1.5])
OPEN = 1e-3  # of the highest weight: more at an end of the mean's grid leaves an interval open


@dataclass
class Effect:
    """A part over its settings, in log worths: np.exp makes worths. nan: nothing is known."""

    part: str
    n_settings: int
    n_helps: int  # settings in which its worth is above 1
    mean: float = np.nan  # or the end of its interval that is known, where the other is open
    mean_low: float = np.nan  # 95 % interval of the mean over settings; infinite where it is open
    mean_high: float = np.nan
    new_low: float = np.nan  # 95 % prediction interval of a new setting
    new_high: float = np.nan
    p_helps: float = np.nan  # probability that the part helps in a new setting
    p_within: float = np.nan  # probability that it makes no difference there
    word: str = "not known"

    @property
    def chance(self):
        """p_helps with as many digits as show its side of a word's limit; "" if it is unknown."""
        if np.isnan(self.p_helps):
            return ""

        def side(p):  # 1 - SURE is 0.0999...
            return p >= SURE, p <= round(1 - SURE, 9)

        digits = 2
        while side(self.p_helps) != side(float(f"{self.p_helps:.{digits}f}")):
            digits += 1
        return f"{self.p_helps:.{digits}f}"


def fit(worths, within=WITHIN):
    """[Effect] of each part, in the order of `worths`: a pandas table, or a dictionary of columns,
    with a row for each part in each setting. Columns: part, setting, log_worth, se, and optionally
    censored: 1 where the worth is above log_worth (the end of the curve), -1 where it is below (or
    the runs diverged). within: the largest difference that counts as none."""
    effects = []
    for part, posterior in posteriors(worths).items():
        y = posterior.rows["log_worth"]
        effect = Effect(part, n_settings=len(y), n_helps=int((y > 0).sum()))
        if effect.n_settings >= LEAST_SETTINGS:
            effect.mean = posterior.quantile(0.5, new=False)
            effect.mean_low, effect.mean_high = posterior.interval(new=False)
            if effect.mean_high == np.inf:
                effect.mean = effect.mean_low
            elif effect.mean_low == -np.inf:
                effect.mean = effect.mean_high
            effect.new_low, effect.new_high = posterior.interval()
            effect.p_helps = 1 - posterior.below(0)
            effect.p_within = posterior.inside(within)
            effect.word = word_of(effect)
        effects.append(effect)
    return effects


def word_of(found):
    """The word that a reader is told of an Effect or a Prediction."""
    if found.p_within >= SURE:
        return "no difference"
    if found.p_helps >= SURE and not found.p_within > SMALL:  # not: it may be nan
        return "helps"
    if found.p_helps <= 1 - SURE and not found.p_within > SMALL:
        return "hurts"
    return "not known"


@dataclass
class Posterior:
    """What the settings of a part say about its mean and its tau."""

    rows: dict  # {column: values [settings]} of the part
    taus: np.ndarray  # [taus, 1]
    means: np.ndarray  # [taus, steps]
    errors: np.ndarray  # [taus, 1]: the standard error of the mean for each tau
    weights: np.ndarray  # [taus, steps]; their sum is 1
    prior: np.ndarray  # [taus]

    def below(self, x, new=True, se=0.0):
        """The probability that the log worth in a new setting, measured with an error se, is below
        x; new=False: that the mean over settings is."""
        variance = (BLUR * self.errors) ** 2 + se**2
        if new:
            variance = variance + self.taus**2
        return float((self.weights * ndtr((x - self.means) / np.sqrt(variance))).sum())

    def inside(self, within):
        """The probability that the log worth in a new setting is between -within and within."""
        return self.below(within) - self.below(-within)

    def quantile(self, share, new=True, se=0.0):
        """The log worth that has this share of the probability below it."""
        reach = 8 * np.hypot(self.taus.max(), se)
        low = self.means.min() - reach
        high = self.means.max() + reach
        return brentq(lambda x: self.below(x, new, se) - share, low, high, xtol=1e-6 * (high - low))

    def interval(self, new=True, se=0.0):
        """The 95 % interval; infinite where censored worths leave it open."""
        of_steps = self.weights.sum(0)
        ends = of_steps[[0, -1]] > OPEN * of_steps.max()
        low = -np.inf if ends[0] else self.quantile(0.025, new, se)
        high = np.inf if ends[1] else self.quantile(0.975, new, se)
        return low, high


def posteriors(worths):
    """{part: Posterior} of a table of worths, as `fit` describes it."""
    columns = columns_of(worths)
    rows = {}
    for part in dict.fromkeys(columns["part"]):
        is_part = columns["part"] == part
        rows[str(part)] = {key: values[is_part] for key, values in columns.items()}
    if not rows:
        return {}
    unit = np.sqrt(np.mean([spread(part_rows) ** 2 for part_rows in rows.values()]))
    taus = TAUS[:, None] * max(unit, 1e-9)  # where all worths are equal and without an error
    grids = [grid(part_rows, taus) for part_rows in rows.values()]

    z = (np.log(TAUS) - CENTERS[:, None, None]) / WIDTHS[:, None]
    priors = np.exp(-(z**2) / 2).reshape(-1, len(TAUS))
    priors /= priors.sum(1, keepdims=True)  # [priors, taus]
    likelihoods = []  # [taus] of each part, summed over the means
    for _, _, log_likelihood in grids:
        likelihoods.append(np.exp(logsumexp(log_likelihood, 1) - log_likelihood.max()))
    marginal = np.array(likelihoods) @ priors.T  # [parts, priors]
    evidence = np.log(marginal).sum(0)
    prior_weights = np.exp(evidence - evidence.max())  # by all parts

    found = {}
    for part, part_grid, part_marginal in zip(rows, grids, marginal, strict=True):
        means, errors, log_likelihood = part_grid
        prior = (prior_weights / part_marginal) @ priors  # without this part's own evidence
        weights = np.exp(log_likelihood - log_likelihood.max()) * prior[:, None]
        weights /= weights.sum()
        found[part] = Posterior(rows[part], taus, means, errors, weights, prior)
    return found


def columns_of(worths):
    """The columns of a table of worths as arrays."""
    columns = {key: np.asarray(worths[key]) for key in ("part", "setting")}
    columns |= {key: np.asarray(worths[key], float) for key in ("log_worth", "se")}
    censored = worths["censored"] if "censored" in worths else np.zeros(len(columns["se"]))
    return columns | {"censored": np.asarray(censored, int)}


def spread(rows):
    """How far a part's worths lie from their mean, with their errors: one standard deviation."""
    return np.sqrt(rows["log_worth"].var() + (rows["se"] ** 2).mean())


def grid(rows, taus, steps=STEPS, shift=0.0):
    """The worths of a part minus `shift`, on a grid: its means [taus, steps], the mean's standard
    errors [taus, 1], and the log likelihood [taus, steps]."""
    y = rows["log_worth"] - shift
    precision = 1 / (taus**2 + rows["se"] ** 2)  # [taus, settings]
    total = precision.sum(1, keepdims=True)
    errors = 1 / np.sqrt(total)
    means = (precision * y).sum(1, keepdims=True) / total + errors * steps
    scale = np.sqrt(precision)[:, None]  # [taus, 1, settings]
    z = (y - means[..., None]) * scale
    exact = np.log(scale) - z**2 / 2
    censored = rows["censored"]
    if censored.any():
        exact = np.where(censored == 0, exact, log_ndtr(-censored * z))
    return means, errors, exact.sum(2) + np.log(errors)
