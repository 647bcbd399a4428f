"""The plans of sweeps: sweep.json and its runs."""

import math
from numbers import Real
from pathlib import Path

from common import files
from common.errors import UserError

HASHES = ("code_hash", "config_hash")

FIX = "move it away, and bench/ablate.py writes another one: the rows beside it are kept"

# The types of the values in sweep.json, by key.
PLAN = {
    "question": str,
    "also": str,
    "base": str,
    "arms": dict,
    "chosen_lr": dict,
    "base_values": dict,
    "data": dict,
    "ngrams": dict,
    "screening": bool,
    "seeds": int,
    "lr_grid": list,
    "controls": int | None,
    "margin": Real | None,
    "margin_source": str | None,
}
ARM = {
    "code_hash": str,
    "config_hash": str,
    "changes": dict,
    "replicate": bool,
    "against": str,
    "match": dict | None,
    "curve": Real | None,
}


def plan(folder):
    """The plan of a sweep: the content of FOLDER/sweep.json, and the name of the folder. Raises
    UserError if there is none."""
    path = Path(folder) / "sweep.json"
    content = files.read_json(path, FIX if path.exists() else "name a folder of bench/ablate.py")
    if not is_plan(content):
        raise UserError("this is not the plan of a sweep", path, FIX)
    return content | {"name": Path(folder).name}


def is_plan(content):
    """Whether the content of a sweep.json has what this code reads."""
    if not has_all(content, PLAN):
        return False
    arms = content["arms"]
    if not all(isinstance(facts, dict) and has_all(facts, ARM) for facts in arms.values()):
        return False
    return {content["base"], *(facts["against"] for facts in arms.values())} <= arms.keys()


def has_all(content, kinds):
    """Whether all of these keys are there, with values of these types."""
    return content.keys() >= kinds.keys() and files.fits(content, kinds)


def replicates(plan):
    """The second copies of the base."""
    return [a for a, facts in plan["arms"].items() if facts["replicate"] and a != plan["base"]]


def control_group(plan):
    """The arms that all others are compared with: the base and its copies, at one rate."""
    return [plan["base"], *replicates(plan)]


def judged_arms(plan):
    """The arms that get a verdict: no base, replicate or curve."""
    control = control_group(plan)
    arms = []
    for arm, facts in plan["arms"].items():
        if not facts["curve"] and arm not in control:
            arms.append(arm)
    return arms


def counted_arms(plan, measured):
    """The arms that Holm's method corrects for: the arms of a plan, and all others that have been
    measured in its folder. The p of these others is not known and counts as 1, so the other p are
    corrected no less, and a command with fewer arms makes no verdict surer. Arms count by name."""
    return {*judged_arms(plan), *(set(measured) - plan["arms"].keys())}


def control_runs(arms, seeds, stated=None):
    """(runs of the base, runs of its replicate) beside `seeds` runs of each of `arms` arms: both
    together `stated`, or sqrt(arms) * seeds, but at least seeds + 2."""
    both = max(stated or math.ceil(math.sqrt(arms) * seeds), seeds + 2)
    return math.ceil(both / 2), both // 2


def planned_runs(plan, seeds):
    """{arm: runs} of a plan with `seeds` seeds of each arm."""
    base, *copies = control_group(plan)
    arms = judged_arms(plan)
    if plan["screening"]:
        others = [arm for arm, facts in plan["arms"].items() if not facts["curve"]]
        return dict.fromkeys(others, seeds)
    of_base, of_replicate = control_runs(max(len(arms), 1), seeds, plan["controls"])
    counts = dict.fromkeys(arms, seeds) | dict.fromkeys(copies, of_replicate)
    counts[base] = of_base if copies else of_base + of_replicate
    return counts


def bits_per_byte(plan):
    """The factor from a loss of a plan to bits per byte, nan for pairs."""
    return number(plan["data"].get("bits_per_byte"))


def number(value):
    """A number, NaN if the value is none."""
    return float(value) if isinstance(value, Real) else math.nan
