"""
The table of a sweep's runs: one row per run, read from rows.jsonl, sweep.json and costs.jsonl.

Columns of `load`:
    sweep        name of the sweep's (first) folder      text         data set
    arm, seed    what ran, and from which seed           rate         multiple of the base's rate
    purpose      report | tune | curve                   tokens       multiple of the base's tokens
    status       done | diverged | failed                current      made by the plan as it is now,
                                                                      on machines that agree
    stuck        did not learn: a run of the base's length that ended above trigrams
    control      base or its replicate                   seconds      of training, by its log
    loss         on the reported half of the validation text, nats per token
    loss_tune    on the half that chooses rates; loss_whole: on all of the validation text
    train_loss, bits_per_byte, wrong_answers, wrong_tokens, test_loss
    blocks       list: loss of each block of text        extrapolation  {context: loss, low, high}
    curve        list of [step, loss of the whole text, of the tune half, of the reported half]
    sample, reason, command, out_dir, machine, code_hash, config_hash
and COSTS, the costs of the arm on the machine that timed most arms. A number that is unknown is
NaN, a text "", a list empty. Later stages add columns: verdicts.py, factorial.py.
"""

import math
import sys
from numbers import Real
from pathlib import Path

import pandas as pd
from scipy import stats

from common import files
from common.errors import UserError

PURPOSES = ("report", "tune", "curve")
STATUSES = ("failed", "done", "diverged")  # of two rows of one run, the later word counts
LOSSES = {  # column -> key of rows.jsonl
    "loss": "final_report",
    "loss_tune": "final_tune",
    "loss_whole": "final_val_loss",
}
NUMBERS = ("train_loss", "bits_per_byte", "wrong_answers", "wrong_tokens", "test_loss", "seconds")
TEXTS = ("sample", "reason", "command", "out_dir", "code_hash", "config_hash")
PRICES = {  # column -> keys of costs.jsonl
    "parameters": ("parameters",),
    "flops_per_token": ("flops_per_token",),
    "step_ratio": ("step_ratio", "ratio"),
    "step_ratio_low": ("step_ratio", "low"),
    "step_ratio_high": ("step_ratio", "high"),
    "ms_per_step": ("milliseconds_per_step", "median"),
    "memory_bytes": ("peak_memory_bytes",),
    "kv_bytes_per_token": ("kv_bytes_per_token",),
}
COSTS = tuple(PRICES)
RUN = ["arm", "seed", "rate", "purpose", "code_hash", "config_hash"]  # what identifies a run
COLUMNS = [
    *("sweep", "text", *RUN[:4], "tokens", "status", "stuck", "current", "control"),
    *(*LOSSES, *NUMBERS),
    *("machine", "blocks", "curve", "extrapolation", *TEXTS),
]
KINDS = {"seed": int, "stuck": bool, "current": bool, "control": bool}
KINDS |= dict.fromkeys(["tokens", *LOSSES, *NUMBERS], float)
FIX = "name a folder that bench/ablate.py wrote"
PARTS = ("chosen_lr", "base_values", "data", "ngrams")  # dictionaries in a plan
# Folders whose plans agree in these keys, and in their common arms, hold runs of one sweep.
SHARED = ("code_hash", "base", "base_values", "max_iters", "data", "screening")
OF_AN_ARM = ("code_hash", "config_hash", "against", "cell")


# ---------------------------------------------------------------- plans


def plan(folder):
    """The plan of a sweep, the content of FOLDER/sweep.json, see `complete`."""
    path = Path(folder) / "sweep.json"
    return complete(files.read_json(path, FIX), path) | {"name": Path(folder).name}


def complete(content, path="sweep.json"):
    """A plan with a default for what it lacks. An arm that is none is named and left out. Raises
    UserError if the content is no plan."""
    arms, base = content.get("arms"), content.get("base")
    if not isinstance(arms, dict) or not is_arm(arms.get(base)):
        raise UserError("no sweep here: no arms, or no base among them", path, FIX)
    arms = {arm: plan_of_arm(facts, base) for arm, facts in arms.items() if is_arm(facts)}
    for arm in content["arms"]:
        facts = arms.get(arm)
        if not facts or facts["against"] not in arms:
            warn(f"{path}: the arm {arm!r} is not readable and left out")
            arms.pop(arm, None)
    keys = "looks", "seeds", "margin", "controls"
    looks, seeds, margin, controls = map(content.get, keys)
    looks = [n for n in looks if is_count(n)] if isinstance(looks, list) else []
    return {
        **{"question": "", "name": "", "also": ""},
        **content,
        **{key: as_dict(content.get(key)) for key in PARTS},
        "screening": bool(content.get("screening")),
        "margin": float(margin) if isinstance(margin, Real) else None,
        "margin_source": text(content.get("margin_source")),
        "controls": controls if is_count(controls) else None,
        "looks": sorted(looks) or [seeds if is_count(seeds) else 1],
        "arms": arms,
    }


def is_arm(facts):
    """Whether an entry of a plan's arms can be used."""
    if not isinstance(facts, dict) or not isinstance(facts.get("changes", {}), dict):
        return False
    kinds = {"against": str | None, "cell": dict | None, "curve": Real | None}
    return all(isinstance(facts.get(key), kind) for key, kind in kinds.items())


def plan_of_arm(facts, base):
    """What a plan says about an arm, with defaults."""
    usual = {"changes": {}, "match": None, "cell": None, "curve": None}
    own = {"against": facts.get("against") or base}
    own |= {key: text(facts.get(key)) for key in ("config_hash", "code_hash")}
    return usual | facts | own | {"replicate": facts.get("replicate", facts.get("again")) is True}


def replicates(plan):
    """The second copies of the base: their rates are chosen as those of arms are."""
    return [a for a, facts in plan["arms"].items() if facts["replicate"] and a != plan["base"]]


def control_group(plan):
    """What arms are compared with: the base, and its replicates that have the base's rate."""
    base, rates = plan["base"], plan["chosen_lr"]
    rate = rates.get(base, 1)
    return [base, *(arm for arm in replicates(plan) if rates.get(arm, rate) == rate)]


def judged_arms(plan):
    """The arms that get a verdict: no base, replicate, curve, or cell of a factorial."""
    copies, arms = [plan["base"], *replicates(plan)], plan["arms"].items()
    return [a for a, f in arms if not (f["curve"] or f["cell"] or a in copies)]


def sweeps(folders):
    """[(plan, folders)] of the sweeps in some folders, in their order. Folders that hold runs of
    one sweep are joined. Raises UserError for a folder without a plan."""
    joined = []
    for path in map(Path, folders):
        content = plan(path)
        same = next((entry for entry in joined if is_same(entry[0], content)), None)
        if same is None:
            joined.append((content, [path]))
            continue
        first, paths = same
        first["arms"] = first["arms"] | content["arms"]
        first["chosen_lr"] = content["chosen_lr"] | first["chosen_lr"]
        first["looks"] = max(first["looks"], content["looks"], key=len)
        paths.append(path)
    return joined


def is_same(plan, other):
    """Whether the runs of two plans belong to one sweep."""
    arms, others = plan["arms"], other["arms"]
    return all(plan.get(key) == other.get(key) for key in SHARED) and all(
        arms[arm].get(key) == others[arm].get(key)
        for arm in arms.keys() & others.keys()
        for key in OF_AN_ARM
    )


# ---------------------------------------------------------------- runs


def load(folders):
    """The DataFrame of all runs in some folders, see above. Lines that are no rows are named, in
    attrs["odd"] and as a warning, and left out."""
    tables, odd = [], []
    for content, paths in sweeps([folders] if isinstance(folders, str | Path) else folders):
        lines = read_all(paths, "rows.jsonl", is_row, odd)
        prices = read_all(paths, "costs.jsonl", is_cost, odd)
        tables.append(table(lines, content, prices))
    runs = pd.concat(tables, ignore_index=True)
    runs.attrs["odd"] = odd
    return runs


def table(lines, plan, prices=()):
    """The DataFrame of the lines of rows.jsonl of a plan, every run once: the last line counts, but
    a failure replaces no result, and no result a run that diverged. prices: lines of costs.jsonl,
    for the costs of each arm."""
    runs = pd.DataFrame([row_of(line, plan) for line in lines], columns=COLUMNS).astype(KINDS)
    order = runs.status.map(STATUSES.index).sort_values(kind="stable").index
    runs = runs.loc[order].drop_duplicates(RUN, keep="last").sort_values(RUN, kind="stable")
    runs["current"] &= ~runs.machine.isin(machines_apart(runs))
    arms = table_of_costs(prices, plan)
    arms = arms[arms.machine == arms.machine.iloc[0]] if len(arms) else arms
    return runs.merge(arms[["arm", *COSTS]], on="arm", how="left")


def control_losses(runs):
    """{machine: losses of its runs of the control group}, the machine of most reported runs first:
    in bfloat16, kinds of CPU round differently, as if from another seed."""
    reported = runs[runs.current & (runs.purpose == "report") & (runs.machine != "")]
    controls = reported[reported.control & (reported.status == "done")]
    machines = reported.machine.value_counts().index
    return {machine: controls.loss[controls.machine == machine] for machine in machines}


def machines_apart(runs):
    """The machines whose runs are not joined with those of the first of control_losses: they have
    fewer than two runs of the control group, or these differ by Welch's test at 5 %."""
    losses, apart = control_losses(runs), []
    for machine in [*losses][1:]:
        groups = losses[[*losses][0]], losses[machine]
        few = min(map(len, groups)) < 2
        if few or stats.ttest_ind(*groups, equal_var=False).pvalue < 0.05:
            apart.append(machine)
    return apart


def is_row(line):
    """Whether a line of rows.jsonl says of a run what it must."""
    if line.get("purpose") not in PURPOSES or line.get("status") not in STATUSES:
        return False
    if not isinstance(line.get("arm"), str) or not isinstance(line.get("seed"), int):
        return False
    empty = (Real,) if line["status"] == "done" else (Real, type(None))
    known = all(isinstance(line.get(key), empty) for key in LOSSES.values())
    return known and isinstance(line.get("lr"), Real)


def row_of(line, plan):
    """The row of `load` of a line of rows.jsonl. A loss that is not finite has diverged."""
    losses = {column: number(line.get(key)) for column, key in LOSSES.items()}
    status, arm = line["status"], line["arm"]
    if status == "done" and not math.isfinite(losses["loss"]):
        status = "diverged"
    facts = plan["arms"].get(arm, {})
    values = plan["base_values"] | facts.get("changes", {})
    return {
        "sweep": plan["name"],
        "text": values.get("dataset") or plan["data"].get("dataset") or "",
        "arm": arm,
        "seed": line["seed"],
        "rate": float(line["lr"]),
        "purpose": line["purpose"],
        "tokens": float(facts.get("curve") or 1),
        "status": status,
        "stuck": status == "done" and is_stuck(losses["loss_whole"], facts, plan),
        "current": is_current(line, plan),
        "control": arm in control_group(plan),
        **losses,
        **{key: number(line.get(key)) for key in NUMBERS},
        "machine": text(line.get("hardware")),
        "blocks": numbers_of(line.get("blocks")),
        "curve": curve_of(line.get("curve")),
        "extrapolation": as_dict(line.get("extrapolation")),
        **{key: text(line.get(key)) for key in TEXTS},
    }


def is_stuck(loss, facts, plan):
    """Whether a run has not learned: it ends above the trigrams of the text that the base sees.
    False where they are not known, and for the base at other numbers of tokens."""
    trigrams = plan["ngrams"].get("trigrams")
    return isinstance(trigrams, Real) and not facts.get("curve") and loss > trigrams


def is_current(line, plan):
    """Whether the plan's code, configuration and, if reported, chosen rate made a line."""
    facts = plan["arms"].get(line["arm"])
    if facts is None:
        return False
    for key in ("code_hash", "config_hash"):
        planned = facts[key] or plan.get(key)
        if planned and line.get(key) != planned:
            return False
    return line["purpose"] != "report" or line["lr"] == plan["chosen_lr"].get(line["arm"], 1)


# ---------------------------------------------------------------- costs


def costs(folders):
    """The DataFrame of costs.jsonl of the plan's code: sweep, machine, arm, COSTS; a row for each
    machine and arm, the machine that timed most arms first. Times that were measured beside other
    work are NaN."""
    known = sweeps([folders] if isinstance(folders, str | Path) else folders)
    tables = [table_of_costs(read_all(p, "costs.jsonl", is_cost, []), plan) for plan, p in known]
    return pd.concat(tables, ignore_index=True)


def table_of_costs(lines, plan):
    """The DataFrame of lines of costs.jsonl."""
    arms, prices = plan["arms"], []
    for line in lines:
        planned = arms.get(line["arm"], {}).get("code_hash") or plan.get("code_hash")
        if not planned or line.get("code_hash") == planned:
            is_base = line["arm"] == plan.get("base")
            prices.append({"sweep": plan["name"]} | cost_of(line, is_base))
    prices = pd.DataFrame(prices, columns=["sweep", "machine", "arm", *COSTS])
    prices = prices.astype(dict.fromkeys(COSTS, float))
    prices = prices.drop_duplicates(["machine", "arm"], keep="last")
    timed = prices.machine.map(prices.groupby("machine").step_ratio.count())
    order = timed.sort_values(ascending=False, kind="stable").index
    return prices.loc[order].reset_index(drop=True)


def is_cost(line):
    """Whether a line of costs.jsonl names an arm and says what it costs."""
    return isinstance(line.get("arm"), str) and isinstance(line.get("parameters"), Real)


def cost_of(line, is_base=False):
    """The row of `costs` of a line of costs.jsonl. The base's ratio is 1."""
    machine, threads = text(line.get("hardware")) or "a machine without a name", line.get("threads")
    if line.get("device") == "cpu" and is_count(threads):
        machine += f", {threads} thread{'s' * (threads > 1)}"
    if is_base:
        line = line | {"step_ratio": {"ratio": 1.0, "low": 1.0, "high": 1.0}}
    if line.get("quiet") is False:
        line = line | dict.fromkeys(("step_ratio", "milliseconds_per_step"))
    costs = {"machine": machine, "arm": line["arm"]}
    for column, (key, *inner) in PRICES.items():
        value = line.get(key)
        costs[column] = number(as_dict(value).get(*inner) if inner else value)
    return costs


# ---------------------------------------------------------------- lines and values


def read_all(folders, name, valid, odd):
    """The lines of the files of this name in some folders, see read_lines."""
    return [line for folder in folders for line in read_lines(folder / name, valid, odd)]


def read_lines(path, valid, odd):
    """The lines of a JSONL file that are `valid`, none if there is no file. Others are named in the
    list `odd` and as a warning; a last line that a crash cut short is not."""
    if not path.exists():
        return []
    lines = []
    *texts, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for place, line, content in files.json_lines([*texts, last]):
        if isinstance(content, dict) and valid(content):
            lines.append(content)
        elif line.strip() and (place <= len(texts) or content is not None):
            odd.append(f"{path.name}, line {place}")
            warn(f"{path}: line {place} is not readable and left out")
    return lines


def warn(message):
    print(f"warning: {message}", file=sys.stderr, flush=True)


def is_count(value):
    return isinstance(value, int) and value > 0


def number(value):
    """A number, NaN if the value is none."""
    return float(value) if isinstance(value, Real) else math.nan


def text(value):
    return value if isinstance(value, str) else ""


def as_dict(value):
    return value if isinstance(value, dict) else {}


def numbers_of(values):
    """A list of numbers; empty if the value is none."""
    known = isinstance(values, list) and all(isinstance(value, Real) for value in values)
    return [float(value) for value in values] if known else []


def curve_of(points):
    """A list of points of four numbers; empty if the value is none."""
    known = isinstance(points, list) and all(len(numbers_of(point)) == 4 for point in points)
    return points if known else []
