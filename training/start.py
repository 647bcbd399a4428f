"""Builds a run, and finds every mistake before anything is written."""

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint as recompute

from common.configurator import build
from common.errors import UserError
from common.runtime import Runtime, seed_for, versions
from parts.architectures import choose, idle
from parts.costs import match
from parts.variant import VariantConfig
from tokens.mixture import mixed_fingerprint, open_batches, open_sources
from tokens.pairs import Pairs
from training import parallel
from training.optim import make_optimizers
from training.run_folder import check_out_dir
from training.settings import TrainConfig
from weights import checkpoint, pretrained


def describe(model, optimizers, config, runtime, sources):
    """Print what was chosen, and the parts of the model in a small table."""
    print("\n".join(runtime.reasons))
    for source in sources:
        train, val = source.splits["train"], source.splits["val"]
        share = f"{source.weight:.2%} of the samples, " if len(sources) > 1 else ""
        print(
            f"data {source.name}: {share}{len(train):,} tokens to train on, {len(val):,} to validate, vocabulary {source.meta['vocab_size']}"
        )
        if isinstance(train, Pairs):
            left_out, cut = train.left_out + val.left_out, train.cut + val.cut
            print(
                f"  {len(train.starts):,} pairs to train on, {len(val.starts):,} to validate"
                + f"; {left_out:,} more left out: their answers begin beyond block_size"
                * bool(left_out)
                + f"; {cut:,} cut there" * bool(cut)
            )
    print(f"model {config.model}: {sum(p.numel() for p in model.parameters()):,} parameters")
    counts = {}
    for name, p in model.named_parameters():
        words = name.split(".")
        part = (
            f"{words[2]} (in {model.config.n_layer} blocks)" if words[0] == "blocks" else words[0]
        )
        counts[part] = counts.get(part, 0) + p.numel()
    for part, count in counts.items():
        print(f"  {part:<22}{count:>12,}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            count = sum(p.numel() for p in group["params"])
            print(
                f"{type(optimizer).__name__}: {count:,} parameters in {len(group['params'])} tensors, weight decay {group['weight_decay']}"
            )
    step_tokens = config.batch_size * config.gradient_accumulation_steps * model.config.block_size
    samples = config.max_iters * config.batch_size * config.gradient_accumulation_steps
    times = [
        f"{samples * source.weight / source.batches.windows_per_epoch:.1f} times {source.name if len(sources) > 1 else 'the training data'}"
        for source in sources
    ]
    print(f"{config.max_iters} steps of {step_tokens:,} tokens: {', '.join(times)}")


@dataclass
class Run:
    """A run that is ready for the step after `step`."""

    config: TrainConfig
    runtime: Runtime
    model: torch.nn.Module  # what is evaluated, saved and sampled
    net: (
        torch.nn.Module
    )  # the same weights as they are trained: compiled, with gradients averaged over the ranks
    optimizers: list
    scaler: torch.amp.GradScaler  # of the loss in float16; elsewhere it does nothing
    sources: list  # of mixture.Source: the data sets
    batches: object  # the training samples in their order
    tokenizer: object
    step: int
    state: dict  # saved beside the weights: best loss, seconds, fingerprint of the data, samples drawn from each of several sets
    folder: Path | None  # the checkpoint that the run goes on from
    everything: dict  # the resolved configuration, as it is saved

    @property
    def step_tokens(self):
        return self.step_samples * self.model.config.block_size

    @property
    def step_samples(self):
        return self.config.batch_size * self.config.gradient_accumulation_steps


def make_model(config, given, folder, meta):
    """The model to train, on the CPU: new, from the checkpoint `folder`, or from pretrained weights."""
    if folder is not None:
        model = checkpoint.load_model(folder, given)
        if model.config.vocab_size < meta["vocab_size"]:
            raise UserError(
                f"the model knows {model.config.vocab_size} tokens, the data have {meta['vocab_size']}",
                f"dataset={config.dataset}",
                "prepare the text with the model's tokenizer",
            )
        return model
    weights = None
    if config.init_from != "scratch":
        word, imported, weights = pretrained.load_pretrained(config.init_from)
        if given.get("model", word) != word:
            raise UserError(
                f"these are weights of a {word} model",
                f"init_from={config.init_from}",
                f"leave model={given['model']} out",
            )
        config.model, given = word, imported | given
    given = {"vocab_size": meta["vocab_size"]} | given
    if given["vocab_size"] < meta["vocab_size"]:
        raise UserError(
            f"vocab_size={given['vocab_size']} is below the data's {meta['vocab_size']}",
            f"dataset={config.dataset}",
            "prepare the text with the model's tokenizer, or leave vocab_size out",
        )
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
        pretrained.load_weights(model, weights)
    return model


def matched(model_config, config, given):
    """A variant's configuration with the MLP width at which it costs what the model it starts from does."""
    sizes = {
        key: value
        for key, value in given.items()
        if key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "multiple_of")
    }
    base = build(
        VariantConfig,
        choose(
            sizes
            | {"model": config.model, "arch": config.model, "vocab_size": model_config.vocab_size}
        )[2],
    )
    try:
        width, residual = match(model_config, base, config.match)
    except ValueError as error:
        raise UserError(str(error), f"match={config.match}", "leave match out") from None
    print(f"match {config.match}: mlp_width {width}, {residual:+.2f} % beside {config.model}")
    return replace(model_config, mlp_width=width)


def make_run(config, given, folder, state, runtime, find_data):
    """The Run of a configuration, from the checkpoint `folder` with its `state`, or new if they are None. Everything
    that can be wrong is found here, before out_dir is touched."""
    world = runtime.world_size
    if config.gradient_accumulation_steps % world:
        raise UserError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} is not divisible by {world} ranks",
            "gradient_accumulation_steps",
            "make it a multiple of the number of processes",
        )
    if (
        config.parallel == "fsdp"
        and world > 1
        and (config.optimizer == "muon" or config.dtype == "float16")
    ):
        what = (
            "muon needs whole matrices"
            if config.optimizer == "muon"
            else "the scale of a float16 loss is each rank's own"
        )
        raise UserError(
            f"{what}, and fsdp shares them out",
            "parallel=fsdp",
            "choose --parallel=ddp, or --optimizer=adamw with --dtype=bfloat16",
        )
    if config.trains:
        parallel.main_first(
            lambda: check_out_dir(config.out_dir, folder is not None, config.overwrite), runtime
        )
    metas, tokenizer = find_data(config, runtime)
    data = mixed_fingerprint(metas.values())
    if folder is None:
        state = {"step": 0, "best_val_loss": None, "best_step": None, "seconds": 0.0, "data": data}
    elif state["data"] != data and not config.allow_data_change:
        raise UserError(
            f"the data in {config.dataset} are not those this run began with",
            folder,
            "prepare the same text again, train in another out_dir, or give --allow_data_change",
        )
    if state["data"] != data:  # losses on other data say nothing about these
        state |= {
            "best_val_loss": None,
            "best_bits_per_byte": None,
            "best_step": None,
            "evaluated": None,
            "samples": {},
        }
    state["data"] = data
    model = make_model(config, given, folder, metas[config.datasets[0]]).to(runtime.device)
    if (
        folder is None
        and config.init_from != "scratch"
        and runtime.main
        and pretrained.same_tokens(config.init_from, tokenizer) is False
    ):
        print(
            f"warning: {config.dataset} was not prepared with the tokenizer of these weights: `python prepare.py NAME --input=TEXTFILE --tokenizer={config.init_from}` does that"
        )
    sources = open_sources(config, metas, tokenizer, model.config.block_size)
    if (
        state["best_val_loss"] is not None
    ):  # a checkpoint from before mixtures has one set, and its loss alone
        state.setdefault("best_bits_per_byte", state["best_val_loss"] * sources[0].bits_per_byte)
    batches = open_batches(config, sources)
    if config.activation_checkpointing:  # Chen et al. 2016, arXiv:1604.06174
        for block in model.blocks:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    parallel.spread(model, config.parallel, runtime)
    optimizers = make_optimizers(model, config, runtime.device)
    scaler = torch.amp.GradScaler(runtime.device.split(":")[0], enabled=runtime.dtype == "float16")
    if folder is not None:
        parallel.scatter(model, optimizers, checkpoint.optimizer_tensors(folder))
        scaler.load_state_dict(state.get("scaler", {}))
    everything = asdict(config) | asdict(model.config) | {"versions": versions()}
    ready = Run(
        config,
        runtime,
        model,
        model,
        optimizers,
        scaler,
        sources,
        batches,
        tokenizer,
        state["step"],
        state,
        folder,
        everything,
    )
    flops = (
        6
        * sum(p.numel() for p in model.parameters())
        * ready.step_tokens
        * (config.max_iters - ready.step)
    )
    runtime.choose_compile(config.compile, flops)
    ready.net = parallel.trained(model, runtime.compile, runtime)
    if runtime.main:
        describe(model, optimizers, config, runtime, sources)
    return ready
