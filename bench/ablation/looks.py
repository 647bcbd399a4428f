"""
When a sweep's verdicts are read, and what a look can find.

A look is a number of seeds at which verdicts are read. The looks planned before the first report
share 90 % of the error equally. More seeds than planned after a report, or another margin of ties,
are an unplanned look: the j-th of them gets 10 % x 2^-j of the error. The shares sum to at most all
of it, so by the union bound the error holds, whichever arms are continued. Arms that a report ever
listed stay in the family. A report between two looks decides nothing new, and an arm takes each
look once: with the runs of the arm and of the base that were there at the first report after it was
reached. OUT/history.jsonl stores the looks: each report adds a line to it.
"""

import json
import math
from dataclasses import dataclass, field
from datetime import datetime
from numbers import Real

import numpy as np
from scipy import special

from bench.ablation import rows
from bench.ablation.contrasts import ALPHA
from common import files
from training.run_folder import read_rows

POWER = 0.8  # the chance of what a sweep is said to find
MOST_SEEDS = 300  # an estimate above this is too uncertain to be useful
PLANNED = 0.9  # share of the error for the planned looks
CONTENT = ("margin", "arms", "runs", "looks")  # a report of the same adds no line
LINE = {"when": str, "margin": Real | None, "arms": list, "runs": dict, "looks": list}


@dataclass(frozen=True)
class Look:
    """One look: its share of the error, for differences and for ties, and its runs."""

    number: int | None  # of seeds; None: of all runs
    share: float
    tie_share: float
    seeds: dict  # arm -> [seed]; without the arms that have not reached the look
    taken: dict = field(default_factory=dict)  # arm -> {arm: [seed]}: of a report before

    def seeds_for(self, arm):
        """{arm: [seed]} of the comparison of an arm."""
        return self.seeds | self.taken.get(arm, {})


def share_of(planned=None, unplanned=None):
    """The share of the error of one of the `planned` looks, or of the unplanned look with this
    number, from 1."""
    return PLANNED / planned if planned else (1 - PLANNED) / 2**unplanned


def control_runs(arms, seeds, stated=None):
    """(runs of the base, runs of its replicate) beside `seeds` runs of each of `arms` arms: both
    together `stated`, or sqrt(arms) * seeds, but at least seeds + 2."""
    both = max(stated or math.ceil(math.sqrt(arms) * seeds), seeds + 2)
    return math.ceil(both / 2), both // 2


def planned_runs(plan, seeds):
    """{arm: runs} that a look at `seeds` seeds takes."""
    base, *control = rows.control_group(plan)
    arms = rows.judged_arms(plan)
    if plan["screening"]:
        others = [arm for arm, facts in plan["arms"].items() if not facts["curve"]]
        return dict.fromkeys(others, seeds)
    of_base, of_replicate = control_runs(max(len(arms), 1), seeds, plan["controls"])
    counts = dict.fromkeys([*arms, *rows.replicates(plan)], seeds)
    counts[base] = of_base if control else of_base + of_replicate
    return counts | dict.fromkeys(control, of_replicate)


def tried_seeds(runs):
    """{arm: [seed]} of the reported runs that ended, including failed ones."""
    reported = runs[runs.current & (runs.purpose == "report")]
    return {arm: sorted(set(seeds.tolist())) for arm, seeds in reported.groupby("arm").seed}


def looks_of(plan, tried, history, margin):
    """The [Look] of a sweep, the last one at all runs and with no share unless it was declared.
    tried: {arm: [seed]}; history: the lines of history.jsonl."""
    history = [line for line in history if runs_of_arms(plan, line["runs"]) > 1]
    declared = []  # (margin, number of seeds), each once, in the order of the reports
    for line in history:
        declared += [(line["margin"], look) for look in line["looks"]]
    declared += [(margin, look) for look in declared_looks(plan, tried, history)]
    declared = list(dict.fromkeys(declared))
    planned = len(history[0]["looks"] if history else plan["looks"])
    shares = [share_of(planned) for _ in range(planned)]
    shares += [share_of(unplanned=j) for j in range(1, len(declared) - planned + 1)]

    looks = []
    for look in sorted({look for _, look in declared}):
        share_at = {}  # {margin: share of the error} of this look
        for share, (its_margin, seeds) in zip(shares, declared, strict=False):
            if seeds == look:
                share_at[its_margin] = share
        looks.append(
            Look(
                number=look,
                share=next(iter(share_at.values()), 0.0),
                tie_share=share_at.get(margin, 0.0),
                seeds=seeds_at(plan, tried, look, bool(history)),
                taken=taken_before(history, look),
            )
        )
    all_runs = Look(number=None, share=0.0, tie_share=0.0, seeds=tried)
    return [*looks, all_runs]


def taken_before(history, look):
    """{arm: {arm: [seed]}} of the comparisons that took a look in a report before: the first report
    after the look counts."""
    taken = {}
    for line in history:
        for arm, counts in line.get("taken", {}).get(str(look), {}).items():
            if arm not in taken:
                taken[arm] = {a: line["runs"].get(a, [])[:n] for a, n in counts.items()}
    return taken


def runs_of_arms(plan, tried):
    """The most runs that an arm has, not counting the base."""
    control = rows.control_group(plan)
    return max((len(seeds) for arm, seeds in tried.items() if arm not in control), default=0)


def declared_looks(plan, tried, history=()):
    """The looks of a plan, and a further one at all seeds where there are more than planned."""
    most = runs_of_arms(plan, tried)
    further = most > plan["looks"][-1] and (history or len(plan["looks"]) > 1)
    return [*plan["looks"], most] if further else plan["looks"]


def seeds_at(plan, tried, look, reported):
    """{arm: [seed]} that a look takes, without the arms that have not reached it. Where the only
    look has not been taken yet, it takes all runs that there are."""
    last = plan["looks"][-1]
    needed = planned_runs(plan, look)
    if look > last:  # nobody planned the runs of the base for this look
        planned = planned_runs(plan, last)
        needed |= {arm: planned[arm] for arm in rows.control_group(plan)}
    takes_all = len(plan["looks"]) == 1 and not reported
    seeds_of = {}
    for arm, seeds in tried.items():
        if len(seeds) >= needed.get(arm, math.inf):
            extends = takes_all or look > last and needed[arm] != look
            seeds_of[arm] = seeds if extends else seeds[: needed[arm]]
    return seeds_of


def read(folders, plan):
    """The lines of some folders' histories, the oldest first, about this base as it is now."""
    lines = []
    for folder in folders:
        lines += read_rows(folder / "history.jsonl", is_line)
    unique = {json.dumps(line, sort_keys=True): line for line in lines}
    own = []
    ids = plan.get("ids", {})
    for line in unique.values():
        code, config = line.get("identity") or (None, None)
        if [ids.get((plan["base"], code), code), config] == identity(plan):
            own.append(line)
    return sorted(own, key=lambda line: line["when"])


def is_line(line):
    """Whether a line of history.jsonl has the keys that looks_of needs."""
    return rows.fits(line, LINE) and {type(look) for look in line["looks"]} == {int}


def record(folders, plan, runs, verdicts, facts, history):
    """Add a line about a report to the history of each folder, unless its last line is the same.
    verdicts, facts: the result of `judge`; history: the lines that it knew."""
    tried = tried_seeds(runs)
    margin = facts.margin
    content = {
        "when": datetime.now().astimezone().isoformat(timespec="seconds"),
        "margin": None if math.isnan(margin) else margin,
        "arms": list(verdicts.name[verdicts.kind != "replicate"]),
        "runs": tried,
        "looks": declared_looks(plan, tried, history),
        "taken": {str(look.number): counts_at(plan, look) for look in facts.looks[:-1]},
        "identity": identity(plan),
    }
    for folder in folders:
        before = read_rows(folder / "history.jsonl", is_line)
        if not before or any(before[-1][key] != content[key] for key in CONTENT):
            files.append(folder / "history.jsonl", content)


def counts_at(plan, look):
    """{arm: {arm: runs}} of the comparisons that a look takes: the runs of the arm, and the runs of
    the arms that it is compared with."""
    group = rows.control_group(plan)
    counts = {}
    for arm in rows.judged_arms(plan):
        compared = [arm, plan["arms"][arm]["against"], *group]
        if all(each in look.seeds for each in compared):
            seeds = look.seeds_for(arm)
            counts[arm] = {each: len(seeds[each]) for each in compared}
    return counts


def identity(plan, arm=None):
    """The ids of the code and the configuration of an arm, by default the base."""
    return hashes(plan["arms"][arm or plan["base"]])


def hashes(facts):
    """[id of the code, id of the configuration] of an arm of a plan, or of a row."""
    return [facts.get("code_hash"), facts.get("config_hash")]


# ---------------------------------------------------------------- what a look can find


def welch(sd, n, control_sd, control_n):
    """(standard error, degrees of freedom) of Welch's test for these groups; arrays or numbers."""
    arm = sd**2 / n
    control = control_sd**2 / control_n
    df = (arm + control) ** 2 / (arm**2 / (n - 1) + control**2 / (control_n - 1))
    return np.sqrt(arm + control), df


def to_differ(effect, se, df, level):
    """The chance that a two-sided t test at this level finds an effect, on its own side; arrays or
    numbers."""
    critical = special.stdtrit(df, 1 - level / 2)
    return 1 - special.nctdtr(df, np.abs(effect) / se, critical)


def to_tie(effect, se, df, margin, level):
    """The chance that two one-sided tests at this level show that an effect is below the margin."""
    critical = special.stdtrit(df, 1 - level)
    above = (margin - effect) / se - critical
    below = (margin + effect) / se - critical
    return np.maximum(special.stdtr(df, above) + special.stdtr(df, below) - 1, 0)


def least_runs(family):
    """The runs that an arm needs for a verdict in a family. With fewer, arms that spread twice as
    much as the base are called better or worse in more than 6 sweeps of 100 (simulation.md)."""
    if family <= 6:
        return 5
    if family <= 25:
        return 8
    return 12


def smallest_visible(se, df, level):
    """The smallest effect that 80 of 100 sweeps find at this level; nan if none."""
    effects = np.geomspace(0.05, 200, 4000) * se
    return first(effects, to_differ(effects, se, df, level) >= POWER)


def smallest_tie(se, df, level):
    """The smallest margin within which 80 of 100 sweeps show a tie of two arms that are alike."""
    margins = np.geomspace(0.05, 200, 4000) * se
    return first(margins, to_tie(0, se, df, margins, level) >= POWER)


def more_seeds(row, looks, planned, margin, family):
    """About how many more seeds decide a comparison, with 80 % power at the difference seen: to
    differ or to tie, at the level of the next look; inf if over MOST_SEEDS. At least as many as
    lead to the next look. The control group grows with the arm."""
    n = row["n"]
    numbers = np.arange(n + 1, MOST_SEEDS + 1)
    ahead = [look for look in planned if look > n]
    # An unplanned look has a share of 5 % or less, a planned one (of up to 11) of more than 7.5 %.
    unplanned = sum(0 < look.share < 1.5 * share_of(unplanned=1) for look in looks)
    if ahead:
        share = share_of(len(planned))
    else:
        share = share_of(unplanned=unplanned + 1)
    se = row["se"] * np.sqrt(n / numbers)
    df = row["n_control"] + numbers - 2
    level = ALPHA * share / family
    decides = to_differ(row["difference"], se, df, level) >= POWER
    if margin > 0:
        decides |= to_tie(row["difference"], se, df, margin, level) >= POWER
    enough = first(numbers, decides)
    if math.isnan(enough):
        return math.inf
    return max(enough, *ahead[:1], least_runs(family)) - n


def first(values, holds):
    """The first value where a condition holds, or nan."""
    return float(values[np.argmax(holds)]) if np.any(holds) else math.nan
