"""The model of a run: its configuration and first weights, and the module that is trained: the
loss, compilation, recomputed activations."""

import functools
from dataclasses import asdict, replace

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as checkpoint_activations

from common import files
from common.commands import quoted
from common.errors import UserError
from parts import costs
from parts.architectures import configure, without_effect
from parts.variant import VariantConfig
from tokens.data import same_tokens
from tokens.tokenizer import tokenizer_from_json
from training.settings import check_base, check_model, say

# ---------------------------------------------------------------- its configuration and weights


def check_weights_exist(settings):
    """Raise UserError if a run starts from pretrained weights that are not there."""
    if settings.folder is None and settings.config.init_from != "scratch":
        from weights import hf  # here, since it is rarely needed

        hf.find(settings.config.init_from)


def check_tokens(settings, tokenizer):
    """Raise UserError if a run goes on from a checkpoint, of its own or of another run, whose
    tokenizer is not the data's."""
    if settings.folder is None:
        return
    known = tokenizer_from_json(settings.tokenizer, settings.folder / "tokenizer.json")
    if not same_tokens(known, tokenizer):
        dataset = settings.config.dataset
        what = f"{dataset} was prepared with another tokenizer than this run's"
        run = quoted(f"--tokenizer={settings.folder.parent.parent}")
        fix = f"python prepare.py NAME --input=TEXTFILE {run}"
        raise UserError(what, f"dataset={dataset}", fix)


def import_weights(settings, tokenizer):
    """(Settings with the model's values, {name: tensor}) of pretrained weights. Sets config.model.
    Raises UserError if the user named another model, or if the data have another tokenizer."""
    from weights import hf

    config = settings.config
    word, imported, weights = hf.load_pretrained(config.init_from)
    check_base(settings.model | {"init_from": config.init_from}, imported | {"model": word})
    model = imported | settings.model | {"model": word}
    longest = imported["block_size"]
    if model["block_size"] > longest and model.get("rope_scaling", "none") == "none":
        change = f"block_size shortened from {model['block_size']} to {longest}"
        say(f"note: {change} (the longest context of these weights)")
        model["block_size"] = longest
    check_model(model)
    same = hf.agrees_with(config.init_from, tokenizer)
    if same is None:
        what = f"{config.dataset} may have other tokens than {config.init_from}"
        files.warn_once(f"{what}, whose tokenizer cannot be read")
    elif not same:
        what = f"{config.dataset} was not prepared with the tokenizer of these weights"
        tokenizer_from = quoted(f"--tokenizer={config.init_from}")
        fix = f"python prepare.py NAME --input=TEXTFILE {tokenizer_from}"
        raise UserError(what, f"dataset={config.dataset}", fix)
    config.model = word
    return settings._replace(model=model), weights


def new_model_config(settings, vocab_size):
    """The configuration of a new model for data with this vocabulary. With `match`, a variant gets
    the MLP width at which it costs as much as its base."""
    config = settings.config
    values = {"vocab_size": vocab_size} | settings.model | {"model": config.model}
    if values["vocab_size"] < vocab_size:
        what = f"vocab_size={values['vocab_size']} is below the data's {vocab_size}"
        fix = "prepare the text with the model's tokenizer, or remove vocab_size"
        raise UserError(what, f"dataset={config.dataset}", fix)
    made = configure(values, as_variant=config.match != "none")
    if not isinstance(made, VariantConfig):
        return made
    unused = [key for key in without_effect(asdict(made)) if key in values]
    if unused:
        say(f"note: without effect with the chosen parts: {', '.join(unused)}")
    if config.match == "none":
        return made

    shared = ("block_size", "n_layer", "n_head", "n_embd", "multiple_of", "vocab_size", "model")
    sizes = {key: values[key] for key in shared if key in values}
    base = configure(sizes, as_variant=True)
    try:
        width, residual = costs.match(made, base, config.match)
    except ValueError as error:
        raise UserError(str(error), f"match={config.match}", "remove match") from None
    say(f"match {config.match}: mlp_width {width}, {residual:+.2f} % from the base {config.model}")
    return replace(made, mlp_width=width)


def flops_left(model, config, step):
    """About how many FLOPs a run takes from a step on: six for each parameter and token."""
    step_samples = config.batch_size * config.gradient_accumulation_steps
    tokens = step_samples * model.config.block_size * (config.max_iters - step)
    return 6 * costs.used_parameters(model) * tokens


# ---------------------------------------------------------------- as it is trained


class Loss(torch.nn.Module):
    """The loss of a model and nothing else. If a compiled forward pass returned the logits as well,
    the backward pass would be given their gradient: (batch, block_size, vocabulary) zeros.

    With `measured`, for an evaluation, a (3,) tensor of the loss, the number of targets y that are
    the most probable token, and the number of rows with targets, all of them so."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # {name: tensor} that a loss needs again after resuming. Checkpoints hold it; this has none.
        self.stored = {}

    def forward(self, x, y, measured=False):
        logits, loss = self.model(x, y)
        if not measured:
            return loss
        right = logits.argmax(-1) == y  # (B, T); False where y is -1
        masked = y < 0
        right_rows = (right | masked).all(1) & ~masked.all(1)  # (B,)
        return torch.stack([loss, right.sum().type_as(loss), right_rows.sum().type_as(loss)])


def recompute_blocks(model, runtime):
    """Let each block keep its input alone and compute the rest again in the backward pass (Chen et
    al. 2016, arXiv:1604.06174)."""
    if runtime.compile:
        # Without it torch compiles no block that keeps something for later ones (value_residual).
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in model.blocks:
        block.forward = recomputed(block.forward, runtime)


def recomputed(forward, runtime):
    """A block's forward pass, computed again in the backward pass with the same attention."""

    def compute(*args):
        with runtime.attention():
            return forward(*args)

    return functools.partial(checkpoint_activations, compute, use_reentrant=False)


def compiled(loss, model, runtime):
    """The loss module of a model, compiled if the runtime compiles: on a GPU as a whole, on a CPU
    each block by itself, since blocks of the same code are compiled once."""
    if not runtime.compile:
        return loss
    if not runtime.device.startswith("cpu"):
        return torch.compile(loss, dynamic=False)
    # With the compiler's own dropout a step takes three times as long. cpp_wrapper compiles faster.
    for block in model.blocks:
        block.compile(dynamic=False, options={"fallback_random": True, "cpp_wrapper": True})
    return loss


def evaluation_net(net, runtime):
    """The module of a run, as an evaluation uses it: without DDP, and on a CPU not compiled, since
    compiling it takes as long as thirty evaluations would save."""
    if isinstance(net, DistributedDataParallel):
        net = net.module  # an evaluation has no gradients to exchange
    if runtime.compile and runtime.device.startswith("cpu"):
        return torch.compiler.set_stance("force_eager")(net)
    return net
