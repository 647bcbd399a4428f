"""
The errors and the power of the verdicts, over simulated sweeps whose truth is known:

    PYTHONPATH=. python tests/helpers/simulate.py

writes the tables of bench/results/simulation.md between its paragraphs. The functions that judge
real sweeps judge the simulated ones.
"""

import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

from bench.ablation import contrasts, plans
from bench.ablation.contrasts import compare, contrast, pooled_variance
from bench.ablation.power import ALPHA, least_runs
from common.commands import ROOT

PAGE = ROOT / "bench" / "results" / "simulation.md"
SWEEPS, AT_ONCE = 20_000, 2000  # for each figure, and of these in one array
TRIGRAMS, SEEN, HIDDEN = 100.0, 140.0, 40.0  # above the base: their loss, a plateau's


@dataclass
class Noise:
    """How runs vary in simulated sweeps. The standard deviation of a run of the base is 1."""

    name: str
    last_sd: float = 1.0  # of the last arm
    arms_sd: float = 1.0  # of all arms
    correlation: float = 0.0  # of runs with one seed
    df: float = math.inf  # of a t distribution
    stuck: float = 0.0  # chance of any run, also of the base, to stay on a plateau
    plateau: float = SEEN


@dataclass
class Design:
    """What a simulated sweep trains."""

    name: str
    seeds: int
    arms: int = 5
    controls: int | None = None  # runs of the base and of base again; None: as many as by default

    @property
    def control(self):
        """(runs of the base, of base again)."""
        return plans.control_runs(self.arms, self.seeds, self.controls)

    @property
    def refused(self):
        return self.seeds < least_runs(self.arms)


EQUAL = Noise("equal variances")
TWICE = Noise("all arms at twice the sd", arms_sd=2.0)
NOISES = (
    EQUAL,
    Noise("one arm's variance x 4", last_sd=2.0),
    TWICE,
    Noise("runs of one seed correlated 0.5", correlation=0.5),
    Noise("t, 4 degrees of freedom", df=4),
    Noise("t, 4 degrees, and one variance x 4", last_sd=2.0, df=4),
)
CHANCES = (0.05, 0.25, 0.5)
OUTCOMES = [EQUAL, TWICE, *(Noise(f"{c:.0%} of runs stuck", stuck=c) for c in CHANCES)]
OUTCOMES += [Noise(f"{c:.0%} on a lower plateau", stuck=c, plateau=HIDDEN) for c in CHANCES]
FIVE = Design("5 arms, 5 seeds", 5)
SIZES = [Design(f"6 arms, {n} seeds", n, arms=6) for n in (4, 5, 8, 12)]
SHELVES = [
    Design(f"{k} arms, {n} seeds", n, arms=k, controls=40)
    for k, n in ((25, 4), (25, 8), (25, 12), (30, 8), (30, 12))
]
SCREENINGS = [Design("", n, controls=2 * n) for n in (2, 3)]


def draw(design, sweeps, noise=EQUAL, effects=0.0, seed=0):
    """Losses of simulated sweeps, infinite above the trigrams: (arms [seeds, sweeps, arms], those
    of the base and of base again, each [runs, sweeps, 1]). effects [arms]."""
    random, seeds = np.random.default_rng(seed), design.seeds
    runs = design.control

    def sample(*shape):
        if math.isinf(noise.df):
            return random.standard_normal(shape)
        return random.standard_t(noise.df, shape) / math.sqrt(noise.df / (noise.df - 2))

    def ended(losses):
        losses = losses + noise.plateau * (random.random(losses.shape) < noise.stuck)
        return np.where(losses > TRIGRAMS, math.inf, losses)

    shared, own = math.sqrt(noise.correlation), math.sqrt(1 - noise.correlation)
    of_seed = shared * sample(max(seeds, runs[0]), sweeps, 1)
    x = noise.arms_sd * (own * sample(seeds, sweeps, design.arms) + of_seed[:seeds])
    x[..., -1] *= noise.last_sd
    control = [ended(own * sample(count, sweeps, 1) + of_seed[:count]) for count in runs]
    return ended(x + effects), control


def words(x, control, design, margin=0.0, test=compare):
    """What each arm is called in the report, [sweeps, arms]."""
    tests = test([x, np.concatenate(control)], margin, least_runs(design.arms))
    return contrasts.family_verdicts(*np.broadcast_arrays(*tests))["verdict"]


def by_welch(groups, margin, least):
    """`compare` without its rules: Welch's test of all losses, of few and stuck runs, too."""
    groups = [np.where(np.isinf(group), SEEN, group) for group in groups]
    test = contrast(groups)
    return test.p(), test.p_tie(margin), test.difference


def by_screening(groups, margin, least):
    """The test of a screening: one variance for all."""
    s2, df = pooled_variance([*np.moveaxis(groups[0], -1, 0), groups[1][..., 0]])
    test = contrast(groups, pooled=(s2[:, None], df[:, None]))
    return test.p(), test.p_tie(margin), test.difference


# --- figures, each a share of the sweeps


def average(figure, *given, sweeps=SWEEPS, **keys):
    """A figure, or several, over that many sweeps."""
    parts = range(max(sweeps // AT_ONCE, 1))
    found = [figure(min(sweeps, AT_ONCE), *given, seed=seed, **keys) for seed in parts]
    return np.mean(found, axis=0).tolist()


def family_error(sweeps, noise, design, test=compare, seed=0):
    """The report calls an arm better or worse, where all equal the base."""
    x, control = draw(design, sweeps, noise, seed=seed)
    return np.isin(words(x, control, design, test=test), ["better", "worse"]).any(1).mean()


def power(sweeps, design, effect, noise=EQUAL, test=compare, seed=0):
    """An arm is called better whose loss is `effect` lower. The other arms equal the base."""
    effects = np.array([-effect] + [0] * (design.arms - 1))
    x, control = draw(design, sweeps, noise, effects, seed)
    return (words(x, control, design, test=test)[:, 0] == "better").mean()


def tie_rates(sweeps, design, ratio, noise=EQUAL, seed=0):
    """(an arm that equals the base ties, some arm ties whose difference is the margin), where the
    margin is `ratio` standard deviations of a run."""
    x, control = draw(design, sweeps, noise, seed=seed)
    equal, different = (words(x + d, control, design, ratio) == "tie" for d in (0, ratio))
    return equal.mean(), different.any(1).mean()


def stuck_rates(sweeps, seeds, chance, effect, seed=0):
    """(better, fails, better if the runs that are stuck are dropped): an arm whose runs are stuck
    with this chance, and are lower by `effect` otherwise. No run of the base is."""
    design = Design("", seeds, arms=1)
    x, control = draw(design, sweeps, effects=-effect, seed=seed)
    x[np.random.default_rng(seed + 1).random(x.shape) < chance] = math.inf
    found = words(x, control, design)[:, 0]
    test = contrast([x, np.concatenate(control)])
    dropped = (test.p() <= ALPHA) & (test.difference < 0)
    fails = (found == "worse") & np.isinf(x).any(0)[:, 0]
    return (found == "better").mean(), fails.mean(), dropped.mean()


# --- the page


def table(headings, rows):
    """A Markdown table; the numbers of a row are shares, in percent."""
    cells = [[f"{100 * c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    lines = [headings, ["---"] * len(headings), *cells]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def error_and_welch_s(noise, design, sweeps):
    """The family error as a text; in brackets that of Welch's test alone."""
    welch = average(family_error, noise, design, by_welch, sweeps=sweeps // 4)
    error = average(family_error, noise, design, sweeps=sweeps)
    return f"{'refused' if design.refused else f'{100 * error:.1f}'} ({100 * welch:.1f})"


def tables(sweeps):
    """The tables of simulation.md, in its order."""

    def shares(figure, *given, sweeps=sweeps):
        return np.atleast_1d(average(figure, *given, sweeps=sweeps)).tolist()

    def of_designs(designs, noises, cell):
        rows = [
            [noise.name, *(cell(noise, design, sweeps) for design in designs)] for noise in noises
        ]
        return table(["noise", *(design.name for design in designs)], rows)

    yield of_designs([FIVE], NOISES, lambda n, d, sweeps: shares(family_error, n, d)[0])
    yield of_designs([*SIZES, *SHELVES], OUTCOMES, error_and_welch_s)
    rows = [
        [d.name, f"{e:g}", *shares(power, d, e), *shares(power, d, e, EQUAL, by_welch)]
        for d, e in itertools.product([*SIZES[1:], *SHELVES[1:3]], (1, 1.5, 2))
    ]
    yield table(["design", "effect", "found", "by Welch's test alone"], rows)
    rows = [
        [f"{ratio:g}", seeds, n.name, *shares(tie_rates, Design("", seeds), ratio, n)]
        for ratio, seeds, n in itertools.product((1.0, 1.4), (5, 8, 12), (EQUAL, TWICE))
    ]
    yield table(
        ["margin / sd", "seeds", "noise", "ties, no difference", "ties at the margin"], rows
    )
    rows = [
        [seeds, f"{chance:g}", effect, *shares(stuck_rates, seeds, chance, effect)]
        for seeds, chance, effect in itertools.product((8, 12), (0, 0.1, 0.4, 0.8), (0, 2))
    ]
    outcomes = ["better", "fails", "better, if dropped"]
    yield table(["seeds", "chance to be stuck", "others lower by", *outcomes], rows)
    rows = [
        [d.controls // 2, n.name, *shares(family_error, n, d, by_screening)]
        + [share for e in (2, 3, 4) for share in shares(power, d, e, n, by_screening)]
        for d, n in itertools.product(SCREENINGS, NOISES[:3])
    ]
    yield table(["seeds", "noise", "error", "finds 2", "finds 3", "finds 4"], rows)


def page(text, made):
    """The text of a page with the next of some tables in the place of each that it has."""
    return re.sub(r"(^\|.*\n)+", lambda _: next(made), text, flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), tables(SWEEPS)), encoding="utf-8")
