"""
Variants: a decoder whose block has slots. GPT-2 is one way to fill them, LLaMA another, and everything in
between is an experiment.

    python train.py config/llama_shakespeare.py --position=alibi    # LLaMA with one part swapped
    python train.py config/gpt2_shakespeare.py --arch=falcon        # all slots filled at once
    python -m parts.catalogue                                       # the catalogue: words, costs, papers
    python -m parts.catalogue --diff=gpt2,llama                            # what differs between two architectures

Filled as GPT-2 it computes what model.py does, filled as LLaMA what model_llama.py does, to the last bit.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
from torch.nn import functional as F

from common.configurator import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from parts.attention import Attention
from parts.mlp import MLP
from parts.norm import NORM
from parts.position import POSITION, ROPE_SCALING, Where

# ---------------------------------------------------------------- structure: block


def pre(b, x, attn):
    """pre: the norm before each sublayer (GPT-2, LLaMA)"""
    x = x + attn(b.norm1(x))
    return x + b.mlp(b.norm2(x))


def post(b, x, attn):
    """post: the norm after each sum, and none at the end (Vaswani et al. 2017, arXiv:1706.03762)"""
    x = b.norm1(x + attn(x))
    return b.norm2(x + b.mlp(x))


def output(b, x, attn):
    """output: the norm on what each sublayer gives (OLMo 2, arXiv:2501.00656)"""
    x = x + b.norm1(attn(x))
    return x + b.norm2(b.mlp(x))


def sandwich(b, x, attn):
    """sandwich: norms before and after each sublayer (Peri-LN, Kim et al. 2025, arXiv:2502.02732)"""
    x = x + b.norm1_out(attn(b.norm1(x)))
    return x + b.norm2_out(b.mlp(b.norm2(x)))


def parallel(b, x, attn):
    """parallel: both sublayers read one norm of the same x (GPT-J; PaLM, arXiv:2204.02311; Falcon 7B)"""
    h = b.norm1(x)
    return x + attn(h) + b.mlp(h)


def parallel2(b, x, attn):
    """parallel2: both read the same x, each through its own norm (GPT-NeoX, arXiv:2204.06745)"""
    return x + attn(b.norm1(x)) + b.mlp(b.norm2(x))


BLOCK = dict(
    pre=pre, post=post, output=output, sandwich=sandwich, parallel=parallel, parallel2=parallel2
)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.form = BLOCK[config.block]
        self.norm1 = NORM[config.norm](config.n_embd, config)
        self.attn = Attention(config, layer)
        if self.form is not parallel:
            self.norm2 = NORM[config.norm](config.n_embd, config)
        self.mlp = MLP[config.mlp](config)
        if self.form is sandwich:
            self.norm1_out, self.norm2_out = (
                NORM[config.norm](config.n_embd, config) for _ in range(2)
            )

    def forward(self, x, where, cache=None):
        return self.form(self, x, lambda h: self.attn(h, where, cache))


# ---------------------------------------------------------------- the model


@dataclass
class VariantConfig:
    block_size: PositiveInt = 1024  # context length, tokens
    vocab_size: PositiveInt = 50257
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_kv_head: PositiveInt | None = (
        None  # heads of keys and values; None: n_head (multi-head), 1: multi-query
    )
    n_embd: PositiveInt = 768  # width of the model
    dropout: Fraction = 0.0
    tie_embeddings: bool = False  # head = token embedding
    bias: bool | Literal["none", "norm", "all"] = (
        "none"  # norm: in the norms alone (Falcon); False and True: none and all
    )
    position: Literal[*POSITION] = "rope"
    norm: Literal[*NORM] = "rmsnorm"
    block: Literal[*BLOCK] = "pre"  # where the norms stand, serial or parallel
    mlp: Literal[*MLP] = "swiglu"
    mlp_width: PositiveInt | None = None  # None: 4 n_embd, or two thirds of that where it is gated
    multiple_of: PositiveInt = 256  # a gated MLP's width is rounded up to a multiple of this
    ffn_dim_multiplier: PositiveFloat | None = None  # scales a gated MLP's width
    norm_eps: PositiveFloat = 1e-5  # of rmsnorm
    rope_theta: PositiveFloat = 10000.0  # of rope
    rope_fraction: Share = 1.0  # of rope: the part of each head that is turned
    rope_scaling: Literal[*ROPE_SCALING] = "none"  # of rope
    rope_factor: float = 1.0  # of rope_scaling: how many times longer the texts are
    rope_original: PositiveInt = 8192  # of yarn and llama3: the context before scaling
    relative_clip: PositiveInt = 16  # of relative: the largest distance with a vector of its own
    window: NonNegativeInt = 0  # tokens a query sees, itself included; 0: all
    full_every: NonNegativeInt = 0  # of window: every so many layers one sees all; 0: none
    block_local: NonNegativeInt = 0  # size of the groups that see themselves only; 0: no groups
    qk_norm: Literal["none", "head", "full"] = "none"
    attn_softcap: NonNegativeFloat = 0.0  # 0: none
    logit_softcap: NonNegativeFloat = 0.0  # 0: none
    low_rank: NonNegativeInt = 0  # rank of every matrix of the blocks; 0: full
    embed_norm: bool = False  # a norm after the embedding (BLOOM)

    def __post_init__(self):
        self.bias = {True: "all", False: "none"}.get(self.bias, self.bias)
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}")
        if self.window and self.block_local:
            raise ValueError(
                f"window={self.window} and block_local={self.block_local} are two ways to look at less: choose one"
            )
        if self.full_every and not self.window:
            raise ValueError(
                f"full_every={self.full_every} makes exceptions from a window: give window too"
            )
        for key in ("rope_theta", "rope_fraction", "norm_eps", "ffn_dim_multiplier"):
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                raise ValueError(
                    f"{key}={getattr(self, key)} is not above 0: leave it out or give more"
                )
        for key in ("attn_softcap", "logit_softcap"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}={getattr(self, key)} is negative: 0 is none")
        if self.rope_fraction > 1:
            raise ValueError(
                f"rope_fraction={self.rope_fraction} is above 1: it is a part of each head"
            )
        if self.position == "rope" and (
            self.n_embd // self.n_head % 2
            or not self.rope_fraction * (self.n_embd // self.n_head) // 2 > 0
        ):
            raise ValueError(
                f"rope turns pairs, and n_embd={self.n_embd} over n_head={self.n_head} with rope_fraction={self.rope_fraction} has an odd half or none"
            )
        if self.rope_scaling != "none" and self.rope_factor < 1:
            raise ValueError(
                f"rope_factor={self.rope_factor} is below 1: it says how many times longer the texts are"
            )
        if (self.rope_scaling != "none" or self.rope_fraction != 1) and self.position != "rope":
            raise ValueError(
                f"rope_scaling and rope_fraction mean nothing to position={self.position}: leave them out"
            )
        if self.rope_factor != 1 and self.rope_scaling == "none":
            raise ValueError(
                f"rope_factor={self.rope_factor} scales nothing: give rope_scaling too"
            )
        if self.bias == "norm" and not any(
            name == "bias" for name, _ in NORM[self.norm](1, self).named_parameters()
        ):
            raise ValueError(
                f"bias=norm changes nothing, norm={self.norm} has no bias: choose another of them"
            )


class Variant(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = POSITION[config.position](config)
        self.norm_e = (
            NORM[config.norm](config.n_embd, config) if config.embed_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm_f = (
            nn.Identity() if config.block == "post" else NORM[config.norm](config.n_embd, config)
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """As in the corners; the two factors of a low-rank matrix are such that their product is alike."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = (
                    0.02 / math.sqrt(2 * self.config.n_layer)
                    if ".wo." in name or ".down." in name
                    else 0.02
                )
                if name.endswith((".u.weight", ".v.weight")):
                    std = math.sqrt(std / math.sqrt(self.config.low_rank))
                nn.init.normal_(p, 0.0, std)
            elif not name.endswith("alpha"):
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """As in model.py."""
        B, T = idx.size()
        past = 0 if cache is None else cache.length
        if self.wpe.limit and past + T > self.wpe.limit:
            raise ValueError(f"cannot read {past + T} tokens: block_size is {self.wpe.limit}")
        pos = (
            torch.arange(T, device=idx.device)[None] if cache is None else cache.advance(idx)
        )  # (B or 1, T)
        where = Where(self.wpe, pos, self.wpe.angles(pos))
        x = self.dropout(self.norm_e(self.wpe.embed(self.wte(idx), pos)))  # (B, T, C)
        for i, block in enumerate(self.blocks):
            x = block(x, where, None if cache is None else cache[i])
        logits = self.lm_head(self.norm_f(x[:, -1:] if last_only else x))  # (B, T or 1, V)
        if self.config.logit_softcap:
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        loss = (
            None
            if targets is None
            else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        )
        return logits, loss
