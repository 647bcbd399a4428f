"""Translate a Hugging Face config.json into our configuration, and list the tensors it implies."""

from dataclasses import fields

import torch

from common.errors import UserError
from parts.architectures import ARCH, CORNERS, idle
from parts.variant import VariantConfig
from weights.families import FAMILIES
from weights.family import READS, ROPE_NUMBERS

LARGEST = torch.finfo(torch.float32).max
# Keys where null differs from an absent key.
NULL_COUNTS = ("sliding_window", "num_key_value_heads", "q_lora_rank", "final_logit_softcapping")
KINDS = {
    int: "a whole number above 0",
    float: "a finite number above 0",
    bool: "true or false",
    str: "a string",
}
BIASES = ("none", "norm", "all")  # ascending: each includes the one before
DEFAULTS = {field.name: field.default for field in fields(VariantConfig)}


def rows(family, values):
    """(theirs, [ours], layout) of every tensor, with layer numbers and suffixes filled in. A * in
    theirs stands for the number of each expert."""
    named = [(*row, suffix) for row in family.names for suffix in suffixes(row[1][0], values)]
    mixers = values.get("mixer", DEFAULTS["mixer"]).split(",")
    for theirs, ours, layout, suffix in named + [(*row, "") for row in family.tensors]:
        for layer in range(values["n_layer"] if "{}" in theirs else 1):
            mixer = mixers[layer % len(mixers)]
            if all(word == mixer for part, word in family.mixers.items() if part in theirs):
                names = [name.format(layer) + suffix for name in ours]
                yield theirs.format(layer) + suffix, names, layout


def suffixes(ours, values):
    """The tensors of a linear map or norm of ours."""
    if "norm" in ours:
        biased = values["norm"] == "layernorm"
    else:
        biased = values["bias"] == "all" and ours.startswith("blocks.")
    return (".weight", ".bias") if biased else (".weight",)


def first_three(names):
    """The first three of many names, for a message."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def shortened(value):
    """A value as Python writes it, cut to what fits in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def understand(config, where):
    """(family, values of VariantConfig) of their config.json. Raises UserError that names the key
    if a value has the wrong type or range, or if our model cannot express it."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = f"cannot read a model of model_type {shortened(kind)}"
        raise UserError(what, where, "choose from " + ", ".join(FAMILIES))
    family = FAMILIES[kind]
    config = family.absent | flat(family, config, where)
    check_types(family, config, where)
    check_expressible(family, config, where)

    values = family.slots | {ours: config[theirs] for ours, theirs in family.keys.items()}
    for ours, (theirs, words) in family.words.items():
        values[ours] = next(word for word, group in words.items() if config[theirs] in group)
    return family, values | family.ours(config)


def flat(family, config, where):
    """Their config.json with the keys of rope_scaling (or the newer rope_parameters) moved to the
    top level, and all keys renamed to those of the family's table."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        rope = {"type": rope}
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        what = f"our model cannot express a separate rope for {first_three(nested)}"
        raise UserError(what, where, "it needs the same rope in all layers")
    if rope:
        rope = {"rope_type": rope.get("type")} | rope
    rope = {family.in_rope.get(key, key): value for key, value in rope.items()}

    # rope_type and factor count only inside the rope's keys; the original context of the top level
    # has priority over the rope's.
    top = {family.older.get(key, key): value for key, value in config.items()}
    top = {key: value for key, value in top.items() if key not in ("rope_type", "factor")}
    original = ROPE_NUMBERS["rope_original"]
    if top.get(original) is not None:
        rope[original] = top[original]
    both = top | rope
    return {key: value for key, value in both.items() if value is not None or key in NULL_COUNTS}


def check_types(family, config, where):
    """Give absent keys their defaults, and refuse values of the wrong type or range."""
    expected = dict.fromkeys(family.keys.values(), int) | family.defaults
    if "rope_scaling" in family.words:
        for number in READS.get(str(config.get("rope_type")), []):
            expected[ROPE_NUMBERS[number]] = float if number == "rope_factor" else None
    for key, default in expected.items():
        if isinstance(default, type):  # a required key: its type stands in place of a default
            kind = default
            if key not in config:
                fix = "is this the config.json of a Hugging Face model?"
                raise UserError(f"{key} is missing", where, fix)
        else:
            kind = int if default is None else type(default)
        value = config.setdefault(key, default)
        if value is not None and not fits(value, kind):
            raise UserError(f"{key} is {shortened(value)}", where, f"it must be {KINDS[kind]}")

    # As in transformers: the original context defaults to the model's context.
    original, context = ROPE_NUMBERS["rope_original"], family.keys["block_size"]
    if original in expected and config[original] is None:
        config[original] = config[context]


def fits(value, kind):
    """Whether a value is of type `kind` and, if it is a number, positive and finite."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        return False
    return kind not in (int, float) or 0 < value <= (2**63 if kind is int else LARGEST)


def check_expressible(family, config, where):
    """Raise UserError for values that make their model another function than ours."""
    needed = {}
    for theirs, words in family.words.values():
        needed[theirs] = [word for group in words.values() for word in group]
    needed |= family.allowed(config) | {"quantization_config": (None,)}
    for key, fitting in needed.items():
        if config.get(key, fitting[0]) not in fitting:
            what = f"our model cannot express {key}={shortened(config[key])}"
            raise UserError(what, where, f"it must be {' or '.join(map(repr, fitting))}")


def simplest(values):
    """(word, values) for configure: those of a readable model if it has all the parts."""
    word = "gpt2" if values["norm"] == "layernorm" else "llama"
    own = {field.name for field in fields(CORNERS[word][0])}
    usual = DEFAULTS | ARCH[word]
    usual["mlp_width"] = 4 * values["n_embd"] if word == "gpt2" else values.get("mlp_width")
    if any(usual[key] != value for key, value in values.items() if key not in own):
        return word, {key: value for key, value in values.items() if key not in idle(values)}

    kept = {key: value for key, value in values.items() if key in own}
    if word == "gpt2":
        return word, kept | {"bias": values["bias"] == "all"}
    return word, kept | llama_width(values["mlp_width"], values["n_embd"])


def llama_width(width, n_embd):
    """The keys that give a LLaMA's MLP exactly `width` features. Our model computes
    int(multiplier * int(8C/3)); the 0.5 protects the result from a rounding error of one."""
    return {"multiple_of": 1, "ffn_dim_multiplier": (width + 0.5) / int(8 * n_embd / 3)}
