"""The plans of sweeps: sweep.json, its runs, and which folders hold runs of one sweep."""

import math
from numbers import Real
from pathlib import Path

from bench.ablation import identity
from common import files
from common.errors import UserError

# Folders whose plans agree in these keys, setting and common arms hold runs of one sweep.
SHARED = ("code_hash", "base", "max_iters", "screening")
# What changes no result, or (bits per byte) was computed otherwise in earlier plans.
MAY_DIFFER = (*identity.NOT_HASHED, "bits_per_byte", "bits_of")
HASHES = ("code_hash", "config_hash")
OF_AN_ARM = (*HASHES, "against")

FIX = "move it away, and bench/ablate.py writes another one: the rows beside it are kept"

# The types of the values in the files, by key.
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
        raise UserError("this is no plan of a sweep", path, FIX)
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


def sweeps(folders):
    """[(plan, folders)] of the sweeps in some folders, in their order. Folders that hold runs of
    one sweep are joined. Raises UserError for a folder without a plan."""
    joined = []
    for path in map(Path, folders):
        content = plan(path)
        for first, paths in joined:
            ids = ids_within(first, paths, content, path)
            if is_same(first, with_ids(content, ids)):
                join(first, with_ids(content, ids), ids)
                paths.append(path)
                break
        else:
            joined.append((content, [path]))
    return joined


def ids_within(first, paths, content, path):
    """{(arm, id of its code in one plan): id of the same code in the first plan}, where the plans
    agree otherwise. Sweeps that were started apart give one fingerprint two ids."""
    without = [with_ids(each, dict.fromkeys(codes(each), "")) for each in (first, content)]
    if codes(first) == codes(content) or not is_same(*without):
        return {}
    others = [line for other in paths for line in identity.stored(other)]
    return identity.same_ids(identity.stored(path), others)


def codes(plan):
    """[(arm, id of its code)] of a plan."""
    return [(arm, facts["code_hash"]) for arm, facts in plan["arms"].items()]


def with_ids(plan, ids):
    """A plan whose arms have other ids of their code, {(arm, id): other id}."""
    arms = {}
    for arm, facts in plan["arms"].items():
        code = ids.get((arm, facts["code_hash"]), facts["code_hash"])
        arms[arm] = facts | {"code_hash": code}
    return plan | {"arms": arms, "code_hash": arms[plan["base"]]["code_hash"]}


def join(first, content, ids):
    """Add the arms, rates, seeds and ids of a plan to another plan of the same sweep."""
    first["ids"] = first.get("ids", {}) | ids
    first["arms"] = first["arms"] | content["arms"]
    first["chosen_lr"] = content["chosen_lr"] | first["chosen_lr"]
    first["seeds"] = max(first["seeds"], content["seeds"])


def is_same(plan, other):
    """Whether the runs of two plans belong to one sweep."""
    if any(plan.get(key) != other.get(key) for key in SHARED) or setting(plan) != setting(other):
        return False
    for arm in plan["arms"].keys() & other["arms"].keys():
        facts = plan["arms"][arm]
        other_facts = other["arms"][arm]
        if any(facts.get(key) != other_facts.get(key) for key in OF_AN_ARM):
            return False
    return True


def setting(plan):
    """The facts of a plan's data and the keys of its base, without those that may differ."""
    parts = (plan["data"], plan["base_values"])
    return [{key: part[key] for key in part if key not in MAY_DIFFER} for part in parts]


def bits_per_byte(plan):
    """The factor from a loss of a plan to bits per byte, nan for pairs."""
    return number(plan["data"].get("bits_per_byte"))


def number(value):
    """A number, NaN if the value is none."""
    return float(value) if isinstance(value, Real) else math.nan
