"""The slot `mlp`: two linear maps with an activation between them, or three with a gate. slots.py
lists the words; mixtures of experts stand in moe.py."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.part import Part, conv_at, linear, refuse


def relu2(x):
    """The square of ReLU."""
    return F.relu(x).square()


class FeedForward(Part):
    """The map of a subclass, its `transform`, between the convolutions at its input and output that
    conv_sites may ask for."""

    def __init__(self, config):
        super().__init__()
        self.conv_in = conv_at("mlp_input", config.n_embd, config)
        self.conv_out = conv_at("mlp_output", config.n_embd, config)

    def forward(self, x, where=None, cache=None):
        """x (B, T, C) -> (B, T, C). where: a position.Where. cache: the state of this layer, or
        None."""
        x = self.conv_in(x, cache)
        return self.conv_out(self.transform(x, where, cache), cache)


class PlainMLP(FeedForward):
    """down(act(up(x))), mlp_width or 4C wide."""

    reads = ("mlp_width",)
    act = None  # the activation

    @classmethod
    def of(cls, paper, act):
        """The class of one word: an MLP with the activation `act` of this paper."""
        # type(name, parents, attributes) makes a class, as a `class` statement does.
        return type(cls.__name__, (cls,), {"act": staticmethod(act), "paper": paper})

    @classmethod
    def width_of(cls, config):
        return config.mlp_width or 4 * config.n_embd

    def __init__(self, config):
        super().__init__(config)
        width = self.width_of(config)
        self.up = linear(config.n_embd, width, config)
        self.conv_up = conv_at("mlp_inner", width, config)
        self.down = linear(width, config.n_embd, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)

    def transform(self, x, where, cache):
        x = self.act(self.conv_up(self.up(x), cache))  # (B, T, width)
        return self.dropout(self.down(x))


class GatedMLP(PlainMLP):
    """down(act(gate(x)) * up(x)), mlp_width or two thirds of 4C wide (rounded up to multiple_of),
    so that three matrices cost what two did."""

    reads = ("mlp_width", "multiple_of", "ffn_dim_multiplier")

    @classmethod
    def width_of(cls, config):
        if config.mlp_width:
            return config.mlp_width
        width = int((config.ffn_dim_multiplier or 1) * int(2 * 4 * config.n_embd / 3))
        return config.multiple_of * math.ceil(width / config.multiple_of)

    def __init__(self, config):
        FeedForward.__init__(self, config)
        width = self.width_of(config)
        self.gate = linear(config.n_embd, width, config)
        self.up = linear(config.n_embd, width, config)
        self.conv_gate = conv_at("mlp_inner", width, config, name="gate")
        self.conv_up = conv_at("mlp_inner", width, config)
        self.down = linear(width, config.n_embd, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)

    def transform(self, x, where, cache):
        gate = self.conv_gate(self.gate(x), cache)  # (B, T, width)
        up = self.conv_up(self.up(x), cache)  # (B, T, width)
        x = self.act(gate) * up
        return self.dropout(self.down(x))


class SwiGLU(GatedMLP):
    """down(silu(gate(x)) * up(x)), as in LLaMA."""

    paper = "Shazeer 2020, arXiv:2002.05202"
    act = staticmethod(F.silu)


class NoMLP(Part):
    """0: with block=parallel, whose MLP has no norm of its own, a block is its mixer alone."""

    paper = "Mamba, Gu & Dao 2023, arXiv:2312.00752"

    @classmethod
    def check(cls, config):
        refuse(
            "mlp_" in config.conv_sites,
            f"conv_sites={config.conv_sites} names a site of the MLP, which mlp=none leaves out: "
            "remove it",
        )

    @classmethod
    def width_of(cls, config):
        return 0

    def __init__(self, config):
        super().__init__()

    def forward(self, x, where=None, cache=None):
        return torch.zeros_like(x)
