"""Enumerate the arms of a sweep: its designs choose them from the dictionaries of parts."""

import re
from collections import Counter
from dataclasses import dataclass, field

from bench.ablation.settings import DESIGN, part_name
from common.configurator import allowed, keys
from common.errors import UserError
from parts.architectures import ARCH
from parts.costs import needed
from parts.variant import VariantConfig
from training.settings import TrainConfig, variant_config

SPARSE = ("moe", "none")  # the words of mlp that are not one dense MLP
TRAINED_BY = ("optimizer", "schedule")  # keys of training that can be an axis


@dataclass
class Arm:
    """One change to the base, or the base itself."""

    name: str
    changes: dict  # {key of the base: new value}
    against: str = "base"  # the arm that it is compared with
    replicate: bool = False  # whether it is the second copy of the base
    values: dict = field(default_factory=dict)  # keys of train.py, without seeds and out_dir
    match: dict | None = None
    curve: float | None = None  # the base at this multiple of its tokens
    config_hash: str = ""
    code_hash: str = ""


def words_of(key):
    """The words of a slot, or of a key of training that takes words; [] of any other key."""
    kinds = keys(VariantConfig) | {name: keys(TrainConfig)[name] for name in TRAINED_BY}
    return allowed(kinds[key])[1] if key in kinds else []


def enumerate_arms(config, base):
    """The [Arm] of a sweep's designs, the base first. `base` holds the given keys of train.py.
    Raises UserError for a design, an arm, a rung or an axis that does not exist."""
    designs, model = config.designs, base.get("model", "gpt2")
    check_designs(config, model)
    by_hand = arms_by_hand(config)
    here = variant_config({"model": "gpt2"} | base)
    other_corner = ARCH["llama" if model == "gpt2" else "gpt2"]
    parts = {key: value for key, value in other_corner.items() if getattr(here, key) != value}

    arms = [Arm("base", {})]
    if {"leave_one_in", "leave_one_out"} & set(designs):
        arms += [Arm(part_name(key, value), {key: value}) for key, value in parts.items()]
    if "ladder" in designs:
        arms += ladder(config.order, parts, by_hand)
        rungs = set(config.order or ()) - parts.keys()
        by_hand = {name: arm for name, arm in by_hand.items() if name not in rungs}
    if "axis" in designs:
        arms += axis(config.axis, base, here)
    if "archs" in designs:  # the dense ones, whose MLP's width can be matched in small models, too
        dense = [word for word, filled in ARCH.items() if filled["mlp"].split("_")[0] not in SPARSE]
        arms += [Arm(word, {"arch": word}) for word in dense if word != model]
    arms += by_hand.values()
    arms.append(Arm("base again", {}, replicate=True))
    check_names(arms, config)
    return arms


def check_designs(config, model):
    """Raise UserError if there is no design, or one that the model excludes."""
    if not config.designs:
        fix = "choose from " + ", ".join(DESIGN)
        raise UserError("no arms", f"design={config.design}", fix)
    for word in config.designs:
        if (DESIGN[word] or model) != model:
            fix = f"give model={DESIGN[word]}, or another design"
            raise UserError(f"{word} starts from {DESIGN[word]}", f"model={model}", fix)


def check_names(arms, config):
    """Raise UserError if two arms have the same name, or if the base is the only arm."""
    where = f"design={config.design}"
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            raise UserError(f"two arms are called {name}", where, "give each its own name")
    if all(arm.replicate or arm.name == "base" for arm in arms):
        raise UserError("no arms", where, "name some changes")


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


def axis(slot, base, here):
    """One arm per word of a slot, except the base's and mlp=none, which has no width to match."""
    if not words_of(slot):
        slots = [key for key in (*keys(VariantConfig), *TRAINED_BY) if words_of(key)]
        raise UserError(f"no axis {slot}", "axis", "choose from " + ", ".join(slots))
    own = base.get(slot, getattr(TrainConfig if slot in TRAINED_BY else here, slot))
    arms = []
    for word in words_of(slot):
        if word == own or (slot, word) == ("mlp", "none"):
            continue
        changes = {slot: word} | needed(slot, word, here)
        if slot == "rope_scaling" and word != "none":
            changes |= {"rope_factor": 4.0, "rope_original": here.block_size}
        arms.append(Arm(part_name(slot, word), changes))
    return arms


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
