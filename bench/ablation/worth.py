"""
What a difference of loss is worth: so many times the training tokens, or the time.

The base is trained at several multiples of its tokens, with its own full schedule each time.
Between those points the loss is a monotone cubic in the logarithm of the multiple (Fritsch and
Carlson 1980), and beyond them it is not known. The worth of an arm is the multiple at which the
base reaches the arm's loss.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.interpolate import PchipInterpolator

DRAWS = 2000  # of a Monte Carlo interval
STEPS = 128  # of the logarithm of the multiple, from the first point of the curve to the last
TOKENS_OF_A_MARGIN = 0.05  # the default margin is what this share of the tokens is worth


def two_digits(k):
    """A multiple with two digits, so that 1.0 does not look like a count: 0.97, 1.0, 12."""
    return f"{k:#.2g}".rstrip(".")


@dataclass
class Worth:
    """A multiple of the tokens, or of the time, with its 95 % interval: inf above `most`, the last
    point of the curve, and 0 below `least`, the first. The interval is nan if it is unknown."""

    k: float
    low: float
    high: float
    least: float
    most: float

    def __str__(self):
        if math.isnan(self.low + self.high) or self.low == self.high:  # all beyond the curve
            return self.words(self.k)
        low, high = self.words(self.low, ""), self.words(self.high, "")
        return f"{self.words(self.k)} ({low} to {high})"

    def in_time(self, ratio):
        """The same as a multiple of the time, of steps that take `ratio` times as long."""
        return Worth(*(each / ratio for each in vars(self).values()))

    def words(self, k, unit=" ×"):
        if k == math.inf:
            return f"more than {self.most:.3g}{unit}"
        return f"{two_digits(k)}{unit}" if k else f"less than {self.least:.3g}{unit}"


@dataclass
class Curve:
    """The base's loss against multiples of its tokens, of which one is 1."""

    points: list  # of (multiple, mean loss, standard error, runs), by multiple

    @cached_property
    def multiples(self):
        return np.array([point[0] for point in self.points], float)

    @cached_property
    def grid(self):
        """Multiples from the first point to the last, evenly spaced in their logarithm."""
        return np.geomspace(self.multiples[0], self.multiples[-1], STEPS + 1)

    def losses(self, means):
        """The losses [STEPS + 1, ...] on the grid for these means [points, ...]. Means that rise
        with the tokens are put in order first (Chernozhukov et al. 2009)."""
        falling = -np.sort(-np.asarray(means), axis=0)
        return PchipInterpolator(np.log(self.multiples), falling)(np.log(self.grid))

    def loss_at(self, k):
        """The loss at a multiple of the tokens; nan beyond the curve."""
        losses = self.losses([point[1] for point in self.points])
        return float(np.interp(k, self.grid, losses, left=math.nan, right=math.nan))

    def worth(self, mean, se, n, ratio=None):
        """The Worth of an arm with this mean loss, its standard error and number of runs. `ratio`
        (step time over the base's: ratio, low, high) makes it a multiple of the time. The interval
        carries the errors of the arm, of the curve and of the ratio."""
        random = np.random.default_rng(0)
        columns = np.array([point[1:3] for point in self.points], float)  # [points, 2]
        noise = random.standard_normal((len(columns), DRAWS))
        means = columns[:, :1] + columns[:, 1:] * noise
        arm = mean + se * random.standard_t(max(n - 1, 1), DRAWS)

        value, speed, speeds = self.multiple(mean, columns[:, :1])[0], 1.0, 1.0
        if ratio:
            speed, low, high = ratio
            spread = math.log(high / low) / (2 * 1.96)
            speeds = speed * np.exp(spread * random.standard_normal(DRAWS))
        low = high = math.nan
        if np.isfinite(columns).all() and math.isfinite(se):
            drawn = self.multiple(arm, means) / speeds
            low, high = np.quantile(drawn, (0.025, 0.975), method="inverted_cdf")
        least, most = self.multiples[[0, -1]] / speed
        return Worth(*map(float, (value / speed, low, high, least, most)))

    def multiple(self, loss, means):
        """The multiples [draws] at which curves with these means [points, draws] reach a loss."""
        losses = self.losses(means)  # [STEPS + 1, draws], falling
        above = (losses > loss).sum(0)
        after, column = np.clip(above, 1, STEPS), np.arange(losses.shape[1])
        left, right = losses[after - 1, column], losses[after, column]
        with np.errstate(all="ignore"):
            share = np.clip(np.nan_to_num((left - loss) / (left - right)), 0, 1)
        log_k = np.log(self.grid[after - 1]) + share * math.log(self.grid[1] / self.grid[0])
        below_all, above_all = losses[0] < loss, losses[-1] > loss
        return np.select([below_all, above_all], [0.0, math.inf], np.exp(log_k))


def curve_from(losses):
    """The Curve of {multiple: losses of its runs}, or None if a point at 1 or a second one is
    missing. One standard deviation is pooled over all points, because each has few runs."""
    losses = {k: np.asarray(values, float) for k, values in sorted(losses.items()) if len(values)}
    if len(losses) < 2 or 1 not in losses:
        return None
    spread = np.concatenate([values - values.mean() for values in losses.values()])
    df = len(spread) - len(losses)
    sd = math.sqrt((spread**2).sum() / df) if df else math.nan
    return Curve([(k, float(v.mean()), sd / math.sqrt(len(v)), len(v)) for k, v in losses.items()])


def margin_from(curve):
    """The nats that 5 % more or fewer tokens are worth at the base's own number of tokens."""
    more, fewer = 1 + TOKENS_OF_A_MARGIN, 1 - TOKENS_OF_A_MARGIN
    ends = [k for k in (more, fewer) if curve.multiples[0] <= k <= curve.multiples[-1]]
    if not ends:
        return math.nan
    return sum(abs(curve.loss_at(k) - curve.loss_at(1)) for k in ends) / len(ends)
