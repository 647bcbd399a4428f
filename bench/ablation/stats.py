"""
Analyse the rows of a sweep: a verdict for each arm, with its uncertainty.

One measure decides (`metric` of sweep.json; lower is better), on the half of the validation text
that chose no learning rate. An arm's runs are compared with the control group: the base's runs and
those of its second copy together. The copy against the base checks the set-up and gets no verdict.
significance.py holds the tests, history.py the looks, worth.py the worth of a difference.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from bench.ablation import history
from bench.ablation.history import control_group, judged_arms, planned_runs
from bench.ablation.losses import WRONG, Losses, sort_rows, tried_seeds
from bench.ablation.power import look_ahead
from bench.ablation.significance import (
    ALPHA,
    MOST_SEEDS,
    contrast,
    holm,
    judge,
    pooled_variance,
    rank_test,
    sample_sd,
)
from bench.ablation.worth import Curve, Worth, curve_from, margin_from

MEASURES = {
    "final_val_loss": "final validation loss",
    "best_val_loss": "best validation loss",
    "equal_time": "validation loss at equal time",
    "wrong_answers": "share of answers with a mistake",
    "wrong_tokens": "share of wrong tokens in answers",
}
RESAMPLES = 9999  # of the bootstrap over the text


@dataclass
class Verdict:
    """One comparison. A difference is arm minus control group in nats per token; negative is
    better. Where runs diverged, there is no mean difference."""

    arm: str
    against: str
    # better | worse | tie | undecided | no verdict | failed | not run; noise for the base's copy;
    # larger than the noise | not seen in a screening
    word: str = ""
    n: int = 0  # runs with a result
    n_against: int = 0
    loss: float = math.nan  # mean of the arm's runs that did not diverge
    loss_sd: float = math.nan
    mean: float = math.nan
    se: float = math.nan
    df: float = math.nan
    low: float = math.nan  # of the 95 % interval over seeds
    high: float = math.nan
    p: float = math.nan  # all runs, this comparison alone
    p_looks: float = math.nan  # corrected for the looks
    p_holm: float = math.nan  # corrected for the looks and the family: this one decides
    p_page: float = math.nan  # corrected for all that the page claims
    p_tie: float = math.nan  # equivalence, corrected for the looks and the family
    p_tie_looks: float = math.nan
    text_low: float = math.nan  # of the 95 % interval over the text
    text_high: float = math.nan
    holds_on_text: bool = None  # whether that interval excludes zero; None if it is unknown
    worth: Worth = None  # of the tokens
    worth_time: Worth = None
    more: int = None  # seeds that may decide it, 0 if over MOST_SEEDS; None if that is not known
    why: str = ""
    look: int = None  # the seeds at which it was decided
    diverged: int = 0
    differences: list = field(default_factory=list)  # each run's loss minus the control's mean
    interaction: bool = False

    def measure(self, contrast):
        """Set the numbers of a Contrast."""
        self.mean, self.se, self.df = map(float, (contrast.mean, contrast.se, contrast.df))
        self.low, self.high = map(float, contrast.interval())
        self.p = float(contrast.p())

    def resample(self, differences):
        """Set the interval over the text, by a bootstrap of the differences of its blocks [n]."""
        draws = np.random.default_rng(0).choice(differences, (RESAMPLES, len(differences))).mean(1)
        ends = np.quantile(draws, (ALPHA / 2, 1 - ALPHA / 2))
        self.text_low, self.text_high = map(float, ends)
        self.holds_on_text = self.text_low > 0 or self.text_high < 0

    @property
    def text_note(self):
        """Where the word does not hold on the text, a note that says so."""
        if self.word not in ("better", "worse") or self.holds_on_text is not False:
            return ""
        return f"not on every text: {self.text_low:+.4f} to {self.text_high:+.4f} over its blocks"

    @property
    def name(self):
        return f"{self.arm}: beyond {self.against}" if self.interaction else self.arm

    def __str__(self):
        if self.word != "undecided" or self.more is None:
            return self.word
        if not self.more:
            return f"undecided (over {MOST_SEEDS} seeds)"
        return f"undecided (about {self.more} more seed{'s' if self.more > 1 else ''})"


@dataclass
class Analysis:
    """The analysis of one sweep by one measure."""

    measure: str
    margin: float
    margin_source: str
    base_mean: float  # of the control group
    base_sd: float
    base_n: int
    verdicts: list  # of Verdict, in the sweep's order, interactions last
    floor: Verdict = None  # the base's second copy, if the sweep has one
    visible: float = None  # the smallest difference found in 80 of 100 sweeps of this size
    curve: Curve = None
    looks: list = field(default_factory=list)  # of history.Look, the last one at all data
    family: int = 0  # comparisons that Holm's method corrects for
    tie_power: float = None  # the chance that an arm that equals the base ties
    tie_seeds: int = None  # seeds that make it 80 %; None if over MOST_SEEDS


@dataclass
class Comparison:
    """A Verdict in the making: the arms of each of its groups, and their weights."""

    verdict: Verdict
    groups: list  # of lists of arms
    weights: tuple = (1, -1)
    seen: str = "undecided"  # the word that a look gave
    then: int = 0  # the arm's runs at that look
    reached: bool = False  # whether it has reached a look


# --- verdicts


def analyse(sweep, runs, costs=None, measure=None, records=()):
    """The Analysis of a sweep by a measure (default: its metric). records: lines of its history."""
    measure = measure or sweep["metric"]
    losses = Losses(sweep, runs, measure, costs or {})
    control, curve, margin, source = finite(losses.control()), None, math.nan, "none"
    if measure not in WRONG:  # the curve of tokens and the margin are in nats
        curve = curve_from({1: control} | losses.curve())
        margin, source = margin_of(sweep, curve)
    stored = None if math.isnan(margin) else margin
    tried, comparisons = tried_seeds(runs), planned_comparisons(sweep)
    names = {one.verdict.name for one in comparisons}

    analysis = Analysis(
        measure,
        margin,
        source,
        base_mean=float(control.mean()) if len(control) else math.nan,
        base_sd=sample_sd(control),
        base_n=len(control),
        verdicts=[comparison.verdict for comparison in comparisons],
        floor=floor_of(sweep, losses),
        curve=curve,
        looks=history.looks_of(sweep, tried, records, sweep["metric"], stored),
        family=len(names.union(*(record["arms"] for record in records))),
    )
    pooled, settle = None, decide
    if sweep.get("screening"):
        pooled, settle = pooled_variance([finite(losses.of(arm)) for arm in runs.done]), screen
    for comparison in comparisons:
        describe(comparison, losses, analysis, pooled)
    if comparisons:
        settle(comparisons, losses, analysis)
    for comparison in comparisons:
        explain(comparison, sweep, runs, tried, analysis)
    if analysis.floor:
        analysis.verdicts.insert(len(judged_arms(sweep)), analysis.floor)
    look_ahead(sweep, [one.verdict for one in comparisons], analysis, pooled)
    return analysis


def margin_of(sweep, curve):
    """(margin, where it comes from): what sweep.json says, or else what the curve says."""
    if sweep.get("margin") is not None:
        return sweep["margin"], sweep.get("margin_source") or "given"
    if curve:
        return margin_from(curve), "5 % of the tokens, read off the curve after the runs"
    return math.nan, "none"


def planned_comparisons(sweep):
    """[Comparison] of each arm with the one it is compared with, then of each interaction."""
    singles, interactions, control = [], [], control_group(sweep)
    for arm in judged_arms(sweep):
        against, pair = (sweep["arms"][arm].get(key) for key in ("against", "interaction_of"))
        groups = [[arm], control if against == sweep["base"] else [against]]
        singles.append(Comparison(Verdict(arm, against), groups))
        if pair:  # (arm - a) - (b - base): the effect of both beyond the sum of their effects
            a, b = pair
            verdict = Verdict(arm, f"{a} + {b}", interaction=True)
            interactions.append(Comparison(verdict, [[arm], [a], [b], control], (1, -1, -1, 1)))
    return singles + interactions


def describe(comparison, losses, analysis, pooled):
    """Fill in what the runs of a comparison are, whatever the word. `pooled` is the variance of a
    screening and its degrees of freedom."""
    verdict, groups = comparison.verdict, losses.groups(comparison.groups)
    losses_of_arm = finite(groups[0])
    n = len(losses_of_arm)
    verdict.n, verdict.n_against = len(groups[0]), len(groups[1])
    verdict.diverged = verdict.n - n
    if n and not verdict.interaction:
        verdict.loss, verdict.loss_sd = float(losses_of_arm.mean()), sample_sd(losses_of_arm)
    verdict.p = test(groups, comparison.weights, analysis.margin)[0]
    if not all(len(group) and np.isfinite(group).all() for group in groups):
        return

    verdict.measure(contrast(groups, comparison.weights, pooled))
    if not verdict.interaction:
        verdict.differences = (groups[0] - groups[1].mean()).tolist()
    add_text_interval(comparison, losses)
    if analysis.curve and verdict.against == losses.base and losses.measure != "equal_time":
        se = verdict.loss_sd / math.sqrt(n)
        if pooled:
            se, n = math.sqrt(pooled[0] / n), pooled[1] + 1
        verdict.worth = analysis.curve.worth(verdict.loss, se, n)
        ratio = losses.step_ratio(verdict.arm)
        verdict.worth_time = ratio and analysis.curve.worth(verdict.loss, se, n, ratio)


def add_text_interval(comparison, losses):
    """The 95 % interval of a difference over the text: a bootstrap of blocks, means over runs."""
    blocks = [
        [row["blocks"] for row in losses.rows(arms) if row.get("blocks")]
        for arms in comparison.groups
    ]
    if losses.measure in ("equal_time", *WRONG) or not all(blocks):
        return
    means = [np.mean(group, 0) for group in blocks]  # [blocks] each
    comparison.verdict.resample(np.dot(comparison.weights, means))


def test(groups, weights, margin):
    """(p, p of a tie, direction) of groups of losses, not corrected; (1, 1, 0) if one is empty.
    Groups with a diverged run are compared by ranks, and cannot tie."""
    if not all(map(len, groups)):
        return 1.0, 1.0, 0.0
    if all(np.isfinite(group).all() for group in groups):
        found = contrast(groups, weights)
        return float(found.p()), float(found.p_within(margin)), float(found.mean)
    if len(groups) > 2:
        return 1.0, 1.0, 0.0
    p, direction = rank_test(*groups)
    return p, 1.0, direction


def decide(comparisons, losses, analysis):
    """Fill in the words and the corrected p-values of the family."""
    looks, tests = analysis.looks, []
    for look in [*looks[:-1], None]:
        for one in comparisons:
            groups = losses.groups(one.groups, look)
            tests.append((*test(groups, one.weights, analysis.margin), len(groups[0])))
            one.reached |= look is not None and all(map(len, groups))
    shape = len(looks), len(comparisons), 4
    p, p_tie, mean, n = np.moveaxis(np.reshape(tests, shape), -1, 0)  # [looks, family] each

    shares, tie_shares = ([getattr(look, k) for look in looks] for k in ("share", "tie_share"))
    judged = judge(p, p_tie, mean, shares, tie_shares, analysis.family)
    for place, one in enumerate(comparisons):
        verdict = one.verdict
        for key in ("p_looks", "p_tie_looks", "p_holm", "p_tie"):
            setattr(verdict, key, float(judged[key][place]))
        verdict.word, one.seen = str(judged["word"][place]), str(judged["seen"][place])
        one.then = int(n[judged["look"][place], place])
        if verdict.diverged and verdict.word in ("better", "tie"):
            verdict.word = "undecided"
        if verdict.word != "undecided":
            verdict.look = one.then


def screen(comparisons, losses, analysis):
    """Fill in the words of a screening: larger than the noise, or not seen."""
    known = [one for one in comparisons if math.isfinite(one.verdict.low)]
    p = holm([one.verdict.p for one in known], analysis.family)
    for one, corrected in zip(known, p, strict=True):
        one.verdict.p_holm, one.reached = float(corrected), True
        one.verdict.word = "larger than the noise" if corrected <= ALPHA else "not seen"


def explain(comparison, sweep, runs, tried, analysis):
    """Set the words that follow from missing runs, and explain each word."""
    verdict, arm, parts = comparison.verdict, comparison.verdict.arm, []
    failed = [row for row in runs.failed if row["arm"] == arm and row["purpose"] == "report"]
    if verdict.diverged:
        parts.append(f"{verdict.diverged} of {verdict.n} diverged")
    elif comparison.reached and math.isnan(verdict.mean):
        parts.append("compared by ranks: runs of the other side diverged")
    if failed:
        parts.append(f"{len(failed)} failed: {failed[-1].get('reason') or 'no reason given'}")

    if not verdict.n and runs.ended(arm):
        verdict.word = "no verdict"
        parts.append("its steps were not timed")
    elif not verdict.n:
        verdict.word = "failed" if failed else "not run"
    elif min(verdict.n, verdict.n_against) < 2:
        verdict.word = "no verdict"
        parts.append("one seed says nothing about chance")
    elif not comparison.reached and verdict.diverged and sweep.get("screening"):
        verdict.word = "no verdict"
    elif not comparison.reached:
        verdict.word = "no verdict"
        parts.append(missing_runs(comparison, sweep, tried))
    elif comparison.seen != verdict.word and not verdict.diverged and not sweep.get("screening"):
        then = f"{comparison.seen} at {comparison.then} seeds"
        parts.append(f"{then}, but not by all {verdict.n} together")
    elif verdict.word in ("better", "worse"):
        parts.append("smaller than the margin" if verdict.p_tie <= ALPHA else "")
        parts.append(verdict.text_note)
    elif verdict.word == "undecided" and not analysis.margin > 0:
        parts.append("no margin, so no tie")
    verdict.why = "; ".join(filter(None, parts))


def missing_runs(comparison, sweep, tried):
    """Which planned runs a comparison still lacks at its first look."""
    needed, parts = planned_runs(sweep, min(sweep["looks"])), []
    for arms in comparison.groups:
        ended, planned = sum(len(tried[arm]) for arm in arms), sum(needed[arm] for arm in arms)
        if ended < planned:
            parts.append(f"{ended} of the {planned} planned runs of {' and '.join(arms)}")
    return ", ".join(parts) or "measured at no look"


# --- the set-up, and what is open


def floor_of(sweep, losses):
    """The Verdict of the base's second copy against the base, a check of the set-up, or None."""
    base, *copies = control_group(sweep)
    if not copies:
        return None
    x, reference = losses.groups([copies, [base]]) if losses.measure != "equal_time" else ([], [])
    floor = Verdict(copies[0], base, "noise", n=len(x), n_against=len(reference))
    if len(x) and len(reference) and np.isfinite([*x, *reference]).all():
        floor.measure(contrast([x, reference]))
        floor.loss, floor.loss_sd = float(x.mean()), sample_sd(x)
    return floor


def undecided(sweep, rows, costs=None):
    """[(arm, about how many more seeds, None if unknown or over MOST_SEEDS)] of the arms that more
    seeds could decide. A pair is undecided as long as its own verdict or its interaction's is."""
    open_arms = {}
    for verdict in analyse(sweep, sort_rows(sweep, rows), costs).verdicts:
        if verdict.word == "undecided":
            open_arms.setdefault(verdict.arm, []).append(verdict.more)
    return [(arm, max(more) if all(more) else None) for arm, more in open_arms.items()]


# --- pages of several sweeps


def correct_page(analyses):
    """Correct the verdicts of a page's analyses for all their comparisons together, and take back
    the words that this leaves undecided."""
    verdicts = [v for one in analyses for v in one.verdicts if math.isfinite(v.p_looks)]
    found = [[getattr(verdict, key) for verdict in verdicts] for key in ("p_looks", "p_tie_looks")]
    for verdict, p, p_tie in zip(verdicts, *holm(found).tolist(), strict=True):
        verdict.p_page = p
        if {"better": p, "worse": p, "tie": p_tie}.get(verdict.word, 0) > ALPHA:
            count = len(verdicts)
            reason = f"{verdict.word} in its own sweep, not among the page's {count} comparisons"
            verdict.word, verdict.more = "undecided", None
            verdict.why = "; ".join(filter(None, [verdict.why, reason]))


def finite(values):
    return values[np.isfinite(values)]


def counted(number, word):
    return f"{number} {word}{'' if number == 1 else 's'}"


def listed(words, most=6):
    """Join words for a sentence: "a, b and c". Beyond `most` words, only count the rest."""
    words = list(words)
    if len(words) > most:
        words[most - 1 :] = [f"{len(words) - most + 1} more"]
    *head, tail = words or [""]
    return f"{', '.join(head)} and {tail}" if head else tail
