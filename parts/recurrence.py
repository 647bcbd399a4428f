"""Shared by mixers with a state of fixed size: a short convolution of q, k and v, decays, chunks of
tokens, and the choice between the two forms of a recurrence.

Shapes: B batch, T tokens, H = n_head, N = state_size, P = expand C / H, n chunks of c tokens.
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.cache import Recurrent
from parts.norm import RMSNorm
from parts.part import Linear, Mixer, Part, ShortConv, linear

CHUNK = 64  # tokens that are read at once


def precise(x):
    """x in float32, or in float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class StateMixer(Mixer):
    """A mixer that remembers a state S, N P numbers per head, however long the text.

    A subclass writes the same recurrence twice: step(S, ...) for one token, chunked(S, ...) for T
    tokens in matrix products. Both return (the values read from the state, the new state). Its
    matrices are linear maps, which Muon may take; the convolution and the numbers per head are
    AdamW's.
    """

    state = Recurrent
    reads = ("state_size", "expand", "conv")
    normed = True

    def __init__(self, config, shape, keys, norm_width, conv_bias, writes=False):
        """shape: of the state of one sequence. keys: features of q, and of k. writes: whether each
        head has a strength of writing, made of the token, beside its decay."""
        super().__init__()
        C = config.n_embd
        H = config.n_head
        values = config.expand * C
        self.shape = shape
        self.widths = (keys, keys, values)
        self.wq = linear(C, keys, config)
        self.wk = linear(C, keys, config)
        self.wv = linear(C, values, config)
        self.wz = linear(C, values, config)
        self.wa = Linear(C, H, bias=False)
        if writes:
            self.wb = Linear(C, H, bias=False)
        self.wo = linear(values, C, config, residual=True)
        self.conv = ShortConv(sum(self.widths), config.conv or 4, conv_bias)
        self.decay = Decay(H)
        self.norm = RMSNorm(norm_width, config)
        self.dropout = nn.Dropout(config.dropout)

    def convolved(self, x, cache):
        """q, k and v (B, T, ...) of x (B, T, C), out of the short convolution."""
        qkv = torch.cat((self.wq(x), self.wk(x), self.wv(x)), dim=-1)
        return F.silu(self.conv(qkv, cache)).split(self.widths, dim=-1)

    def scan(self, cache, *inputs):
        """The values that the T tokens of the inputs (B, T, ...) read from the state, (B, T, H, P).
        States are in float32 at least; autocast may multiply in less.

        Training and prompts use the chunked form. Single tokens use the recurrent form, and so do
        the last tokens of a prompt that the cache must be able to forget.
        """
        inputs = [precise(x) for x in inputs]
        B, T = inputs[0].shape[:2]
        S = inputs[0].new_zeros(B, *self.shape)
        if cache is None:
            return self.chunked(S, *inputs)[0]

        if cache.states is not None:
            S = cache.last()
        prefix = 0  # how many tokens are read in chunks
        if T > 1:
            prefix = max(0, T - cache.cache.spare)
        outputs = []
        states = []
        if prefix:
            y, S = self.chunked(S, *(x[:, :prefix] for x in inputs))
            outputs.append(y)
            states.append(S[:, None])
        if prefix < T:
            y, after_each = self.recurrent(S, *(x[:, prefix:] for x in inputs))
            outputs.append(y)
            states.append(after_each)
        cache.update(torch.cat(states, dim=1))
        return torch.cat(outputs, dim=1)

    def recurrent(self, S, *inputs):
        """`step` T times: (values read (B, T, H, P), the state after each token (B, T, ...))."""
        outputs = []
        states = []
        for token in zip(*(x.unbind(1) for x in inputs), strict=True):
            y, S = self.step(S, *token)
            outputs.append(y)
            states.append(S)
        return torch.stack(outputs, dim=1), torch.stack(states, dim=1)

    def held(self, T):
        return math.prod(self.shape)


class Decay(Part):
    """dt = softplus(a + bias) and log alpha = -exp(log_rate) dt, with one rate and bias per head.

    They start as in the code of Mamba-2: rates uniform in 1 .. 16, and dt, where a = 0, in
    0.001 .. 0.1, uniform in its logarithm.
    """

    def __init__(self, heads):
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads))

    def reset(self):
        rate = torch.empty_like(self.log_rate)
        log_dt = torch.empty_like(self.bias)
        nn.init.uniform_(rate, 1, 16)
        nn.init.uniform_(log_dt, math.log(0.001), math.log(0.1))
        dt = log_dt.exp()
        self.log_rate.copy_(rate.log())
        self.bias.copy_(dt + (-(-dt).expm1()).log())  # softplus of this is dt

    def forward(self, a):
        """a (B, T, H) -> dt and log alpha (B, T, H)."""
        dt = F.softplus(precise(a) + self.bias)
        return dt, -self.log_rate.exp() * dt


# ---------------------------------------------------------------- chunks


def chunk_size(T):
    """(c, tokens of all chunks / T, which is above 1 if the last one is filled up)."""
    c = min(CHUNK, T)
    return c, math.ceil(T / c) * c / T


def in_chunks(x):
    """x (B, T, ...) -> (n, B, c, ...), the last chunk filled up with zeros."""
    T = x.size(1)
    c = min(CHUNK, T)
    if T % c:
        x = torch.cat((x, x.new_zeros(x.size(0), c - T % c, *x.shape[2:])), 1)
    return x.unflatten(1, (-1, c)).transpose(0, 1)


def out_of_chunks(y, T):
    """y (n, B, c, ...) -> (B, T, ...)."""
    return y.transpose(0, 1).flatten(1, 2)[:, :T]


def decay_between(log_decay):
    """The decay between the write of token j and the read of token i, (..., c, c), 0 where j is
    later: exp(log_decay_i - log_decay_j). log_decay (..., c): log alpha, summed since the chunk
    began."""
    c = log_decay.size(-1)
    later = torch.ones(c, c, dtype=torch.bool, device=log_decay.device).triu(1)
    since = log_decay[..., :, None] - log_decay[..., None, :]
    return since.masked_fill(later, -torch.inf).exp()
