"""The caveats of a report: fixed sentences, each with the condition under which it is printed. A
condition returns a list of what is concerned, or whether it holds."""

import numpy as np

from bench.ablation.rows import as_dict
from bench.ablation.tables import known

LOUD = 3  # times the margin: a smallest visible difference above this is too coarse for a tie
FAR = 3  # times the sd of the base's runs
LOOKED_AT = ("metric", "margin", "looks")  # keys of history.jsonl that a report should not change


def failed_runs(section):
    failed = section.runs[section.runs["status"] == "failed"].groupby(["arm", "reason"], sort=False)
    return [f"{arm}: {reason} ({len(runs)})" for (arm, reason), runs in failed]


def stale_rows(section):
    stale = section.runs.loc[~section.runs["current"], "arm"].value_counts(sort=False)
    return [f"{arm} ({count})" for arm, count in stale.items()]


def replicate_differs(section):
    low, high = (section.replicate[key] for key in ("low", "high"))
    return bool(((low > 0) | (high < 0)).any())


def too_coarse(section):
    facts = section.verdicts.attrs
    return not section.plan["screening"] and facts["smallest_visible"] > LOUD * facts["margin"] > 0


def overfitted_arms(section):
    arms = []
    for arm in section.arms:
        curves = [np.array(curve, float) for curve in section.reported(arm)["curve"] if curve]
        gaps = [curve[-1, 1] - curve[:, 1].min() for curve in curves]
        places = [curve[:, 1].argmin() / len(curve) for curve in curves]
        if curves and np.mean(gaps) > 0.01 and np.mean(places) < 0.8:
            arms.append(f"{arm} ({np.mean(gaps):.3f} above its lowest)")
    return arms


def epochs(section):
    values, data = section.plan["base_values"], section.plan["data"]
    tokens = values.get("max_iters", 0) * (values.get("gradient_accumulation_steps") or 1)
    tokens *= values.get("batch_size", 0) * values.get("block_size", 0)
    times = tokens / data.get("train_tokens", float("inf"))
    return [f"{times:.3g} times"] if times > 1.05 else []


def rates_at_the_edge(section):
    arms = []
    for arm, runs in section.tuned.groupby("arm", sort=False):
        chosen = section.plan["chosen_lr"].get(arm, 1)
        if chosen in (runs["rate"].min(), runs["rate"].max()) and runs["rate"].nunique() > 1:
            arms.append(f"{arm} ({chosen:g} ×)")
    return arms


def rates_that_did_not_hold(section):
    """Arms that lose more on new seeds than on those that chose their rate, on the same text."""
    arms = []
    for arm, runs in section.tuned.groupby("arm", sort=False):
        chosen = runs["rate"] == section.plan["chosen_lr"].get(arm, 1)
        then, now = runs.loc[chosen, "loss_tune"].mean(), section.reported(arm)["loss_tune"].mean()
        if now - then > FAR * section.verdicts.attrs["base_sd"]:
            arms.append(f"{arm} ({then:.3f}, then {now:.3f})")
    return arms


def unmatched_arms(section):
    arms = []
    for arm in section.arms:
        percent = as_dict(section.plan["arms"][arm]["match"]).get("residual_percent")
        if known(percent) and abs(percent) > 0.5:
            arms.append(f"{arm} ({percent:+.2f} %)")
    return arms


def changed_after_a_report(section):
    lines = section.history
    return [key for key in LOOKED_AT if len({str(line.get(key)) for line in lines}) > 1]


CAVEATS = (  # the most important first
    (failed_runs, "Runs failed. The next start tries them again; no mean includes them."),
    (stale_rows, "Rows of other code, configurations or learning rates are left out."),
    (lambda section: section.runs.attrs["odd"], "Lines that are no rows are left out."),
    (
        lambda section: section.replicate.empty and not section.cells,
        "The sweep has no replicate of the base, so nothing checks the set-up.",
    ),
    (
        replicate_differs,
        "The base differs from its replicate. Chance does this in one sweep of twenty; suspect a"
        " fault in the set-up.",
    ),
    (
        too_coarse,
        "The smallest difference that this sweep can see is over three times the margin of a tie."
        " Differences between the two stay undecided.",
    ),
    (
        overfitted_arms,
        "These arms overfit. The final loss ranks arms by how much they do; compare the best loss.",
    ),
    (
        epochs,
        "The base reads its training text more than once; fresh text could change the result.",
    ),
    (
        lambda section: not section.is_tuned,
        "Every arm trains at the base's learning rate, which favours the arms that it suits.",
    ),
    (rates_at_the_edge, "The best learning rate is at an edge of the grid; try beyond it."),
    (
        rates_that_did_not_hold,
        "The reported runs of these arms are worse than those that chose their learning rate. More"
        " seeds to choose by (tune_seeds) find a safer rate.",
    ),
    (unmatched_arms, "These arms do not match the base within 0.5 % in what was to be matched."),
    (changed_after_a_report, "This changed after a report was read."),
)


def caveats(section):
    """[(sentence, [what it concerns])] of the conditions that hold."""
    results = [(sentence, condition(section)) for condition, sentence in CAVEATS]
    return [(text, what if isinstance(what, list) else []) for text, what in results if what]
