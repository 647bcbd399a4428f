"""The caveats of a report: a table of conditions, each with the sentence to print if it holds."""

import numpy as np

from bench.ablation.significance import ALPHA
from bench.ablation.stats import listed
from bench.ablation.sweeps import code_of

DIFFERENT_BATCHES = {"batch_size", "block_size", "gradient_accumulation_steps"}


class Case:
    """The facts about a sweep that the conditions and the sentences use."""

    def __init__(self, sweep, runs, costs, analysis):
        self.sweep, self.runs, self.analysis = sweep, runs, analysis
        self.arms, self.base = sweep["arms"], sweep["base"]
        self.costs = {arm: costs[arm] for arm in self.arms if arm in costs}  # also of other code
        self.floor, self.visible, self.margin = analysis.floor, analysis.visible, analysis.margin
        self.compared = [verdict for verdict in analysis.verdicts if verdict.word != "noise"]
        self.n = max((verdict.n for verdict in self.compared), default=0)
        self.number_of_looks = len(sweep["looks"])
        self.looks = listed(map(str, sorted(sweep["looks"])))
        self.failed = counted(runs.failed, "failed run")
        self.stale = counted(runs.stale, "stale row")


# --- conditions: each returns the value of {found} in its sentence, or a falsy value


def failed_runs(case):
    seeds = {}
    for row in case.runs.failed:
        reason = row.get("reason") or "no reason given"
        seeds.setdefault((row["arm"], reason), []).append(str(row["seed"]))
    return [f"{arm} seed {' '.join(group)} ({reason})" for (arm, reason), group in seeds.items()]


def stale_rows(case):
    return [f"{row['arm']} seed {row['seed']}" for row in case.runs.stale]


def too_few_seeds(case):
    return case.visible and (case.n < 5 or case.visible > 3 * (case.margin or 0))


def floor_differs(case):
    return case.floor and case.floor.n and case.floor.p <= ALPHA


def wide_arms(case):
    base_sd = case.analysis.base_sd
    return [
        f"{verdict.arm} (sd {verdict.loss_sd:.4f}, base {base_sd:.4f})"
        for verdict in case.compared
        if verdict.n > 2 and verdict.loss_sd > 2 * base_sd
    ]


def overfitted_arms(case):
    found = []
    for arm, done in case.runs.done.items():
        if not done:
            continue
        gaps = [row["final_val_loss"] - row["best_val_loss"] for row in done.values()]
        places = [row["best_step"] / (row["curve"][-1][0] or 1) for row in done.values()]
        gap, place = np.mean(gaps), np.mean(places)
        if gap > 0.01 and place < 0.8:
            found.append(f"{arm} (at {place:.0%} of its steps; its final loss is {gap:.3f} higher)")
    return found


def learning_rates_at_the_edge(case):
    grid = case.sweep["lr_grid"]
    if len(grid) < 2:
        return []
    chosen = case.sweep["chosen_lr"].items()
    return [f"{arm} ({lr:g} x)" for arm, lr in chosen if lr in (min(grid), max(grid))]


def unmatched_arms(case):
    if case.sweep["match"] == "none":
        return []
    matches = {arm: facts["match"] for arm, facts in case.arms.items() if facts.get("match")}
    return [
        f"{arm} ({match['residual_percent']:+.2f} %)"
        for arm, match in matches.items()
        if abs(match["residual_percent"]) > 0.5
    ]


def several_machines(case):
    rows = (row for done in case.runs.done.values() for row in done.values())
    return more_than_one({row["hardware"] for row in rows})


def costs_of_other_code(case):
    return [
        arm for arm, cost in case.costs.items() if cost["code_hash"] != code_of(case.sweep, arm)
    ]


def costs_missing(case):
    return [arm for arm in case.arms if arm not in case.costs and case.runs.done.get(arm)]


def costs_from_several_machines(case):
    return more_than_one({cost["hardware"] for cost in case.costs.values()})


def peak_memory_is_computed(case):
    return any(cost.get("peak_memory") == "closed form" for cost in case.costs.values())


def base_timed_differently(case):
    """By how much the time per step of the base's second copy differs from the base's."""
    again = next((arm for arm, facts in case.arms.items() if facts.get("again")), None)
    times = [(case.costs.get(arm) or {}).get("milliseconds_per_step") for arm in (case.base, again)]
    if None in times:
        return None
    apart = times[1]["median"] / times[0]["median"] - 1
    return f"{apart:+.0%}" if abs(apart) > 0.01 else None


def timed_on_a_busy_machine(case):
    return [
        arm
        for arm, cost in case.costs.items()
        if cost.get("load_average", 0) > 0.5 * cost.get("threads", 1)
    ]


def other_batches(case):
    return [arm for arm, facts in case.arms.items() if DIFFERENT_BATCHES & facts["changes"].keys()]


def counted(things, word):
    return f"{len(things)} {word}{'s' if len(things) > 1 else ''}"


def more_than_one(words):
    return sorted(words) if len(words) > 1 else []


# --- the table, the most important first


CAVEATS = (
    (
        failed_runs,
        "{case.failed}: {found}. No mean includes them. If an arm fails on its"
        " bad seeds, the seeds that remain make it look better than it is.",
    ),
    (
        stale_rows,
        "{case.stale} left out: {found}. A stale row was made with other code, another"
        " configuration or another learning rate than this sweep's.",
    ),
    (lambda case: case.n == 1, "With one seed there is no interval and no verdict."),
    (
        too_few_seeds,
        "There are too few seeds: {case.n} seeds, with the spread of differences measured here,"
        " find an effect of about {case.visible:.3f} nats in 80 of 100 sweeps, and smaller effects"
        " less often.",
    ),
    (
        lambda case: case.floor is None,
        "The sweep has no second copy of the base, so nothing here shows how much the base differs"
        " from itself.",
    ),
    (
        floor_differs,
        "The base differs from its second copy by {case.floor.mean:+.4f} (p = {case.floor.p:.3f})."
        " Chance does this in one sweep of twenty; suspect a fault in the setup.",
    ),
    (wide_arms, "These arms spread over seeds more than twice as much as the base: {found}."),
    (
        overfitted_arms,
        "These arms overfit: their best loss comes long before the end: {found}. The final loss"
        " then ranks arms by how much they overfit; compare the best loss, too.",
    ),
    (
        lambda case: len(case.sweep["lr_grid"]) < 2,
        "Learning rates were not re-tuned: every arm trains at the base's learning rate, which"
        " favours the arms for which it happens to be good.",
    ),
    (
        learning_rates_at_the_edge,
        "The best learning rate is at the edge of the grid, so a better one may lie outside:"
        " {found}.",
    ),
    (
        lambda case: len(case.sweep["lr_grid"]) > 1 and not case.sweep["chosen_lr"],
        "No learning rate has been chosen yet; the rows use the base's learning rate.",
    ),
    (
        unmatched_arms,
        "These arms do not match the base in {case.sweep[match]} within 0.5 %: {found}.",
    ),
    (
        lambda case: case.sweep["match"] == "none",
        "Nothing was matched: the arms differ in parameters and in compute.",
    ),
    (several_machines, "The runs were made on different hardware: {found}."),
    (
        costs_of_other_code,
        "The costs of these arms were measured with other code than the sweep's, so the report"
        " omits them: {found}.",
    ),
    (costs_missing, "The costs of these arms were not measured: {found}."),
    (
        costs_from_several_machines,
        "The costs were measured on different hardware, so they cannot be compared: {found}.",
    ),
    (
        peak_memory_is_computed,
        "Peak memory is computed in closed form on this device, not measured.",
    ),
    (
        base_timed_differently,
        "The base and its second copy are the same model, but their times per step differ by"
        " {found}. All times here are at least as uncertain; the verdicts at equal time ignore"
        " this.",
    ),
    (
        timed_on_a_busy_machine,
        "The machine was busy while the costs were timed, so speeds and verdicts at equal time are"
        " uncertain: {found}.",
    ),
    (
        other_batches,
        "These arms may see another number of tokens: {found}.",
    ),
    (
        lambda case: case.number_of_looks > 1,
        "The sweep may stop early. It decides at {case.looks} seeds, and each p-value is divided by"
        " the share of the error that its look has.",
    ),
)


def caveats(sweep, runs, costs, analysis):
    """[sentence] of the conditions that hold for a sweep, the most important first."""
    case = Case(sweep, runs, costs, analysis)
    sentences = []
    for condition, sentence in CAVEATS:
        found = condition(case)
        if found:
            words = listed(found) if isinstance(found, list) else found
            sentences.append(sentence.format(case=case, found=words))
    return sentences
