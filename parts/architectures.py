"""
Named architectures, and the two functions that make a model from keys:

    model = make(configure({"model": "llama", "position": "alibi", "n_layer": 6}))
"""

from dataclasses import asdict, fields
from typing import Literal

from common.configurator import build, check, keys
from model import GPT, GPTConfig
from model_llama import Llama, LlamaConfig
from parts.slots import MIXER, POSITION, SLOTS
from parts.variant import Variant, VariantConfig

# ---------------------------------------------------------------- named architectures


def shared_by(queries):
    """n_kv_head, as a function of the sizes: `queries` query heads share a head of keys and
    values, or fewer where `queries` does not divide n_head."""

    def n_kv_head(sizes):
        group = queries
        while sizes["n_head"] % group:
            group -= 1
        return sizes["n_head"] // group

    return n_kv_head


def last_layers(*words):
    """The mixers, as a function of the sizes: these words, or the last n_layer of them."""
    return lambda sizes: ",".join(words[-sizes["n_layer"] :])


def context_over(divisor, least=1, most=None):
    """block_size // divisor, as a function of the sizes, limited to least..most. In tokens."""

    def tokens(sizes):
        share = max(least, sizes["block_size"] // divisor)
        return share if most is None else min(most, share)

    return tokens


GPT2 = dict(
    position="learned",
    norm="layernorm",
    mlp="gelu",
    bias="all",
    tie_embeddings=True,
    block="pre",
    mixer="attention",
)
LLAMA = dict(
    position="rope",
    norm="rmsnorm",
    mlp="swiglu",
    bias="none",
    tie_embeddings=False,
    block="pre",
    mixer="attention",
)
GROUPED = dict(LLAMA, n_kv_head=shared_by(4))
EXPERTS = dict(LLAMA, mlp="moe", n_experts=32, top_k=4)  # DeepSeek-V3 has 256, Qwen3-Next 512

# {word: its keys}. A value that depends on the sizes is a function of them.
ARCH = {
    "gpt2": GPT2,
    "llama": LLAMA,  # LLaMA 1, LLaMA 2 7B and 13B
    "llama2-70b": dict(LLAMA, n_kv_head=shared_by(8), ffn_dim_multiplier=1.3),
    "llama3": dict(
        GROUPED,
        ffn_dim_multiplier=1.3,
        rope_theta=5e5,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original=context_over(16),
    ),
    "mistral": dict(GROUPED, window=context_over(2), ffn_dim_multiplier=1.3),
    "bloom": dict(GPT2, position="alibi", embed_norm=True),
    "falcon": dict(  # 7B
        GPT2,
        position="rope",
        block="parallel",
        mlp="gelu_erf",
        bias="norm",
        n_kv_head=1,
    ),
    "gpt-neox": dict(
        GPT2,
        position="rope",
        rope_fraction=0.25,
        block="parallel2",
        mlp="gelu_erf",
        tie_embeddings=False,
    ),
    "olmo2": dict(LLAMA, block="output", qk_norm="full", rope_theta=5e5, norm_eps=1e-6),
    "qwen3": dict(GROUPED, qk_norm="head", rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True),
    "smollm3": dict(
        GROUPED,
        ffn_dim_multiplier=2.0,
        nope_every=4,
        rope_theta=5e6,
        norm_eps=1e-6,
        tie_embeddings=True,
    ),
    "nanochat": dict(  # d32, without the later value embeddings and scaled residual
        LLAMA,
        norm="rmsnorm_bare",
        mlp="relu2",
        qk_norm="head",
        embed_norm=True,
        logit_softcap=15.0,
        norm_eps=1e-6,
    ),
    "mixtral": dict(GROUPED, mlp="moe", rope_theta=1e6),
    "gpt-oss": dict(  # 20B, with heads of width n_embd / n_head; its own are wider
        EXPERTS,
        mlp="moe_clamped",
        n_kv_head=shared_by(8),
        bias="all",
        attn_extra="sink",
        window=context_over(2, most=128),
        full_every=2,
        rope_theta=1.5e5,
        rope_scaling="yarn_exact",
        rope_factor=32.0,
        rope_original=context_over(32, least=8),
    ),
    "deepseek-v3": dict(  # without latent queries and dense layers
        EXPERTS,
        mixer="mla",
        shared_experts=1,
        moe_balance="bias",
        norm_eps=1e-6,
    ),
    "qwen3-next": dict(  # with as many heads of values as of keys; its keys and heads are wider
        EXPERTS,
        mixer=last_layers("gated_delta", "gated_delta", "gated_delta", "attention"),
        n_kv_head=shared_by(8),
        expand=lambda sizes: 2 if sizes["n_layer"] > 1 else 1,
        qk_norm="head",
        rope_fraction=0.25,
        attn_extra="gate_element",
        rope_theta=1e7,
        norm_eps=1e-6,
        shared_experts=1,
        shared_gate=True,
    ),
    "mamba2": dict(
        LLAMA,
        position="none",
        block="parallel",
        mlp="none",
        mixer="mamba2",
        expand=2,
        state_size=128,
        tie_embeddings=True,
    ),
    "transformer2017": dict(GPT2, position="sinusoidal", block="post", mlp="relu"),  # decoder only
    "balanced": dict(GROUPED, mlp="gelu"),
}
# The readable models: those written out in a file of their own, model.py and model_llama.py.
CORNERS = {"gpt2": (GPTConfig, GPT), "llama": (LlamaConfig, Llama)}
MODEL_KEYS = {"model", "arch", *keys(VariantConfig)}  # the keys that determine a model
DROPOUTS = ("dropout", "attn_dropout", "ngram_dropout")  # keys that act while training only
# Keys in which two configurations of the same weights may differ.
UNSEEN = (*DROPOUTS, "multiple_of", "ffn_dim_multiplier")

# ---------------------------------------------------------------- keys without effect


def readers():
    """{key: [(slot, word)] of the parts that read the key}. A key that is not here is read by
    every model."""
    found = {}
    for slot, words in SLOTS.items():
        for word, part in words.items():
            for key in getattr(part, "reads", ()):
                found.setdefault(key, []).append((slot, word))
    return found


def without_effect(values):
    """The keys among `values` that no part of this model reads."""
    values = dict(mixer=VariantConfig.mixer) | values
    unread = []
    for key, read_by in readers().items():
        used = any(word in values.get(slot, "").split(",") for slot, word in read_by)
        if key in values and not used:
            unread.append(key)
    mixers = [MIXER[word] for word in values["mixer"].split(",")]
    has_rmsnorm = values.get("qk_norm", "none") != "none" or any(mixer.normed for mixer in mixers)
    if has_rmsnorm and "norm_eps" in unread:
        unread.remove("norm_eps")  # RMSNorms within the mixers read it
    if "embed_norm" in values and values.get("norm") == "none":
        unread.append("embed_norm")
    return unread


# ---------------------------------------------------------------- from keys to a model


def configure(values, as_variant=False):
    """The configuration of a model, from the keys that a user or a checkpoint gives.

    values["model"] names the base, "gpt2" or "llama". If only sizes are given, it is the readable
    model's own GPTConfig or LlamaConfig. If a part is given, or an `arch` that fills all slots, it
    is a VariantConfig with the base's parts in the other slots. as_variant: it is a VariantConfig
    in any case. Keys of other classes are ignored. Raises UserError for unknown words, and for
    values that contradict each other.
    """
    base = check("model", values.get("model", "gpt2"), Literal[*CORNERS], "configuration")
    arch = check("arch", values.get("arch"), Literal[*ARCH] | None, "configuration")
    if arch is None and not as_variant and not changes_a_part(values, base):
        config_class, _ = CORNERS[base]
        return build(config_class, values)

    defaults = {field.name: field.default for field in fields(VariantConfig)}
    filled = ARCH[arch or base] | values
    for key, value in filled.items():
        if callable(value):
            filled[key] = value(defaults | values)
    return build(VariantConfig, filled)


def changes_a_part(values, base):
    """Whether `values` set a slot, or another key that the readable model `base` lacks and that has
    an effect with the parts of `base`."""
    if isinstance(values.get("bias"), str):
        return True
    config_class, _ = CORNERS[base]
    defaults = {key: getattr(VariantConfig, key) for key in readers()}
    unread = without_effect(defaults | ARCH[base])
    changing = keys(VariantConfig).keys() - keys(config_class).keys() - set(unread)
    return any(key in changing for key in values)


def needed(key, word, base):
    """The change to the base that a word needs: position=none for a mixer that has no place for the
    position of the base, block=parallel for mlp=none, position=rope for rope_scaling."""
    if key == "mlp" and word == "none":
        return {"block": "parallel"}
    if key == "mixer":
        place = POSITION[base.position].acts_on
        if place is not None and place not in MIXER[word].acted_on:
            return {"position": "none"}
    if key in without_effect(asdict(base)):
        slot, first_word = readers()[key][0]
        return {slot: first_word}
    return {}


def differences(a, b):
    """[(key, value in a, value in b)] where two configurations differ."""
    b = asdict(b)
    return [(key, old, b[key]) for key, old in asdict(a).items() if old != b[key]]


def changes(before, after):
    """{key: "key value -> value"} of the keys in which the models of two configurations differ."""
    before, after = (configure(values, as_variant=True) for values in (before, after))
    return {key: f"{key} {old} -> {new}" for key, old, new in differences(before, after)}


def make(config):
    """The model of a configuration that `configure` made, with fresh weights."""
    if isinstance(config, GPTConfig):
        return GPT(config)
    if isinstance(config, LlamaConfig):
        return Llama(config)
    return Variant(config)
