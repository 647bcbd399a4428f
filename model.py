"""
GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), the baseline:
- learned absolute position embeddings, added once to the token embeddings
- LayerNorm before each sublayer and once before the head (pre-norm)
- multi-head attention
- GELU MLP, four times as wide as the model
- biases everywhere but in the head, which is tied to the token embedding
Read it beside model_llama.py: `diff model.py model_llama.py` lists what LLaMA changed.
Shapes: B batch, T tokens, C = n_embd, H = n_head, D = C / H, S keys (past and present),
V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024  # context length, tokens
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # width of the model
    dropout: float = 0.0
    bias: bool = True  # in Linear and LayerNorm
    tie_embeddings: bool = True  # head = token embedding

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + 1e-5) * weight + bias over the last axis
    (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Multi-head attention, softmax(q kᵀ / sqrt(D)) v (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.wq = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.wk = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.wv = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.wo = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):
        B, T, C = x.size()
        q = self.wq(x).view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = self.wk(x).view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        v = self.wv(x).view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        mask = None
        if cache is not None:
            k, v, mask = cache.update(k, v)  # past and new: k, v (B, H, S, D)
        causal = mask is None and T > 1  # a whole text; a single new token (T = 1) sees all S keys
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=p)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.dropout(self.wo(y))


def gelu(x):
    """GPT-2's GELU, x/2 (1 + tanh(u)), where u = sqrt(2/pi) (x + 0.044715 x³). F.gelu is one fused
    kernel, which code compiled for a CPU cannot use. There we write x sigmoid(2u), which is equal,
    since 1 + tanh(u) = 2 sigmoid(2u), and faster."""
    if x.is_cuda or not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))


class MLP(nn.Module):
    """down(gelu(up(x))) (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = gelu(self.up(x))  # (B, T, 4C)
        return self.dropout(self.down(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = LayerNorm(config.n_embd, config.bias)
        self.attn = Attention(config)
        self.norm2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # of tokens
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # of positions
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = LayerNorm(config.n_embd, config.bias)
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
        | norm weights, biases       | 1, 0                                                       |
        """
        for name, p in self.named_parameters():
            if name.endswith(("wo.weight", "down.weight")):
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * self.config.n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02)
            else:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """
        idx (B, T) token ids; targets (B, T), -1 where the loss skips a token; cache: the tokens
        read before (parts/cache.py). Returns (logits, loss): logits (B, T, V), or (B, 1, V) with
        last_only; loss the mean cross-entropy in nats per token, or None without targets.
        Raises ValueError beyond block_size tokens.
        """
        B, T = idx.size()
        length = T if cache is None else T + cache.length
        if length > self.config.block_size:
            raise ValueError(f"cannot read {length} tokens: block_size is {self.config.block_size}")
        if cache is None:
            pos = torch.arange(T, device=idx.device)[None]  # (1, T)
        else:
            pos = cache.advance(idx)  # (B or 1, T); counts these tokens as read
        x = self.dropout(self.wte(idx) + self.wpe(pos))  # (B, T, C)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i])
        x = self.norm_f(x[:, -1:] if last_only else x)  # (B, T or 1, C)
        logits = self.lm_head(x)  # (B, T or 1, V)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss
