"""
The parts that fill the slots of a decoder block, slot by slot: positions, norms, MLPs, attention.

A component is one class (or function) and one word in the dictionary of its slot: choices, --help, tests and
ablation arms are made from the dictionaries. Parts that belong to a corner are that corner's, imported.
Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D = C / H, S keys (past and present).
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from model_llama import RMSNorm
from parts.cache import visible
from parts.mlp import linear
from parts.position import Alibi, Position


def compiled_on_gpu(x):
    return x.is_cuda and torch.compiler.is_compiling()


class Attention(nn.Module):
    """softmax(q kᵀ / sqrt(D) + bias) v over the keys that a query may see. H / K neighbouring query heads share a
    key and value head: H multi-head, 1 multi-query (Shazeer 2019, arXiv:1911.02150), between grouped-query
    (Ainslie et al. 2023, arXiv:2305.13245). window: the last so many tokens (Mistral, Jiang et al. 2023,
    arXiv:2310.06825); block_local: groups of so many that see themselves only. qk_norm: RMSNorm on each head's q
    and k (Qwen 3, arXiv:2505.09388), or on all heads' at once (OLMo 2, arXiv:2501.00656). attn_softcap:
    c tanh(scores / c) (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.window = (
            0 if config.full_every and (layer + 1) % config.full_every == 0 else config.window
        )
        self.group, self.softcap, self.qk_norm = (
            config.block_local,
            config.attn_softcap,
            config.qk_norm,
        )
        D = config.n_embd // config.n_head
        self.wq = linear(config.n_embd, config.n_embd, config)
        self.wk = linear(config.n_embd, D * config.n_kv_head, config)
        self.wv = linear(config.n_embd, D * config.n_kv_head, config)
        self.wo = linear(config.n_embd, config.n_embd, config)
        self.dropout = nn.Dropout(config.dropout)
        if config.qk_norm != "none":
            heads = (1, 1) if config.qk_norm == "head" else (config.n_head, config.n_kv_head)
            self.q_norm, self.k_norm = (RMSNorm(D * n, config.norm_eps) for n in heads)

    def forward(self, x, where, cache=None):
        B, T, C = x.size()
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = where.scheme.rotate(q, k, where.angles)
        if cache is None and compiled_on_gpu(x) and self.flexible(q, where.scheme):
            return self.dropout(
                self.wo(self.flex(q, k, v, where.scheme).transpose(1, 2).reshape(B, T, C))
            )
        if cache is None:
            kpos, mask = (
                where.pos,
                None
                if self.window >= T or not self.window
                else visible(where.pos, where.pos, self.window),
            )
        else:
            k, v, mask = cache.update(k, v, self.window)  # past ones too: (B, K, S, D)
            kpos = cache.kpos
        if self.group:
            mask = visible(where.pos, kpos, group=self.group)
        bias = where.scheme.bias(q, where.pos, kpos)  # (B or 1, H, T, S) or None
        y = self.attend(q, k, v, where.pos, kpos, mask, bias)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.dropout(self.wo(y))

    def attend(self, q, k, v, qpos, kpos, mask, bias):
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D)."""
        T, p = q.size(2), self.dropout.p if self.training else 0.0
        if bias is None and not self.softcap:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None and T > 1,
                dropout_p=p,
                enable_gqa=True,
            )
        mask = visible(qpos, kpos) if mask is None else mask  # (B or 1, 1, T, S)
        if not self.softcap:
            bias = bias.masked_fill(~mask, -torch.inf)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, dropout_p=p, enable_gqa=True
            )
        k, v = (
            a.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for a in (k, v)
        )  # (B, H, S, D)
        scores = self.softcap * torch.tanh(
            q @ k.transpose(2, 3) / math.sqrt(q.size(-1)) / self.softcap
        )  # (B, H, T, S)
        scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
        return F.dropout(scores.softmax(-1), p) @ v

    def flexible(self, q, scheme):
        """Whether `flex` can and should do what `attend` does here: more than plain causal attention, no dropout, no
        bias but ALiBi's, which it can make from the positions alone, and heads of 16 or more, as its kernels need."""
        biased = type(scheme).bias is not Position.bias
        more = self.window or self.group or self.softcap or biased
        return (
            bool(more)
            and not (self.training and self.dropout.p)
            and (not biased or isinstance(scheme, Alibi))
            and q.size(-1) >= 16
        )

    def flex(self, q, k, v, scheme):
        """`attend` without the (T, T) matrix and without the blocks that nobody sees: FlexAttention (Dong et al. 2024,
        arXiv:2412.05496), which is fast on a GPU and where the model is compiled."""

        def seen(b, h, i, j):  # what `visible` says, of one query and one key
            near = (j > i - self.window) if self.window else True
            return (j <= i) & near & (j // self.group == i // self.group if self.group else True)

        def score(s, b, h, i, j):
            s = self.softcap * torch.tanh(s / self.softcap) if self.softcap else s
            return s + scheme.slopes[h] * (j - i) if isinstance(scheme, Alibi) else s

        T = q.size(2)
        blocks = create_block_mask(seen, None, None, T, T, device=q.device)
        return flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
