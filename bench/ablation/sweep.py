"""A sweep: its arms, its folder, its costs, and which of its runs are done."""

import json
import math
import shlex
import statistics
import sys
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

from bench.ablation import costs as timing
from bench.ablation import launch, looks, power
from bench.ablation.arms import list_arms
from bench.ablation.checks import check_arm, check_changes_output, match_arm, open_data
from bench.ablation.identity import code_hash, digest
from bench.ablation.progress import doing, say
from bench.ablation.rows import control_group, is_cost, is_row, judged_arms, plan
from bench.ablation.settings import OWNED, read
from common import files
from common.configurator import build
from common.errors import Failure, UserError
from common.runtime import Runtime, choose_dtype, find_device, seed_for, versions
from parts import costs
from parts.variant import VariantConfig
from tokens import ngrams
from training.run_folder import check_out_dir, lock_run, read_rows
from training.settings import TrainConfig, variant_config

TUNING_SEED = 1000  # first seed of the runs that choose a learning rate
TUNE_SEEDS = 3  # runs at each rate
REPLICATE_SEED = 10_000  # added to the data's seed of the base's second copy
CURVE_SEEDS = 3  # runs of the base at each other multiple of its tokens
NOISE_RUNS = 5  # runs of the base from which the noise is estimated
# Keys that change no result and are left out of a configuration's hash.
NOT_HASHED = (
    *OWNED,
    *("out_dir", "data_dir", "log_interval", "log", "match"),
    *("objective", "dpo_beta"),  # a sweep trains from scratch, so it never learns preferences
)
OFF = (None, False, 0, "", "none")
DEFAULTS = {
    field.name: field.default for kind in (TrainConfig, VariantConfig) for field in fields(kind)
}
# The product of these keys: the tokens that a run sees.
TOKENS = ("max_iters", "gradient_accumulation_steps", "batch_size", "block_size")
NOT_STORED = ("name", "values")  # what sweep.json does not repeat of an arm
# Keys of a sweep that sweep.json has as they are given.
STORED = (*("question", "prompt", "match", "lr_grid", "seeds", "controls", "screening"),)


class Sweep:
    """A sweep that is ready to run. Raises UserError for any mistake before anything is written."""

    def __init__(self, argv, usage, trainer=launch.TRAINER, elsewhere=False):
        """elsewhere: the runs are for other machines, whose device this one may lack."""
        self.config, self.base = read(argv, usage)
        self.command = shlex.join(["python", "bench/ablate.py", *argv])
        self.out, self.trainer = Path(self.config.out_dir), trainer
        self.facts = versions()
        if not self.config.dry_run:
            check_out_dir(self.out, resuming=True)
        stored = plan(self.out) if (self.out / "sweep.json").exists() else {}
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self.started = stored.get("started", now)
        arms = list_arms(self.config, self.base)
        self.arms = {arm.name: arm for arm in arms}
        with doing("checking the arms") as show:
            self.check_arms(show)

        self.find_machine(elsewhere)
        machine = self.settle_machine()
        for arm in arms:
            arm.values |= machine
            arm.code_hash = code_hash(self.run_values(arm))
        self.match()
        self.costs, self.predicted = {}, {}  # arm: its row of costs.jsonl, seconds of a run
        self.rows = {}  # key of a job: its row
        base = [self.arms["base"].code_hash, self.arms["base"].config_hash]
        kept = stored if stored and looks.identity(stored) == base else {}
        rates = kept.get("chosen_lr", {}) if self.config.lr_grid != [1] else {}
        self.chosen_lr = {name: rate for name, rate in rates.items() if name in self.arms}
        self.take_over_rates()
        self.grids = {  # the base is tuned already, by a search of its own
            name: [1.0] if name == "base" else list(self.config.lr_grid)
            for name, arm in self.arms.items()
            if not arm.curve
        }
        self.margin, self.margin_source = self.config.margin, "given"
        if self.margin is None:  # the one that was fixed before, if the base is still the same
            self.margin, self.margin_source = kept.get("margin"), kept.get("margin_source")

    def check_arms(self, show):
        for arm in self.arms.values():
            check_arm(arm, self.base)
        self.data, tokenizer, self.counted = open_data(self.base)
        tokenizer.encode(self.config.prompt)
        for arm in self.arms.values():
            show(arm.name)
            if arm.name != "base" and not arm.replicate:
                check_changes_output(arm, self.arms[arm.against], self.data["vocab_size"])

    def find_machine(self, elsewhere):
        """Set the kind of device (cpu, cuda or mps), whether this machine has it (a login node,
        which has none, can still plan), the slots of the workers, and the threads of a run."""
        device = self.base["device"]
        self.device_kind = device.split(":")[0]
        try:
            self.device_is_here = bool(find_device(device))
        except UserError:
            if not elsewhere:
                raise
            self.device_is_here = False
        self.slots = launch.worker_slots(self.config.workers, device)
        self.threads = self.slots[0][1]

    def settle_machine(self):
        """The device, number format and compilation of all runs: what train.py chooses for the
        base. A login node, which lacks the device, takes the number format of today's GPUs."""
        kind, dtype = self.device_kind, self.base.get("dtype", "auto")
        if kind == "cpu":
            runtime = timing.start_run(self.run_values(self.arms["base"])).runtime
            return {"device": kind, "dtype": runtime.dtype, "compile": runtime.compile}
        runtime = Runtime(kind, "float32", 0, 1, [])
        runtime.choose_compile(self.base["compile"], math.inf)
        if dtype == "auto":
            dtype = choose_dtype(kind)[0] if self.device_is_here else "bfloat16"
        return {"device": kind, "dtype": dtype, "compile": runtime.compile}

    def run_values(self, arm):
        """The values of an arm's run, with the vocabulary of the dataset."""
        return {"vocab_size": self.data["vocab_size"]} | arm.values

    def match(self):
        """Match all arms to the base in cost, and set their config_hash."""
        base, vocab_size = self.arms["base"], self.data["vocab_size"]
        for arm in self.arms.values():
            match_arm(arm, base, self.config.match, vocab_size)
        # What a result depends on besides its code and the keys of train.py.
        threads = self.threads if self.device_kind == "cpu" else None
        machine = {"torch": self.facts["torch"].partition("+")[0], "threads": threads}
        for arm in self.arms.values():
            model = variant_config(arm.values, vocab_size)
            resolved = asdict(build(TrainConfig, arm.values)) | asdict(model) | machine
            # A key that is off by default counts as little as a key that does not exist yet.
            hashed = {
                key: value
                for key, value in resolved.items()
                if key not in NOT_HASHED and (value not in OFF or value != DEFAULTS.get(key))
            }
            arm.config_hash = digest([hashed, self.data["fingerprint"]])

    # ------------------------------------------------------------ costs

    def measure(self, rounds=None):
        """Time the arms that out_dir/costs.jsonl does not have yet. Sets self.costs and
        self.predicted, and returns the new rows. Raises Failure if the base cannot be timed."""
        patient = not (self.config.screening or self.config.dry_run)
        self.costs, new = self.stored_costs(patient), []
        timed = (name for name, arm in self.arms.items() if not arm.curve)
        if missing := [name for name in timed if name not in self.costs]:
            names = dict.fromkeys(["base", *missing])
            values = {name: self.run_values(self.arms[name]) for name in names}
            tries = timing.TRIES if patient else 1
            new, failed = timing.time_arms(values, self.threads, rounds, tries)
            for row in new:
                row["hardware"] = self.facts["hardware"]
                row["code_hash"] = self.arms[row["arm"]].code_hash
                self.costs[row["arm"]] = row
            for name, reason in failed.items():
                print(f"warning: cannot measure the costs of {name}: {reason}", file=sys.stderr)
            if "base" in failed:
                raise Failure("cannot time the base", failed["base"], "run it with train.py alone")
            if why := new[0]["disturbed"]:
                print(f"warning: the report leaves out these step times: {why}", file=sys.stderr)
        for name, arm in self.arms.items():
            row = self.costs.get(name, self.costs["base"])
            values = asdict(build(TrainConfig, arm.values)) | arm.values
            self.predicted[name] = timing.run_seconds(row, values, self.data["scored_tokens"])
        return new

    def stored_costs(self, patient):
        """{arm: row of costs.jsonl} of the rows that hold for this code, machine and configuration.
        Rows timed on a busy machine are timed again once it is quiet."""
        facts = {"hardware": self.facts["hardware"], "threads": self.threads}
        rows = {}
        for row in read_rows(self.out / "costs.jsonl", is_cost):
            arm = self.arms.get(row["arm"])
            if arm is not None:
                model = variant_config(arm.values, self.data["vocab_size"])
                same = {"code_hash": arm.code_hash, "parameters": costs.parameters(model)}
                rows |= {arm.name: row} if (facts | same).items() <= row.items() else {}
        quiet = {name: row for name, row in rows.items() if row.get("quiet")}
        if len(quiet) < len(rows) and patient and timing.wait_until_quiet(0):
            return quiet
        return rows

    # ------------------------------------------------------------ runs

    def job(self, arm, seed, lr, purpose):
        """The run of an arm. Its seed sets the order of the data for all arms, and its weights."""
        values = dict(arm.values)
        if lr != 1:
            values["learning_rate"] *= lr
            if values.get("min_lr") is not None:
                values["min_lr"] *= lr
        values["seed"] = seed_for(int(digest(arm.name)[:8], 16), seed) % 10**9
        values["data_seed"] = seed + REPLICATE_SEED * arm.replicate
        folder = self.out / "runs" / f"{arm.name.replace(' ', '-')}-s{seed}-lr{lr:g}"
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
            limit=launch.time_limit(self.predicted.get(arm.name)),
            threads=self.threads,
            trainer=self.trainer,
            number=seed - self.config.first_seed,
        )

    def control_arms(self):
        """The names of the base, and of its second copy if that has the base's rate."""
        return control_group(self.outline())

    def tuning_jobs(self, names=None):
        """The runs that choose a learning rate for each arm, on seeds that are not reported, and
        those of the base on the same seeds."""
        if self.config.lr_grid == [1]:
            return []
        return [
            self.job(self.arms[name], TUNING_SEED + number, lr, "tune")
            for number in range(TUNE_SEEDS)
            for name, grid in self.grids.items()
            if names is None or name in names
            for lr in grid
        ]

    def curve_jobs(self):
        """The runs of the base at other multiples of its tokens."""
        arms = [arm for arm in self.arms.values() if arm.curve]
        return [self.job(arm, seed, 1.0, "curve") for seed in range(CURVE_SEEDS) for arm in arms]

    def outline(self):
        """What planned_runs and control_group read of a plan."""
        arms = {name: vars(arm) for name, arm in self.arms.items()}
        given = {key: getattr(self.config, key) for key in ("screening", "controls")}
        return given | {"base": "base", "arms": arms, "chosen_lr": self.chosen_lr}

    @property
    def looks(self):
        """The planned numbers of seeds after which verdicts are read."""
        return [self.config.seeds * 2**number for number in range(self.config.looks)]

    @property
    def parent(self):
        """The folder of the sweep of which this one is a column; None if it is none."""
        return self.out.parent if isinstance(self.config.also, str) else None

    def take_over_rates(self):
        """Give the arms of a column that tunes no rates those of the sweep that it belongs to."""
        if self.parent is None or self.config.lr_grid != [1]:
            return
        path, fix = self.parent / "sweep.json", "run the sweep without --also first"
        content = plan(self.parent) if path.exists() else {}
        rates, arms = content.get("chosen_lr", {}), judged_arms(self.outline())
        missing = [arm for arm in arms if arm not in rates]
        if missing and content.get("lr_grid") != [1]:
            raise UserError(f"no rate is chosen yet for {', '.join(missing)}", path, fix)
        self.chosen_lr |= {arm: rates[arm] for arm in arms if arm in rates}

    def planned_runs(self, seeds):
        """{arm: runs to report} where each arm has `seeds` runs."""
        return looks.planned_runs(self.outline(), seeds)

    def report_jobs(self, first=0, end=None, names=None, most=math.inf):
        """The runs to report, of all or some arms, that `end` seeds take and `first` do not, seed
        by seed over all arms; at most `most` of each."""
        before = self.planned_runs(first) if first else {}
        after, first_seed = self.planned_runs(end or self.config.seeds), self.config.first_seed
        return [
            self.job(self.arms[name], first_seed + run, self.chosen_lr.get(name, 1.0), "report")
            for run in range(max(after.values()))
            for name, count in after.items()
            if before.get(name, 0) <= run < min(count, most) and (names is None or name in names)
        ]

    def decides(self, seeds):
        """The smallest difference and tie that a look can show, in nats if the noise is known."""
        counts = self.planned_runs(seeds)
        control = sum(counts[name] for name in self.control_arms())
        family = len(judged_arms(self.outline()))
        se = math.sqrt(1 / seeds + 1 / control)
        if self.config.screening:
            df = sum(counts.values()) - len(counts)
        elif seeds >= power.least_runs(family):
            df = seeds + control - 2
        else:
            df = 0
        what = f"{seeds} runs of an arm beside {control} of the base"
        if seeds < 2 or df < 1:
            return f"{what} decide nothing: give more --seeds"
        share = 1 if self.config.screening else looks.share_of(len(self.looks))
        level, noise = power.ALPHA * share / family, self.noise()
        visible = power.smallest_visible(se, df, level)
        tie = power.smallest_tie(se, df, level)
        unit = "nats" if noise else "standard deviations of a run"
        found, within = (f"{x * noise:.4f}" if noise else f"{x:.1f}" for x in (visible, tie))
        shown = "" if self.config.screening else f", and a tie within {within}"
        return f"{what} show a difference of {found} {unit} 80 times in 100{shown}"

    def noise(self):
        """The standard deviation of the base's losses in nats, None while few runs are known."""
        control = self.control_arms()
        losses = [
            row["final_report"]
            for row in self.rows.values()
            if (row["arm"] in control, row["purpose"], row["status"]) == (True, "report", "done")
        ]
        return statistics.stdev(losses) if len(losses) >= NOISE_RUNS else None

    def pending_jobs(self):
        """The planned runs, up to the first look, that are not done."""
        jobs = self.tuning_jobs() + self.curve_jobs() + self.report_jobs()
        return [job for job in jobs if job.key not in self.rows]

    # ------------------------------------------------------------ the folder

    def open(self, new_costs):
        """Make the folder, lock it, and write the costs and sweep.json."""
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        self.lock = lock_run(self.out, write_id=True)
        for row in new_costs:
            files.append(self.out / "costs.jsonl", row)
        self.write_plan()

    def read_rows(self):
        """Read the rows of this code and configuration. A run that failed is tried again."""
        stored = read_rows(self.out / "rows.jsonl", is_row)
        hashes = {(name, arm.config_hash, arm.code_hash) for name, arm in self.arms.items()}
        keys = "arm", "config_hash", "code_hash"
        current = [row for row in stored if tuple(map(row.get, keys)) in hashes]
        self.rows = {launch.key(row): row for row in current if row["status"] != "failed"}
        if len(stored) > len(current):
            say(
                f"{len(stored) - len(current)} rows here come from other code, another "
                "configuration or arms that this sweep does not have: they are left out"
            )
        if stored:
            say(f"{len(self.rows)} runs are done already")

    def keep_row(self, job, row):
        """Write the row of a run that has ended, which then needs its checkpoints no more."""
        files.append(self.out / "rows.jsonl", row)
        self.rows[job.key] = row
        if row["status"] != "failed":
            launch.drop_checkpoints(job)

    def write_plan(self):
        """Write sweep.json."""
        base, config = self.arms["base"], self.config
        model = variant_config(base.values, self.data["vocab_size"])
        values = asdict(build(TrainConfig, base.values)) | asdict(model)
        tokens = math.prod(values[key] for key in TOKENS)
        content = {key: getattr(config, key) for key in STORED} | {
            "design": ",".join(config.designs),
            "base": "base",
            "base_values": values,
            "arms": {
                name: {key: value for key, value in vars(arm).items() if key not in NOT_STORED}
                for name, arm in self.arms.items()
            },
            "chosen_lr": self.chosen_lr,
            "ngrams": ngrams.yardsticks(self.counted, tokens, values["block_size"]),
            "looks": self.looks,
            "also": self.config.also if self.parent else "",
            "margin": self.margin,
            "margin_source": self.margin_source,
            "max_iters": values["max_iters"],
            "command": self.command,
            "data": self.data,
            "code_hash": base.code_hash,
            "git_commit": self.facts["git_commit"],
            "hardware": self.facts["hardware"],
            "versions": self.facts,
            "started": self.started,
        }
        files.write(self.out / "sweep.json", json.dumps(content, indent=1))
