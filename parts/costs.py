"""
What a configuration costs: parameters, FLOPs, bytes of the cache and of training; and the MLP width
at which two configurations cost the same.

These are sums over what the parts say of themselves. The parts are made without numbers, on torch's
meta device, so that parameters are counted there and no formula says the same a second time.
c is any object with the fields of VariantConfig. C = n_embd, V = vocab_size, T tokens of context,
B sequences.
"""

import math
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from parts.mixer import MIXER
from parts.mlp import MLP
from parts.part import Linear
from parts.variant import Variant

# ---------------------------------------------------------------- a model without numbers


class NoInitialValues(TorchFunctionMode):
    """Skips the initialisers: on the meta device they do nothing, but normal_ loads 800 modules."""

    names = ("normal_", "uniform_", "kaiming_uniform_", "constant_", "ones_", "zeros_")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in self.names:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def without_numbers(c):
    """(the model of a configuration with shapes but without memory, [(block, number of layers like
    it)]). Layers repeat, so that only the first of each kind are made."""
    model = made(tuple(vars(c).items()))
    kinds = len(model.blocks)
    return model, [
        (block, len(range(first, c.n_layer, kinds))) for first, block in enumerate(model.blocks)
    ]


@lru_cache(maxsize=256)
def made(items):
    c = SimpleNamespace(**dict(items))
    words = c.mixer.split(",")
    c.n_layer = min(c.n_layer, math.lcm(len(words), *(MIXER[word].period(c) for word in words)))
    with torch.device("meta"), NoInitialValues():
        return Variant(c).eval()


def count(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


# ---------------------------------------------------------------- parameters and FLOPs


def mlp_width(c):
    """The number of features inside the MLP."""
    return MLP[c.mlp].width_of(c)


def parameter_table(c):
    """{part: parameters}, exact. `attention` is the mixer, of any kind. `norms` has all else that a
    block has, also what is learned in the slot residual."""
    model, blocks = without_numbers(c)
    mixers = sum(layers * count(block.attn) for block, layers in blocks)
    mlps = sum(layers * count(block.mlp) for block, layers in blocks)
    whole_blocks = sum(layers * count(block) for block, layers in blocks)
    return {
        "embedding": count(model.wte),
        "position": count(model.wpe),
        "attention": mixers,
        "mlp": mlps,
        "norms": whole_blocks - mixers - mlps + count(model.norm_e, model.norm_f),
        "head": 0 if c.tie_embeddings else count(model.lm_head),
    }


def parameters(c):
    return sum(parameter_table(c).values())


def active_parameters(c):
    """Without the parameters that one token does not use, those of experts that are not chosen."""
    _, blocks = without_numbers(c)
    return parameters(c) - sum(layers * block.mlp.unused() for block, layers in blocks)


def flops_per_token(c, T):
    """FLOPs of one token's forward pass in a context of T, a multiply-add being 2, as torch's
    counter has them: matrices and mixers, not norms and activations. A matrix of n weights: 2n."""
    model, blocks = without_numbers(c)
    flops = 2 * model.lm_head.weight.numel()
    for block, layers in blocks:
        matrices = [module.weight for module in block.modules() if isinstance(module, Linear)]
        flops += layers * sum(2 * matrix.numel() for matrix in matrices)
        flops += layers * sum(part.flops(T) for part in (block.attn, block.mlp, block.residual))
    return flops


def training_flops_per_token(c, T):
    """Three times the forward pass: backward multiplies twice, for inputs and for weights."""
    return 3 * flops_per_token(c, T)


def kv_bytes(c, T, bytes=4):
    """Bytes of keys and values, or of other states, after T tokens of one sequence."""
    _, blocks = without_numbers(c)
    return bytes * sum(layers * block.attn.held(T) for block, layers in blocks)


def kv_bytes_per_token(c, bytes=4):
    """Bytes per token of a full context: fewer with windows and with states of a fixed size."""
    return kv_bytes(c, c.block_size, bytes) / c.block_size


def match(c, base, what="params"):
    """(mlp_width, residual in percent): the width of the MLP at which c costs what base does.

    what: "params", those that a token uses, or "flops" of a full context; "none": the width as it
    is, and the difference in parameters. The width is a multiple of 8, or of 1 where 8 is too
    coarse for 0.5 %. ValueError where no sensible width does it.
    """

    def cost(c):
        return flops_per_token(c, base.block_size) if what == "flops" else active_parameters(c)

    goal = cost(base)

    def residual(width):
        return 100 * (cost(replace(c, mlp_width=width)) / goal - 1)

    if what == "none":
        return mlp_width(c), residual(mlp_width(c))
    # Both costs are straight lines in the width: two points give where the line meets the goal.
    slope = cost(replace(c, mlp_width=2)) - cost(replace(c, mlp_width=1))
    if not slope:
        raise ValueError(f"mlp={c.mlp}: no MLP width could match the base: choose match=none")
    exact = 1 + (goal - cost(replace(c, mlp_width=1))) / slope
    for step in (8, 1):
        width = max(step, step * round(exact / step))
        if abs(residual(width)) <= 0.5 and width <= 8 * mlp_width(base):
            return width, residual(width)
    raise ValueError(
        f"no MLP width matches the base in {what} (it would be {exact:.0f}, the base has "
        f"{mlp_width(base)}): choose match=none, or parts that cost less or more"
    )
