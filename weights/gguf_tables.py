"""
The architectures of GGUF that gguf_format.py reads and writes: what each adds to the table of its
Hugging Face family. "Theirs" is Hugging Face's form here, and "GGUF's" that of llama.cpp;
families.py leads from theirs to ours.

D is the width of a head, L = kv_lora_rank, R = qk_rope_head_dim.
"""

from collections.abc import Callable
from typing import NamedTuple

from weights import gguf_layouts
from weights.families import FAMILIES
from weights.family import period
from weights.gguf_layouts import from_zero, rotated
from weights.layouts import expert_columns, expert_pairs, single_filters


class Table(NamedTuple):
    architecture: str  # GGUF's name
    keys: dict  # {GGUF's key: their key}, without the architecture before it
    names: dict = {}  # {their name in a layer: GGUF's names, where the package gguf has others}
    layouts: dict = {}  # {their name in a layer: layout} of what GGUF stores in another form
    further: Callable = lambda c: {}  # their config.json -> the other keys of GGUF that it implies
    sizes: tuple = ()  # those of them whose values, whole numbers, `config` reads
    config: Callable = lambda f: {}  # {GGUF's key: value} -> their keys that are not in `keys`
    allowed: Callable = lambda c: {}  # their config.json -> {their key: GGUF's only value}
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
    "attention.sliding_window_pattern": 2,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
SIGMOID = 2  # among the values of expert_gating_func

# ---------------------------------------------------------------- what architectures share

KEYS = {  # {our key: GGUF's}
    "block_size": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "vocab_size": "vocab_size",
    "n_head": "attention.head_count",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "mlp_width": "feed_forward_length",
    "n_kv_head": "attention.head_count_kv",
    "top_k": "expert_used_count",
    "n_experts": "expert_count",
    "shared_experts": "expert_shared_count",
    "window": "attention.sliding_window",
    "latent_rank": "attention.kv_lora_rank",
    "rope_head_dim": "rope.dimension_count",
    "state_size": "ssm.state_size",
    "conv": "ssm.conv_kernel",
}


def keys_of(kind, **others):
    """{GGUF's key: their key} of the keys in a family's table; others: {our key: GGUF's} that are
    not as in KEYS."""
    named, keys = FAMILIES[kind].keys, KEYS | others
    return {keys[ours]: named[ours] for ours in keys if ours in named}


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
    keys_of("llama"),
    layouts={
        "self_attn.q_proj": rotated("num_attention_heads"),
        "self_attn.k_proj": rotated("num_key_value_heads"),
    },
    further=llama_further,
    allowed=lambda c: NO_SCALING | {"sliding_window": None},
)
MIXTRAL = LLAMA._replace(keys=keys_of("mixtral"))
SMOLLM3 = LLAMA._replace(
    architecture="smollm3",
    allowed=lambda c: LLAMA.allowed(c) | {"no_rope_layer_interval": 4},  # llama.cpp knows no other
)
QWEN3 = LLAMA._replace(
    architecture="qwen3",
    layouts={},
    sizes=("attention.key_length",),
    config=lambda f: {"head_dim": f["attention.key_length"]},
)
OLMO2 = LLAMA._replace(architecture="olmo2", layouts={})

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


def gpt_oss_allowed(c):
    """llama.cpp rounds where yarn's ramp begins and ends, which published models do not."""
    scaling = c.get("rope_scaling") or {}
    rounded = scaling.get("truncate", True)
    known = scaling.get("rope_type", "default") in ("default", "yarn") and rounded
    return {"rope_scaling": c.get("rope_scaling") if known else None}


GPT_OSS = Table(
    "gpt-oss",
    keys_of("gpt_oss") | {"expert_feed_forward_length": "intermediate_size"},
    names={
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.experts.gate_up_proj": "ffn_gate_exps.weight ffn_up_exps.weight",
        "mlp.experts.gate_up_proj_bias": "ffn_gate_exps.bias ffn_up_exps.bias",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    },
    layouts={
        "mlp.experts.gate_up_proj": expert_pairs,
        "mlp.experts.gate_up_proj_bias": expert_columns,
        "mlp.experts.down_proj": expert_pairs,
    },
    further=gpt_oss_further,
    sizes=("attention.key_length",),
    config=gpt_oss_config,
    allowed=gpt_oss_allowed,
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
    keys_of("deepseek_v3", mlp_width="expert_feed_forward_length"),
    names={
        "self_attn.kv_b_proj": "attn_k_b attn_v_b",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    },
    layouts={"self_attn.kv_b_proj": gguf_layouts.latent_maps},
    further=deepseek_further,
    sizes=("attention.key_length_mla", "attention.value_length_mla"),
    config=deepseek_config,
    allowed=lambda c: NO_SCALING,
)

# ---------------------------------------------------------------- Qwen3-Next


def interval(c):
    """Every which layer has full attention; None if they are not so regular."""
    kinds = c.get("layer_types")
    if kinds is None:
        return c["full_attention_interval"]
    return period([kind == "full_attention" for kind in kinds]) or None


def qwen3_next_further(c):
    D = c["hidden_size"] // c["num_attention_heads"]
    return heads(c) | {
        "rope.dimension_count": int(D * c["partial_rotary_factor"]),
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


def qwen3_next_allowed(c):
    regular = c.get("layer_types") if interval(c) else "full_attention in every so many layers"
    return NO_SCALING | {
        "linear_value_head_dim": c["linear_key_head_dim"],  # llama.cpp has one width for both
        "layer_types": regular,
    }


QWEN3_NEXT = Table(
    "qwen3next",
    keys_of("qwen3_next", mlp_width="expert_feed_forward_length")
    | {
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    names={"linear_attn.in_proj_qkvz": "attn_qkv attn_gate", "linear_attn.dt_bias": "ssm_dt.bias"},
    layouts={
        "model.norm": from_zero,
        "input_layernorm": from_zero,
        "post_attention_layernorm": from_zero,
        "self_attn.q_norm": from_zero,
        "self_attn.k_norm": from_zero,
        "linear_attn.in_proj_qkvz": gguf_layouts.delta_maps,
        "linear_attn.conv1d.weight": single_filters,
        "linear_attn.A_log": gguf_layouts.decays,
        "mlp.shared_expert_gate": gguf_layouts.single_row,
    },
    further=qwen3_next_further,
    sizes=("rope.dimension_count", "attention.key_length", "ssm.inner_size"),
    config=qwen3_next_config,
    allowed=qwen3_next_allowed,
)

# ---------------------------------------------------------------- Mamba-2

MAMBA2 = Table(
    "mamba2",
    keys_of("mamba2", n_head="ssm.time_step_rank"),
    names={"mixer.dt_bias": "ssm_dt.bias"},
    layouts={
        "mixer.norm": gguf_layouts.flat,
        "mixer.conv1d.weight": single_filters,
        "mixer.A_log": gguf_layouts.decay_rows,
        "mixer.D": gguf_layouts.rows,
    },
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
