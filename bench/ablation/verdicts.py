"""
The verdict on each comparison of a sweep, as columns of a table, from the table of its runs.

An arm's runs are compared with the control group: the runs of the base and of its replicate
together. docs/ablation.md explains the method; tests/helpers/simulate.py measures the error and the
power of `verdicts`.

- A verdict needs Welch's test and Student's: its p is the larger of the two. Welch's errs where an
  arm's few runs agree by chance, Student's where an arm spreads more than the base. A screening
  and the replicate pool one variance over all arms.
- A comparison's p is the least of p / share over its looks (looks.py). Holm's method then corrects
  for all planned comparisons of the sweep; those that have not run count with p = 1.
- A verdict must stand at the end: if the difference of all runs points the other way, or its own
  95 % interval includes zero, it is "undecided".
"""

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import stats

from bench.ablation import contrasts, looks, rows, worth
from bench.ablation.comparisons import (
    COLUMNS,
    comparisons_of,
    description,
    failing_word,
    losses_of,
    pick,
)
from bench.ablation.contrasts import compare, moments
from bench.ablation.looks import ALPHA


@dataclass
class Facts:
    """The facts of a sweep as a whole."""

    base_whole: float  # mean loss of the base's runs on the whole validation text
    above_trigrams: bool  # the base has not learned: so this is a screening
    marked: bool  # the base beats trigrams, but not the best n-grams
    screening: bool
    base_n: int = 0  # runs of the control group
    base_mean: float = math.nan  # their mean loss on the reported half
    base_sd: float = math.nan
    margin: float = math.nan  # the largest difference that counts as none
    margin_source: str = "none"
    looks: list = field(default_factory=list)  # looks.Look
    family: int = 0  # comparisons that Holm's method corrects for
    identities: dict = field(default_factory=dict)  # {arm: hashes of its code and configuration}
    smallest_visible: float = math.nan  # difference that 80 of 100 such sweeps find
    tie_power: float = math.nan  # chance that an equal arm is called a tie
    undecided: int = 0  # arms
    more_median: float = math.nan  # runs that may decide the median one


# ---------------------------------------------------------------- a sweep


def judge(runs, plan, history=()):
    """(table, Facts) of a sweep: a row of COLUMNS for each comparison in the plan's order, then the
    replicate."""
    facts = facts_of_base(runs, plan)
    if facts.above_trigrams:
        runs = runs.assign(stuck=False)  # in a screening, a stuck run counts like any other
    losses = losses_of(runs)
    curve = worth.curve_of(runs)
    add_control_group(facts, losses, plan)
    facts.margin, facts.margin_source = margin_of(plan, curve)
    tried = looks.tried_seeds(runs)
    margin = None if math.isnan(facts.margin) else facts.margin
    facts.looks = looks.looks_of(plan, tried, history, margin)
    facts.identities = {arm: looks.identity(plan, arm) for arm in plan["arms"]}

    comparisons = comparisons_of(plan)
    judged = [row for row in comparisons if row["kind"] == "swap"]
    earlier = [line["arms"] for line in history]
    facts.family = len({row["name"] for row in judged}.union(*earlier))
    pooled = contrasts.pooled_variance([values.to_numpy() for values in losses.values()])

    for row in comparisons:
        pools = facts.screening or row["kind"] == "replicate"
        row |= description(row, runs, losses, curve, plan, pooled if pools else None)
    words = screened(judged, facts) if facts.screening else decided(judged, losses, facts)
    for row, columns in zip(judged, words, strict=True):
        row |= columns
    failed = set(runs.arm[runs.current & (runs.purpose == "report") & (runs.status == "failed")])
    for row in judged:
        row |= explanation(row, plan, tried, row["arm"] in failed, facts)
    look_ahead(judged, facts, pooled)
    for row in judged:
        row["more_seeds"] = more_seeds(row, plan, facts)

    table = pd.DataFrame(comparisons, columns=COLUMNS)
    more = table.more_seeds[table.verdict == "undecided"].astype(float).fillna(math.inf)
    facts.undecided = len(more)
    facts.more_median = float(more.median())
    return table, facts


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


def add_control_group(facts, losses, plan):
    """Set the facts of the control group's runs that learned."""
    n, mean, square = map(float, moments(pick(losses, rows.control_group(plan))))
    facts.base_n = int(n)
    facts.base_mean = mean
    facts.base_sd = math.sqrt(square)


def undecided(runs, plan):
    """The names of the undecided arms; None for a screening, which has no verdicts."""
    table, facts = judge(runs, plan)
    return None if facts.screening else table.arm[table.verdict == "undecided"].to_list()


def margin_of(plan, curve):
    """(margin, where it comes from): the margin of the plan, or else of the curve."""
    if plan["margin"] is not None:
        return plan["margin"], plan["margin_source"] or "given"
    if curve:
        return curve.margin(), "5 % of the tokens, read off the curve after the runs"
    return math.nan, "none"


# ---------------------------------------------------------------- words


def decided(judged, losses, facts):
    """The columns of each row of the family: its verdict and its corrected p-values."""
    if not judged:
        return []
    least = looks.least_runs(facts.family)
    reached = [False] * len(judged)
    tests = []
    for look in [*facts.looks[:-1], None]:  # None: all runs
        for place, row in enumerate(judged):
            seeds = look.seeds_for(row["arm"]) if look else None
            groups = [pick(losses, arms, seeds) for arms in row["groups"]]
            tests.append(compare(groups, facts.margin, least))
            if look and all(map(len, groups)):
                reached[place] = True
    tests = np.reshape(tests, (len(facts.looks), len(judged), 3))  # p, p of a tie, difference
    p, p_tie, difference = np.moveaxis(tests, -1, 0)  # [looks, family] each

    shares = [look.share for look in facts.looks]
    tie_shares = [look.tie_share for look in facts.looks]
    found = contrasts.family_verdicts(p, p_tie, difference, shares, tie_shares, facts.family)
    family = []
    for place, row in enumerate(judged):
        columns = {key: values[place].item() for key, values in found.items()}
        columns["reached"] = reached[place]
        if columns["verdict"] == "worse":
            columns["verdict"] = failing_word(row) or "worse"
        family.append(columns)
    return family


def screened(judged, facts):
    """The columns of each row in a screening. Its verdict is "larger than the noise", "fails k of
    n" or "not seen"."""
    p = {}
    for row in judged:
        if math.isfinite(row["low"]) or row["p_not_learned"] <= 1:
            p[row["arm"]] = row["p_not_learned"] if failing_word(row) else row["p"]
    p_holm = contrasts.holm(list(p.values()), facts.family)
    corrected = {arm: float(p_holm[place]) for place, arm in enumerate(p)}
    family = []
    for row in judged:
        columns = {}
        if row["arm"] in corrected:
            p_of_arm = corrected[row["arm"]]
            word = "not seen"
            if p_of_arm <= ALPHA:
                word = failing_word(row) or "larger than the noise"
            columns = {"p_holm": p_of_arm, "verdict": word, "seen": word, "reached": True}
        family.append(columns)
    return family


def explanation(row, plan, tried, failed, facts):
    """The columns of a verdict and its reason, where runs may be missing."""
    word = row["verdict"]
    reasons = reasons_of(row)
    fewest = min(row["n"], row["n_control"])
    least = looks.least_runs(facts.family)
    if failed:
        reasons.append("runs failed")

    if not row["n"]:
        word = "failed" if failed else "not run"
    elif fewest < 2:
        word = "no verdict"
        reasons.append("one seed cannot show chance")
    elif not row["reached"]:
        word = "no verdict"
        planned = looks.planned_runs(plan, plan["looks"][0])
        arms = [arm for group in row["groups"] for arm in group]
        if any(len(tried.get(arm, ())) < planned[arm] for arm in arms):
            reasons.append("planned runs are missing")
    elif not facts.screening and fewest < least:
        reasons.append(f"fewer than {least} runs decide nothing among {facts.family} arms")
    elif word == "undecided" and row["seen"] != "undecided":
        reasons.append("seen at a look, but not by all runs together")
    elif word in ("better", "worse") and row["p_tie"] <= ALPHA:
        reasons.append("smaller than the margin")
    elif word in ("better", "worse") and row["text_low"] <= 0 <= row["text_high"]:
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
    if row["p_not_learned"] <= 1 and not failing_word(row):
        reasons.append("runs of the other side did not learn")
    return reasons


def look_ahead(judged, facts, pooled):
    """Set the smallest difference that the sweep can see, and the chance of a tie, from the noise
    of the median arm."""
    spread = [row for row in judged if row["sd"] > 0]
    if not spread or not facts.base_sd > 0:
        return
    sd = float(np.median([row["sd"] for row in spread]))
    n = float(np.median([row["n"] for row in spread]))
    if facts.screening:  # it has no looks, which would share ALPHA
        se = math.sqrt(pooled[0] * (1 / n + 1 / facts.base_n))
        level = ALPHA / facts.family
        facts.smallest_visible = looks.smallest_visible(se, pooled[1], level)
        return
    se, df = looks.welch(sd, n, facts.base_sd, facts.base_n)
    level = ALPHA * max(look.share for look in facts.looks) / facts.family
    facts.smallest_visible = looks.smallest_visible(se, df, level)
    if facts.margin > 0:
        facts.tie_power = float(looks.to_tie(0, se, df, facts.margin, level))


def more_seeds(row, plan, facts):
    """The further runs that may decide an undecided arm; nan where they cannot be estimated."""
    if facts.screening or math.isnan(facts.smallest_visible):
        return math.nan
    if row["verdict"] != "undecided" or not math.isfinite(row["se"]) or failing_word(row):
        return math.nan
    return looks.more_seeds(row, facts.looks, plan["looks"], facts.margin, facts.family)


# ---------------------------------------------------------------- many sweeps


def standing(judged):
    """The swaps of many sweeps, [(table, Facts)], each part in each base once: the planned estimate
    of most runs, whatever its error. The columns of `judge`, sweep: the place in the list, and row:
    the label in its table. Screenings are left out."""
    tables = [pd.DataFrame(columns=[*COLUMNS, "sweep", "row", "identity"])]
    for place, (table, facts) in enumerate(judged):
        if facts.screening:
            continue
        swaps = table[table.kind == "swap"]
        identity = []
        for arm, against in zip(swaps.arm, swaps.against, strict=True):
            identity.append(str([facts.identities[arm], facts.identities[against]]))
        tables.append(swaps.assign(sweep=place, row=swaps.index, identity=identity))
    swaps = pd.concat(tables, ignore_index=True)
    order = (swaps.n + swaps.n_control).sort_values(ascending=False, kind="stable").index
    return swaps.loc[order].drop_duplicates(["name", "identity"]).sort_index()


def badges(judged):
    """[Series], one for each sweep of [(table, Facts)]: whether Benjamini's and Hochberg's
    correction at 5 % over all swaps that stand agrees with a decision. Ties are corrected among
    themselves. Screenings are left out."""
    swaps = standing(judged)
    agree = pd.Series(False, swaps.index)
    for p, decided in (
        (swaps.p_looks, swaps.verdict.str.fullmatch("better|worse|fails .*")),
        (swaps.p_tie_looks, swaps.verdict == "tie"),
    ):
        if len(swaps):
            adjusted = stats.false_discovery_control(p.astype(float).fillna(1))
            agree |= decided & (adjusted <= ALPHA)
    found = [pd.Series(False, table.index) for table, _ in judged]
    for line in swaps[agree].itertuples():
        found[line.sweep][line.row] = True
    return found
