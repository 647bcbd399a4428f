"""
The settings of a training run: TrainConfig declares each key once, and read_config makes one of config files, the
command line and, when resuming, the checkpoint.
"""

import math
from dataclasses import asdict, dataclass
from typing import Literal

from common.configurator import build, keys, load
from common.errors import UserError
from common.runtime import find_device
from parts.architectures import ARCH, choose
from parts.variant import VariantConfig
from training.optim import OPTIMIZER, SCHEDULE
from weights import checkpoint


@dataclass
class TrainConfig:
    model: Literal["gpt2", "llama"] = (
        "gpt2"  # the readable model, or the corner that a variant starts from
    )
    arch: Literal[*ARCH] | None = None  # a named architecture: fills all slots
    match: Literal["none", "params", "flops"] = (
        "none"  # give a variant the MLP width at which it costs what its model does
    )
    # where things are
    out_dir: str = "out"
    data_dir: str = "data"
    dataset: str = "openwebtext"  # a folder in data_dir, or several with commas between them: mixed (mixture.py)
    data_weights: str | None = (
        None  # the share of each in the samples, as in 0.7,0.2,0.1; None: by data_alpha
    )
    data_alpha: float = (
        1.0  # shares as (training tokens)^alpha: 1 = in proportion, 0 = the same of each
    )
    init_from: str = "scratch"  # scratch, resume, gpt2[-medium|-large|-xl], a folder or hub name of Hugging Face weights, or FILE.gguf
    overwrite: bool = False  # start anew in a used out_dir; the old run is moved aside
    allow_data_change: bool = False  # resume although the data are not those the run began with
    # looking
    eval_interval: int = 2000  # steps between evaluations, each of which saves a checkpoint
    eval_tokens: int = (
        0  # how much of each set's validation split is scored, in tokens; 0 = all of it
    )
    eval_only: bool = False  # evaluate once and stop
    dry_run: bool = False  # say what the run would cost, and stop
    doctor: bool = False  # check device, disk, data, model and optimizer, and stop
    check: bool | Literal["record"] = (
        False  # compare the first losses with the golden curve of the config file, and stop; record: make one
    )
    log_interval: int = 10  # steps between reports
    wandb_log: bool = False
    wandb_project: str = "transformer-parts"
    wandb_run_name: str | None = None  # None: out_dir
    # the batch
    batch_size: int = 12  # sequences in one forward pass
    gradient_accumulation_steps: int = 1  # forward passes per step, over all ranks
    # the optimizer and its schedule
    optimizer: Literal[*OPTIMIZER] = (
        "adamw"  # muon: Muon for the matrices of the blocks, AdamW for the rest
    )
    schedule: Literal[*SCHEDULE] = "cosine"
    learning_rate: float = 6e-4
    max_iters: int = 600000  # steps
    weight_decay: float = 0.1
    beta1: float = 0.9  # of the gradients' mean; Muon's momentum
    beta2: float = 0.95
    grad_clip: float = 1.0  # largest gradient norm; 0 = no clipping
    warmup_iters: int = 2000
    lr_decay_iters: int | None = None  # step at which the rate reaches min_lr; None: max_iters
    min_lr: float | None = None  # where the schedule ends; None: a tenth of learning_rate
    seed: int = 1337
    data_seed: int | None = None  # of the order of the batches; None: seed
    # the machine
    device: str = "auto"  # cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # float16 scales the loss, so that small gradients survive
    )
    compile: bool | Literal["auto"] = "auto"  # True, False, or auto: where it repays its cost
    parallel: Literal["ddp", "fsdp"] = (
        "ddp"  # over several ranks: the model on each, or its weights shared out among them
    )
    activation_checkpointing: bool = False  # forget what happens inside a block and compute it again in the backward pass: less memory, a third more work

    @property
    def trains(self):
        """Whether the run writes into out_dir, and does not only answer a question."""
        return not (self.eval_only or self.dry_run or self.doctor or self.check)

    def __post_init__(self):
        for key in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} is below 1: give 1 or more")
        for key in (
            "max_iters",
            "warmup_iters",
            "eval_tokens",
            "weight_decay",
            "grad_clip",
            "min_lr",
            "seed",
            "data_seed",
            "lr_decay_iters",
            "data_alpha",
        ):
            if (getattr(self, key) or 0) < 0:
                raise ValueError(f"{key}={getattr(self, key)} is negative: give 0 or more")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(
                    f"{key}={getattr(self, key)} is out of range: give a number from 0 up to, not including, 1"
                )
        if self.learning_rate <= 0:
            raise ValueError(
                f"learning_rate={self.learning_rate} teaches nothing: give a number above 0"
            )
        if (self.min_lr or 0) > self.learning_rate:
            raise ValueError(
                f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}: the schedule goes down from the one to the other"
            )
        end = self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters
        if self.warmup_iters >= max(end, 1):
            raise ValueError(
                f"warmup_iters={self.warmup_iters} is not below the {end} steps of the schedule: give --warmup_iters=N"
            )
        if self.eval_tokens == 1:
            raise ValueError(
                "eval_tokens=1 scores nothing: the first token has no context; give 0 for all, or 2 or more"
            )
        if (self.eval_only + self.dry_run + self.doctor + bool(self.check)) > 1:
            raise ValueError(
                "eval_only, dry_run, doctor and check each stop when they have answered: choose one"
            )
        if not self.out_dir:
            raise ValueError("out_dir is empty: name a folder")
        if not all(self.datasets) or len(set(self.datasets)) < len(self.datasets):
            raise ValueError(
                f"dataset={self.dataset} names no set, or one twice: write --dataset=a,b,c"
            )
        if self.data_weights is not None:
            try:
                parts = [float(part) for part in self.data_weights.split(",")]
            except ValueError:
                parts = []
            if len(parts) != len(self.datasets) or not all(0 < part < math.inf for part in parts):
                raise ValueError(
                    f"data_weights={self.data_weights} is not a number above 0 for each of {', '.join(self.datasets)}: write --data_weights=0.7,0.3, without spaces"
                )
            if self.data_alpha != 1:
                raise ValueError(
                    f"data_weights={self.data_weights} and data_alpha={self.data_alpha} both set the shares: leave one of them out"
                )

    @property
    def datasets(self):
        """The names of the sets."""
        return [name.strip() for name in self.dataset.split(",")]


# Sizes of the model that may be 0; the others are at least 1.
ZERO_IS_NONE = ("window", "full_every", "block_local", "low_rank")
# Keys that change the course of a run when they change on resuming.
COURSE = (
    "optimizer",
    "schedule",
    "learning_rate",
    "min_lr",
    "warmup_iters",
    "lr_decay_iters",
    "max_iters",
    "batch_size",
    "gradient_accumulation_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "grad_clip",
    "seed",
    "data_seed",
    "data_weights",
    "data_alpha",
    "dtype",
)
# Keys of nanoGPT's that have another name here.
RENAMED = {
    "eval_iters": "use --eval_tokens=N: evaluation scores fixed tokens, each once",
    "always_save_checkpoint": "every evaluation saves; `latest` and `best` in out_dir name the steps",
    "backend": "leave it out: nccl on CUDA, gloo elsewhere",
    "decay_lr": "use --schedule=constant",
}


def read_config(argv, help_text):
    """(TrainConfig, {model or a key of it: value} as given, (checkpoint folder, its state) or Nones). When resuming, what the
    checkpoint says holds wherever nothing else is given."""

    def scope(given):
        return {"device": find_device(given.get("device", "auto"))}  # config files may choose by it

    values, words = load(
        argv,
        [TrainConfig, VariantConfig],
        help_text,
        scope,
        RENAMED,
        dict.fromkeys(ARCH["gpt2"], "as in model"),
    )
    if words:
        raise UserError(
            f"cannot read {words[0]}",
            "command line",
            "write --key=value, or name a config file that ends in .py",
        )
    folder = state = None
    if values.get("init_from") == "resume":
        out_dir = values.get("out_dir", TrainConfig.out_dir)
        folder = checkpoint.find(out_dir)
        state, stored, _ = checkpoint.read(folder)
        config_class, _, filled = choose(stored | values)
        if values.get("data_weights") is not None and "data_alpha" not in values:
            stored = stored | {
                "data_alpha": TrainConfig.data_alpha
            }  # the one given takes the other's place
        elif "data_alpha" in values and "data_weights" not in values:
            stored = stored | {"data_weights": None}
        now = stored | values | asdict(build(config_class, filled))  # as it would be stored
        changed = {
            key: f"{key} {stored[key]} -> {now[key]}"
            for key in now
            if key in stored and now[key] != stored[key]
        }
        other = [
            text
            for key, text in changed.items()
            if key in ("model", "match") or key not in keys(TrainConfig)
        ]
        if other:
            raise UserError(
                "the checkpoint has another architecture: " + ", ".join(other),
                folder,
                "leave these keys out, or train from scratch in another out_dir",
            )
        course = [changed[key] for key in COURSE if key in changed]
        if course:
            print(f"warning: {', '.join(course)}: the run will differ from an uninterrupted one")
        once = (
            "versions",
            "overwrite",
            "eval_only",
            "dry_run",
            "doctor",
            "check",
            "out_dir",
            "allow_data_change",
        )  # said of one start, or of a folder that may have moved
        values = (
            {key: value for key, value in stored.items() if key not in once}
            | {"out_dir": out_dir}
            | values
        )
    config = build(TrainConfig, values)
    model_keys = keys(choose(values)[0])
    for key, value in values.items():
        if key not in model_keys and key not in keys(TrainConfig):
            raise UserError(
                f"{key} means nothing to model={config.model}",
                f"{key}={value}",
                "leave it out, or choose the other model",
            )
        least = 0 if key in ZERO_IS_NONE else 1
        if (
            key in ("rope_theta", "norm_eps", "ffn_dim_multiplier")
            and value is not None
            and value <= 0
        ):
            raise UserError(f"{key} is out of range", f"{key}={value}", "give a number above 0")
        if key in model_keys and (
            type(value) is int and value < least or key == "dropout" and not 0 <= value < 1
        ):
            raise UserError(
                f"{key} is out of range",
                f"{key}={value}",
                "give a number from 0 up to, not including, 1"
                if key == "dropout"
                else f"give {least} or more",
            )
    return (
        config,
        {
            key: value
            for key, value in values.items()
            if key in model_keys or key in ("model", "arch")
        },
        (folder, state),
    )
