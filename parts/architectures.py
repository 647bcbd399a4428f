"""Named architectures: fillings of all slots, and the way from keys to a model."""

from dataclasses import fields

from common.configurator import build
from model import GPT, GPTConfig
from model_llama import Llama, LlamaConfig
from parts.mlp import MLP
from parts.variant import Variant, VariantConfig

# ---------------------------------------------------------------- named architectures


def shared(by):
    """n_kv_head such that `by` query heads share a key and value head, or the next fewer that divide n_head."""
    return lambda c: c["n_head"] // next(n for n in range(by, 0, -1) if c["n_head"] % n == 0)


# A value that depends on the sizes is a function of them.
GPT2 = dict(
    position="learned", norm="layernorm", block="pre", mlp="gelu", bias="all", tie_embeddings=True
)
LLAMA = dict(
    position="rope", norm="rmsnorm", block="pre", mlp="swiglu", bias="none", tie_embeddings=False
)
ARCH = {
    "gpt2": GPT2,
    "llama": LLAMA,  # LLaMA 1, LLaMA 2 7B and 13B
    "llama2-70b": LLAMA | dict(n_kv_head=shared(8), ffn_dim_multiplier=1.3),
    "llama3": LLAMA
    | dict(
        n_kv_head=shared(4),
        ffn_dim_multiplier=1.3,
        rope_theta=5e5,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original=lambda c: max(1, c["block_size"] // 16),
    ),
    "mistral": LLAMA
    | dict(
        n_kv_head=shared(4), window=lambda c: max(1, c["block_size"] // 2), ffn_dim_multiplier=1.3
    ),
    "bloom": GPT2 | dict(position="alibi", embed_norm=True),
    "falcon": dict(
        position="rope",
        norm="layernorm",
        block="parallel",
        mlp="gelu_erf",
        bias="norm",
        n_kv_head=1,
        tie_embeddings=True,
    ),  # 7B
    "gpt-neox": dict(
        position="rope",
        rope_fraction=0.25,
        norm="layernorm",
        block="parallel2",
        mlp="gelu_erf",
        bias="all",
        tie_embeddings=False,
    ),
    "olmo2": LLAMA | dict(block="output", qk_norm="full", rope_theta=5e5, norm_eps=1e-6),
    "qwen3": LLAMA
    | dict(n_kv_head=shared(4), qk_norm="head", rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True),
    "transformer2017": dict(
        position="sinusoidal",
        norm="layernorm",
        block="post",
        mlp="relu",
        bias="all",
        tie_embeddings=True,
    ),  # decoder only
    "balanced": LLAMA | dict(mlp="gelu", n_kv_head=shared(4)),
}
CORNERS = {"gpt2": (GPTConfig, GPT), "llama": (LlamaConfig, Llama)}
# {key: (slot, the words that read it)}: what a key belongs to, without which it says nothing.
GATED = [word for word, part in MLP.items() if part.func.gated]
OWNER = dict.fromkeys(
    ("rope_theta", "rope_fraction", "rope_scaling", "rope_factor", "rope_original"),
    ("position", ["rope"]),
) | {
    "relative_clip": ("position", ["relative"]),
    "norm_eps": ("norm", ["rmsnorm"]),
    "multiple_of": ("mlp", GATED),
    "ffn_dim_multiplier": ("mlp", GATED),
}


def idle(values):
    """The keys among `values` that have no effect because the part they belong to is not there."""
    normed = values.get("qk_norm", "none") != "none"  # an RMSNorm too
    return [
        key
        for key, (slot, words) in OWNER.items()
        if key in values and values.get(slot) not in words and not (key == "norm_eps" and normed)
    ]


def configure(values):
    """The configuration of a model, from the keys that a user or a checkpoint gives.

    values["model"] names the base, "gpt2" or "llama". If only sizes are given it is the readable
    model's own GPTConfig or LlamaConfig. If a slot is given, or an `arch` that fills them all, it
    is a VariantConfig with the base's parts in all other slots. Keys of other classes are ignored.
    Raises UserError for values that do not go together.
    """
    config_class, _, filled = choose(values)
    return build(config_class, filled)


def make(config):
    """The model of a configuration that `configure` made, with fresh weights."""
    classes = {GPTConfig: GPT, LlamaConfig: Llama, VariantConfig: Variant}
    return classes[type(config)](config)


def choose(values):
    """(configuration class, model class, values) for the keys that a user, or a checkpoint, gives.

    values["model"] names the corner to start from. If a slot is given, or an `arch` that fills them all, it is
    a Variant, with the corner's parts in all other slots; else it is the corner's own readable model."""
    config_class, model_class = CORNERS[values.get("model", "gpt2")]
    names = {field.name for field in fields(VariantConfig)}
    slots = (
        names
        - {field.name for field in fields(config_class)}
        - set(idle(dict.fromkeys(OWNER) | ARCH[values.get("model", "gpt2")]))
    )
    if (
        not values.get("arch")
        and not slots & values.keys()
        and not isinstance(values.get("bias"), str)
    ):
        return config_class, model_class, values
    filled = ARCH[values.get("arch") or values.get("model", "gpt2")] | {
        key: value for key, value in values.items() if key in names
    }
    sizes = {field.name: field.default for field in fields(VariantConfig)} | values
    filled = {key: value(sizes) if callable(value) else value for key, value in filled.items()}
    return VariantConfig, Variant, filled
