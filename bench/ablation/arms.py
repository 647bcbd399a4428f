"""
The settings of a sweep and its arms: enumerated from the dictionaries of variants.py by a design, checked before anything runs (each is
valid and changes something), and matched in cost to the base.
"""

import ast
import itertools
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from bench.ablation import launch
from bench.ablation.measure import variant_config
from common.configurator import allowed, build, check, find, keys, load
from common.errors import UserError
from common.files import ROOT
from common.runtime import find_device
from parts import costs
from parts.architectures import ARCH, choose, idle
from parts.variant import Variant, VariantConfig
from prepare import SMALL, prepare
from tokens.token_files import fingerprint, load_meta, load_split, load_tokenizer
from training.settings import RENAMED, TrainConfig, read_config

DESIGNS = ("leave_one_in", "leave_one_out", "ladder", "axis", "archs", "pairs", "arms")
OWNED = (
    "seed",
    "data_seed",
    "init_from",
    "overwrite",
    "eval_only",
    "allow_data_change",
    "wandb_run_name",
    "dry_run",
    "doctor",
    "check",
)  # keys of train.py that the sweep gives each run
DATA = (
    "dataset",
    "data_weights",
    "data_alpha",
    "data_dir",
    "eval_tokens",
    "eval_interval",
    "vocab_size",
    "device",
    "dtype",
    "compile",
    "parallel",
    "log_interval",
    "wandb_log",
    "wandb_project",
)  # the same for all arms
BY_VALUE = ("dropout", "block_size")  # keys of the model that bite in training alone


@dataclass
class AblateConfig:
    question: str = "Which part helps at this scale?"  # what the report answers
    out_dir: str = "out-ablate"  # the folder of the sweep
    design: str = ""  # leave_one_in leave_one_out ladder axis archs pairs arms, several with commas; arms: those given by hand alone
    arms: dict | None = None  # by hand: {"rope": dict(position="rope")}
    axis: str | None = None  # the slot whose words are all tried; by itself it is the design
    order: list | None = (
        None  # of design ladder: its rungs, slots or names of arms; None: all slots in which the corners differ
    )
    archs: list | None = None  # of design archs: which; None: all
    match: Literal["params", "flops", "time", "none"] = (
        "params"  # what each arm shares with the base: by MLP width, or (time) by steps
    )
    again: bool = True  # the base once more from other initialisations: what chance alone does
    seeds: int = 3  # pairs of runs reported for each arm; with a budget: before the first look
    budget: str | None = (
        None  # 90s, 15m, 2h: more seeds for undecided arms until this time is spent
    )
    lr_grid: list | None = (
        None  # multiples of the learning rate, the best chosen for each arm; None: [1], not tuned
    )
    tune_seeds: int = 2  # runs for each point of the grid, on seeds that are not reported
    metric: Literal["final_val_loss", "best_val_loss"] = (
        "final_val_loss"  # shown first, and what chooses a rate
    )
    margin: float | None = (
        None  # nats per token below which a difference is none; None: one standard deviation of the base's runs
    )
    screening: bool = False  # a small setting: the report says so in its first line
    prompt: str = ""  # of the samples side by side
    workers: int | None = (
        None  # runs at a time; None: one for each GPU, or one. With ray: runs that share a GPU
    )
    limit: str | None = (
        None  # time of a run beyond which it has failed; None: ten times the prediction, 10 minutes at least
    )
    engine: Literal["local", "ray"] = "local"
    emit: Literal["slurm"] | None = (
        None  # write an array job instead of running; the same command without emit gathers
    )
    dry_run: bool = (
        False  # print the arms, their costs, the commands and the predicted time, and stop
    )

    def __post_init__(self):
        for key in ("seeds", "tune_seeds", "workers"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} is below 1: give 1 or more")
        if self.emit and self.match == "time":
            raise ValueError(
                "match=time needs the arms timed on the machine that trains: leave emit out, or give match=params"
            )
        self.lr_grid = self.lr_grid or [1]
        if any(type(multiple) not in (int, float) or multiple <= 0 for multiple in self.lr_grid):
            raise ValueError(
                f"lr_grid={self.lr_grid} holds what is no multiple of a learning rate: give numbers above 0"
            )
        self.lr_grid = [float(multiple) for multiple in self.lr_grid]
        self.budget_seconds, self.limit_seconds = (
            seconds(self.budget, "budget"),
            seconds(self.limit, "limit"),
        )


def seconds(text, key):
    """90s, 15m, 2h or 1d in seconds."""
    found = re.fullmatch(r"([\d.]+)\s*([smhd]?)", text or "0")
    try:
        return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] or None
    except (TypeError, ValueError):
        raise ValueError(f"{key}={text} is no time: write 90s, 15m or 2h") from None


# ---------------------------------------------------------------- designs


@dataclass
class Arm:
    name: str
    changes: dict  # of the base's keys
    against: str = "base"  # the arm it is compared with
    again: bool = False
    pair: list | None = None  # the two arms whose changes it has together
    values: dict = field(
        default_factory=dict
    )  # keys of train.py's command line, without seeds and out_dir
    match: dict | None = None
    config_hash: str = ""


def name_of(key, value):
    """A part that has a name is called by it: rope, and bias=none."""
    return (
        value
        if key in ("position", "norm", "mlp", "mixer", "block") and value != "none"
        else f"{key}={value}"
    )


def enumerate_arms(config, base):
    """[Arm] of the designs, the base first, from the dictionaries of variants.py. base: {key: value} as given."""
    designs = [word for word in re.split(r"[ ,]+", config.design) if word] or ["arms"] * bool(
        config.arms
    )
    designs = designs if "axis" in designs or not config.axis else ["axis"]
    wrong = next((word for word in designs if word not in DESIGNS), None)
    if wrong or not designs:
        raise UserError(
            f"unknown design {wrong}" if wrong else "no arms",
            f"design={config.design}",
            "choose from " + ", ".join(DESIGNS),
        )
    corner = {"leave_one_in": "gpt2", "leave_one_out": "llama"}
    for word in designs:
        if base.get("model", "gpt2") != corner.get(word, base.get("model", "gpt2")):
            raise UserError(
                f"{word} starts from {corner[word]}",
                f"model={base.get('model', 'gpt2')}",
                f"give model={corner[word]}, or another design",
            )
    here, other = (
        variant_config({"model": "gpt2"} | base),
        ARCH["llama" if base.get("model", "gpt2") == "gpt2" else "gpt2"],
    )
    parts = {
        key: value for key, value in other.items() if getattr(here, key) != value
    }  # what the other corner has and the base has not
    arms, by_hand = [Arm("base", {})], {}
    for name, changes in (config.arms or {}).items():
        if (
            not isinstance(changes, dict)
            or not changes
            or not isinstance(name, str)
            or not re.fullmatch(r"[\w=.+, -]+", name)
        ):
            raise UserError(
                "an arm is a name and its changes",
                f"arms: {name!r}",
                'write arms = {"rope": dict(position="rope")}',
            )
        by_hand[name] = Arm(name, changes)
    single = [Arm(name_of(key, value), {key: value}) for key, value in parts.items()]
    if {"leave_one_in", "leave_one_out"} & set(designs) or designs == ["pairs"] and not by_hand:
        arms += single
    if "ladder" in designs:
        sofar, last = {}, "base"
        for rung in config.order or list(parts):
            if rung not in parts and rung not in by_hand:
                raise UserError(
                    f"no rung {rung}",
                    f"order={config.order}",
                    "choose from " + ", ".join([*parts, *by_hand]),
                )
            change = {rung: parts[rung]} if rung in parts else by_hand.pop(rung).changes
            sofar = sofar | change
            arms.append(
                Arm("+" + (name_of(rung, parts[rung]) if rung in parts else rung), sofar, last)
            )
            last = arms[-1].name
    if "axis" in designs:
        words = (
            allowed(keys(VariantConfig)[config.axis])[1]
            if config.axis in keys(VariantConfig)
            else []
        )
        if not words:
            raise UserError(
                f"no axis {config.axis}",
                "axis",
                "choose a slot: "
                + ", ".join(key for key, kind in keys(VariantConfig).items() if allowed(kind)[1]),
            )
        scaled = (
            {"rope_factor": 4.0, "rope_original": here.block_size}
            if config.axis == "rope_scaling"
            else {}
        )
        arms += [
            Arm(
                name_of(config.axis, word), {config.axis: word} | (scaled if word != "none" else {})
            )
            for word in words
            if word != getattr(here, config.axis)
        ]
    if "archs" in designs:
        wrong = next((word for word in config.archs or [] if word not in ARCH), None)
        if wrong:
            raise UserError(
                f"unknown architecture {wrong}", "archs", "choose from " + ", ".join(ARCH)
            )
        arms += [
            Arm(word, {"arch": word})
            for word in config.archs or ARCH
            if word != base.get("model", "gpt2")
        ]
    arms += by_hand.values()
    if "pairs" in designs:
        arms += [
            Arm(f"{a.name} and {b.name}", a.changes | b.changes, pair=[a.name, b.name])
            for a, b in itertools.combinations(
                [arm for arm in arms[1:] if arm.against == "base"], 2
            )
            if not a.changes.keys() & b.changes.keys() and "arch" not in a.changes | b.changes
        ]
    arms += [Arm("base again", {}, again=True)] if config.again else []
    twice = next(
        (arm.name for arm in arms if [other.name for other in arms].count(arm.name) > 1), None
    )
    if twice or len(arms) < 2 + config.again:
        raise UserError(
            f"two arms are called {twice}" if twice else "no arms",
            f"design={config.design}",
            "give each a name of its own" if twice else "name some changes",
        )
    return arms


# ---------------------------------------------------------------- before the first run


def with_changes(base, changes):
    """The base's values with an arm's changes; an architecture fills its slots, whatever the base says of them."""
    return {
        key: value for key, value in base.items() if key not in ARCH.get(changes.get("arch"), {})
    } | changes


def check_arm(arm, base):
    """Set arm.values; UserError unless every change is a key of train.py with a value that it takes."""
    known = keys(TrainConfig, VariantConfig)
    try:
        for key, value in arm.changes.items():
            if key in (*OWNED, *DATA, "out_dir", "match", "model"):
                raise UserError(
                    f"{key} is the same for all arms",
                    f"{key}={value}",
                    "give it to the whole sweep, or leave it out",
                )
            arm.changes[key] = check(key, value, find(key, known, RENAMED, key), f"{key}={value}")
        arm.values = with_changes(base, arm.changes)
        argv = [f"--{key}={value}" for key, value in arm.values.items()]
        read_config([*argv, "--seed=0", "--out_dir=out"], "")
        variant_config(arm.values)
        config_class, _, filled = choose(arm.values)
        build(config_class, filled)
    except UserError as error:
        error.args = (f"arm {arm.name}: {error}",)
        raise


def randomised(values):
    """A Variant in float64 with nothing left at zero or one, so that every part shows; in evaluation."""
    torch.manual_seed(0)
    model = Variant(variant_config(values)).eval().double()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "slopes" not in name and tensor.is_floating_point():
            torch.nn.init.normal_(
                tensor.detach(), 0.0, 1.5 / math.sqrt(tensor.size(1)) if tensor.dim() == 2 else 0.4
            )
            if "running_var" in name:
                tensor.abs_().add_(0.5)
    return model


@torch.no_grad()
def check_bite(arm, other, vocab_size):
    """UserError, by name, if an arm changes nothing beside the arm it is compared with: a switch that is dead. The two
    models share all the weights that they can; their logits must differ."""

    def dead(why):
        raise UserError(
            f"the arm {arm.name} changes nothing: {why}",
            ", ".join(f"{key}={value}" for key, value in arm.changes.items()),
            "mend the arm or leave it out: a comparison with itself says nothing",
        )

    without = [key for key in idle(choose(arm.values)[2]) if key in arm.changes]
    if without:
        dead(f"{', '.join(without)} has no effect on the parts chosen")
    a, b = (
        values | {"vocab_size": values.get("vocab_size", vocab_size)}
        for values in (arm.values, other.values)
    )
    configs, training = (
        [variant_config(values) for values in (a, b)],
        [build(TrainConfig, values) for values in (a, b)],
    )
    for t in training:  # what None stands for
        t.lr_decay_iters = t.max_iters if t.lr_decay_iters is None else t.lr_decay_iters
        t.min_lr = t.learning_rate / 10 if t.min_lr is None else t.min_lr
    differ = {key for key, value in asdict(configs[0]).items() if value != getattr(configs[1], key)}
    if training[0] != training[1].__class__(
        **(asdict(training[1]) | {"arch": training[0].arch})
    ) or differ & set(BY_VALUE):
        return  # another optimizer, rate, schedule or dropout: it shows in training alone
    if not differ:
        dead(f"it is {other.name} already")
    one, two = randomised(b), randomised(a)
    shared = dict(one.named_parameters())
    for name, p in two.named_parameters():
        if name in shared and shared[name].shape == p.shape:
            p.copy_(shared[name])
    x = torch.randint(
        configs[1].vocab_size,
        (1, min(c.block_size for c in configs)),
        generator=torch.Generator().manual_seed(1),
    )
    before, after = one(x)[0], two(x)[0]
    if (before - after).abs().max() <= 1e-12 * before.abs().max():
        dead(f"its logits are those of {other.name}")


def match_arm(arm, base, kind, vocab_size, steps=None):
    """Give an arm what the base costs: an MLP width (params, flops), or (time) steps. Sets arm.match and arm.values."""
    if arm.name == "base" or arm.again:
        return
    c, b = (
        variant_config(values | {"vocab_size": values.get("vocab_size", vocab_size)})
        for values in (arm.values, base.values)
    )
    if kind == "time":
        own, theirs = steps[arm.name], steps["base"]
        count = max(1, round(base.values["max_iters"] * theirs / own))
        arm.match = {
            "kind": kind,
            "mlp_width": costs.mlp_width(c),
            "residual_percent": 100 * (count * own / (base.values["max_iters"] * theirs) - 1),
            "max_iters": count,
        }
        ends = (
            {"lr_decay_iters": count}
            if arm.values.get("lr_decay_iters") == arm.values["max_iters"]
            else {}
        )
        arm.values = arm.values | {"max_iters": count} | ends
        return
    width, residual = costs.match(c, b, "none")
    if kind == "flops":
        residual = 100 * (
            costs.flops_per_token(c, c.block_size) / costs.flops_per_token(b, b.block_size) - 1
        )
    if kind != "none" and residual and "mlp_width" not in arm.changes:
        try:
            width, residual = costs.match(c, b, kind)
        except ValueError as error:
            raise UserError(
                f"arm {arm.name}: {error}", f"match={kind}", "leave the arm out, or give match=none"
            ) from None
        if width != costs.mlp_width(c):
            arm.values = arm.values | {"mlp_width": width}
    arm.match = {"kind": kind, "mlp_width": width, "residual_percent": residual}


def code_hash(name="train"):
    """What training runs, in 16 digits: the source of train.py and of all it imports of ours, without comments and docstrings."""
    seen, waiting = {}, [name]
    while waiting:
        name = waiting.pop()
        path = (ROOT / name.replace(".", "/")).with_suffix(".py")
        if name in seen or not path.exists():
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        seen[name] = plain(tree)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom) and node.module
            ):  # `from room import module` names modules, too
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
    return launch.digest(seen)


def plain(node):
    """A syntax tree as lists, the same for every version of Python: what is empty is left out, and so are docstrings."""
    if isinstance(node, list):
        return [
            plain(child)
            for child in node
            if not (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            )
        ]
    if isinstance(node, ast.AST):
        return [
            type(node).__name__,
            *(
                [name, plain(value)]
                for name, value in ast.iter_fields(node)
                if value not in (None, []) and name != "kind"
            ),
        ]
    return repr(node)


def data_of(base):
    """(facts of the data set, tokenizer): prepared first if it is small, known and missing."""
    folder = Path(base.get("data_dir", "data")) / base["dataset"]
    if base["dataset"] in SMALL and not (folder / "meta.json").exists():
        prepare(base["dataset"], data_dir=base.get("data_dir", "data"))
    meta = load_meta(folder)
    tokenizer = load_tokenizer(folder, meta)
    val = load_split(folder, "val", base["block_size"])
    scored = val[1 : base.get("eval_tokens") or None]
    return {
        "dataset": base["dataset"],
        "fingerprint": fingerprint(meta),
        "train_tokens": meta["splits"]["train"]["tokens"],
        "val_tokens": len(val),
        "scored_tokens": len(scored),
        "vocab_size": meta["vocab_size"],
        "bits_per_byte": len(scored) / len(tokenizer.decode_bytes(scored)) / math.log(2),
    }, tokenizer


def read(argv, usage):
    """(AblateConfig, {key of train.py: value}) of a command line and its config files."""

    def scope(given):
        device = given.get("device", "auto")
        return {
            "device": device if given.get("emit") and device != "auto" else find_device(device)
        }  # a login node has no GPU

    given, words = load(argv, [TrainConfig, VariantConfig, AblateConfig], usage, scope, RENAMED)
    if words:
        raise UserError(
            f"cannot read {words[0]}",
            "command line",
            "write --key=value, or name a config file that ends in .py",
        )
    config = build(AblateConfig, given)
    base = {key: value for key, value in given.items() if key not in keys(AblateConfig)}
    owned = next((key for key in OWNED if key in base), None)
    if owned:
        raise UserError(
            f"the sweep gives each run its own {owned}", f"{owned}={base[owned]}", "leave it out"
        )
    first = next((word for word in config.design.split(",") if word in ("leave_one_out",)), None)
    base = {"model": "llama" if first else "gpt2"} | base
    defaults = {
        key: getattr(TrainConfig, key)
        for key in (
            "dataset",
            "max_iters",
            "eval_interval",
            "batch_size",
            "learning_rate",
            "device",
            "compile",
        )
    }
    base = defaults | {"block_size": VariantConfig.block_size} | base
    if base["device"] == "auto":
        base["device"] = scope({})["device"]
    return config, base
