"""Read sweeps: join the rows of folders that belong to one sweep, and analyse them."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from bench.ablation import history, scale, stats
from bench.ablation.effects import Effects, analyse, cells_of
from bench.ablation.losses import TUNED_BY, WRONG, Runs, sort_rows
from bench.ablation.scale import Scale
from common import files
from common.errors import UserError
from training.run_folder import read_rows

# Folders with the same values of these keys are one sweep if their common arms are the same.
SHARED = ("code_hash", "base", "base_values", "metric", "max_iters", "data")


@dataclass
class Section:
    """One sweep, from one folder or several."""

    sweep: dict
    runs: Runs
    machines: dict  # name -> {arm: row of costs.jsonl}, of the sweep's code; see by_machine
    stale_costs: list  # arms whose costs were measured with other code alone
    analyses: dict  # measure -> Analysis, the sweep's metric first
    folders: list
    records: list = field(default_factory=list)  # lines of their histories, the oldest first
    effects: Effects | None = None  # of a factorial, by the sweep's metric
    single: "Section | None" = None  # beside a factorial: one part at a time on the same base
    scale: Scale | None = None  # of the smallest size of a scale: all sizes together
    label: str = ""  # on a page of several experiments
    names: dict = field(default_factory=dict)  # arm -> its name in figures, if that is another

    @property
    def machine(self):
        """The name of the machine whose times the verdicts use."""
        return next(iter(self.machines), "")

    @property
    def costs(self):
        """{arm: row of costs.jsonl} of this machine."""
        return self.machines.get(self.machine, {})

    @property
    def main(self):
        return self.analyses[self.sweep["metric"]]

    def named(self, arm):
        return self.names.get(arm, arm)

    def tuning(self):
        """{arm: {multiple of the base's rate: [loss of each run]}}, on the half of the text that is
        not reported; nan where a run diverged."""
        found, column = {}, TUNED_BY[self.sweep["metric"]]
        for row in self.runs.tuning:
            losses = found.setdefault(row["arm"], {}).setdefault(row["lr"], [])
            losses.append(math.nan if row["status"] == "diverged" else row[column])
        return found

    def record(self):
        """Add this look at the data to the history of each folder."""
        tried = stats.tried_seeds(self.runs)
        history.record(self.folders, self.sweep, tried, self.main, self.records)

    @property
    def verdicts(self):
        return {verdict.arm: verdict for verdict in self.main.verdicts if not verdict.interaction}


@dataclass
class Group:
    """The content of the folders of one sweep."""

    sweep: dict
    rows: list = field(default_factory=list)
    costs: list = field(default_factory=list)
    folders: list = field(default_factory=list)

    def belongs(self, sweep):
        """Whether another folder's sweep is the same: same code, base, data and common arms."""
        if any(self.sweep.get(key) != sweep.get(key) for key in SHARED):
            return False
        arms, others = self.sweep["arms"], sweep["arms"]
        return all(
            arms[arm].get(key) == others[arm].get(key)
            for arm in arms.keys() & others.keys()
            for key in ("code_hash", "config_hash", "against", "cell")
        )

    def add(self, folder, sweep):
        """Add the content of a folder."""
        if self.folders:
            self.sweep["arms"] |= sweep["arms"]
            self.sweep["chosen_lr"] = sweep["chosen_lr"] | self.sweep["chosen_lr"]
            self.sweep["looks"] = max(self.sweep["looks"], sweep["looks"], key=len)
        self.rows += read_rows(folder / "rows.jsonl")
        self.costs += read_rows(folder / "costs.jsonl")
        self.folders.append(folder)

    def section(self):
        """The analysed Section."""
        sweep, rows = self.sweep, self.rows
        runs, machines = sort_rows(sweep, rows), by_machine(sweep, self.costs)
        priced = {arm for costs in machines.values() for arm in costs}
        stale = list(dict.fromkeys(row["arm"] for row in self.costs if row["arm"] not in priced))
        records = history.read(self.folders, sweep)
        section = Section(sweep, runs, machines, stale, {}, self.folders, records)
        measures = dict.fromkeys([sweep["metric"], *stats.MEASURES])
        if not has_answers(runs):
            measures = [measure for measure in measures if measure not in WRONG]
        for measure in measures:
            analysis = stats.analyse(sweep, runs, section.costs, measure, records)
            section.analyses[measure] = analysis
            if cells_of(sweep) and measure != "equal_time":
                effects = analyse(sweep, runs, analysis, section.costs)
                section.effects = section.effects or effects
        return section


def has_answers(runs):
    """Whether every run that ended has shares of wrong answers, as runs of pairs and tasks do."""
    groups = [*runs.done.values(), *runs.curve.values()]
    rows = [row for group in groups for row in group.values()]
    return bool(rows) and all(column in row for row in rows for column in WRONG)


def by_machine(sweep, rows):
    """{name of a machine: {arm: row}} of the rows of costs.jsonl that the sweep's code made. The
    machine that timed the most arms comes first."""
    machines = {}
    for row in rows:
        facts = sweep["arms"].get(row["arm"], {})
        if row["code_hash"] == facts.get("code_hash", sweep.get("code_hash")):
            name = row.get("hardware", "a machine without a name")
            if row.get("device") == "cpu":
                name += f", {stats.counted(row['threads'], 'thread')}"
            machines.setdefault(name, {})[row["arm"]] = row

    def timed(name):
        return sum(bool(row.get("step_ratio")) for row in machines[name].values())

    return {name: machines[name] for name in sorted(machines, key=timed, reverse=True)}


def read_sweep(folder):
    """The content of a folder's sweep.json. Raises UserError if it holds none."""
    path, fix = folder / "sweep.json", "name a folder that bench/ablate.py wrote"
    sweep = files.read_json(path, fix) if path.exists() else {}
    try:
        sweep["arms"][sweep["base"]]
    except (KeyError, TypeError):
        raise UserError("no sweep here", path, fix) from None
    return sweep


def same_base(section, other):
    """Whether two sections have a base of the same configuration and the same metric."""
    mine, theirs = (one.sweep["arms"][one.sweep["base"]] for one in (section, other))
    same_metric = section.sweep["metric"] == other.sweep["metric"]
    return same_metric and mine.get("config_hash") == theirs.get("config_hash")


def gather(folders):
    """[Section] of the sweeps in `folders`, where a scale's stands for those of its sizes."""
    groups, sizes = [], {Path(folder): scale.folders_of(folder) for folder in folders}
    for folder in [each for given, found in sizes.items() for each in found or [given]]:
        sweep = read_sweep(folder)
        group = next((group for group in groups if group.belongs(sweep)), None)
        if group is None:
            group = Group(sweep)
            groups.append(group)
        group.add(folder, sweep)
    sections = [group.section() for group in groups]
    if len(sections) > 1:
        stats.correct_page(
            [each for section in sections for each in (section.main, section.effects) if each]
        )
    for section in sections:
        others = [other for other in sections if section.effects and same_base(section, other)]
        section.single = next((other for other in others if not other.effects), None)
    for found in sizes.values():
        of_scale = [section for section in sections if set(section.folders) & set(found)]
        if len(of_scale) >= scale.LEAST_SIZES:
            of_scale[0].scale = scale.analyse(of_scale)
    return sections
