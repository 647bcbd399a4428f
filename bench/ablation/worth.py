"""
Worth: a difference of loss, in training tokens.

The base is trained at several multiples of its tokens, with its own full schedule each time.
Between those points the loss is a monotone cubic in the logarithm of the multiple (Fritsch and
Carlson 1980), and beyond them it is not known. The worth of an arm is the multiple at which the
base reaches the arm's loss: its token-equivalent.
"""

import math

import numpy as np
from scipy.interpolate import PchipInterpolator

DRAWS = 2000  # of a Monte Carlo interval
STEPS = 128  # of the logarithm of the multiple, from the first point of the curve to the last
TOKENS_OF_A_MARGIN = 0.05  # the default margin is what this share of the tokens is worth
STEP_RATIO = ["step_ratio", "step_ratio_low", "step_ratio_high"]  # columns of rows.load
Z = 1.96  # half a 95 % interval, in standard errors


class Curve:
    """The base's loss against multiples of its tokens, of which one is 1."""

    def __init__(self, losses):
        """losses: {multiple: losses of its runs}, two or more. Each has few runs, so one standard
        deviation is pooled over all."""
        losses = {k: np.asarray(losses[k], float) for k in sorted(losses)}
        residuals = np.concatenate([values - values.mean() for values in losses.values()])
        df = len(residuals) - len(losses)
        sd = math.sqrt((residuals**2).sum() / df) if df else math.nan
        self.multiples = np.array(list(losses), float)
        self.grid = np.geomspace(self.multiples[0], self.multiples[-1], STEPS + 1)
        self.means = np.array([[values.mean()] for values in losses.values()])  # [points, 1]
        self.errors = np.array([[sd / math.sqrt(len(values))] for values in losses.values()])

    def losses(self, means):
        """The losses [STEPS + 1, ...] on the grid for these means [points, ...]. Means that rise
        with the tokens are put in order first (Chernozhukov et al. 2009)."""
        falling = -np.sort(-np.asarray(means), axis=0)
        return PchipInterpolator(np.log(self.multiples), falling)(np.log(self.grid))

    def loss_at(self, k):
        """The loss at a multiple of the tokens; nan beyond the curve."""
        losses = self.losses(self.means)[:, 0]
        return float(np.interp(k, self.grid, losses, left=math.nan, right=math.nan))

    def margin(self):
        """The nats that 5 % more or fewer tokens are worth at the base's own number of tokens."""
        ends = [self.loss_at(1 + sign * TOKENS_OF_A_MARGIN) for sign in (1, -1)]
        changes = [abs(loss - self.loss_at(1)) for loss in ends if math.isfinite(loss)]
        return sum(changes) / len(changes) if changes else math.nan

    def worth(self, loss, se, n, ratio=(1.0, 1.0, 1.0)):
        """(worth, low, high) of an arm with this mean loss, its standard error and number of runs,
        with a 95 % interval: 0 for a loss above the whole curve, inf for one below it. `ratio`
        (step time over the base's, low, high) makes it a multiple of the time. The interval
        carries the errors of the arm, of the curve and of the ratio."""
        random = np.random.default_rng(0)
        drawn_means = self.means + self.errors * random.standard_normal((len(self.means), DRAWS))
        arm = loss + se * random.standard_t(max(n - 1, 1), DRAWS)

        step, step_low, step_high = ratio
        spread = math.log(step_high / step_low) / (2 * Z)
        steps = step * np.exp(spread * random.standard_normal(DRAWS))
        low = math.nan
        high = math.nan
        if np.isfinite(self.errors).all() and math.isfinite(se):
            drawn = self.multiple(arm, drawn_means) / steps
            low, high = np.quantile(drawn, (0.025, 0.975), method="inverted_cdf")
        return float(self.multiple(loss, self.means)[0] / step), float(low), float(high)

    def multiple(self, loss, means):
        """The multiples [draws] at which curves with these means [points, draws] reach a loss."""
        losses = self.losses(means)  # [STEPS + 1, draws], falling
        after = np.clip((losses > loss).sum(0), 1, STEPS)  # the first point of the grid below
        column = np.arange(losses.shape[1])
        left = losses[after - 1, column]
        right = losses[after, column]
        with np.errstate(all="ignore"):
            share = np.clip(np.nan_to_num((left - loss) / (left - right)), 0, 1)
        log_k = np.log(self.grid[after - 1]) + share * math.log(self.grid[1] / self.grid[0])
        below_all = losses[0] < loss
        above_all = losses[-1] > loss
        return np.select([below_all, above_all], [0.0, math.inf], np.exp(log_k))


def curve_of(runs):
    """The Curve of a sweep's runs; None unless the base ran at two numbers of tokens. It leaves
    out stuck runs, which did not learn, unless all runs of the base are stuck."""
    done = runs[runs.current & (runs.status == "done")]
    learned = done[~done.stuck]
    done = learned if learned.control.any() else done
    done = done[(done.purpose == "curve") | (done.control & (done.purpose == "report"))]
    losses = {k: group.val_loss_report for k, group in done.groupby("tokens")}
    return Curve(losses) if len(losses) > 1 and 1 in losses else None


def columns_of(curve, loss, se, n, ratio):
    """The columns of a verdict with the worth of an arm with this loss. ratio: its step time over
    the base's, with its interval; nan if it was not timed."""
    worth, low, high = curve.worth(loss, se, n)
    columns = {"worth": worth, "worth_low": low, "worth_high": high}
    if np.isfinite(ratio).all() and np.min(ratio) > 0:
        worth, low, high = curve.worth(loss, se, n, ratio)
        columns |= {"worth_time": worth, "worth_time_low": low, "worth_time_high": high}
    return columns
