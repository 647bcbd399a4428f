"""The caveats of a report: a table of conditions, each with the sentence to print if it holds."""

import numpy as np

from bench.ablation.losses import TUNED_BY
from bench.ablation.sentences import arms_of
from bench.ablation.stats import counted, listed

DIFFERENT_BATCHES = {"batch_size", "block_size", "gradient_accumulation_steps"}
LOUD = 3  # times the margin: a smallest visible effect above this is too coarse for a tie
FAR = 3  # times the sd of the base's runs


class Case:
    """The facts about a section that the conditions and the sentences use."""

    def __init__(self, section):
        self.section, self.sweep, self.runs = section, section.sweep, section.runs
        self.arms = {arm: section.sweep["arms"][arm] for arm in arms_of(section)}
        self.floor, self.visible = section.main.floor, section.main.visible
        self.margin = section.main.margin or 0
        self.seeds = self.sweep["seeds"]
        self.stale = counted(len(self.runs.stale), "stale row")


# --- conditions: each returns the value of {found} in its sentence, or a falsy value


def killed_runs(case):
    seeds = {}
    for row in case.runs.failed:
        reason = row.get("reason") or "no reason given"
        seeds.setdefault((row["arm"], reason), []).append(str(row["seed"]))
    return [f"{arm} seed {' '.join(group)} ({reason})" for (arm, reason), group in seeds.items()]


def coarse(case):
    return not case.sweep["screening"] and case.visible and case.visible > LOUD * case.margin > 0


def overfitted_arms(case):
    found = []
    for arm in case.arms:
        rows = case.runs.done.get(arm, {}).values()
        if not rows:
            continue
        gap = np.mean([row["final_val_loss"] - row["best_val_loss"] for row in rows])
        place = np.mean([row["best_step"] / (row["curve"][-1][0] or 1) for row in rows])
        if gap > 0.01 and place < 0.8:
            found.append(f"{arm} (at {place:.0%} of its steps; its final loss is {gap:.3f} higher)")
    return found


def epochs(case):
    """How often the base reads its training text, if that is more than once."""
    values = case.sweep["base_values"]
    steps = values["max_iters"] * (values.get("gradient_accumulation_steps") or 1)
    read = steps * values.get("batch_size", 0) * values["block_size"]
    times = read / case.sweep["data"]["train_tokens"]
    return f"{times:.3g}" if times > 1.05 else None


def learning_rates_at_the_edge(case):
    found = []
    for arm, rate in case.sweep["chosen_lr"].items():
        grid = case.sweep.get("lr_grids", {}).get(arm, case.sweep["lr_grid"])
        again = arm == "base again"
        if len(grid) > 1 and rate in (min(grid), max(grid)) and not again:
            found.append(f"{arm} ({rate:g} x)")
    return found


def rates_that_did_not_hold(case):
    """Arms that lose more on new seeds than on those that chose their rate, on the same text."""
    found, column = [], TUNED_BY[case.sweep["metric"]]
    for arm, losses in case.section.tuning().items():
        then = np.mean(losses.get(case.sweep["chosen_lr"].get(arm, 1), np.nan))
        rows = case.runs.done.get(arm, {}).values()
        now = np.mean([row[column] for row in rows] or np.nan)
        if now - then > FAR * case.section.main.base_sd:
            found.append(f"{arm} ({then:.3f} when its rate was chosen, {now:.3f} reported)")
    return found


def unmatched_arms(case):
    if case.sweep["match"] == "none":
        return []
    apart = {
        arm: facts["match"]["residual_percent"]
        for arm, facts in case.arms.items()
        if facts.get("match")
    }
    return [f"{arm} ({percent:+.2f} %)" for arm, percent in apart.items() if abs(percent) > 0.5]


def several_machines(case):
    rows = (row for done in case.runs.done.values() for row in done.values())
    machines = {str(row["hardware"]) for row in rows}
    return sorted(machines) if len(machines) > 1 else []


def timed_on_a_busy_machine(case):
    costs = case.section.costs.values()
    return sorted({cost["disturbed"] for cost in costs if cost.get("disturbed")})


def other_batches(case):
    return [arm for arm, facts in case.arms.items() if DIFFERENT_BATCHES & facts["changes"].keys()]


# --- the table, the most important first


CAVEATS = (
    (
        killed_runs,
        "Killed or crashed runs, which the next start tries again: {found}. No mean includes them.",
    ),
    (
        lambda case: sorted({f"{row['arm']} seed {row['seed']}" for row in case.runs.stale}),
        "{case.stale} left out: {found}. Other code, another configuration or another learning"
        " rate made them.",
    ),
    (
        lambda case: case.floor is None or not case.floor.n,
        "The sweep has no second copy of the base, so nothing checks the set-up.",
    ),
    (
        lambda case: case.floor and (case.floor.low > 0 or case.floor.high < 0),
        "The base differs from its second copy by {case.floor.mean:+.4f}. Chance does this in one"
        " sweep of twenty; suspect a fault in the set-up.",
    ),
    (
        coarse,
        "{case.seeds} seeds with this noise find effects of {case.visible:.3f} nats or more; the"
        " margin of a tie is {case.margin:.4f}. Effects between the two stay undecided.",
    ),
    (
        overfitted_arms,
        "These arms overfit: {found}. The final loss ranks arms by how much they overfit; compare"
        " the best loss, too.",
    ),
    (epochs, "The base reads its training text {found} times; fresh text could change the result."),
    (
        lambda case: len(case.sweep["lr_grid"]) < 2,
        "Every arm trains at the base's learning rate, which favours the arms that it suits.",
    ),
    (
        learning_rates_at_the_edge,
        "The best learning rate is at the edge of the grid; a better one may lie outside: {found}.",
    ),
    (
        rates_that_did_not_hold,
        "The reported runs of these arms are worse than those that chose their rate: {found}. More"
        " seeds to choose by (tune_seeds) find a safer rate.",
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
        lambda case: [arm for arm in case.section.stale_costs if arm in case.arms],
        "The costs of these arms were measured with other code, so the report omits them: {found}.",
    ),
    (
        timed_on_a_busy_machine,
        "The times could not be measured well, so there is no worth in time and no verdict at equal"
        " time: {found}.",
    ),
    (other_batches, "These arms may see another number of tokens: {found}."),
)


def caveats(section):
    """[sentence] of the conditions that hold for a section, the most important first."""
    case = Case(section)
    sentences = []
    for condition, sentence in CAVEATS:
        found = condition(case)
        if found:
            words = listed(found) if isinstance(found, list) else found
            sentences.append(sentence.format(case=case, found=words))
    return sentences
