"""The slot `residual`: what happens to the residual stream on its way from block to block.

Shapes: B batch, T tokens, C = n_embd.
"""

import torch
import torch.nn as nn

from parts.part import Part


class Plain(Part):
    """The stream as it is: each sublayer adds to it."""

    paper = "He et al. 2015, arXiv:1512.03385"

    def __init__(self, config):
        super().__init__()

    def forward(self, x, first):
        """The input (B, T, C) of a block, from the stream x and from `first`, the embedding."""
        return x

    @staticmethod
    def reference(x, first, keep, again):
        return x


class Scaled(Plain):
    """Each block reads keep x + again first, with two numbers of its own, at first 1 and 0."""

    paper = "nanochat, Karpathy 2025"

    def __init__(self, config):
        super().__init__(config)
        self.keep = nn.Parameter(torch.ones(1))
        self.again = nn.Parameter(torch.zeros(1))

    def reset(self):
        nn.init.ones_(self.keep)
        nn.init.zeros_(self.again)

    def forward(self, x, first):
        return self.keep * x + self.again * first

    @staticmethod
    def reference(x, first, keep, again):
        return keep * x + again * first


RESIDUAL = {"plain": Plain, "scaled": Scaled}
