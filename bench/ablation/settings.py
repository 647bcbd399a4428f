"""The settings of a sweep, and the reading of its command line."""

import re
from dataclasses import dataclass
from typing import Literal

from common.configurator import PositiveInt, build, keys, load
from common.errors import UserError
from common.runtime import find_device
from parts.architectures import configure
from parts.variant import VariantConfig
from training.settings import RENAMED, TrainConfig, shorten_warmup
from training.settings import scope as scope_of_run

# Keys of train.py that the sweep gives each run.
OWNED = (
    *("seed", "data_seed", "init_from", "overwrite", "eval_only", "allow_data_change"),
    *("wandb_run_name", "dry_run", "doctor", "check"),
)
# Keys of train.py that each command of a sweep states, even at their defaults.
SPOKEN = (
    *("dataset", "max_iters", "eval_interval", "batch_size", "learning_rate"),
    *("device", "compile"),
)
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass
class AblateConfig:
    question: str = "Which part helps at this scale?"  # what the report answers
    out_dir: str = "out-ablate"  # the folder of the sweep
    #: leave_one_in leave_one_out ladder axis archs pairs arms factorial scale; several with commas
    design: str = ""
    arms: dict | None = None  # arms given by hand: {"rope": dict(position="rope")}
    axis: str | None = None  # the slot whose words are all tried; if given alone, it is the design
    order: list | None = None  # rungs of design ladder: slots or names of arms; None: all slots
    archs: list | None = None  # architectures of design archs; None: all dense ones
    factors: list | dict | None = None  # of design factorial: slots, or {name: [dict(), dict()]}
    resolution: PositiveInt | Literal["full"] = 5  # of design factorial: what may be mixed
    sizes: dict | None = None  # of design scale: {"small": dict(n_embd=32)}, the smallest first
    match: Literal["params", "flops", "time", "none"] = "params"  # what each arm and the base share
    again: bool = True  # run the base a second time from other weights: the effect of chance alone
    seeds: PositiveInt = 8  # runs to report for each arm; with a budget: at the first look
    curve: list | None = None  # the base at these multiples of its tokens; None: [0.25, 0.5, 2]
    curve_seeds: PositiveInt = 3  # runs for each of them
    budget: str | None = None  # 90s, 15m, 2h: spend this time on more seeds for undecided arms
    lr_grid: list | None = None  # learning rates to choose from, as multiples; None: [0.5, 1, 2]
    tune_seeds: PositiveInt = 2  # runs for each point of lr_grid, on seeds that are not reported
    metric: Literal["final_val_loss", "best_val_loss"] = "final_val_loss"  # the report's first loss
    margin: float | None = None  # smallest loss difference that counts; None: 5 % of the tokens
    screening: bool = False  # few seeds, and by default no curve and no tuning: it only ranks
    prompt: str = ""  # start of the samples in the report
    processes: PositiveInt = 1  # of a run: with more than one, torchrun starts it
    workers: PositiveInt | None = None  # runs at a time; None: one per GPU. With ray: runs per GPU
    limit: str | None = None  # time after which a run has failed; None: ten times its prediction
    engine: Literal["local", "ray"] = "local"  # where runs are started
    emit: Literal["slurm"] | None = None  # write an array job; run again without emit to gather it
    time_forms: bool | None = None  # time arms eager and compiled; None: see docs/ablation.md
    dry_run: bool = False  # print arms, costs, commands and the predicted time, and stop

    def __post_init__(self):
        if self.emit and self.match == "time":
            raise ValueError(
                "match=time needs the arms timed on the machine that trains: "
                "leave emit out, or give match=params"
            )
        if self.match == "time" and self.processes > 1:
            raise ValueError("match=time times one process: give match=params, or processes=1")
        if self.lr_grid is None:
            self.lr_grid = [1] if self.screening else [0.5, 1, 2]
        if self.curve is None:
            self.curve = [] if self.screening or self.design == "factorial" else [0.25, 0.5, 2]
        for key in ("lr_grid", "curve"):
            setattr(self, key, multiples(key, getattr(self, key)))
        if 1 in self.curve:
            raise ValueError("curve holds 1, which is the base itself: leave it out")
        if not self.lr_grid:
            raise ValueError("lr_grid is empty: give [1] for the base's rate alone")
        if self.time_forms is None:
            many_arms = "factorial" in self.design or "scale" in self.design
            self.time_forms = not (self.screening or self.dry_run or many_arms)
        self.patient = not (self.screening or self.dry_run) or self.match == "time"
        self.budget_seconds = parse_duration(self.budget, "budget")
        self.limit_seconds = parse_duration(self.limit, "limit")


def multiples(key, values):
    """Different positive numbers as floats, without repetitions."""
    if any(type(value) not in (int, float) or value <= 0 for value in values):
        fix = "give numbers above 0"
        raise ValueError(f"{key}={values} holds a value that is not a positive number: {fix}")
    return [float(value) for value in dict.fromkeys(values)]


def parse_duration(text, key):
    """Seconds of 90s, 15m, 2h or 1d; None for None or 0."""
    found = re.fullmatch(r"([\d.]+)\s*([smhd]?)", text or "0")
    try:
        return float(found[1]) * UNITS[found[2]] or None
    except (TypeError, ValueError):
        raise ValueError(f"{key}={text} is not a duration: write 90s, 15m or 2h") from None


def part_name(key, value):
    """The name of an arm: for a part its name, such as rope; for other keys such as bias=none."""
    named = key in ("position", "norm", "mlp", "mixer", "block") and value != "none"
    return value if named else f"{key}={value}"


def variant_config(values, vocab_size=None):
    """The VariantConfig of a run's keys, with every slot named, also where the run uses a readable
    model. `vocab_size` is the dataset's, which a vocab_size among the values overrides."""
    values = {key: value for key, value in values.items() if (key, value) != ("arch", None)}
    known = {} if vocab_size is None else {"vocab_size": vocab_size}
    return configure({"arch": values["model"]} | known | values)


def read(argv, usage):
    """(AblateConfig, {key of train.py: value}) of a command line and its config files."""

    def scope(given):
        device = given.get("device", "auto")
        if given.get("emit") and device != "auto":  # a login node has no GPU
            return {"device": device, "device_memory": 0.0}
        return scope_of_run(given)

    given, words = load(argv, [TrainConfig, VariantConfig, AblateConfig], usage, scope, RENAMED)
    given = shorten_warmup(given, argv)
    if words:
        fix = "write --key=value, or name a config file that ends in .py"
        raise UserError(f"cannot read {words[0]}", "command line", fix)
    config = build(AblateConfig, given)
    base = {key: value for key, value in given.items() if key not in keys(AblateConfig)}
    for key in OWNED:
        if key in base:
            what = f"the sweep gives each run its own {key}"
            raise UserError(what, f"{key}={base[key]}", "leave it out")
    model = "llama" if "leave_one_out" in config.design.split(",") else "gpt2"
    defaults = {key: getattr(TrainConfig, key) for key in SPOKEN}
    base = defaults | {"block_size": VariantConfig.block_size, "model": model} | base
    if base["device"] == "auto":
        base["device"] = find_device("auto")
    return config, base
