"""The word `differential` of the slot `mixer`.

Shapes: B batch, T tokens, H heads of queries, K heads of keys and values, D the width of a head,
S keys.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from parts.attention import Attention
from parts.norm import RMSNorm
from parts.part import refuse

WITHOUT = dict(  # keys of Attention it does not read
    conv=None, conv_sites="none", nope_every=0, attn_extra="none", kv_shared_by=0
)


class Differential(Attention):
    """(1 - a) norm((A_1 - l A_2) V), where A_1 and A_2 are the attention weights of two heads, H/2
    apart, and V the values of both, 2D wide: noise that both heads see is subtracted.

    l = exp(q_1 k_1) - exp(q_2 k_2) + a with four learned vectors, a = 0.8 - 0.6 exp(-0.3 layer),
    layer from 0. The norm is over the 2D features of each pair and has a weight, as in the authors'
    code; transformers' DiffLlama has none. H and K are even.
    """

    paper = "Ye et al. 2024, arXiv:2410.05258"
    normed = True
    reads = tuple(key for key in Attention.reads if key not in WITHOUT)

    @classmethod
    def check(cls, config):
        H = config.n_head
        K = config.n_kv_head
        refuse(
            H % 2 or K % 2,
            f"mixer={config.mixer} pairs the heads, and n_head={H} or n_kv_head={K} is odd: make "
            "both even",
        )

    def __init__(self, config, layer):
        values = vars(config) | WITHOUT
        super().__init__(SimpleNamespace(**values), layer)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)  # a
        self.lambda_q1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_q2 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k2 = nn.Parameter(torch.empty(self.head_dim))
        self.pair_norm = RMSNorm(2 * self.head_dim, config)

    def reset(self):
        for vector in self.vectors():
            nn.init.normal_(vector, 0.0, 0.1)

    def vectors(self):
        return self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2

    def attend(self, q, k, v, qpos, kpos, mask, bias):
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D), two heads per pair."""
        halves = []  # of A V, D of its 2D features each
        for half in v.chunk(2, dim=1):  # (B, K/2, S, D), D of the 2D features of V
            shared = half.repeat(1, 2, 1, 1)  # (B, K, S, D), the same for the two heads of a pair
            halves.append(super().attend(q, k, shared, qpos, kpos, mask, bias))
        first, second = torch.cat(halves, -1).chunk(2, dim=1)  # A_1 V and A_2 V, (B, H/2, T, 2D)

        q1, k1, q2, k2 = self.vectors()
        strength = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.start  # l
        y = (1 - self.start) * self.pair_norm(first - strength * second)
        # A block reads heads of D features: each pair gives two.
        return y.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)  # (B, H, T, D)

    def flops(self, T):  # attention runs twice, once for each half of the values
        return super().flops(T) + 4 * T * self.n_head * self.head_dim
