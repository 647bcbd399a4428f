"""
The verdict on each comparison of a sweep, as columns of a table, from the table of its runs.

An arm's runs are compared with the control group: the base's runs and those of its replicate
together. The replicate against the base checks the set-up and gets no verdict.

- Contrasts of independent groups of runs: Welch's test with Satterthwaite's degrees of freedom.
  Nothing is paired and no variance is pooled, so that an arm that spreads more than the base costs
  power and not validity. A screening, and the replicate, pool one variance over all arms.
- A comparison's p is the least of p / share over its looks (looks.py). Holm's method then corrects
  for all planned comparisons of the sweep; those that have not run count with p = 1.
- A verdict must stand at the end: if the difference of all runs points the other way, or its own
  95 % interval includes zero, it is "undecided".
- A tie is two one-sided tests against the margin (Schuirmann 1987), corrected in the same way.
- Runs that diverged have no loss, but a rank: the last. Arms that have some are compared by the
  rank-sum test, and are never better and never a tie.

tests/helpers/simulate.py measures the error and the power of `verdicts`.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special, stats

from bench.ablation import looks, power, rows, worth
from bench.ablation.power import ALPHA

RESAMPLES = 9999  # of the bootstrap over the text
LEAST_BLOCKS = 50  # of text, for an interval over it
COLUMNS = [
    *("name", "arm", "against", "kind", "n", "n_control", "diverged", "loss", "sd", "difference"),
    *("se", "df", "low", "high", "p", "p_looks", "p_holm", "p_tie", "verdict", "reason"),
    *("more_seeds", "text_low", "text_high", "worth", "worth_low", "worth_high"),
    *("worth_time", "worth_time_low", "worth_time_high"),
]
TEXTS = {"verdict": "no verdict", "reason": "", "diverged": 0}


# ---------------------------------------------------------------- tests, on arrays


class Contrast(NamedTuple):
    """An estimate, its standard error and its degrees of freedom: arrays of one shape, or numbers.
    The last two are nan where a group has one run."""

    difference: np.ndarray
    se: np.ndarray
    df: np.ndarray

    def p(self):
        """Two-sided, against no difference; 1 where it is unknown."""
        with np.errstate(all="ignore"):
            return np.nan_to_num(2 * special.stdtr(self.df, -abs(self.difference) / self.se), nan=1)

    def p_tie(self, margin):
        """Of two one-sided tests that the difference is smaller than the margin; 1 where it is
        unknown."""
        with np.errstate(all="ignore"):
            p = special.stdtr(self.df, (abs(self.difference) - margin) / self.se)
        return np.nan_to_num(p, nan=1)

    def columns(self):
        """As columns of a verdict, with the 95 % interval of this comparison alone."""
        half = special.stdtrit(self.df, 1 - ALPHA / 2) * self.se
        numbers = [*self, self.difference - half, self.difference + half, self.p()]
        return dict(zip(COLUMNS[9:15], map(float, numbers), strict=True))


def contrast(groups, weights=(1, -1), pooled=None):
    """The Contrast of the weighted means of independent groups, each [n, ...], by Welch's test. The
    slopes of scales have more groups than two: scipy's test has two. `pooled` (variance,
    degrees of freedom) replaces the groups' own variances."""
    with np.errstate(all="ignore"):
        difference = sum(w * np.mean(x, 0) for w, x in zip(weights, groups, strict=True))
        variances = [pooled[0] if pooled else variance(x) for x in groups]
        parts = [w**2 * s2 / len(x) for w, x, s2 in zip(weights, groups, variances, strict=True)]
        squares = sum(part**2 / max(len(x) - 1, 1) for part, x in zip(parts, groups, strict=True))
        df = pooled[1] if pooled else sum(parts) ** 2 / squares
    return Contrast(difference, np.sqrt(sum(parts)), np.where(sum(parts) == 0, np.inf, df))


def variance(group):
    """The unbiased variance of a sample [n, ...]; nan if n is 1."""
    return np.var(group, 0, ddof=1) if len(group) > 1 else np.full(np.shape(group)[1:], math.nan)


def pooled_variance(groups):
    """(variance, degrees of freedom) within groups, each [n, ...]. With few runs, a screening finds
    with it what Welch's test cannot; the simulation shows its error where variances differ."""
    groups = [group for group in groups if len(group) > 1]
    df = sum(len(group) - 1 for group in groups)
    return sum((len(group) - 1) * variance(group) for group in groups) / max(df, 1), df


def rank_test(group, control):
    """(p, direction) of the rank-sum test of losses [n, ...] and [m, ...], infinite where a run
    diverged: scipy's, but p is never below what so few runs can give. A positive direction is
    worse."""
    n, m = len(group), len(control)
    test = stats.mannwhitneyu(group, control, method="asymptotic")
    return np.maximum(test.pvalue, 2 / math.comb(n + m, n)), test.statistic - n * m / 2


def compare(groups, margin):
    """(p, p of a tie, direction) of groups of losses, not corrected; (1, 1, 0) if one is empty."""
    if not all(map(len, groups)):
        return 1.0, 1.0, 0.0
    if all(np.isfinite(group).all() for group in groups):
        test = contrast(groups)
        return float(test.p()), float(test.p_tie(margin)), float(test.difference)
    p, direction = rank_test(*groups)
    return float(p), 1.0, float(direction)


# ---------------------------------------------------------------- many comparisons, many looks


def holm(p, family=0):
    """Holm's corrected p, along the last axis; of `family` hypotheses the others have p = 1. Many
    sweeps at once: statsmodels takes 0.1 s for each, and the simulation has half a million."""
    p = np.asarray(p, float)
    order = np.argsort(p, axis=-1)
    factors = max(family, p.shape[-1]) - np.arange(p.shape[-1])
    corrected = np.maximum.accumulate(np.take_along_axis(p, order, -1) * factors, -1)
    return np.take_along_axis(np.minimum(corrected, 1), np.argsort(order, -1), -1)


def words(p, p_tie, difference, shares, tie_shares=None, family=0):
    """The verdicts of a family of comparisons. p, p_tie and difference are [looks, ..., family],
    not corrected, with p = 1 where a comparison has not reached a look; shares [looks], for ties
    tie_shares. The last look is at all data, with a share of 0 if it may decide nothing.

    This is where a comparison is decided. `decide` takes back what diverged runs do not bear,
    `explain` what missing runs do not, `screen` words a screening. factorial.py calls it, too.

    Returns a dict of arrays [..., family]: verdict, seen (what a look said, also where it no longer
    stands), and the p-values of a difference and of a tie, corrected for the looks (p_looks,
    p_tie_looks) and for the family, too (p_holm, p_tie)."""
    by_look, tie_by_look = over_share(p, shares), over_share(p_tie, tie_shares or shares)
    p_looks, p_tie_looks = by_look.min(0), tie_by_look.min(0)
    p_holm, p_tie_holm = holm(p_looks, family), holm(p_tie_looks, family)

    differs, ties = p_holm <= ALPHA, p_tie_holm <= ALPHA
    then = np.take_along_axis(np.asarray(difference), by_look.argmin(0)[None], 0)[0]
    seen = np.select([differs & (then < 0), differs, ties], ["better", "worse", "tie"], "undecided")
    stands = np.where(differs, (p[-1] <= ALPHA) & (difference[-1] * then > 0), p_tie[-1] <= ALPHA)
    return {
        "verdict": np.where(stands, seen, "undecided"),
        "seen": seen,
        "p_looks": p_looks,
        "p_tie_looks": p_tie_looks,
        "p_holm": p_holm,
        "p_tie": p_tie_holm,
    }


def over_share(p, shares):
    """p-values [looks, ...] at the level of their looks' shares; 1 where a share is 0."""
    shares = np.reshape(shares, (-1,) + (1,) * (np.ndim(p) - 1))
    with np.errstate(all="ignore"):
        return np.where(shares > 0, np.minimum(p / shares, 1), 1.0)


# ---------------------------------------------------------------- a sweep


def judge(runs, plan, history=(), measure="loss"):
    """The DataFrame of the verdicts of a sweep by a column of its runs: COLUMNS, a row for each
    comparison in the plan's order, then the replicate. worth is inf above the curve
    and 0 below it; more_seeds inf where it is over MOST_SEEDS. attrs say what the sweep can see."""
    losses, comparisons = losses_of(runs, measure), comparisons_of(plan)
    control = finite(pick(losses, rows.control_group(plan)))
    in_nats = measure.endswith("loss")
    curve = worth.curve_of(runs, measure) if in_nats else None
    margin, source = margin_of(plan, curve) if in_nats else (math.nan, "")
    pooled = pooled_variance([finite(values.to_numpy()) for values in losses.values()])
    tried = looks.tried_seeds(runs)
    taken = looks.looks_of(plan, tried, history, None if math.isnan(margin) else margin)
    judged = [row for row in comparisons if row["kind"] != "replicate"]
    family = {row["name"] for row in judged}.union(*(line["arms"] for line in history))
    attrs = {
        "margin": margin,
        "margin_source": source,
        "base_mean": float(control.mean()) if len(control) else math.nan,
        "base_sd": math.sqrt(variance(control)) if len(control) else math.nan,
        "base_n": len(control),
        "looks": taken,
        "family": len(family),
    }

    for row in comparisons:
        pools = plan["screening"] or row["kind"] == "replicate"
        describe(row, runs, losses, curve, plan, pooled if pools else None)
    if plan["screening"]:
        screen(judged, attrs)
    elif judged:
        decide(judged, losses, attrs)
    failed = set(runs.arm[runs.current & (runs.purpose == "report") & (runs.status == "failed")])
    for row in judged:
        explain(row, plan, tried, row["arm"] in failed, margin)
    attrs |= look_ahead(judged, plan, attrs, pooled)
    frame = pd.DataFrame(comparisons, columns=COLUMNS)
    frame.attrs |= attrs
    return frame


def undecided(runs, plan, history=()):
    """{arm: about how many more seeds may decide it, inf if unknown} of the undecided arms."""
    rows_left = judge(runs, plan, history).query("verdict == 'undecided'")
    return dict(zip(rows_left.arm, rows_left.more_seeds.fillna(math.inf), strict=True))


def margin_of(plan, curve):
    """(margin, where it comes from): what the plan says, or else what the curve says."""
    if plan["margin"] is not None:
        return plan["margin"], plan["margin_source"] or "given"
    if curve:
        return curve.margin(), "5 % of the tokens, read off the curve after the runs"
    return math.nan, "none"


def comparisons_of(plan):
    """The rows of `judge` without numbers, with their two groups of arms."""
    compared, control = [], rows.control_group(plan)
    for arm in rows.judged_arms(plan):
        against = plan["arms"][arm]["against"]
        groups = [[arm], control if against == plan["base"] else [against]]
        compared.append(row_of(arm, against, "swap", groups=groups))
    base, copies = plan["base"], rows.replicates(plan)
    copies = [row_of(arm, base, "replicate", groups=[[arm], [base]]) for arm in copies]
    return compared + copies


def row_of(name, against, kind, **more):
    """A row of `judge` without numbers."""
    empty = dict.fromkeys(COLUMNS, math.nan) | TEXTS | {"reached": False}
    return empty | dict(name=name, arm=name, against=against, kind=kind, **more)


def losses_of(runs, measure):
    """{arm: Series of a column by seed} of its reported runs that ended, inf where one diverged."""
    ended = runs[runs.current & (runs.purpose == "report") & (runs.status != "failed")]
    values = ended[measure].mask(ended.status == "diverged", math.inf)
    values = pd.Series(values.to_numpy(), pd.MultiIndex.from_frame(ended[["arm", "seed"]]))
    by_arm = values.dropna().sort_index(level="seed").groupby("arm", sort=False)
    return {arm: group.droplevel("arm") for arm, group in by_arm}


def pick(losses, arms, seeds=None):
    """The losses [n] of some arms, of all seeds or of {arm: [seed]}; empty where one of the arms
    has not reached a look."""
    if seeds is not None and not all(arm in seeds for arm in arms):
        return np.empty(0)
    groups = [np.empty(0)]
    for arm in arms:
        values = losses.get(arm, pd.Series(dtype=float))
        groups.append(values if seeds is None else values[values.index.isin(seeds[arm])])
    return np.concatenate(groups)


def finite(values):
    return values[np.isfinite(values)]


def describe(row, runs, losses, curve, plan, pooled):
    """Fill in what the runs of a comparison are, whatever the verdict. `pooled` (variance, degrees
    of freedom) replaces the variances of its groups."""
    groups = [pick(losses, arms) for arms in row["groups"]]
    own = finite(groups[0])
    row |= {"n": len(groups[0]), "n_control": len(groups[1]), "diverged": len(groups[0]) - len(own)}
    if len(own):
        row |= {"loss": float(own.mean()), "sd": float(np.sqrt(variance(own)))}
    if row["kind"] == "replicate":
        row["verdict"] = "noise"
    if not all(len(group) and np.isfinite(group).all() for group in groups):
        row["p"] = compare(groups, math.nan)[0]
        return
    row |= contrast(groups, pooled=pooled).columns()
    if row["kind"] != "replicate":  # two models differ on every text
        weights = {row["arm"]: 1 / row["n"]}
        row |= text_interval(runs, weights | dict.fromkeys(row["groups"][1], -1 / len(groups[1])))
    if curve and row["kind"] == "swap" and row["against"] == plan["base"]:
        se, n = row["sd"] / math.sqrt(len(own)), len(own)
        if pooled:
            se, n = math.sqrt(pooled[0] / n), pooled[1] + 1
        names = ["step_ratio", "step_ratio_low", "step_ratio_high"]
        ratio = runs.loc[runs.arm == row["arm"], names].to_numpy()[0]
        row |= worth.columns_of(curve, row["loss"], se, n, ratio)


def text_interval(runs, weights):
    """The 95 % interval over the text of a weighted sum of the losses of runs, {arm: weight of each
    of its runs}: a bootstrap of its blocks. None with fewer than LEAST_BLOCKS blocks."""
    done = runs[runs.current & (runs.purpose == "report") & (runs.status == "done")]
    done = done[done.arm.isin(weights)]
    counts = set(done.blocks.map(len))
    if len(counts) != 1 or min(counts) < LEAST_BLOCKS:
        return {}
    differences = done.arm.map(weights).to_numpy() @ np.array(done.blocks.to_list())  # [blocks]
    given = dict(n_resamples=RESAMPLES, method="percentile", rng=0)
    low, high = stats.bootstrap((differences,), np.mean, **given).confidence_interval
    return {"text_low": float(low), "text_high": float(high)}


# ---------------------------------------------------------------- words


def decide(judged, losses, attrs):
    """Fill in the verdicts and the corrected p-values of the family."""
    taken, tests = attrs["looks"], []
    for look in [*taken[:-1], None]:
        for row in judged:
            groups = [pick(losses, arms, look and look.seeds) for arms in row["groups"]]
            tests.append(compare(groups, attrs["margin"]))
            row["reached"] |= look is not None and all(map(len, groups))
    tests = np.moveaxis(np.reshape(tests, (len(taken), len(judged), 3)), -1, 0)

    shares, tie_shares = [look.share for look in taken], [look.tie_share for look in taken]
    columns = words(*tests, shares, tie_shares, attrs["family"])  # tests: [looks, family] each
    for place, row in enumerate(judged):
        row |= {key: values[place].item() for key, values in columns.items()}
        if row["diverged"] and row["verdict"] in ("better", "tie"):
            row["verdict"] = "undecided"


def screen(judged, attrs):
    """Fill in the words of a screening: larger than the noise, or not seen."""
    known = [row for row in judged if math.isfinite(row["low"])]
    corrected = holm([row["p"] for row in known], attrs["family"])
    for row, p in zip(known, corrected.tolist(), strict=True):
        word = "larger than the noise" if p <= ALPHA else "not seen"
        row |= {"p_holm": p, "reached": True, "verdict": word, "seen": word}


def explain(row, plan, tried, failed, margin):
    """Set the verdicts that follow from missing runs, and the reason of each."""
    reasons, decided = [], row["verdict"] in ("better", "worse")
    if row["diverged"]:
        reasons.append("runs diverged")
    elif row["reached"] and math.isnan(row["difference"]):
        reasons.append("compared by ranks: runs of the other side diverged")
    if failed:
        reasons.append("runs failed")

    if not row["n"]:
        row["verdict"] = "failed" if failed else "not run"
    elif min(row["n"], row["n_control"]) < 2:
        row["verdict"] = "no verdict"
        reasons.append("one seed says nothing about chance")
    elif not row["reached"]:
        row["verdict"] = "no verdict"
        planned = looks.planned_runs(plan, plan["looks"][0])
        arms = [arm for group in row["groups"] for arm in group]
        if any(len(tried.get(arm, ())) < planned[arm] for arm in arms):
            reasons.append("planned runs are missing")
    elif row["seen"] != row["verdict"] and not row["diverged"]:
        reasons.append("seen at a look, but not by all runs together")
    elif decided and row["p_tie"] <= ALPHA:
        reasons.append("smaller than the margin")
    elif decided and row["text_low"] <= 0 <= row["text_high"]:
        reasons.append("not on every text")
    elif row["verdict"] == "undecided" and not margin > 0:
        reasons.append("no margin, so no tie")
    row["reason"] = "; ".join(reasons)


def look_ahead(judged, plan, attrs, pooled):
    """{smallest_visible, tie_power} of a sweep, by the median arm's noise; fills in how many more
    seeds may decide what is undecided."""
    spread = [row for row in judged if row["sd"] > 0]
    ahead = {"smallest_visible": math.nan, "tie_power": math.nan}
    if not spread or not attrs["base_sd"] > 0:
        return ahead
    sd, n = (float(np.median([row[key] for row in spread])) for key in ("sd", "n"))
    margin, family, taken = attrs["margin"], attrs["family"], attrs["looks"]
    if plan["screening"]:  # it has no looks, so that the whole of ALPHA is for it
        se, df = math.sqrt(pooled[0] * (1 / n + 1 / attrs["base_n"])), pooled[1]
        return ahead | {"smallest_visible": power.smallest_visible(se, df, ALPHA / family)}
    se, df = power.welch(sd, n, attrs["base_sd"], attrs["base_n"])
    level = ALPHA * max(look.share for look in taken) / family
    ahead["smallest_visible"] = power.smallest_visible(se, df, level)
    if margin > 0:
        ahead["tie_power"] = float(power.to_tie(0, se, df, margin, level))
    for row in judged:
        if row["verdict"] == "undecided" and math.isfinite(row["difference"]):
            row["more_seeds"] = power.more_seeds(row, taken, plan["looks"], margin, family)
    return ahead
