"""
The verdict on each comparison of a sweep, as columns of a table, from the table of its runs.

An arm's runs are compared with the control group: the base's runs and those of its replicate
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

import numpy as np
import pandas as pd
from scipy import stats

from bench.ablation import contrasts, looks, power, rows, worth
from bench.ablation.contrasts import compare, contrast, failures, fisher, moments
from bench.ablation.power import ALPHA

RESAMPLES = 1999  # of the bootstrap over the text
LEAST_BLOCKS = 50  # of text, for an interval over it
TEST = ("test", "test_low", "test_high")  # as difference, low, high, on the test split
COLUMNS = [
    *("name", "arm", "against", "kind", "n", "n_control", "loss", "sd"),
    *("difference", "se", "df", "low", "high", "p", "p_looks", "p_tie_looks", "p_holm", "p_tie"),
    *TEST,
    *("verdict", "reason", "more_seeds", "text_low", "text_high", "worth", "worth_low"),
    *("worth_high", "worth_time", "worth_time_low", "worth_time_high"),
    # Runs that diverged, runs that are stuck; of both the rate's interval, and Fisher's test.
    *("diverged", "stuck", "not_learned_low", "not_learned_high", "p_not_learned"),
]
TEXTS = {"verdict": "no verdict", "reason": "", "diverged": 0, "stuck": 0}


# ---------------------------------------------------------------- a sweep


def judge(runs, plan, history=()):
    """The DataFrame of the verdicts of a sweep: COLUMNS, a row for each comparison in the plan's
    order, then the replicate. worth is inf above the curve and 0 below it; more_seeds inf where it
    is over MOST_SEEDS. attrs say what the sweep can see."""
    runs, of_base = yardstick(runs, plan)
    losses, comparisons = losses_of(runs), comparisons_of(plan)
    control = pick(losses, rows.control_group(plan))
    curve = worth.curve_of(runs)
    margin, source = margin_of(plan, curve)
    pooled = contrasts.pooled_variance([values.to_numpy() for values in losses.values()])
    tried = looks.tried_seeds(runs)
    taken = looks.looks_of(plan, tried, history, None if math.isnan(margin) else margin)
    judged = [row for row in comparisons if row["kind"] != "replicate"]
    family = {row["name"] for row in judged}.union(*(line["arms"] for line in history))
    n, mean, square = map(float, moments(control))
    attrs = of_base | {
        "margin": margin,
        "margin_source": source,
        "base_mean": mean,
        "base_sd": math.sqrt(square),
        "base_n": int(n),
        "looks": taken,
        "family": len(family),
        "identities": {arm: looks.identity(plan, arm) for arm in plan["arms"]},
    }

    for row in comparisons:
        pools = attrs["screening"] or row["kind"] == "replicate"
        describe(row, runs, losses, curve, plan, pooled if pools else None)
    if attrs["screening"]:
        screen(judged, attrs)
    elif judged:
        decide(judged, losses, attrs)
    failed = set(runs.arm[runs.current & (runs.purpose == "report") & (runs.status == "failed")])
    for row in judged:
        explain(row, plan, tried, row["arm"] in failed, attrs)
    attrs |= look_ahead(judged, plan, attrs, pooled)
    frame = pd.DataFrame(comparisons, columns=COLUMNS)
    frame.attrs |= attrs | still_open(frame)
    return frame


def yardstick(runs, plan):
    """(runs, facts): the base's mean loss on the whole text, base_whole, beside those of n-grams.
    Above trigrams, the sweep is a screening, and to be stuck is no outcome; between trigrams and
    the best n-grams, it is marked."""
    ngrams = plan["ngrams"]
    trigrams, (_, best) = ngrams.get("trigrams", math.nan), ngrams.get("best", (0, math.nan))
    base = runs[runs.current & runs.control & (runs.purpose == "report") & (runs.status == "done")]
    mean = float(base.loss_whole.mean())
    above = mean > trigrams
    facts = {"base_whole": mean, "above_trigrams": above, "screening": plan["screening"] or above}
    runs = runs.assign(stuck=False) if above else runs
    return runs, facts | {"marked": best < mean <= trigrams}


def undecided(runs, plan):
    """The names of the undecided arms; None for a screening, which decides nothing."""
    frame = judge(runs, plan)
    return None if frame.attrs["screening"] else frame.arm[frame.verdict == "undecided"].to_list()


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


def losses_of(runs):
    """{arm: Series of losses by seed} of its reported runs that ended, inf where one did not
    learn."""
    ended = runs[runs.current & (runs.purpose == "report") & (runs.status != "failed")]
    values = ended.loss.mask(ended.stuck | (ended.status == "diverged"), math.inf)
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
        if arm in losses:
            values = losses[arm]
            groups.append(values if seeds is None else values[values.index.isin(seeds[arm])])
    return np.concatenate(groups)


def finite(values):
    return values[np.isfinite(values)]


def describe(row, runs, losses, curve, plan, pooled):
    """Fill in what the runs of a comparison are, whatever the verdict. `pooled` (variance, degrees
    of freedom) replaces the variances of its groups."""
    groups = [pick(losses, arms) for arms in row["groups"]]
    own, others = map(finite, groups)
    row |= not_learned(runs, row["groups"][0], groups)
    if len(own):
        row |= {"loss": float(own.mean()), "sd": float(np.sqrt(moments(own)[2]))}
    if row["kind"] == "replicate":
        row["verdict"] = "noise"
    if not len(own) or not len(others):
        return
    row |= contrast(groups, pooled=pooled).columns()
    if row["kind"] != "replicate":  # two models differ on every text
        weights = {row["arm"]: 1 / len(own)}
        row |= text_interval(runs, weights | dict.fromkeys(row["groups"][1], -1 / len(others)))
        row |= on_test_split(runs, row["groups"])
    if curve and row["kind"] == "swap" and row["against"] == plan["base"]:
        se, n = row["sd"] / math.sqrt(len(own)), len(own)
        if pooled:
            se, n = math.sqrt(pooled[0] / n), pooled[1] + 1
        ratio = runs.loc[runs.arm == row["arm"], worth.STEP_RATIO].to_numpy()[0]
        row |= worth.columns_of(curve, row["loss"], se, n, ratio)


def not_learned(runs, arms, groups):
    """The columns that say how many runs of some arms did not learn. groups: their losses, and
    those that they are compared with."""
    k, n, c, m = map(int, failures(groups))
    stuck = runs.stuck & runs.current & (runs.purpose == "report") & runs.arm.isin(arms)
    columns = {"n": n, "n_control": m, "stuck": int(stuck.sum())}
    columns["diverged"] = k - columns["stuck"]
    if n and k + c:
        rate = stats.binomtest(k, n).proportion_ci()  # Clopper and Pearson's
        columns |= {"not_learned_low": rate.low, "not_learned_high": rate.high}
        columns["p_not_learned"] = float(fisher(k, n, c, m)) if m else math.nan
    return columns


def on_test_split(runs, groups):
    """The columns of the difference on the test split, of which nothing is chosen or decided. {}
    where a group has no such losses."""
    done = learned(runs)
    losses = [done.test_loss[done.arm.isin(arms)].dropna().to_numpy() for arms in groups]
    if not all(map(len, losses)):
        return {}
    found = contrast(losses).columns()
    return dict(zip(TEST, (found[key] for key in ("difference", "low", "high")), strict=True))


def learned(runs):
    """The reported runs that ended and learned."""
    return runs.query("current and purpose == 'report' and status == 'done' and not stuck")


def text_interval(runs, weights):
    """The 95 % interval over the text of a weighted sum of the losses of runs, {arm: weight of each
    of its runs}: a bootstrap of its blocks. {} with fewer than LEAST_BLOCKS blocks."""
    done = learned(runs)
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
    taken, tests, least = attrs["looks"], [], power.least_runs(attrs["family"])
    for look in [*taken[:-1], None]:
        for row in judged:
            seeds = look and look.seeds_for(row["arm"])
            groups = [pick(losses, arms, seeds) for arms in row["groups"]]
            tests.append(compare(groups, attrs["margin"], least))
            row["reached"] |= look is not None and all(map(len, groups))
    tests = np.reshape(tests, (len(taken), len(judged), 3))  # p, p of a tie, difference
    tests = np.moveaxis(tests, -1, 0)  # [looks, family] each

    shares, tie_shares = [look.share for look in taken], [look.tie_share for look in taken]
    columns = contrasts.family_verdicts(*tests, shares, tie_shares, attrs["family"])
    for place, row in enumerate(judged):
        row |= {key: values[place].item() for key, values in columns.items()}
        if row["verdict"] == "worse":
            row["verdict"] = failing_word(row) or "worse"


def failing_word(row):
    """ "fails k of n" of an arm with runs that did not learn, otherwise ""."""
    failed = row["diverged"] + row["stuck"]
    return f"fails {failed} of {row['n']}" if failed else ""


def screen(judged, attrs):
    """Fill in the words of a screening: larger than the noise, fails, or not seen."""
    known = [row for row in judged if math.isfinite(row["low"]) or row["p_not_learned"] <= 1]
    p = [row["p_not_learned"] if failing_word(row) else row["p"] for row in known]
    for row, corrected in zip(known, contrasts.holm(p, attrs["family"]).tolist(), strict=True):
        seen = failing_word(row) or "larger than the noise"
        word = seen if corrected <= ALPHA else "not seen"
        row |= {"p_holm": corrected, "reached": True, "verdict": word, "seen": word}


def explain(row, plan, tried, failed, attrs):
    """Set the verdicts that follow from missing runs, and the reason of each."""
    reasons, decided = reasons_of(row), row["verdict"] in ("better", "worse")
    least = power.least_runs(attrs["family"])
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
    elif not attrs["screening"] and min(row["n"], row["n_control"]) < least:
        reasons.append(f"fewer than {least} runs decide nothing among {attrs['family']} arms")
    elif row["verdict"] == "undecided" and row["seen"] != "undecided":
        reasons.append("seen at a look, but not by all runs together")
    elif decided and row["p_tie"] <= ALPHA:
        reasons.append("smaller than the margin")
    elif decided and row["text_low"] <= 0 <= row["text_high"]:
        reasons.append("not on every text")
    elif row["verdict"] == "undecided" and not attrs["margin"] > 0:
        reasons.append("no margin, so no tie")
    row["reason"] = "; ".join(reasons)


def reasons_of(row):
    """What runs that did not learn say about a verdict."""
    of_other_side = row["p_not_learned"] <= 1 and not failing_word(row)
    known = {
        "runs diverged": row["diverged"],
        "runs did not learn": row["stuck"],
        "runs of the other side did not learn": of_other_side,
    }
    return [reason for reason, holds in known.items() if holds]


def look_ahead(judged, plan, attrs, pooled):
    """{smallest_visible, tie_power} of a sweep, by the median arm's noise; fills in how many more
    seeds may decide what is undecided."""
    spread = [row for row in judged if row["sd"] > 0]
    ahead = {"smallest_visible": math.nan, "tie_power": math.nan}
    if not spread or not attrs["base_sd"] > 0:
        return ahead
    sd, n = (float(np.median([row[key] for row in spread])) for key in ("sd", "n"))
    margin, family, taken = attrs["margin"], attrs["family"], attrs["looks"]
    if attrs["screening"]:  # it has no looks, so that the whole of ALPHA is for it
        se, df = math.sqrt(pooled[0] * (1 / n + 1 / attrs["base_n"])), pooled[1]
        return ahead | {"smallest_visible": power.smallest_visible(se, df, ALPHA / family)}
    se, df = power.welch(sd, n, attrs["base_sd"], attrs["base_n"])
    level = ALPHA * max(look.share for look in taken) / family
    ahead["smallest_visible"] = power.smallest_visible(se, df, level)
    if margin > 0:
        ahead["tie_power"] = float(power.to_tie(0, se, df, margin, level))
    for row in judged:
        if row["verdict"] == "undecided" and math.isfinite(row["se"]) and not failing_word(row):
            row["more_seeds"] = power.more_seeds(row, taken, plan["looks"], margin, family)
    return ahead


def still_open(frame):
    """How many arms are undecided, and how many more seeds may decide the median one."""
    more = frame.more_seeds[frame.verdict == "undecided"].astype(float).fillna(math.inf)
    return {"undecided": len(more), "more_median": float(more.median())}


# ---------------------------------------------------------------- many sweeps


def standing(frames):
    """The swaps of many sweeps, each part in each base once: the planned estimate of most runs,
    whatever its error. The columns of `judge`, frame: the place of its frame, and row: its label
    there. Screenings are left out."""
    tables = [pd.DataFrame(columns=[*COLUMNS, "frame", "row", "identity"])]
    for place, frame in enumerate(frames):
        if not frame.attrs["screening"]:
            known, swaps = frame.attrs["identities"], frame[frame.kind == "swap"]
            pairs = zip(swaps.arm, swaps.against, strict=True)
            identity = [str([known[arm], known[other]]) for arm, other in pairs]
            tables.append(swaps.assign(frame=place, row=swaps.index, identity=identity))
    swaps = pd.concat(tables, ignore_index=True)
    order = (swaps.n + swaps.n_control).sort_values(ascending=False, kind="stable").index
    return swaps.loc[order].drop_duplicates(["name", "identity"]).sort_index()


def badges(frames):
    """For each of the frames of `judge` a Series: whether Benjamini's and Hochberg's correction at
    5 % over all swaps that stand agrees with a decision; of ties, over their own p.
    Screenings are not among them."""
    swaps = standing(frames)
    agree = pd.Series(False, swaps.index)
    for p, decided in (
        (swaps.p_looks, swaps.verdict.str.fullmatch("better|worse|fails .*")),
        (swaps.p_tie_looks, swaps.verdict == "tie"),
    ):
        if len(swaps):
            adjusted = stats.false_discovery_control(p.astype(float).fillna(1))
            agree |= decided & (adjusted <= ALPHA)
    found = [pd.Series(False, frame.index) for frame in frames]
    for line in swaps[agree].itertuples():
        found[line.frame][line.row] = True
    return found
