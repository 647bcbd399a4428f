"""The time of a training step of each arm, and what else it costs. Steps are timed in the form in
which the runs train, the arms in turn; it is noticed whether other work disturbs the times."""

import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from scipy.stats import bootstrap

import train
from bench.ablation.arms import BASE
from bench.ablation.fingerprint import start_run
from bench.ablation.progress import doing
from bench.ablation.rows import is_cost
from common.configurator import build
from common.errors import Failure, UserError, one_line, printable
from parts import costs
from parts.architectures import configure
from training.run_folder import read_rows
from training.settings import TrainConfig
from training.step_costs import checkpoint_bytes, kept_bytes, timed

WARM_UP = 3  # steps that are not timed; the first one compiles
ROUNDS = 50  # of all arms in turn; fewer if they take long
DRY_ROUNDS = 5  # in a dry run
FEW = 5  # the least rounds
SECONDS = 15  # per arm, for all its rounds

SAME = 0.05  # by which the step times of two arms that are the same may differ
TRIES = 3  # how often the rounds are timed, unless the machine is quiet sooner
PATIENCE = 30  # seconds to wait, before each try, for the machine to become quiet
BUSY = 0.1  # of this machine's cores kept busy by other work: more disturbs the times


def cores():
    """The numbers of the CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())


def busy_seconds():
    """Seconds that all processes have kept these cores busy since the machine started, with the
    time that a hypervisor took away; None on a system without /proc/stat."""
    if not os.path.exists("/proc/stat"):
        return None
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    wanted = {f"cpu{number}" for number in cores()}
    # user, nice, system, idle, iowait, irq, softirq, steal
    busy = 0
    for line in lines:
        if line[0] in wanted:
            ticks = [int(count) for count in line[1:9]]
            busy += sum(ticks) - ticks[3] - ticks[4]
    return busy / os.sysconf("SC_CLK_TCK")


class OtherWork:
    """How much CPU time other processes take, from when this is made."""

    def __init__(self):
        self.began = time.perf_counter()
        self.all_before = busy_seconds()
        self.own_before = time.process_time()

    def share(self):
        """The share of the cores that other work has kept busy on average. Without /proc/stat: by
        the load average, less one for this process."""
        if self.all_before is None:
            return max(0.0, os.getloadavg()[0] - 1) / len(cores())
        elapsed = max(0.01, time.perf_counter() - self.began)
        others = busy_seconds() - self.all_before - (time.process_time() - self.own_before)
        return max(0.0, others) / elapsed / len(cores())


def wait_until_quiet(patience, show=lambda detail: None):
    """Wait until other work leaves the cores alone for a second, at most `patience` seconds.
    Returns whether it became quiet."""
    end = time.perf_counter() + patience
    while True:
        work = OtherWork()
        time.sleep(1)
        if work.share() <= BUSY:
            return True
        if time.perf_counter() >= end:
            return False
        show(f"other work keeps {work.share():.0%} of the cores busy")


def turns(names, rounds):
    """Yield (round, name). In each round every arm takes one turn. The order rotates and reverses
    from round to round, so that no arm always follows the same one, and other work slows all of
    them equally."""
    names = list(names)
    for number in range(rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        if number % 2 == 0:
            order.reverse()
        for name in order:
            yield number, name


def ratio(rounds):
    """The median of the rounds' ratios with its 95 % bootstrap interval: {"ratio", "low",
    "high"}."""
    resampled = bootstrap((rounds,), np.median, confidence_level=0.95, method="percentile", rng=0)
    low, high = resampled.confidence_interval
    return {"ratio": float(np.median(rounds)), "low": float(low), "high": float(high)}


# ---------------------------------------------------------------- the steps of arms


class Probe:
    """A run of an arm that takes train.py's steps."""

    def __init__(self, values):
        device = values["device"]
        self.cuda = device.startswith("cuda")
        before = 0
        if self.cuda:
            ones = torch.ones(8, 8, device=device)
            ones @ ones  # the first product takes a buffer that stays, for all arms
            before = torch.cuda.memory_allocated(device)
        self.run = start_run(values)
        for number in range(WARM_UP):
            if self.cuda and number == WARM_UP - 1:
                torch.cuda.reset_peak_memory_stats(device)
            self.step()
        if self.cuda:
            self.memory_bytes = torch.cuda.max_memory_allocated(device) - before
            return
        # What training holds at the end of a forward pass: weights, the optimizers' moments,
        # gradients, and each tensor that the backward pass will read.
        gradients = sum(p.nbytes for p in self.run.model.parameters())
        kept = kept_bytes(self.run, self.run.net)
        self.memory_bytes = checkpoint_bytes(self.run) + gradients + kept

    def step(self):
        """The seconds of one training step."""
        return timed(train.train_step, self.run)


def time_arms(arms, threads, rounds=ROUNDS, tries=1):
    """([row of costs.jsonl], {name: reason} of the arms that failed, usually out of memory) for
    arms {name: values of a run}, the base first. The rounds are timed up to `tries` times, until no
    other work disturbs them."""
    if any(values["compile"] for values in arms.values()):
        # All blocks share one forward method, and torch counts its compiled forms together.
        torch._dynamo.config.recompile_limit = 8 * len(arms)
    form = "compiled" if arms[BASE]["compile"] else "eager"
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with doing(f"timing {len(arms)} arms in turn, {form}") as show:
            probes, failed = make_probes(arms, show)
            if BASE in failed:
                return [], failed
            steps, disturbed = time_when_quiet(arms, probes, rounds, tries, show)
    finally:
        torch.set_num_threads(threads_before)
    rows = []
    for name, probe in probes.items():
        ratios = None if disturbed else steps[name] / steps[BASE]
        row = row_of(name, arms[name], probe, steps[name], ratios)
        rows.append(row | {"quiet": not disturbed, "disturbed": disturbed, "threads": threads})
    return rows, failed


def make_probes(arms, show):
    """({arm: Probe} of the arms that can train, {arm: reason} of the others)."""
    probes = {}
    failed = {}
    for number, (name, values) in enumerate(arms.items(), 1):
        show(f"{name}: arm {number} of {len(arms)}, its first steps")
        try:
            probes[name] = Probe(values)
        except (RuntimeError, UserError) as error:
            failed[name] = one_line(error)
    return probes, failed


def time_when_quiet(arms, probes, rounds, tries, show):
    """({arm: [seconds of its step in each round]} of the last try, why it was disturbed or "")."""
    for _ in range(tries):
        if tries > 1:
            wait_until_quiet(PATIENCE, show)
        work = OtherWork()
        steps = steps_in_turn(probes, rounds, show)
        disturbed = why_disturbed(arms, steps, work.share())
        if not disturbed:
            break
    return steps, disturbed


def steps_in_turn(probes, rounds, show):
    """{arm: [seconds of its step in each round]}; a few rounds, and then no more than fit into
    SECONDS for each arm."""
    results = {name: [] for name in probes}
    end = time.perf_counter() + SECONDS * len(probes)
    for place, (number, name) in enumerate(turns(probes, rounds)):
        if place % len(probes) == 0 and number >= FEW and time.perf_counter() > end:
            break
        show(f"{name}: step {number + 1} of {rounds}")
        results[name].append(probes[name].step())
    return {name: np.array(values) for name, values in results.items()}


def why_disturbed(arms, steps, share):
    """Why the times are disturbed: other work took this share of the cores, or an arm that equals
    the base differs from it. "" if they are not."""
    if share > BUSY:
        return f"other work kept {share:.0%} of the cores busy"
    for name in steps:
        times = np.median(steps[name] / steps[BASE])
        if arms[name] == arms[BASE] and abs(times - 1) > SAME:
            return f"the base again took {times:.2f} of the base's time"
    return ""


def row_of(name, values, probe, steps, ratios):
    """What an arm costs: by formula, and by its timed steps. ratios: its step times over the
    base's, round by round, or None if other work disturbed them."""
    c = configure(values, as_variant=True)
    runtime = probe.run.runtime
    compared = ratios is not None and name != BASE and len(ratios) > 1
    return {
        "arm": name,
        "parameters": costs.parameters(c),
        "flops_per_token": costs.flops_per_token(c, c.block_size),
        "kv_bytes_per_token": costs.kv_bytes_per_token(c),  # in float32, as states are in any run
        "milliseconds_per_step": {"median": round(1000 * float(np.median(steps)), 4)},
        "step_ratio": ratio(ratios) if compared else None,
        "peak_memory_bytes": probe.memory_bytes,
        "compile": values["compile"],
        "device": runtime.device,
        "dtype": runtime.dtype,
    }


def run_seconds(row, values, val_tokens):
    """The predicted seconds of a run: start and samples, steps, evaluations (forward alone, a
    third of a step's work), the last of them of all val_tokens."""
    step = row["milliseconds_per_step"]["median"]
    forward = step / values["gradient_accumulation_steps"] / 3  # of a micro-batch
    micro_batch = values["batch_size"] * values["block_size"]
    limit = min(values.get("eval_tokens") or val_tokens, val_tokens)
    scored_tokens = limit + min(train.EVAL_TRAIN_TOKENS, limit)
    evaluation = math.ceil(scored_tokens / micro_batch) * forward + 400
    evaluations = 1 + math.ceil(values["max_iters"] / values["eval_interval"])
    milliseconds = values["max_iters"] * step + evaluations * evaluation
    if limit < val_tokens:
        milliseconds += math.ceil(val_tokens / micro_batch) * forward
    return 6 + milliseconds / 1000


# ---------------------------------------------------------------- the arms of a sweep


def time_sweep(sweep):
    """Time the arms that OUT/costs.jsonl does not have yet. Sets sweep.costs and sweep.predicted,
    and returns the new rows. Raises Failure if the base cannot be timed."""
    patient = not (sweep.config.screening or sweep.config.dry_run)
    sweep.costs = stored_costs(sweep, patient)
    new = []
    names = [name for name, arm in sweep.arms.items() if not arm.curve]
    missing = [name for name in names if name not in sweep.costs]
    if missing:
        values = {name: sweep.run_values(sweep.arms[name]) for name in [BASE, *missing]}
        rounds = DRY_ROUNDS if sweep.config.dry_run else ROUNDS
        tries = TRIES if patient else 1
        new, failed = time_arms(values, sweep.machine.threads, rounds, tries)
        for row in new:
            row["hardware"] = sweep.machine.facts["hardware"]
            row["code_hash"] = sweep.arms[row["arm"]].code_hash
            sweep.costs[row["arm"]] = row
        for name, reason in failed.items():
            what = f"warning: cannot measure the costs of {name}: {reason}"
            print(printable(what), file=sys.stderr)
        if BASE in failed:
            raise Failure("cannot time the base", failed[BASE], "run it with train.py alone")
        why = new[0]["disturbed"]
        if why and not sweep.config.dry_run:  # which writes no report
            print(f"warning: the report leaves out these step times: {why}", file=sys.stderr)
    for name, arm in sweep.arms.items():
        row = sweep.costs.get(name, sweep.costs[BASE])
        values = asdict(build(TrainConfig, arm.values)) | arm.values
        sweep.predicted[name] = run_seconds(row, values, sweep.data["scored_tokens"])
    return new


def stored_costs(sweep, patient):
    """{arm: row of costs.jsonl} of the rows that hold for this code, machine and configuration.
    Rows timed on a busy machine are timed again once it is quiet."""
    valid = {}
    for row in read_rows(sweep.out / "costs.jsonl", is_cost):
        arm = sweep.arms.get(row["arm"])
        if arm is None:
            continue
        model = configure(sweep.run_values(arm), as_variant=True)
        facts = {
            "hardware": sweep.machine.facts["hardware"],
            "threads": sweep.machine.threads,
            "code_hash": arm.code_hash,
            "parameters": costs.parameters(model),
            "kv_bytes_per_token": costs.kv_bytes_per_token(model),
        }
        if facts.items() <= row.items():
            valid[arm.name] = row
    quiet = {name: row for name, row in valid.items() if row.get("quiet")}
    if len(quiet) < len(valid) and patient and wait_until_quiet(0):
        return quiet
    return valid
