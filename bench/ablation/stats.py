"""
Analyse the rows of a sweep: a verdict for each arm, with its uncertainty.

One measure decides (`metric` of sweep.json; lower is better). An arm and the arm it is compared
with are paired by seed, because they saw the same batches in the same order. The second copy of
the base, if the sweep has one, shows the noise floor: how much the base differs from itself. It
gets no verdict. significance.py holds the tests.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from bench.ablation.significance import (
    ALPHA,
    MOST_SEEDS,
    bca,
    compare,
    correlation,
    judge,
    more_seeds,
    sample_sd,
    sign_flip,
    smallest_visible,
)

BOOTSTRAP_FROM = 10  # seeds
MEASURES = {
    "final_val_loss": "final validation loss",
    "best_val_loss": "best validation loss",
    "equal_time": "validation loss at equal time",
}


@dataclass
class Runs:
    """The rows of a sweep, sorted into those that count and those that the report only mentions."""

    done: dict  # arm -> {seed: row}, made with the sweep's code, configuration and learning rate
    failed: list = field(default_factory=list)
    stale: list = field(default_factory=list)  # other code, configuration or learning rate
    tuning: list = field(default_factory=list)


@dataclass
class Verdict:
    """One comparison. A difference is arm minus reference in nats per token; negative is better."""

    arm: str
    against: str
    word: str  # better | worse | tie | undecided | failed | not run; noise for the base's copy
    seeds: list = field(default_factory=list)  # of the pairs
    loss: float = math.nan  # mean of the arm over its own seeds
    loss_sd: float = math.nan
    mean: float = math.nan
    low: float = math.nan  # of the 95 % t interval
    high: float = math.nan
    sd: float = math.nan  # of the differences
    correlation: float = math.nan  # of the pairs
    p: float = math.nan  # paired t test, this comparison alone
    p_holm: float = math.nan  # corrected for the looks and the family: this one decides
    p_tie: float = math.nan  # equivalence, corrected for the looks
    p_flip: float = math.nan  # sign flips
    bootstrap: tuple = None  # (low, high), BCa
    more: int = None  # seeds that may decide it; None if that takes over MOST_SEEDS
    why: str = ""
    interaction: bool = False

    def __str__(self):
        if self.word != "undecided":
            return self.word
        if not self.more:
            return f"undecided (over {MOST_SEEDS} seeds)"
        plural = "s" if self.more > 1 else ""
        return f"undecided (about {self.more} more seed{plural})"


@dataclass
class Analysis:
    """The analysis of one sweep by one measure."""

    measure: str
    margin: float
    base_mean: float
    base_sd: float
    verdicts: list  # of Verdict, in the sweep's order, interactions last
    floor: Verdict = None  # the base's second copy, if the sweep has one
    visible: float = None  # the smallest difference found in 80 of 100 sweeps of this size


@dataclass
class Comparison:
    """A verdict that is not decided yet, with its losses."""

    verdict: Verdict
    x: np.ndarray  # [n], one loss per pair
    reference: np.ndarray  # [n]
    tried: list  # seeds whose runs ended, including failed ones
    p_differ: float = 1.0  # corrected for the looks
    p_tie: float = 1.0


# --- rows


def sort_rows(sweep, rows):
    """The Runs of a sweep. Of several rows of one run, the last counts."""
    identity = ("arm", "seed", "lr", "purpose", "code_hash", "config_hash")
    last = {tuple(row[key] for key in identity): row for row in rows}

    runs = Runs({arm: {} for arm in sweep["arms"]})
    for _, row in sorted(last.items()):
        if is_stale(sweep, row):
            runs.stale.append(row)
        elif row["status"] != "done" or not np.isfinite(row.get("final_val_loss") or math.nan):
            runs.failed.append(row)
        elif row["purpose"] == "tune":
            runs.tuning.append(row)
        else:
            runs.done[row["arm"]][row["seed"]] = row
    return runs


def is_stale(sweep, row):
    """Whether other code, another configuration or another learning rate made this row."""
    planned = sweep["arms"].get(row["arm"])
    if planned is None or row["code_hash"] != sweep["code_hash"]:
        return True
    if row["config_hash"] != planned.get("config_hash", row["config_hash"]):
        return True
    return row["purpose"] == "report" and row["lr"] != sweep["chosen_lr"].get(row["arm"], 1)


def pairs(runs, arm, against, measure, costs):
    """(seeds, x [n], reference [n]) over the seeds that both arms have."""
    seeds = sorted(runs.done[arm].keys() & runs.done[against].keys())
    if measure == "equal_time":
        return pairs_at_equal_time(runs, arm, against, seeds, costs)
    x, reference = (
        np.array([runs.done[name][seed][measure] for seed in seeds], float)
        for name in (arm, against)
    )
    return seeds, x, reference


def pairs_at_equal_time(runs, arm, against, seeds, costs):
    """The pairs at the time when the first of the two arms ends. Each loss is interpolated on the
    run's curve; steps are converted to seconds by the arm's time per step, measured alone."""
    times = [(costs.get(name) or {}).get("milliseconds_per_step") for name in (arm, against)]
    if None in times:
        return [], np.empty(0), np.empty(0)

    found = np.empty((len(seeds), 2))
    for place, seed in enumerate(seeds):
        curves = []  # of the two arms: (milliseconds [points], losses [points])
        for name, time in zip((arm, against), times, strict=True):
            steps, losses = np.array(runs.done[name][seed]["curve"], float).T
            curves.append((steps * time["median"], losses))
        end = min(milliseconds[-1] for milliseconds, _ in curves)
        found[place] = [np.interp(end, *curve) for curve in curves]
    return seeds, *found.T


# --- verdicts


def analyse(sweep, runs, costs=None, measure=None):
    """The Analysis of a sweep by one measure (default: the sweep's metric)."""
    measure = measure or sweep["metric"]
    own_measure = "final_val_loss" if measure == "equal_time" else measure
    losses = {
        arm: np.array([row[own_measure] for row in done.values()])
        for arm, done in runs.done.items()
    }
    base_losses = losses[sweep["base"]]
    base_sd = sample_sd(base_losses)
    margin = base_sd if sweep["margin"] is None else sweep["margin"]
    looks = sorted(sweep["looks"])

    comparisons = planned_comparisons(sweep, runs, measure, costs or {})
    for comparison in comparisons:
        verdict = comparison.verdict
        if not verdict.interaction and len(losses[verdict.arm]):
            verdict.loss = float(losses[verdict.arm].mean())
            verdict.loss_sd = sample_sd(losses[verdict.arm])
        measure_difference(comparison, margin, looks)
        verdict.why = explain(comparison, looks, runs, margin)

    judged = [one for one in comparisons if one.verdict.word != "noise"]
    decide(judged, runs, margin, looks)
    noise = [one.verdict for one in comparisons if one.verdict.word == "noise"]
    return Analysis(
        measure,
        margin,
        float(base_losses.mean()) if len(base_losses) else math.nan,
        base_sd,
        [comparison.verdict for comparison in comparisons],
        noise[0] if noise else None,
        visible_difference(judged, looks),
    )


def planned_comparisons(sweep, runs, measure, costs):
    """[Comparison] of each arm with the arm it is compared with, then of each interaction."""
    base, tried = sweep["base"], tried_seeds(runs)
    found = []
    for arm, facts in sweep["arms"].items():
        if arm == base or facts.get("cell"):  # a factorial's cells are not compared one by one
            continue
        against = facts["against"]
        seeds, x, reference = pairs(runs, arm, against, measure, costs)
        verdict = Verdict(arm, against, "noise" if facts.get("again") else "", seeds)
        found.append(Comparison(verdict, x, reference, sorted(tried[arm] & tried[against])))

    for pair, facts in sweep["arms"].items():
        if not facts.get("interaction_of"):
            continue
        # (pair - a) - (b - base): the effect of both changes beyond the sum of their effects
        a, b = facts["interaction_of"]
        with_a = differences_by_seed(runs, pair, a, measure, costs)
        without_a = differences_by_seed(runs, b, base, measure, costs)
        seeds = sorted(with_a.keys() & without_a.keys())
        verdict = Verdict(pair, f"{a} + {b}", "", seeds, interaction=True)
        x = np.array([with_a[seed] for seed in seeds])
        reference = np.array([without_a[seed] for seed in seeds])
        tried_by_all = tried[pair] & tried[a] & tried[b] & tried[base]
        found.append(Comparison(verdict, x, reference, sorted(tried_by_all)))
    return found


def tried_seeds(runs):
    """arm -> {seed} of its reported runs that ended, including failed ones."""
    tried = {arm: set(done) for arm, done in runs.done.items()}
    for row in runs.failed:
        if row["purpose"] == "report":
            tried[row["arm"]].add(row["seed"])
    return tried


def differences_by_seed(runs, arm, against, measure, costs):
    seeds, x, reference = pairs(runs, arm, against, measure, costs)
    return dict(zip(seeds, x - reference, strict=True))


def measure_difference(comparison, margin, looks):
    """Fill in the numbers of a comparison that has pairs."""
    verdict, x, reference = comparison.verdict, comparison.x, comparison.reference
    if not len(x):
        verdict.p_tie = 1.0
        return

    reached = []  # the number of pairs at each look
    for look in looks:
        if look <= len(comparison.tried):
            seeds = comparison.tried[:look]
            reached.append(sum(seed in seeds for seed in verdict.seeds))

    test = compare(x, reference, margin, reached, len(looks))
    comparison.p_differ, comparison.p_tie = test["p_differ"], test["p_tie"]
    for key in ("mean", "low", "high", "sd", "p", "p_tie"):
        setattr(verdict, key, float(test[key]))
    if len(x) > 1:
        verdict.correlation = correlation(x, reference)
        verdict.p_flip = sign_flip(x - reference)
        verdict.bootstrap = bca(x - reference) if len(x) >= BOOTSTRAP_FROM else None


def decide(judged, runs, margin, looks):
    """Fill in the words and corrected p-values of a family of comparisons."""
    if not judged:
        return
    words, p_holm = judge(
        [comparison.p_differ for comparison in judged],
        [comparison.p_tie for comparison in judged],
        [comparison.verdict.mean for comparison in judged],
    )
    failed = {row["arm"] for row in runs.failed}
    for comparison, word, p in zip(judged, words, p_holm, strict=True):
        verdict = comparison.verdict
        verdict.word, verdict.p_holm = word, float(p)
        if not len(comparison.x):
            verdict.word = "failed" if verdict.arm in failed else "not run"
        elif word == "undecided":
            verdict.more = seeds_to_decide(comparison, margin, looks, len(judged))
        elif word in ("better", "worse") and verdict.p_tie <= ALPHA:
            verdict.why = "; ".join(filter(None, [verdict.why, "smaller than the margin"]))


def seeds_to_decide(comparison, margin, looks, family):
    """About how many more seeds decide a comparison, at least those up to the next look; None if
    over MOST_SEEDS."""
    n, verdict, tried = len(comparison.x), comparison.verdict, len(comparison.tried)
    to_next_look = next((look - tried for look in looks if look > tried), 0)
    more = 1
    if n > 1:
        more = more_seeds(verdict.mean, verdict.sd, margin, n, family, len(looks))
    return None if more is None else max(more, to_next_look)


def visible_difference(judged, looks):
    """The smallest difference that the median comparison finds in 80 of 100 sweeps, or None."""
    spreads = [one.verdict.sd for one in judged if one.verdict.sd > 0]
    numbers = [len(one.verdict.seeds) for one in judged if one.verdict.seeds]
    if not spreads:
        return None
    n = int(np.median(numbers))
    return smallest_visible(float(np.median(spreads)), n, len(judged), len(looks))


def explain(comparison, looks, runs, margin):
    """A note that explains a verdict: failed runs, missing seeds, no margin; often empty."""
    arm, n, tried = comparison.verdict.arm, len(comparison.x), len(comparison.tried)
    parts = []
    failed = [row for row in runs.failed if row["arm"] == arm and row["purpose"] == "report"]
    if failed:
        parts.append(f"{len(failed)} failed: {failed[-1].get('reason') or 'no reason given'}")
    if n == 1:
        parts.append("one seed says nothing about chance")
    elif n and tried < looks[0]:
        parts.append(f"{tried} of the {looks[0]} planned seeds")
    if n > 1 and not margin > 0:
        parts.append("no margin, so no tie")
    return "; ".join(parts)


def undecided(sweep, rows, costs=None):
    """[(arm, about how many more seeds, None if over MOST_SEEDS)] of the arms that more seeds could
    decide. A pair is undecided as long as its own verdict or that of its interaction is."""
    open_arms = {}
    for verdict in analyse(sweep, sort_rows(sweep, rows), costs).verdicts:
        if verdict.word == "undecided":
            open_arms.setdefault(verdict.arm, []).append(verdict.more)
    return [(arm, None if None in more else max(more)) for arm, more in open_arms.items()]


def listed(words, most=6):
    """Join words for a sentence: "a, b and c". Beyond `most` words, only count the rest."""
    words = list(words)
    if len(words) > most:
        words[most - 1 :] = [f"{len(words) - most + 1} more"]
    *head, tail = words or [""]
    return f"{', '.join(head)} and {tail}" if head else tail
