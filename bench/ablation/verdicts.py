"""
The verdict on each comparison of a sweep, as columns of a table, from the table of its runs.

An arm's runs are compared with the control group: the runs of the base and of its replicate
together. docs/ablation.md explains the method; tests/helpers/simulate.py measures the error and the
power of `verdicts`. A screening and the replicate pool one variance over all arms.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.ablation import contrasts, plans, power, worth
from bench.ablation.comparisons import (
    COLUMNS,
    comparisons_of,
    description,
    failing_word,
    losses_of,
    pick,
)
from bench.ablation.contrasts import compare, moments
from bench.ablation.power import ALPHA


@dataclass
class Facts:
    """The facts of a sweep as a whole."""

    base_whole: float  # mean loss of the base's runs on the whole validation text
    above_trigrams: bool  # the base has not learned: so this is a screening
    marked: bool  # the base beats trigrams, but not the best n-grams
    screening: bool
    curve: worth.Curve | None = None  # the base's loss against its tokens
    base_n: int = 0  # runs of the control group
    base_mean: float = math.nan  # their mean loss on the reported half
    base_sd: float = math.nan
    margin: float = math.nan  # the largest difference that counts as none
    margin_source: str = "none"
    family: int = 0  # arms that Holm's method corrects for
    smallest_visible: float = math.nan  # difference that 80 of 100 such sweeps find
    tie_power: float = math.nan  # chance that an equal arm is called a tie


def judge(runs, plan):
    """(table, Facts) of a sweep: a row of COLUMNS for each comparison in the plan's order, then the
    replicate."""
    facts = facts_of_base(runs, plan)
    if facts.above_trigrams:
        runs = runs.assign(stuck=False)  # beside a base that is stuck, a stuck run counts
    losses = losses_of(runs)
    curve = worth.curve_of(runs)
    facts.curve = curve
    n, mean, variance = map(float, moments(pick(losses, plans.control_group(plan))))
    facts.base_n = int(n)
    facts.base_mean = mean
    facts.base_sd = math.sqrt(variance)
    facts.margin, facts.margin_source = margin_of(plan, curve)

    comparisons = comparisons_of(plan)
    judged = [row for row in comparisons if row["kind"] == "swap"]
    measured = runs.arm[(runs.purpose == "report") & (runs.status != "failed")]
    facts.family = len(plans.counted_arms(plan, measured))
    pooled = contrasts.pooled_variance([values.to_numpy() for values in losses.values()])
    _, pooled_df = pooled  # 0 where no arm has two runs

    missing = missing_arms(runs, plan)
    for row in comparisons:
        arms, others = row["groups"]
        row["all_tried"] = missing.isdisjoint([*arms, *others])
        uses_pooled = pooled_df > 0 and (facts.screening or row["kind"] == "replicate")
        row |= description(row, runs, losses, curve, plan, pooled if uses_pooled else None)
    outcomes = screened(judged, facts) if facts.screening else decided(judged, losses, facts)
    failed = set(runs.arm[runs.current & (runs.purpose == "report") & (runs.status == "failed")])
    for row, columns in zip(judged, outcomes, strict=True):
        row |= columns
        row |= explanation(row, row["arm"] in failed, facts)
    look_ahead(judged, facts, pooled)
    for row in judged:
        row["seeds_to_decide"] = seeds_to_decide(row, facts)
    return pd.DataFrame(comparisons, columns=COLUMNS), facts


def missing_arms(runs, plan):
    """The arms whose planned runs have not all been tried."""
    reported = runs[runs.current & (runs.purpose == "report")]
    tried = reported.groupby("arm").seed.nunique()
    planned = plans.planned_runs(plan, plan["seeds"])
    return {arm for arm, count in planned.items() if tried.get(arm, 0) < count}


def facts_of_base(runs, plan):
    """The Facts that follow from the base's loss beside the losses of n-grams: above trigrams, the
    sweep is a screening; between trigrams and the best n-grams, it is marked."""
    trigrams = plan["ngrams"].get("trigrams", math.nan)
    _, best = plan["ngrams"].get("best", (0, math.nan))
    base = runs[runs.current & runs.control & (runs.purpose == "report") & (runs.status == "done")]
    mean = float(base.val_loss.mean())
    above = mean > trigrams
    return Facts(
        base_whole=mean,
        above_trigrams=above,
        marked=best < mean <= trigrams,
        screening=plan["screening"] or above,
    )


def margin_of(plan, curve):
    """(margin, where it comes from): the margin of the plan, or else of the curve."""
    if plan["margin"] is not None:
        return plan["margin"], plan["margin_source"] or "given"
    if curve:
        return curve.margin(), "5 % of the tokens, read off the curve after the runs"
    return math.nan, "none"


def decided(judged, losses, facts):
    """The columns of each row of the family: its verdict and its corrected p-values."""
    if not judged:
        return []
    least = power.least_runs(facts.family)
    tests = []
    for row in judged:
        groups = [pick(losses, arms) for arms in row["groups"]]
        if not row["all_tried"]:
            groups = [np.empty(0), np.empty(0)]  # for which `compare` gives p = 1
        tests.append(compare(groups, facts.margin, least))
    p, p_tie, difference = np.array(tests, float).T  # [family] each
    found = contrasts.family_verdicts(p, p_tie, difference, facts.family)
    found["p_both"] = p
    family = []
    for place, row in enumerate(judged):
        columns = {key: values[place].item() for key, values in found.items()}
        if columns["verdict"] == "worse":
            columns["verdict"] = failing_word(row) or "worse"
        family.append(columns)
    return family


def screened(judged, facts):
    """The columns of each row in a screening. Its verdict is "fails k of n" if any run failed,
    "better, by more than the noise", the same of "worse", or "not seen"."""
    found = {row["arm"]: {} for row in judged}
    compared = [row for row in judged if math.isfinite(row["low"])]
    corrected = contrasts.holm([row["p"] for row in compared], facts.family)
    for row, p in zip(compared, corrected.tolist(), strict=True):
        side = "better" if row["difference"] < 0 else "worse"
        word = f"{side}, by more than the noise" if p <= ALPHA else "not seen"
        found[row["arm"]] = {"p_holm": p, "verdict": word, "all_tried": True}
    for row in judged:
        if failing_word(row):
            found[row["arm"]] |= {"verdict": failing_word(row), "all_tried": True}
    return list(found.values())


def explanation(row, failed, facts):
    """{"verdict", "reason"} of a row: its verdict, or why it has none; and the reasons."""
    word = row["verdict"]
    reasons = reasons_of(row)
    fewest = min(row["n"], row["n_control"])
    least = power.least_runs(facts.family)
    if failed:
        reasons.append("runs failed")

    if not row["n"]:
        word = "failed" if failed else "not run"
    elif fewest < 2:
        word = "no verdict"
        reasons.append("one seed cannot show chance" if fewest else "no run to compare with")
    elif not row["all_tried"]:
        word = "no verdict"
        reasons.append("planned runs are missing")
    elif not facts.screening and fewest < least:
        among = f" among {facts.family} arms" if facts.family > 1 else ""
        reasons.append(f"fewer than {least} runs decide nothing{among}")
    elif word in ("better", "worse"):
        if row["p_tie"] <= ALPHA:
            reasons.append("smaller than the margin")
        if row["text_low"] <= 0 <= row["text_high"]:
            reasons.append("not on every text")
    elif word == "undecided" and not facts.margin > 0:
        reasons.append("no margin, so no tie")
    return {"verdict": word, "reason": "; ".join(reasons)}


def reasons_of(row):
    """[reason] of the runs that did not learn."""
    reasons = []
    if row["diverged"]:
        reasons.append("runs diverged")
    if row["stuck"]:
        reasons.append("runs did not learn")
    if not math.isnan(row["p_not_learned"]) and not failing_word(row):
        reasons.append("runs of the other side did not learn")
    return reasons


def look_ahead(judged, facts, pooled):
    """Set the smallest difference that the sweep can see, and the chance of a tie, from the noise
    of the median arm; not where its runs are too few for a verdict."""
    spread = [row for row in judged if row["sd"] > 0 and row["n_control"] > 1]
    if not spread or not facts.base_sd > 0:
        return
    sd = float(np.median([row["sd"] for row in spread]))
    n = float(np.median([row["n"] for row in spread]))
    control = float(np.median([row["n_control"] for row in spread]))
    level = ALPHA / facts.family
    if facts.screening:
        se = math.sqrt(pooled[0] * (1 / n + 1 / control))
        facts.smallest_visible = power.smallest_visible(se, pooled[1], level)
        return
    if min(n, control) < power.least_runs(facts.family):
        return
    se, df = power.welch(sd, n, facts.base_sd, control)
    facts.smallest_visible = power.smallest_visible(se, df, level)
    if facts.margin > 0:
        facts.tie_power = float(power.to_tie(0, se, df, facts.margin, level))


def seeds_to_decide(row, facts):
    """The seeds that may decide an undecided arm in a sweep of its own, whose control group has two
    runs more; nan where they cannot be estimated."""

    def noise_of(seeds):
        return power.welch(row["sd"], seeds, facts.base_sd, seeds + 2)

    if facts.screening or not facts.base_sd > 0:
        return math.nan
    all_learned = math.isnan(row["p_not_learned"])  # else no number of seeds decides
    if row["verdict"] != "undecided" or not math.isfinite(row["se"]) or not all_learned:
        return math.nan
    return power.seeds_to_decide(row["difference"], noise_of, facts.margin, family=1)
