"""Named architectures, and the two functions that make a model from keys:

model = make(configure({"model": "llama", "position": "alibi", "n_layer": 6}))
"""

from dataclasses import fields

from common.configurator import build
from model import GPT, GPTConfig
from model_llama import Llama, LlamaConfig
from parts.slots import MIXER, SLOTS
from parts.variant import Variant, VariantConfig

# ---------------------------------------------------------------- named architectures


def shared(by):
    """n_kv_head such that `by` query heads share a key and value head, or the next fewer that
    divide n_head."""
    return lambda c: c["n_head"] // next(n for n in range(by, 0, -1) if c["n_head"] % n == 0)


def last_layers(*words):
    """These mixers, repeated over the depth; the last ones of them where there are fewer layers."""
    return lambda c: ",".join(words[-c["n_layer"] :])


# A value that depends on the sizes is a function of them.
GPT2 = dict(
    position="learned",
    norm="layernorm",
    block="pre",
    mlp="gelu",
    mixer="attention",
    bias="all",
    tie_embeddings=True,
)
LLAMA = dict(
    position="rope",
    norm="rmsnorm",
    block="pre",
    mlp="swiglu",
    mixer="attention",
    bias="none",
    tie_embeddings=False,
)
GROUPED = LLAMA | dict(n_kv_head=shared(4))
EXPERTS = dict(mlp="moe", n_experts=32, top_k=4)  # small: DeepSeek-V3 has 256, Qwen3-Next 512
ARCH = {
    "gpt2": GPT2,
    "llama": LLAMA,  # LLaMA 1, LLaMA 2 7B and 13B
    "llama2-70b": LLAMA | dict(n_kv_head=shared(8), ffn_dim_multiplier=1.3),
    "llama3": GROUPED
    | dict(
        ffn_dim_multiplier=1.3,
        rope_theta=5e5,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original=lambda c: max(1, c["block_size"] // 16),
    ),
    "mistral": GROUPED
    | dict(window=lambda c: max(1, c["block_size"] // 2), ffn_dim_multiplier=1.3),
    "bloom": GPT2 | dict(position="alibi", embed_norm=True),
    "falcon": GPT2  # 7B
    | dict(position="rope", block="parallel", mlp="gelu_erf", bias="norm", n_kv_head=1),
    "gpt-neox": GPT2
    | dict(
        position="rope", rope_fraction=0.25, block="parallel2", mlp="gelu_erf", tie_embeddings=False
    ),
    "olmo2": LLAMA | dict(block="output", qk_norm="full", rope_theta=5e5, norm_eps=1e-6),
    "qwen3": GROUPED | dict(qk_norm="head", rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True),
    "smollm3": GROUPED
    | dict(
        ffn_dim_multiplier=2.0, nope_every=4, rope_theta=5e6, norm_eps=1e-6, tie_embeddings=True
    ),
    "nanochat": LLAMA  # d32, without the later value embeddings and scaled residual
    | dict(
        norm="rmsnorm_bare",
        mlp="relu2",
        qk_norm="head",
        embed_norm=True,
        logit_softcap=15.0,
        norm_eps=1e-6,
    ),
    "mixtral": GROUPED | dict(mlp="moe", rope_theta=1e6),
    "gpt-oss": LLAMA  # 20B, with heads of n_embd / n_head; theirs are wider
    | EXPERTS
    | dict(
        mlp="moe_clamped",
        n_kv_head=shared(8),
        bias="all",
        attn_extra="sink",
        window=lambda c: max(1, min(128, c["block_size"] // 2)),
        full_every=2,
        rope_theta=1.5e5,
        rope_scaling="yarn_exact",
        rope_factor=32.0,
        rope_original=lambda c: max(8, c["block_size"] // 32),
    ),
    "deepseek-v3": LLAMA  # no latent for queries, no dense layers
    | EXPERTS
    | dict(mixer="mla", shared_experts=1, moe_balance="bias", norm_eps=1e-6),
    "qwen3-next": LLAMA  # as many heads of values as of keys
    | EXPERTS
    | dict(
        mixer=last_layers("gated_delta", "gated_delta", "gated_delta", "attention"),
        n_kv_head=shared(8),
        expand=lambda c: 2 if c["n_layer"] > 1 else 1,
        qk_norm="head",
        rope_fraction=0.25,
        attn_extra="gate_element",
        rope_theta=1e7,
        norm_eps=1e-6,
        shared_experts=1,
        shared_gate=True,
    ),
    "mamba2": LLAMA
    | dict(
        position="none",
        block="parallel",
        mlp="none",
        mixer="mamba2",
        expand=2,
        state_size=128,
        tie_embeddings=True,
    ),
    "transformer2017": GPT2 | dict(position="sinusoidal", block="post", mlp="relu"),  # decoder only
    "balanced": GROUPED | dict(mlp="gelu"),
}
CORNERS = {"gpt2": (GPTConfig, GPT), "llama": (LlamaConfig, Llama)}

# ---------------------------------------------------------------- which part reads which key


def owners():
    """{key: (slot, the words that read it)} of the keys without effect beside other words."""
    readers = {}
    for slot, words in SLOTS.items():
        for word, part in words.items():
            for key in getattr(part, "reads", ()):
                readers.setdefault(key, (slot, []))[1].append(word)
    return readers


def idle(values):
    """The keys among `values` that have no effect because the part they belong to is not there."""
    values = dict(mixer=VariantConfig.mixer) | values
    unread = [
        key
        for key, (slot, words) in owners().items()
        if key in values and not {*values.get(slot, "").split(",")} & {*words}
    ]
    mixers = [MIXER[word] for word in values["mixer"].split(",")]
    if values.get("qk_norm", "none") != "none" or any(mixer.normed for mixer in mixers):
        unread = [key for key in unread if key != "norm_eps"]  # these norms are RMSNorms
    return unread


# ---------------------------------------------------------------- from keys to a model

# Keys of earlier versions that are words of attn_extra now: {key: {value: word}}.
FORMER = {
    "attn_gate": {"head": "gate_head", "element": "gate_element"},
    "attn_sink": {True: "sink"},
    "value_residual": {True: "value_residual"},
    "value_embed": {True: "value_embed"},
    "xsa": {True: "xsa"},
}


def translated(values):
    """`values` with today's key for those that a checkpoint of an earlier version has."""
    if "attn_extra" in values or not FORMER.keys() & values.keys():
        return values
    extras = [words[values[key]] for key, words in FORMER.items() if values.get(key) in words]
    kept = {key: value for key, value in values.items() if key not in FORMER}
    return kept | {"attn_extra": ",".join(extras) or "none"}


def configure(values):
    """The configuration of a model, from the keys that a user or a checkpoint gives.

    values["model"] names the base, "gpt2" or "llama". If only sizes are given it is the readable
    model's own GPTConfig or LlamaConfig. If a slot is given, or an `arch` that fills them all, it
    is a VariantConfig with the base's parts in all other slots. Keys of other classes are ignored.
    Raises UserError for values that do not go together.
    """
    values = translated(values)
    base = values.get("model", "gpt2")
    arch, (config_class, _) = values.get("arch"), CORNERS[base]
    defaults = {field.name: field.default for field in fields(VariantConfig)}
    own = {field.name for field in fields(config_class)}
    without_effect = idle(dict.fromkeys(owners()) | ARCH[base])
    swaps = defaults.keys() - own - set(without_effect)
    if not arch and not swaps & values.keys() and not isinstance(values.get("bias"), str):
        return build(config_class, values)

    given = {key: value for key, value in values.items() if key in defaults}
    filled, sizes = ARCH[arch or base] | given, defaults | values
    for key, value in filled.items():
        filled[key] = value(sizes) if callable(value) else value
    return build(VariantConfig, filled)


def make(config):
    """The model of a configuration that `configure` made, with fresh weights."""
    classes = {GPTConfig: GPT, LlamaConfig: Llama, VariantConfig: Variant}
    return classes[type(config)](config)
