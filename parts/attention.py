"""The word `attention` of the slot `mixer`. Additions to it stand in attn_extra.py, faster ways to
compute it in fast_attention.py.

Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D = head_dim or C / H, S keys
(past and new).
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts import fast_attention
from parts.attn_extra import Extra, check_parameters
from parts.cache import LayerCache, Ring, State, visible
from parts.norm import BareRMSNorm, RMSNorm
from parts.part import (
    Mixer,
    conv_at,
    head_width,
    kv_layer,
    layers_reading,
    linear,
    refuse,
    weight_dropout,
)


class KeysAndValues(NamedTuple):
    """What attention reads. A layer may read what an earlier one has made."""

    k: torch.Tensor  # (B, K, S, D), turned
    v: torch.Tensor  # (B, K, S, D)
    own: torch.Tensor  # (B, K, T, D) the values of the new tokens alone
    pos: torch.Tensor  # (B or 1, S) the positions of the keys
    mask: torch.Tensor | None  # (B or 1, 1, T, S), or None for a plain causal one


class Attention(Mixer):
    """softmax(q kᵀ / sqrt(D) + bias) v over the keys that a query may see.

    H / K neighbouring query heads share a key and value head. K = 1 is multi-query (Shazeer 2019,
    arXiv:1911.02150), 1 < K < H is grouped-query (Ainslie et al. 2023, arXiv:2305.13245).
    window: a query sees the last `window` tokens (Mistral, Jiang et al. 2023, arXiv:2310.06825);
    block_local: it sees its own group of `block_local` tokens.
    qk_norm: RMSNorm on each head's q and k (Qwen 3, arXiv:2505.09388), or on all heads at once
    (OLMo 2, arXiv:2501.00656).
    attn_softcap: scores become c tanh(scores / c) (Gemma 2, arXiv:2408.00118).
    nope_every: every n-th layer ignores the positions (Yang et al. 2025, arXiv:2501.18795).
    conv: x becomes x + conv(x) before all of this, a causal convolution over `conv` tokens in each
    channel, without bias or activation (Canon-A of Allen-Zhu 2025, arXiv:2512.17351); conv_sites
    puts it elsewhere: on q, k and v as they are made, before norms and positions, or on the output.
    kv_shared_by: of each n layers of attention in a row, the first makes k and v, and all n read
    them (cross-layer attention, Brandon et al. 2024, arXiv:2405.12981).
    """

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    acted_on = ("embedding", "q and k", "scores")
    reads = (
        "n_kv_head",
        "head_dim",
        "window",
        "full_every",
        "block_local",
        "qk_norm",
        "attn_softcap",
        "conv",
        "conv_sites",
        "nope_every",
        "attn_extra",
        "attn_dropout",
        "kv_shared_by",
    )

    @classmethod
    def check(cls, config):
        """Refuse what differs between layers that read the same keys and values."""
        if not config.kv_shared_by:
            return
        for key in ("full_every", "nope_every"):
            refuse(
                getattr(config, key),
                f"{key} makes layers differ, and kv_shared_by gives them the same keys: choose one",
            )
        for word in ("value_residual", "value_embed"):
            refuse(
                word in config.attn_extra.split(","),
                f"attn_extra={word} gives each layer values of its own, and kv_shared_by does not: "
                "choose one",
            )
        refuse(
            len(layers_reading(config, "kv_shared_by")) < 2,
            "kv_shared_by has no effect with one layer of attention: remove it, or add layers",
        )

    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        H = config.n_head
        K = config.n_kv_head
        D = head_width(config)
        self.config = config
        self.n_head = H
        self.n_kv_head = K
        self.head_dim = D
        sees_all = config.full_every and (layer + 1) % config.full_every == 0
        self.window = 0 if sees_all else config.window
        self.group = config.block_local
        self.softcap = config.attn_softcap
        self.turns = not config.nope_every or (layer + 1) % config.nope_every != 0

        self.kv_layer = kv_layer(config, layer)
        self.makes_kv = self.kv_layer == layer

        self.conv = conv_at("input", C, config)
        self.wq = linear(C, D * H, config, qkv=True)
        self.conv_q = conv_at("queries", D * H, config)
        if self.makes_kv:
            self.wk = linear(C, D * K, config, qkv=True)
            self.wv = linear(C, D * K, config, qkv=True)
            self.conv_k = conv_at("keys", D * K, config)
            self.conv_v = conv_at("values", D * K, config)
        self.wo = linear(D * H, C, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)
        self.conv_out = conv_at("output", C, config)
        self.attn_dropout = weight_dropout(config)
        self.qk_norm = config.qk_norm
        self.q_norm = None
        self.k_norm = None
        if self.qk_norm != "none":
            norm = BareRMSNorm if config.norm == "rmsnorm_bare" else RMSNorm
            per_head = self.qk_norm == "head"
            self.q_norm = norm(D if per_head else D * H, config)
            self.k_norm = norm(D if per_head else D * K, config) if self.makes_kv else None
        self.extras = {}  # {word of attn_extra: Extra}
        self.changes_scores = False  # whether one of them does
        self.attends_plainly = type(self).attend is Attention.attend  # a subclass may have its own

    def add_extra(self, word, make, config, layer):
        """Add a word of attn_extra; make: its class."""
        extra = make(self, config, layer)
        check_parameters(extra)
        self.extras[word] = extra
        if make.scores is not Extra.scores:
            self.changes_scores = True

    def reset(self):
        for extra in self.extras.values():
            extra.reset(self)

    def forward(self, x, where, cache=None):
        x = self.conv(x, cache)
        q = self.queries(x, where, cache)
        if self.makes_kv:
            kv = self.keys_and_values(x, where, cache)
        else:
            kv = where.shared.by_name["keys and values", self.kv_layer]
        fast = None if cache is not None else fast_attention.choose(self, q, where.scheme)
        if fast is not None:
            return self.output(x, fast(self, q, kv.k, kv.v, where), kv.own)

        mask = kv.mask
        if cache is None and 0 < self.window < x.size(1):
            mask = visible(where.pos, kv.pos, self.window)
        if self.group:
            mask = visible(where.pos, kv.pos, group=self.group)
        bias = where.scheme.bias(q, where.pos, kv.pos)  # (B or 1, H, T, S) or None
        y = self.attend(q, kv.k, kv.v, where.pos, kv.pos, mask, bias)
        return self.output(x, y, kv.own, cache)

    def queries(self, x, where, cache):
        """q (B, H, T, D) of x (B, T, C)."""
        q = self.in_heads(self.conv_q(self.wq(x), cache), self.q_norm)
        return where.scheme.turn(q, where.angles) if self.turns else q

    def keys_and_values(self, x, where, cache):
        """The KeysAndValues of the cache and x (B, T, C), kept in where.shared for later layers."""
        k = self.in_heads(self.conv_k(self.wk(x), cache), self.k_norm)
        v = self.in_heads(self.conv_v(self.wv(x), cache))
        for extra in self.extras.values():
            v = extra.values(self, x, v, where)
        if self.turns:
            k = where.scheme.turn(k, where.angles)

        if cache is None:
            kv = KeysAndValues(k=k, v=v, own=v, pos=where.pos, mask=None)
        else:
            all_k, all_v, mask = cache.update(k, v)  # which also sets kpos
            kv = KeysAndValues(k=all_k, v=all_v, own=v, pos=cache.kpos, mask=mask)
        if self.config.kv_shared_by:
            where.shared.by_name["keys and values", self.kv_layer] = kv
        return kv

    def in_heads(self, x, norm=None):
        """x (B, T, heads D) -> (B, heads, T, D), normed as qk_norm says if there is a norm."""
        B, T, _ = x.size()
        if norm is not None and self.qk_norm == "full":
            x = norm(x)
        x = x.view(B, T, -1, self.head_dim).transpose(1, 2)
        if norm is not None and self.qk_norm == "head":
            x = norm(x)
        return x

    def attend(self, q, k, v, qpos, kpos, mask, bias):
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D)."""
        T = q.size(2)
        p = self.attn_dropout.p if self.training else 0.0
        sdpa = F.scaled_dot_product_attention
        if bias is None and not self.softcap and not self.changes_scores:
            causal = mask is None and T > 1
            return sdpa(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=p, enable_gqa=True)

        if mask is None:
            mask = visible(qpos, kpos)  # (B or 1, 1, T, S)
        if self.changes_scores and bias is None:
            bias = k.new_zeros(1, self.n_head, mask.size(2), mask.size(3))
        for extra in self.extras.values():
            k, v, mask, bias = extra.scores(self, k, v, mask, bias)
        if not self.softcap:  # then there is a bias
            masked_bias = bias.masked_fill(~mask, -torch.inf)
            return sdpa(q, k, v, attn_mask=masked_bias, dropout_p=p, enable_gqa=True)

        # Torch has no softcap: written out, which needs a key and a value for each query head.
        shared_by = self.n_head // self.n_kv_head
        k = k.repeat_interleave(shared_by, dim=1)  # (B, H, S, D)
        v = v.repeat_interleave(shared_by, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))  # (B, H, T, S)
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        least = torch.finfo(scores.dtype).min  # -inf would make a row nan that sees only padding
        weights = scores.masked_fill(~mask, least).softmax(-1)
        return F.dropout(weights, p) @ v

    def output(self, x, y, own, cache=None):
        """What the block adds, (B, T, C), from the heads' outputs y (B, H, T, D), their input x
        (B, T, C) and the tokens' own values (B, K, T, D)."""
        B, T, _ = x.size()
        for extra in self.extras.values():
            y = extra.output(self, x, y, own)
        y = self.wo(y.transpose(1, 2).reshape(B, T, -1))  # heads side by side
        return self.conv_out(self.dropout(y), cache)

    def new_state(self, cache):
        if not self.makes_kv:
            return State(cache)
        return Ring(cache, self.window) if self.window else LayerCache(cache)

    def held(self, T):
        if not self.makes_kv:
            return 0
        return 2 * self.n_kv_head * self.head_dim * min(T, self.window or T)

    def flops(self, T):
        """2 T H D for the scores and as much for the sum of values. As in torch's counter, masked
        scores count too, though a good kernel skips most of them."""
        flops = 4 * T * self.n_head * self.head_dim
        return flops + sum(extra.flops(self, T) for extra in self.extras.values())
