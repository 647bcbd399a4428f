"""
Checks of a file before it is used: the values of its JSON, and the types, finiteness, names and
shapes of its tensors. Each function raises UserError for the first problem and names the file and
the key or tensor.
"""

import os
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from common.configurator import NonNegativeFloat, NonNegativeInt, PositiveInt, check, keys
from common.errors import Failure, UserError, is_out_of_memory, one_line
from common.files import regular
from common.runtime import find_device, memory_here
from parts.architectures import ARCH, CORNERS, MODEL_KEYS, configure, make
from parts.costs import NoInitialValues
from parts.variant import VariantConfig

FORMAT = 1  # version of the checkpoint folder; raised when older code can no longer read it
FOREIGN = "choose another checkpoint: train.py did not write this one"
CONVERT = "docs/nanogpt.md converts a ckpt.pt of nanoGPT"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights
# What the config.json of a run holds beside the keys of its model. Only earlier versions wrote the
# last two lines. The entry own_keys names the keys that only its program has. Any other key may be
# a part of the model that this code does not know.
RUN_KEYS = """
    activation_checkpointing adam_rate allow_data_change batch_size beta1 beta2 compile data_dir
    data_seed dataset device dtype eval_interval eval_only eval_tokens grad_clip
    gradient_accumulation_steps init_from learning_rate log log_interval lr_decay_iters match
    max_iters min_lr optimizer out_dir overwrite parallel schedule seed split versions warmup_iters
    weight_decay own_keys
    check data_alpha data_weights doctor dpo_beta dry_run objective
    wandb_log wandb_project wandb_run_name
""".split()  # noqa: SIM905


def check_folder(folder, where):
    """Raise UserError unless this is a folder, and neither a dataset nor one checkpoint."""
    if folder.suffix == ".pt" and folder.is_file():
        raise UserError("a pickle can run any code, so it is not read", where, CONVERT)
    if not folder.is_dir():
        raise UserError("this is not a folder", where, "give the folder it is in")
    if (folder / "meta.json").is_file() and (folder / "train.bin").is_file():
        fix = "give the run that was trained on it"
        raise UserError("this is a dataset, not a model or a run", where, fix)
    if (folder / "state.json").is_file():
        fix = f"name its run, {os.path.relpath(folder.absolute().parent.parent)}"
        raise UserError("this is a checkpoint of a run", where, fix)


def check_is_model(folder):
    """Raise UserError, which names a folder in it that may be meant, if this one is no model."""
    if not (folder / "config.json").exists():
        fix = "give a folder of a Hugging Face model, or a run folder with a checkpoint"
        inner = sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])
        if inner:
            fix = f"give the folder in it, such as {inner[-1].parent}"
            if (inner[-1].parent / "state.json").is_file():
                fix = f"name its run, {folder.parent}"
        if (folder / "ckpt.pt").is_file():
            fix = CONVERT
        if (folder / "adapter_config.json").exists():
            fix = "it is an adapter: merge it into its model (peft: merge_and_unload)"
        raise UserError("this folder has no config.json", folder, fix)


def refuse_without_tensors(folder, config):
    """Raise UserError for a model's folder without *.safetensors. config: its config.json."""
    what = "this folder has no *.safetensors file"
    fix = "get the model as safetensors"
    if "max_iters" in config:  # train.py wrote it
        what = "this run has no checkpoint"
        fix = "choose another, or train it until it saves"
    pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        what = f"{first_three(pickles)} would need unpickling, which can run any code"
    raise UserError(what, folder, fix)


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
    order: str | None = None  # how the training samples are ordered; None: before it was stored
    evaluated: NonNegativeInt | None = None  # the step that was evaluated last
    scaler: dict | None = None  # {name: number}
    wandb_id: str | None = None
    tokens: NonNegativeInt = 0


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
    for key in sorted(kinds.keys() & state.keys()):
        check(key, state[key], kinds[key], path, FOREIGN)


def check_config(config, path):
    """Raise UserError unless config.json has keys of ours alone, and those of the model have their
    declared types and ranges and are compatible with each other."""
    own = config.get("own_keys", [])
    check("own_keys", own, list, path, FOREIGN)
    unknown = config.keys() - MODEL_KEYS - {*RUN_KEYS} - {*map(str, own)}
    if unknown:
        what = f"unknown key {first_three(unknown)}"
        raise UserError(what, path, "update this repo, or choose another checkpoint")
    kinds = keys(*(config_class for config_class, _ in CORNERS.values()), VariantConfig)
    kinds |= {"model": Literal[*CORNERS], "arch": Literal[*ARCH] | None}
    try:
        for key in sorted(kinds.keys() & {*config, "model"}):
            check(key, config.get(key), kinds[key], path)
        configure(config)
    except UserError as error:
        fix = "restore the code that trained it, or choose another checkpoint"
        raise UserError(error.parts[0], path, fix) from None


def check_vocabulary(tokenizer, vocab_size, where, fix):
    """Raise UserError if a tokenizer has more tokens than its model."""
    if tokenizer.vocab_size > vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}"
        raise UserError(what, where, fix)


# ---------------------------------------------------------------- tensors


def read_tensors(path, fix=FOREIGN, unread=None):
    """{name: tensor} of a safetensors file, all of them finite floating-point numbers. unread: a
    pattern of the names to leave out."""
    tensors = {}
    try:
        with safe_open(regular(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if unread and unread.search(name):
                    continue
                tensors[name] = file.get_tensor(name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"cannot read this safetensors file: {why}", path, fix) from None
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


def check_fit(values, tensors, where, fix):
    """Raise UserError unless the model that configure(values) describes has exactly these tensors
    {name: tensor}, and Failure if they do not fit into memory."""
    try:
        config = configure(values)
        if config.n_layer > len(tensors):  # more layers than that would take long to build
            wrong = f"n_layer={config.n_layer}, but there are {len(tensors)} tensors"
        else:
            model = without_memory(config)
            wrong = misfits(model, tensors)
    except UserError as error:
        wrong = error.parts[0]
    if wrong:
        raise UserError(f"the weights do not fit the model: {wrong}", where, fix)
    check_memory(model, 4)


def without_memory(config):
    """The model of a configuration on the meta device, where its tensors have shapes alone. Raises
    UserError if it cannot be made."""
    try:
        with torch.device("meta"), NoInitialValues():
            return make(config)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        what = f"this model cannot be made: {one_line(error)}"
        raise UserError(what, "its keys", "choose smaller sizes, or add --debug") from error


def check_size(config, device, trains):
    """Raise UserError if the model of a configuration cannot be made, and Failure if this machine
    cannot hold it: a CPU that trains has weights, gradients and a moment of each, or more."""
    n_bytes = 12 if trains and find_device(device) == "cpu" else 4
    check_memory(without_memory(config), n_bytes)


def check_memory(model, n_bytes):
    """Raise Failure if this machine cannot hold n_bytes for each parameter of a model. Without this
    check the system may end the process without a word. The model may be without memory."""
    count = sum(p.numel() for p in model.parameters())
    needed = n_bytes * count / 1e9
    here = memory_here() / 1e9
    if needed > here:
        what = f"out of memory: {count:,} parameters need {needed:,.1f} GB, {here:,.1f} GB are here"
        fix = "choose a smaller model: n_layer, n_embd, vocab_size"
        raise Failure(what, "the sizes of the model", fix)
