"""The slot `mlp`, and the linear maps that all parts use."""

import math
from functools import partial

import torch.nn as nn
from torch.nn import functional as F

from model import gelu

# ---------------------------------------------------------------- slot: mlp


class LowRank(nn.Module):
    """x U V in place of x W, of rank r = low_rank (what a widespread note takes LLaMA to do; it does not)."""

    def __init__(self, n_in, n_out, rank, bias):
        super().__init__()
        self.u = nn.Linear(n_in, rank, bias=False)
        self.v = nn.Linear(rank, n_out, bias=bias)

    def forward(self, x):
        return self.v(self.u(x))


def linear(n_in, n_out, config):
    bias = config.bias == "all"
    return (
        LowRank(n_in, n_out, config.low_rank, bias)
        if config.low_rank
        else nn.Linear(n_in, n_out, bias=bias)
    )


class PlainMLP(nn.Module):
    """down(act(up(x))), 4C wide (Vaswani et al. 2017, arXiv:1706.03762)."""

    gated = False

    def __init__(self, act, config):
        super().__init__()
        width = config.mlp_width or 4 * config.n_embd
        self.act = act
        self.up = linear(config.n_embd, width, config)
        self.down = linear(width, config.n_embd, config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down(self.act(self.up(x))))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), two thirds of 4C wide, so that three matrices cost what two did (Shazeer 2020,
    arXiv:2002.05202)."""

    gated = True

    def __init__(self, act, config):
        super().__init__()
        width = int((config.ffn_dim_multiplier or 1) * int(2 * 4 * config.n_embd / 3))
        width = config.mlp_width or config.multiple_of * math.ceil(width / config.multiple_of)
        self.act = act
        self.gate = linear(config.n_embd, width, config)
        self.up = linear(config.n_embd, width, config)
        self.down = linear(width, config.n_embd, config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down(self.act(self.gate(x)) * self.up(x)))


MLP = dict(
    relu=partial(PlainMLP, F.relu),
    gelu=partial(PlainMLP, gelu),  # GPT-2's tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415)
    gelu_erf=partial(
        PlainMLP, F.gelu
    ),  # the exact form, as in Falcon and GPT-NeoX (arXiv:1606.08415)
    silu=partial(PlainMLP, F.silu),  # also called Swish (Elfwing et al. 2017, arXiv:1702.03118)
    relu2=partial(PlainMLP, lambda x: F.relu(x).square()),  # (So et al. 2021, arXiv:2109.08668)
    glu=partial(GatedMLP, F.sigmoid),  # (Dauphin et al. 2016, arXiv:1612.08083)
    bilinear=partial(GatedMLP, lambda x: x),
    reglu=partial(GatedMLP, F.relu),
    geglu=partial(GatedMLP, gelu),
    swiglu=partial(GatedMLP, F.silu),
)
