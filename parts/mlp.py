"""The slot `mlp`: two linear maps with an activation between them, or three with a gate."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import gelu
from parts.part import Part, linear


class PlainMLP(Part):
    """down(act(up(x))), mlp_width or 4C wide."""

    act = None  # the activation
    inner = ("up",)  # the maps from C to the width inside

    @classmethod
    def of(cls, paper, act):
        """The class of one word: an MLP with the activation `act` of this paper."""
        return type(cls.__name__, (cls,), {"act": staticmethod(act), "paper": paper})

    @classmethod
    def width_of(cls, config):
        return config.mlp_width or 4 * config.n_embd

    def __init__(self, config):
        super().__init__()
        self.width = self.width_of(config)
        for name in self.inner:
            setattr(self, name, linear(config.n_embd, self.width, config))
        self.down = linear(self.width, config.n_embd, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, where=None):
        x = self.act(self.up(x))  # (B, T, width)
        return self.dropout(self.down(x))


class GatedMLP(PlainMLP):
    """down(act(gate(x)) * up(x)), mlp_width or two thirds of 4C wide (rounded up to multiple_of),
    so that three matrices cost what two did."""

    reads = ("multiple_of", "ffn_dim_multiplier")
    inner = ("gate", "up")

    @classmethod
    def width_of(cls, config):
        if config.mlp_width:
            return config.mlp_width
        width = int((config.ffn_dim_multiplier or 1) * int(2 * 4 * config.n_embd / 3))
        return config.multiple_of * math.ceil(width / config.multiple_of)

    def forward(self, x, where=None):
        x = self.act(self.gate(x)) * self.up(x)  # (B, T, width)
        return self.dropout(self.down(x))


class NoMLP(Part):
    """0: with block=parallel, whose MLP has no norm of its own, a block is its mixer alone."""

    paper = "Mamba, Gu & Dao 2023, arXiv:2312.00752"

    @classmethod
    def width_of(cls, config):
        return 0

    def __init__(self, config):
        super().__init__()

    def forward(self, x, where=None):
        return torch.zeros_like(x)


HENDRYCKS = "Hendrycks & Gimpel 2016, arXiv:1606.08415"
SHAZEER = "Shazeer 2020, arXiv:2002.05202"
MLP = {
    "relu": PlainMLP.of("Vaswani et al. 2017, arXiv:1706.03762", F.relu),
    "gelu": PlainMLP.of(HENDRYCKS, gelu),  # GPT-2's tanh form
    "gelu_erf": PlainMLP.of(HENDRYCKS, F.gelu),  # exact, as in Falcon and GPT-NeoX
    "silu": PlainMLP.of("Elfwing et al. 2017, arXiv:1702.03118", F.silu),  # also called Swish
    "relu2": PlainMLP.of("So et al. 2021, arXiv:2109.08668", lambda x: F.relu(x).square()),
    "glu": GatedMLP.of("Dauphin et al. 2016, arXiv:1612.08083", F.sigmoid),
    "bilinear": GatedMLP.of(SHAZEER, lambda x: x),
    "reglu": GatedMLP.of(SHAZEER, F.relu),
    "geglu": GatedMLP.of(SHAZEER, gelu),
    "swiglu": GatedMLP.of(SHAZEER, F.silu),
    "none": NoMLP,
}
