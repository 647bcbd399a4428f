"""Tiny random models of transformers, one for each family, and ours with their weights."""

import torch

from helpers.models import random_weights, tokens
from parts.architectures import configure, make
from weights.hf import load_weights

EAGER = dict(attn_implementation="eager", experts_implementation="eager")
SPECIAL = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
SIZES = SPECIAL | dict(vocab_size=999, hidden_size=84, num_hidden_layers=2, num_attention_heads=7)
LLAMA = SIZES | dict(max_position_embeddings=64, intermediate_size=107, rms_norm_eps=1e-3)
LLAMA |= dict(num_attention_heads=14, num_key_value_heads=7)
THETA = {"rope_type": "default", "rope_theta": 500.0}
SCALED = dict(rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)
FREQUENCIES = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 = dict(rope_parameters=SCALED | FREQUENCIES)
WIDE = LLAMA | dict(head_dim=10, rope_parameters=THETA)  # 84 / 14 would be 6
EXPERTS = dict(num_local_experts=5, num_experts_per_tok=3)
GPT2 = dict(vocab_size=999, n_positions=64, n_embd=35, n_head=5, n_layer=2)
CORNERS = {  # those that are a readable model
    "gpt2": ("gpt2", GPT2, dict(bias=True, tie_embeddings=True)),
    "gpt2-untied": ("gpt2", GPT2 | dict(tie_word_embeddings=False), dict(tie_embeddings=False)),
    "llama": ("llama", LLAMA | dict(rope_parameters=THETA), dict(n_kv_head=7, norm_eps=1e-3)),
    "llama-tied": (
        "llama",
        LLAMA
        | dict(tie_word_embeddings=True, num_key_value_heads=1, rope_parameters=THETA)
        | dict(intermediate_size=1),
        dict(tie_embeddings=True, n_kv_head=1),
    ),
}
CASES = CORNERS | {  # name: (model_type, its configuration, what our model is)
    "gpt2-gelu": (
        "gpt2",
        GPT2 | dict(n_inner=50, activation_function="gelu"),
        dict(mlp="gelu_erf", mlp_width=50),
    ),
    "llama-3": (
        "llama",
        LLAMA | LLAMA3,
        dict(rope_scaling="llama3", rope_factor=4.0, rope_original=16, rope_theta=500.0),
    ),
    "llama-linear": (
        "llama",
        LLAMA | dict(rope_parameters=THETA | {"rope_type": "linear", "factor": 2.5}),
        dict(rope_scaling="linear", rope_factor=2.5),
    ),
    "llama-yarn": (
        "llama",
        LLAMA | dict(hidden_size=84 * 4, rope_parameters=SCALED | {"rope_type": "yarn"}),
        dict(rope_scaling="yarn", rope_factor=4.0, rope_original=16),
    ),
    "llama-wide": ("llama", WIDE, dict(head_dim=10)),
    "llama-geglu": ("llama", LLAMA | dict(hidden_act="gelu_pytorch_tanh"), dict(mlp="geglu")),
    "mistral": ("mistral", WIDE | dict(sliding_window=9), dict(window=9, head_dim=10)),
    "bloom": (
        "bloom",
        SPECIAL | dict(vocab_size=999, hidden_size=84, n_layer=2, n_head=6),
        dict(position="alibi", embed_norm=True, bias="all"),
    ),
    "falcon": (
        "falcon",
        SIZES | dict(rope_parameters=THETA),
        dict(block="parallel", n_kv_head=1, bias="norm", mlp="gelu_erf"),
    ),
    "falcon-bias": (
        "falcon",
        SIZES | dict(rope_parameters=THETA, bias=True, ffn_hidden_size=101),
        dict(block="parallel", bias="all", mlp_width=101),
    ),
    "gpt-neox": (
        "gpt_neox",
        SIZES | dict(intermediate_size=107, rope_parameters=THETA | {"partial_rotary_factor": 0.5}),
        dict(block="parallel2", rope_fraction=0.5, mlp="gelu_erf"),
    ),
    "gpt-neox-serial": (
        "gpt_neox",
        SIZES
        | dict(intermediate_size=107, use_parallel_residual=False, hidden_act="relu")
        | dict(rope_parameters=THETA | {"partial_rotary_factor": 1.0}),
        dict(block="pre", mlp="relu"),
    ),
    "olmo2": ("olmo2", WIDE, dict(block="output", qk_norm="full", head_dim=10)),
    "qwen2": ("qwen2", LLAMA | dict(rope_parameters=THETA), dict(bias="qkv")),
    "qwen3": ("qwen3", WIDE, dict(qk_norm="head", head_dim=10)),
    "smollm3": (
        "smollm3",
        WIDE | dict(num_hidden_layers=3, no_rope_layer_interval=2),
        dict(nope_every=2, n_kv_head=7, head_dim=10),
    ),
    "nanochat": (
        "nanochat",
        WIDE | dict(final_logit_softcapping=7.0),
        dict(norm="rmsnorm_bare", mlp="relu2", logit_softcap=7.0, head_dim=10),
    ),
    "mixtral": (
        "mixtral",
        LLAMA | EXPERTS | dict(sliding_window=9, rope_parameters=THETA),
        dict(mlp="moe", n_experts=5, top_k=3, window=9, mlp_width=107),
    ),
    "mamba2": (
        "mamba2",
        dict(vocab_size=999, hidden_size=84, num_hidden_layers=2, max_position_embeddings=64)
        | dict(num_heads=7, head_dim=24, state_size=11, conv_kernel=3, n_groups=1, chunk_size=16)
        | dict(layer_norm_epsilon=1e-3, **SPECIAL),
        dict(mixer="mamba2", mlp="none", block="parallel", state_size=11, expand=2, conv=3),
    ),
}
IDX = tokens(2, 61, vocab=999)


def theirs(case, **changes):
    """A random transformers model in float64, no gain 1 and no bias 0."""
    import transformers

    kind, config, _ = CASES[case]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **config | changes), **EAGER
    )
    return random_weights(made.double().eval(), 0.4)


def ours(word, values, tensors, dtype=torch.float64, **changes):
    made = make(configure({"model": word} | values | changes)).to(dtype).eval()
    load_weights(made, tensors)
    return made
