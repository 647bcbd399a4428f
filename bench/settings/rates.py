"""
The loss of a base or an arm at its best learning rate.

Over a factor of two or so the loss is a quadratic in the logarithm of the rate. The place of its
least value is read off the half of the validation text that chooses, and the value there off the
half that is reported, so that the text that chose does not flatter the loss; the noise of the runs
remains. One curvature is shared by all curves that are fitted together, since each has few runs. If
it is not positive, no rate is seen to be better, and the loss is the mean of all runs. A run that
diverged is a point at infinity: that rate and all higher ones are ruled out.
"""

import math

import numpy as np

CHOOSING = "val_loss_tune"
REPORTED = "val_loss_report"


def before_divergence(points):
    """The points (log rate, loss) below the first rate at which a run diverged."""
    wall = min((x for x, loss in points if math.isinf(loss)), default=math.inf)
    return [(x, loss) for x, loss in points if x < wall]


def common_curvature(curves):
    """The common curvature of some curves, each [(log rate, loss)] at three rates or more, by least
    squares; None if no curve has three rates, or if it is not positive."""
    squares = 0.0
    products = 0.0
    for points in map(before_divergence, curves):
        x = np.array([point[0] for point in points])
        y = np.array([point[1] for point in points])
        if len(set(x)) < 3:
            continue
        line = np.stack([np.ones_like(x), x], 1)
        square = x**2 - line @ np.linalg.lstsq(line, x**2, rcond=None)[0]  # what no line explains
        squares += square @ square
        products += square @ y
    return products / squares if squares and products > 0 else None


def linear_part(points, curvature):
    """(level, slope) of the quadratic with this curvature through points (log rate, loss)."""
    x = np.array([point[0] for point in points])
    y = np.array([point[1] for point in points]) - curvature * x**2
    if len(set(x)) == 1:
        return float(y.mean()), 0.0
    slope, level = np.polyfit(x, y, 1)
    return float(level), float(slope)


def best_place(points, curvature, low, high):
    """The log rate in [low, high] at which the quadratic through the points is least. Without a
    curvature: the rate of the least mean loss. None if a run diverged at the lowest rate."""
    points = before_divergence(points)
    if not points:
        return None
    high = min(high, max(x for x, _ in points))
    low = min(max(low, min(x for x, _ in points)), high)
    if curvature is None:
        means = {x: np.mean([y for z, y in points if z == x]) for x, _ in points}
        return float(np.clip(min(means, key=means.get), low, high))
    _, slope = linear_part(points, curvature)
    return float(np.clip(-slope / (2 * curvature), low, high))


def value_at(points, curvature, place):
    """(loss, share) of the quadratic through the points at a log rate. share: the variance of the
    loss, as a share of the variance of a run. Without a curvature, no rate is seen to be better:
    the mean of all runs, since the least of a few noisy losses is too low."""
    points = before_divergence(points)
    x = np.array([point[0] for point in points])
    if curvature is None or len(set(x)) == 1:
        return float(np.mean([loss for _, loss in points])), 1 / len(points)
    level, slope = linear_part(points, curvature)
    spread = ((x - x.mean()) ** 2).sum()
    share = 1 / len(x) + (place - x.mean()) ** 2 / spread
    return level + slope * place + curvature * place**2, float(share)


def residuals(points, curvature):
    """(sum of squares, degrees of freedom) of the points about what value_at fits to them: their
    quadratic, whose curvature costs no degree here, or their mean."""
    points = before_divergence(points)
    if not points:
        return 0.0, 0
    if curvature is None or len({x for x, _ in points}) == 1:
        losses = [loss for _, loss in points]
        return len(losses) * float(np.var(losses)), len(losses) - 1
    level, slope = linear_part(points, curvature)
    squares = sum((loss - level - slope * x - curvature * x**2) ** 2 for x, loss in points)
    return float(squares), len(points) - 2
