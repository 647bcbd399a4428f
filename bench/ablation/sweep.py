"""A sweep: its arms, its folder, its costs, and which of its runs are done."""

import json
import math
import os
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from bench.ablation import launch, measure
from bench.ablation.arms import check_arm, check_bite, match_arm, open_data
from bench.ablation.designs import enumerate_arms
from bench.ablation.settings import OWNED, read, variant_config
from bench.ablation.source import code_hash, digest
from common import files
from common.configurator import build
from common.errors import Failure, UserError
from common.runtime import Runtime, seed_for, versions
from parts import costs
from training.run_folder import hold, read_rows, sign
from training.settings import TrainConfig

TUNING_SEED = 1000  # first seed of the runs that choose a learning rate; reported seeds start at 0
LOOKS = (1, 2, 4)  # multiples of `seeds` after which a sweep with a budget chooses arms to continue
# Keys that change no result and are left out of a configuration's hash.
NOT_HASHED = (
    *OWNED,
    *("out_dir", "data_dir", "log_interval", "wandb_log", "wandb_project", "match"),
)


class Sweep:
    """A sweep that is ready to run. Raises UserError for any mistake before anything is written."""

    def __init__(self, argv, usage, trainer=launch.TRAINER):
        self.config, self.base = read(argv, usage)
        self.command = shlex.join(["python", "bench/ablate.py", *argv])
        self.out, self.trainer = Path(self.config.out_dir), trainer
        self.arms = {arm.name: arm for arm in enumerate_arms(self.config, self.base)}
        for arm in self.arms.values():
            check_arm(arm, self.base)
        self.data, tokenizer = open_data(self.base)
        tokenizer.encode(self.config.prompt)
        for arm in self.arms.values():
            if arm.name != "base" and not arm.again:
                check_bite(arm, self.arms[arm.against or "base"], self.data["vocab_size"])

        self.slots = launch.worker_slots(self.config.workers, self.base["device"])
        machine = {"compile": self.settle_compile(), "device": self.device_kind}
        for arm in self.arms.values():
            arm.values |= machine
        if self.config.match != "time":
            self.match()
        self.code_hash, self.facts = code_hash(), versions()
        if (self.out / "lock").exists():
            hold(self.out).close()
        self.costs, self.predicted = {}, {}  # arm: its row of costs.jsonl, seconds of a run
        self.rows = {}  # key of a job: its row of rows.jsonl
        self.chosen_lr = {}  # arm: multiple of the learning rate

    @property
    def device_kind(self):
        """cpu, cuda or mps."""
        return self.base["device"].split(":")[0]

    @property
    def threads(self):
        """Threads of a run."""
        return self.slots[0][1]

    def settle_compile(self):
        """Whether the runs of all arms are compiled: what train.py chooses for a run of the base.
        All arms get the same choice, so that it makes no difference between them."""
        if self.device_kind == "cpu":
            return measure.start_run(self.run_values(self.arms["base"])).runtime.compile
        # The device alone decides. A login node, which has none, can still write an array job.
        runtime = Runtime(self.device_kind, "float32", 0, 1, [])
        runtime.choose_compile(self.base["compile"], math.inf)
        return runtime.compile

    def variant_config(self, arm):
        return variant_config(arm.values, self.data["vocab_size"])

    def run_values(self, arm):
        """The values of an arm's run, with the vocabulary of the dataset."""
        return {"vocab_size": self.data["vocab_size"]} | arm.values

    def match(self, milliseconds=None):
        """Match all arms to the base in cost, and set their config_hash. `milliseconds`: {arm: of a
        step}, for match=time."""
        base = self.arms["base"]
        for arm in self.arms.values():
            match_arm(arm, base, self.config.match, self.data["vocab_size"], milliseconds)
        for arm in self.arms.values():
            resolved = asdict(build(TrainConfig, arm.values)) | asdict(self.variant_config(arm))
            hashed = {key: value for key, value in resolved.items() if key not in NOT_HASHED}
            arm.config_hash = digest([hashed, self.data["fingerprint"]])

    # ------------------------------------------------------------ costs

    def measure(self, rounds=None):
        """Time the arms that out_dir/costs.jsonl does not have yet. Sets self.costs and
        self.predicted, and returns the new rows."""
        facts = {"hardware": self.facts["hardware"], "code_hash": self.code_hash}
        self.costs = self.stored_costs(facts)
        missing = {name: arm for name, arm in self.arms.items() if name not in self.costs}
        new = self.time_arms(missing, facts, rounds) if missing else []
        if self.config.match == "time":
            medians = {
                name: row["milliseconds_per_step"]["median"] for name, row in self.costs.items()
            }
            self.match(medians)
        for name, arm in self.arms.items():
            row = self.costs.get(name, self.costs["base"])
            values = asdict(build(TrainConfig, arm.values)) | arm.values
            self.predicted[name] = measure.run_seconds(row, values, self.data["scored_tokens"])
        return new

    def stored_costs(self, facts):
        """{arm: row of costs.jsonl} of the rows that hold for this code, machine and
        configuration."""
        wanted = facts | {"threads": self.threads}
        known = {}
        for row in read_rows(self.out / "costs.jsonl"):
            if row["arm"] in self.arms and wanted.items() <= row.items():
                known[row["arm"]] = row
        return {
            name: row
            for name, row in known.items()
            if row["parameters"] == costs.parameters(self.variant_config(self.arms[name]))
        }

    def time_arms(self, missing, facts, rounds):
        """Time arms beside the base, add their rows to self.costs, and return the new rows. Raises
        Failure if the base cannot be timed, or an arm that is to be matched in time."""
        many = "s" if self.threads > 1 else ""
        print(f"timing {len(missing)} arms in turn, {self.threads} thread{many}", flush=True)
        load = self.warn_if_busy()
        timed = missing | {"base": self.arms["base"]}
        values = {name: self.run_values(arm) for name, arm in timed.items()}
        rows, failed = measure.arm_costs(values, self.threads, facts, rounds)
        rows = [row | {"load_average": round(load, 1)} for row in rows]
        self.costs |= {row["arm"]: row for row in rows}
        for name, reason in failed.items():
            print(f"warning: cannot measure the costs of {name}: {reason}", file=sys.stderr)
        if "base" in failed or failed and self.config.match == "time":
            reason = next(iter(failed.values()))
            raise Failure(f"cannot time {', '.join(failed)}", f"match={self.config.match}", reason)
        return rows

    def warn_if_busy(self):
        """The load of this machine, with a warning if other work would distort the times."""
        load, cores = os.getloadavg()[0], os.cpu_count()
        if load > 0.5 * cores:
            print(
                f"warning: other work keeps this machine busy (load {load:.1f} on {cores} cores): "
                "these times will be too long; "
                f"remove {self.out / 'costs.jsonl'} to time them again",
                file=sys.stderr,
            )
        return load

    # ------------------------------------------------------------ runs

    def job(self, arm, seed, lr, purpose):
        """The run of an arm. With one seed, all arms see the data in the same order; each arm is
        initialised from its own seed."""
        values = dict(arm.values)
        if lr != 1:
            values["learning_rate"] *= lr
            if values.get("min_lr") is not None:
                values["min_lr"] *= lr
        folder = self.out / "runs" / f"{arm.name.replace(' ', '-')}-s{seed}-lr{lr:g}"
        logs_to_wandb = bool(values.get("wandb_log"))
        if logs_to_wandb:
            values["wandb_run_name"] = folder.name
        values["seed"] = seed_for(int(digest(arm.name)[:8], 16), seed) % 10**9
        values["data_seed"] = seed
        limit = self.config.limit_seconds
        if limit is None and self.predicted:
            limit = max(600, 10 * self.predicted[arm.name])
        return launch.Job(
            arm=arm.name,
            seed=seed,
            lr=lr,
            purpose=purpose,
            out_dir=str(folder),
            values=values,
            config_hash=arm.config_hash,
            code_hash=self.code_hash,
            data=self.data["fingerprint"],
            prompt=self.config.prompt,
            limit=limit,
            threads=self.threads,
            trainer=self.trainer,
            group=self.out.name if logs_to_wandb else "",
        )

    def tuning_jobs(self):
        """The runs that choose a learning rate for each arm, on seeds that are not reported."""
        if self.config.lr_grid == [1]:
            return []
        tuned = [arm for arm in self.arms.values() if not arm.again]
        return [
            self.job(arm, TUNING_SEED + number, lr, "tune")
            for number in range(self.config.tune_seeds)
            for arm in tuned
            for lr in self.config.lr_grid
        ]

    def report_jobs(self, first=0, end=None, names=None):
        """The runs to report of some arms, all by default, for seeds from `first` up to `end`."""
        end = self.config.seeds if end is None else end
        return [
            self.job(arm, seed, self.chosen_lr.get(name, 1.0), "report")
            for seed in range(first, end)
            for name, arm in self.arms.items()
            if names is None or name in names
        ]

    def choose_learning_rates(self):
        """Choose for each arm the multiple of the learning rate with the least mean loss on the
        tuning seeds, without multiples that have a failed run. The base's second copy uses the
        base's."""
        if self.config.lr_grid == [1]:
            return
        for arm in self.arms.values():
            if arm.again:
                self.chosen_lr[arm.name] = self.chosen_lr["base"]
                continue
            means = {}
            for lr in self.config.lr_grid:
                seeds = range(TUNING_SEED, TUNING_SEED + self.config.tune_seeds)
                rows = [self.rows.get(self.job(arm, seed, lr, "tune").key, {}) for seed in seeds]
                if all(row.get("status") == "done" for row in rows):
                    means[lr] = sum(row[self.config.metric] for row in rows) / len(rows)
            self.chosen_lr[arm.name] = min(means, key=means.get) if means else 1.0

    # ------------------------------------------------------------ the folder

    def open(self, new_costs):
        """Make the folder, lock it, write the costs and sweep.json, and read the stored rows."""
        try:
            (self.out / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot write here: {error.strerror}"
            raise UserError(what, f"out_dir={self.out}", "choose another --out_dir") from None
        self.lock = sign(hold(self.out))
        for row in new_costs:
            append(self.out / "costs.jsonl", row)
        self.describe()
        self.read_rows()

    def read_rows(self):
        """Read the rows of this code and configuration. Failed runs will be tried again."""
        rows = [row for row in read_rows(self.out / "rows.jsonl") if "arm" in row]
        current = [row for row in rows if self.is_current(row)]
        self.rows = {launch.key(row): row for row in current if row["status"] == "done"}
        if len(rows) > len(current):
            print(
                f"{len(rows) - len(current)} rows here come from other code or another "
                "configuration: they are stale, and their runs are done again"
            )
        if rows:
            print(f"{len(self.rows)} runs are done already")

    def is_current(self, row):
        """Whether a row is of an arm of this sweep, with its configuration and code."""
        arm = self.arms.get(row["arm"])
        if arm is None:
            return False
        return (row["config_hash"], row["code_hash"]) == (arm.config_hash, self.code_hash)

    def add_row(self, job, row):
        append(self.out / "rows.jsonl", row)
        self.rows[job.key] = row

    def looks(self, before, values):
        """The numbers of seeds after which verdicts are read. If this sweep already has a report,
        more seeds are a further look, and the p-values are corrected for it."""
        multiples = LOOKS if self.config.budget_seconds else (1,)
        looks = [n * self.config.seeds for n in multiples]
        same_code = before.get("code_hash") == self.code_hash
        same_base = before.get("base_values") == json.loads(json.dumps(values))
        if (self.out / "report.md").exists() and same_code and same_base:
            looks = sorted({*before["looks"], *looks})
        return looks

    def describe(self):
        """Write sweep.json, and return its content."""
        path = self.out / "sweep.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        base, config = self.arms["base"], self.config
        values = asdict(build(TrainConfig, base.values)) | asdict(self.variant_config(base))
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        content = {
            "question": config.question,
            "design": config.design or "arms",
            "match": config.match,
            "base": "base",
            "base_values": values,
            "arms": {arm.name: describe_arm(arm) for arm in self.arms.values()},
            "lr_grid": config.lr_grid,
            "chosen_lr": self.chosen_lr,
            "seeds": config.seeds,
            "looks": self.looks(before, values),
            "budget_seconds": config.budget_seconds,
            "margin": config.margin,
            "metric": config.metric,
            "max_iters": values["max_iters"],
            "block_size": values["block_size"],
            "command": self.command,
            "data": self.data,
            "code_hash": self.code_hash,
            "git_commit": self.facts["git_commit"],
            "hardware": self.facts["hardware"],
            "versions": self.facts,
            "screening": config.screening,
            "started": before.get("started") or started,
        }
        files.write(path, json.dumps(content, indent=1))
        return content


def describe_arm(arm):
    """The entry of an arm in sweep.json."""
    return {
        "changes": arm.changes,
        "against": arm.against,
        "match": arm.match,
        "again": arm.again,
        "interaction_of": arm.pair,
        "cell": arm.cell,
        "config_hash": arm.config_hash,
    }


def append(path, row):
    """Append a line to a file and flush it to disk. If a kill left the last line unfinished, end it
    first."""
    try:
        with open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "free the disk; the same command continues"
        raise Failure(f"cannot write a row: {error.strerror}", path, fix) from None
