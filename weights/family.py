"""
What a table of a model family holds, and what many of them share. In all of weights/, "theirs"
means the keys of Hugging Face's config.json and the names of its tensors; "ours" means the keys of
VariantConfig and the names of our parameters.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from weights.layouts import plain


class Family(NamedTuple):
    architecture: str  # the name of their class
    prefix: str  # of their tensor names; files without the head omit it
    slots: dict  # the values of VariantConfig that all its models share, unless defaults
    keys: dict  # {our key: their key}; the value is a size unless `defaults` gives another type
    words: dict  # {our key: (their key, {our word: their words, the first is the one we write})}
    defaults: dict  # {their key: default}; None: a size that may be absent
    allowed: Callable  # c -> {their key: values we can express; the first is that of an absent key}
    names: list  # the `row` of each linear map and norm
    tensors: list = []  # the `row` of each other tensor, with its complete name; * is each expert
    ours: Callable = lambda c: {}  # c -> further values of our configuration
    theirs: Callable = lambda v: {}  # values of ours -> further keys of their configuration
    mixers: dict = {}  # {part of their names: the mixer of the layers that have these tensors}
    absent: dict = {}  # {their key: what it means where it is absent}, beside `defaults`
    older: dict = {}  # other names of the same keys: {older: newer}
    in_rope: dict = {}  # names within rope_parameters: {name there: name in this table}


def row(theirs, ours, layout=plain):
    """(theirs, [ours], layout): how one tensor of theirs holds some of ours, whose names have
    spaces between them. {} is the number of the layer; our names then are those within a block."""
    block = "blocks.{}." if "{}" in theirs else ""
    return theirs, [block + name for name in ours.split()], layout


def layer(theirs, ours, layout=plain):
    """The `row` of a tensor in a layer, whose name begins as in LLaMA."""
    return row(f"model.layers.{{}}.{theirs}", ours, layout)


# ---------------------------------------------------------------- what families share

ACT = {
    "gelu": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "gelu_erf": ("gelu",),
    "relu": ("relu",),
    "silu": ("silu", "swish"),
    "relu2": ("relu2",),
}
GATE = {
    "swiglu": ("silu", "swish"),
    "geglu": ("gelu_pytorch_tanh", "gelu_new"),
    "reglu": ("relu",),
    "glu": ("sigmoid",),
    "bilinear": ("linear",),
}
ROPE = {"none": ("default",), "linear": ("linear",), "yarn": ("yarn",), "llama3": ("llama3",)}
ROPE_NUMBERS = {"rope_factor": "factor", "rope_original": "original_max_position_embeddings"}
READS = {  # the numbers that a kind of rope_scaling reads
    "linear": ["rope_factor"],
    "ntk": ["rope_factor"],
    "yarn": [*ROPE_NUMBERS],
    "yarn_exact": [*ROPE_NUMBERS],
    "llama3": [*ROPE_NUMBERS],
}


def rope_allowed(c):
    factor, original = c.get("factor", 1), c.get("original_max_position_embeddings")
    stretched = type(factor) in (int, float) and factor > 1
    if c["rope_type"] == "yarn" and original < 7:  # less than a turn of the fastest pair
        original = "7 or more"
    return {
        "original_max_position_embeddings": (original,),
        "head_dim": (c["hidden_size"] // c["num_attention_heads"],),
        "partial_rotary_factor": (1,),
        "low_freq_factor": (1,),
        "high_freq_factor": (4,),
        "beta_fast": (32,),
        "beta_slow": (1,),
        "truncate": (True, False),
        "mscale": (None,),
        "attention_factor": (0.1 * math.log(factor) + 1 if stretched else 1,),
    }


def rope_ours(c):
    values = {ours: c[ROPE_NUMBERS[ours]] for ours in READS.get(c["rope_type"], [])}
    if c["rope_type"] == "yarn" and not c.get("truncate", True):
        values["rope_scaling"] = "yarn_exact"
    return values


def rope_theirs(v):
    """Their rope_scaling; newer readers accept it in place of rope_parameters."""
    kind = v["rope_scaling"]
    if kind == "none" or kind not in (*ROPE, "yarn_exact"):
        return {}
    scaling = {ROPE_NUMBERS[ours]: v[ours] for ours in READS[kind]}
    scaling |= {"rope_type": kind}
    if kind == "yarn_exact":
        scaling |= {"rope_type": "yarn", "truncate": False}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": scaling}


def llama_allowed(c):
    return rope_allowed(c) | {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
    }


def no_window_allowed(c):
    """The same of a family that may have a window, which our model then does not express."""
    kinds = c.get("layer_types")
    full = kinds is None or isinstance(kinds, list) and kinds == ["full_attention"] * len(kinds)
    return llama_allowed(c) | {
        "use_sliding_window": (False,),
        "layer_types": (kinds if full else "full_attention in each layer",),
        "sliding_window": (c.get("sliding_window"),),  # ignored unless use_sliding_window
    }


def period(flags):
    """n if exactly every n-th of these flags is true, 0 if none is, None for another order."""
    n = flags.index(True) + 1 if True in flags else 0
    expected = [n > 0 and i % n == 0 for i in range(1, len(flags) + 1)]
    return n if flags == expected else None


def whole_pairs(c, key):
    """The allowed values of the key of rope_fraction: those that rotate an even number of each
    head's features. With an odd number their model computes another function than ours."""
    D = c["hidden_size"] // c["num_attention_heads"]
    return (c[key],) if int(D * c[key]) % 2 == 0 else (1,)


SIZES = dict(
    block_size="max_position_embeddings",
    vocab_size="vocab_size",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_embd="hidden_size",
    tie_embeddings="tie_word_embeddings",
)
LLAMA = Family(  # LLaMA 1, 2 and, with rope scaling, 3
    "LlamaForCausalLM",
    "model.",
    dict(position="rope", norm="rmsnorm", block="pre", mlp="swiglu", bias="none"),
    SIZES
    | dict(
        n_kv_head="num_key_value_heads",
        mlp_width="intermediate_size",
        rope_theta="rope_theta",
        norm_eps="rms_norm_eps",
    ),
    dict(mlp=("hidden_act", GATE), rope_scaling=("rope_type", ROPE)),
    {
        "num_key_value_heads": None,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_type": "default",
    },
    allowed=llama_allowed,
    ours=rope_ours,
    theirs=rope_theirs,
    names=[
        row("model.embed_tokens", "wte"),
        layer("input_layernorm", "norm1"),
        layer("self_attn.q_proj", "attn.wq"),
        layer("self_attn.k_proj", "attn.wk"),
        layer("self_attn.v_proj", "attn.wv"),
        layer("self_attn.o_proj", "attn.wo"),
        layer("post_attention_layernorm", "norm2"),
        layer("mlp.gate_proj", "mlp.gate"),
        layer("mlp.up_proj", "mlp.up"),
        layer("mlp.down_proj", "mlp.down"),
        row("model.norm", "norm_f"),
        row("lm_head", "lm_head"),
    ],
)
QK_NORM = [layer("self_attn.q_norm", "attn.q_norm"), layer("self_attn.k_norm", "attn.k_norm")]
