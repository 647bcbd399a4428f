"""The rows of a sweep: which of them count, and their losses by one measure."""

import math
from dataclasses import dataclass, field

import numpy as np

from bench.ablation.history import control_group
from common.errors import UserError

# The columns of a row with a metric on the half of the text that chooses rates, and on the other.
TUNED_BY = {"final_val_loss": "final_tune", "best_val_loss": "best_tune"}
REPORTED = {"final_val_loss": "final_report", "best_val_loss": "best_report"}
WRONG = ("wrong_answers", "wrong_tokens")  # measures, and columns of the rows that have answers
IDENTITY = ("arm", "seed", "lr", "purpose", "code_hash", "config_hash")


@dataclass
class Runs:
    """The rows of a sweep, sorted into those that count and those that the report only mentions."""

    done: dict  # arm -> {seed: row}, made with the sweep's code, configuration and learning rate
    diverged: dict = field(default_factory=dict)  # arm -> {seed: row}: results, ranked last
    failed: list = field(default_factory=list)  # killed by the machine; the next start retries them
    stale: list = field(default_factory=list)  # other code, configuration or learning rate
    tuning: list = field(default_factory=list)
    curve: dict = field(default_factory=dict)  # multiple of the tokens -> {seed: row} of the base

    def ended(self, arm):
        """{seed: row} of the arm's runs that have a result, in the order of their seeds."""
        return dict(sorted((self.done.get(arm, {}) | self.diverged.get(arm, {})).items()))


# --- rows


def sort_rows(sweep, rows):
    """The Runs of a sweep. Of several rows of one run, the last counts, but a failure of the
    machine replaces no result, and no result one that diverged. Raises UserError for rows of an
    older form."""
    last = {}
    for row in sorted(rows, key=lambda row: ("failed", "done", "diverged").index(row["status"])):
        last[tuple(row[key] for key in IDENTITY)] = row

    arms = [arm for arm, facts in sweep["arms"].items() if not facts.get("curve")]
    runs = Runs({arm: {} for arm in arms}, {arm: {} for arm in arms})
    for _, row in sorted(last.items()):
        if is_stale(sweep, row):
            runs.stale.append(row)
        elif row["status"] == "failed":
            runs.failed.append(row)
        elif row["purpose"] == "tune":
            runs.tuning.append(row)
        elif row["purpose"] == "curve":
            multiple = sweep["arms"][row["arm"]]["curve"]
            runs.curve.setdefault(multiple, {})[row["seed"]] = row
        else:
            group = runs.diverged if has_diverged(row) else runs.done
            group[row["arm"]][row["seed"]] = row
    return runs


def has_diverged(row):
    """Whether a run that ended has a loss that is not finite, or above that of its first step."""
    if row["status"] == "diverged":
        return True
    for column in REPORTED.values():
        if column not in row:
            what, where = f"a row without {column}: an older version made it", f"{row['arm']} seed"
            raise UserError(what, f"{where} {row['seed']}", "run the sweep again")
    return not np.isfinite(row["final_report"] if row["final_report"] is not None else math.nan)


def is_stale(sweep, row):
    """Whether other code, another configuration or another learning rate made this row."""
    planned = sweep["arms"].get(row["arm"])
    if planned is None:
        return True
    for key in ("code_hash", "config_hash"):
        if row[key] != planned.get(key, sweep.get(key, row[key])):
            return True
    return row["purpose"] == "report" and row["lr"] != sweep["chosen_lr"].get(row["arm"], 1)


def tried_seeds(runs):
    """arm -> [seed] of its reported runs that ended, including failed ones."""
    tried = {arm: set(runs.ended(arm)) for arm in runs.done}
    for row in runs.failed:
        if row["purpose"] == "report":
            tried[row["arm"]].add(row["seed"])
    return {arm: sorted(seeds) for arm, seeds in tried.items()}


# --- losses


class Losses:
    """The losses of a sweep's runs by one measure; of WRONG the shares, in place of losses."""

    def __init__(self, sweep, runs, measure, costs):
        self.runs, self.measure, self.costs = runs, measure, costs
        self.base = sweep["base"]
        self.column = measure if measure in WRONG else REPORTED.get(measure, "final_report")
        self.control_arms = control_group(sweep)

    def rows(self, arms):
        """The rows of all runs of some arms that did not diverge."""
        return [row for arm in arms for row in self.runs.done.get(arm, {}).values()]

    def control(self):
        """The losses of the base's runs and of its second copy's."""
        return np.concatenate([self.of(arm) for arm in self.control_arms])

    def curve(self):
        """{multiple of the tokens: losses of the base's runs}."""
        return {
            multiple: [row[self.column] for row in rows.values() if not has_diverged(row)]
            for multiple, rows in self.runs.curve.items()
        }

    def of(self, arm, seeds=None, step=None):
        """The losses [n] of an arm's runs, inf where one diverged; at a step, from their curves."""
        found = []
        for seed, row in self.runs.ended(arm).items():
            if seeds is not None and seed not in seeds:
                continue
            if seed in self.runs.diverged.get(arm, ()):
                found.append(math.inf)
            elif step is None:
                found.append(row[self.column])
            else:
                points = np.array(row["curve"], float)  # [points, 4]
                found.append(np.interp(step, points[:, 0], points[:, 3]))
        return np.array(found, float)

    def groups(self, groups, look=None):
        """The losses of groups of arms, at a look or of all runs. A group is empty where one of its
        arms has not reached the look."""
        if self.measure == "equal_time":
            return self.groups_at_equal_time(groups, look)
        return [
            np.concatenate([self.of(arm, look and look.seeds[arm]) for arm in arms])
            if look is None or all(arm in look.seeds for arm in arms)
            else np.empty(0)
            for arms in groups
        ]

    def groups_at_equal_time(self, groups, look):
        """The losses of two groups at the time when the first side ends, interpolated on each run's
        curve. A time is a number of steps times the ratio of a step to the base's. Empty where a
        side was not timed, and for more than two groups."""
        sides = [arms[0] for arms in groups]
        ratios = [self.step_ratio(arm) for arm in sides]
        if len(groups) > 2 or not all(ratios):
            return [np.empty(0)] * len(groups)

        curves = [[row["curve"] for row in self.rows([arm]) if row["curve"]] for arm in sides]
        steps = [found[0][-1][0] if found else math.inf for found in curves]
        end = min(last * ratio[0] for last, ratio in zip(steps, ratios, strict=True))
        return [
            np.concatenate(
                [self.of(arm, look and look.seeds.get(arm, ()), end / ratio[0]) for arm in arms]
            )
            for arms, ratio in zip(groups, ratios, strict=True)
        ]

    def step_ratio(self, arm):
        """(ratio, low, high) of an arm's time per step to the base's; None if it is not known."""
        if arm == self.base:
            return 1.0, 1.0, 1.0
        found = (self.costs.get(arm) or {}).get("step_ratio")
        return found and (found["ratio"], found["low"], found["high"])
