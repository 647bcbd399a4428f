"""A sweep: its arms, its machine, its folder, and its finished runs. schedule.py lists the runs in
their order."""

import json
import math
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

from bench.ablation import fingerprint, identity, plans, rows, runs, schedule
from bench.ablation.arms import BASE
from bench.ablation.checks import check_arm, check_changes_output, match_arm, open_data
from bench.ablation.identity import config_hash
from bench.ablation.progress import doing, say
from bench.ablation.settings import AblateConfig
from bench.settings.plan import tokens_of
from common import files
from common.configurator import build
from common.errors import Failure, UserError
from common.runtime import Runtime, choose_dtype, find_device, versions
from parts.architectures import configure
from tokens import ngrams
from training.run_folder import check_out_dir, lock_run, read_rows
from training.settings import TrainConfig
from weights import checkpoint

NOT_STORED = ("name", "values")  # facts of an arm that sweep.json does not repeat
PLANNED = ("seeds", "first_seed", "controls", "margin")  # what the verdicts are of
# Keys of a sweep that sweep.json holds unchanged.
STORED = ("question", "prompt", "match", "lr_grid", "seeds", "first_seed", "controls", "screening")


@dataclass
class Machine:
    """Where the runs train."""

    device: str  # as given: cpu, cuda, cuda:1 or mps
    is_here: bool  # False on a login node, which lacks the device but can plan
    slots: list  # (GPU or None, threads) of each worker
    facts: dict  # hardware, torch and other versions

    @property
    def device_kind(self):
        """The device without its number: a run sees one GPU alone."""
        return self.device.split(":")[0]

    @property
    def threads(self):
        """The threads of a run."""
        return self.slots[0][1]


@dataclass
class Sweep:
    """A sweep that is ready to run."""

    config: AblateConfig
    command: str  # that continues it
    trainer: str  # path of train.py
    machine: Machine
    arms: dict  # {name: Arm}, the base first
    data: dict  # facts of the dataset
    ngrams: dict  # losses of n-grams on the tokens that the base sees; {} if not known
    fingerprints: list  # lines of fingerprints.jsonl
    started: str
    chosen_lr: dict  # {arm: multiple of its given learning rate}
    grids: dict  # {arm: multiples to choose from}
    margin: float | None  # nats; a smaller difference counts as none
    margin_source: str | None
    costs: dict = field(default_factory=dict)  # {arm: its row of costs.jsonl}
    predicted: dict = field(default_factory=dict)  # {arm: seconds of a run}
    rows: dict = field(default_factory=dict)  # {key of a job: its row of rows.jsonl}
    measured: set = field(default_factory=set)  # arms with a reported row, of any code
    lock: IO | None = None

    @property
    def out(self):
        return Path(self.config.out_dir)

    def run_values(self, arm):
        """The values of an arm's run in this process, with the vocabulary of the dataset."""
        values = {"vocab_size": self.data["vocab_size"]} | arm.values
        return values | {"device": self.machine.device}

    # ------------------------------------------------------------ its plan

    def outline(self):
        """The keys of the plan that the functions of plans.py read."""
        return {
            "base": BASE,
            "arms": {name: vars(arm) for name, arm in self.arms.items()},
            "screening": self.config.screening,
            "controls": self.config.controls,
        }

    def planned_runs(self):
        """{arm: runs to report}."""
        return plans.planned_runs(self.outline(), self.config.seeds)

    # ------------------------------------------------------------ its folder

    def open(self, new_costs=()):
        """Make the folder, lock it, and write costs, fingerprints and sweep.json."""
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        self.lock = lock_run(self.out, write_id=True)
        for row in new_costs:
            files.append(self.out / "costs.jsonl", row)
        self.add_forms()
        identity.store(self.out, self.fingerprints)
        self.write_plan()

    def add_forms(self):
        """Fingerprint once more, in the form of their runs, the arms that are about to run compiled
        or in 16 bits. The result is `form` in their lines of fingerprints.jsonl."""
        if not self.machine.is_here:
            return
        pending = {job.arm for job in schedule.pending_jobs(self)}
        missing = []
        for line in self.fingerprints:
            arm = self.arms.get(line["arm"])
            current = line["arm"] in pending and line["id"] == arm.code_hash
            if current and "form" not in line and fingerprint.has_form(arm.values):
                missing.append(line)
        if missing:
            with doing("computing fingerprints in the form of the runs") as show:
                for number, line in enumerate(missing, 1):
                    show(f"{line['arm']}: arm {number} of {len(missing)}")
                    values = self.run_values(self.arms[line["arm"]])
                    line["form"] = fingerprint.compute_in_form(values, line["kind"])

    def load_rows(self):
        """Read the rows of this code and configuration. A run that failed is tried again."""
        stored = read_rows(self.out / "rows.jsonl", rows.is_row)
        self.rows = {}
        not_named = Counter()
        changed = Counter()
        others = {"arms that are not named": not_named, "other code or configuration": changed}
        for row in stored:
            arm = self.arms.get(row["arm"])
            ended = row["status"] != "failed"
            if ended and row["purpose"] == "report":
                self.measured.add(row["arm"])
            if not arm:
                not_named[row["arm"]] += 1
            elif hashes(row) != hashes(vars(arm)):
                changed[row["arm"]] += 1
            elif ended:
                self.rows[runs.key(row)] = row
        for what, counts in others.items():
            if counts:
                named = ", ".join(f"{arm} {count}" for arm, count in counts.items())
                say(
                    f"{counts.total()} rows here are of {what} ({named}): they stay, and the report"
                    " is without them (another --out_dir keeps both)"
                )
        if stored:
            say(f"{len(self.rows)} runs are done already")

    def check_own(self):
        """Raise Failure if another folder has the name of the one that this process locked."""
        if not files.is_open_as(self.out / "lock", self.lock.fileno()):
            what = "the folder of this sweep was moved or removed while it ran"
            fix = "the same command with the out_dir where it is now continues"
            raise Failure(what, f"out_dir={self.out}", fix)

    def keep_row(self, job, row):
        """Write the row of a run that has ended, and drop the checkpoints that it needs no more."""
        self.check_own()
        files.append(self.out / "rows.jsonl", row)
        self.rows[job.key] = row
        if row["status"] != "failed":
            runs.drop_checkpoints(job)

    def write_plan(self):
        """Write sweep.json."""
        self.check_own()
        base = self.arms[BASE]
        arms = {}
        for name, arm in self.arms.items():
            arms[name] = {key: value for key, value in vars(arm).items() if key not in NOT_STORED}
        content = {key: getattr(self.config, key) for key in STORED} | {
            "design": ",".join(self.config.designs),
            "base": BASE,
            "base_values": base_values(base, self.data),
            "arms": arms,
            "chosen_lr": self.chosen_lr,
            "ngrams": self.ngrams,
            "also": self.config.also if parent_of(self.config) else "",
            "margin": self.margin,
            "margin_source": self.margin_source,
            "max_iters": base.values["max_iters"],
            "command": self.command,
            "data": self.data,
            "code_hash": base.code_hash,
            "git_commit": self.machine.facts["git_commit"],
            "hardware": self.machine.facts["hardware"],
            "versions": self.machine.facts,
            "started": self.started,
        }
        files.write(self.out / "sweep.json", json.dumps(content, indent=1))


# ---------------------------------------------------------------- making it


def make_sweep(settings, arms, trainer=runs.TRAINER, elsewhere=False):
    """A Sweep from its SweepSettings and its arms. Raises UserError for any mistake before anything
    is written. elsewhere: other machines run it."""
    config = settings.config
    base = settings.base
    if not config.dry_run:
        check_out_dir(Path(config.out_dir), resuming=True)
        if checkpoint.steps(config.out_dir):
            raise UserError("a run of train.py is here", config.out_dir, "choose another --out_dir")
    stored = stored_plan(config.out_dir)
    arms = {arm.name: arm for arm in arms}
    for arm in arms.values():
        check_arm(arm, base)
    data, tokenizer, counted = open_data(base)  # may prepare a text, with a bar of its own
    tokenizer.encode(config.prompt)
    with doing("checking the arms") as show:
        check_arms(arms, data["vocab_size"], show)

    machine = find_machine(base["device"], config.workers, elsewhere)
    settle_arms(arms, settings, data, machine)
    with doing("computing the fingerprints of the arms") as show:
        fingerprints = identify(arms, data, config.out_dir, show)

    values = base_values(arms[BASE], data)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    same_base = stored and hashes(stored["arms"][stored["base"]]) == hashes(vars(arms[BASE]))
    kept = stored if same_base else {}  # what was fixed earlier, for the same base only
    check_planned(kept, config)
    # The replicate takes the rate of the base.
    tuned = [name for name, arm in arms.items() if not arm.curve and not arm.replicate]
    sweep = Sweep(
        config=config,
        command=command_of(settings, kept),
        trainer=trainer,
        machine=machine,
        arms=arms,
        data=data,
        ngrams=ngrams.yardsticks(counted, tokens_of(values), values["block_size"]),
        fingerprints=fingerprints,
        started=stored.get("started", now),
        chosen_lr={},
        grids={name: list(config.lr_grid) for name in tuned},
        margin=config.margin,
        margin_source="given",
    )
    take_over(sweep, kept)
    return sweep


def settle_arms(arms, settings, data, machine):
    """Give each arm its values on this machine, its match with the base, and the id of these."""
    values = {"vocab_size": data["vocab_size"]} | arms[BASE].values
    device_values = settle_machine(machine, settings.base, values)
    threads = machine.threads if machine.device_kind == "cpu" else None
    for arm in arms.values():  # the base first
        arm.values |= device_values
        match_arm(arm, arms[BASE], settings.config.match, data["vocab_size"])
        arm.config_hash = config_hash(arm.values, data, machine.facts["torch"], threads)


def take_over(sweep, kept):
    """Give a sweep the margin and the rates that were fixed earlier: kept, a plan or {}."""
    config = sweep.config
    if config.margin in (None, kept.get("margin")):
        sweep.margin = kept.get("margin")
        sweep.margin_source = kept.get("margin_source")
    if config.lr_grid == [1]:
        names = [name for name, arm in sweep.arms.items() if not arm.curve]
        sweep.chosen_lr = parent_rates(config, names)
    else:
        rates = kept.get("chosen_lr", {})
        sweep.chosen_lr = {name: rate for name, rate in rates.items() if name in sweep.arms}


def stored_plan(folder):
    """The content of FOLDER/sweep.json; {} if there is none."""
    return plans.plan(folder) if (Path(folder) / "sweep.json").exists() else {}


def hashes(facts):
    """[id of the code, id of the configuration] of an arm of a plan, or of a row."""
    return [facts.get(key) for key in plans.HASHES]


def command_of(settings, kept):
    """The command that continues a sweep, with the margin that was given earlier."""
    arguments = settings.arguments
    if settings.config.margin is None and kept.get("margin_source") == "given":
        arguments = [*arguments, f"--margin={kept['margin']}"]
    return shlex.join(["python", "bench/ablate.py", *arguments])


def check_planned(kept, config):
    """Raise UserError if other runs or another margin are asked for than a sweep with reported arms
    had planned: its verdicts are of what was planned. Without --margin it keeps its own."""
    planned = {key: kept.get(key, getattr(config, key)) for key in PLANNED}
    asked = {key: getattr(config, key) for key in PLANNED}
    if asked["margin"] is None:
        asked["margin"] = planned["margin"]
    if asked == planned:  # always, where no plan is kept
        return
    stored = read_rows(Path(config.out_dir) / "rows.jsonl", rows.is_row)
    control = plans.control_group(kept)
    if not any(row["purpose"] == "report" and row["arm"] not in control for row in stored):
        return
    old = ", ".join(f"{key}={value}" for key, value in planned.items() if value is not None)
    new = ", ".join(f"{key}={value}" for key, value in asked.items() if value != planned[key])
    next_seed = planned["first_seed"] + max(plans.planned_runs(kept, planned["seeds"]).values())
    if next_seed > 500:  # first_seed is at most 500
        next_seed = 0
    what = f"arms are reported here, as planned with {old}"
    fix = f"choose another --out_dir, with --first_seed={next_seed}"
    raise UserError(what, f"asked: {new}", fix)


def check_arms(arms, vocab_size, show):
    """Raise UserError for an arm that computes the same as the arm it is compared with."""
    for number, arm in enumerate(arms.values(), 1):
        show(f"{arm.name}: arm {number} of {len(arms)}")
        if arm.name != BASE and not arm.replicate:
            check_changes_output(arm, arms[arm.against], vocab_size)


def find_machine(device, workers, elsewhere):
    """The Machine of a sweep. Raises UserError if it lacks the device, unless the runs are for
    other machines: a login node, which has no GPU, can still plan."""
    is_here = True
    try:
        find_device(device)
    except UserError:
        if not elsewhere:
            raise
        is_here = False
    slots = runs.worker_slots(workers, device)
    return Machine(device, is_here, slots, versions(device))


def settle_machine(machine, base, values):
    """The device, number format and compilation of all runs, as train.py chooses them for the run
    of the base, which has these values. A login node chooses for today's GPUs."""
    kind = machine.device_kind
    dtype = base.get("dtype", "auto")
    if kind == "cpu":
        runtime = fingerprint.start_run(values).runtime
        return {"device": kind, "dtype": runtime.dtype, "compile": runtime.compile}
    runtime = Runtime(kind, "float32", compile=base["compile"] is not False)
    if machine.is_here:
        runtime.choose_compile(base["compile"], math.inf)
    if dtype == "auto":
        dtype = choose_dtype(kind)[0] if machine.is_here else "bfloat16"
    return {"device": kind, "dtype": dtype, "compile": runtime.compile}


def identify(arms, data, out_dir, show):
    """Set the code_hash of each arm to the id of its fingerprint, and print the arms whose code has
    changed since it was stored. Returns the lines of fingerprints.jsonl."""
    lines = identity.stored(out_dir)
    known = identity.by_configuration(lines)
    for number, arm in enumerate(arms.values(), 1):
        show(f"{arm.name}: arm {number} of {len(arms)}")
        values = {"vocab_size": data["vocab_size"]} | arm.values
        numbers = fingerprint.compute(values, data["kind"])
        new = identity.line_of(arm.name, values, data["kind"], numbers)
        line, changed = identity.recognise(known, new, fingerprint.twins)
        arm.code_hash = line["id"]
        if line not in lines:
            lines.append(line)
        if changed:
            say(f"the code of {arm.name} computes something else: {'; '.join(changed)}")
    return lines


def base_values(base, data):
    """All keys of train.py of the base, with their defaults."""
    model = configure({"vocab_size": data["vocab_size"]} | base.values, as_variant=True)
    return asdict(build(TrainConfig, base.values)) | asdict(model)


def parent_of(config):
    """The folder of the sweep of which this sweep is a column; None if it is no column."""
    return Path(config.out_dir).parent if isinstance(config.also, str) else None


def parent_rates(config, arms):
    """{arm: its rate in the sweep of which this one is a column}; {} for a sweep that is no column.
    Raises UserError if some of the arms have no rate yet."""
    parent = parent_of(config)
    if parent is None:
        return {}
    content = stored_plan(parent)
    rates = content.get("chosen_lr", {})
    missing = [arm for arm in arms if arm not in rates]
    if missing and content.get("lr_grid") != [1]:
        fix = "run the sweep without --also first"
        what = f"no rate is chosen yet for {', '.join(missing)}"
        raise UserError(what, parent / "sweep.json", fix)
    return {arm: rates[arm] for arm in arms if arm in rates}
