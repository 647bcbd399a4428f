"""
The arms of a sweep. An arm is one change to the base. A design is a function (config, base) -> arms
and one line in DESIGN: that is all it takes to add one. The axis of a slot tries every word of its
dictionary, so a new part is an arm there.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from common.configurator import allowed, keys
from common.errors import UserError, nearest
from parts.architectures import ARCH, configure, needed
from parts.variant import VariantConfig
from training.settings import TrainConfig

BASE = "base"  # the name of the arm that changes nothing
NAMED_BY_WORD = ("position", "norm", "mlp", "mixer", "block")  # an arm is called rope, not position
TRAINING_AXES = ("optimizer", "schedule")  # keys of training that can be an axis


@dataclass
class Arm:
    """One change to the base, or the base itself."""

    name: str
    changes: dict  # {key of train.py: new value}
    against: str = BASE  # the arm that it is compared with
    replicate: bool = False  # whether it is the second copy of the base
    curve: float | None = None  # a point of the curve: the base at this multiple of its tokens
    # checks.py and sweep.py fill in the rest.
    values: dict = field(default_factory=dict)  # keys of train.py, without seeds and out_dir
    match: dict | None = None  # {"mlp_width", "adjusted": True} if matching set another width
    config_hash: str = ""
    code_hash: str = ""


def described(changes, match):
    """The changes of an arm as a text, with the width of its MLP where matching set it."""
    if match and match.get("adjusted"):
        changes = changes | {"mlp_width": match["mlp_width"]}
    texts = []
    for key, value in changes.items():
        texts.append(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}")
    return ", ".join(texts)


# ---------------------------------------------------------------- designs


def swap_each(config, base):
    """One arm for each part in which GPT-2 and LLaMA differ: the other one's part in this base."""
    return [Arm(part_name(key, value), {key: value}) for key, value in other_parts(base).items()]


def ladder(config, base):
    """One arm for each rung, compared with the arm before it. The rungs are the arms given by hand,
    or else the parts of swap_each; each keeps the changes of all rungs before it."""
    arms = []
    changes = {}
    previous = BASE
    for rung in by_hand(config, base) or swap_each(config, base):
        changes = changes | rung.changes
        arms.append(Arm("+" + rung.name, changes, against=previous))
        previous = arms[-1].name
    return arms


def axis(config, base):
    """One arm for each word of the slot `axis`, except the base's own."""
    slot = config.axis
    if slot is None:
        raise UserError("no axis is named", "design=axis", "add --axis=SLOT, such as --axis=norm")
    if not words_of(slot):
        slots = [key for key in [*keys(VariantConfig), *TRAINING_AXES] if words_of(key)]
        fix = nearest(slot, slots) or f"choose from {', '.join(slots)}"
        raise UserError(f"no axis {slot}", "axis", fix)
    here = configure(base, as_variant=True)
    own = getattr(here, slot, None)
    if slot in TRAINING_AXES:
        own = base.get(slot, getattr(TrainConfig, slot))
    arms = []
    for word in words_of(slot):
        if word == own:
            continue
        if slot == "mlp" and word == "none":  # it has no width to match
            continue
        changes = {slot: word} | needed(slot, word, here)
        if slot == "rope_scaling" and word == "none":
            changes |= {"rope_factor": 1.0}
        elif slot == "rope_scaling" and own == "none":
            changes |= {"rope_factor": 4.0, "rope_original": here.block_size}
        arms.append(Arm(part_name(slot, word), changes))
    return arms


def by_hand(config, base):
    """The arms that the key `arms` names."""
    arms = []
    for name, changes in (config.arms or {}).items():
        named = isinstance(name, str) and re.fullmatch(r"[\w=.+, -]+", name)
        if not named:
            fix = "use letters, digits, spaces and = . + , - _"
            raise UserError("this cannot name an arm", f"arms: {name!r}", fix)
        if not isinstance(changes, dict) or not changes:
            fix = 'write arms={"alibi": {"position": "alibi"}}'
            raise UserError("an arm is a name and its changes", f"arms: {name!r}", fix)
        arms.append(Arm(name, dict(changes)))
    return arms


DESIGN = {
    "leave_one_in": swap_each,  # in GPT-2, each part of LLaMA alone
    "leave_one_out": swap_each,  # in LLaMA, each part of GPT-2 in its place
    "ladder": ladder,  # one part after the other
    "axis": axis,  # all words of one slot
    "arms": by_hand,  # the key `arms` alone
}
# The base that a design needs. The others take any base.
STARTS_FROM = {"leave_one_in": "gpt2", "leave_one_out": "llama"}


# ---------------------------------------------------------------- all arms of a sweep


def list_arms(config, base):
    """The [Arm] of a sweep: the base, the arms of its designs and those given by hand, the base
    again, and the base at other numbers of tokens. `base` holds the given keys of train.py. Raises
    UserError for a design, an arm or an axis that does not exist."""
    check_designs(config, base)
    designs = config.designs
    # Arms given by hand are added to every design. A ladder has them as its rungs.
    if "ladder" not in designs and "arms" not in designs:
        designs = [*designs, "arms"]
    arms = [Arm(BASE, {})]
    for word in designs:
        arms += DESIGN[word](config, base)
    arms.append(Arm("base again", {}, replicate=True))
    arms += curve(config, base)
    check_names(arms, config)
    return arms


def curve(config, base):
    """The base at each multiple of its tokens, with its own full schedule."""
    arms = []
    for multiple in config.curve:
        steps = max(1, round(multiple * base.get("max_iters", TrainConfig.max_iters)))
        changes = {"max_iters": steps}
        decay_steps = steps
        if base.get("lr_decay_iters") is not None:
            decay_steps = max(1, round(multiple * base["lr_decay_iters"]))
            changes["lr_decay_iters"] = decay_steps
        warmup = base.get("warmup_iters", TrainConfig.warmup_iters)
        if warmup >= decay_steps:
            changes["warmup_iters"] = int(multiple * warmup)
        arms.append(Arm(f"base x{multiple:g}", changes, curve=multiple))
    return arms


def check_designs(config, base):
    """Raise UserError if there is no design, or one that the model excludes."""
    if not config.designs:
        fix = "choose from " + ", ".join(DESIGN)
        raise UserError("no arms", f"design={config.design}", fix)
    model = base.get("model", "gpt2")
    for word in config.designs:
        start = STARTS_FROM.get(word, model)
        if start != model:
            fix = f"give model={start}, or another design"
            raise UserError(f"{word} starts from {start}", f"model={model}", fix)


def check_names(arms, config):
    """Raise UserError if two arms have the same name, or if the base is the only arm."""
    where = f"design={','.join(config.designs)}"
    # In the names of folders, a hyphen stands for each space.
    for name, count in Counter(arm.name.replace(" ", "-") for arm in arms).items():
        if count > 1:
            raise UserError(f"two arms would write to {name}", where, "give each its own name")
    if all(arm.replicate or arm.curve or arm.name == BASE for arm in arms):
        raise UserError("no arms", where, "name some changes")


# ---------------------------------------------------------------- the dictionaries of parts


def other_parts(base):
    """{slot: word} of the other one of GPT-2 and LLaMA, where the base has another word."""
    other = "llama" if base.get("model", "gpt2") == "gpt2" else "gpt2"
    here = configure(base, as_variant=True)
    return {key: value for key, value in ARCH[other].items() if getattr(here, key) != value}


def words_of(key):
    """The words of a slot, or of a key of training that takes words; [] of any other key."""
    kinds = keys(VariantConfig) | {name: keys(TrainConfig)[name] for name in TRAINING_AXES}
    return allowed(kinds[key])[1] if key in kinds else []


def part_name(key, value):
    """The name of an arm: for a part its word, such as rope; for other keys such as bias=none."""
    if key in NAMED_BY_WORD and value != "none":
        return value
    return f"{key}={value}"
