"""
When a sweep's verdicts were read: OUT/history.jsonl, to which each report adds a line.

A look is a number of seeds at which verdicts are read. The looks planned before the first report
share 90 % of the error among them. The j-th look that nobody planned gets 10 % x 2^-j of it: more
seeds than planned, another metric, or for ties another margin, after a report. Arms that a report
ever listed stay in the family. A report between two looks decides nothing new.
"""

import json
import math
from dataclasses import dataclass
from datetime import datetime

from bench.ablation.significance import share_of
from common import files
from training.run_folder import read_rows

CONTENT = ("metric", "margin", "arms", "runs", "looks")  # a report of the same adds no line


@dataclass
class Look:
    """One look: its share of the error, for differences and for ties, and its runs."""

    share: float
    tie_share: float
    seeds: dict  # arm -> [seed]; without the arms that have not reached the look


# --- the plan


def control_runs(arms, seeds):
    """(runs of the base, runs of its second copy) beside `seeds` runs of each of `arms` arms."""
    total = max(math.ceil(math.sqrt(arms) * seeds), seeds + 2)
    return math.ceil(total / 2), total // 2


def control_group(sweep):
    """The base and its second copy, if the sweep has one."""
    return [
        sweep["base"],
        *(
            arm
            for arm, facts in sweep["arms"].items()
            if (facts.get("again") or facts.get("replicate"))
        ),
    ]


def judged_arms(sweep):
    """The arms that are compared with another: no control group, curve, or cell of a factorial."""
    control, arms = control_group(sweep), sweep["arms"].items()
    apart = [arm for arm, facts in arms if facts.get("curve") or facts.get("cell")]
    return [arm for arm, _ in arms if arm not in [*control, *apart]]


def planned_runs(sweep, seeds):
    """{arm: runs} that a look at `seeds` seeds takes."""
    control, arms = control_group(sweep), judged_arms(sweep)
    if sweep.get("screening") or any(facts.get("cell") for facts in sweep["arms"].values()):
        others = [arm for arm, facts in sweep["arms"].items() if not facts.get("curve")]
        return dict.fromkeys(others, seeds)
    counts = control_runs(max(len(arms), 1), seeds)
    if len(control) == 1:
        counts = [sum(counts)]
    return dict.fromkeys(arms, seeds) | dict(zip(control, counts, strict=True))


def looks_of(sweep, tried, records, metric, margin):
    """The [Look] of a sweep, the last one at all data and with no share unless it was declared.
    tried: {arm: [seed]} of the runs that ended; records: the lines of history.jsonl."""
    records = [  # of reports that could compare anything: two runs of an arm
        record
        for record in records
        if any(len(record["runs"].get(arm, ())) > 1 for arm in record["arms"])
    ]
    declared = [
        (each["metric"], each["margin"], look) for each in records for look in each["looks"]
    ]
    declared += [(metric, margin, look) for look in declared_looks(sweep, tried, records)]
    declared = list(dict.fromkeys(declared))
    planned = len(records[0]["looks"] if records else sweep["looks"])

    def share(matches):
        place = next((place for place, each in enumerate(declared) if matches(each)), None)
        if place is None:
            return 0.0
        return share_of(planned) if place < planned else share_of(unplanned=place + 1 - planned)

    found = []
    for look in sorted({look for _, _, look in declared}):
        of_metric = share(lambda each, look=look: (each[0], each[2]) == (metric, look))
        of_margin = share(lambda each, look=look: each == (metric, margin, look))
        found.append(Look(of_metric, of_margin, seeds_at(sweep, tried, look, bool(records))))
    return [*found, Look(0.0, 0.0, tried)]


def declared_looks(sweep, tried, records=()):
    """The looks of a sweep, and a further one at all seeds where there are more than planned."""
    looks = sorted(sweep["looks"])
    most = max((len(tried.get(arm, ())) for arm in judged_arms(sweep)), default=0)
    if most > looks[-1] and (records or len(looks) > 1):
        looks.append(most)
    return looks


def seeds_at(sweep, tried, look, reported):
    """{arm: [seed]} that a look takes, without the arms that have not reached it. Where the only
    look has not been taken yet, it takes all runs that there are."""
    last = sweep["looks"][-1]
    needed = planned_runs(sweep, look)
    if look > last:  # nobody planned the runs of the base for this look
        planned = planned_runs(sweep, last)
        needed |= {arm: planned[arm] for arm in control_group(sweep)}
    takes_all = len(sweep["looks"]) == 1 and not reported
    found = {}
    for arm, seeds in tried.items():
        if len(seeds) >= needed.get(arm, math.inf):
            extends = takes_all or look > last and needed[arm] != look
            found[arm] = seeds if extends else seeds[: needed[arm]]
    return found


# --- the file


def read(folders, sweep):
    """The lines of some folders' histories, the oldest first, about this base as it is now."""
    keys = {"when", *CONTENT}
    paths = [folder / "history.jsonl" for folder in folders]
    lines = [line for path in paths for line in read_rows(path, keys.issubset)]
    unique = {json.dumps(line, sort_keys=True): line for line in lines}
    found = [line for line in unique.values() if line.get("identity") == identity(sweep)]
    return sorted(found, key=lambda line: line["when"])


def record(folders, sweep, tried, analysis, records):
    """Add a line about an analysis to the history of each folder, unless its last line says the
    same. records: the lines that the analysis knew."""
    content = {
        "when": datetime.now().astimezone().isoformat(timespec="seconds"),
        "metric": sweep["metric"],
        "margin": None if math.isnan(analysis.margin) else analysis.margin,
        "arms": [verdict.name for verdict in analysis.verdicts if verdict is not analysis.floor],
        "runs": tried,
        "looks": declared_looks(sweep, tried, records),
        "folders": [folder.name for folder in folders],
        "identity": identity(sweep),
    }
    for folder in folders:
        before = read_rows(folder / "history.jsonl")
        if not before or any(before[-1].get(key) != content[key] for key in CONTENT):
            files.append(folder / "history.jsonl", content)


def identity(sweep):
    """What produced the base's runs: its code and its configuration."""
    facts = sweep["arms"][sweep["base"]]
    return [facts.get("code_hash", sweep.get("code_hash")), facts.get("config_hash")]
