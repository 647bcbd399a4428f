"""The keys of a model: which there are, what is refused, and which have no effect."""

import pytest

from common.configurator import keys
from common.errors import UserError
from helpers.variants import ARMS, CORNER, SIZES, config
from parts.architectures import CORNERS, configure, make, without_effect
from parts.slots import SLOTS
from parts.variant import Variant, VariantConfig


def test_options_are_frozen():
    """A new option is a cost to every reader: argue for it, then add it here. Each stands for what
    published models, or the papers' own sizes, cannot be said without."""
    assert " ".join(keys(VariantConfig)) == (
        "block_size vocab_size n_layer n_head n_kv_head n_embd head_dim dropout attn_dropout "
        "tie_embeddings bias "
        "position norm block mlp mixer mlp_width multiple_of ffn_dim_multiplier norm_eps "
        "rope_theta rope_fraction rope_scaling rope_factor rope_original relative_clip window "
        "full_every block_local qk_norm attn_softcap logit_softcap low_rank embed_norm "
        "residual streams attn_extra nope_every kv_shared_by "
        "embed ngram_max ngram_rows ngram_width ngram_dropout "
        "n_experts top_k shared_experts shared_gate moe_balance latent_rank rope_head_dim "
        "state_size expand conv conv_sites"
    )
    sizes = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "multiple_of"}
    tested = {key for arm in ARMS for key in arm} | sizes | {"dropout", "attn_dropout"}
    assert tested >= set(keys(VariantConfig)), "a new number needs an arm in NUMBERS"


@pytest.mark.parametrize(
    "arm, words",
    [
        (dict(n_kv_head=3), "n_head=4 is not divisible by n_kv_head=3"),
        (dict(n_head=5), "n_embd=16 is not divisible by n_head=5"),
        (CORNER | dict(n_head=5), "n_embd=16 is not divisible by n_head=5"),
        (CORNER | dict(model="llama", n_head=5), "n_embd=16 is not divisible by n_head=5"),
        (CORNER | dict(model="llama", n_kv_head=3), "n_head=4 is not divisible by n_kv_head=3"),
        (CORNER | dict(model="llama", n_head=16), "n_embd=16 over n_head=16 gives an odd head"),
        (dict(n_head=5, head_dim=4, mixer="attention,mamba2"), "n_embd=16 is not divisible"),
        (dict(window=4, block_local=4), "choose one"),
        (dict(full_every=2), "full_every has no effect with window=0.*: give full_every=0"),
        (dict(position="rope", n_head=16), "rope rotates pairs, and n_embd=16 over n_head=16"),
        (dict(norm="rmsnorm", bias="norm"), "norm=rmsnorm has no bias"),
        (dict(mixer="mla", bias="qkv"), "bias=qkv does not go with mixer=mla"),
        (dict(attn_extra="sink,none"), "attn_extra=sink,none contradicts or repeats itself"),
        (dict(attn_extra="gate_head,gate_element"), "one gate at most"),
        (dict(conv_sites="keys,keys"), "conv_sites=keys,keys contradicts or repeats itself"),
        (dict(conv_sites="keys", mixer="mamba2", position="none"), "conv_sites does not go with"),
        (dict(conv_sites="mlp_inner", mlp="moe"), "mlp_inner .* mlp=moe"),
        (dict(conv_sites="mlp_input", mlp="none", block="parallel"), "mlp=none leaves out"),
        (dict(kv_shared_by=2, mixer="attention,mamba2"), "no effect with one layer of attention"),
        (dict(kv_shared_by=2, attn_extra="sink,value_embed"), "attn_extra=value_embed"),
        (dict(kv_shared_by=2, nope_every=2, position="rope"), "nope_every .* kv_shared_by"),
        (dict(mlp="moe", n_experts=2, top_k=3), "top_k=3 is above n_experts=2"),
        (dict(mlp="moe", top_k=1), "a router learns nothing.*choose top_k=2"),
        (dict(mlp="moe", low_rank=3), "low_rank cannot be applied to mlp=moe"),
        (dict(residual="attn_res", block="post"), "no sum that block=post could normalize"),
        (dict(mlp="none"), "mlp=none leaves a norm of block=pre without use"),
        (dict(mixer="mla", rope_head_dim=3, position="rope"), "rope_head_dim=3 .* odd number"),
        (dict(mixer="mla", rope_fraction=0.5, position="rope"), "rope_head_dim=2 .* or none"),
        (dict(position="rope", rope_theta=1.0, rope_scaling="yarn"), "logarithm of rope_theta=1"),
        (dict(mixer="mla", position="alibi"), "scores, which mixer=mla does not have"),
        (dict(mixer="mamba2", position="rope"), "acts on q and k, which mixer=mamba2 does not"),
        (dict(mixer="mamba2", window=4), "window does not go with mixer=mamba2"),
        (dict(mixer="mamba2", n_kv_head=1), "n_kv_head does not go with mixer=mamba2"),
        (dict(mixer="attention,attention,mla"), "more mixers than n_layer=2"),
        (dict(mixer="differential", n_kv_head=1), "n_kv_head=1 is odd"),
        (dict(mixer="differential", attn_extra="sink"), "attn_extra does not go with mixer="),
    ],
    ids=str,
)
def test_impossible_pairs_are_refused_in_a_sentence(arm, words):
    with pytest.raises(UserError, match=words):
        config("gpt2", arm)


def test_configure_and_make():
    own = [dict(model="llama", n_layer=3), dict(model="llama", n_kv_head=2), dict(bias=False)]
    own.append(dict(norm_eps=1e-6))  # GPT-2 has no RMSNorm
    slots = [dict(position="rope"), dict(n_kv_head=2), dict(window=4), dict(bias="norm")]
    slots += [dict(arch="gpt2"), dict(mixer="attention"), dict(head_dim=4)]
    for word in ("mla", "mla,gated_delta"):  # which turn rope_head_dim alone, or nothing
        slots.append(dict(model="llama", mixer=word, n_head=16))
    for given in own + slots + [dict(model="llama", rope_scaling="yarn")]:
        corner = CORNERS[given.get("model", "gpt2")][1]
        assert type(make(configure(SIZES | given))) is (corner if given in own else Variant)
    for key in ("model", "arch"):
        with pytest.raises(UserError, match=f"{key} cannot be 'lama' .*, llama"):
            configure({key: "lama"})
    c = configure({"model": "gpt2", "position": "rope"})
    slots = c.position, c.norm, c.mlp, c.bias, c.tie_embeddings
    assert slots == ("rope", "layernorm", "gelu", "all", True)


def test_keys_without_an_effect(monkeypatch):
    values = dict(norm="none", norm_eps=0.1, embed_norm=True, mlp="none", mlp_width=9, conv=4)
    assert without_effect(values) == ["norm_eps", "mlp_width", "embed_norm"]
    assert not without_effect(values | dict(norm="rmsnorm", mlp="moe"))
    for word in ("mla", "differential", "attention,mla"):  # with norms of their own
        assert "norm_eps" not in without_effect(values | dict(mixer=word))
    monkeypatch.setattr(SLOTS["mlp"]["gelu"], "reads", ("norm_eps",), raising=False)
    assert "norm_eps" not in without_effect(values | dict(mlp="gelu"))
