"""The word `attention` of the slot `mixer`.

Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D = C / H, S keys (past and new).
"""

import itertools
import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from parts.cache import LayerCache, Ring, visible
from parts.mixer import MIXER, Mixer
from parts.norm import RMSNorm
from parts.part import linear
from parts.position import POSITION, Alibi


def compiled_on_gpu(x):
    return x.is_cuda and torch.compiler.is_compiling()


class Attention(Mixer):
    """softmax(q kᵀ / sqrt(D) + bias) v over the keys that a query may see.

    H / K neighbouring query heads share a key and value head: H multi-head, 1 multi-query (Shazeer
    2019, arXiv:1911.02150), between grouped-query (Ainslie et al. 2023, arXiv:2305.13245).
    window: a query sees the last so many tokens (Mistral, Jiang et al. 2023, arXiv:2310.06825);
    block_local: it sees its own group of so many. qk_norm: RMSNorm on each head's q and k (Qwen 3,
    arXiv:2505.09388), or on those of all heads at once (OLMo 2, arXiv:2501.00656).
    attn_softcap: scores become c tanh(scores / c) (Gemma 2, arXiv:2408.00118).
    """

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    acted_on = ("embedding", "q and k", "scores")
    reads = ("n_kv_head", "window", "full_every", "block_local", "qk_norm", "attn_softcap")

    def __init__(self, config, layer):
        super().__init__()
        C, D = config.n_embd, config.n_embd // config.n_head
        sees_all = config.full_every and (layer + 1) % config.full_every == 0
        self.config = config
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.window = 0 if sees_all else config.window
        self.group, self.softcap = config.block_local, config.attn_softcap
        self.qk_norm = config.qk_norm

        self.wq = linear(C, C, config)
        self.wk = linear(C, D * config.n_kv_head, config)
        self.wv = linear(C, D * config.n_kv_head, config)
        self.wo = linear(C, C, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)
        if self.qk_norm != "none":
            heads = (1, 1) if self.qk_norm == "head" else (self.n_head, self.n_kv_head)
            self.q_norm, self.k_norm = (RMSNorm(D * n, config) for n in heads)

    def forward(self, x, where, cache=None):
        B, T, C = x.size()
        q, k, v = self.heads(x)
        q, k = where.scheme.rotate(q, k, where.angles)
        if cache is None and compiled_on_gpu(x) and self.flexible(q, where.scheme):
            y = self.flex(q, k, v, where)
            return self.dropout(self.wo(y.transpose(1, 2).reshape(B, T, C)))

        kpos, mask = where.pos, None
        if cache is not None:
            k, v, mask = cache.update(k, v)  # past ones too: (B, K, S, D)
            kpos = cache.kpos
        elif 0 < self.window < T:
            mask = visible(where.pos, kpos, self.window)
        if self.group:
            mask = visible(where.pos, kpos, group=self.group)
        bias = where.scheme.bias(q, where.pos, kpos)  # (B or 1, H, T, S) or None
        y = self.attend(q, k, v, where.pos, kpos, mask, bias)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.dropout(self.wo(y))

    def heads(self, x):
        """q (B, H, T, D), k and v (B, K, T, D) of x (B, T, C)."""
        B, T, _ = x.size()
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def attend(self, q, k, v, qpos, kpos, mask, bias):
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D)."""
        T, p = q.size(2), self.dropout.p if self.training else 0.0
        sdpa = F.scaled_dot_product_attention
        if bias is None and not self.softcap:
            causal = mask is None and T > 1
            return sdpa(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=p, enable_gqa=True)

        mask = visible(qpos, kpos) if mask is None else mask  # (B or 1, 1, T, S)
        if not self.softcap:
            bias = bias.masked_fill(~mask, -torch.inf)
            return sdpa(q, k, v, attn_mask=bias, dropout_p=p, enable_gqa=True)

        shared_by = self.n_head // self.n_kv_head
        k, v = (a.repeat_interleave(shared_by, dim=1) for a in (k, v))  # (B, H, S, D)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))  # (B, H, T, S)
        scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
        return F.dropout(scores.softmax(-1), p) @ v

    def flexible(self, q, scheme):
        """Whether `flex` can and should do what `attend` does here: more than plain causal
        attention, no dropout, no bias but ALiBi's, which it can make from the positions alone, and
        heads of 16 or more, as its kernels need."""
        biased = scheme.acts_on == "scores"
        more = self.window or self.group or self.softcap or biased
        drops = self.training and self.dropout.p
        expressible = not biased or isinstance(scheme, Alibi)
        return bool(more) and not drops and expressible and q.size(-1) >= 16

    def flex(self, q, k, v, where):
        """`attend` without the (T, T) matrix and without the blocks that nobody sees:
        FlexAttention (Dong et al. 2024, arXiv:2412.05496), which is fast on a GPU and where the
        model is compiled."""

        def seen(b, h, i, j):  # what `visible` says, of one query and one key
            near = (j > i - self.window) if self.window else True
            return (j <= i) & near & (j // self.group == i // self.group if self.group else True)

        def score(s, b, h, i, j):
            s = self.softcap * torch.tanh(s / self.softcap) if self.softcap else s
            return s + scheme.slopes[h] * (j - i) if isinstance(scheme, Alibi) else s

        T, scheme, sight = q.size(2), where.scheme, (self.window, self.group)
        if sight not in where.block_masks:
            blocks = create_block_mask(seen, None, None, T, T, device=q.device)
            where.block_masks[sight] = blocks
        blocks = where.block_masks[sight]
        return flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)

    def reference(self, x, where):
        """One query, one head and one key at a time; x (B, T, C)."""
        q, k, v = self.heads(x)
        y = torch.zeros_like(q)  # (B, H, T, D)
        for b, h, i in itertools.product(*map(range, q.shape[:3])):
            shared = h * self.n_kv_head // self.n_head  # the key and value head of this query head
            first = max(0, i - self.window + 1) if self.window else 0
            if self.group:
                first = i // self.group * self.group
            scores = []
            for j in range(first, i + 1):
                score = where.scheme.reference_score(q[b, h, i], k[b, shared, j], i, j)
                if self.softcap:
                    score = self.softcap * torch.tanh(score / self.softcap)
                scores.append(score + where.scheme.reference_bias(q[b, h, i], h, i, j))
            weights = torch.stack(scores).exp()
            seen = v[b, shared, first : i + 1]  # (keys, D)
            y[b, h, i] = (weights[:, None] * seen).sum(0) / weights.sum()
        return self.wo(y.transpose(1, 2).flatten(2))

    # What it remembers, and what it costs.

    def new_state(self, cache):
        return Ring(cache, self.window) if self.window else LayerCache(cache)

    @classmethod
    def period(cls, config):
        return config.full_every or 1

    def held(self, T):
        """2 K D numbers per token, of the last `window` tokens where there is a window. Query
        heads do not enter."""
        D = self.config.n_embd // self.n_head
        return 2 * self.n_kv_head * D * min(T, self.window or T)

    def flops(self, T):
        """2TC for the scores and 2TC for the sum of values, whether or not a query sees all T:
        torch's counter has masked scores too, of which a good kernel skips most (a causal one does
        about half of these 4TC)."""
        scheme = POSITION[self.config.position]
        return 4 * T * self.config.n_embd + scheme.score_flops(self.config)

    def fused(self):
        """Whether one kernel does it all, which keeps no (T, T) tensors."""
        scheme = POSITION[self.config.position]
        return not self.config.dropout and not self.softcap and scheme.fused

    def kept(self, T):
        C, H = self.config.n_embd, self.n_head
        KD = self.n_kv_head * (C // H)
        scheme = POSITION[self.config.position]
        normed = 0 if self.qk_norm == "none" else 2 * (C + KD)  # what these norms read, and x / rms
        if self.fused():
            # q, k, v, output and H log-sums; the output once more, heads side by side, where q was
            # rearranged.
            rearranged = scheme.acts_on == "q and k" or self.qk_norm == "head"
            return 2 * C + 2 * KD + H + C * rearranged + normed
        # q, k, v and output, keys and values repeated for each query head, and (H, T, T) tensors:
        # the softmax, what comes before it (tanh; scores with their bias), and dropout's mask and
        # result.
        tables = 1 + bool(self.softcap) + (not scheme.fused) + 2 * bool(self.config.dropout)
        return 4 * C + H * T * tables + normed

    def shared(self, T):
        """The bias of all heads, or the mask."""
        if not self.fused():
            return 0
        if POSITION[self.config.position].acts_on == "scores":
            return T * T * self.n_head
        return T * T if self.window or self.group else 0


MIXER["attention"] = Attention
