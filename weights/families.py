"""
The model families that pretrained.py reads and export.py writes: one table each, used in both
directions. In all of weights/, "theirs" means the keys of Hugging Face's config.json and the names
of its tensors; "ours" means the keys of VariantConfig and the names of our parameters.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from weights.layouts import by_head, multi_query, plain, transposed


class Family(NamedTuple):
    architecture: str  # the name of their class
    prefix: str  # of their tensor names; files without the head omit it
    slots: dict  # the values of VariantConfig that all its models share, unless defaults
    keys: dict  # {our key: their key}; the value is a size unless `defaults` gives another type
    words: dict  # {our key: (their key, {our word: their words, the first is the one we write})}
    defaults: dict  # {their key: default}; None: a size that may be absent
    must: Callable  # c -> {their key: values we can express; the first is that of an absent key}
    ours: Callable  # c -> further values of our configuration
    theirs: Callable  # values of ours -> further keys of their configuration
    names: list  # (their tensor, [our tensors], layout); {} is the number of the layer
    older: dict = {}  # other names of the same keys: {older: newer}
    in_rope: dict = {}  # names within rope_parameters: {name there: name in this table}


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
    "llama3": [*ROPE_NUMBERS],
}


def rope_must(c):
    factor = c.get("factor", 1)
    stretched = type(factor) in (int, float) and factor > 1
    return {
        "head_dim": (c["hidden_size"] // c["num_attention_heads"],),
        "partial_rotary_factor": (1,),
        "low_freq_factor": (1,),
        "high_freq_factor": (4,),
        "beta_fast": (32,),
        "beta_slow": (1,),
        "truncate": (True,),
        "mscale": (None,),
        "attention_factor": (0.1 * math.log(factor) + 1 if stretched else 1,),
    }


def rope_ours(c):
    return {ours: c[ROPE_NUMBERS[ours]] for ours in READS.get(c["rope_type"], [])}


def rope_theirs(v):
    """Their rope_scaling; newer readers accept it in place of rope_parameters."""
    kind = v["rope_scaling"]
    if kind not in ROPE or kind == "none":
        return {}
    scaling = {"rope_type": kind} | {ROPE_NUMBERS[ours]: v[ours] for ours in READS[kind]}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": scaling}


def llama_must(c):
    return rope_must(c) | {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
    }


def full_attention(c):
    """The allowed values of layer_types: absent, or full attention in every layer."""
    kinds = c.get("layer_types")
    if kinds is None or isinstance(kinds, list) and kinds == ["full_attention"] * len(kinds):
        return (kinds,)
    return ("full_attention in each layer",)


def whole_pairs(c):
    """The allowed values of rotary_pct: those that rotate an even number of each head's features.
    With an odd number their model computes another function than ours."""
    D = c["hidden_size"] // c["num_attention_heads"]
    return (c["rotary_pct"],) if int(D * c["rotary_pct"]) % 2 == 0 else (1,)


LLAMA_KEYS = dict(
    block_size="max_position_embeddings",
    vocab_size="vocab_size",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_kv_head="num_key_value_heads",
    n_embd="hidden_size",
    mlp_width="intermediate_size",
    rope_theta="rope_theta",
    norm_eps="rms_norm_eps",
    tie_embeddings="tie_word_embeddings",
)
LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_type": "default",
}
LLAMA_SLOTS = dict(position="rope", norm="rmsnorm", block="pre", mlp="swiglu", bias="none")
LLAMA_NAMES = [
    ("model.embed_tokens", ["wte"], plain),
    ("model.layers.{}.input_layernorm", ["blocks.{}.norm1"], plain),
    ("model.layers.{}.self_attn.q_proj", ["blocks.{}.attn.wq"], plain),
    ("model.layers.{}.self_attn.k_proj", ["blocks.{}.attn.wk"], plain),
    ("model.layers.{}.self_attn.v_proj", ["blocks.{}.attn.wv"], plain),
    ("model.layers.{}.self_attn.o_proj", ["blocks.{}.attn.wo"], plain),
    ("model.layers.{}.post_attention_layernorm", ["blocks.{}.norm2"], plain),
    ("model.layers.{}.mlp.gate_proj", ["blocks.{}.mlp.gate"], plain),
    ("model.layers.{}.mlp.up_proj", ["blocks.{}.mlp.up"], plain),
    ("model.layers.{}.mlp.down_proj", ["blocks.{}.mlp.down"], plain),
    ("model.norm", ["norm_f"], plain),
    ("lm_head", ["lm_head"], plain),
]
QK_NORM = [
    ("model.layers.{}.self_attn.q_norm", ["blocks.{}.attn.q_norm"], plain),
    ("model.layers.{}.self_attn.k_norm", ["blocks.{}.attn.k_norm"], plain),
]
BLOOM_NAMES = [
    ("transformer.word_embeddings", ["wte"], plain),
    ("transformer.h.{}.input_layernorm", ["blocks.{}.norm1"], plain),
    (
        "transformer.h.{}.self_attention.query_key_value",
        ["blocks.{}.attn.wq", "blocks.{}.attn.wk", "blocks.{}.attn.wv"],
        by_head,
    ),
    ("transformer.h.{}.self_attention.dense", ["blocks.{}.attn.wo"], plain),
    ("transformer.h.{}.mlp.dense_h_to_4h", ["blocks.{}.mlp.up"], plain),
    ("transformer.h.{}.mlp.dense_4h_to_h", ["blocks.{}.mlp.down"], plain),
    ("transformer.ln_f", ["norm_f"], plain),
    ("lm_head", ["lm_head"], plain),
]

# ---------------------------------------------------------------- the families

GPT2 = Family(
    "GPT2LMHeadModel",
    "transformer.",
    dict(position="learned", norm="layernorm", block="pre", mlp="gelu", bias="all"),
    dict(
        block_size="n_positions",
        vocab_size="vocab_size",
        n_layer="n_layer",
        n_head="n_head",
        n_embd="n_embd",
        mlp_width="n_inner",
        tie_embeddings="tie_word_embeddings",
    ),
    dict(mlp=("activation_function", ACT)),
    {"tie_word_embeddings": True, "n_inner": None, "activation_function": "gelu_new"},
    must=lambda c: {
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    ours=lambda c: {"mlp_width": c["n_inner"] or 4 * c["n_embd"]},
    theirs=lambda v: {},
    names=[
        ("transformer.wte", ["wte"], plain),
        ("transformer.wpe", ["wpe"], plain),
        ("transformer.h.{}.ln_1", ["blocks.{}.norm1"], plain),
        (
            "transformer.h.{}.attn.c_attn",
            ["blocks.{}.attn.wq", "blocks.{}.attn.wk", "blocks.{}.attn.wv"],
            transposed,
        ),
        ("transformer.h.{}.attn.c_proj", ["blocks.{}.attn.wo"], transposed),
        ("transformer.h.{}.ln_2", ["blocks.{}.norm2"], plain),
        ("transformer.h.{}.mlp.c_fc", ["blocks.{}.mlp.up"], transposed),
        ("transformer.h.{}.mlp.c_proj", ["blocks.{}.mlp.down"], transposed),
        ("transformer.ln_f", ["norm_f"], plain),
        ("lm_head", ["lm_head"], plain),
    ],
)

LLAMA = Family(  # LLaMA 1, 2 and, with rope scaling, 3
    "LlamaForCausalLM",
    "model.",
    LLAMA_SLOTS,
    LLAMA_KEYS,
    dict(mlp=("hidden_act", GATE), rope_scaling=("rope_type", ROPE)),
    LLAMA_DEFAULTS,
    llama_must,
    rope_ours,
    rope_theirs,
    LLAMA_NAMES,
)

MISTRAL = LLAMA._replace(
    architecture="MistralForCausalLM",
    defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
    must=lambda c: (
        llama_must(c) | {"sliding_window": (c["sliding_window"],), "layer_types": (None,)}
    ),
    ours=lambda c: rope_ours(c) | {"window": c["sliding_window"] or 0},
    theirs=lambda v: rope_theirs(v) | {"sliding_window": v["window"] or None},
)

OLMO2 = LLAMA._replace(
    architecture="Olmo2ForCausalLM",
    slots=LLAMA_SLOTS | dict(block="output", qk_norm="full"),
    defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
    names=[
        (
            theirs.replace("post_attention", "post_feedforward").replace("input", "post_attention"),
            ours,
            layout,
        )
        for theirs, ours, layout in LLAMA_NAMES
    ]
    + QK_NORM,
)

QWEN3 = LLAMA._replace(
    architecture="Qwen3ForCausalLM",
    slots=LLAMA_SLOTS | dict(qk_norm="head"),
    defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
    must=lambda c: (
        llama_must(c)
        | {
            "use_sliding_window": (False,),
            "layer_types": full_attention(c),
            "sliding_window": (c.get("sliding_window"),),  # ignored unless use_sliding_window
        }
    ),
    theirs=lambda v: rope_theirs(v) | {"head_dim": v["n_embd"] // v["n_head"]},
    names=LLAMA_NAMES + QK_NORM,
)

BLOOM = Family(
    "BloomForCausalLM",
    "transformer.",
    dict(position="alibi", norm="layernorm", block="pre", mlp="gelu", bias="all", embed_norm=True),
    dict(
        block_size="seq_length",
        vocab_size="vocab_size",
        n_layer="n_layer",
        n_head="n_head",
        n_embd="hidden_size",
        tie_embeddings="tie_word_embeddings",
    ),
    {},
    {"seq_length": 2048, "tie_word_embeddings": True},
    must=lambda c: {
        "layer_norm_epsilon": (1e-5,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    ours=lambda c: {"mlp_width": 4 * c["hidden_size"]},
    theirs=lambda v: {},
    names=[
        ("transformer.word_embeddings_layernorm", ["norm_e"], plain),
        ("transformer.h.{}.post_attention_layernorm", ["blocks.{}.norm2"], plain),
    ]
    + BLOOM_NAMES,
    older={
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)

FALCON = Family(  # the layout of the 7B model
    "FalconForCausalLM",
    "transformer.",
    dict(position="rope", norm="layernorm", block="parallel", mlp="gelu_erf", n_kv_head=1),
    dict(
        block_size="max_position_embeddings",
        vocab_size="vocab_size",
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
        n_embd="hidden_size",
        mlp_width="ffn_hidden_size",
        rope_theta="rope_theta",
        tie_embeddings="tie_word_embeddings",
    ),
    dict(
        mlp=("activation", ACT),
        bias=("bias", {"norm": (False,), "all": (True,)}),
        rope_scaling=("rope_type", ROPE),
    ),
    {
        "max_position_embeddings": 2048,
        "ffn_hidden_size": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "activation": "gelu",
        "bias": False,
        "rope_type": "default",
    },
    must=lambda c: (
        rope_must(c)
        | {
            "layer_norm_epsilon": (1e-5,),
            "alibi": (False,),
            "new_decoder_architecture": (False,),
            "multi_query": (True,),
            "parallel_attn": (True,),
        }
    ),
    ours=lambda c: rope_ours(c) | {"mlp_width": c["ffn_hidden_size"] or 4 * c["hidden_size"]},
    theirs=rope_theirs,
    names=[
        (theirs, ours, multi_query if layout is by_head else layout)
        for theirs, ours, layout in BLOOM_NAMES
    ],
    older={"n_embed": "hidden_size"},
)

NEOX = Family(  # also Pythia
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    dict(position="rope", norm="layernorm", bias="all"),
    dict(
        block_size="max_position_embeddings",
        vocab_size="vocab_size",
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
        n_embd="hidden_size",
        mlp_width="intermediate_size",
        rope_theta="rotary_emb_base",
        rope_fraction="rotary_pct",
        tie_embeddings="tie_word_embeddings",
    ),
    dict(
        mlp=("hidden_act", ACT),
        block=("use_parallel_residual", {"parallel2": (True,), "pre": (False,)}),
        rope_scaling=("rope_type", ROPE),
    ),
    {
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "rope_type": "default",
    },
    must=lambda c: (
        rope_must(c)
        | {"layer_norm_eps": (1e-5,), "attention_bias": (True,), "rotary_pct": whole_pairs(c)}
    ),
    ours=rope_ours,
    theirs=rope_theirs,
    names=[
        ("gpt_neox.embed_in", ["wte"], plain),
        ("gpt_neox.layers.{}.input_layernorm", ["blocks.{}.norm1"], plain),
        (
            "gpt_neox.layers.{}.attention.query_key_value",
            ["blocks.{}.attn.wq", "blocks.{}.attn.wk", "blocks.{}.attn.wv"],
            by_head,
        ),
        ("gpt_neox.layers.{}.attention.dense", ["blocks.{}.attn.wo"], plain),
        ("gpt_neox.layers.{}.post_attention_layernorm", ["blocks.{}.norm2"], plain),
        ("gpt_neox.layers.{}.mlp.dense_h_to_4h", ["blocks.{}.mlp.up"], plain),
        ("gpt_neox.layers.{}.mlp.dense_4h_to_h", ["blocks.{}.mlp.down"], plain),
        ("gpt_neox.final_layer_norm", ["norm_f"], plain),
        ("embed_out", ["lm_head"], plain),
    ],
    in_rope={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
)

FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "bloom": BLOOM,
    "falcon": FALCON,
    "gpt_neox": NEOX,
    "olmo2": OLMO2,
    "qwen3": QWEN3,
}  # by their model_type
