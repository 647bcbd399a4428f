"""
What each part is worth: one component swapped at a time, trained with several seeds, measured, and reported.

    python bench/ablate.py config/ablate_shakespeare.py --workers=2
    python bench/ablate.py config/ablate_shakespeare.py --design=axis --axis=position --out_dir=out-positions
    python bench/ablate.py config/ablate_shakespeare_gpu.py --budget=2h
    python bench/ablate.py config/ladder_gpt2_to_llama.py --dry_run

A sweep is a folder, out_dir: stop it at any time, and the same command goes on. Every key of train.py is a key of the
base, in the config file or on the command line; what is told here are the sweep's own.
"""

import json
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import repo_root  # noqa: F401

from bench.ablation import launch, measure
from bench.ablation.arms import (
    OWNED,
    AblateConfig,
    check_arm,
    check_bite,
    code_hash,
    data_of,
    enumerate_arms,
    match_arm,
    read,
)
from common import files
from common.configurator import build, help_text
from common.errors import Failure, UserError, run
from common.runtime import Runtime, StopRequest, seed_for, set_up, versions
from parts import costs
from training.run_folder import hold, read_rows, sign
from training.settings import TrainConfig

TUNING_SEED = 1000  # the first of the seeds that choose a learning rate; reported ones count from 0
LOOKS = (1, 2, 4)  # times `seeds`: the numbers of seeds after which a sweep with a budget looks


def clock(seconds):
    """Seconds as a person says them."""
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


# ---------------------------------------------------------------- the sweep


class Sweep:
    """A sweep that is ready to run: its arms, its folder, what is done."""

    def __init__(self, argv, trainer=launch.TRAINER):
        self.config, self.base = read(argv, __doc__)
        self.out, self.trainer = Path(self.config.out_dir), trainer
        self.arms = {arm.name: arm for arm in enumerate_arms(self.config, self.base)}
        for arm in self.arms.values():
            check_arm(arm, self.base)
        self.data, tokenizer = data_of(self.base)
        tokenizer.encode(self.config.prompt)
        for arm in self.arms.values():
            if arm.name != "base" and not arm.again:
                check_bite(arm, self.arms[arm.against], self.data["vocab_size"])
        self.places = launch.slots(self.config.workers, self.base["device"])
        kind = self.base["device"].split(":")[0]
        chooser, base_config = (
            Runtime(kind, "float32", 0, 1, []),
            measure.variant_config(self.base | {"vocab_size": self.data["vocab_size"]}),
        )
        chooser.choose_compile(
            self.base["compile"],
            6
            * costs.parameters(base_config)
            * self.base["batch_size"]
            * self.base["block_size"]
            * self.base["max_iters"],
        )
        for arm in (
            self.arms.values()
        ):  # settled once: a run that is resumed, with less to do, would choose another
            arm.values |= {"compile": chooser.compile, "device": kind}
        if self.config.match != "time":
            self.match()
        self.code_hash, self.facts = code_hash(), versions()
        if (self.out / "lock").exists():
            hold(self.out).close()
        self.rows = {}
        self.chosen = {}

    def match(self, steps=None):
        for arm in self.arms.values():
            match_arm(arm, self.arms["base"], self.config.match, self.data["vocab_size"], steps)
        for arm in self.arms.values():
            resolved = asdict(build(TrainConfig, arm.values)) | asdict(
                measure.variant_config(arm.values | {"vocab_size": self.data["vocab_size"]})
            )
            looks = (
                *OWNED,
                "out_dir",
                "data_dir",
                "log_interval",
                "wandb_log",
                "wandb_project",
                "match",
            )
            arm.config_hash = launch.digest(
                [
                    {key: value for key, value in resolved.items() if key not in looks},
                    self.data["fingerprint"],
                ]
            )

    def full(self, arm):
        """All the values that a run of the arm has, for measuring."""
        return (
            asdict(build(TrainConfig, arm.values))
            | arm.values
            | {"vocab_size": arm.values.get("vocab_size", self.data["vocab_size"])}
        )

    def measure(self, rounds=measure.ROUNDS):
        """Time the arms that out_dir/costs.jsonl does not know yet, all in turn; sets self.costs and self.predicted (seconds of a run)."""
        threads, runtime = (
            self.places[0][1],
            set_up(self.base["device"], self.base.get("dtype", "auto")),
        )
        known = {row["arm"]: row for row in read_rows(self.out / "costs.jsonl")}
        facts = {"hardware": self.facts["hardware"], "code_hash": self.code_hash}
        self.costs = {
            name: row
            for name, row in known.items()
            if name in self.arms
            and all(row.get(key) == value for key, value in (facts | {"threads": threads}).items())
            and row["parameters"]
            == costs.parameters(measure.variant_config(self.full(self.arms[name])))
        }
        missing = {
            name: self.full(arm) for name, arm in self.arms.items() if name not in self.costs
        }
        new = []
        if missing:
            print(
                f"timing {len(missing)} arms in turn, {threads} thread{'s' * (threads > 1)}",
                flush=True,
            )
            busy = os.getloadavg()[0]
            if busy > 0.5 * os.cpu_count():
                print(
                    f"warning: other work keeps this machine busy (load {busy:.1f} on {os.cpu_count()} cores): these times will be too long; remove {self.out / 'costs.jsonl'} to take them again",
                    file=sys.stderr,
                )
            new, failed = measure.arm_costs(
                missing | ({} if "base" in missing else {"base": self.full(self.arms["base"])}),
                runtime,
                threads,
                facts,
                rounds,
            )
            new = [row | {"load_average": round(busy, 1)} for row in new]
            self.costs |= {row["arm"]: row for row in new}
            for name, reason in failed.items():
                print(f"warning: the costs of {name} are not known: {reason}", file=sys.stderr)
            if "base" in failed or failed and self.config.match == "time":
                raise Failure(
                    f"cannot time {', '.join(failed)}",
                    f"match={self.config.match}",
                    next(iter(failed.values())),
                )
        if self.config.match == "time":
            self.match(
                {name: row["milliseconds_per_step"]["median"] for name, row in self.costs.items()}
            )
        self.predicted = {
            name: measure.run_seconds(
                self.costs.get(name, self.costs["base"]), self.full(arm), self.data["scored_tokens"]
            )
            for name, arm in self.arms.items()
        }
        return new

    def job(self, arm, seed, lr, purpose):
        """The run of an arm. All arms see the data of a seed in one order; each is initialised by a seed of its own."""
        values, multiple = arm.values, {}
        if lr != 1:
            rate = values["learning_rate"] * lr
            multiple = {"learning_rate": rate} | (
                {"min_lr": values["min_lr"] * lr} if values.get("min_lr") is not None else {}
            )
        own = seed_for(int(launch.digest(arm.name)[:8], 16), seed) % 10**9
        folder = self.out / "runs" / f"{arm.name.replace(' ', '-')}-s{seed}-lr{lr:g}"
        wandb = {"wandb_run_name": folder.name} if values.get("wandb_log") else {}
        limit = self.config.limit_seconds or (
            max(600, 10 * self.predicted[arm.name]) if self.predicted else None
        )
        return launch.Job(
            arm.name,
            seed,
            lr,
            purpose,
            str(folder),
            values | multiple | wandb | {"seed": own, "data_seed": seed},
            arm.config_hash,
            self.code_hash,
            self.data["fingerprint"],
            self.config.prompt,
            limit,
            self.places[0][1],
            self.trainer,
            self.out.name if wandb else "",
        )

    def tuning(self):
        if self.config.lr_grid == [1]:
            return []
        return [
            self.job(arm, TUNING_SEED + n, lr, "tune")
            for n in range(self.config.tune_seeds)
            for arm in self.arms.values()
            if not arm.again
            for lr in self.config.lr_grid
        ]

    def reporting(self, names, first, end):
        return [
            self.job(self.arms[name], seed, self.chosen.get(name, 1.0), "report")
            for seed in range(first, end)
            for name in self.arms
            if name in names
        ]

    def choose_rates(self):
        """The multiple of the rate with the least mean loss on the tuning seeds, for each arm; one that failed is none. The base once more has the base's."""
        if self.config.lr_grid == [1]:
            return
        for arm in self.arms.values():
            losses = {
                lr: [
                    self.rows.get(self.job(arm, TUNING_SEED + n, lr, "tune").key, {})
                    for n in range(self.config.tune_seeds)
                ]
                for lr in self.config.lr_grid
                if not arm.again
            }
            means = {
                lr: sum(row[self.config.metric] for row in rows) / len(rows)
                for lr, rows in losses.items()
                if all(row.get("status") == "done" for row in rows)
            }
            self.chosen[arm.name] = (
                self.chosen["base"] if arm.again else min(means, key=means.get) if means else 1.0
            )

    def describe(self, argv):
        """sweep.json."""
        path = self.out / "sweep.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        c = measure.variant_config(
            self.arms["base"].values | {"vocab_size": self.data["vocab_size"]}
        )
        values = asdict(build(TrainConfig, self.arms["base"].values)) | asdict(c)
        arms = {
            arm.name: {
                "changes": arm.changes,
                "against": arm.against,
                "match": arm.match,
                "again": arm.again,
                "interaction_of": arm.pair,
                "config_hash": arm.config_hash,
            }
            for arm in self.arms.values()
        }
        looks = (
            [n * self.config.seeds for n in LOOKS]
            if self.config.budget_seconds
            else [self.config.seeds]
        )
        if (
            (self.out / "report.md").exists()
            and before.get("code_hash") == self.code_hash
            and before.get("base_values") == json.loads(json.dumps(values))
        ):
            looks = sorted(
                {*before["looks"], *looks}
            )  # its report has been read: more seeds after it are a further look, and p pays for it
        told = {
            "question": self.config.question,
            "design": self.config.design or "arms",
            "match": self.config.match,
            "base": "base",
            "base_values": values,
            "arms": arms,
            "lr_grid": self.config.lr_grid,
            "chosen_lr": self.chosen,
            "seeds": self.config.seeds,
            "looks": looks,
            "budget_seconds": self.config.budget_seconds,
            "margin": self.config.margin,
            "metric": self.config.metric,
            "max_iters": values["max_iters"],
            "block_size": values["block_size"],
            "command": shlex.join(["python", "bench/ablate.py", *argv]),
            "data": self.data,
            "code_hash": self.code_hash,
            "git_commit": self.facts["git_commit"],
            "hardware": self.facts["hardware"],
            "versions": self.facts,
            "screening": self.config.screening,
            "started": before.get("started")
            or datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        files.write(path, json.dumps(told, indent=1))
        return told


def append(path, row):
    """A line at the end of a file, on the disk before this returns; a torn line that a kill left is closed first."""
    try:
        with open(path, "ab+") as file:
            torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write(b"\n" * bool(torn) + json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise Failure(
            f"cannot write a row: {error.strerror}", path, "free the disk; the same command goes on"
        ) from None


class Table:
    """What is shown while it runs: a line per arm on a terminal, redrawn; else a line per run that ended."""

    def __init__(self, sweep, jobs, terminal=None):
        self.sweep, self.jobs, self.began, self.drawn, self.last = (
            sweep,
            jobs,
            time.perf_counter(),
            0,
            0.0,
        )
        self.terminal = sys.stdout.isatty() if terminal is None else terminal
        self.before = {
            job.key for job in jobs if sweep.rows.get(job.key, {}).get("status") == "done"
        }

    def left(self):
        """Predicted seconds left for each arm, by what the runs of this sitting took beside their prediction."""
        predicted, now = (
            self.sweep.predicted,
            [
                self.sweep.rows[job.key]
                for job in self.jobs
                if job.key in self.sweep.rows and job.key not in self.before
            ],
        )
        taken, foreseen = (
            sum(row["wall_seconds"] for row in now if row["wall_seconds"] > 1),
            sum(predicted[row["arm"]] for row in now if row["wall_seconds"] > 1),
        )
        slower = taken / foreseen if foreseen else 1.0
        return {
            name: sum(
                predicted[name]
                for job in self.jobs
                if job.arm == name and job.key not in self.sweep.rows
            )
            * slower
            / len(self.sweep.places)
            for name in self.sweep.arms
        }

    def lines(self):
        left, found = (
            self.left(),
            [f"{'arm':<24}{'done':>9}{'mean':>9}{'best':>9}{'time left':>11}"],
        )
        for name in dict.fromkeys(job.arm for job in self.jobs):
            mine = [
                self.sweep.rows[job.key]
                for job in self.jobs
                if job.arm == name and job.key in self.sweep.rows
            ]
            done, total = (
                [row for row in mine if row["status"] == "done"],
                sum(job.arm == name for job in self.jobs),
            )
            mean = (
                f"{sum(row[self.sweep.config.metric] for row in done) / len(done):.4f}"
                if done
                else ""
            )
            best = f"{min(row['best_val_loss'] for row in done):.4f}" if done else ""
            failed = f"  {len(mine) - len(done)} failed" if len(mine) > len(done) else ""
            found.append(
                f"{name[:23]:<24}{f'{len(done)}/{total}':>9}{mean:>9}{best:>9}{clock(left[name]) if left[name] else '':>11}{failed}"
            )
        return [
            *found,
            f"{clock(time.perf_counter() - self.began)} so far, about {clock(sum(left.values()))} left",
        ]

    def show(self, job=None, row=None):
        if self.terminal:
            if row or time.perf_counter() - self.last > 1:
                lines, width = self.lines(), shutil.get_terminal_size().columns
                sys.stdout.write(
                    f"\x1b[{self.drawn}F" * bool(self.drawn)
                    + "".join(f"\x1b[2K{line[: width - 1]}\n" for line in lines)
                )
                sys.stdout.flush()
                self.drawn, self.last = len(lines), time.perf_counter()
        elif row:
            ended = sum(other.key in self.sweep.rows for other in self.jobs)
            what = (
                f"FAILED: {row['reason']}"
                if row["status"] == "failed"
                else f"final {row['final_val_loss']:.4f}, best {row['best_val_loss']:.4f}, {row['wall_seconds']:.0f} s"
            )
            print(
                f"[{ended}/{len(self.jobs)}] {job.name}: {what}; about {clock(sum(self.left().values()))} left",
                flush=True,
            )


def run_jobs(sweep, jobs, stop):
    """Run those of the jobs that are not done, and write their rows. False if it was stopped."""
    todo = [job for job in jobs if job.key not in sweep.rows]
    table = Table(sweep, jobs)
    for job in todo:
        print(launch.told(job), flush=True)
    cuda = sweep.base["device"].startswith("cuda")
    events = (
        launch.local(todo, sweep.places, stop)
        if sweep.config.engine == "local"
        else launch.ray_engine(
            todo, sweep.out, sweep.config.workers or 1, sweep.places[0][1], cuda, stop
        )
    )
    for event in events:
        if event:
            job, row = event
            append(sweep.out / "rows.jsonl", row)
            sweep.rows[job.key] = row
            if row["status"] == "done":
                measure.tidy(job)
        table.show(*event or ())
    return not stop.status


def more_seeds(sweep, told, stop):
    """A sweep with a budget: after each look, more seeds for the arms that they could decide, those that need fewest
    first, while the predicted time lasts. The looks are planned beforehand, which is what makes looking several times honest."""
    from bench.ablation import stats

    for first, end in zip(told["looks"], told["looks"][1:]):
        past = [
            row for row in sweep.rows.values() if row["purpose"] == "tune" or row["seed"] < first
        ]  # also when it goes on: what was known at this look
        open_ = dict(stats.undecided(told, past))
        used = sum(row["wall_seconds"] for row in past) / len(sweep.places)
        wanted, names = told["budget_seconds"] - used, set()
        for name in sorted(open_, key=lambda name: open_[name] or math.inf):
            chain = {name, "base", "base again"} & set(sweep.arms) | {
                sweep.arms[name].against,
                *(sweep.arms[name].pair or ()),
            }
            cost = (
                sum(sweep.predicted[other] for other in names | chain)
                * (end - first)
                / len(sweep.places)
            )
            if cost <= wanted:
                names |= chain
        if not names:
            why = (
                "nothing is undecided that more seeds could decide"
                if not open_
                else f"the {clock(max(0, wanted))} left do not pay for {end - first} more seeds of {', '.join(open_)}"
            )
            print(f"after {first} seeds: {why}", flush=True)
            return True
        print(
            f"after {first} seeds, undecided: {', '.join(open_)}; up to {end} for {', '.join(name for name in sweep.arms if name in names)}",
            flush=True,
        )
        if not run_jobs(sweep, sweep.reporting(names, first, end), stop):
            return False
    return True


def plan(sweep):
    """Print the arms, what they cost, and the predicted time."""
    print(
        f"{'arm':<24}{'beside':<14}{'parameters':>11}{'match':>9}{'MFLOP/token':>12}{'KV bytes':>9}{'ms/step':>9}{'decode ms':>10}{'a run':>8}  changes"
    )
    for name, arm in sweep.arms.items():
        row = sweep.costs.get(name)
        residual = f"{arm.match['residual_percent']:+.2f}%" if arm.match else ""
        told = (
            f"{row['parameters']:>11,}{residual:>9}{row['flops_per_token'] / 1e6:>12.2f}{row['kv_bytes_per_token']:>9.0f}"
            if row
            else f"{'not measured':>41}"
        )
        times = (
            f"{row['milliseconds_per_step']['median']:>9.1f}{row['decode_ms_per_token']['median']:>10.2f}"
            if row
            else " " * 19
        )
        changes = arm.changes | (
            {"mlp_width": arm.values["mlp_width"]} if "mlp_width" in arm.values else {}
        )
        beside = "" if name == "base" else arm.against
        print(
            f"{name[:23]:<24}{beside:<14}{told}{times}{clock(sweep.predicted[name]):>8}  "
            + ", ".join(f"{key}={value}" for key, value in changes.items())
        )


def main(argv, trainer=launch.TRAINER):
    if "--help" in argv or "-h" in argv:
        print(help_text(__doc__, [AblateConfig], {"lr_grid": "[1]"}))
        return 0
    sweep = Sweep(argv, trainer)
    config, cuda = sweep.config, sweep.base["device"].startswith("cuda")
    sweep.predicted, new = {}, []
    jobs = [*sweep.tuning(), *sweep.reporting(sweep.arms, 0, config.seeds)]
    if not config.emit:
        new = sweep.measure(5 if config.dry_run else measure.ROUNDS)
        jobs = [
            *sweep.tuning(),
            *sweep.reporting(sweep.arms, 0, config.seeds),
        ]  # anew: match=time settles their steps
        total = sum(sweep.predicted[job.arm] for job in jobs) / len(sweep.places)
        plan(sweep)
        print(
            f"{len(sweep.arms)} arms, {len(sweep.tuning())} runs to choose rates, {len(jobs) - len(sweep.tuning())} to report; {len(sweep.places)} at a time: about {clock(total)}"
            + f", and up to {config.budget} where more seeds can decide" * bool(config.budget),
            flush=True,
        )
        if config.budget_seconds and total > config.budget_seconds:
            raise UserError(
                f"{config.seeds} seeds of each arm take about {clock(total)}",
                f"budget={config.budget}",
                "give more time, fewer seeds or arms, or more workers",
            )
    if config.dry_run:
        for job in jobs:
            print(launch.told(job))
        return 0
    try:
        (sweep.out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write here: {error.strerror}",
            f"out_dir={sweep.out}",
            "choose another --out_dir",
        ) from None
    held = sign(hold(sweep.out))  # noqa: F841, the lock
    for row in new:
        append(sweep.out / "costs.jsonl", row)
    told = sweep.describe(argv)
    rows = [row for row in read_rows(sweep.out / "rows.jsonl") if "arm" in row]
    mine = [
        row
        for row in rows
        if row["arm"] in sweep.arms
        and row["config_hash"] == sweep.arms[row["arm"]].config_hash
        and row["code_hash"] == sweep.code_hash
    ]
    sweep.rows = {
        launch.key(row): row for row in mine if row["status"] == "done"
    }  # what failed is tried again
    if len(rows) > len(mine):
        print(
            f"{len(rows) - len(mine)} rows here are of other code or another configuration: they are stale, and their runs are done again"
        )
    if rows:
        print(f"{len(sweep.rows)} runs are done already")
    if config.emit:
        return emit(sweep, cuda)
    stop = StopRequest()
    going = run_jobs(sweep, sweep.tuning(), stop)
    if going:
        sweep.choose_rates()
        told = sweep.describe(argv)
        going = run_jobs(sweep, sweep.reporting(sweep.arms, 0, config.seeds), stop)
    if going and config.budget_seconds:
        going = more_seeds(sweep, told, stop)
    if not going:
        print(f"stopped, saved; the same command goes on: {told['command']}")
        return stop.status
    from bench.ablation import report

    report.write([sweep.out])
    print(report.table(sweep.out))
    failed = [row for row in sweep.rows.values() if row["status"] == "failed"]
    for row in failed:
        print(
            f"error: {row['arm']} seed {row['seed']} failed ({row['out_dir']}): {row['reason']}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def emit(sweep, cuda):
    """Write the array job of the runs that come next: those that choose rates, then those that are reported."""
    jobs = [job for job in sweep.tuning() if job.key not in sweep.rows]
    if not jobs:
        sweep.choose_rates()
        jobs = [
            job
            for job in sweep.reporting(sweep.arms, 0, sweep.config.seeds)
            if job.key not in sweep.rows
        ]
    if not jobs:
        print("all runs are done: the same command without emit writes the report")
        return 0
    script = launch.slurm(jobs, sweep.out, sweep.places[0][1], cuda, sweep.config.limit_seconds)
    print(f"{len(jobs)} runs: sbatch {script}\nthen gather them: the same command without emit")
    return 0


if __name__ == "__main__":
    run(main)
