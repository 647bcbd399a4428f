"""The settings of a sweep, and the reading of its command line."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bench.ablation.arms import DESIGN, STARTS_FROM
from common.configurator import PositiveInt, Range, Words, build, check, find, keys, load, typed
from common.errors import UserError
from common.runtime import find_device
from parts.variant import VariantConfig
from training.settings import RENAMED, TrainConfig, shorten_warmup
from training.settings import scope as scope_of_run

# Keys of train.py that the sweep gives each run.
OWNED = ["seed", "data_seed", "init_from", "overwrite", "eval_only", "allow_data_change"]
OWNED += ["dry_run", "doctor", "check"]
MOVED = ("engine", "emit", "sbatch")  # keys that extras/cluster.py has
# Keys of train.py that each command of a sweep states, even at their defaults.
STATED = ["dataset", "max_iters", "eval_interval", "batch_size", "learning_rate"]
STATED += ["device", "compile"]


@dataclass
class AblateConfig:
    OFTEN = ["out_dir", "design", "axis", "arms", "match", "seeds", "looks", "screening"]
    OFTEN += ["workers", "dry_run"]
    # the report
    question: str = "Which part helps at this scale?"  # what the report answers
    out_dir: str = "out-ablate"  # the folder of the sweep
    # the arms
    design: Words(DESIGN, several=True) = ""  # what chooses the arms; several with commas
    arms: dict | None = None  # arms given by hand: {"rope": dict(position="rope")}
    also: dict | str | None = None  # further columns: {"small": dict(n_embd=64)}; --also=small
    axis: str | None = None  # the slot whose words are all tried; replaces a design without axis
    match: Literal["params", "flops", "none"] = "params"  # what each arm and the base share
    # the runs
    seeds: PositiveInt = 8  # runs to report for each arm, at the first look
    #: runs of the base and its copy together, at least seeds + 2; None: sqrt(arms) * seeds
    controls: PositiveInt | None = None
    first_seed: Annotated[int, Range(least=0, most=500)] = 0  # of the reported runs; others confirm
    looks: PositiveInt = 1  # how often verdicts are read; after each, more seeds if undecided
    curve: list | None = None  # the base at these multiples of its tokens; None: [0.25, 0.5, 2]
    lr_grid: list | None = None  # learning rates to choose from, as multiples; None: [0.5, 1, 2]
    screening: bool = False  # few seeds, and by default no curve and no tuning: it only ranks
    # the report
    #: smallest loss difference that counts; None: what 5 % of the tokens are worth
    margin: Annotated[float, Range(least=0)] | None = None
    prompt: str = ""  # start of the samples in the report
    # the machines
    workers: PositiveInt | None = None  # runs at a time; None: one per GPU
    dry_run: bool = False  # print arms, costs, commands and the predicted time, and stop

    def __post_init__(self):
        if self.lr_grid is None:
            self.lr_grid = [1] if self.screening else [0.5, 1, 2]
        if self.curve is None:
            self.curve = [] if self.screening else [0.25, 0.5, 2]
        for key in ("lr_grid", "curve"):
            values = getattr(self, key)
            if any(type(value) not in (int, float) or value <= 0 for value in values):
                raise ValueError(f"{key}={values} holds no multiple: give numbers above 0")
            setattr(self, key, [float(value) for value in dict.fromkeys(values)])
        if 1 in self.curve:
            raise ValueError("curve holds 1, which is the base itself: leave it out")
        if 1 not in self.lr_grid:
            raise ValueError(f"lr_grid={self.lr_grid} lacks 1, the base's rate: add it")

    @property
    def designs(self):
        """The words of `design`. An axis replaces those without axis; arms alone are a design."""
        words = [word for word in self.design.split(",") if word]
        if self.axis and "axis" not in words:
            return ["axis"]
        return words or (["arms"] if self.arms else [])


ALL = (TrainConfig, VariantConfig, AblateConfig)


def split_columns(argv):
    """(a command line without --also, the names of the columns that --also lists)."""
    also = [arg for arg in argv if arg.startswith("--also=")]
    names = ",".join(arg.removeprefix("--also=") for arg in also).split(",")
    return [arg for arg in argv if arg not in also], [name for name in names if name]


def sweeps_of(argv):
    """The command line of each sweep: of each column that --also lists, or argv alone."""
    rest, columns = split_columns(argv)
    return [[*rest, f"--also={name}"] for name in columns] or [argv]


def at_column(given, name, from_command_line):
    """The values of a sweep at one of its columns: the same arms and control group, at another size
    or on another text, in a folder of its own. Keys `from_command_line` stay as they are."""
    columns = given.get("also")
    columns = columns if isinstance(columns, dict) else {}
    if not isinstance(columns.get(name), dict):
        fix = f"choose from {', '.join(columns)}" if columns else "name some: also = {...}"
        raise UserError(f"no column {name}", f"also={name}", fix)
    column, where = dict(columns[name]), f"also: {name}"
    chosen, arms = column.pop("arms", None), given.get("arms") or {}
    arms = chosen if isinstance(chosen, dict) else arms  # the column has arms of its own
    for key, value in column.items():
        column[key] = check(key, value, find(key, keys(*ALL), RENAMED, where), where)
    if chosen and "arms" not in from_command_line:
        for arm in chosen:
            if arm not in arms:
                raise UserError(f"no arm {arm}", where, f"choose from {', '.join(arms)}")
        column["arms"] = {arm: arms[arm] for arm in chosen}
    if "dataset" in column:
        given = given | {"prompt": ""}
    kept = {key: value for key, value in column.items() if key not in from_command_line}
    out = Path(given.get("out_dir", AblateConfig.out_dir), name)
    question = f"{given.get('question', AblateConfig.question)} ({name})"
    return given | {"question": question} | kept | {"out_dir": str(out), "also": name}


def read(argv, usage):
    """(AblateConfig, {key of train.py: value}) of a command line and its config files, at the
    column that --also names."""

    def scope(given):
        try:
            return scope_of_run(given)
        except UserError:  # a login node can plan for a device that it lacks
            return {"device": given["device"], "device_memory": 0.0}

    rest, columns = split_columns(argv)
    moved = f"type {shlex.join(['python', '-m', 'extras.cluster', *argv])}"
    given, words = load(rest, ALL, usage, scope, RENAMED | dict.fromkeys(MOVED, moved))
    for name in columns:
        given = at_column(given, name, typed(argv))
    given = shorten_warmup(given, argv)
    if "arms" in typed(argv) and not typed(argv) & {"design", "axis"}:  # not a config file's design
        given |= {"design": "arms", "axis": None}
    if "dataset" in typed(argv):  # a config file's question and prompt are about its own text
        for key in {"question", "prompt"} - typed(argv):
            given.pop(key, None)
    if words:
        fix = "write --key=value, or name a config file that ends in .py"
        raise UserError(f"cannot read {words[0]}", "command line", fix)
    config = build(AblateConfig, given)
    base = {key: value for key, value in given.items() if key not in keys(AblateConfig)}
    for key in OWNED:
        if key in base:
            what = f"the sweep gives each run its own {key}"
            raise UserError(what, f"{key}={base[key]}", "leave it out")
    models = [STARTS_FROM[word] for word in config.designs if word in STARTS_FROM]
    defaults = {key: getattr(TrainConfig, key) for key in STATED}
    defaults |= {"block_size": VariantConfig.block_size, "model": models[0] if models else "gpt2"}
    base = defaults | base
    if base["device"] == "auto":
        base["device"] = find_device("auto")
    return config, base
