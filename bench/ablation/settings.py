"""The settings of a sweep, and the reading of its command line."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from bench.ablation.arms import DESIGN, STARTS_FROM
from common.configurator import (
    PathName,
    PositiveInt,
    Range,
    Words,
    build,
    check,
    find,
    keys,
    load,
    print_help,
)
from common.errors import UserError
from common.runtime import find_device
from parts.variant import VariantConfig
from training.settings import RENAMED, TrainConfig, shorten_warmup
from training.settings import scope as scope_of_run

# Keys of train.py that the sweep gives each run.
OWNED = ["seed", "data_seed", "init_from", "overwrite", "eval_only", "allow_data_change"]
# Keys of train.py that each command of a sweep states, even at their defaults.
STATED = ["dataset", "max_iters", "eval_interval", "batch_size", "learning_rate"]
STATED += ["device", "compile"]


@dataclass
class AblateConfig:
    OFTEN = ["out_dir", "design", "axis", "arms", "match", "seeds", "screening"]
    OFTEN += ["workers", "dry_run"]
    # the report
    question: str = "Which part helps at this scale?"  # what the report answers
    out_dir: PathName = "out-ablate"  # the folder of the sweep
    # the arms
    design: Words(DESIGN, several=True) = ""  # what chooses the arms; several with commas
    arms: dict | None = None  # arms by hand: '{"alibi": {"position": "alibi"}}'
    also: dict | str | None = None  # further columns: {"small": dict(n_embd=64)}; --also=small
    axis: str | None = None  # the slot whose words are all tried; replaces a design without axis
    match: Literal["params", "flops", "none"] = "params"  # what each arm and the base share
    # the runs
    seeds: PositiveInt = 8  # runs to report for each arm
    #: runs of the base and its copy together, at least seeds + 2; None: sqrt(arms) * seeds
    controls: PositiveInt | None = None
    first_seed: Annotated[int, Range(least=0, most=500)] = 0  # of the reported runs; others confirm
    curve: list | None = None  # the base at these multiples of its tokens; None: [0.25, 0.5, 2]
    lr_grid: list | None = None  # learning rates to choose from, as multiples; None: [0.5, 1, 2]
    screening: bool = False  # by default no curve and no tuning: it only ranks
    # the report
    #: smallest loss difference that counts; None: what 5 % of the tokens are worth
    margin: Annotated[float, Range(least=0)] | None = None
    prompt: str = ""  # start of the samples in the report
    # the machines
    workers: PositiveInt | None = None  # runs at a time; None: one per GPU, or one on all cores
    dry_run: bool = False  # print arms, costs, commands and the predicted time, and stop

    def __post_init__(self):
        if self.screening and self.controls:
            raise ValueError(f"controls={self.controls} is not for a screening: leave it out")
        if self.lr_grid is None:
            self.lr_grid = [1] if self.screening else [0.5, 1, 2]
        if self.curve is None:
            self.curve = [] if self.screening else [0.25, 0.5, 2]
        self.lr_grid = multiples("lr_grid", self.lr_grid)
        self.curve = multiples("curve", self.curve)
        if 1 in self.curve:
            raise ValueError("curve holds 1, which is the base itself: leave it out")
        if 1 not in self.lr_grid:
            raise ValueError(f"lr_grid={self.lr_grid} lacks 1, the given rate: add it")

    @property
    def designs(self):
        """The words of `design`. An axis replaces those without axis; arms alone are a design."""
        words = [word for word in self.design.split(",") if word]
        if self.axis and "axis" not in words:
            return ["axis"]
        return words or (["arms"] if self.arms else [])


def multiples(key, values):
    """The values of a key, each once. Raises ValueError if one is not a number above 0."""
    for value in values:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{key}={values}: {value!r} is no finite number above 0: correct it")
    return [float(value) for value in dict.fromkeys(values)]


ALL = (TrainConfig, VariantConfig, AblateConfig)


class SweepSettings(NamedTuple):
    """The settings of one sweep, from its command line and its config files."""

    config: AblateConfig
    base: dict  # {key of train.py: value}
    arguments: list  # the arguments of the command that runs this sweep alone


def read(argv, usage):
    """Read a command line and its config files. Returns [SweepSettings]: one for each column that
    --also names, or one for the sweep itself."""
    print_help(argv, usage, [AblateConfig])
    given = load(argv, ALL, usage, scope, RENAMED)
    if given.words:
        fix = "write --key=value, or name a config file that ends in .py"
        raise UserError(f"cannot read {given.words[0]}", "command line", fix)
    typed = dict(given.typed)
    columns = [name for name in str(typed.pop("also", "")).split(",") if name]
    values = given.in_files | typed
    texts = {key: text for key, text in given.texts.items() if key != "also"}
    arguments = [*given.files, *texts.values()]
    if not columns:
        return [SweepSettings(*resolve(values, typed), arguments)]
    settings = []
    for name in columns:
        config, base = resolve(at_column(values, name, typed), typed)
        settings.append(SweepSettings(config, base, [*arguments, f"--also={name}"]))
    return settings


def scope(values):
    """The names that a config file may read besides the keys, as in train.py. A machine that only
    plans, such as a login node, need not have the device."""
    try:
        return scope_of_run(values)
    except UserError:
        return {"device": values["device"], "device_memory": 0.0}


def at_column(values, name, typed):
    """The values of a sweep at one of its columns: the same arms and control group, at another size
    or on another text, in another folder. The `typed` keys stay as they are."""
    columns = values.get("also")
    if not isinstance(columns, dict):
        columns = {}
    if not isinstance(columns.get(name), dict):
        fix = 'write also = {"small": {...}} in the config file'
        if columns:
            fix = f"choose from {', '.join(columns)}"
        raise UserError(f"no column {name}", f"also={name}", fix)

    column = dict(columns[name])
    where = f"also: {name}"
    arms = values.get("arms") or {}
    chosen = column.pop("arms", None)  # the names of some arms, or arms of the column's own
    if isinstance(chosen, dict):
        arms = chosen
    for key, value in column.items():
        column[key] = check(key, value, find(key, keys(*ALL), RENAMED, where), where)
    if chosen and "arms" not in typed:
        for arm in chosen:
            if arm not in arms:
                raise UserError(f"no arm {arm}", where, f"choose from {', '.join(arms)}")
        column["arms"] = {arm: arms[arm] for arm in chosen}

    question = values.get("question", AblateConfig.question)
    out_dir = Path(values.get("out_dir", AblateConfig.out_dir)) / name
    values = values | {"question": f"{question} ({name})"}
    if "dataset" in column:
        values["prompt"] = ""
    for key, value in column.items():
        if key not in typed:
            values[key] = value
    return values | {"out_dir": str(out_dir), "also": name}


def resolve(values, typed):
    """(AblateConfig, {key of train.py: value}) of the values of a sweep."""
    values = shorten_warmup(values, typed)
    choice = typed.keys() & {"design", "axis", "arms"}
    if choice == {"arms"}:
        values |= {"design": "arms", "axis": None}  # not the config file's design
    if choice == {"axis"}:
        values |= {"design": "axis", "arms": None}  # not the config file's arms
    if "design" in choice and "axis" not in choice and "axis" not in typed["design"].split(","):
        values |= {"axis": None}  # not the config file's axis
    if "question" not in typed and typed.keys() & {"arms", "axis", "design", "dataset"}:
        values.pop("question", None)  # a config file's is about its own arms and text
    if "prompt" not in typed and "dataset" in typed:
        values.pop("prompt", None)
    config = build(AblateConfig, values)
    given = {key: value for key, value in values.items() if key not in keys(AblateConfig)}
    for key in OWNED:
        if key in given:
            what = f"the sweep gives each run its own {key}"
            raise UserError(what, f"{key}={given[key]}", "remove it")

    base = {key: getattr(TrainConfig, key) for key in STATED}
    base["block_size"] = VariantConfig.block_size
    models = [STARTS_FROM[word] for word in config.designs if word in STARTS_FROM]
    base["model"] = models[0] if models else "gpt2"
    base |= given
    if base["device"] == "auto":
        base["device"] = find_device("auto")
    return config, base
