"""
The settings of a training run. TrainConfig declares each key once; read_config builds one from the
command line, the config files it names and, when resuming, the checkpoint.
"""

import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from common import files
from common.configurator import (
    Fraction,
    Given,
    NonNegativeFloat,
    NonNegativeInt,
    PathName,
    PositiveFloat,
    PositiveInt,
    Words,
    build,
    check,
    keys,
    load,
)
from common.errors import UserError, speaks
from common.runtime import find_device, find_ranks, memory_of
from parts.architectures import ARCH, DROPOUTS, MODEL_KEYS, UNSEEN, changes, configure
from parts.variant import VariantConfig
from training.optim import OPTIMIZER, SCHEDULE
from training.run_folder import LOGGERS
from weights import checkpoint
from weights.checks import FOREIGN

DTYPE = ("auto", "float32", "bfloat16", "float16")


@dataclass
class TrainConfig:
    """The keys of a run, each with its default. --help prints the comments."""

    OFTEN = """
        model dataset out_dir init_from n_layer n_embd block_size batch_size max_iters learning_rate
    """.split()  # first in --help  # noqa: SIM905
    # the model
    model: Literal["gpt2", "llama"] = "gpt2"  # the readable model, or the base of a variant
    arch: Literal[*ARCH] | None = None  # a named architecture: fills all slots
    match: Literal["none", "params", "flops"] = "none"  # the base's cost that MLP width keeps
    init_from: PathName = "scratch"  # or resume, a run, gpt2[-medium|-large|-xl], HF folder or name
    # files
    out_dir: PathName = "out"
    overwrite: bool = False  # start anew in a used out_dir; the old run is moved aside
    data_dir: PathName = "data"
    dataset: str = "openwebtext"  # a folder in data_dir
    allow_data_change: bool = False  # resume although the data have changed
    # the batch
    batch_size: PositiveInt = 12  # sequences in one forward pass
    gradient_accumulation_steps: PositiveInt = 1  # forward passes per step, over all ranks
    seed: NonNegativeInt = 1337
    data_seed: NonNegativeInt | None = None  # of the order of the batches; None: seed
    # the optimizer and its schedule
    max_iters: NonNegativeInt = 600000  # steps
    learning_rate: PositiveFloat = 6e-4
    optimizer: Literal[*OPTIMIZER] = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
    adam_rate: PositiveFloat = 1.0  # with muon: AdamW's rate, as a multiple of learning_rate
    schedule: Literal[*SCHEDULE] = "cosine"
    #: steps in which the rate rises at first; a resumed run does not warm up again
    warmup_iters: NonNegativeInt = 2000
    lr_decay_iters: NonNegativeInt | None = None  # step that reaches min_lr; None: max_iters
    min_lr: NonNegativeFloat | None = None  # where the decay ends; None: a tenth of learning_rate
    weight_decay: NonNegativeFloat = 0.1
    beta1: Fraction = 0.9  # of the gradients' mean; Muon's momentum
    beta2: Fraction = 0.95
    grad_clip: NonNegativeFloat = 1.0  # largest gradient norm; 0 = no clipping
    # evaluation and reports
    eval_interval: PositiveInt = 2000  # steps between evaluations; each saves a checkpoint
    eval_tokens: NonNegativeInt = 0  # of val (0 = all) to score; of train as many, up to 32,768
    log_interval: PositiveInt = 10  # steps between reports
    log: Words(LOGGERS, several=True) = "none"  # besides log.jsonl; a,b for several
    # instead of training
    eval_only: bool = False  # evaluate once and stop
    split: Literal["train", "val", "test"] = "val"  # what eval_only scores
    # the machine
    device: str = "auto"  # cpu, cuda, cuda:N, mps
    dtype: Literal[*DTYPE] = "auto"  # float16: the loss is scaled, so that small gradients survive
    compile: bool | Literal["auto"] = "auto"  # auto: if it saves time
    parallel: Literal["ddp", "fsdp"] = "ddp"  # the whole model on each rank, or sharded
    activation_checkpointing: bool = False  # less memory, a third more work

    @property
    def order_seed(self):
        """The seed of the order of the samples."""
        return self.seed if self.data_seed is None else self.data_seed

    def __post_init__(self):
        """Raise ValueError for values that do not go together."""
        end = "max_iters" if self.lr_decay_iters is None else "lr_decay_iters"
        last = getattr(self, end)
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            what = f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}"
            raise ValueError(f"{what}: the schedule decreases, so lower it")
        if self.warmup_iters >= max(last, 1):
            what = f"warmup_iters={self.warmup_iters} is not below {end}={last}"
            raise ValueError(f"{what}: give a smaller --warmup_iters or a larger --{end}")
        if self.eval_tokens == 1:
            raise ValueError("eval_tokens=1 scores nothing: give 0 for all, or 2 or more")
        if self.split != "val" and not self.eval_only:
            what = f"split={self.split} is scored by eval_only, and by nothing else"
            raise ValueError(f"{what}: add --eval_only")
        if not self.out_dir:
            raise ValueError("out_dir is empty: name a folder")


# Keys that determine the losses of a run, besides the data and the model.
COURSE = """
    adam_rate schedule learning_rate min_lr warmup_iters lr_decay_iters max_iters
    batch_size gradient_accumulation_steps weight_decay beta1 beta2 grad_clip seed data_seed dtype
    eval_tokens device compile dropout attn_dropout ngram_dropout
""".split()  # noqa: SIM905
# The "order" in a checkpoint. Older ones lack it: in them a cipher ordered more than LARGE windows.
ORDER = "permutation"
LARGE = 1 << 20
LAST_WITH_CIPHER = "5aa2740"
# Keys whose `auto` is resolved when a run starts. The choice is stored and kept on resuming.
RESOLVED = ("device", "dtype", "compile")
# Keys that apply to one start only: resuming does not take them from the checkpoint. (out_dir is
# among them because the folder may have been moved.)
ONE_START = ("versions", "overwrite", "eval_only", "split", "out_dir", "allow_data_change")
# Keys of the state that evaluations set. They are cleared when other tokens are evaluated.
EVALUATED = ("best_val_loss", "best_bits_per_byte", "best_step", "evaluated")
# Keys of nanoGPT and of other libraries that have another name here.
RENAMED = {
    "lr": "use --learning_rate",
    "steps": "use --max_iters",
    "epochs": "use --max_iters, in steps",
    "bf16": "use --dtype=bfloat16",
    "fp16": "use --dtype=float16",
    "resume": "use --init_from=resume",
    "eval_iters": "use --eval_tokens=N, in place of eval_iters * batch_size * block_size",
    "always_save_checkpoint": "leave it out, since every evaluation saves",
    "backend": "leave it out: nccl on CUDA, gloo elsewhere",
    "decay_lr": "use --schedule=constant --warmup_iters=0",
    "wandb_log": "use --log=wandb",
    "wandb_project": "set WANDB_PROJECT in the environment",
    "wandb_run_name": "leave it out: out_dir names the charts, or WANDB_NAME in the environment",
}


@dataclass
class NanoGPT:
    # rare: keys of nanoGPT
    wandb_log: bool = False  # the same as --log=wandb


# Keys that belong to another command now: {key: its module}.
MOVED = {
    "doctor": "extras.doctor",
    "dry_run": "extras.dry_run",
    "objective": "extras.preferences",
    "dpo_beta": "extras.preferences",
    "data_weights": "extras.mix",
    "data_alpha": "extras.mix",
}


def successor(module, argv):
    """The advice to give the arguments of a command line to another module, as one line."""
    gone = {"--doctor", "--dry_run", "--objective"}
    words = [word for word in argv if word.partition("=")[0] not in gone]
    return f"run {shlex.join(['python', '-m', module, *words])}"


class Settings(NamedTuple):
    """The combined settings of the command line, the config files and the checkpoint to resume."""

    config: TrainConfig
    model: dict  # {key: value} of the MODEL_KEYS that were given or stored
    folder: Path | None  # the checkpoint with the first weights: of this run or of another
    tokenizer: dict | None  # stored in that checkpoint
    state: dict | None  # stored in the checkpoint of a resumed run: step, best loss, ...
    command_line: Given  # with its config files
    own: dict  # {key: value} of the keys that only this program has
    program: str  # train.py, or the module of an extra


def read_config(argv, usage, own=None, program="train.py"):
    """The Settings of a command line. Raises UserError for an invalid key or value. `own`: a
    dataclass of the keys that only this program has."""
    defaults = dict.fromkeys(ARCH["gpt2"], "as in model")
    classes = [TrainConfig, VariantConfig, NanoGPT]
    if own:
        classes.insert(0, own)
    renamed = RENAMED | {key: successor(module, argv) for key, module in MOVED.items()}
    given = load(argv, classes, usage, scope, renamed, defaults)
    if given.words:
        fix = "write --key=value, or the name of a config file, NAME.py"
        raise UserError(f"cannot read {given.words[0]}", "command line", fix)

    values = given.values
    if values.pop("wandb_log", False):
        values.setdefault("log", "wandb")
    init_from = values.get("init_from", "scratch")
    if init_from != "resume" or "warmup_iters" in values:  # else the stored warm-up is kept
        values = shorten_warmup(values, given.typed)
    folder = None
    tokenizer = None
    state = None
    if init_from == "resume":
        folder = checkpoint.find(values.get("out_dir", TrainConfig.out_dir))
        state, stored, tokenizer = checkpoint.read(folder)
        del values["init_from"]  # the stored one stays: the model card names the base
        values = resume_values(stored, values, folder, keys(own) if own else {})
        if values.get("eval_tokens") != stored.get("eval_tokens"):
            state |= dict.fromkeys(EVALUATED)
    elif init_from != "scratch" and checkpoint.steps(init_from):
        folder = checkpoint.find(init_from)
        _, stored, tokenizer = checkpoint.read(folder)
        check_base(values, stored)
        values = model_values(stored) | values
    if init_from not in ("scratch", "resume") and os.path.exists(init_from):
        values["init_from"] = os.path.abspath(init_from)  # or it may pass for a name of the hub

    config = build(TrainConfig, values)
    if "," in config.dataset and program != MOVED["data_alpha"]:
        fix = successor(MOVED["data_alpha"], argv)
        raise UserError("this program trains on one dataset", f"dataset={config.dataset}", fix)
    model = model_values(values)
    if folder is not None or init_from == "scratch":
        check_model(model)
    check_together(given.values, config, model)
    own_values = asdict(build(own, values)) if own else {}
    return Settings(config, model, folder, tokenizer, state, given, own_values, program)


def model_values(values):
    """The values of the model's keys alone."""
    return {key: value for key, value in values.items() if key in MODEL_KEYS}


def check_together(given, config, model):
    """Raise UserError for values that the user gave and that do not go together."""
    batchnorm = model.get("norm") == "batchnorm"
    if batchnorm and config.activation_checkpointing:
        what = "activation_checkpointing would count each batch twice in batchnorm's running means"
        fix = "give --activation_checkpointing=False, or choose another norm"
        raise UserError(what, "norm=batchnorm", fix)
    if batchnorm and find_ranks()[1] > 1 and not config.eval_only:
        what = "each rank would have running means of its own, and only rank 0's are saved"
        raise UserError(what, "norm=batchnorm", "train in one process, or choose another norm")
    if given.get("adam_rate", 1) != 1 and not OPTIMIZER[config.optimizer].takes_matrices_only:
        what = f"adam_rate has no effect with optimizer={config.optimizer}"
        raise UserError(what, f"adam_rate={config.adam_rate}", "give 1, or --optimizer=muon")
    if given.get("init_from") == "resume" and given.get("overwrite"):
        fix = "give --overwrite=False to go on with the run, or leave out --init_from=resume"
        raise UserError("a run that is resumed is not overwritten", "overwrite=True", fix)


def check_base(values, stored):
    """Raise UserError if a run that starts from weights of the model `stored` names another base,
    arch or n_head. Print a note of other keys that differ, where the weights still fit."""
    for key in ("model", "arch", "n_head", "match"):
        if values.get(key) not in (None, stored.get(key)):
            what = f"init_from={values['init_from']} has weights of a model with another {key}"
            raise UserError(what, f"{key}={values[key]}", "remove it")
    changed = changes(stored, stored | model_values(values))
    for key in (*UNSEEN, "block_size", "mlp_width", "head_dim"):
        changed.pop(key, None)
    if changed:
        say(f"note: {', '.join(changed.values())}: not as in the model of these weights")


def shorten_warmup(values, typed):
    """The values of a run, with a warm-up of a tenth of the schedule if it would be longer than the
    schedule. A note says so. A warm-up that the user typed stays, and TrainConfig refuses it."""
    end_key = "max_iters" if values.get("lr_decay_iters") is None else "lr_decay_iters"
    end = max(0, values.get(end_key, TrainConfig.max_iters))
    warmup = values.get("warmup_iters", TrainConfig.warmup_iters)
    if warmup < max(end, 1) or "warmup_iters" in typed:
        return values

    shorter = end // 10
    if speaks():
        change = f"warmup_iters shortened from {warmup} to {shorter}"
        files.warn_once(f"{change} (a tenth of {end_key}={end})", "note")
    return values | {"warmup_iters": shorter}


def say(text):
    """Print a text, on rank 0 alone."""
    if speaks():
        print(text)


def scope(values):
    """The names that a config file may read besides the keys: the device of the run, and the
    memory of a GPU in GB."""
    device = find_device(values.get("device", "auto"))
    return {"device": device, "device_memory": memory_of(device)}


def check_model(values):
    """Raise UserError for values that contradict each other, or a key that this model lacks."""
    known = {"model", "arch", *keys(type(configure(values)))}
    for key, value in values.items():
        if key not in known:
            what = f"{key} has no effect with model={values.get('model', 'gpt2')}"
            fix = "remove it, or choose a part or a model that reads it"
            raise UserError(what, f"{key}={value}", fix)


# ---------------------------------------------------------------- resuming


def resume_values(stored, given, folder, own=()):
    """The values of a resumed run: the stored ones, overridden by the given ones. own: the keys
    that only this program has. Raises UserError if the given ones change the architecture; warns if
    they change the losses."""
    gone = (RENAMED.keys() | MOVED.keys()) - {*own}
    stored = {key: value for key, value in stored.items() if key not in gone}
    for key in ("device", "dtype", "optimizer"):
        value = stored.setdefault(key, getattr(TrainConfig, key))
        check(key, value, keys(TrainConfig)[key], f"{folder}/config.json", FOREIGN)
    # A new `auto` keeps the choice that was made when the run began.
    given = {key: v for key, v in given.items() if key not in RESOLVED or v != "auto"}
    now = keep_device(stored, given) | given
    now |= asdict(configure(now))

    changed = changes(stored, now)  # {key: "key old -> new"}
    for key, old in stored.items():
        new = now[key]
        is_other = new != old
        if key == "device":  # cuda:1 computes the same as cuda:0
            is_other = new.split(":")[0] != old.split(":")[0]
        if is_other:
            changed[key] = f"{key} {old} -> {new}"
    of_architecture = (MODEL_KEYS | {"match"}) - {"arch", *DROPOUTS}  # arch only names the parts
    forbidden = [text for key, text in changed.items() if key in of_architecture]
    if forbidden:
        what = f"the given architecture is not the stored one: {', '.join(forbidden)}"
        fix = "give only --init_from=resume and --out_dir: a config file may set these keys"
        raise UserError(what, folder, fix)
    check_optimizer_fits(stored, now)
    course = [changed[key] for key in (*COURSE, *own) if key in changed]
    if course and not now.get("eval_only"):
        say(f"warning: {', '.join(course)}: the run will differ from an uninterrupted one")
    return {key: value for key, value in now.items() if key not in ONE_START or key in given}


def check_optimizer_fits(stored, now):
    """Raise UserError if the state of the optimizer or of the loss's scale, as the run stored it,
    does not fit the values that it is resumed with."""
    if now["dtype"] == "float16" and stored["dtype"] != "float16":
        what = f"a run in {stored['dtype']} cannot go on in float16: it stored no scale of the loss"
        raise UserError(what, "dtype=float16", "remove dtype")
    if now["optimizer"] != stored["optimizer"]:
        what = f"the stored state is of the optimizer {stored['optimizer']}"
        fix = "remove it, or start a new run from these weights with --init_from=RUN"
        raise UserError(what, f"optimizer={now['optimizer']}", fix)


def keep_device(stored, given):
    """The stored values on a device that this machine has; on another kind, `compile` is auto."""
    stored_device = stored.get("device", "auto")
    device = given.get("device", stored_device)
    try:
        find_device(device)
    except UserError:
        if "device" in given:
            raise
        device = find_device()
    if device.split(":")[0] == stored_device.split(":")[0]:
        return stored | {"device": device}
    return stored | {"device": device, "compile": "auto"}


def first_state(settings, fingerprint):
    """The state that a run starts from: the stored one, or a new one. Raises UserError if
    the checkpoint was trained on other data."""
    new = {"step": 0, "best_val_loss": None, "best_step": None, "seconds": 0.0}
    new |= {"order": ORDER, "data": fingerprint}
    state = settings.state or new
    changed = state["data"] != fingerprint
    if changed and not settings.config.allow_data_change:
        what = f"dataset={settings.config.dataset} has changed since this run began"
        fix = "prepare the same text again, train in another out_dir, or give --allow_data_change"
        raise UserError(what, settings.folder, fix)
    if changed:
        state |= dict.fromkeys(EVALUATED) | {"data": fingerprint, "order": ORDER}
    return state


def check_order(state, windows, folder):
    """Raise UserError if a resumed run with so many training windows began in an order of samples
    that is not made any more. Up to LARGE windows the order has always been a permutation."""
    if windows > LARGE and state.get("order") != ORDER:
        what = f"this run began with another order of its {windows:,} samples"
        raise UserError(what, folder, f"resume it with the code of commit {LAST_WITH_CIPHER}")
