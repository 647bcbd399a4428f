"""The slot `norm`."""

import torch
import torch.nn as nn

from model import LayerNorm
from model_llama import RMSNorm

# ---------------------------------------------------------------- slot: norm


class BatchNorm(nn.BatchNorm1d):
    """(x - mean) / sqrt(var + eps) * weight + bias per feature, mean and var over batch and time while training,
    running ones afterwards (Ioffe & Szegedy 2015, arXiv:1502.03167). While training it leaks: the statistics of
    later tokens reach earlier ones."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class DyT(nn.Module):
    """weight * tanh(alpha x) + bias (dynamic tanh, Zhu et al. 2025, arXiv:2503.10622)."""

    def __init__(self, width, bias):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([0.5]))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        x = torch.tanh(self.alpha * x) * self.weight
        return x if self.bias is None else x + self.bias


NORM = dict(  # of a width and a configuration
    layernorm=lambda width, config: LayerNorm(width, config.bias != "none"),
    rmsnorm=lambda width, config: RMSNorm(width, config.norm_eps),
    batchnorm=lambda width, config: BatchNorm(width),
    dyt=lambda width, config: DyT(width, config.bias != "none"),
    none=lambda width, config: nn.Identity(),
)
