"""
What a configuration costs: parameters, FLOPs, bytes of the cache; and the MLP width at which two
configurations cost the same. `python -m parts.catalogue` prints the costs of every word.
"""

# Costs are sums over the parts' own flops(T), held(T) and unused(). The parts are made without
# numbers, on torch's meta device, where their parameters are counted.
# c is any object with the fields of VariantConfig. T: tokens of context.

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from parts.part import Linear, Part, short_convs
from parts.slots import MLP
from parts.variant import Variant

# ---------------------------------------------------------------- a model without numbers


class NoInitialValues(TorchFunctionMode):
    """Skips the initialisers: on the meta device they do nothing, but normal_ loads 800 modules."""

    names = ("normal_", "uniform_", "kaiming_uniform_", "constant_", "ones_", "zeros_")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in self.names:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def meta_model(c):
    """The model of a configuration on the meta device: with shapes but without memory."""
    return made_once(tuple(vars(c).items()))


@lru_cache(maxsize=256)
def made_once(items):
    """meta_model, from the items of the configuration, which a cache can compare."""
    with torch.device("meta"), NoInitialValues():
        return Variant(SimpleNamespace(**dict(items))).eval()


# ---------------------------------------------------------------- parameters and FLOPs


def mlp_width(c):
    """The number of features inside the MLP."""
    return MLP[c.mlp].width_of(c)


def parameters(c):
    """The number of parameters of a configuration's model."""
    return sum(p.numel() for p in meta_model(c).parameters())


def used_parameters(model):
    """The number of a model's parameters that one token uses: without the experts that are not
    chosen, and without the n-grams that are not there."""
    count = sum(p.numel() for p in model.parameters())
    return count - sum(part.unused() for part in model.modules() if isinstance(part, Part))


def active_parameters(c):
    """As used_parameters, of a configuration."""
    return used_parameters(meta_model(c))


def flops_per_token(c, T):
    """FLOPs of one token's forward pass in a context of T, a multiply-add being 2, as torch's
    counter has them: matrices and mixers, not norms and activations. A matrix of n weights: 2n."""
    model = meta_model(c)
    matrices = [module.weight for module in model.modules() if isinstance(module, Linear)]
    flops = 2 * sum(matrix.numel() for matrix in matrices)
    flops += sum(conv.flops(T) for conv in short_convs(model))
    for block in model.blocks:
        flops += block.attn.flops(T) + block.mlp.flops(T) + block.residual.flops(T)
        if "scores" in block.attn.acted_on:
            flops += model.wpe.flops(T)
    return flops


def training_flops_per_token(c, T):
    """Three times the forward pass: backward multiplies twice, for inputs and for weights."""
    return 3 * flops_per_token(c, T)


def kv_bytes(c, T):
    """Bytes of keys and values, or of other states, after T tokens of one sequence, in float32."""
    model = meta_model(c)
    held = model.embed.held(T)
    held += sum(conv.held(T) for conv in short_convs(model))
    return 4 * (held + sum(block.attn.held(T) for block in model.blocks))


def kv_bytes_per_token(c):
    """Bytes per token of a full context: fewer with windows and with states of a fixed size."""
    return kv_bytes(c, c.block_size) / c.block_size


def match(c, base, what="params"):
    """(mlp_width, excess): the width of the MLP at which c costs as much as base, and by how many
    percent it then still costs more.

    what: "params", the parameters that a token uses; "flops", of a full context; or "none": the
    width as it is, and the excess in parameters. The width is a multiple of 8, or of 1 where 8 is
    too coarse for 0.5 %. Raises ValueError where no sensible width does it.
    """

    def cost(config):
        if what == "flops":
            return flops_per_token(config, base.block_size)
        return active_parameters(config)

    def cost_at(width):
        return cost(replace(c, mlp_width=width))

    def excess(width):
        return 100 * (cost_at(width) / cost(base) - 1)

    if what == "none":
        return mlp_width(c), excess(mlp_width(c))
    # Both costs are straight lines in the width: two points give where the line meets the base.
    slope = cost_at(2) - cost_at(1)
    if slope == 0:
        raise ValueError(f"mlp={c.mlp}: no MLP width could match the base")
    exact = 1 + (cost(base) - cost_at(1)) / slope
    for step in (8, 1):
        width = max(step, step * round(exact / step))
        if abs(excess(width)) <= 0.5 and width <= 8 * mlp_width(base):
            return width, excess(width)
    raise ValueError(
        f"no MLP width matches the base in {what} (it would be {exact:.0f}, the base has "
        f"{mlp_width(base)})"
    )
