"""
The model families that pretrained.py reads and export.py writes: one table each, used in both
directions. family.py says what a table holds. Those with experts or without attention are in
newer_families.py.
"""

from weights.family import (
    ACT,
    LLAMA,
    QK_NORM,
    ROPE,
    SIZES,
    Family,
    layer,
    llama_allowed,
    no_window_allowed,
    period,
    rope_allowed,
    rope_ours,
    rope_theirs,
    row,
    whole_pairs,
)
from weights.layouts import by_head, multi_query, swapped_halves, transposed
from weights.newer_families import DEEPSEEK_V3, GPT_OSS, MAMBA2, MIXTRAL, QWEN3_NEXT

BLOOM_NAMES = [
    row("transformer.word_embeddings", "wte"),
    row("transformer.h.{}.input_layernorm", "norm1"),
    row("transformer.h.{}.self_attention.query_key_value", "attn.wq attn.wk attn.wv", by_head),
    row("transformer.h.{}.self_attention.dense", "attn.wo"),
    row("transformer.h.{}.mlp.dense_h_to_4h", "mlp.up"),
    row("transformer.h.{}.mlp.dense_4h_to_h", "mlp.down"),
    row("transformer.ln_f", "norm_f"),
    row("lm_head", "lm_head"),
]


def nope_every(c):
    """Our nope_every for SmolLM3's list of layers with positions, or for its interval; None if the
    list is of another kind."""
    listed, n_layer = c.get("no_rope_layers"), c["num_hidden_layers"]
    if listed is None:
        interval = c["no_rope_layer_interval"]
        return interval if type(interval) is int and interval > 0 else None
    if not isinstance(listed, list) or len(listed) < n_layer:
        return None
    known = all(number in (0, 1) for number in listed[:n_layer])  # 1: a layer with positions
    return period([number == 0 for number in listed[:n_layer]]) if known else None


def smollm3_allowed(c):
    fits = nope_every(c) is not None
    listed = c.get("no_rope_layers") if fits else "a 0 every so many 1"
    return no_window_allowed(c) | {"no_rope_layers": (listed,)}


# ---------------------------------------------------------------- the families

GPT2 = Family(
    "GPT2LMHeadModel",
    "transformer.",
    dict(position="learned", norm="layernorm", block="pre", mlp="gelu", bias="all"),
    SIZES
    | dict(block_size="n_positions", n_layer="n_layer", n_head="n_head", n_embd="n_embd")
    | dict(mlp_width="n_inner"),
    dict(mlp=("activation_function", ACT)),
    {"tie_word_embeddings": True, "n_inner": None, "activation_function": "gelu_new"},
    allowed=lambda c: {
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    ours=lambda c: {"mlp_width": c["n_inner"] or 4 * c["n_embd"]},
    names=[
        row("transformer.wte", "wte"),
        row("transformer.wpe", "wpe"),
        row("transformer.h.{}.ln_1", "norm1"),
        row("transformer.h.{}.attn.c_attn", "attn.wq attn.wk attn.wv", transposed),
        row("transformer.h.{}.attn.c_proj", "attn.wo", transposed),
        row("transformer.h.{}.ln_2", "norm2"),
        row("transformer.h.{}.mlp.c_fc", "mlp.up", transposed),
        row("transformer.h.{}.mlp.c_proj", "mlp.down", transposed),
        row("transformer.ln_f", "norm_f"),
        row("lm_head", "lm_head"),
    ],
)

MISTRAL = LLAMA._replace(
    architecture="MistralForCausalLM",
    defaults=LLAMA.defaults | {"num_key_value_heads": 8, "sliding_window": 4096},
    allowed=lambda c: (
        llama_allowed(c) | {"sliding_window": (c["sliding_window"],), "layer_types": (None,)}
    ),
    ours=lambda c: rope_ours(c) | {"window": c["sliding_window"] or 0},
    theirs=lambda v: rope_theirs(v) | {"sliding_window": v["window"] or None},
)

OLMO2 = LLAMA._replace(
    architecture="Olmo2ForCausalLM",
    slots=LLAMA.slots | dict(block="output", qk_norm="full"),
    defaults=LLAMA.defaults | {"rms_norm_eps": 1e-5},
    names=[
        *(named for named in LLAMA.names if "layernorm" not in named[0]),
        *QK_NORM,
        layer("post_attention_layernorm", "norm1"),
        layer("post_feedforward_layernorm", "norm2"),
    ],
)

QWEN3 = LLAMA._replace(
    architecture="Qwen3ForCausalLM",
    slots=LLAMA.slots | dict(qk_norm="head"),
    defaults=LLAMA.defaults | {"num_key_value_heads": 32, "head_dim": 128},
    allowed=no_window_allowed,
    theirs=lambda v: rope_theirs(v) | {"head_dim": v["n_embd"] // v["n_head"]},
    names=LLAMA.names + QK_NORM,
)

SMOLLM3 = LLAMA._replace(
    architecture="SmolLM3ForCausalLM",
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    absent={"no_rope_layer_interval": 4},
    allowed=smollm3_allowed,
    ours=lambda c: rope_ours(c) | {"nope_every": nope_every(c)},
    theirs=lambda v: rope_theirs(v) | {"no_rope_layer_interval": v["nope_every"]},
)

NANOCHAT = LLAMA._replace(  # of January 2026 or earlier: without value embeddings
    architecture="NanoChatForCausalLM",
    slots=LLAMA.slots | dict(norm="rmsnorm_bare", qk_norm="head", embed_norm=True),
    keys=LLAMA.keys | dict(logit_softcap="final_logit_softcapping"),
    words=dict(mlp=("hidden_act", ACT), rope_scaling=("rope_type", ROPE)),
    defaults=LLAMA.defaults | {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    ours=lambda c: rope_ours(c) | {"logit_softcap": c["final_logit_softcapping"] or 0.0},
    theirs=lambda v: rope_theirs(v) | {"final_logit_softcapping": v["logit_softcap"] or None},
    names=[
        row("model.embed_tokens", "wte"),
        layer("self_attn.q_proj", "attn.wq", swapped_halves),
        layer("self_attn.k_proj", "attn.wk", swapped_halves),
        layer("self_attn.v_proj", "attn.wv"),
        layer("self_attn.o_proj", "attn.wo"),
        layer("mlp.fc1", "mlp.up"),
        layer("mlp.fc2", "mlp.down"),
        row("lm_head", "lm_head"),
    ],
)

BLOOM = Family(
    "BloomForCausalLM",
    "transformer.",
    dict(position="alibi", norm="layernorm", block="pre", mlp="gelu", bias="all", embed_norm=True),
    SIZES | dict(block_size="seq_length", n_layer="n_layer", n_head="n_head"),
    {},
    {"seq_length": 2048, "tie_word_embeddings": True},
    allowed=lambda c: {
        "layer_norm_epsilon": (1e-5,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    ours=lambda c: {"mlp_width": 4 * c["hidden_size"]},
    names=[
        row("transformer.word_embeddings_layernorm", "norm_e"),
        row("transformer.h.{}.post_attention_layernorm", "norm2"),
    ]
    + BLOOM_NAMES,
    older={"n_embed": "hidden_size"}
    | {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
)

FALCON = Family(  # the layout of the 7B model
    "FalconForCausalLM",
    "transformer.",
    dict(position="rope", norm="layernorm", block="parallel", mlp="gelu_erf", n_kv_head=1),
    SIZES | dict(mlp_width="ffn_hidden_size", rope_theta="rope_theta"),
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
    allowed=lambda c: (
        rope_allowed(c)
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
    SIZES
    | dict(mlp_width="intermediate_size")
    | dict(rope_theta="rotary_emb_base", rope_fraction="rotary_pct"),
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
    allowed=lambda c: (
        rope_allowed(c)
        | {
            "layer_norm_eps": (1e-5,),
            "attention_bias": (True,),
            "rotary_pct": whole_pairs(c, "rotary_pct"),
        }
    ),
    ours=rope_ours,
    theirs=rope_theirs,
    names=[
        row("gpt_neox.embed_in", "wte"),
        row("gpt_neox.layers.{}.input_layernorm", "norm1"),
        row("gpt_neox.layers.{}.attention.query_key_value", "attn.wq attn.wk attn.wv", by_head),
        row("gpt_neox.layers.{}.attention.dense", "attn.wo"),
        row("gpt_neox.layers.{}.post_attention_layernorm", "norm2"),
        row("gpt_neox.layers.{}.mlp.dense_h_to_4h", "mlp.up"),
        row("gpt_neox.layers.{}.mlp.dense_4h_to_h", "mlp.down"),
        row("gpt_neox.final_layer_norm", "norm_f"),
        row("embed_out", "lm_head"),
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
    "smollm3": SMOLLM3,
    "nanochat": NANOCHAT,
    "mixtral": MIXTRAL,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_next": QWEN3_NEXT,
    "mamba2": MAMBA2,
}  # by their model_type
