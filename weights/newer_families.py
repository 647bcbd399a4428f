"""
The tables of the model families with experts, and of the one without attention: see families.py.
"""

import math

from weights import layouts
from weights.family import (
    LLAMA,
    QK_NORM,
    ROPE,
    SIZES,
    Family,
    layer,
    rope_allowed,
    rope_ours,
    rope_theirs,
    row,
    whole_pairs,
)

SILU = ("silu", "swish")
WITHOUT_MLP = [named for named in LLAMA.names if ".mlp." not in named[0]]
EXPERTS = dict(n_experts="num_local_experts", top_k="num_experts_per_tok")
MATRICES = ("gate_proj", "up_proj", "down_proj")  # Hugging Face's names of gate, up and down


def stacked(room, names=MATRICES):
    """The rows of experts whose matrices are tensors of their own."""
    return [
        layer(f"{room}.experts.*.{name}.weight", f"mlp.{ours}")
        for name, ours in zip(names, ("gate", "up", "down"), strict=True)
    ]


def shared(room):
    """The rows of a shared expert."""
    return [
        layer(f"{room}.{name}", f"mlp.shared.{name.removesuffix('_proj')}") for name in MATRICES
    ]


MIXTRAL = LLAMA._replace(
    architecture="MixtralForCausalLM",
    slots=LLAMA.slots | dict(mlp="moe"),
    keys=LLAMA.keys | EXPERTS,
    words=dict(rope_scaling=("rope_type", ROPE)),
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    allowed=lambda c: rope_allowed(c) | {"hidden_act": SILU, "layer_types": (None,)},
    ours=lambda c: rope_ours(c) | {"window": c["sliding_window"] or 0},
    theirs=lambda v: rope_theirs(v) | {"sliding_window": v["window"] or None},
    names=[*WITHOUT_MLP, layer("block_sparse_moe.gate", "mlp.router")],
    tensors=stacked("block_sparse_moe", ("w1", "w3", "w2")),
)

# ---------------------------------------------------------------- gpt-oss


def alternating(c):
    """The allowed values of layer_types: absent, or a window in the layers 0, 2, 4 ..."""
    kinds, both = c.get("layer_types"), ["sliding_attention", "full_attention"]
    whole = isinstance(kinds, list) and len(kinds) >= c["num_hidden_layers"]
    if kinds is None or whole and kinds == (both * len(kinds))[: len(kinds)]:
        return (kinds,)
    return ("sliding_attention and full_attention in turn",)


GPT_OSS = LLAMA._replace(
    architecture="GptOssForCausalLM",
    slots=LLAMA.slots | dict(mlp="moe_clamped", bias="all", attn_sink=True, full_every=2),
    keys=LLAMA.keys | EXPERTS | dict(window="sliding_window"),
    words=dict(rope_scaling=("rope_type", ROPE)),
    defaults={key: value for key, value in LLAMA.defaults.items() if key != "rope_type"}
    | {"num_key_value_heads": 8, "rope_theta": 1.5e5, "rms_norm_eps": 1e-5}
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128},
    allowed=lambda c: (
        rope_allowed(c)
        | {
            "hidden_act": SILU,
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
            "sliding_window": (c["sliding_window"] or 128,),
            "layer_types": alternating(c),
        }
    ),
    theirs=lambda v: (
        {"head_dim": v["n_embd"] // v["n_head"], "rope_scaling": {"rope_type": "default"}}
        | rope_theirs(v)
    ),
    names=[*WITHOUT_MLP, layer("mlp.router", "mlp.router")],
    tensors=[
        layer("self_attn.sinks", "attn.sinks"),
        layer("mlp.experts.gate_up_proj", "mlp.gate mlp.up", layouts.expert_pairs),
        layer("mlp.experts.gate_up_proj_bias", "mlp.gate_bias mlp.up_bias", layouts.expert_columns),
        layer("mlp.experts.down_proj", "mlp.down", layouts.expert_pairs),
        layer("mlp.experts.down_proj_bias", "mlp.down_bias"),
    ],
    absent={"rope_type": "yarn, factor 32", "head_dim": 64},
)

# ---------------------------------------------------------------- DeepSeek-V3


def deepseek_allowed(c):
    D = c["hidden_size"] // c["num_attention_heads"]
    return rope_allowed(c) | {
        "hidden_act": SILU,
        "head_dim": (c["qk_rope_head_dim"],),
        "qk_nope_head_dim": (D,),
        "v_head_dim": (D,),
        "q_lora_rank": (None,),
        "rope_interleave": (True,),
        "mscale_all_dim": (None,),
        "attention_bias": (False,),
        "rms_norm_eps": (1e-6,),  # that of the latent is 1e-6 whatever this key says
        "first_k_dense_replace": (0,),
        "topk_group": (c["n_group"],),  # then no group is left out
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (1.0,),
    }


def deepseek_theirs(v):
    D = v["n_embd"] // v["n_head"]
    return rope_theirs(v) | {
        "num_key_value_heads": v["n_head"],
        "qk_nope_head_dim": D,
        "v_head_dim": D,
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }


DEEPSEEK_V3 = LLAMA._replace(
    architecture="DeepseekV3ForCausalLM",
    slots=LLAMA.slots | dict(mixer="mla", mlp="moe", moe_balance="bias"),
    keys={key: theirs for key, theirs in LLAMA.keys.items() if key != "n_kv_head"}
    | dict(
        mlp_width="moe_intermediate_size",
        n_experts="n_routed_experts",
        top_k="num_experts_per_tok",
        shared_experts="n_shared_experts",
        latent_rank="kv_lora_rank",
        rope_head_dim="qk_rope_head_dim",
    ),
    words=dict(rope_scaling=("rope_type", ROPE)),
    defaults={key: value for key, value in LLAMA.defaults.items() if key != "num_key_value_heads"}
    | {"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}
    | {"n_shared_experts": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    allowed=deepseek_allowed,
    theirs=deepseek_theirs,
    names=[
        *(named for named in WITHOUT_MLP if ".self_attn." not in named[0]),
        layer("self_attn.q_proj", "attn.wq", layouts.mla_queries),
        layer("self_attn.kv_a_proj_with_mqa", "attn.wd", layouts.mla_latent),
        layer("self_attn.kv_a_layernorm", "attn.latent_norm"),
        layer("self_attn.kv_b_proj", "attn.wu"),
        layer("self_attn.o_proj", "attn.wo"),
        layer("mlp.gate", "mlp.router"),
        *shared("mlp.shared_experts"),
    ],
    tensors=[layer("mlp.gate.e_score_correction_bias", "mlp.bias"), *stacked("mlp")],
    absent={"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8}
    | {"topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
)

# ---------------------------------------------------------------- Qwen3-Next

KINDS = {"linear_attention": "gated_delta", "full_attention": "attention"}


def layer_types(c):
    """Their layer_types. Without this key, one layer in so many has full attention."""
    interval = c["full_attention_interval"]
    if "layer_types" in c or type(interval) is not int or not 0 < interval < 1000:
        return c.get("layer_types")
    return ["linear_attention"] * (interval - 1) + ["full_attention"]


def mixer(c):
    """Our `mixer` for their layer_types, None for other types."""
    kinds = layer_types(c)
    known = isinstance(kinds, list) and all(isinstance(k, str) and k in KINDS for k in kinds)
    if not known or "layer_types" in c and len(kinds) < c["num_hidden_layers"]:
        return None
    words = [KINDS[kind] for kind in kinds[: c["num_hidden_layers"]]]
    period = next(p for p in range(1, len(words) + 1) if words[p:] == words[:-p])
    return ",".join(words[:period])


def qwen3_next_allowed(c):
    C, H = c["hidden_size"], c["num_attention_heads"]
    P, width = c["linear_value_head_dim"], c["moe_intermediate_size"]
    wide = c["shared_expert_intermediate_size"]
    return rope_allowed(c) | {
        "hidden_act": SILU,
        "partial_rotary_factor": whole_pairs(c, "partial_rotary_factor"),
        "attention_bias": (False,),
        "layer_types": (c.get("layer_types"),) if mixer(c) else tuple(KINDS),
        "full_attention_interval": (c["full_attention_interval"],) if mixer(c) else (4,),
        "linear_conv_kernel_dim": (4,),  # our key `conv` gives attention a convolution, too
        "linear_num_key_heads": (H,),
        "linear_num_value_heads": (H,),
        "linear_value_head_dim": (P if H * P % C == 0 else C // H,),
        "shared_expert_intermediate_size": (wide if wide % width == 0 else width,),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    }


def qwen3_next_ours(c):
    C, H, P = c["hidden_size"], c["num_attention_heads"], c["linear_value_head_dim"]
    wide = c["shared_expert_intermediate_size"]
    return rope_ours(c) | {
        "mixer": mixer(c),
        "expand": H * P // C,
        "shared_experts": wide // c["moe_intermediate_size"],
    }


def qwen3_next_theirs(v):
    C, H, words = v["n_embd"], v["n_head"], v["mixer"].split(",")
    kinds = {word: kind for kind, word in KINDS.items()}
    return rope_theirs(v) | {
        "layer_types": [kinds.get(words[i % len(words)]) for i in range(v["n_layer"])],
        "head_dim": C // H,
        "linear_num_key_heads": H,
        "linear_num_value_heads": H,
        "linear_value_head_dim": v["expand"] * C // H,
        "shared_expert_intermediate_size": v["shared_experts"] * (v["mlp_width"] or 0),
    }


QWEN3_NEXT = LLAMA._replace(
    architecture="Qwen3NextForCausalLM",
    slots=LLAMA.slots | dict(mlp="moe", shared_gate=True, qk_norm="head", attn_gate="element"),
    keys=LLAMA.keys
    | dict(
        rope_fraction="partial_rotary_factor",
        mlp_width="moe_intermediate_size",
        n_experts="num_experts",
        top_k="num_experts_per_tok",
        state_size="linear_key_head_dim",
    ),
    words=dict(rope_scaling=("rope_type", ROPE)),
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 2, "partial_rotary_factor": 0.25, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    allowed=qwen3_next_allowed,
    ours=qwen3_next_ours,
    theirs=qwen3_next_theirs,
    names=[
        *(
            (theirs, ours, layouts.zero_centred if "norm" in theirs else layout)
            for theirs, ours, layout in WITHOUT_MLP + QK_NORM
            if "q_proj" not in theirs
        ),
        layer("self_attn.q_proj", "attn.wq attn.gate", layouts.by_head),
        layer("linear_attn.in_proj_qkvz", "attn.wq attn.wk attn.wv attn.wz", layouts.delta_maps),
        layer("linear_attn.in_proj_ba", "attn.wb attn.wa", layouts.delta_maps),
        layer("linear_attn.norm", "attn.norm"),
        layer("linear_attn.out_proj", "attn.wo"),
        layer("mlp.gate", "mlp.router"),
        *shared("mlp.shared_expert"),
        layer("mlp.shared_expert_gate", "mlp.shared_gate"),
    ],
    tensors=[
        layer("linear_attn.conv1d.weight", "attn.conv.weight", layouts.single_filters),
        layer("linear_attn.A_log", "attn.decay.log_rate"),
        layer("linear_attn.dt_bias", "attn.decay.bias"),
        *stacked("mlp"),
    ],
    mixers={".linear_attn.": "gated_delta", ".self_attn.": "attention"},
    absent={"head_dim": 256, "full_attention_interval": 4}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
)

# ---------------------------------------------------------------- Mamba-2

MAMBA2 = Family(
    "Mamba2ForCausalLM",
    "backbone.",
    LLAMA.slots | dict(position="none", block="parallel", mlp="none", mixer="mamba2"),
    SIZES
    | dict(n_head="num_heads", state_size="state_size", expand="expand", conv="conv_kernel")
    | dict(norm_eps="layer_norm_epsilon"),
    {},
    {
        "max_position_embeddings": 2048,  # the paper's; transformers keeps the key unread
        "num_heads": 128,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    allowed=lambda c: {
        "hidden_act": SILU,
        "head_dim": (c["expand"] * c["hidden_size"] // c["num_heads"],),
        "n_groups": (1,),
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    },
    theirs=lambda v: {"head_dim": v["expand"] * v["n_embd"] // v["n_head"], "n_groups": 1},
    names=[
        row("backbone.embeddings", "wte"),
        row("backbone.layers.{}.norm", "norm1"),
        row(
            "backbone.layers.{}.mixer.in_proj",
            "attn.wz attn.wv attn.wk attn.wq attn.wa",
            layouts.mamba_maps,
        ),
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
    absent={"head_dim": 64, "n_groups": 8},
)
