"""The caveats of a report: fixed sentences, each with the condition under which it is printed. A
condition returns whether it holds, or a list of the arms, runs or keys that it concerns."""

import math

from bench.ablation.rows import control_losses
from bench.settings.plan import tokens_of


def failed_runs(section):
    runs = section.runs
    failed = runs[(runs["status"] == "failed") & runs["current"]]
    groups = failed.groupby(["arm", "reason"], sort=False)
    return [f"{arm}: {reason} ({len(group)})" for (arm, reason), group in groups]


def stale_rows(section):
    stale = section.runs.loc[~section.runs["current"], "arm"].value_counts(sort=False)
    return [f"{arm} ({count})" for arm, count in stale.items()]


def joined_machines(section):
    losses = control_losses(section.runs)
    each = [f"{name}: {len(runs)} of the base, {runs.mean():.4f}" for name, runs in losses.items()]
    return each if len(each) > 1 else []


def replicate_differs(section):
    low = section.replicate["low"]
    high = section.replicate["high"]
    return bool(((low > 0) | (high < 0)).any())


def has_not_learned(section):
    return [beside_n_grams(section)] if section.facts.above_trigrams else []


def has_learned_little(section):
    return [beside_n_grams(section)] if section.facts.marked else []


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
        stale_rows,
        "Rows of a machine without runs of the base, or whose base differs (Welch's test, 5 %), and"
        " rows of arms that the command does not name, of other code, configurations or learning"
        " rates, or of more seeds than were planned, are left out.",
    ),
    (joined_machines, "Runs of several machines are joined: their runs of the base agree."),
    (
        has_not_learned,
        "The base has not learned: it stays above the trigrams of the text that it sees. So this is"
        " a screening, and uses the words of a screening.",
    ),
    (
        has_learned_little,
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
