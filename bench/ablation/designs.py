"""Enumerate the arms of a sweep: its designs choose them from the dictionaries of parts."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field

from bench.ablation import factorial
from bench.ablation.settings import part_name, variant_config
from common.configurator import allowed, keys
from common.errors import UserError
from parts.architectures import ARCH
from parts.catalogue import needed
from parts.variant import VariantConfig
from training.settings import TrainConfig

SPARSE = ("moe", "none")  # the words of mlp that are not one dense MLP
DESIGNS = (
    *("leave_one_in", "leave_one_out", "ladder", "axis", "archs", "pairs", "arms"),
    *("factorial", "scale"),
)
CORNER = {"leave_one_in": "gpt2", "leave_one_out": "llama"}  # the base that a design starts from


@dataclass
class Arm:
    """One change to the base, or the base itself."""

    name: str
    changes: dict  # {key of the base: new value}
    against: str | None = "base"  # the arm it is compared with; None: a cell of a factorial
    cell: dict | None = None  # {factor: 0 or 1} in a factorial
    again: bool = False  # whether it is the second copy of the base
    interaction_of: list | None = None  # the two arms whose changes it combines
    values: dict = field(default_factory=dict)  # keys of train.py, without seeds and out_dir
    match: dict | None = None
    curve: float | None = None  # the base at this multiple of its tokens
    config_hash: str = ""
    code_hash: str = ""


def words_of(slot):
    """The words that a slot accepts; [] if the key is not a slot."""
    kinds = keys(VariantConfig)
    return allowed(kinds[slot])[1] if slot in kinds else []


def enumerate_arms(config, base):
    """The [Arm] of a sweep's designs, the base first. `base` holds the given keys of train.py.
    Raises UserError for a design, an arm, a rung or an axis that does not exist."""
    designs = chosen_designs(config, base)
    if "factorial" in designs:
        return factorial_cells(config, base)
    by_hand = arms_by_hand(config)
    model = base.get("model", "gpt2")
    here = variant_config({"model": "gpt2"} | base)
    other_corner = ARCH["llama" if model == "gpt2" else "gpt2"]
    parts = {key: value for key, value in other_corner.items() if getattr(here, key) != value}

    arms = [Arm("base", {})]
    if {"leave_one_in", "leave_one_out"} & set(designs) or designs == ["pairs"] and not by_hand:
        arms += [Arm(part_name(key, value), {key: value}) for key, value in parts.items()]
    if "ladder" in designs:
        arms += ladder(config.order, parts, by_hand)
        rungs = set(config.order or ()) - parts.keys()
        by_hand = {name: arm for name, arm in by_hand.items() if name not in rungs}
    if "axis" in designs:
        arms += axis(config.axis, here)
    if "archs" in designs:
        arms += architectures(config.archs, model)
    arms += by_hand.values()
    if "pairs" in designs:
        arms += pairs(arms[1:])
    if config.again:
        arms.append(Arm("base again", {}, again=True))
    check_names(arms, config)
    return arms


def chosen_designs(config, base):
    """The words of `design`. An axis or arms given without a design are a design, too."""
    designs = [word for word in re.split(r"[ ,]+", config.design) if word]
    if config.axis and "axis" not in designs:
        designs = ["axis"]
    elif config.arms and not designs:
        designs = ["arms"]
    unknown = [word for word in designs if word not in DESIGNS]
    if unknown or not designs:
        what = f"unknown design {unknown[0]}" if unknown else "no arms"
        raise UserError(what, f"design={config.design}", "choose from " + ", ".join(DESIGNS))
    if len(designs) > 1 and "factorial" in designs:
        fix = "give it a sweep of its own"
        raise UserError("factorial stands alone", f"design={config.design}", fix)
    model = base.get("model", "gpt2")
    for word in designs:
        if CORNER.get(word, model) != model:
            fix = f"give model={CORNER[word]}, or another design"
            raise UserError(f"{word} starts from {CORNER[word]}", f"model={model}", fix)
    return designs


def arms_by_hand(config):
    """{name: Arm} from the key `arms`."""
    arms = {}
    for name, changes in (config.arms or {}).items():
        named = isinstance(name, str) and re.fullmatch(r"[\w=.+, -]+", name)
        if not named or not isinstance(changes, dict) or not changes:
            fix = 'write arms = {"rope": dict(position="rope")}'
            raise UserError("an arm is a name and its changes", f"arms: {name!r}", fix)
        arms[name] = Arm(name, changes)
    return arms


def ladder(order, parts, by_hand):
    """One arm per rung: the changes of all rungs so far, compared with the arm before it."""
    arms, changes, previous = [], {}, "base"
    for rung in order or list(parts):
        if rung in parts:
            name, change = part_name(rung, parts[rung]), {rung: parts[rung]}
        elif rung in by_hand:
            name, change = rung, by_hand[rung].changes
        else:
            fix = "choose from " + ", ".join([*parts, *by_hand])
            raise UserError(f"no rung {rung}", f"order={order}", fix)
        changes = changes | change
        arms.append(Arm("+" + name, changes, previous))
        previous = arms[-1].name
    return arms


def axis(slot, here):
    """One arm per word of a slot but the base's, and mlp=none, which has no width to match."""
    words = words_of(slot)
    if not words:
        slots = [key for key in keys(VariantConfig) if words_of(key)]
        raise UserError(f"no axis {slot}", "axis", "choose a slot: " + ", ".join(slots))
    arms = []
    for word in words:
        if word == getattr(here, slot) or (slot, word) == ("mlp", "none"):
            continue
        changes = {slot: word} | needed(slot, word, here)
        if slot == "rope_scaling" and word != "none":
            changes |= {"rope_factor": 4.0, "rope_original": here.block_size}
        arms.append(Arm(part_name(slot, word), changes))
    return arms


def architectures(chosen, model):
    """One arm per named architecture, except the base's: those chosen, or all with a dense MLP,
    whose width can match the base's also in small models."""
    for word in chosen or ():
        if word not in ARCH:
            fix = "choose from " + ", ".join(ARCH)
            raise UserError(f"unknown architecture {word}", "archs", fix)
    dense = [word for word, parts in ARCH.items() if parts["mlp"].split("_")[0] not in SPARSE]
    return [Arm(word, {"arch": word}) for word in chosen or dense if word != model]


def pairs(arms):
    """One arm per pair of arms that change different keys of the base."""
    single = [arm for arm in arms if arm.against == "base" and "arch" not in arm.changes]
    return [
        Arm(f"{a.name} and {b.name}", a.changes | b.changes, interaction_of=[a.name, b.name])
        for a, b in itertools.combinations(single, 2)
        if not a.changes.keys() & b.changes.keys()
    ]


def curve_arms(config, base):
    """One arm per multiple of the base's tokens, each with its own full schedule."""
    arms, steps = [], base["max_iters"]
    for multiple in config.curve:
        length = max(1, round(multiple * steps))
        changes = {"max_iters": length}
        if base.get("lr_decay_iters") is not None:
            changes["lr_decay_iters"] = max(1, round(multiple * base["lr_decay_iters"]))
        warmup = base.get("warmup_iters", TrainConfig.warmup_iters)
        if warmup >= changes.get("lr_decay_iters", length):
            changes["warmup_iters"] = int(multiple * warmup)
        arms.append(Arm(f"base x{multiple:g}", changes, curve=multiple))
    return arms


def factorial_cells(config, base):
    """One arm per cell of a factorial; the base is the cell with all factors low."""
    if config.arms or config.axis:
        fix = "leave out arms and axis, or make them factors"
        raise UserError("factorial makes all arms itself", f"design={config.design}", fix)
    cells = [Arm(*cell[:2], None, cell=cell[2]) for cell in factorial.cells_of(config, base)]
    cells[0].against = "base"
    check_names(cells, config)
    return cells


def check_names(arms, config):
    """Raise UserError if two arms have the same name, or if the base is the only arm."""
    where = f"design={config.design}"
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            raise UserError(f"two arms are called {name}", where, "give each its own name")
    if all(arm.again or arm.name == "base" for arm in arms):
        raise UserError("no arms", where, "name some changes")
