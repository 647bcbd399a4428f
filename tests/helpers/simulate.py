"""
The errors and the power of the verdicts, over simulated sweeps whose truth is known:

    PYTHONPATH=. python tests/helpers/simulate.py

prints the tables of bench/results/simulation.md. The functions that judge real sweeps judge the
simulated ones.
"""

import itertools
import math
import warnings
from dataclasses import dataclass

import numpy as np
from scipy import stats as scipy_stats

from bench.ablation import verdicts
from bench.ablation.looks import control_runs, share_of
from bench.ablation.power import welch
from bench.ablation.verdicts import ALPHA, contrast, holm, pooled_variance, rank_test

SWEEPS = 20_000  # for each figure
ARMS = 5


@dataclass
class Noise:
    """How runs vary in simulated sweeps. The standard deviation of a run of the base is 1."""

    name: str
    last_sd: float = 1.0  # of the last arm
    correlation: float = 0.0  # of runs with one seed
    df: float = math.inf  # of a t distribution


NOISES = (
    Noise("equal variances"),
    Noise("one arm's variance x 4", last_sd=2.0),
    Noise("runs of one seed correlated 0.5", correlation=0.5),
    Noise("t, 4 degrees of freedom", df=4),
    Noise("t, 4 degrees, and one variance x 4", last_sd=2.0, df=4),
)
LOOKS = {  # name: (planned looks, unplanned looks)
    "1 look": ((5,), ()),
    "1 look, 8 seeds": ((8,), ()),
    "3 looks": ((5, 10, 20), ()),
    "5 looks": ((5, 7, 10, 14, 20), ()),
    "1 look, 4 unplanned": ((5,), (6, 8, 11, 16)),
    "1 look, one at each new seed": ((5,), tuple(range(6, 16))),
}


def draw(seeds, sweeps, noise=NOISES[0], effects=0.0, arms=ARMS):
    """Losses of simulated sweeps: (arms [seeds, sweeps, arms], those of the base and of its second
    copy, each [runs, sweeps, 1]). effects [arms]."""
    random, runs = np.random.default_rng(0), control_runs(arms, seeds)

    def sample(*shape):
        if math.isinf(noise.df):
            return random.standard_normal(shape)
        return random.standard_t(noise.df, shape) / math.sqrt(noise.df / (noise.df - 2))

    shared, own = math.sqrt(noise.correlation), math.sqrt(1 - noise.correlation)
    of_seed = shared * sample(max(seeds, runs[0]), sweeps, 1)
    x = own * sample(seeds, sweeps, arms) + of_seed[:seeds]
    x[..., -1] *= noise.last_sd
    return x + effects, [own * sample(count, sweeps, 1) + of_seed[:count] for count in runs]


def control_at(control, arms, seeds):
    """The runs [n, sweeps, 1] of the control group at a look at so many seeds."""
    counts = control_runs(arms, seeds)
    return np.concatenate([group[:count] for group, count in zip(control, counts, strict=True)])


def words(x, control, planned, unplanned=(), margin=0.0):
    """What each arm is called in the report at each look, [looks, sweeps, arms]."""
    looks = [*planned, *unplanned]
    shares = [share_of(len(planned))] * len(planned)
    shares += [share_of(unplanned=number + 1) for number in range(len(unplanned))]
    tests = [contrast([x[:n], control_at(control, x.shape[-1], n)]) for n in looks]
    p, p_tie, mean = np.array(
        [(test.p(), test.p_tie(margin), test.difference) for test in tests]
    ).swapaxes(0, 1)
    ends = range(1, len(looks) + 1)
    return np.array(
        [verdicts.words(p[:n], p_tie[:n], mean[:n], shares[:n])["verdict"] for n in ends]
    )


# --- figures, each a share of the sweeps


def family_error(sweeps, noise, planned, unplanned=()):
    """Some report calls an arm better or worse, where all equal the base."""
    found = words(*draw(max(*planned, *unplanned, 0), sweeps, noise), planned, unplanned)
    return np.isin(found, ["better", "worse"]).any((0, 2)).mean()


def power(sweeps, seeds, effect, noise=NOISES[0]):
    """(an arm is called better whose loss is `effect` lower, the first version's rule says so). The
    other arms equal the base."""
    x, control = draw(seeds, sweeps, noise, np.array([-effect] + [0] * (ARMS - 1)))
    paired = scipy_stats.ttest_rel(x, np.broadcast_to(control[0][:seeds], x.shape)).pvalue
    found = words(x, control, [seeds])[-1, :, 0] == "better"
    return found.mean(), (holm(paired) <= ALPHA)[:, 0].mean()


def tie_rates(sweeps, seeds, ratio):
    """(an arm that equals the base ties, some arm ties whose difference is the margin), where the
    margin is `ratio` standard deviations of a run."""
    x, control = draw(seeds, sweeps)
    equal, different = (words(x + d, control, [seeds], (), ratio)[-1] == "tie" for d in (0, ratio))
    return equal.mean(), different.any(1).mean()


def diverging(sweeps, seeds, chance, effect):
    """(better, worse, better if the runs that diverged are dropped): an arm whose runs diverge with
    this chance, and are lower by `effect` otherwise."""
    x, control = draw(seeds, sweeps, effects=-effect, arms=1)
    x, control, level = x[..., 0], np.concatenate(control)[..., 0], ALPHA * share_of(1)
    diverged = np.random.default_rng(1).random(x.shape) < chance
    p, direction = rank_test(np.where(diverged, math.inf, x), control)
    clean = ~diverged.any(0)
    test = contrast([x, control])
    better = clean & (test.p() <= level) & (test.difference < 0)
    worse = np.where(
        clean, (test.p() <= level) & (test.difference > 0), (p <= level) & (direction > 0)
    )
    rest = np.where(diverged, math.nan, x)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        sd, control_sd = np.nanstd(rest, 0, ddof=1), control.std(0, ddof=1)
        se, df = welch(sd, (~diverged).sum(0), control_sd, len(control))
        t = (np.nanmean(rest, 0) - control.mean(0)) / se
        dropped = scipy_stats.t.cdf(t, df) <= ALPHA / 2
    return better.mean(), worse.mean(), np.mean(dropped)


def screening_rates(sweeps, seeds, noise, effect=0.0):
    """(some arm that equals the base is called larger than the noise, an arm is called so that is
    lower by `effect`). The base and its copy have as many runs as an arm."""
    x, control = draw(seeds, sweeps, noise, np.array([-effect] + [0] * (ARMS - 1)))
    control = np.concatenate([group[:seeds] for group in control])[..., 0]
    groups = list(np.moveaxis(x, -1, 0))
    pooled = pooled_variance([*groups, control])
    p = [contrast([group, control], pooled=pooled).p() for group in groups]
    found = holm(np.stack(p, -1)) <= ALPHA
    return found[:, 1 if effect else 0 :].any(1).mean(), found[:, 0].mean()


# --- the page


def table(headings, rows):
    """A Markdown table; the numbers of a row are shares, in percent."""
    cells = [[f"{100 * c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(sweeps):
    """The tables of simulation.md, in its order."""
    ratios = {".0096 / .007": 0.0096 / 0.007, ".0096 / .0088": 0.0096 / 0.0088}
    yield table(
        ["noise", *LOOKS],
        [[n.name, *(family_error(sweeps, n, *looks) for looks in LOOKS.values())] for n in NOISES],
    )
    yield table(
        ["seeds", "control", "effect", "found", "paired t tests"],
        [
            [seeds, sum(control_runs(ARMS, seeds)), effect, *power(sweeps, seeds, effect)]
            for seeds, effect in itertools.product((3, 5, 8, 10), (1, 2, 3))
        ],
    )
    yield table(
        ["margin / sd", "seeds", "ties, no difference", "ties at the margin"],
        [
            [f"{name} = {ratio:.2f}", seeds, *tie_rates(sweeps, seeds, ratio)]
            for (name, ratio), seeds in itertools.product(ratios.items(), (5, 8, 12, 16))
        ],
    )
    yield table(
        ["chance to diverge", "others lower by", "better", "worse", "better, if dropped"],
        [
            [f"{chance:g}", effect, *diverging(sweeps // 2, 8, chance, effect)]
            for chance, effect in itertools.product((0, 0.1, 0.4, 0.8), (0, 2))
        ],
    )
    yield table(
        ["seeds", "noise", "error", "finds 2", "finds 3", "finds 4"],
        [
            [seeds, noise.name, screening_rates(sweeps, seeds, noise)[0]]
            + [screening_rates(sweeps, seeds, noise, effect)[1] for effect in (2, 3, 4)]
            for seeds, noise in itertools.product((2, 3), NOISES)
        ],
    )


if __name__ == "__main__":
    print(*tables(SWEEPS), sep="\n\n")
