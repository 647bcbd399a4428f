"""
The comparisons of a sweep, each of an arm with other arms, and the columns of verdicts.judge's
table that describe their runs, whatever the verdict.
"""

import math

import numpy as np
import pandas as pd
from scipy import stats

from bench.ablation import plans, worth
from bench.ablation.contrasts import contrast, failures, finite, fisher, moments

RESAMPLES = 1999  # of the bootstrap over the text
LEAST_BLOCKS = 50  # of text, for an interval over it
TEST = ("test", "test_low", "test_high")  # the difference on the test split, and its interval
NUMBERS = {  # the columns of judge's table that are nan where they are not known
    "val_loss_report": "mean over the arm's runs that learned, on the reported half",
    "sd": "standard deviation of these runs",
    "n": "runs of the arm",
    "n_control": "runs of the control group",
    "difference": "mean loss minus the mean loss of the control group; negative is better",
    "se": "standard error of the difference",
    "df": "degrees of freedom of Welch's test",
    "low": "95 % interval of the difference",
    "high": "",
    "p": "of Welch's test of this comparison alone",
    "p_both": "of both tests, or of the runs that did not learn",
    "p_holm": "the same, corrected for the family; it decides",
    "p_tie": "of a tie, corrected for the family",
    "test": "difference on the test split, with its interval",
    "test_low": "",
    "test_high": "",
    "seeds_to_decide": "seeds that may decide an undecided arm; inf over MOST_SEEDS",
    "text_low": "95 % interval of the difference over the text",
    "text_high": "",
    "worth": "multiple of the base's tokens; inf above the curve, 0 below it",
    "worth_low": "",
    "worth_high": "",
    "worth_time": "worth over the time of a step",
    "worth_time_low": "",
    "worth_time_high": "",
    "p_not_learned": "of Fisher's test of the rate of runs that did not learn",
}
UNJUDGED = {"verdict": "no verdict", "reason": "", "diverged": 0, "stuck": 0}  # of a comparison
COLUMNS = ["name", "arm", "against", "kind", *NUMBERS, *UNJUDGED]


def comparisons_of(plan):
    """The rows of `judge` without numbers, with their two groups of arms."""
    base = plan["base"]
    control = plans.control_group(plan)
    comparisons = []
    for arm in plans.judged_arms(plan):
        against = plan["arms"][arm]["against"]
        groups = [[arm], control if against == base else [against]]
        comparisons.append(comparison(arm, against, "swap", groups))
    for arm in plans.replicates(plan):
        comparisons.append(comparison(arm, base, "replicate", [[arm], [base]]))
    return comparisons


def comparison(arm, against, kind, groups):
    """A row of `judge` without numbers."""
    about = {"name": arm, "arm": arm, "against": against, "kind": kind, "groups": groups}
    return about | dict.fromkeys(NUMBERS, math.nan) | UNJUDGED | {"all_tried": False}


def losses_of(runs):
    """{arm: Series of losses by seed} of its reported runs that ended, inf where one did not
    learn."""
    ended = runs[runs.current & (runs.purpose == "report") & (runs.status != "failed")]
    values = ended.val_loss_report.mask(ended.stuck | (ended.status == "diverged"), math.inf)
    values = pd.Series(values.to_numpy(), pd.MultiIndex.from_frame(ended[["arm", "seed"]]))
    by_arm = values.dropna().sort_index(level="seed").groupby("arm", sort=False)
    return {arm: group.droplevel("arm") for arm, group in by_arm}


def pick(losses, arms):
    """The losses [n] of some arms."""
    return np.concatenate([np.empty(0), *(losses[arm] for arm in arms if arm in losses)])


def description(row, runs, losses, curve, plan, pooled):
    """The columns that describe the runs of a comparison, whatever the verdict. `pooled` (variance,
    degrees of freedom) replaces the variances of its groups."""
    groups = [pick(losses, arms) for arms in row["groups"]]
    own = finite(groups[0])
    others = finite(groups[1])
    columns = not_learned(runs, row["groups"][0], groups)
    if len(own):
        columns["val_loss_report"] = float(own.mean())
        columns["sd"] = float(np.sqrt(moments(own)[2]))
    if row["kind"] == "replicate":
        columns["verdict"] = "noise"
    if not len(own) or not len(others):
        return columns
    columns |= contrast(groups, pooled=pooled).columns()
    if row["kind"] == "replicate":
        return columns
    # Not of a replicate: over the text any two trained models differ, even two of the same arm.
    weights = {row["arm"]: 1 / len(own)} | dict.fromkeys(row["groups"][1], -1 / len(others))
    columns |= text_interval(runs, weights)
    columns |= on_test_split(runs, row["groups"])
    if curve and row["against"] == plan["base"]:
        n = len(own)
        se = columns["sd"] / math.sqrt(n)
        if pooled:
            se = math.sqrt(pooled[0] / n)
            n = pooled[1] + 1
        ratio = runs.loc[runs.arm == row["arm"], worth.STEP_RATIO].to_numpy()[0]
        columns |= worth.columns_of(curve, columns["val_loss_report"], se, n, ratio)
    return columns


def not_learned(runs, arms, groups):
    """The columns that count the runs of some arms that did not learn. groups: the losses of these
    arms, and the losses of the arms that they are compared with."""
    k, n, c, m = map(int, failures(groups))
    stuck = runs.stuck & runs.current & (runs.purpose == "report") & runs.arm.isin(arms)
    columns = {"n": n, "n_control": m, "stuck": int(stuck.sum())}
    columns["diverged"] = k - columns["stuck"]
    if n and m and k + c:
        columns["p_not_learned"] = float(fisher(k, n, c, m))
    return columns


def on_test_split(runs, groups):
    """The columns of the difference on the test split, which no choice and no verdict uses. {}
    where a group has no losses there."""
    done = learned(runs)
    losses = [done.test_loss[done.arm.isin(arms)].dropna().to_numpy() for arms in groups]
    if not all(map(len, losses)):
        return {}
    found = contrast(losses).columns()
    return {
        "test": found["difference"],
        "test_low": found["low"],
        "test_high": found["high"],
    }


def learned(runs):
    """The reported runs that ended and learned."""
    counts = runs.current & (runs.purpose == "report") & (runs.status == "done") & ~runs.stuck
    return runs[counts]


def text_interval(runs, weights):
    """The 95 % interval over the text of a weighted sum of the losses of runs, {arm: weight of each
    of its runs}: a bootstrap of its blocks. {} with fewer than LEAST_BLOCKS blocks."""
    done = learned(runs)
    done = done[done.arm.isin(weights)]
    counts = set(done.blocks.map(len))
    if len(counts) != 1 or min(counts) < LEAST_BLOCKS:
        return {}
    differences = done.arm.map(weights).to_numpy() @ np.array(done.blocks.to_list())  # [blocks]
    resampled = stats.bootstrap(
        (differences,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=0
    )
    low, high = resampled.confidence_interval
    return {"text_low": float(low), "text_high": float(high)}


def failing_word(row):
    """ "fails k of n" of an arm with runs that did not learn, otherwise ""."""
    failed = row["diverged"] + row["stuck"]
    return f"fails {failed} of {row['n']}" if failed else ""
