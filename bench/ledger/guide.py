"""Code and formulas as the guides print them, errors included, so that they can be measured.

The variable names are ours. Shapes: B batch, T tokens, C width, H heads, K key heads, D = C / H.
"""

import math

import torch


def shared_attention(x, wq, wk, wv, n_head):
    """The guide's multi-query and grouped-query attention, which has no causal mask. x (B, T, C);
    wq (C, C); wk and wv (K D, C). Returns (B, T, C)."""
    B, T, C = x.shape
    D = C // n_head
    q = (x @ wq.t()).view(B, T, n_head, D).transpose(1, 2)  # (B, H, T, D)
    k = (x @ wk.t()).view(B, T, -1, D).transpose(1, 2)  # (B, K, T, D)
    v = (x @ wv.t()).view(B, T, -1, D).transpose(1, 2)
    k, v = (part.repeat_interleave(n_head // part.size(1), dim=1) for part in (k, v))
    weights = (q @ k.transpose(2, 3) / math.sqrt(D)).softmax(-1)  # (B, H, T, T)
    return (weights @ v).transpose(1, 2).reshape(B, T, C)


def slopes(n):
    """The guide's ALiBi slopes of n heads. For n that is no power of two the authors take every
    other one of the larger set; the guide takes the first ones."""

    def of_power(n):
        start = 2 ** -(2 ** -(math.log2(n) - 3))
        return [start ** (i + 1) for i in range(n)]

    power = 2 ** math.floor(math.log2(n))
    return of_power(power) + (slopes(2 * power)[: n - power] if n > power else [])


def layer_norm(x):
    """The guide's LayerNorm, with the variance that divides by n - 1."""
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


def rope_table(block_size, D):
    """The guide's cos and sin, (block_size, D), made once for the training context."""
    freq = 1.0 / 10000 ** (torch.arange(0, D, 2).float() / D)
    angles = torch.outer(torch.arange(block_size).float(), freq)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rope(x, cos, sin):
    """The guide's rotation of x (B, H, T, D) by that table, cut to T rows."""
    T = x.size(2)
    x1, x2 = x.chunk(2, -1)
    return x * cos[:T] + torch.cat((-x2, x1), -1) * sin[:T]
