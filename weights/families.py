"""
The table of the model families that hf.py reads and export.py writes, used in both directions. In
all of weights/, "theirs" means the keys of Hugging Face's config.json and the names of its tensors;
"ours" means the keys of VariantConfig and the names of our parameters.
"""

import math
import re

from weights import layouts
from weights.layouts import Family, Key, layer, row


def usual_sizes(v):
    """{key: the size that a model with our values v has, if the key is None or 0}."""
    return {
        "n_kv_head": v["n_head"],
        "head_dim": v["n_embd"] // v["n_head"],
        "mlp_width": 4 * v["n_embd"],
    }


# The values that are common to several families.
SILU = ("silu", "swish")
ACT = dict(
    gelu=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    gelu_erf=("gelu",),
    relu=("relu",),
    silu=SILU,
    relu2=("relu2",),
)
GATE = dict(
    swiglu=SILU,
    geglu=("gelu_pytorch_tanh", "gelu_new"),
    reglu=("relu",),
    glu=("sigmoid",),
    bilinear=("linear",),
)

ROPE = dict(none=("default",), linear=("linear",), yarn=("yarn",), llama3=("llama3",))
ROPE_NUMBERS = {"rope_factor": "factor", "rope_original": "original_max_position_embeddings"}
FACTOR = {"rope_factor"}
BOTH = {"rope_factor", "rope_original"}
ROPE_READS = dict(linear=FACTOR, ntk=FACTOR, yarn=BOTH, yarn_exact=BOTH, llama3=BOTH)


def yarn_temperature(c):
    return 0.1 * math.log(c["factor"]) + 1 if c["factor"] > 1 else 1


def head_width(c):
    return c["hidden_size"] // c["num_attention_heads"]


def even_part(c):
    """Their rotary_pct, if it turns an even number of a head's features, else 1: with an odd number
    their model computes another function than ours."""
    return c["rotary_pct"] if int(head_width(c) * c["rotary_pct"]) % 2 == 0 else 1


SCALING = dict(
    rope_scaling=Key("rope_type", "default", ROPE),
    rope_factor=Key("factor", 1.0),
    rope_original=Key("original_max_position_embeddings", None),
)
ROPE_KEYS = SCALING | dict(rope_theta=Key("rope_theta", 10000.0))
ROPE_FIXED = dict(
    partial_rotary_factor=1,
    low_freq_factor=1,
    high_freq_factor=4,
    beta_fast=32,
    beta_slow=1,
    truncate=True,
    mscale=None,
    attention_factor=yarn_temperature,
)
SIZES = dict(
    block_size=Key("max_position_embeddings"),
    vocab_size=Key("vocab_size"),
    n_layer=Key("num_hidden_layers"),
    n_head=Key("num_attention_heads"),
    n_embd=Key("hidden_size"),
    tie_embeddings=Key("tie_word_embeddings", False),
)
TIED = dict(tie_embeddings=Key("tie_word_embeddings", True))

# ---------------------------------------------------------------- GPT-2 and its kin

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    slots=dict(position="learned", norm="layernorm", block="pre", bias="all"),
    keys=dict(
        block_size=Key("n_positions"),
        vocab_size=Key("vocab_size"),
        n_layer=Key("n_layer"),
        n_head=Key("n_head"),
        n_embd=Key("n_embd"),
        tie_embeddings=Key("tie_word_embeddings", True),
        mlp_width=Key("n_inner", None),
        mlp=Key("activation_function", "gelu_new", ACT),
    ),
    fixed=dict(
        layer_norm_epsilon=1e-5,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    ),
    names=[
        row("transformer.wte", "wte"),
        row("transformer.wpe", "wpe"),
        row("transformer.h.{}.ln_1", "norm1"),
        row("transformer.h.{}.attn.c_attn", "attn.wq attn.wk attn.wv", layouts.transposed),
        row("transformer.h.{}.attn.c_proj", "attn.wo", layouts.transposed),
        row("transformer.h.{}.ln_2", "norm2"),
        row("transformer.h.{}.mlp.c_fc", "mlp.up", layouts.transposed),
        row("transformer.h.{}.mlp.c_proj", "mlp.down", layouts.transposed),
        row("transformer.ln_f", "norm_f"),
        row("lm_head", "lm_head"),
    ],
)

BLOOM_NAMES = [
    row("transformer.word_embeddings", "wte"),
    row("transformer.h.{}.input_layernorm", "norm1"),
    row("transformer.h.{}.self_attention.dense", "attn.wo"),
    row("transformer.h.{}.mlp.dense_h_to_4h", "mlp.up"),
    row("transformer.h.{}.mlp.dense_4h_to_h", "mlp.down"),
    row("transformer.ln_f", "norm_f"),
    row("lm_head", "lm_head"),
]
QKV = "attn.wq attn.wk attn.wv"
BLOOM = Family(
    architecture="BloomForCausalLM",
    prefix="transformer.",
    slots=dict(
        position="alibi", norm="layernorm", block="pre", mlp="gelu", bias="all", embed_norm=True
    ),
    keys=dict(
        block_size=Key("seq_length", 2048),
        vocab_size=Key("vocab_size"),
        n_layer=Key("n_layer"),
        n_head=Key("n_head"),
        n_embd=Key("hidden_size"),
        tie_embeddings=Key("tie_word_embeddings", True),
    ),
    fixed=dict(layer_norm_epsilon=1e-5, apply_residual_connection_post_layernorm=False),
    names=[
        row("transformer.word_embeddings_layernorm", "norm_e"),
        row("transformer.h.{}.post_attention_layernorm", "norm2"),
        row("transformer.h.{}.self_attention.query_key_value", QKV, layouts.by_head),
        *BLOOM_NAMES,
    ],
    older=dict(n_embed="hidden_size", num_attention_heads="n_head", num_hidden_layers="n_layer"),
)

FALCON = Family(  # the layout of the 7B model
    architecture="FalconForCausalLM",
    prefix="transformer.",
    slots=dict(position="rope", norm="layernorm", block="parallel", n_kv_head=1),
    keys=SIZES
    | TIED
    | ROPE_KEYS
    | dict(
        block_size=Key("max_position_embeddings", 2048),
        mlp_width=Key("ffn_hidden_size", None),
        mlp=Key("activation", "gelu", ACT),
        bias=Key("bias", False, {"norm": (False,), "all": (True,)}),
    ),
    fixed=ROPE_FIXED
    | dict(
        head_dim=head_width,
        layer_norm_epsilon=1e-5,
        alibi=False,
        new_decoder_architecture=False,
        multi_query=True,
        parallel_attn=True,
    ),
    names=[
        row("transformer.h.{}.self_attention.query_key_value", QKV, layouts.multi_query),
        *BLOOM_NAMES,
    ],
    older=dict(n_embed="hidden_size"),
)

NEOX = Family(  # also Pythia
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    slots=dict(position="rope", norm="layernorm", bias="all"),
    keys=SIZES
    | SCALING
    | dict(
        mlp_width=Key("intermediate_size"),
        mlp=Key("hidden_act", "gelu", ACT),
        block=Key("use_parallel_residual", True, {"parallel2": (True,), "pre": (False,)}),
        rope_theta=Key("rotary_emb_base", 10000.0),
        rope_fraction=Key("rotary_pct", 0.25),
    ),
    fixed=ROPE_FIXED
    | dict(head_dim=head_width, layer_norm_eps=1e-5, attention_bias=True, rotary_pct=even_part),
    names=[
        row("gpt_neox.embed_in", "wte"),
        row("gpt_neox.layers.{}.input_layernorm", "norm1"),
        row("gpt_neox.layers.{}.attention.query_key_value", QKV, layouts.by_head),
        row("gpt_neox.layers.{}.attention.dense", "attn.wo"),
        row("gpt_neox.layers.{}.post_attention_layernorm", "norm2"),
        row("gpt_neox.layers.{}.mlp.dense_h_to_4h", "mlp.up"),
        row("gpt_neox.layers.{}.mlp.dense_4h_to_h", "mlp.down"),
        row("gpt_neox.final_layer_norm", "norm_f"),
        row("embed_out", "lm_head"),
    ],
    in_rope=dict(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"),
)

# ---------------------------------------------------------------- LLaMA and its kin

LLAMA_FIXED = ROPE_FIXED | dict(attention_bias=False, mlp_bias=False)
QK_NORM = [layer("self_attn.q_norm", "attn.q_norm"), layer("self_attn.k_norm", "attn.k_norm")]


def full_layers(c):
    """The layer_types of a model without windows: theirs, if none of them is a window."""
    kinds = c.get("layer_types")
    if kinds is None:
        return None
    if isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds):
        return kinds
    return "full_attention in each layer"  # theirs differs from it, and the message shows it


# A sliding_window counts with use_sliding_window only.
NO_WINDOW = LLAMA_FIXED | dict(use_sliding_window=False, layer_types=full_layers)
LLAMA = Family(  # LLaMA 1, 2 and, with rope scaling, 3
    architecture="LlamaForCausalLM",
    prefix="model.",
    slots=dict(position="rope", norm="rmsnorm", block="pre", bias="none"),
    keys=SIZES
    | ROPE_KEYS
    | dict(
        n_kv_head=Key("num_key_value_heads", None),
        head_dim=Key("head_dim", None),
        mlp_width=Key("intermediate_size"),
        norm_eps=Key("rms_norm_eps", 1e-6),
        mlp=Key("hidden_act", "silu", GATE),
    ),
    fixed=LLAMA_FIXED | dict(sliding_window=None),
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

MISTRAL = LLAMA._replace(
    architecture="MistralForCausalLM",
    keys=LLAMA.keys
    | dict(n_kv_head=Key("num_key_value_heads", 8), window=Key("sliding_window", 4096)),
    fixed=LLAMA_FIXED | dict(layer_types=None),
)

MIXTRAL = LLAMA._replace(
    architecture="MixtralForCausalLM",
    slots=LLAMA.slots | dict(mlp="moe"),
    keys={ours: key for ours, key in LLAMA.keys.items() if ours != "mlp"}
    | dict(
        n_kv_head=Key("num_key_value_heads", 8),
        rope_theta=Key("rope_theta", 1e6),
        norm_eps=Key("rms_norm_eps", 1e-5),
        window=Key("sliding_window", None),
        n_experts=Key("num_local_experts", 8),
        top_k=Key("num_experts_per_tok", 2),
    ),
    fixed=ROPE_FIXED
    | dict(hidden_act=SILU, layer_types=None)
    | dict(num_local_experts=lambda c: max(2, c["num_local_experts"])),  # ours has no router for 1
    names=[
        *(named for named in LLAMA.names if ".mlp." not in named[0]),
        layer("block_sparse_moe.gate", "mlp.router"),
    ],
    tensors=[
        layer("block_sparse_moe.experts.*.w1.weight", "mlp.gate"),
        layer("block_sparse_moe.experts.*.w3.weight", "mlp.up"),
        layer("block_sparse_moe.experts.*.w2.weight", "mlp.down"),
    ],
)

OLMO2 = LLAMA._replace(
    architecture="Olmo2ForCausalLM",
    slots=LLAMA.slots | dict(block="output", qk_norm="full"),
    keys=LLAMA.keys | dict(norm_eps=Key("rms_norm_eps", 1e-5)),
    names=[
        *(named for named in LLAMA.names if "layernorm" not in named[0]),
        *QK_NORM,
        layer("post_attention_layernorm", "norm1"),
        layer("post_feedforward_layernorm", "norm2"),
    ],
)

QWEN2 = LLAMA._replace(  # also Qwen 2.5
    architecture="Qwen2ForCausalLM",
    slots=LLAMA.slots | dict(bias="qkv"),
    keys=LLAMA.keys | dict(n_kv_head=Key("num_key_value_heads", 32)),
    fixed=NO_WINDOW,
)

QWEN3 = LLAMA._replace(
    architecture="Qwen3ForCausalLM",
    slots=LLAMA.slots | dict(qk_norm="head"),
    keys=QWEN2.keys | dict(head_dim=Key("head_dim", 128)),
    fixed=NO_WINDOW,
    names=LLAMA.names + QK_NORM,
)


def regular_layers(c):
    """The no_rope_layers that their interval implies, 0 for a layer without positions."""
    n_layer = len(c["no_rope_layers"]) if isinstance(c.get("no_rope_layers"), list) else 0
    return [int(i % c["no_rope_layer_interval"] > 0) for i in range(1, n_layer + 1)]


SMOLLM3 = LLAMA._replace(
    architecture="SmolLM3ForCausalLM",
    keys=LLAMA.keys
    | TIED
    | dict(
        n_kv_head=Key("num_key_value_heads", 4),
        rope_theta=Key("rope_theta", 2e6),
        nope_every=Key("no_rope_layer_interval", 4),
    ),
    fixed=NO_WINDOW | dict(no_rope_layers=regular_layers),
)

# The norms of queries and keys come after rope there, which cancels the temperature of YaRN.
WITHOUT_YARN = {word: theirs for word, theirs in ROPE.items() if word != "yarn"}
NANOCHAT = LLAMA._replace(  # of January 2026 or earlier: without value embeddings
    architecture="NanoChatForCausalLM",
    slots=LLAMA.slots | dict(norm="rmsnorm_bare", qk_norm="head", embed_norm=True),
    keys=LLAMA.keys
    | dict(
        mlp=Key("hidden_act", "relu2", ACT),
        logit_softcap=Key("final_logit_softcapping", 15.0),
        rope_scaling=Key("rope_type", "default", WITHOUT_YARN),
    ),
    names=[
        *(named for named in LLAMA.names if re.search("embed|head|[vo]_proj", named[0])),
        layer("self_attn.q_proj", "attn.wq", layouts.swapped_halves),
        layer("self_attn.k_proj", "attn.wk", layouts.swapped_halves),
        layer("mlp.fc1", "mlp.up"),
        layer("mlp.fc2", "mlp.down"),
    ],
)

# ---------------------------------------------------------------- Mamba-2

MAPS = "attn.wz attn.wv attn.wk attn.wq attn.wa"
MAMBA2 = Family(
    architecture="Mamba2ForCausalLM",
    prefix="backbone.",
    slots=LLAMA.slots | dict(position="none", block="parallel", mlp="none", mixer="mamba2"),
    keys=SIZES
    | dict(
        block_size=Key("max_position_embeddings", 2048),  # the paper's; transformers ignores it
        n_head=Key("num_heads", 128),
        state_size=Key("state_size", 128),
        expand=Key("expand", 2),
        conv=Key("conv_kernel", 4),
        norm_eps=Key("layer_norm_epsilon", 1e-5),
    ),
    fixed=dict(
        hidden_act=SILU,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        head_dim=lambda c: c["expand"] * c["hidden_size"] // c["num_heads"],
        time_step_limit=([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    ),
    names=[
        row("backbone.embeddings", "wte"),
        row("backbone.layers.{}.norm", "norm1"),
        row("backbone.layers.{}.mixer.in_proj", MAPS, layouts.mamba_maps),
        row("backbone.layers.{}.mixer.norm", "attn.norm"),
        row("backbone.layers.{}.mixer.out_proj", "attn.wo"),
        row("backbone.norm_f", "norm_f"),
        row("lm_head", "lm_head"),
    ],
    tensors=[
        row("backbone.layers.{}.mixer.conv1d.weight", "attn.conv.weight", layouts.mamba_filters),
        row("backbone.layers.{}.mixer.conv1d.bias", "attn.conv.bias", layouts.mamba_channels),
        row("backbone.layers.{}.mixer.A_log", "attn.decay.log_rate"),
        row("backbone.layers.{}.mixer.dt_bias", "attn.decay.bias"),
        row("backbone.layers.{}.mixer.D", "attn.skip"),
    ],
    absent=dict(head_dim=64, n_groups=8),
)

# By their model_type. If several fit equally well, an export takes the first.
FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "bloom": BLOOM,
    "falcon": FALCON,
    "gpt_neox": NEOX,
    "olmo2": OLMO2,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "nanochat": NANOCHAT,
    "mixtral": MIXTRAL,
    "mamba2": MAMBA2,
}
