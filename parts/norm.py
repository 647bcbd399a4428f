"""The slot `norm`: classes that are made with the width of what they normalise and a configuration.

LayerNorm and RMSNorm are the classes of model.py and model_llama.py, with the interface of a part.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

import model
import model_llama
from parts.part import Part


class Norm(Part):
    """A norm with a weight, and perhaps a bias, of one number per feature. One that is `biased` has
    the attribute `bias`, which is None where the configuration gives norms no bias; BatchNorm
    always has one."""

    biased = True  # whether it can have a bias

    def reset(self):
        nn.init.ones_(self.weight)
        if self.biased and self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNorm(Norm, model.LayerNorm):
    """(x - mean) / sqrt(var + 1e-5) * weight + bias, as in GPT-2."""

    paper = "Ba et al. 2016, arXiv:1607.06450"

    def __init__(self, width, config):
        model.LayerNorm.__init__(self, width, config.bias != "none")


class RMSNorm(Norm, model_llama.RMSNorm):
    """x / sqrt(mean(x²) + norm_eps) * weight, as in LLaMA."""

    paper = "Zhang & Sennrich 2019, arXiv:1910.07467"
    reads = ("norm_eps",)
    biased = False

    def __init__(self, width, config):
        model_llama.RMSNorm.__init__(self, width, config.norm_eps)


class BareRMSNorm(Norm):
    """x / sqrt(mean(x²) + norm_eps), without a weight, as in nanochat. Attention then normalises
    queries and keys without a weight, too."""

    paper = "Zhang & Sennrich 2019, arXiv:1910.07467"
    reads = ("norm_eps",)
    biased = False

    def __init__(self, width, config):
        super().__init__()
        self.eps = config.norm_eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


class BatchNorm(Norm, nn.BatchNorm1d):
    """(x - mean) / sqrt(var + 1e-5) * weight + bias per feature. Mean and variance are over batch
    and time while training, running ones afterwards. While training it leaks: the statistics of
    later tokens reach earlier ones."""

    paper = "Ioffe & Szegedy 2015, arXiv:1502.03167"

    def __init__(self, width, config):
        nn.BatchNorm1d.__init__(self, width)

    def forward(self, x):
        return nn.BatchNorm1d.forward(self, x.flatten(0, -2)).view_as(x)


class DyT(Norm):
    """Dynamic tanh: weight * tanh(alpha x) + bias, alpha one number."""

    paper = "Zhu et al. 2025, arXiv:2503.10622"

    def __init__(self, width, config):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if config.bias != "none" else None

    def reset(self):
        super().reset()
        nn.init.constant_(self.alpha, 0.5)

    def forward(self, x):
        x = torch.tanh(self.alpha * x) * self.weight
        return x if self.bias is None else x + self.bias


class NoNorm(Norm):
    """x unchanged."""

    biased = False

    def __init__(self, width, config):
        super().__init__()

    def forward(self, x):
        return x
