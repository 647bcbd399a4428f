"""
The errors and the power of the verdicts, over simulated sweeps whose truth is known:

    python -m bench.ablation.simulate [FOLDER]

writes bench/results/simulation.md. The simulated sweeps are judged by the functions that judge real
ones. FOLDER is a sweep whose noise and margin the tie table adds.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats as scipy_stats

from bench.ablation.history import control_runs
from bench.ablation.significance import (
    ALPHA,
    contrast,
    holm,
    judge,
    pooled_variance,
    rank_test,
    share_of,
)
from common.files import ROOT

SWEEPS = 20_000  # for each figure
ARMS = 5


@dataclass
class Noise:
    """How the runs of simulated sweeps vary. The standard deviation of a run of the base is 1."""

    name: str
    last_sd: float = 1.0  # of the last arm
    correlation: float = 0.0  # of runs with one seed
    df: float = math.inf  # of a t distribution


NOISES = (
    Noise("equal variances"),
    Noise("one arm's variance four times the base's", last_sd=2.0),
    Noise("runs of one seed correlated 0.5", correlation=0.5),
    Noise("t distribution with 4 degrees of freedom", df=4),
    Noise("t distribution with 4 degrees, and one variance x 4", last_sd=2.0, df=4),
)
LOOKS = {  # name: (planned looks, unplanned looks)
    "1 look": ((5,), ()),
    "1 look of 8": ((8,), ()),
    "3 looks": ((5, 10, 20), ()),
    "5 looks": ((5, 7, 10, 14, 20), ()),
    "1 look, 4 unplanned": ((5,), (6, 8, 11, 16)),
    "1 look, then one at each new seed": ((5,), tuple(range(6, 16))),
}


def draw(seeds, noise=NOISES[0], effects=0.0, arms=ARMS, sweeps=SWEEPS, random=None):
    """Losses (arms [seeds, sweeps, arms], control groups [2, runs, sweeps]) of simulated sweeps; the
    control group is of the base and of its second copy. effects [arms]."""
    random = random or np.random.default_rng(0)
    runs = control_runs(arms, seeds)
    scale = 1.0 if math.isinf(noise.df) else math.sqrt(noise.df / (noise.df - 2))

    def sample(*shape):
        if math.isinf(noise.df):
            return random.standard_normal(shape)
        return random.standard_t(noise.df, shape) / scale

    shared, own = math.sqrt(noise.correlation), math.sqrt(1 - noise.correlation)
    of_seed = shared * sample(max(seeds, runs[0]), sweeps, 1)
    x = own * sample(seeds, sweeps, arms) + of_seed[:seeds]
    x[..., -1] *= noise.last_sd
    control = [own * sample(count, sweeps, 1) + of_seed[:count] for count in runs]
    return x + effects, control


def control_at(control, arms, seeds):
    """The runs [n, sweeps, 1] of the control group at a look at so many seeds."""
    counts = control_runs(arms, seeds)
    return np.concatenate([group[:count] for group, count in zip(control, counts, strict=True)])


def words(x, control, planned, unplanned=(), margin=0.0):
    """What each arm is called in the report at each look, [looks, sweeps, arms]."""
    looks, arms = [*planned, *unplanned], x.shape[-1]
    shares = [share_of(len(planned))] * len(planned)
    shares += [share_of(unplanned=j + 1) for j in range(len(unplanned))]
    tests = [contrast([x[:seeds], control_at(control, arms, seeds)]) for seeds in looks]
    p = np.array([test.p() for test in tests])
    p_tie = np.array([test.p_within(margin) for test in tests])
    mean = np.array([test.mean for test in tests])
    return np.array(
        [
            judge(p[:end], p_tie[:end], mean[:end], shares[:end])["word"]
            for end in range(1, len(looks) + 1)
        ]
    )


def claims(found):
    return np.isin(found, ["better", "worse"])


# --- figures


def family_error(noise, planned, unplanned=(), sweeps=SWEEPS, arms=ARMS):
    """The share of sweeps in which some report calls an arm that equals the base better or worse."""
    x, control = draw(max(*planned, *unplanned, 0), noise, arms=arms, sweeps=sweeps)
    return claims(words(x, control, planned, unplanned)).any((0, 2)).mean()


def power(seeds, effect, noise=NOISES[0], sweeps=SWEEPS, arms=ARMS):
    """The share of sweeps that call an arm better whose loss is `effect` lower; the other arms
    equal the base."""
    effects = np.zeros(arms)
    effects[0] = -effect
    x, control = draw(seeds, noise, effects, arms, sweeps)
    return (words(x, control, [seeds])[-1, :, 0] == "better").mean()


def tie_rates(seeds, ratio, sweeps=SWEEPS, arms=ARMS):
    """(share of ties of arms that equal the base, share of sweeps with a tie of an arm whose
    difference is the margin) where the margin is `ratio` standard deviations of a run."""
    x, control = draw(seeds, arms=arms, sweeps=sweeps)
    equal = words(x, control, [seeds], margin=ratio)[-1] == "tie"
    different = words(x + ratio, control, [seeds], margin=ratio)[-1] == "tie"
    return equal.mean(), different.any(1).mean()


def diverging(seeds, chance, effect, sweeps=10_000):
    """Shares (better, worse, better if the runs that diverged are dropped) of an arm whose runs
    diverge with this chance, and are lower by `effect` otherwise."""
    random = np.random.default_rng(0)
    x, control = draw(seeds, effects=-effect, arms=1, sweeps=sweeps, random=random)
    x, reference = x[..., 0], np.concatenate(control)[..., 0]
    x[random.random(x.shape) < chance] = math.inf
    counts = np.zeros(3)
    for own, base in zip(x.T, reference.T, strict=True):
        finite = own[np.isfinite(own)]
        survivors = contrast([finite, base]) if len(finite) > 1 else None
        dropped = survivors and survivors.p() <= ALPHA and survivors.mean < 0
        if len(finite) == len(own):
            found = survivors.p() <= ALPHA * share_of(1), survivors.mean
        else:
            p, direction = rank_test(own, base)
            found = p <= ALPHA * share_of(1) and direction > 0, direction
        counts += [found[0] and found[1] < 0, found[0] and found[1] > 0, bool(dropped)]
    return counts / sweeps


def screening_rates(seeds, noise, effect=0.0, sweeps=SWEEPS, arms=ARMS):
    """(share of screenings that call an arm "larger than the noise" that equals the base, share
    that call an arm so that is lower by `effect`). The base has as many runs as an arm, twice."""
    effects = np.zeros(arms)
    effects[0] = -effect
    x, control = draw(seeds, noise, effects, arms, sweeps)
    control = np.concatenate([group[:seeds] for group in control])[..., 0]
    groups = [x[..., arm] for arm in range(arms)]
    pooled = pooled_variance([*groups, control])
    p = [contrast([group, control], pooled=pooled).p() for group in groups]
    found = holm(np.stack(p, -1)) <= ALPHA
    return found[:, 1 if effect else 0 :].any(1).mean(), found[:, 0].mean()


def paired_rule(x, control):
    """What the first version did: paired t tests against the base, corrected by Holm's method."""
    p = scipy_stats.ttest_rel(x, np.broadcast_to(control[0][: len(x)], x.shape)).pvalue
    return holm(p) <= ALPHA


# --- the page


def percent(share):
    return f"{100 * share:.1f}"


def table(headings, rows):
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def error_table():
    rows = []
    for noise in NOISES:
        rates = [family_error(noise, *looks) for looks in LOOKS.values()]
        rows.append([noise.name, *map(percent, rates)])
    return table(["noise", *LOOKS], rows)


def power_table():
    rows = []
    for seeds in (3, 5, 8, 10):
        for effect in (1, 2, 3):
            effects = np.zeros(ARMS)
            effects[0] = -effect
            x, control = draw(seeds, effects=effects)
            old = paired_rule(x, control)[:, 0].mean()
            rates = power(seeds, effect), power(seeds, effect, NOISES[3]), old
            runs = sum(control_runs(ARMS, seeds))
            rows.append([str(seeds), str(runs), str(effect), *map(percent, rates)])
    return table(["seeds", "control", "effect, sd", "found", "t noise", "paired t tests"], rows)


def tie_table(measured):
    cases = {".0096 / .007": 0.0096 / 0.007, ".0096 / .0088": 0.0096 / 0.0088} | measured
    rows = []
    for name, ratio in cases.items():
        for seeds in (5, 8, 12, 16):
            rates = tie_rates(seeds, ratio)
            rows.append([f"{name} = {ratio:.2f}", str(seeds), *map(percent, rates)])
    return table(["margin / sd", "seeds", "ties, no difference", "ties at the margin"], rows)


def diverging_table():
    rows = []
    for chance in (0.0, 0.1, 0.4, 0.8):
        for effect in (0, 2):
            rates = diverging(8, chance, effect)
            rows.append([f"{chance:g}", f"{effect:g}", *map(percent, rates)])
    return table(["chance", "others lower by, sd", "better", "worse", "better, if dropped"], rows)


def screening_table():
    rows = []
    for seeds in (2, 3):
        for noise in NOISES:
            error = screening_rates(seeds, noise)[0]
            rates = [screening_rates(seeds, noise, effect)[1] for effect in (2, 3, 4)]
            rows.append([str(seeds), noise.name, *map(percent, [error, *rates])])
    return table(["seeds", "noise", "error", "finds 2 sd", "finds 3 sd", "finds 4 sd"], rows)


def measured_noise(folder):
    """{name: margin over the sd of a run} of a sweep's folder."""
    from bench.ablation.sweeps import gather

    (section,) = gather([folder])
    sds = [verdict.loss_sd for verdict in section.main.verdicts if verdict.loss_sd > 0]
    sd, margin = math.sqrt(np.mean(np.square(sds))), section.main.margin
    return {f"{Path(folder).name}: {margin:.4f} / {sd:.4f}": margin / sd}


PAGE = """# Errors and power of the verdicts

`python -m bench.ablation.simulate`: {sweeps:,} simulated sweeps for each figure (10,000 with runs that
diverge), {arms} arms, all figures in %. The standard deviation of a run is 1. The functions of
bench/ablation/significance.py that judge real sweeps judge these. One standard error of a figure
near 5 is {error:.2f}.

## Family error

All arms equal the base. The share of sweeps in which the report of any look calls some arm better or
worse; the nominal error is 5. Looks are at 5 seeds and more ("3 looks": 5, 10, 20; "5 looks": 5, 7,
10, 14, 20). Since an arm counts as soon as one report claims it, the figures hold for sweeps that
stop at any look.

{errors}

## Power at one look

One arm is lower by the effect, the others equal the base. Control: runs of the base and its second
copy together. The last column is the first version's rule, paired t tests.

{power}

## Ties

With no difference, the share of arms that tie; with a difference as large as the margin, the share of
sweeps that call some arm a tie (nominal 5). Ties are corrected for the family.

{ties}

## Runs that diverge

8 seeds, one arm whose runs diverge by chance. "Better, if dropped" is the rule that leaves out runs
that diverged.

{diverging}

## Screening

Welch's test finds little with two or three seeds, so a screening pools one variance over all arms,
and says "larger than the noise" where Holm's p is at most 5 %. Error: share of screenings that say so
of some arm that equals the base. Where one arm varies more than the base, the error is as below, and
that is why a screening says neither better nor worse.

{screening}
"""


def main(argv):
    measured = measured_noise(argv[0]) if argv else {}
    text = PAGE.format(
        sweeps=SWEEPS,
        arms=ARMS,
        error=100 * math.sqrt(0.05 * 0.95 / SWEEPS),
        errors=error_table(),
        power=power_table(),
        ties=tie_table(measured),
        diverging=diverging_table(),
        screening=screening_table(),
    )
    path = ROOT / "bench" / "results" / "simulation.md"
    path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
