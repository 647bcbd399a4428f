"""The model made of slots, and its configuration. Filled as GPT-2 it computes what model.py does,
filled as LLaMA what model_llama.py does, to the last bit."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn as nn
from torch.nn import functional as F

from common.configurator import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    Words,
)
from parts import moe
from parts.attention import Attention
from parts.part import STD, Linear, head_width, layer_mixers, refuse, reset
from parts.position import Shared, Where
from parts.slots import (
    ATTN_EXTRA,
    BLOCK,
    CONV_SITES,
    EMBED,
    MIXER,
    MLP,
    NORM,
    POSITION,
    RESIDUAL,
    ROPE_SCALING,
)

Factor = Annotated[float, Range(least=1)]


@dataclass
class VariantConfig:
    """The keys of a model. --help prints the comment behind each key, under the comment line above
    it; only --help=all prints the keys under a line that begins with "rare:"."""

    # the size of the model
    block_size: PositiveInt = 1024  # context length, tokens
    vocab_size: PositiveInt = 50257
    n_layer: Annotated[int, Range(least=1, most=1000)] = 12
    n_head: PositiveInt = 12
    n_kv_head: PositiveInt | None = None  # heads of keys and values; None: n_head, 1: multi-query
    n_embd: PositiveInt = 768  # width of the model
    head_dim: PositiveInt | None = None  # width of a head of attention; None: n_embd / n_head
    dropout: Fraction = 0.0
    attn_dropout: Fraction | None = None  # of the attention weights; None: as dropout
    tie_embeddings: bool = False  # head = token embedding
    bias: bool | Literal["none", "norm", "qkv", "all"] = "none"  # True: all, False: none
    # the slots
    position: Words(POSITION) = "rope"
    norm: Words(NORM) = "rmsnorm"
    block: Words(BLOCK) = "pre"  # where the norms stand, serial or parallel
    mlp: Words(MLP) = "swiglu"
    mixer: Words(MIXER, several=True) = "attention"  # a,b: repeated over the layers
    # rare: widths of MLPs, norms
    mlp_width: PositiveInt | None = None  # None: 4 n_embd, or two thirds of that where it is gated
    multiple_of: PositiveInt = 256  # a gated MLP's width is rounded up to a multiple of this
    ffn_dim_multiplier: PositiveFloat | None = None  # of a gated MLP without mlp_width
    norm_eps: PositiveFloat = 1e-5  # of rmsnorm, and of the norms in mixers
    # rare: positions
    rope_theta: PositiveFloat = 10000.0  # of rope
    rope_fraction: Share = 1.0  # of rope: the part of each head that is turned
    rope_scaling: Words(ROPE_SCALING) = "none"  # of rope; with rope_factor=1 it changes nothing
    rope_factor: Factor = 1.0  # of rope_scaling: how many times longer the texts are
    rope_original: PositiveInt = 8192  # of yarn and llama3: the context before scaling
    relative_clip: PositiveInt = 16  # of relative: the largest distance with a vector of its own
    # rare: what attention sees, residuals
    window: NonNegativeInt = 0  # tokens a query sees, itself included; 0: all
    full_every: NonNegativeInt = 0  # of window: every n-th layer sees all; 0: none
    block_local: NonNegativeInt = 0  # size of the groups that see themselves only; 0: no groups
    qk_norm: Literal["none", "head", "full"] = "none"
    attn_softcap: NonNegativeFloat = 0.0  # 0: none
    logit_softcap: NonNegativeFloat = 0.0  # 0: none
    low_rank: NonNegativeInt = 0  # rank of the linear maps of the blocks; 0: full
    embed_norm: bool = False  # a norm after the embedding (BLOOM)
    residual: Words(RESIDUAL) = "plain"  # how sublayers read and add to the residual stream
    streams: PositiveInt = 4  # of hyper and mhc: residual streams
    attn_extra: Words(ATTN_EXTRA, several=True) = "none"  # a,b: additions to each head of attention
    nope_every: NonNegativeInt = 0  # of rope: every n-th layer does not turn; 0: all do
    kv_shared_by: NonNegativeInt = 0  # layers of attention that share keys and values; 0: none
    # rare: embeddings of n-grams
    embed: Words(EMBED) = "token"  # whether the last n tokens have a vector, too
    ngram_max: Annotated[int, Range(least=2)] = 4  # of ngram: n is 2 to this
    ngram_rows: PositiveInt = 8192  # of ngram: vectors for each n
    ngram_width: PositiveInt | None = None  # of ngram: their width; None: n_embd
    ngram_dropout: Fraction | None = None  # of ngram: of whole vectors; None: as dropout
    # rare: mixtures of experts
    n_experts: PositiveInt = 8  # of moe
    top_k: PositiveInt = 2  # of moe: experts that a token uses
    shared_experts: NonNegativeInt = 0  # of moe: width, in experts, of one that all tokens use
    shared_gate: bool = False  # of moe: the shared expert times a number of the token's own
    moe_balance: Literal["loss", "bias"] = "loss"  # of moe: what evens the experts' loads
    # rare: latent attention, states, short convolutions
    latent_rank: PositiveInt | None = None  # of mla: width of the latent vector; None: n_embd / 4
    rope_head_dim: PositiveInt | None = None  # of mla: the shared key; None: half a head
    state_size: PositiveInt | None = None  # of a key in a state; None: C / H / 2, or C / 2 (mamba2)
    expand: PositiveInt = 1  # of a state: the width of all values, in units of n_embd
    conv: PositiveInt | None = None  # tokens a convolution sees; None: 4 in a state, at conv_sites
    conv_sites: Words(CONV_SITES, several=True) = "none"  # a,b: where; none: input, if conv is set

    def __post_init__(self):
        if self.bias is True:
            self.bias = "all"
        elif self.bias is False:
            self.bias = "none"
        self.n_kv_head = self.n_kv_head or self.n_head
        mixers = [MIXER[word] for word in self.mixer.split(",")]
        self.check_position(mixers)
        self.check_unread(mixers)
        self.check_needs()
        self.check_heads()
        self.check_words(mixers)
        for part in (*mixers, MLP[self.mlp], RESIDUAL[self.residual]):
            part.check(self)

    def check_position(self, mixers):
        """Refuse more mixers than layers, and a position that acts where no mixer lets it."""
        refuse(
            len(mixers) > self.n_layer,
            f"mixer={self.mixer} names more mixers than n_layer={self.n_layer}: leave some out",
        )
        place = POSITION[self.position].acts_on
        places = {None}  # position=none needs none
        for mixer in mixers:
            places.update(mixer.acted_on)
        fitting = [word for word, scheme in POSITION.items() if scheme.acts_on in places]
        refuse(
            place not in places,
            f"position={self.position} acts on {place}, which mixer={self.mixer} does not have: "
            f"choose {', '.join(fitting)}",
        )

    def check_unread(self, mixers):
        """Refuse a key that some mixer reads, but none of this model's."""
        read = {key for mixer in mixers for key in mixer.reads}
        for word, mixer in MIXER.items():
            for key in sorted({*mixer.reads} - read):
                default = getattr(VariantConfig, key)
                if key == "n_kv_head":
                    default = self.n_head
                refuse(
                    getattr(self, key) != default,
                    f"{key} does not go with mixer={self.mixer}: give {key}={default}, or add a "
                    f"layer of mixer={word}",
                )

    def check_needs(self):
        """Refuse a key of NEEDS that has no effect beside the value of its other key."""
        for key, (other, useless) in NEEDS.items():
            beside = getattr(self, other)
            default = getattr(VariantConfig, key)
            refuse(
                getattr(self, key) != default and beside in useless,
                f"{key} has no effect with {other}={beside}: give {key}={default}, or change "
                f"{other}",
            )

    def check_heads(self):
        """Refuse numbers of heads that do not divide, and heads that RoPE cannot turn."""
        H = self.n_head
        K = self.n_kv_head
        D = head_width(self)
        words = self.mixer.split(",")
        takes_head_dim = all("head_dim" in MIXER[word].reads for word in words)
        refuse(
            self.n_embd % H and not (self.head_dim and takes_head_dim),
            f"n_embd={self.n_embd} is not divisible by n_head={H}",
        )
        refuse(H % K, f"n_head={H} is not divisible by n_kv_head={K}")
        heads = f"head_dim={D}" if self.head_dim else f"n_embd={self.n_embd} over n_head={H}"
        pairs = int(self.rope_fraction * D) // 2
        # Not mla: it turns rope_head_dim, and checks it.
        turns_heads = any("q and k" in MIXER[word].acted_on for word in words if word != "mla")
        refuse(
            self.position == "rope" and turns_heads and (D % 2 or pairs == 0),
            f"rope rotates pairs, and {heads} with rope_fraction={self.rope_fraction} gives a head "
            "of odd width, or no pair",
        )
        refuse(
            "yarn" in self.rope_scaling and self.rope_theta == 1,
            f"rope_scaling={self.rope_scaling} divides by the logarithm of rope_theta=1: choose a "
            "larger rope_theta",
        )

    def check_words(self, mixers):
        """Refuse words that contradict each other, or change nothing."""
        for key in ("attn_extra", "conv_sites"):
            words = getattr(self, key).split(",")
            refuse(
                len(set(words)) < len(words) or ("none" in words and len(words) > 1),
                f"{key}={getattr(self, key)} contradicts or repeats itself: give each word once, "
                "and none alone",
            )
        refuse(
            {"gate_head", "gate_element"} <= {*self.attn_extra.split(",")},
            f"attn_extra={self.attn_extra} contradicts itself: give one gate at most",
        )
        refuse(
            self.window and self.block_local,
            "window and block_local both limit what a query sees: choose one",
        )
        refuse(
            self.mlp == "none" and self.block != "parallel",
            f"mlp=none leaves a norm of block={self.block} without use: choose block=parallel",
        )
        refuse(
            self.bias == "norm" and not NORM[self.norm].biased,
            f"bias=norm changes nothing, norm={self.norm} has no bias: choose another norm or bias",
        )
        refuse(
            self.bias == "qkv" and not any(issubclass(mixer, Attention) for mixer in mixers),
            f"bias=qkv does not go with mixer={self.mixer}: choose bias=all or none",
        )


WITHOUT_ROPE = ("position", {*POSITION} - {"rope"})
NEEDS = {  # {key: (another key, its values beside which the key has no effect)}
    "full_every": ("window", {0}),
    "nope_every": WITHOUT_ROPE,
    "rope_fraction": WITHOUT_ROPE,
    "rope_scaling": WITHOUT_ROPE,
    "rope_factor": ("rope_scaling", {"none"}),
    "shared_gate": ("shared_experts", {0}),
}


class LayerParts:
    """Makes the parts of one layer, of the classes that the words of the configuration name."""

    def __init__(self, config, layer):
        self.config = config
        self.layer = layer

    def norm(self):
        return NORM[self.config.norm](self.config.n_embd, self.config)

    def mlp(self):
        return MLP[self.config.mlp](self.config)

    def mixer(self):
        word = layer_mixers(self.config)[self.layer]
        mixer = MIXER[word](self.config, self.layer)
        if "attn_extra" in mixer.reads:
            words = self.config.attn_extra.split(",")
            for extra, make in ATTN_EXTRA.items():
                if extra in words:
                    mixer.add_extra(extra, make, self.config, self.layer)
        return mixer

    def residual(self, reads_per_block):
        return RESIDUAL[self.config.residual](self.config, self.layer, reads_per_block)


class Variant(nn.Module):
    """A decoder with an embedding, n_layer blocks and a head, whose slots the words fill.

    Its modules are named as in model.py, so that the names in a checkpoint are the same: `wpe` is
    the position scheme, of any kind.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        norm = NORM[config.norm]
        block = BLOCK[config.block]
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.embed = EMBED[config.embed](config)
        self.wpe = POSITION[config.position](config)
        if config.position == "rope":  # set here: position.py cannot import the words of slots.py
            self.wpe.scaling = ROPE_SCALING[config.rope_scaling](config)
        self.norm_e = norm(config.n_embd, config) if config.embed_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        layers = range(config.n_layer)
        self.blocks = nn.ModuleList(block(LayerParts(config, layer)) for layer in layers)
        self.norm_f = norm(config.n_embd, config) if block.last_norm else nn.Identity()
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """The embedding starts at N(0, 0.02). Each part sets its own parameters: see `reset` there
        and `linear` in part.py. In the order of model.py and model_llama.py, so that a seed gives
        the same weights."""
        nn.init.normal_(self.wte.weight, 0.0, STD)
        parts = [self.embed, self.wpe, self.norm_e, self.blocks, self.norm_f]
        if not self.config.tie_embeddings:
            parts.append(self.lm_head)
        for part in parts:
            reset(part)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """As in model.py; in training the loss includes the balance loss of experts."""
        B, T = idx.size()
        past = 0 if cache is None else cache.length
        if self.wpe.limit and past + T > self.wpe.limit:
            raise ValueError(f"cannot read {past + T} tokens: block_size is {self.wpe.limit}")
        if cache is None:
            pos = torch.arange(T, device=idx.device)[None]  # (1, T)
        else:
            pos = cache.advance(idx)  # (B or 1, T)
        shared = Shared()
        x = self.embed(self.wte(idx), idx, cache)  # (B, T, C)
        x = self.dropout(self.norm_e(self.wpe.embed(x, pos)))
        where = Where(
            scheme=self.wpe,
            pos=pos,
            angles=self.wpe.angles(pos),
            idx=idx,
            shared=shared,
            first=x,
        )
        x = self.blocks[0].residual.spread(x)  # in the form of the slot residual
        for i, block in enumerate(self.blocks):
            state = None
            if cache is not None:
                state = cache.layer(i, block.attn.new_state)  # the mixer makes it the first time
            x = block(x, where, state)
        x = self.blocks[-1].residual.gathered(x)  # (B, T, C)
        x = x[:, -1:] if last_only else x
        logits = self.lm_head(self.norm_f(x))  # (B, T or 1, V)
        if self.config.logit_softcap:
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
            if shared.routings:
                loss = loss + moe.collect(self, shared.routings)
        return logits, loss
