"""
The architectures of GGUF that gguf_format.py reads and writes: one table for each Hugging Face
family. "Theirs" is Hugging Face's form here, and "GGUF's" that of llama.cpp; newer_families.py and
families.py lead from theirs to ours.

Shapes: H = heads, D = the width of a head, E = experts, L = kv_lora_rank, V = vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from weights.layouts import Layout, expert_columns, expert_pairs, halves, interleaved, plain


class Table(NamedTuple):
    architecture: str  # GGUF's name
    keys: dict  # {GGUF's key: their key}, without the architecture before it
    names: list  # ([GGUF's], theirs, layout) of weights and biases; {}: the layer, *: each expert
    tensors: list = []  # the same with the whole names
    further: Callable = lambda c: {}  # their config.json -> the other keys of GGUF that it implies
    sizes: tuple = ()  # those of them whose values, whole numbers, `config` reads
    config: Callable = lambda f: {}  # {GGUF's key: value} -> their keys that are not in `keys`
    must: Callable = lambda c: {}  # their config.json -> {their key: the value that GGUF can hold}
    own_head: bool = False  # whether the file holds a head even where it is the embedding


ABSENT = {  # what a key means where it is absent; other keys then mean what is implied elsewhere
    "rope.scaling.type": "none",
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_group_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": False,
    "expert_gating_func": 1,
    "full_attention_interval": 4,
    "attention.sliding_window_pattern": 2,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
SIGMOID = 2  # among the values of expert_gating_func

# ---------------------------------------------------------------- layouts: split makes GGUF's


def rotated(heads_key):
    """Rope turns the features (i, i + D/2) of a head in Hugging Face's form, (2i, 2i + 1) in GGUF's
    llama. A reader that ignores this gets a model that works, but badly."""
    return Layout(
        lambda t, n, c: [interleaved(t, c[heads_key])],
        lambda parts, c: halves(*parts, c[heads_key]),
    )


def log_rates(rates):
    """The logarithms whose exponentials are these rates (fp32), to the bit where there is such a
    logarithm: the nearest fp32 number or a neighbour of it."""
    found = rates.double().log().float()
    for towards in (-torch.inf, torch.inf):
        near = torch.nextafter(found, torch.full_like(found, towards))
        found = torch.where((found.exp() != rates) & (near.exp() == rates), near, found)
    return found


# The decay as -exp(A_log), one number per head, in rows of their own for Mamba-2.
decays = Layout(lambda t, n, c: [-t.exp()], lambda parts, c: log_rates(-parts[0].flatten()))
decay_rows = Layout(lambda t, n, c: [-t.exp()[:, None]], decays.join)
rows = Layout(lambda t, n, c: [t[:, None]], lambda parts, c: parts[0].flatten())
flat = Layout(lambda t, n, c: [t], lambda parts, c: parts[0].flatten())
single_row = Layout(lambda t, n, c: [t.flatten()], lambda parts, c: parts[0].reshape(1, -1))
filters = Layout(lambda t, n, c: [t.squeeze(1)], lambda parts, c: parts[0].unsqueeze(1))
# A norm's weight, theirs less 1. In float64 neither way loses a bit.
from_zero = Layout(lambda t, n, c: [t.double() + 1], lambda parts, c: parts[0].double() - 1)


def split_latent(t, n, c):
    keys, values = t.unflatten(0, (c["num_attention_heads"], 2, -1)).unbind(1)  # (H, D, L) each
    return keys.mT, values


def join_latent(parts, c):
    keys, values = parts
    return torch.stack((keys.mT, values), 1).flatten(0, 2)


def split_delta(t, n, c):
    heads = c["linear_num_value_heads"]
    N, P = c["linear_key_head_dim"], c["linear_value_head_dim"]
    parts = t.unflatten(0, (heads, -1)).split((N, N, P, P), 1)  # (H, N or P, C), of q, k, v and z
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    return torch.cat((q, k, v)), z


def join_delta(parts, c):
    heads = c["linear_num_value_heads"]
    N, P = c["linear_key_head_dim"], c["linear_value_head_dim"]
    q, k, v = parts[0].split((heads * N, heads * N, heads * P))
    each = [part.unflatten(0, (heads, -1)) for part in (q, k, v, parts[1])]
    return torch.cat(each, 1).flatten(0, 1)


latent_maps = Layout(split_latent, join_latent)
delta_maps = Layout(split_delta, join_delta)

# ---------------------------------------------------------------- what architectures share

LAYERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "vocab_size": "vocab_size",
}
ROTARY = LAYERS | {
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
LLAMA_KEYS = ROTARY | {
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
}
EXPERTS = {"expert_used_count": "num_experts_per_tok"}
ENDS = [
    (["token_embd"], "model.embed_tokens", plain),
    (["output_norm"], "model.norm", plain),
    (["output"], "lm_head", plain),
    (["blk.{}.attn_norm"], "model.layers.{}.input_layernorm", plain),
    (["blk.{}.attn_output"], "model.layers.{}.self_attn.o_proj", plain),
]


def attention(query=plain, key=plain):
    return [
        (["blk.{}.attn_q"], "model.layers.{}.self_attn.q_proj", query),
        (["blk.{}.attn_k"], "model.layers.{}.self_attn.k_proj", key),
        (["blk.{}.attn_v"], "model.layers.{}.self_attn.v_proj", plain),
    ]


def mlp(theirs, ours="", names=("gate_proj", "up_proj", "down_proj")):
    """The three matrices of an MLP; `_exps`: of experts, `_shexp`: of a shared one."""
    return [
        ([f"blk.{{}}.ffn_{word}{ours}"], f"model.layers.{{}}.{theirs}.{name}", plain)
        for word, name in zip(("gate", "up", "down"), names, strict=True)
    ]


def heads(c):
    D = c["hidden_size"] // c["num_attention_heads"]
    return {"rope.dimension_count": D, "attention.key_length": D, "attention.value_length": D}


def llama_further(c):
    none = {"attention.sliding_window": 0, "expert_shared_count": 0, "expert_weights_scale": 1.0}
    experts = {} if "num_local_experts" in c else {"expert_count": 0}
    return heads(c) | {"rope.scaling.type": "none"} | none | experts


NO_SCALING = {"rope_scaling": None, "hidden_act": "silu"}
LLAMA = Table(
    "llama",
    LLAMA_KEYS,
    [
        *ENDS,
        (["blk.{}.ffn_norm"], "model.layers.{}.post_attention_layernorm", plain),
        *attention(rotated("num_attention_heads"), rotated("num_key_value_heads")),
        *mlp("mlp"),
    ],
    further=llama_further,
    must=lambda c: NO_SCALING | {"sliding_window": None},
)

MIXTRAL = LLAMA._replace(
    keys=LLAMA_KEYS | EXPERTS | {"expert_count": "num_local_experts"},
    names=[
        *LLAMA.names[:-3],
        (["blk.{}.ffn_gate_inp"], "model.layers.{}.block_sparse_moe.gate", plain),
        *mlp("block_sparse_moe.experts.*", "_exps", ("w1", "w3", "w2")),
    ],
)

SMOLLM3 = LLAMA._replace(
    architecture="smollm3",
    must=lambda c: LLAMA.must(c) | {"no_rope_layer_interval": 4},  # llama.cpp knows no other
)

QK_NORMS = [
    (["blk.{}.attn_q_norm"], "model.layers.{}.self_attn.q_norm", plain),
    (["blk.{}.attn_k_norm"], "model.layers.{}.self_attn.k_norm", plain),
]
QWEN3 = LLAMA._replace(
    architecture="qwen3",
    names=[*LLAMA.names[:-6], *attention(), *mlp("mlp"), *QK_NORMS],
    sizes=("attention.key_length",),
    config=lambda f: {"head_dim": f["attention.key_length"]},
)
OLMO2 = LLAMA._replace(
    architecture="olmo2",
    names=[
        *(row for row in QWEN3.names if "layernorm" not in row[1]),
        (["blk.{}.post_attention_norm"], "model.layers.{}.post_attention_layernorm", plain),
        (["blk.{}.post_ffw_norm"], "model.layers.{}.post_feedforward_layernorm", plain),
    ],
)

# ---------------------------------------------------------------- gpt-oss


def gpt_oss_further(c):
    scaling = c.get("rope_scaling") or {"rope_type": "default"}
    further = heads(c) | {"attention.sliding_window_pattern": 2}
    if scaling["rope_type"] == "default":
        return further | {"rope.scaling.type": "none"}
    return further | {
        "rope.scaling.type": scaling["rope_type"],
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }


def gpt_oss_config(f):
    scaling = {"rope_type": "default"}
    if f.get("rope.scaling.type", "none") != "none":
        scaling = {
            "rope_type": f["rope.scaling.type"],
            "factor": f.get("rope.scaling.factor"),
            "original_max_position_embeddings": f.get("rope.scaling.original_context_length"),
        }
    return {"rope_scaling": scaling, "head_dim": f["attention.key_length"]}


def gpt_oss_must(c):
    """llama.cpp rounds where yarn's ramp begins and ends, which published models do not."""
    scaling = c.get("rope_scaling")
    rounded = {key: value for key, value in (scaling or {}).items() if key != "truncate"}
    known = (scaling or {}).get("rope_type") in (None, "default", "yarn")
    return {"rope_scaling": (rounded or None) if known else None}


GPT_OSS = Table(
    "gpt-oss",
    LLAMA_KEYS
    | EXPERTS
    | {
        "expert_feed_forward_length": "intermediate_size",
        "expert_count": "num_local_experts",
        "attention.sliding_window": "sliding_window",
    },
    [
        *ENDS,
        *attention(),
        (["blk.{}.post_attention_norm"], "model.layers.{}.post_attention_layernorm", plain),
        (["blk.{}.ffn_gate_inp"], "model.layers.{}.mlp.router", plain),
    ],
    [
        (["blk.{}.attn_sinks.weight"], "model.layers.{}.self_attn.sinks", plain),
        (
            ["blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"],
            "model.layers.{}.mlp.experts.gate_up_proj",
            expert_pairs,
        ),
        (
            ["blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"],
            "model.layers.{}.mlp.experts.gate_up_proj_bias",
            expert_columns,
        ),
        (["blk.{}.ffn_down_exps.weight"], "model.layers.{}.mlp.experts.down_proj", expert_pairs),
        (["blk.{}.ffn_down_exps.bias"], "model.layers.{}.mlp.experts.down_proj_bias", plain),
    ],
    gpt_oss_further,
    ("attention.key_length",),
    gpt_oss_config,
    gpt_oss_must,
    own_head=True,
)

# ---------------------------------------------------------------- DeepSeek-V3


def deepseek_further(c):
    """Keys and values are made of the latent while it is read, so that there is one head of them,
    as wide as the latent."""
    D, L, R = c["v_head_dim"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": L + R,
        "attention.value_length": L,
        "attention.key_length_mla": D + R,
        "attention.value_length_mla": D,
        "attention.q_lora_rank": 0,  # llama.cpp reads this key, and then no latent of queries
        "leading_dense_block_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "expert_gating_func": SIGMOID,
        "expert_group_count": 1,
        "rope.scaling.type": "none",
    }


def deepseek_config(f):
    return {
        "qk_nope_head_dim": f["attention.key_length_mla"] - f["rope.dimension_count"],
        "v_head_dim": f["attention.value_length_mla"],
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": f.get("expert_weights_scale", 1.0),
    }


DEEPSEEK_V3 = Table(
    "deepseek2",
    ROTARY
    | EXPERTS
    | {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    [
        *ENDS,
        (["blk.{}.ffn_norm"], "model.layers.{}.post_attention_layernorm", plain),
        (["blk.{}.attn_q"], "model.layers.{}.self_attn.q_proj", plain),
        (["blk.{}.attn_kv_a_mqa"], "model.layers.{}.self_attn.kv_a_proj_with_mqa", plain),
        (["blk.{}.attn_kv_a_norm"], "model.layers.{}.self_attn.kv_a_layernorm", plain),
        (
            ["blk.{}.attn_k_b", "blk.{}.attn_v_b"],
            "model.layers.{}.self_attn.kv_b_proj",
            latent_maps,
        ),
        (["blk.{}.ffn_gate_inp"], "model.layers.{}.mlp.gate", plain),
        *mlp("mlp.experts.*", "_exps"),
        *mlp("mlp.shared_experts", "_shexp"),
    ],
    [(["blk.{}.exp_probs_b.bias"], "model.layers.{}.mlp.gate.e_score_correction_bias", plain)],
    deepseek_further,
    ("attention.key_length_mla", "attention.value_length_mla"),
    deepseek_config,
    must=lambda c: NO_SCALING,
)

# ---------------------------------------------------------------- Qwen3-Next


def interval(c):
    """Every which layer has full attention; None if they are not so regular."""
    kinds = c.get("layer_types")
    if kinds is None:
        return c["full_attention_interval"]
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    regular = every and all(
        (kind == "full_attention") == (layer % every == 0) for layer, kind in enumerate(kinds, 1)
    )
    return every if regular else None


def qwen3_next_further(c):
    D = c["hidden_size"] // c["num_attention_heads"]
    return {
        "rope.dimension_count": int(D * c["partial_rotary_factor"]),
        "attention.key_length": D,
        "attention.value_length": D,
        "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
        "ssm.conv_kernel": 4,
        "full_attention_interval": interval(c),
        "attention.recurrent_layers": None,  # which would say the same another way
        "rope.scaling.type": "none",
    }


def qwen3_next_config(f):
    return {
        "partial_rotary_factor": f["rope.dimension_count"] / f["attention.key_length"],
        "head_dim": f["attention.key_length"],
        "linear_value_head_dim": f["ssm.inner_size"] // f["ssm.time_step_rank"],
        "full_attention_interval": f.get("full_attention_interval", 4),
    }


def qwen3_next_must(c):
    regular = c.get("layer_types") if interval(c) else "full_attention in every so many layers"
    return NO_SCALING | {
        "linear_value_head_dim": c["linear_key_head_dim"],  # llama.cpp has one width for both
        "layer_types": regular,
    }


QWEN3_NEXT = Table(
    "qwen3next",
    ROTARY
    | EXPERTS
    | {
        "attention.head_count_kv": "num_key_value_heads",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_count": "num_experts",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    [
        *((names, theirs, from_zero if "norm" in theirs else plain) for names, theirs, _ in ENDS),
        (["blk.{}.post_attention_norm"], "model.layers.{}.post_attention_layernorm", from_zero),
        *attention(),
        *((names, theirs, from_zero) for names, theirs, _ in QK_NORMS),
        (
            ["blk.{}.attn_qkv", "blk.{}.attn_gate"],
            "model.layers.{}.linear_attn.in_proj_qkvz",
            delta_maps,
        ),
        (["blk.{}.ssm_ba"], "model.layers.{}.linear_attn.in_proj_ba", plain),
        (["blk.{}.ssm_norm"], "model.layers.{}.linear_attn.norm", plain),
        (["blk.{}.ssm_out"], "model.layers.{}.linear_attn.out_proj", plain),
        (["blk.{}.ssm_conv1d"], "model.layers.{}.linear_attn.conv1d", filters),
        (["blk.{}.ffn_gate_inp"], "model.layers.{}.mlp.gate", plain),
        *mlp("mlp.experts.*", "_exps"),
        *mlp("mlp.shared_expert", "_shexp"),
        (["blk.{}.ffn_gate_inp_shexp"], "model.layers.{}.mlp.shared_expert_gate", single_row),
    ],
    [
        (["blk.{}.ssm_a"], "model.layers.{}.linear_attn.A_log", decays),
        (["blk.{}.ssm_dt.bias"], "model.layers.{}.linear_attn.dt_bias", plain),
    ],
    qwen3_next_further,
    ("rope.dimension_count", "attention.key_length", "ssm.inner_size"),
    qwen3_next_config,
    qwen3_next_must,
)

# ---------------------------------------------------------------- Mamba-2

MAMBA2 = Table(
    "mamba2",
    LAYERS
    | {
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "num_heads",
    },
    [
        (["token_embd"], "backbone.embeddings", plain),
        (["output_norm"], "backbone.norm_f", plain),
        (["output"], "lm_head", plain),
        (["blk.{}.attn_norm"], "backbone.layers.{}.norm", plain),
        (["blk.{}.ssm_in"], "backbone.layers.{}.mixer.in_proj", plain),
        (["blk.{}.ssm_norm"], "backbone.layers.{}.mixer.norm", flat),
        (["blk.{}.ssm_out"], "backbone.layers.{}.mixer.out_proj", plain),
    ],
    [
        (["blk.{}.ssm_conv1d.weight"], "backbone.layers.{}.mixer.conv1d.weight", filters),
        (["blk.{}.ssm_conv1d.bias"], "backbone.layers.{}.mixer.conv1d.bias", plain),
        (["blk.{}.ssm_a"], "backbone.layers.{}.mixer.A_log", decay_rows),
        (["blk.{}.ssm_dt.bias"], "backbone.layers.{}.mixer.dt_bias", plain),
        (["blk.{}.ssm_d"], "backbone.layers.{}.mixer.D", rows),
    ],
    further=lambda c: {
        "ssm.inner_size": c["expand"] * c["hidden_size"],
        "ssm.group_count": 1,
        "attention.head_count": 0,
        "feed_forward_length": 0,
    },
    sizes=("ssm.inner_size",),
    config=lambda f: {
        "expand": f["ssm.inner_size"] // f["embedding_length"],
        "head_dim": f["ssm.inner_size"] // f["ssm.time_step_rank"],
        "n_groups": 1,
    },
)

TABLES = {
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "smollm3": SMOLLM3,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_next": QWEN3_NEXT,
    "mamba2": MAMBA2,
}  # by Hugging Face's model_type
