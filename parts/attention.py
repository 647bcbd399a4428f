"""The word `attention` of the slot `mixer`. Additions to it stand in attn_extra.py, faster ways to
compute it in fast_attention.py.

Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D = head_dim or C / H, S keys
(past and new).
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts import fast_attention
from parts.attn_extra import Extra, check_parameters
from parts.cache import LayerCache, Ring, visible
from parts.norm import BareRMSNorm, RMSNorm
from parts.part import Mixer, head_width, linear, refuse, weight_dropout
from parts.recurrence import ShortConv


class Attention(Mixer):
    """softmax(q kᵀ / sqrt(D) + bias) v over the keys that a query may see.

    H / K neighbouring query heads share a key and value head: H multi-head, 1 multi-query (Shazeer
    2019, arXiv:1911.02150), between grouped-query (Ainslie et al. 2023, arXiv:2305.13245).
    window: a query sees the last so many tokens (Mistral, Jiang et al. 2023, arXiv:2310.06825);
    block_local: it sees its own group of so many. qk_norm: RMSNorm on each head's q and k (Qwen 3,
    arXiv:2505.09388), or on all heads at once (OLMo 2, arXiv:2501.00656).
    attn_softcap: scores become c tanh(scores / c) (Gemma 2, arXiv:2408.00118).
    nope_every: every so many layers the positions do not enter (Yang et al. 2025,
    arXiv:2501.18795).
    conv: x becomes x + conv(x) before all of this, a causal convolution over so many tokens in each
    channel, without bias or activation (Canon-A of Allen-Zhu 2025, arXiv:2512.17351).
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
        "nope_every",
        "attn_extra",
        "attn_dropout",
    )
    paired = False  # whether two heads work together, as in mixer=differential

    @classmethod
    def check(cls, config):
        H = config.n_head
        K = config.n_kv_head
        refuse(
            cls.paired and (H % 2 or K % 2),
            f"mixer={config.mixer} pairs the heads, and n_head={H} or n_kv_head={K} is odd: make "
            "both even",
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
        self.kv_width = D * K
        sees_all = config.full_every and (layer + 1) % config.full_every == 0
        self.window = 0 if sees_all else config.window
        self.group = config.block_local
        self.softcap = config.attn_softcap
        self.turns = not config.nope_every or (layer + 1) % config.nope_every != 0

        self.conv = ShortConv(C, config.conv, bias=False) if config.conv else None
        self.wq = linear(C, D * H, config, qkv=True)
        self.wk = linear(C, D * K, config, qkv=True)
        self.wv = linear(C, D * K, config, qkv=True)
        self.wo = linear(D * H, C, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)
        self.attn_dropout = weight_dropout(config)
        self.qk_norm = config.qk_norm
        if self.qk_norm != "none":
            norm = BareRMSNorm if config.norm == "rmsnorm_bare" else RMSNorm
            per_head = self.qk_norm == "head"
            self.q_norm = norm(D if per_head else D * H, config)
            self.k_norm = norm(D if per_head else D * K, config)
        self.extras = {}  # {word of attn_extra: Extra}
        self.changes_scores = False  # whether one of them does

    def add_extra(self, word, make, config, layer):
        """Add a word of attn_extra; make: its class."""
        before = set(self._parameters)
        extra = make(self, config, layer)
        check_parameters(extra, created=set(self._parameters) - before)
        self.extras[word] = extra
        if make.scores is not Extra.scores:
            self.changes_scores = True

    def reset(self):
        for extra in self.extras.values():
            extra.reset(self)

    def forward(self, x, where, cache=None):
        T = x.size(1)
        if self.conv is not None:
            x = x + self.conv(x, cache)
        q, k, v = self.heads(x)
        for extra in self.extras.values():
            v = extra.values(self, x, v, where)
        own = v  # before the past joins: (B, K, T, D)
        if self.turns:
            q, k = where.scheme.rotate(q, k, where.angles)
        fast = None if cache is not None else fast_attention.choose(self, q, where.scheme)
        if fast is not None:
            return self.output(x, fast(self, q, k, v, where), own)

        kpos = where.pos
        mask = None
        if cache is not None:
            k, v, mask = cache.update(k, v)  # past ones too: (B, K, S, D)
            kpos = cache.kpos
        elif 0 < self.window < T:
            mask = visible(where.pos, kpos, self.window)
        if self.group:
            mask = visible(where.pos, kpos, group=self.group)
        bias = where.scheme.bias(q, where.pos, kpos)  # (B or 1, H, T, S) or None
        return self.output(x, self.attend(q, k, v, where.pos, kpos, mask, bias), own)

    def heads(self, x):
        """q (B, H, T, D), k and v (B, K, T, D) of x (B, T, C)."""
        B, T, _ = x.size()
        q = self.wq(x)
        k = self.wk(x)
        v = self.wv(x)
        if self.qk_norm == "full":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        if self.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v

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
        if not self.softcap:
            bias = bias.masked_fill(~mask, -torch.inf)
            return sdpa(q, k, v, attn_mask=bias, dropout_p=p, enable_gqa=True)

        shared_by = self.n_head // self.n_kv_head
        k = k.repeat_interleave(shared_by, dim=1)  # (B, H, S, D)
        v = v.repeat_interleave(shared_by, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))  # (B, H, T, S)
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return F.dropout(weights, p) @ v

    def output(self, x, y, own):
        """What the block adds, (B, T, C), from the heads' outputs y (B, H, T, D), their input x
        (B, T, C) and the tokens' own values (B, K, T, D)."""
        B, T, _ = x.size()
        for extra in self.extras.values():
            y = extra.output(self, x, y, own)
        return self.dropout(self.wo(y.transpose(1, 2).reshape(B, T, -1)))  # heads side by side

    def new_state(self, cache):
        return Ring(cache, self.window) if self.window else LayerCache(cache)

    def held(self, T):
        keys_and_values = 2 * self.n_kv_head * self.head_dim * min(T, self.window or T)
        return keys_and_values + (self.conv.held() if self.conv else 0)

    def flops(self, T):
        """2 T H D for the scores and as much for the sum of values, whether or not a query sees all
        T: torch's counter has masked scores too, of which a good kernel skips most (a causal one
        does about half of these)."""
        flops = 4 * T * self.n_head * self.head_dim
        flops += sum(extra.flops(self, T) for extra in self.extras.values())
        return flops + (self.conv.flops(T) if self.conv else 0)
