"""Builds a run, and reports every mistake before anything is written."""

import functools
import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_activations

from common import files
from common.configurator import keys
from common.errors import UserError, folded
from common.runtime import Runtime, seed_for, versions
from parts import moe
from parts.architectures import configure, idle, make
from parts.costs import match, training_flops_per_token
from parts.variant import VariantConfig
from tokens.mixture import mixed_fingerprint, open_batches, open_sources
from tokens.pairs import Pairs
from training import parallel
from training.dry_run import variant
from training.failures import DIVERGED
from training.feeder import Feeder
from training.loggers import start_loggers
from training.optim import make_optimizers
from training.peak import peak_flops
from training.preferences import PreferenceLoss, check_objective, set_references
from training.run_folder import RunLog, check_out_dir, open_out_dir
from training.settings import TrainConfig, check_model
from weights import checkpoint, hf


@dataclass
class Data:
    """The data of a run."""

    sources: list  # tokens.mixture.Source, one for each dataset
    batches: object  # the training samples in their order: get(first, count) -> x, y
    tokenizer: object

    def __post_init__(self):
        self.feeder = Feeder(self.batches)


@dataclass
class Learner:
    """The model of a run, and the optimizers that update its weights."""

    model: torch.nn.Module  # for saving and sampling
    net: torch.nn.Module  # its loss, for training and evaluating: compiled, in DDP
    optimizers: list
    scaler: torch.amp.GradScaler  # of a float16 loss; otherwise it does nothing


@dataclass
class Run:
    """A run that is ready for the step after `step`."""

    config: TrainConfig
    runtime: Runtime
    data: Data
    learner: Learner
    step: int  # the number of steps taken
    state: dict  # saved beside the weights: best loss, seconds, data fingerprint, samples drawn
    folder: Path | None  # the checkpoint that the run resumes from
    saved: int | None  # the step of the newest checkpoint
    saved_config: dict  # the resolved configuration of training and model, to be saved
    unread: list = field(default_factory=list)  # (step, loss, norm, skipped) still on the device

    @property
    def finished(self):
        """Whether all steps are taken and the last one is evaluated."""
        if self.step == self.config.max_iters:
            return self.state.get("evaluated") == self.step
        return self.step > self.config.max_iters

    @property
    def step_samples(self):
        """Samples in the global batch of one step."""
        return self.config.batch_size * self.config.gradient_accumulation_steps

    @property
    def step_tokens(self):
        """Tokens in the global batch of one step."""
        return self.step_samples * self.learner.model.config.block_size


# ---------------------------------------------------------------- before the data are read


def check_start(settings, runtime):
    """Raise UserError if the run cannot start with this number of ranks, or in its out_dir."""
    config, ranks = settings.config, runtime.world_size
    if config.gradient_accumulation_steps % ranks:
        raise UserError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} is not divisible "
            f"by {ranks} ranks",
            "gradient_accumulation_steps",
            "make it a multiple of the number of processes",
        )
    if config.parallel == "fsdp" and ranks > 1:
        fix = "choose --parallel=ddp, or --optimizer=adamw with --dtype=bfloat16"
        if config.optimizer == "muon":
            what = "muon needs whole matrices, and fsdp shards them"
            raise UserError(what, "parallel=fsdp", fix)
        if config.dtype == "float16":
            what = "each rank would scale a float16 loss its own way, and fsdp shards the weights"
            raise UserError(what, "parallel=fsdp", fix)
    if config.trains:
        resuming = settings.folder is not None
        parallel.main_first(
            lambda: check_out_dir(config.out_dir, resuming, config.overwrite), runtime
        )


# ---------------------------------------------------------------- the model


def make_model(settings, meta):
    """The model to train, on the CPU: from the checkpoint, from another run, from pretrained
    weights, or new."""
    config, given, folder = settings.config, settings.model, settings.folder
    fix = "prepare the text with the model's tokenizer"
    where = f"dataset={config.dataset}"
    if folder is None and config.init_from != "scratch" and checkpoint.steps(config.init_from):
        folder, given = open_other_run(config, given)
    if folder is not None:
        model = checkpoint.load_model(folder, given)
        known, needed = model.config.vocab_size, meta["vocab_size"]
        if known < needed:
            raise UserError(f"the model knows {known} tokens, the data have {needed}", where, fix)
        return model

    weights = None
    if config.init_from != "scratch":
        given, weights = load_pretrained(config, given)
        check_model(given)
    given = {"vocab_size": meta["vocab_size"]} | given
    if given["vocab_size"] < meta["vocab_size"]:
        what = f"vocab_size={given['vocab_size']} is below the data's {meta['vocab_size']}"
        raise UserError(what, where, fix + ", or leave vocab_size out")

    model_config = configure({"model": config.model} | given)
    if isinstance(model_config, VariantConfig):
        unused = [key for key in idle(asdict(model_config)) if key in given]
        if unused:
            print(f"note: {', '.join(unused)} has no effect on the parts chosen")
        if config.match != "none":
            model_config = match_width(model_config, config, given)

    torch.manual_seed(seed_for(config.seed, 0))
    model = make(model_config)
    if weights is not None:
        hf.load_weights(model, weights)
    return model


def load_pretrained(config, given):
    """(values of the model, its weights) from config.init_from. Sets config.model accordingly."""
    word, imported, weights = hf.load_pretrained(config.init_from)
    set_word(config, given, word)
    return {"model": word} | imported | given, weights


def set_word(config, given, word):
    """Set config.model to the word of the weights. Raises UserError if another one was given."""
    if given.get("model", word) != word:
        raise UserError(
            f"these are weights of a {word} model",
            f"init_from={config.init_from}",
            f"leave model={given['model']} out",
        )
    config.model = word


def open_other_run(config, given):
    """(newest checkpoint, values of the model) of the run folder config.init_from. Sets
    config.model accordingly. Raises UserError for a given key that this model does not have."""
    folder = checkpoint.find(config.init_from)
    _, stored, _ = checkpoint.read(folder)
    set_word(config, given, stored["model"])
    known = {"model", "arch", *keys(type(configure(stored)))}
    given = {key: stored[key] for key in known & stored.keys()} | given
    check_model(given)
    return folder, given


def match_width(model_config, config, given):
    """A variant's configuration with the MLP width at which it costs as much as its base."""
    shared = ("block_size", "n_layer", "n_head", "n_embd", "multiple_of")
    sizes = {key: given[key] for key in shared if key in given}
    word, vocab_size = config.model, model_config.vocab_size
    base = configure(sizes | {"model": word, "arch": word, "vocab_size": vocab_size})
    try:
        width, residual = match(model_config, base, config.match)
    except ValueError as error:
        raise UserError(str(error), f"match={config.match}", "leave match out") from None
    print(f"match {config.match}: mlp_width {width}, {residual:+.2f} % beside {word}")
    return replace(model_config, mlp_width=width)


# ---------------------------------------------------------------- the run


def make_run(settings, metas, tokenizer, runtime):
    """The Run of some Settings, on datasets {name: meta.json} with one tokenizer. Writes nothing.
    Raises UserError if the data, the model or the checkpoint do not allow it."""
    config, folder = settings.config, settings.folder
    state = start_state(settings, mixed_fingerprint(metas.values()))
    model = make_model(settings, metas[config.datasets[0]]).to(runtime.device)
    if folder is None and config.init_from != "scratch" and runtime.main:
        warn_of_other_tokens(config, tokenizer)

    # The data.
    sources = open_sources(config, metas, tokenizer, model.config.block_size)
    check_objective(config, model, sources)
    if state["best_val_loss"] is not None:  # an older checkpoint, of one dataset, lacks this
        state.setdefault("best_bits_per_byte", state["best_val_loss"] * sources[0].bits_per_byte)
    data = Data(sources, open_batches(config, sources), tokenizer)

    # Resolve each `auto` here and save the result, so that a resumed run makes the same choice.
    kind = runtime.device.split(":")[0]
    step_tokens = config.batch_size * config.gradient_accumulation_steps * model.config.block_size
    steps = config.max_iters - state["step"]
    unused = sum(layer.unused() for layer in moe.layers_of(model))  # by one token
    active = sum(p.numel() for p in model.parameters()) - unused
    flops = 6 * active * step_tokens * steps
    runtime.auto_dtype &= not config.check  # the golden curves are of float32
    runtime.choose_compile(config.compile, flops)
    device = kind if config.device == "auto" else config.device
    config = replace(config, device=device, dtype=runtime.dtype, compile=runtime.compile)

    # The model as it is trained, and its optimizers.
    if config.activation_checkpointing:
        for block in model.blocks:
            block.forward = recomputed(block.forward, runtime)
    parallel.shard(model, config.parallel, runtime)
    optimizers = make_optimizers(model, config, runtime)
    scaler = torch.amp.GradScaler(kind, enabled=runtime.dtype == "float16")
    stored = {} if folder is None else checkpoint.optimizer_tensors(folder)
    if folder is not None:
        moments = {key: stored[key] for key in stored if not key.startswith(checkpoint.REFERENCE)}
        parallel.scatter(model, optimizers, moments)
        scaler.load_state_dict(state.get("scaler", {}))

    accumulates = config.gradient_accumulation_steps > runtime.world_size
    dpo = config.objective == "dpo"
    loss = functools.partial(PreferenceLoss, beta=config.dpo_beta) if dpo else parallel.Loss
    net = parallel.trained(model, runtime.compile, runtime, accumulates, loss)
    learner = Learner(model, net, optimizers, scaler)
    saved_config = asdict(config) | asdict(model.config) | {"versions": versions()}
    step, saved = state["step"], None if folder is None else state["step"]
    run = Run(config, runtime, data, learner, step, state, folder, saved, saved_config)
    if dpo:
        set_references(run, stored)
    if runtime.main:
        describe(run)
    return run


def recomputed(forward, runtime):
    """A block's forward pass that keeps its input alone and computes the rest again in the backward
    pass (Chen et al. 2016, arXiv:1604.06174), with the same attention."""

    def compute(*args):
        with runtime.attention():
            return forward(*args)

    return functools.partial(checkpoint_activations, compute, use_reentrant=False)


def start_state(settings, fingerprint):
    """The state that a run starts from: that of the checkpoint, or a new one. Raises UserError if
    the checkpoint was trained on other data."""
    state, changed = settings.state, False
    if state is None:
        state = {"step": 0, "best_val_loss": None, "best_step": None, "seconds": 0.0}
    else:
        changed = state["data"] != fingerprint
    if changed and not settings.config.allow_data_change:
        raise UserError(
            f"the data in {settings.config.dataset} are not those this run began with",
            settings.folder,
            "prepare the same text again, train in another out_dir, or give --allow_data_change",
        )
    if changed:  # losses on the old data cannot be compared with new ones
        state |= dict.fromkeys(("best_val_loss", "best_bits_per_byte", "best_step", "evaluated"))
        state["samples"] = {}
    state["data"] = fingerprint
    return state


def warn_of_other_tokens(config, tokenizer):
    """Warn if the tokenizer of the data is not the tokenizer of the pretrained weights."""
    if hf.same_tokens(config.init_from, tokenizer) is False:
        command = f"python prepare.py NAME --input=TEXTFILE --tokenizer={config.init_from}"
        print(
            f"warning: {config.dataset} was not prepared with the tokenizer of these weights: "
            f"`{command}` does that"
        )


def open_folder(run):
    """Prepare the run folder; returns a context in which rank 0 holds its lock."""
    config, resuming = run.config, run.folder is not None
    lock = parallel.main_first(
        lambda: open_out_dir(config.out_dir, resuming, config.overwrite), run.runtime
    )
    return lock or nullcontext()


def open_log(run):
    """Write the configuration into the run folder, and return the RunLog."""
    config, saved_config = run.config, run.saved_config
    files.write(Path(config.out_dir) / "config.json", json.dumps(saved_config, indent=1))
    files.remove(Path(config.out_dir) / DIVERGED)
    last_step = None if run.folder is None else run.step
    log = RunLog(config.out_dir, last_step, config.max_iters, peak_speed(run))
    log.loggers = start_loggers(config, saved_config, run.state, log.rows)
    return log


def peak_speed(run):
    """The tokens/s at which the devices would compute nothing else and never wait, for the MFU."""
    runtime, c = run.runtime, variant(run)
    peak, source = peak_flops(runtime)
    print(f"100 % MFU is {peak * runtime.world_size / 1e12:,.3g} TFLOP/s, {source}")
    return peak * runtime.world_size / training_flops_per_token(c, c.block_size)


# ---------------------------------------------------------------- the printed description


def describe(run):
    """Print the machine, the data, the parts of the model and the optimizers of a run."""
    config, model, sources = run.config, run.learner.model, run.data.sources
    print("\n".join(run.runtime.reasons))
    for source in sources:
        describe_source(source, mixed=len(sources) > 1)

    total = sum(p.numel() for p in model.parameters())
    mlps = [block.mlp for block in model.blocks]
    unused = sum(mlp.unused() for mlp in mlps if hasattr(mlp, "unused"))
    active = f", of which a token uses {total - unused:,}" if unused else ""
    print(f"model {config.model}: {total:,} parameters{active}")
    for part, count in parameters_by_part(model).items():
        print(f"  {part:<22}{count:>12,}")
    for optimizer in run.learner.optimizers:
        for group in optimizer.param_groups:
            count, tensors = sum(p.numel() for p in group["params"]), len(group["params"])
            print(
                f"{type(optimizer).__name__}: {count:,} parameters in {tensors} tensors, "
                f"weight decay {group['weight_decay']}"
            )

    samples, passes = config.max_iters * run.step_samples, []
    for source in sources:
        epochs = samples * source.weight / source.batches.windows_per_epoch
        name = source.name if len(sources) > 1 else "the training data"
        passes.append(f"{epochs:.{1 if epochs >= 0.1 else 3}f} times {name}")
    steps = f"{config.max_iters} steps of {run.step_tokens:,} tokens"
    print(folded(f"{steps}: {', '.join(passes)}", 2))


def describe_source(source, mixed):
    """Print the sizes of a dataset, and of its vocabulary."""
    train, val = source.splits["train"], source.splits["val"]
    share = f"{source.weight:.2%} of the samples, " if mixed else ""
    counts = f"{share}{len(train):,} tokens to train on, {len(val):,} to validate"
    print(folded(f"data {source.name}: {counts}, vocabulary {source.meta['vocab_size']}", 2))
    if isinstance(train, Pairs):
        left_out, cut = train.left_out + val.left_out, train.cut + val.cut
        words = [f"  {len(train.starts):,} pairs to train on, {len(val.starts):,} to validate"]
        if left_out:
            words.append(f"{left_out:,} more left out: their answers begin beyond block_size")
        if cut:
            words.append(f"{cut:,} cut there")
        print(folded("; ".join(words), 4))


def parameters_by_part(model):
    """{part: number of parameters}. A part of the blocks is summed over all blocks."""
    counts = {}
    for name, p in model.named_parameters():
        words = name.split(".")
        part = words[0]
        if part == "blocks":
            part = f"{words[2]} (in {model.config.n_layer} blocks)"
        counts[part] = counts.get(part, 0) + p.numel()
    return counts
