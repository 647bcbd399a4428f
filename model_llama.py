"""
LLaMA (Touvron et al. 2023, arXiv:2302.13971; grouped queries from LLaMA 2, arXiv:2307.09288):
- rotary position embeddings (RoPE) on the queries and keys of every layer
- RMSNorm before each sublayer and once before the head (pre-norm)
- grouped-query attention: n_kv_head key and value heads shared by n_head query heads
- SwiGLU MLP, 8/3 times as wide as the model
- no biases, token embedding and output head not tied
Read it beside model.py: `diff model.py model_llama.py` lists what LLaMA changed.
Shapes: B batch, T tokens, C = n_embd, H = n_head, D = C / H, S keys (past and present),
V vocabulary, K = n_kv_head, M width of the MLP.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class LlamaConfig:
    block_size: int = 1024  # context length, tokens
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None  # heads of keys and values; None: n_head, 1: multi-query
    n_embd: int = 768  # width of the model
    multiple_of: int = 256  # the MLP's width is rounded up to a multiple of this
    ffn_dim_multiplier: float | None = None  # scales the MLP's width (1.3 in LLaMA 2 70B)
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5
    dropout: float = 0.0
    tie_embeddings: bool = False  # head = token embedding

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}")
        if self.n_embd // self.n_head % 2:
            size = f"n_embd={self.n_embd} over n_head={self.n_head}"
            raise ValueError(f"{size} gives an odd head size, and RoPE rotates pairs")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, in fp32
    (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary(pos, theta, D):
    """cos and sin (B or 1, 1, T, D/2) of the angles pos * theta^(-2i/D), pos (B or 1, T) (Su et al.
    2021, arXiv:2104.09864). Computed in fp32 at each forward: a stored table would end at some
    length, and would lose bits when the model is cast to 16 bits."""
    exponent = torch.arange(0, D, 2, device=pos.device, dtype=torch.float32) / D  # (D/2)
    freq = 1.0 / theta**exponent  # (D/2)
    angle = pos[:, None, :, None] * freq  # (B or 1, 1, T, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate each pair (x_i, x_{i + D/2}) of x (B, heads, T, D) by its angle: half-split layout."""
    x1, x2 = x.chunk(2, dim=-1)  # (B, heads, T, D/2) each
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention, softmax(q kᵀ / sqrt(D)) v: H / K neighbouring query heads share a
    key and a value head (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        kv_width = config.n_embd // config.n_head * config.n_kv_head  # K D
        self.wq = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.wk = nn.Linear(config.n_embd, kv_width, bias=False)
        self.wv = nn.Linear(config.n_embd, kv_width, bias=False)
        self.wo = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope, cache=None):
        B, T, C = x.size()
        q = self.wq(x).view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = self.wk(x).view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = self.wv(x).view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        q = rotate(q, *rope)
        k = rotate(k, *rope)
        mask = None
        if cache is not None:
            k, v, mask = cache.update(k, v)  # past and new: k, v (B, K, S, D)
        causal = mask is None and T > 1  # a whole text; a single new token (T = 1) sees all S keys
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, dropout_p=p, enable_gqa=True
        )
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.dropout(self.wo(y))


class MLP(nn.Module):
    """SwiGLU, down(silu(gate(x)) * up(x)), at two thirds of 4C (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config):
        super().__init__()
        width = int(2 * 4 * config.n_embd / 3)  # 2/3 of 4C: so three matrices cost as much as two
        width = int((config.ffn_dim_multiplier or 1) * width)  # rounded twice, as in Meta's code
        width = config.multiple_of * math.ceil(width / config.multiple_of)
        self.gate = nn.Linear(config.n_embd, width, bias=False)
        self.up = nn.Linear(config.n_embd, width, bias=False)
        self.down = nn.Linear(width, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = F.silu(self.gate(x)) * self.up(x)  # (B, T, M)
        return self.dropout(self.down(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, cache=None):
        x = x + self.attn(self.norm1(x), rope, cache)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # of tokens
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        | parameter                  | initial value, N(mean, standard deviation)                 |
        |----------------------------|------------------------------------------------------------|
        | wo, down (residual writes) | N(0, 0.02 / sqrt(2 n_layer)): 2 n_layer of them are summed |
        | every other matrix         | N(0, 0.02)                                                 |
        | norm weights               | 1                                                          |
        """
        for name, p in self.named_parameters():
            if name.endswith(("wo.weight", "down.weight")):
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * self.config.n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02)
            else:
                nn.init.ones_(p)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """
        idx (B, T) token ids; targets (B, T), -1 where the loss skips a token; cache: the tokens
        read before (parts/cache.py). Returns (logits, loss): logits (B, T, V), or (B, 1, V) with
        last_only; loss the mean cross-entropy in nats per token, or None without targets.
        May read more than block_size tokens: RoPE needs no table.
        """
        B, T = idx.size()
        if cache is None:
            pos = torch.arange(T, device=idx.device)[None]  # (1, T)
        else:
            pos = cache.advance(idx)  # (B or 1, T); counts these tokens as read
        rope = rotary(pos, self.config.rope_theta, self.config.n_embd // self.config.n_head)
        x = self.dropout(self.wte(idx))  # (B, T, C)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, None if cache is None else cache[i])
        x = self.norm_f(x[:, -1:] if last_only else x)  # (B, T or 1, C)
        logits = self.lm_head(x)  # (B, T or 1, V)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss
