"""The plan of a measurement in many settings: its settings, its parts, and what narrows them."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from bench.ablation.arms import BASE, Arm
from common.configurator import (
    PathName,
    PositiveInt,
    Range,
    build,
    check,
    compile_file,
    find,
    find_file,
    from_text,
    keys,
    load,
)
from common.errors import UserError, nearest
from parts.architectures import configure
from parts.variant import VariantConfig
from training.settings import RENAMED, TrainConfig

# The product of these keys: the tokens that a run sees.
TOKENS = ("max_iters", "gradient_accumulation_steps", "batch_size", "block_size")
# A setting gives each of these keys, and perhaps others.
NEEDED = """
    dataset model n_embd n_layer block_size batch_size max_iters warmup_iters
    optimizer learning_rate eval_tokens device dtype compile
""".split()  # noqa: SIM905
HELD_OUT = "held_out"  # --settings=held_out names all settings of the test
PREDICTIONS = "predictions.json"  # in out_dir: what is predicted for the settings of the test


@dataclass
class SettingsConfig:
    OFTEN = ["out_dir", "settings", "arms", "passes", "workers", "dry_run"]
    out_dir: PathName = "out-settings"  # a folder for each setting
    #: {name: keys of train.py}; typed: names with commas, held_out, or N for the first N
    settings: dict | str | None = None
    # in the config file
    held_out: dict | None = None  # settings of the test, which run only when they are named
    #: typed: names, RoPE,"QK norm", or parts of your own, '{"mine": {"mlp": "my_word"}}', or, where
    #: a base has it, '{"mine": {"put_in": {...}, "take_out": {...}}}'; None: all of the file's
    arms: dict | str | None = None
    more_arms: dict | None = None  # further parts, which run only when --arms names them
    #: 1: each arm at the base's best rate; 2: also at 0.7 and 1.4 times that rate
    passes: Annotated[int, Range(least=1, most=2)] = 1
    workers: PositiveInt | None = None  # runs at a time, each on one thread; None: one per core
    dry_run: bool = False  # print the runs that are left and their hours, and stop


def tokens_of(values):
    """The tokens that a run sees."""
    values = {"gradient_accumulation_steps": 1} | values
    return math.prod(values[key] for key in TOKENS)


@dataclass
class Setting:
    """One setting: a base, and what it trains on."""

    name: str
    values: dict  # keys of train.py
    held_out: bool

    @property
    def factors(self):
        """{factor: its level}. AdamW's length is halved: the plan gives it twice Muon's tokens."""
        text, _, tokens = self.values["dataset"].rpartition("_")
        trained = tokens_of(self.values) / 1e6
        if self.values["optimizer"] == "adamw":
            trained /= 2
        return {
            "text": text or tokens,
            "tokens": tokens,
            "optimizer": self.values["optimizer"],
            "base": self.values["model"],
            "width": self.values["n_embd"],
            "layers": self.values["n_layer"],
            "length": round(trained, 1),
            "context": self.values["block_size"],
        }


@dataclass
class Part:
    """A part, and the changes that put it into a base or take it out. A change may be a function of
    the base's values."""

    name: str
    put_in: dict = field(default_factory=dict)
    take_out: dict = field(default_factory=dict)
    only: dict = field(default_factory=dict)  # values that a base must have for the part to fit

    def fits(self, values):
        """Whether it can be measured in the base with these values."""
        known = vars(configure(values, as_variant=True)) | values
        return all(known.get(key) == value for key, value in self.only.items())

    def is_in(self, values):
        """Whether the base with these values has the part already."""
        model = configure(values, as_variant=True)
        put_in = resolved(self.put_in, values)
        put_in = {key: value for key, value in put_in.items() if hasattr(model, key)}
        return bool(put_in) and all(getattr(model, key) == put_in[key] for key in put_in)

    def arm(self, values):
        """The Arm of the part in a base with these values. Raises UserError if the base has the
        part, and nothing says how to take it out."""
        if not self.is_in(values):
            return Arm(self.name, resolved(self.put_in, values))
        if not self.take_out:
            fix = 'write {"put_in": {...}, "take_out": {...}}'
            raise UserError(f"the base {values['model']} has it already", f"arm {self.name}", fix)
        return Arm(self.name, resolved(self.take_out, values))


def resolved(changes, values):
    """Changes as values: a function is called with the values of the base."""
    found = {}
    for key, change in changes.items():
        found[key] = change(values) if callable(change) else change
    return found


@dataclass
class Plan:
    """What a command asks for."""

    config: SettingsConfig
    settings: list  # of Setting, in the order in which they run
    parts: list  # of Part

    @property
    def out(self):
        return Path(self.config.out_dir)


def is_asked(argv):
    """Whether a config file of a command line names settings."""
    names = [word for word in argv if word.endswith(".py") and not word.startswith("-")]
    return any("settings" in compile_file(find_file(name))[1] for name in names)


def read(argv, usage):
    """The Plan of a command line. Raises UserError for a name or a value that does not exist."""
    given = load(argv, [SettingsConfig], usage)
    if given.words:
        fix = "write --key=value, or name a config file that ends in .py"
        raise UserError(f"cannot read {given.words[0]}", "command line", fix)
    typed = {key: value for key, value in given.typed.items() if key not in ("settings", "arms")}
    config = build(SettingsConfig, given.in_files | typed)
    for key in ("settings", "arms"):
        if isinstance(getattr(config, key), str):
            fix = f"write a dictionary, or type --{key}=NAMES"
            raise UserError("this key of a config file is a text", key, fix)
    if not config.settings:
        raise UserError("there are no settings", "settings", 'write settings = {"a": {...}}')
    settings = [Setting(name, values, False) for name, values in config.settings.items()]
    settings += [Setting(name, values, True) for name, values in (config.held_out or {}).items()]
    for setting in settings:
        if not isinstance(setting.name, str) or not re.fullmatch(r"\w[\w.+-]*", setting.name):
            fix = "use a text of letters, digits and . + - _"
            raise UserError("this cannot name a folder", f"setting {setting.name}", fix)
        check_values(setting.values, setting.name)
    parts = parts_of(config.arms or {})
    more_parts = parts_of(config.more_arms or {})
    settings = chosen_settings(settings, given.typed.get("settings"))
    parts = chosen_parts(parts, more_parts, given.typed.get("arms"))
    for part in parts:
        if "arms" in given.typed and not any(part.fits(each.values) for each in settings):
            raise UserError("it fits none of these settings", f"arm {part.name}", "choose others")
    return Plan(config=config, settings=settings, parts=parts)


def check_values(values, name):
    """Convert the values of a setting. Raises UserError for a key that train.py does not have, and
    for one of NEEDED that is missing."""
    if not isinstance(values, dict):
        raise UserError("its values are not a dict", f"setting {name}", "give keys of train.py")
    missing = [key for key in NEEDED if key not in values]
    if missing:
        raise UserError(f"no {', '.join(missing)}", f"setting {name}", "add them")
    known = keys(TrainConfig, VariantConfig)
    for key, value in values.items():
        where = f"setting {name}: {key}={value}"
        values[key] = check(key, value, find(key, known, RENAMED, where), where)


def chosen_settings(settings, typed):
    """The settings that --settings names; all but the test's if it is not typed."""
    planned = [setting for setting in settings if not setting.held_out]
    test = [setting for setting in settings if setting.held_out]
    if typed is None:
        return planned
    if typed.isdecimal() and int(typed):
        return planned[: int(typed)]
    if typed == HELD_OUT:
        return test
    named = {setting.name: setting for setting in settings}
    return [pick(named, name, "settings") for name in dict.fromkeys(typed.split(","))]


def chosen_parts(parts, more_parts, typed):
    """The parts that --arms names or describes; if it is not typed, those that run first."""
    if typed is None:
        return parts
    named = {part.name: part for part in [*parts, *more_parts]}
    if typed.startswith("{"):
        own = parts_of(check("arms", from_text(typed, dict), dict, f"--arms={typed}"))
        for part in own:
            if part != named.get(part.name, part):
                raise UserError("the plan has another", f"arm {part.name}", "choose a new name")
        return own
    return [pick(named, name, "arms") for name in dict.fromkeys(typed.split(","))]


def pick(named, name, key):
    """named[name]. Raises UserError if there is none."""
    if name not in named:
        fix = nearest(name, named) or f"choose from {', '.join(named)}"
        raise UserError(f"{key} has no {name}", f"--{key}", fix)
    return named[name]


def parts_of(arms):
    """The parts that the key `arms` describes."""
    parts = []
    for name, changes in arms.items():
        if re.fullmatch(rf"{BASE}( x[\d.e+-]+)?", str(name)):
            raise UserError("the base or its curve has this name", f"arms: {name}", "rename it")
        is_arm = isinstance(changes, dict)
        if is_arm and not set(changes) <= {"put_in", "take_out", "only"}:
            changes = {"put_in": changes}
        if is_arm:
            is_arm = changes and all(isinstance(each, dict) for each in changes.values())
        if not is_arm:
            fix = 'write arms = {"RoPE": {"put_in": {...}, "take_out": {...}}}'
            raise UserError("an arm is a name and its changes", f"arms: {name!r}", fix)
        parts.append(Part(name, **changes))
    return parts
