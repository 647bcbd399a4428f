"""
Train a model:

    python train.py config/llama_shakespeare.py
    python train.py config/gpt2_shakespeare.py --batch_size=32 --compile=False
    python train.py config/llama_shakespeare.py --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py

A missing data set that is small and known is prepared first. The run folder (checkpoint.py) holds
all that resuming and sampling need. On a CPU a run that was interrupted and resumed gives the same
bits as one that was not: the batch and the dropout of a step are functions of (seed, step).
"""
import json
import math
import shlex
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import formats
from configurator import build, keys, load
from corpus import Batches, eval_batches, fingerprint, load_meta, load_split, load_tokenizer
from costs import match
from errors import Failure, UserError, run
from optim import OPTIMIZER, SCHEDULE, learning_rate, make_optimizers
from prepare import SMALL, prepare
from runlog import EVALUATION, RunLog, check_out_dir, describe, finish, open_out_dir, start_wandb
from runtime import StopRequest, find_device, seed_for, set_up, versions
from variants import ARCH, VariantConfig, choose, idle

BROKEN_PIPE = 141  # the exit status of a process that SIGPIPE ends
EVAL_TRAIN_TOKENS = 32768  # of the train split, scored beside the validation split


@dataclass
class TrainConfig:
    model: Literal["gpt2", "llama"] = "gpt2"  # the readable model, or the corner that a variant starts from
    arch: Literal[*ARCH] | None = None  # a named architecture: fills all slots
    match: Literal["none", "params", "flops"] = "none"  # give a variant the MLP width at which it costs what its model does
    # where things are
    out_dir: str = "out"
    data_dir: str = "data"
    dataset: str = "openwebtext"  # a folder in data_dir
    init_from: str = "scratch"  # scratch, resume, gpt2[-medium|-large|-xl], a folder or hub name of Hugging Face weights, or FILE.gguf
    overwrite: bool = False  # start anew in a used out_dir; the old run is moved aside
    # looking
    eval_interval: int = 2000  # steps between evaluations, each of which saves a checkpoint
    eval_tokens: int = 0  # how much of the validation split is scored, in tokens; 0 = all of it
    eval_only: bool = False  # evaluate once and stop
    log_interval: int = 10  # steps between reports
    wandb_log: bool = False
    wandb_project: str = "transformer-parts"
    wandb_run_name: str | None = None  # None: out_dir
    # the batch
    batch_size: int = 12  # sequences in one forward pass
    gradient_accumulation_steps: int = 1  # forward passes per step, over all ranks
    # the optimizer and its schedule
    optimizer: Literal[*OPTIMIZER] = "adamw"  # muon: Muon for the matrices of the blocks, AdamW for the rest
    schedule: Literal[*SCHEDULE] = "cosine"
    learning_rate: float = 6e-4
    max_iters: int = 600000  # steps
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0  # largest gradient norm; 0 = no clipping
    warmup_iters: int = 2000
    lr_decay_iters: int | None = None  # step at which the rate reaches min_lr; None: max_iters
    min_lr: float | None = None  # where the schedule ends; None: a tenth of learning_rate
    seed: int = 1337
    data_seed: int | None = None  # of the order of the batches; None: seed
    # the machine
    device: str = "auto"  # cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool | Literal["auto"] = "auto"  # True, False, or auto: where it repays its cost

    def __post_init__(self):
        for key in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} is below 1: give 1 or more")
        for key in ("max_iters", "warmup_iters", "eval_tokens", "weight_decay", "grad_clip", "min_lr", "seed", "data_seed", "lr_decay_iters"):
            if (getattr(self, key) or 0) < 0:
                raise ValueError(f"{key}={getattr(self, key)} is negative: give 0 or more")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} is out of range: give a number from 0 up to, not including, 1")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} teaches nothing: give a number above 0")
        if (self.min_lr or 0) > self.learning_rate:
            raise ValueError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}: the schedule goes down from the one to the other")
        end = self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters
        if self.warmup_iters >= max(end, 1):
            raise ValueError(f"warmup_iters={self.warmup_iters} is not below the {end} steps of the schedule: give --warmup_iters=N")
        if self.eval_tokens == 1:
            raise ValueError("eval_tokens=1 scores nothing: the first token has no context; give 0 for all, or 2 or more")
        if not self.out_dir:
            raise ValueError("out_dir is empty: name a folder")


# Sizes of the model that may be 0; the others are at least 1.
ZERO_IS_NONE = ("window", "full_every", "block_local", "low_rank")
# Keys that change the course of a run when they change on resuming.
COURSE = ("optimizer", "schedule", "learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "max_iters", "batch_size", "gradient_accumulation_steps",
          "weight_decay", "beta1", "beta2", "grad_clip", "seed", "data_seed", "dtype")
# Keys of nanoGPT's that have another name here.
RENAMED = {
    "eval_iters": "use --eval_tokens=N: evaluation scores fixed tokens, each once",
    "always_save_checkpoint": "every evaluation saves; `latest` and `best` in out_dir name the steps",
    "backend": "leave it out: nccl on CUDA, gloo elsewhere",
    "decay_lr": "use --schedule=constant",
}


# ---------------------------------------------------------------- before the first step


def read_config(argv):
    """(TrainConfig, {model or a key of it: value} as given, (checkpoint folder, its state) or Nones). When resuming, what the
    checkpoint says holds wherever nothing else is given."""
    def scope(given):
        return {"device": find_device(given.get("device", "auto"))}  # config files may choose by it

    values, words = load(argv, [TrainConfig, VariantConfig], __doc__, scope, RENAMED, dict.fromkeys(ARCH["gpt2"], "as in model"))
    if words:
        raise UserError(f"cannot read {words[0]}", "command line", "write --key=value, or name a config file that ends in .py")
    folder = state = None
    if values.get("init_from") == "resume":
        out_dir = values.get("out_dir", TrainConfig.out_dir)
        folder = checkpoint.find(out_dir)
        state, stored, _ = checkpoint.read(folder)
        config_class, _, filled = choose(stored | values)
        now = stored | values | asdict(build(config_class, filled))  # as it would be stored
        changed = {key: f"{key} {stored[key]} -> {now[key]}" for key in now if key in stored and now[key] != stored[key]}
        other = [text for key, text in changed.items() if key == "model" or key not in keys(TrainConfig)]
        if other:
            raise UserError("the checkpoint has another architecture: " + ", ".join(other), folder, "leave these keys out, or train from scratch in another out_dir")
        course = [changed[key] for key in COURSE if key in changed]
        if course:
            print(f"warning: {', '.join(course)}: the run will differ from an uninterrupted one")
        once = ("versions", "overwrite", "eval_only", "out_dir")  # said of one start, or of a folder that may have moved
        values = {key: value for key, value in stored.items() if key not in once} | {"out_dir": out_dir} | values
    config = build(TrainConfig, values)
    model_keys = keys(choose(values)[0])
    for key, value in values.items():
        if key not in model_keys and key not in keys(TrainConfig):
            raise UserError(f"{key} means nothing to model={config.model}", f"{key}={value}", "leave it out, or choose the other model")
        least = 0 if key in ZERO_IS_NONE else 1
        if key in ("rope_theta", "norm_eps", "ffn_dim_multiplier") and value is not None and value <= 0:
            raise UserError(f"{key} is out of range", f"{key}={value}", "give a number above 0")
        if key in model_keys and (type(value) is int and value < least or key == "dropout" and not 0 <= value < 1):
            raise UserError(f"{key} is out of range", f"{key}={value}", "give a number from 0 up to, not including, 1" if key == "dropout" else f"give {least} or more")
    return config, {key: value for key, value in values.items() if key in model_keys or key in ("model", "arch")}, (folder, state)


def find_data(config, runtime):
    """(meta, tokenizer) of the data set, which is prepared first if it is small, known and missing."""
    folder = Path(config.data_dir) / config.dataset
    if runtime.main and config.dataset in SMALL and not (folder / "meta.json").exists():
        print(f"{folder} is not there yet: preparing it, as `python prepare.py {config.dataset}` does")
        prepare(config.dataset, data_dir=config.data_dir)
    if runtime.world_size > 1:
        torch.distributed.barrier()  # the others wait for rank 0, whatever they see
    meta = load_meta(folder)
    return meta, load_tokenizer(folder, meta)


def make_model(config, given, folder, meta):
    """The model to train, on the CPU: new, from the checkpoint `folder`, or from pretrained weights."""
    if folder is not None:
        return checkpoint.load_model(folder, given)
    weights = None
    if config.init_from != "scratch":
        word, imported, weights = formats.load_pretrained(config.init_from)
        if given.get("model", word) != word:
            raise UserError(f"these are weights of a {word} model", f"init_from={config.init_from}", f"leave model={given['model']} out")
        config.model, given = word, imported | given
    given = {"vocab_size": meta["vocab_size"]} | given
    if given["vocab_size"] < meta["vocab_size"]:
        raise UserError(f"vocab_size={given['vocab_size']} is below the data's {meta['vocab_size']}", f"dataset={config.dataset}", "prepare the text with the model's tokenizer, or leave vocab_size out")
    config_class, model_class, values = choose({"model": config.model} | given)
    unused = [key for key in idle(values) if key in given] if config_class is VariantConfig else []
    if unused:
        print(f"note: {', '.join(unused)} has no effect on the parts chosen")
    model_config = build(config_class, values)
    if config.match != "none" and config_class is VariantConfig:
        model_config = matched(model_config, config, given)
    torch.manual_seed(seed_for(config.seed, 0))
    model = model_class(model_config)
    if weights is not None:
        formats.load_weights(model, weights)
    return model


def matched(model_config, config, given):
    """A variant's configuration with the MLP width at which it costs what the model it starts from does."""
    sizes = {key: value for key, value in given.items() if key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "multiple_of")}
    base = build(VariantConfig, choose(sizes | {"model": config.model, "arch": config.model, "vocab_size": model_config.vocab_size})[2])
    try:
        width, residual = match(model_config, base, config.match)
    except ValueError as error:
        raise UserError(str(error), f"match={config.match}", "leave match out") from None
    print(f"match {config.match}: mlp_width {width}, {residual:+.2f} % beside {config.model}")
    return replace(model_config, mlp_width=width)


# ---------------------------------------------------------------- training


@torch.no_grad()
def evaluate(model, tokens, config, runtime, limit, stop=None):
    """Mean loss in nats per token over the first `limit` tokens of a split (0: all), dropout off, each
    token scored once. The ranks share the batches. None if a stop is asked for meanwhile."""
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of tokens
    model.eval()
    for i, (x, y) in enumerate(eval_batches(tokens, model.config.block_size, config.batch_size, limit)):
        if i % runtime.world_size != runtime.rank:
            continue
        if stop is not None and stop.status and runtime.world_size == 1:
            break
        x, y = torch.from_numpy(x).to(runtime.device), torch.from_numpy(y).to(runtime.device)
        with runtime.autocast():
            loss = model(x, y)[1]
        count = (y >= 0).sum().item()
        total += torch.tensor([loss.item() * count, count])
    model.train()
    if runtime.world_size > 1:
        total = total.to(runtime.device)
        torch.distributed.all_reduce(total)
    return None if stop is not None and stop.status else (total[0] / total[1]).item()


def train_step(net, batches, optimizers, step, config, runtime):
    """One step of the optimizers on the global batch of `step` (from 0). Returns (loss, gradient norm);
    FloatingPointError, before anything is updated, if they are not finite."""
    lr = learning_rate(step, config)
    parts = config.gradient_accumulation_steps
    mine = range(runtime.rank, parts, runtime.world_size)
    total = torch.zeros((), device=runtime.device)
    for part in mine:
        x, y = batches.get((step * parts + part) * config.batch_size, config.batch_size)  # (batch_size, block_size)
        x, y = torch.from_numpy(x).to(runtime.device), torch.from_numpy(y).to(runtime.device)
        torch.manual_seed(seed_for(config.seed, 1, step, part))  # dropout, too, is a function of (seed, step)
        # Ranks average their gradients in their last backward; no_sync must cover the forward as well.
        with net.no_sync() if runtime.world_size > 1 and part != mine[-1] else nullcontext():
            with runtime.autocast():
                loss = net(x, y)[1] / len(mine)
            loss.backward()
        total += loss.detach()
    if runtime.world_size > 1:
        torch.distributed.all_reduce(total)
        total /= runtime.world_size
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    norm = torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], config.grad_clip or math.inf)
    loss, norm = total.item(), norm.item()
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise FloatingPointError(f"loss {loss:.4g}, gradient norm {norm:.4g} at step {step + 1}, learning rate {lr:.3g}")
    for group in groups:
        group["lr"] = lr
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss, norm


def main(argv):
    config, given, (folder, stored_state) = read_config(argv)
    runtime = set_up(config.device, config.dtype)
    if config.gradient_accumulation_steps % runtime.world_size:
        raise UserError(f"gradient_accumulation_steps={config.gradient_accumulation_steps} is not divisible by {runtime.world_size} ranks", "gradient_accumulation_steps", "make it a multiple of the number of processes")

    # What can be wrong is found before out_dir is touched.
    if runtime.main and not config.eval_only:
        check_out_dir(config.out_dir, folder is not None, config.overwrite)
    meta, tokenizer = find_data(config, runtime)
    step, state = 0, {"best_val_loss": None, "best_step": None, "seconds": 0.0, "data": fingerprint(meta)}
    if folder is not None:
        if stored_state["data"] != state["data"]:
            raise UserError(f"the data in {config.dataset} are not those this run began with", folder, "prepare the same text again, or train in another out_dir")
        step, state = stored_state["step"], stored_state
    model = make_model(config, given, folder, meta).to(runtime.device)
    splits = {split: load_split(Path(config.data_dir) / config.dataset, split, model.config.block_size) for split in ("train", "val")}
    optimizers = make_optimizers(model, config, runtime.device)
    if folder is not None:
        checkpoint.load_optimizers(folder, optimizers)
    step_tokens = config.batch_size * config.gradient_accumulation_steps * model.config.block_size
    flops = 6 * sum(p.numel() for p in model.parameters()) * step_tokens * (config.max_iters - step)
    runtime.choose_compile(config.compile, flops)
    if runtime.main:
        describe(model, optimizers, config, runtime, meta, splits)

    scored = splits["val"][1 : config.eval_tokens or None]  # all but the first token, which nothing comes before
    bits_per_byte = len(scored) / len(tokenizer.decode_bytes(scored)) / math.log(2)  # times nats per token

    def score(stop=None):
        """The row of an evaluation, None if a stop is asked for meanwhile."""
        few = min(EVAL_TRAIN_TOKENS, config.eval_tokens or len(splits["val"]))
        train_loss = evaluate(model, splits["train"], config, runtime, few, stop)
        val_loss = evaluate(model, splits["val"], config, runtime, config.eval_tokens, stop)
        if train_loss is None or val_loss is None:
            return None
        return {"step": step, "train_loss": train_loss, "val_loss": val_loss, "bits_per_byte": val_loss * bits_per_byte, "seconds": state["seconds"]}

    if config.eval_only:
        row = score()
        if runtime.main:
            print(EVALUATION.format(**row))
        return 0
    if folder is not None and (step > config.max_iters or step == config.max_iters == state.get("evaluated")):
        if runtime.main:
            print(f"step {step} of {config.max_iters}: nothing to do (--max_iters=N trains on)")
        return 0

    everything = asdict(config) | asdict(model.config) | {"versions": versions()}
    if runtime.main:
        held = open_out_dir(config.out_dir, folder is not None, config.overwrite)  # noqa: F841, the lock
        checkpoint.write(Path(config.out_dir) / "config.json", json.dumps(everything, indent=1))
        to_wandb = start_wandb(config.wandb_project, config.wandb_run_name or config.out_dir, everything, state) if config.wandb_log else None
        log = RunLog(config.out_dir, step if folder is not None else None, config.max_iters, to_wandb)

    def save(best=False):
        if runtime.main:
            checkpoint.save(config.out_dir, step, model, optimizers, state, everything, tokenizer.to_json(), best)

    batches = Batches(splits["train"], model.config.block_size, config.seed if config.data_seed is None else config.data_seed)
    net = torch.compile(model, dynamic=False) if runtime.compile else model  # evaluation and saving use the plain one
    if runtime.world_size > 1:
        net = DistributedDataParallel(net)
    speeds, saved = [], step if folder is not None else None
    stop = StopRequest()
    while True:
        due = step % config.eval_interval == 0 or step == config.max_iters
        if due and state.get("evaluated") != step:  # a run that was stopped within an evaluation does it now
            row = score(stop)
            if row is not None:
                if not math.isfinite(row["val_loss"]):
                    raise not_finite(f"validation loss {row['val_loss']:.4g} at step {step}", config)
                state["evaluated"] = step
                best = state["best_val_loss"] is None or row["val_loss"] < state["best_val_loss"]
                if best:
                    state |= {"best_val_loss": row["val_loss"], "best_step": step}
                if runtime.main:
                    log.evaluation(row)
                if step:
                    save(best)
                    saved = step
        if stop.agreed(runtime) or step >= config.max_iters:
            break
        began = time.perf_counter()
        try:
            loss, norm = train_step(net, batches, optimizers, step, config, runtime)
        except FloatingPointError as error:
            raise not_finite(error, config) from error
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "alloc_cpu" not in str(error):
                raise
            half = max(1, config.batch_size // 2)
            fix = f"--batch_size={half} --gradient_accumulation_steps={config.gradient_accumulation_steps * config.batch_size // half} takes the same steps in less memory"
            raise Failure("out of memory", f"batch_size={config.batch_size}, block_size={model.config.block_size}", fix if config.batch_size > 1 else "choose a smaller block_size or model") from error
        step += 1
        seconds = time.perf_counter() - began
        state["seconds"] += seconds
        speeds.append(step_tokens / seconds)
        if runtime.main:
            log.bar.update()
            if log.broken:  # whoever read our output has gone: stop as for a signal
                stop.status = BROKEN_PIPE
        if step % config.log_interval == 0 and runtime.main:
            log.report({"step": step, "loss": loss, "lr": learning_rate(step - 1, config), "grad_norm": norm, "tokens": step * step_tokens,
                        "seconds": state["seconds"], "milliseconds": seconds * 1000, "tokens_per_second": step_tokens / seconds})
    if runtime.main:
        log.close()
    if stop.status:
        if saved != step:
            save()
        if runtime.main and stop.status != BROKEN_PIPE:
            print(f"stopped after step {step}, saved; go on with: python train.py --init_from=resume --out_dir={shlex.quote(config.out_dir)}")
    elif runtime.main:
        finish(model, tokenizer, runtime, config, argv, state, bits_per_byte, statistics.median(speeds or [0]))
    if runtime.world_size > 1:
        torch.distributed.barrier()  # rank 0 may still be saving or writing its sample
        torch.distributed.destroy_process_group()
    return stop.status


def not_finite(what, config):
    """The Failure of a run whose numbers are no numbers any more."""
    there = checkpoint.steps(config.out_dir)
    good = f"last good checkpoint: {Path(config.out_dir) / 'ckpt' / f'{there[-1]:06d}'}" if there else "no checkpoint yet"
    return Failure(what, good, "nothing of this step was kept; try a lower learning_rate")


if __name__ == "__main__":
    run(main)
