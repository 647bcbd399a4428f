"""
Checks of a checkpoint's files before anything is built from them. Each function raises UserError
for the first problem and names the file and the key or tensor.
"""

import difflib
import re
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from common.configurator import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    check,
    keys,
)
from common.errors import UserError, one_line
from parts.architectures import ARCH, CORNERS, configure, make
from parts.costs import NoInitialValues
from parts.variant import VariantConfig

FORMAT = 1  # version of the checkpoint folder; raised when older code can no longer read it
FOREIGN = "choose another checkpoint: train.py did not write this one"


class State:
    """The entries of state.json. Those without a default are required."""

    format: PositiveInt
    step: NonNegativeInt
    data: str  # fingerprint of the data
    best_val_loss: float | None
    best_step: NonNegativeInt | None
    seconds: NonNegativeFloat
    best_bits_per_byte: float | None = None
    evaluated: NonNegativeInt | None = None  # the step that was evaluated last
    samples: dict | None = None  # {dataset: number of samples drawn}
    scaler: dict | None = None  # {name: number}
    wandb_id: str | None = None


def check_format(state, config, path):
    """Raise UserError if a newer version of this repo wrote the checkpoint."""
    stored = state.get("format")
    if type(stored) is int and stored > FORMAT:
        versions = config.get("versions")
        commit = versions.get("git_commit") if isinstance(versions, dict) else None
        what = f"the checkpoint has format {stored}, this code reads {FORMAT}"
        raise UserError(what, path, f"update this repo; commit {commit} wrote it")


def check_state(state, path):
    """Raise UserError unless state.json has the entries of State, each of its type and range."""
    kinds = keys(State)
    missing = [key for key in kinds if key not in state and not hasattr(State, key)]
    if missing:
        raise UserError(f"an entry is missing: {', '.join(missing)}", path, FOREIGN)
    try:
        for key in kinds.keys() & state.keys():
            check(key, state[key], kinds[key], path)
        for key in ("samples", "scaler"):
            for name, value in (state.get(key) or {}).items():
                check(f"{key}.{name}", value, float, path)
    except UserError as error:
        raise UserError(error.parts[0], path, FOREIGN) from None


def check_config(config, path):
    """Raise UserError unless the keys of the model in config.json have their declared types and
    ranges and are compatible with each other. Also refuses a key that looks like a misspelt one."""
    kinds = keys(*(config_class for config_class, _ in CORNERS.values()), VariantConfig)
    kinds |= {"model": Literal[*CORNERS], "arch": Literal[*ARCH] | None}
    if "model" not in config:
        raise UserError("the key model is missing", path, FOREIGN)
    try:
        for key, value in config.items():
            if key in kinds:
                check(key, value, kinds[key], path)
            elif near := difflib.get_close_matches(key, kinds, n=1, cutoff=0.8):
                raise UserError(f"unknown key {key}, which resembles {near[0]}", path, "")
        configure(config)
    except UserError as error:
        raise UserError(error.parts[0], path, FOREIGN) from None


def shapes_of(path):
    """{name: shape} of the tensors in a safetensors file, without reading them."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read this safetensors file: {error}", path, FOREIGN) from None


def check_sizes(config, shapes, path):
    """Raise UserError if the sizes in a configuration are not those of the tensors in its file. A
    config.json may claim any size; a wrong one must fail before a model of that size is built."""
    layers = {int(name.split(".")[1]) for name in shapes if re.match(r"blocks\.[0-9]{1,9}\.", name)}
    stored = {"n_layer": max(layers, default=-1) + 1}
    if len(shapes.get("wte.weight", ())) == 2:
        stored["vocab_size"], stored["n_embd"] = shapes["wte.weight"]
    for key, size in stored.items():
        if getattr(config, key) != size:
            what = f"{key}={getattr(config, key)}, but the weights have {size}"
            raise UserError(f"the weights do not fit the model: {what}", path, FOREIGN)


def check_shapes(config, shapes, path):
    """Raise UserError unless a configuration's model has exactly the tensors of a file, with the
    same names and shapes. The model is built on the meta device, which takes no memory."""
    try:
        with torch.device("meta"), NoInitialValues():
            expected = make(config).state_dict(keep_vars=True)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        what = f"no model has these sizes: {one_line(error)}"
        raise UserError(what, path.with_name("config.json"), FOREIGN) from None
    aliases = {}  # a tied weight has several names in the model and one in the file
    for name, tensor in expected.items():
        aliases.setdefault(id(tensor), []).append(name)

    wrong = [names[0] for names in aliases.values() if not shapes.keys() & set(names)]
    for name, shape in shapes.items():
        if name not in expected or list(expected[name].shape) != list(shape):
            wrong.append(f"{name} {shape}")
    if wrong:
        what = f"the weights do not fit the model: {first_names(wrong)}"
        raise UserError(what, path, "was it saved by another model?")


def first_names(lines, most=3):
    """The first few of a list of missing or misshapen weights, for a message."""
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
