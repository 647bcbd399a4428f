"""
Checks of a file before it is used: the values of its JSON, and the types, finiteness, names and
shapes of its tensors. Each function raises UserError for the first problem and names the file and
the key or tensor.
"""

from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.configurator import NonNegativeFloat, NonNegativeInt, PositiveInt, check, keys
from common.errors import UserError, one_line
from common.files import regular
from parts.architectures import ARCH, CORNERS, configure, make
from parts.costs import NoInitialValues
from parts.variant import VariantConfig

FORMAT = 1  # version of the checkpoint folder; raised when older code can no longer read it
FOREIGN = "choose another checkpoint: train.py did not write this one"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights


# ---------------------------------------------------------------- JSON


class State:
    """The entries of state.json. Those without a default are required."""

    format: PositiveInt
    step: NonNegativeInt
    data: str  # fingerprint of the data
    best_val_loss: float | None
    best_step: NonNegativeInt | None
    seconds: NonNegativeFloat
    best_bits_per_byte: float | None = None
    bits_of: str | None = None  # what the bytes are of; None: end tokens counted too
    order: str | None = None  # how the training samples are ordered; None: before it was stored
    evaluated: NonNegativeInt | None = None  # the step that was evaluated last
    samples: dict | None = None  # {dataset: number of samples drawn}
    scaler: dict | None = None  # {name: number}
    wandb_id: str | None = None


def check_state(state, path):
    """Raise UserError unless state.json has the entries of State, and this version can read it."""
    stored = state.get("format")
    if type(stored) is int and stored > FORMAT:
        what = f"the checkpoint has format {stored}, this code reads {FORMAT}"
        raise UserError(what, path, "update this repo")
    kinds = keys(State)
    missing = [key for key in kinds if key not in state and not hasattr(State, key)]
    if missing:
        raise UserError(f"an entry is missing: {', '.join(missing)}", path, FOREIGN)
    for key in kinds.keys() & state.keys():
        check(key, state[key], kinds[key], path)


def check_config(config, path):
    """Raise UserError unless the keys of the model in config.json have their declared types and
    ranges and are compatible with each other."""
    kinds = keys(*(config_class for config_class, _ in CORNERS.values()), VariantConfig)
    kinds |= {"model": Literal[*CORNERS], "arch": Literal[*ARCH] | None}
    try:
        for key in kinds.keys() & {*config, "model"}:
            check(key, config.get(key), kinds[key], path)
        configure(config)
    except UserError as error:
        raise UserError(error.parts[0], path, FOREIGN) from None


def check_vocabulary(tokenizer, vocab_size, where, fix):
    """Raise UserError if a tokenizer has more tokens than its model."""
    if tokenizer.vocab_size > vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}"
        raise UserError(what, where, fix)


# ---------------------------------------------------------------- tensors


def read_tensors(path, fix=FOREIGN, unread=None):
    """{name: tensor} of a safetensors file, all of them finite floating-point numbers. unread: a
    pattern of the names to leave out."""
    try:
        tensors = load_file(regular(path))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"cannot read this safetensors file: {why}", path, fix) from None
    if unread:
        tensors = {name: tensor for name, tensor in tensors.items() if not unread.search(name)}
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS and tensor.dim():  # a number alone may be a count
            what = f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}"
            raise UserError(what, path, "get the weights as float32, bfloat16 or float16")
        stored = tensor.float() if tensor.dtype == torch.float64 else tensor
        if not stored.isfinite().all():
            raise UserError(f"{name} holds NaN or infinity", path, fix)
    return tensors


def misfits(model, tensors):
    """The names that a model has and tensors {name: tensor} do not, or the reverse, and the shapes
    that differ, as text; "" if they fit. A tied weight has several names in the model and one in a
    file."""
    expected = model.state_dict(keep_vars=True)
    names = {}  # {id of a tensor: its names}
    for name, tensor in expected.items():
        names.setdefault(id(tensor), []).append(name)
    wrong = [f"no {same[0]}" for same in names.values() if not tensors.keys() & set(same)]
    wrong += [f"no place for {name}" for name in tensors if name not in expected]
    for name in tensors.keys() & expected.keys():
        stored = tuple(tensors[name].shape)
        own = tuple(expected[name].shape)
        if stored != own:
            wrong.append(f"{name} is {stored}, not {own}")
    return first_three(wrong)


def first_three(names):
    """The first three of many names, for a message."""
    names = sorted(names)
    listed = ", ".join(names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"


def check_fit(values, tensors, where, fix=FOREIGN):
    """Raise UserError unless the model that configure(values) describes has exactly these tensors
    {name: tensor}. The model is built without memory, on the meta device."""
    try:
        config = configure(values)
        if config.n_layer > len(tensors):  # more layers than that would take long to build
            wrong = f"n_layer={config.n_layer}, but there are {len(tensors)} tensors"
        else:
            with torch.device("meta"), NoInitialValues():
                wrong = misfits(make(config), tensors)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        wrong = f"no model has these sizes: {one_line(error)}"
    except UserError as error:
        wrong = error.parts[0]
    if wrong:
        raise UserError(f"the weights do not fit the model: {wrong}", where, fix)
