"""The slot `mlp`: two linear maps with an activation between them, or three with a gate."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import gelu
from parts.part import Part, linear


class ActivationMLP(Part):
    """An MLP around one activation: PlainMLP or GatedMLP, of which each word is a subclass."""

    act = formula = None  # the activation of a tensor, and the same of one number, by its paper

    @classmethod
    def of(cls, paper, act, formula):
        """The class of one word: an MLP with the activation `act` of this paper."""
        made = type(cls.__name__, (cls,), {"act": staticmethod(act), "paper": paper})
        made.formula = staticmethod(formula)
        return made


class PlainMLP(ActivationMLP):
    """down(act(up(x))), mlp_width or 4C wide."""

    @classmethod
    def width_of(cls, config):
        return config.mlp_width or 4 * config.n_embd

    def __init__(self, config):
        super().__init__()
        self.width = self.width_of(config)
        self.up = linear(config.n_embd, self.width, config)
        self.down = linear(self.width, config.n_embd, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, where=None):
        x = self.act(self.up(x))  # (B, T, width)
        return self.dropout(self.down(x))

    def reference(self, x):
        return self.down(self.up(x).detach().apply_(self.formula))


class GatedMLP(ActivationMLP):
    """down(act(gate(x)) * up(x)), mlp_width or two thirds of 4C wide (rounded up to multiple_of),
    so that three matrices cost what two did."""

    reads = ("multiple_of", "ffn_dim_multiplier")

    @classmethod
    def width_of(cls, config):
        if config.mlp_width:
            return config.mlp_width
        width = int((config.ffn_dim_multiplier or 1) * int(2 * 4 * config.n_embd / 3))
        return config.multiple_of * math.ceil(width / config.multiple_of)

    def __init__(self, config):
        super().__init__()
        self.width = self.width_of(config)
        self.gate = linear(config.n_embd, self.width, config)
        self.up = linear(config.n_embd, self.width, config)
        self.down = linear(self.width, config.n_embd, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, where=None):
        x = self.act(self.gate(x)) * self.up(x)  # (B, T, width)
        return self.dropout(self.down(x))

    def reference(self, x):
        gate = self.gate(x).detach().apply_(self.formula)
        return self.down(gate * self.up(x))


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

    def reference(self, x):
        return 0 * x


# ---------------------------------------------------------------- formulas, of one number


def relu(x):
    return max(x, 0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu_tanh(x):
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_exact(x):
    return x / 2 * (1 + math.erf(x / 2**0.5))


VASWANI = "Vaswani et al. 2017, arXiv:1706.03762"
HENDRYCKS = "Hendrycks & Gimpel 2016, arXiv:1606.08415"
ELFWING = "Elfwing et al. 2017, arXiv:1702.03118"
SO = "So et al. 2021, arXiv:2109.08668"
DAUPHIN = "Dauphin et al. 2016, arXiv:1612.08083"
SHAZEER = "Shazeer 2020, arXiv:2002.05202"
MLP = {
    "relu": PlainMLP.of(VASWANI, F.relu, relu),
    "gelu": PlainMLP.of(HENDRYCKS, gelu, gelu_tanh),  # GPT-2's tanh form
    "gelu_erf": PlainMLP.of(HENDRYCKS, F.gelu, gelu_exact),  # exact, as in Falcon and GPT-NeoX
    "silu": PlainMLP.of(ELFWING, F.silu, silu),  # also called Swish
    "relu2": PlainMLP.of(SO, lambda x: F.relu(x).square(), lambda x: relu(x) ** 2),
    "glu": GatedMLP.of(DAUPHIN, F.sigmoid, sigmoid),
    "bilinear": GatedMLP.of(SHAZEER, lambda x: x, lambda x: x),
    "reglu": GatedMLP.of(SHAZEER, F.relu, relu),
    "geglu": GatedMLP.of(SHAZEER, gelu, gelu_tanh),
    "swiglu": GatedMLP.of(SHAZEER, F.silu, silu),
    "none": NoMLP,
}
