"""
The table of a sweep's runs: one row per run, read from rows.jsonl, sweep.json and costs.jsonl.

Columns of `load`:
    sweep        name of the sweep's folder              text         data set
    arm, seed    what ran, and from which seed           rate         multiple of the given rate
    purpose      report | tune | curve                   tokens       multiple of the base's tokens
    status       done | diverged | failed                current      made by the plan as it is now,
                                                                      on machines that agree
                                                         left_out     why it is not current
    stuck        did not learn: a run of the base's length that ended above trigrams
    control      base or its replicate                   seconds      of training, by its log
    val_loss     on all of the validation text, nats per token
    val_loss_tune    on the half of it that chooses rates
    val_loss_report  on the other half, which gives the results
    train_loss, bits_per_byte, wrong_answers, wrong_tokens, test_loss
    blocks       list: loss of each block of text        extrapolation  {context: loss, low, high}
    curve        list of [step, loss of the whole text, of the tune half, of the reported half]
    sample, reason, command, out_dir, machine, code_hash, config_hash
and COSTS, the costs of the arm on the machine that timed most arms. A number that is unknown is
NaN, a text "", a list empty.
"""

import math
from numbers import Real
from pathlib import Path

import pandas as pd
from scipy import stats

from bench.ablation import plans
from bench.ablation.plans import HASHES, bits_per_byte, control_group, judged_arms, number
from common.files import fits
from training.run_folder import read_rows

PURPOSES = ("report", "tune", "curve")
STATUSES = ("failed", "done", "diverged")  # of two rows of a run, the one further right counts
LOSSES = {  # column -> key of rows.jsonl
    "val_loss_report": "final_report",
    "val_loss_tune": "final_tune",
    "val_loss": "final_val_loss",
}
NUMBERS = ("train_loss", "wrong_answers", "wrong_tokens", "test_loss", "seconds")
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
COLUMNS = ["sweep", "text", "arm", "seed", "rate", "purpose", "tokens", "status", "stuck"]
COLUMNS += ["current", "left_out", "control", *LOSSES, "bits_per_byte", *NUMBERS]
COLUMNS += ["machine", "blocks", "curve", "extrapolation", *TEXTS]
KINDS = {"seed": int, "stuck": bool, "current": bool, "control": bool}
KINDS |= dict.fromkeys(["tokens", *LOSSES, "bits_per_byte", *NUMBERS], float)
ROW = {"arm": str, "seed": int, "lr": Real, "hardware": str | None}
ROW |= {"curve": list | None, "blocks": list | None, "extrapolation": dict | None}
ROW |= dict.fromkeys([*LOSSES.values(), *NUMBERS], Real | None)
ROW |= dict.fromkeys(TEXTS, str | None)
COST = {"arm": str, "parameters": Real, "threads": int, "hardware": str | None}
COST |= {"step_ratio": dict | None, "milliseconds_per_step": dict}


# ---------------------------------------------------------------- runs


def load(folders):
    """The DataFrame of all runs of a folder or of several, see above. Lines that are no rows are
    left out, with a warning."""
    tables = []
    for folder in map(Path, [folders] if isinstance(folders, str | Path) else folders):
        plan = plans.plan(folder)
        lines = mark_beyond_plan(read_rows(folder / "rows.jsonl", is_row), plan)
        tables.append(table(lines, plan, read_rows(folder / "costs.jsonl", is_cost)))
    return pd.concat(tables, ignore_index=True)


def mark_beyond_plan(lines, plan):
    """Mark the reported lines of more seeds of an arm than were planned: a verdict is of the
    planned runs. The base may have more, on several machines."""
    seeds = {arm: set() for arm in judged_arms(plan)}
    ended = [line for line in lines if line["purpose"] == "report" and line["status"] != "failed"]
    reported = [line for line in ended if line["arm"] in seeds]
    for line in reported:
        if not why_left_out(line, plan):
            seeds[line["arm"]].add(line["seed"])
    for line in reported:
        line["beyond_plan"] = line["seed"] not in sorted(seeds[line["arm"]])[: plan["seeds"]]
    return lines


def table(lines, plan, prices=()):
    """The DataFrame of the lines of rows.jsonl of a plan, each run once. On one machine the line
    furthest right in STATUSES counts, and of equal ones the last. Of several machines, a line that
    is current and has not failed. prices: lines of costs.jsonl, for the costs of each arm."""
    runs = pd.DataFrame([row_of(line, plan) for line in lines], columns=COLUMNS).astype(KINDS)
    best_last = runs.status.map(STATUSES.index).sort_values(kind="stable").index
    runs = runs.loc[best_last].drop_duplicates([*RUN, "machine"], keep="last")
    apart = runs.current & runs.machine.isin(machines_apart(runs))
    runs.loc[apart, "left_out"] = "another machine, whose base differs or has fewer than two runs"
    runs["current"] &= ~apart
    counts = runs.current & (runs.status != "failed")
    counted_last = counts.sort_values(kind="stable").index
    runs = runs.loc[counted_last].drop_duplicates(RUN, keep="last").sort_values(RUN, kind="stable")
    arm_costs = table_of_costs(prices, plan)
    if len(arm_costs):
        arm_costs = arm_costs[arm_costs.machine == arm_costs.machine.iloc[0]]
    return runs.merge(arm_costs[["arm", *COSTS]], on="arm", how="left")


def control_losses(runs):
    """{machine: losses of its runs of the control group}, the machine of most reported runs first:
    in bfloat16, kinds of CPU round differently, as if from another seed."""
    reported = runs[runs.current & (runs.purpose == "report") & (runs.machine != "")]
    controls = reported[reported.control & (reported.status == "done")]
    machines = reported.machine.value_counts().index
    return {machine: controls.val_loss_report[controls.machine == machine] for machine in machines}


def machines_apart(runs):
    """The machines whose runs are not joined with the runs of the first one of control_losses: they
    have fewer than two runs of the control group, or these differ by Welch's test at 5 %."""
    losses = control_losses(runs)
    machines = list(losses)
    apart = []
    for machine in machines[1:]:
        first = losses[machines[0]]
        other = losses[machine]
        few = min(len(first), len(other)) < 2
        if few or stats.ttest_ind(first, other, equal_var=False).pvalue < 0.05:
            apart.append(machine)
    return apart


def is_row(line):
    """Whether a line of rows.jsonl has the keys that a row of `load` needs."""
    known = line.get("purpose") in PURPOSES and line.get("status") in STATUSES and fits(line, ROW)
    complete = known and (line["status"] != "done" or None not in map(line.get, LOSSES.values()))
    return complete and holds_numbers(line)


def holds_numbers(line):
    """Whether the curve, the blocks and the extrapolation of a row are numbers in their shapes."""
    for point in line.get("curve") or []:
        if not (isinstance(point, list) and len(point) == 4 and are_numbers(point)):
            return False
    for times, entry in (line.get("extrapolation") or {}).items():
        if not (times.isdecimal() and isinstance(entry, dict)):
            return False
        if not isinstance(entry.get("window", {}), dict):
            return False
    return are_numbers(line.get("blocks") or [])


def are_numbers(values):
    return all(isinstance(value, Real) for value in values)


def row_of(line, plan):
    """The row of `load` of a line of rows.jsonl. A loss that is not finite has diverged."""
    losses = {column: number(line.get(key)) for column, key in LOSSES.items()}
    arm = line["arm"]
    status = line["status"]
    if status == "done" and not math.isfinite(losses["val_loss_report"]):
        status = "diverged"
    facts = plan["arms"].get(arm, {})
    left_out = why_left_out(line, plan)
    return {
        "sweep": plan["name"],
        "text": plan["data"].get("dataset") or "",
        "arm": arm,
        "seed": line["seed"],
        "rate": float(line["lr"]),
        "purpose": line["purpose"],
        "tokens": float(facts.get("curve") or 1),
        "status": status,
        "stuck": status == "done" and is_stuck(losses["val_loss"], facts, plan),
        "current": not left_out,
        "left_out": left_out,
        "control": arm in control_group(plan),
        **losses,
        "bits_per_byte": losses["val_loss"] * bits_per_byte(plan),
        **{key: number(line.get(key)) for key in NUMBERS},
        "machine": line.get("hardware") or "",
        "blocks": line.get("blocks") or [],
        "curve": line.get("curve") or [],
        "extrapolation": line.get("extrapolation") or {},
        **{key: line.get(key) or "" for key in TEXTS},
    }


def is_stuck(loss, facts, plan):
    """Whether a run has not learned: it ends above the trigrams of the text that the base sees.
    False where they are not known, and for the base at other numbers of tokens."""
    trigrams = plan["ngrams"].get("trigrams")
    return isinstance(trigrams, Real) and not facts.get("curve") and loss > trigrams


def why_left_out(line, plan):
    """Why the plan does not count a line; "" if it does."""
    facts = plan["arms"].get(line["arm"])
    if not facts:
        return "not named by the command"
    if any(facts[key] != line.get(key) for key in HASHES):
        return "other code or another configuration"
    arm = plan["base"] if line["purpose"] == "curve" else line["arm"]
    if line["purpose"] != "tune" and line["lr"] != plan["chosen_lr"].get(arm, 1):
        return "another learning rate"
    return "more seeds than planned" if line.get("beyond_plan") else ""


# ---------------------------------------------------------------- costs


def costs(folder, plan):
    """table_of_costs of the lines of costs.jsonl in a plan's folder."""
    return table_of_costs(read_rows(folder / "costs.jsonl", is_cost), plan)


def table_of_costs(lines, plan):
    """The DataFrame of lines of costs.jsonl of the plan's code: machine, arm, COSTS; a row for
    each machine and arm, the machine that timed most arms first. Times that were measured
    beside other work are NaN."""
    prices = []
    for line in lines:
        facts = plan["arms"].get(line["arm"])
        if facts and facts["code_hash"] == line.get("code_hash"):
            prices.append(cost_of(line, line["arm"] == plan["base"]))
    prices = pd.DataFrame(prices, columns=["machine", "arm", *COSTS])
    prices = prices.astype(dict.fromkeys(COSTS, float))
    prices = prices.drop_duplicates(["machine", "arm"], keep="last")
    timed = prices.machine.map(prices.groupby("machine").step_ratio.count())
    order = timed.sort_values(ascending=False, kind="stable").index
    return prices.loc[order].reset_index(drop=True)


def threads_text(threads):
    return "1 thread" if threads == 1 else f"{threads} threads"


def is_cost(line):
    """Whether a line of costs.jsonl has an arm and its costs."""
    return fits(line, COST) and isinstance(line["milliseconds_per_step"].get("median"), Real)


def cost_of(line, is_base):
    """The row of `costs` of a line of costs.jsonl. The base's ratio is 1."""
    machine = line.get("hardware") or "a machine without a name"
    if line.get("device") == "cpu":
        machine += f", {threads_text(line['threads'])}"
    if is_base:
        line = line | {"step_ratio": {"ratio": 1.0, "low": 1.0, "high": 1.0}}
    if line.get("quiet") is False:
        line = line | dict.fromkeys(("step_ratio", "milliseconds_per_step"))
    costs = {"machine": machine, "arm": line["arm"]}
    for column, (key, *inner) in PRICES.items():
        value = line.get(key)
        if inner:
            value = (value or {}).get(inner[0])
        costs[column] = number(value)
    return costs
