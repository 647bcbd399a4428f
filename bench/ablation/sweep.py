"""A sweep: its arms, its folder, its costs, and which of its runs are done."""

import json
import math
import shlex
import sys
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

from bench.ablation import history, launch, measure, quiet
from bench.ablation.arms import check_arm, check_bite, match_arm, open_data
from bench.ablation.designs import curve_arms, enumerate_arms
from bench.ablation.settings import OWNED, read, variant_config
from bench.ablation.source import code_hash, digest
from bench.ablation.terminal import Doing, format_duration, say
from common import files
from common.configurator import build
from common.errors import Failure, UserError
from common.runtime import Runtime, choose_dtype, find_device, seed_for, versions
from parts import costs
from parts.variant import VariantConfig
from training.run_folder import hold, read_rows, sign
from training.settings import TrainConfig

TUNING_SEED = 1000  # first seed of the runs that choose a learning rate; reported seeds start at 0
AGAIN_SEED = 10_000  # added to the data's seed of the base's second copy: its runs are independent
LOOKS = (1, 2, 4)  # multiples of `seeds` after which a sweep with a budget chooses arms to continue
# Keys that change no result and are left out of a configuration's hash.
NOT_HASHED = (
    *OWNED,
    *("out_dir", "data_dir", "log_interval", "log", "wandb_log", "wandb_project", "match"),
    *("objective", "dpo_beta"),  # a sweep trains from scratch, so it never learns preferences
)
# Keys of a sweep that sweep.json has as they are given.
STATED = (
    *("question", "match", "lr_grid", "tune_seeds", "curve_seeds", "seeds", "budget_seconds"),
    *("metric", "screening"),
)
OFF = (None, False, 0, "", "none")
DEFAULTS = {
    field.name: field.default for kind in (TrainConfig, VariantConfig) for field in fields(kind)
}
LENGTHS = ("max_iters", "warmup_iters", "lr_decay_iters")  # keys that change no code


class Sweep:
    """A sweep that is ready to run. Raises UserError for any mistake before anything is written."""

    def __init__(self, argv, usage, trainer=launch.TRAINER):
        self.config, self.base = read(argv, usage)
        self.command = shlex.join(["python", "bench/ablate.py", *argv])
        self.out, self.trainer = Path(self.config.out_dir), trainer
        arms = enumerate_arms(self.config, self.base) + curve_arms(self.config, self.base)
        self.arms = {arm.name: arm for arm in arms}
        for arm in arms:
            check_arm(arm, self.base, self.config.processes)
        self.data, tokenizer = open_data(self.base)
        tokenizer.encode(self.config.prompt)
        for arm in arms:
            say(arm.name)
            if arm.name != "base" and not arm.again:
                check_bite(arm, self.arms[arm.against or "base"], self.data["vocab_size"])

        self.facts = versions()
        self.slots = launch.worker_slots(
            self.config.workers, self.base["device"], self.config.processes
        )
        machine = {"compile": self.settle_compile(), "device": self.device_kind}
        for arm in arms:
            arm.values |= machine
        if self.config.match != "time":
            self.match()
        self.hash_code()
        if (self.out / "lock").exists():
            hold(self.out).close()
        self.costs, self.predicted = {}, {}  # arm: its row of costs.jsonl, seconds of a run
        self.rows = {}  # key of a job: its row of rows.jsonl
        self.chosen_lr = {}  # arm: multiple of the learning rate
        self.grids = {name: list(self.config.lr_grid) for name in self.tuned_arms()}
        self.margin, self.margin_source = self.config.margin, self.config.margin and "given"

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
        machine = self.machine_of_results()
        for arm in self.arms.values():
            resolved = asdict(build(TrainConfig, arm.values)) | asdict(self.variant_config(arm))
            # A key that is off by default counts as little as a key that does not exist yet.
            hashed = {
                key: value
                for key, value in (resolved | machine).items()
                if key not in NOT_HASHED and (value not in OFF or value != DEFAULTS.get(key))
            }
            arm.config_hash = digest([hashed, self.data["fingerprint"]])

    def machine_of_results(self):
        """What a result depends on besides its code and the keys of train.py: torch's version, the
        number format, threads on a CPU, the number of processes."""
        dtype, kind = self.base.get("dtype", "auto"), self.device_kind
        if dtype == "auto" and (kind == "cpu" or find_device() != "cpu"):
            dtype = choose_dtype(kind)[0]
        return {
            "torch": self.facts["torch"].partition("+")[0],
            "dtype": dtype,
            "threads": self.threads if kind == "cpu" else None,
            "processes": self.config.processes,
        }

    def hash_code(self):
        """Set the code_hash of each arm. Arms that differ in numbers alone run the same code."""
        known = {}
        for arm in self.arms.values():
            values = {key: value for key, value in arm.values.items() if key not in LENGTHS}
            case = digest(values)
            if case not in known:
                say(f"{arm.name}: the code that it runs")
                known[case] = code_hash(self.run_values(arm))
            arm.code_hash = known[case]

    # ------------------------------------------------------------ costs

    def measure(self, rounds=None):
        """Time the arms that out_dir/costs.jsonl does not have yet. Sets self.costs and
        self.predicted, and returns the new rows."""
        facts = {"hardware": self.facts["hardware"]}
        self.costs = self.stored_costs(facts | {"threads": self.threads})
        timed = [name for name, arm in self.arms.items() if not arm.curve]
        missing = [name for name in timed if name not in self.costs]
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
        """{arm: row of costs.jsonl} of the rows that hold for this code, machine and configuration,
        and have the forms that are wanted. Rows of a busy machine hold while it is still busy."""
        rows = {}
        for row in read_rows(self.out / "costs.jsonl"):
            arm = self.arms.get(row["arm"])
            same_runs = row.get("processes", 1) == self.config.processes
            if same_runs and arm and (facts | {"code_hash": arm.code_hash}).items() <= row.items():
                rows[arm.name] = row
        for name, row in list(rows.items()):
            same_size = row["parameters"] == costs.parameters(self.variant_config(self.arms[name]))
            if not (same_size and measure.has_forms(row, self.config.time_forms)):
                del rows[name]
        quiet_rows = {name: row for name, row in rows.items() if row["quiet"]}
        if len(quiet_rows) < len(rows) and self.config.patient and quiet.is_quiet():
            return quiet_rows
        return rows

    def time_arms(self, names, facts, rounds):
        """Time arms beside the base, add their rows to self.costs, and return the new rows. Raises
        Failure if the base cannot be timed, or arms that are to be matched in time."""
        names = list(dict.fromkeys(["base", *names]))
        both = self.config.time_forms and self.config.processes == 1
        values = {name: self.run_values(self.arms[name]) for name in names}
        forms = "eager and compiled" if both else measure.own_form(values["base"])
        if both and self.device_kind == "cpu":
            duration = format_duration(measure.COMPILES * len(names))
            print(f"compiling {len(names)} arms takes about {duration} (--time_forms=False: none)")
        with Doing(f"timing {len(names)} arms in turn, {forms}"):
            tries = measure.TRIES if self.config.patient else 1
            rows, failed = measure.arm_costs(values, self.threads, facts, rounds, both, tries)
        rows = [row | {"code_hash": self.arms[row["arm"]].code_hash} for row in rows]
        if self.config.processes > 1:
            rows = [measure.of_one_process(row, self.config.processes) for row in rows]
        self.costs |= {row["arm"]: row for row in rows}
        for name, reason in failed.items():
            print(f"warning: cannot measure the costs of {name}: {reason}", file=sys.stderr)
        why = next(iter(failed.values()), rows[0]["disturbed"] if rows else "")
        if why and not failed:
            print(f"warning: these times decide nothing: {why}", file=sys.stderr)
        if "base" in failed or why and self.config.match == "time":
            what = f"cannot time {', '.join(failed) or 'the arms'}: {why}"
            fix = "try again on a quiet machine, or match params"
            raise Failure(what, f"match={self.config.match}", fix)
        return rows

    # ------------------------------------------------------------ runs

    def job(self, arm, seed, lr, purpose):
        """The run of an arm. Its seed sets the order of the data for all arms, and its weights."""
        values = dict(arm.values)
        if lr != 1:
            values["learning_rate"] *= lr
            if values.get("min_lr") is not None:
                values["min_lr"] *= lr
        folder = self.out / "runs" / f"{arm.name.replace(' ', '-')}-s{seed}-lr{lr:g}"
        logs_to_wandb = values.get("wandb_log") or "wandb" in values.get("log", "")
        if logs_to_wandb:
            values["wandb_run_name"] = folder.name
        values["seed"] = seed_for(int(digest(arm.name)[:8], 16), seed) % 10**9
        values["data_seed"] = seed + AGAIN_SEED * arm.again
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
            code_hash=arm.code_hash,
            data=self.data["fingerprint"],
            kind=self.data["kind"],
            prompt=self.config.prompt,
            limit=limit,
            threads=self.threads,
            processes=self.config.processes,
            trainer=self.trainer,
            group=self.out.name if logs_to_wandb else "",
        )

    def tuned_arms(self):
        """The names of the arms whose rate is chosen: the base's copies use the base's."""
        return [name for name, arm in self.arms.items() if not arm.again and not arm.curve]

    def control_arms(self):
        """The names of the base and of its second copy."""
        return [name for name, arm in self.arms.items() if arm.again or name == "base"]

    def tuning_jobs(self, names=None):
        """The runs that choose a learning rate for each arm, on seeds that are not reported."""
        if self.config.lr_grid == [1]:
            return []
        return [
            self.job(self.arms[name], TUNING_SEED + number, lr, "tune")
            for number in range(self.config.tune_seeds)
            for name in self.tuned_arms()
            if names is None or name in names
            for lr in self.grids[name]
        ]

    def curve_jobs(self):
        """The runs of the base at other multiples of its tokens."""
        lr = self.chosen_lr.get("base", 1.0)
        arms = [arm for arm in self.arms.values() if arm.curve]
        seeds = range(self.config.curve_seeds)
        return [self.job(arm, seed, lr, "curve") for seed in seeds for arm in arms]

    def planned_jobs(self):
        return self.tuning_jobs() + self.curve_jobs() + self.report_jobs()

    def planned_runs(self, seeds):
        """{arm: runs to report} where each arm has `seeds` runs."""
        arms = {name: describe_arm(arm) for name, arm in self.arms.items()}
        content = {"base": "base", "arms": arms, "screening": self.config.screening}
        return history.planned_runs(content, seeds)

    def report_jobs(self, first=0, end=None, names=None):
        """The runs to report, of all or some arms, that `end` seeds take and `first` do not."""
        before = self.planned_runs(first) if first else {}
        after = self.planned_runs(self.config.seeds if end is None else end)
        return [
            self.job(self.arms[name], seed, self.chosen_lr.get(name, 1.0), "report")
            for seed in range(max(after.values()))
            for name, count in after.items()
            if before.get(name, 0) <= seed < count and (names is None or name in names)
        ]

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
            files.append(self.out / "costs.jsonl", row)
        self.describe()
        self.read_rows()

    def read_rows(self):
        """Read the rows of this code and configuration. A run that failed is tried again."""
        rows = [row for row in read_rows(self.out / "rows.jsonl") if "arm" in row]
        current = [row for row in rows if self.is_current(row)]
        self.rows = {launch.key(row): row for row in current if row["status"] != "failed"}
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
        hashes = row["config_hash"], row["code_hash"]
        return arm is not None and hashes == (arm.config_hash, arm.code_hash)

    def add_row(self, job, row):
        files.append(self.out / "rows.jsonl", row)
        self.rows[job.key] = row

    def keep_margin(self, before):
        """Take over the margin that was fixed before, if the base is still the same."""
        base, entry = self.arms["base"], before.get("arms", {}).get("base", {})
        hashes = entry.get("code_hash"), entry.get("config_hash")
        if self.margin is None and hashes == (base.code_hash, base.config_hash):
            self.margin, self.margin_source = before.get("margin"), before.get("margin_source")

    def describe(self):
        """Write sweep.json, and return its content."""
        path = self.out / "sweep.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        self.keep_margin(before)
        base, config = self.arms["base"], self.config
        values = asdict(build(TrainConfig, base.values)) | asdict(self.variant_config(base))
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        content = {key: getattr(config, key) for key in STATED} | {
            "design": config.design or "arms",
            "base": "base",
            "base_values": values,
            "arms": {arm.name: describe_arm(arm) for arm in self.arms.values()},
            "lr_grids": {name: sorted(grid) for name, grid in self.grids.items()},
            "chosen_lr": self.chosen_lr,
            # The planned numbers of seeds after which verdicts are read.
            "looks": [n * config.seeds for n in (LOOKS if config.budget_seconds else (1,))],
            "margin": self.margin,
            "margin_source": self.margin_source,
            "max_iters": values["max_iters"],
            "block_size": values["block_size"],
            "command": self.command,
            "data": self.data,
            "code_hash": base.code_hash,
            "git_commit": self.facts["git_commit"],
            "hardware": self.facts["hardware"],
            "versions": self.facts,
            "started": before.get("started") or started,
        }
        files.write(path, json.dumps(content, indent=1))
        return content


def describe_arm(arm):
    """The entry of an arm in sweep.json."""
    return {key: value for key, value in vars(arm).items() if key not in ("name", "values")}
