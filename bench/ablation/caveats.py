"""The caveats of a report: fixed sentences, each with the condition under which it is printed. A
condition returns whether it holds, or a list of the arms, runs or keys that it concerns."""

import math

from bench.ablation import plans
from bench.ablation.rows import control_losses
from bench.settings.plan import tokens_of


def failed_runs(section):
    runs = section.runs
    return counted(runs[(runs["status"] == "failed") & runs["current"]], "reason")


def rows_left_out(section):
    return counted(section.runs[~section.runs["current"]], "left_out")


def counted(runs, why):
    """A text for each arm and each reason, which is in the column `why`, with the runs."""
    groups = runs.groupby(["arm", why], sort=False)
    return [f"{arm}: {reason} ({len(group)})" for (arm, reason), group in groups]


def arms_not_named(section):
    others = section.facts.family - len(plans.judged_arms(section.plan))
    return [f"{section.facts.family} arms"] if others else []


def base_did_not_learn(section):
    runs = section.ended[section.ended["control"]]
    failed = runs["status"] == "diverged"
    if not section.facts.above_trigrams:  # which has a caveat of its own
        failed |= runs["stuck"]
    if not any(failed):
        return []
    return [f"{failed.sum()} of {len(runs)} runs of the base and base again"]


def joined_machines(section):
    losses = control_losses(section.runs)
    each = [f"{name}: {len(runs)} of the base, {runs.mean():.4f}" for name, runs in losses.items()]
    return each if len(each) > 1 else []


def replicate_differs(section):
    low = section.replicate["low"]
    high = section.replicate["high"]
    return bool(((low > 0) | (high < 0)).any())


def beside_n_grams(section):
    """The losses of the base and of n-grams, as a text."""
    n, best = section.plan["ngrams"]["best"]
    trigrams = section.plan["ngrams"]["trigrams"]
    ours = f"{section.facts.base_whole:.3f} on the whole validation text"
    text = f"{ours}, beside {trigrams:.3f} of trigrams, {best:.3f} of {n}-grams"
    counted = section.plan["ngrams"].get("tokens")
    return f"{text} that count {counted:,} tokens" if counted else text


def epochs(section):
    data = section.plan["data"]
    times = tokens_of(section.plan["base_values"]) / data.get("train_tokens", math.inf)
    is_text = data.get("kind") != "pairs"  # a pair is one row, which is mostly padding
    return [f"{times:.3g} times"] if is_text and times > 1.05 else []


def rates_at_the_edge(section):
    arms = []
    runs = section.runs
    tried = runs[(runs["purpose"] == "tune") & (runs["status"] != "failed") & runs["current"]]
    for arm, tries in tried.groupby("arm", sort=False):
        chosen = section.plan["chosen_lr"].get(arm, 1)
        rates = tries["rate"]
        if rates.nunique() > 1 and chosen in (rates.min(), rates.max()):
            arms.append(f"{arm} ({chosen:g} ×)")
    return arms


CAVEATS = (  # the most important first
    (failed_runs, "Runs failed. The next start tries them again; no mean includes them."),
    (
        base_did_not_learn,
        "The base itself did not learn in some runs: the set-up may be to blame for an arm that"
        " fails no more often.",
    ),
    (
        arms_not_named,
        "p (Holm) counts all arms that have been measured here, also those that the command does"
        " not name.",
    ),
    (rows_left_out, "Rows are left out."),
    (joined_machines, "Runs of several machines are joined: their runs of the base agree."),
    (
        lambda section: section.facts.above_trigrams and [beside_n_grams(section)],
        "The base has not learned: it stays above the trigrams of the text that it sees. So this is"
        " a screening, and uses the words of a screening.",
    ),
    (
        lambda section: section.facts.marked and [beside_n_grams(section)],
        "The base has learned little: it beats trigrams, but not the best n-grams of its text.",
    ),
    (
        replicate_differs,
        "Base again differs from the base. Chance does this in one sweep of twenty; or the set-up"
        " has a fault.",
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
)


def caveats(section):
    """[(sentence, [arms, runs or keys that it concerns])] of the conditions that hold."""
    found = []
    for condition, sentence in CAVEATS:
        result = condition(section)
        if result:
            found.append((sentence, result if isinstance(result, list) else []))
    return found
