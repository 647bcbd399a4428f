"""The gates that every part passes, made from the dictionaries: a new word is tested without
writing a test, but for its formula in references.py.

    python -m pytest tests/parts -k swiglu                  # one word alone, in seconds
    python -m pytest -m slow tests/parts/test_variants.py   # GPT-2's arms, combinations of slots
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import references
import torch

from common.configurator import build, keys
from common.errors import UserError
from helpers.variants import (
    ARMS,
    CORNER,
    SCALED,
    SIZES,
    SLOTS,
    arm_of,
    bases,
    close,
    config,
    gate,
    name,
    randomised,
    tokens,
)
from parts import attention, variant
from parts.architectures import ARCH, CORNERS, configure, make
from parts.cache import KVCache, visible
from parts.mlp import MLP
from parts.part import MIXER
from parts.position import POSITION, ROPE_SCALING, Where
from parts.variant import Variant, VariantConfig
from training.optim import muon_names, parameter_groups

# ---------------------------------------------------------------- the corners


@bases
def test_corner_is_the_readable_model_to_the_last_bit(base):
    config_class, model_class = CORNERS[base]
    torch.manual_seed(3)
    corner = model_class(build(config_class, SIZES))
    torch.manual_seed(3)
    variant = Variant(config(base))
    assert list(corner.state_dict()) == list(variant.state_dict())
    for a, b in zip(corner.state_dict().values(), variant.state_dict().values(), strict=True):
        assert torch.equal(a, b)  # one seed, one initialisation
    with torch.no_grad():
        for a, b in zip(corner.parameters(), variant.parameters(), strict=True):
            b.copy_(torch.nn.init.normal_(a, 0.0, 0.3))
    c = config(base)
    x, y = tokens(c), tokens(c, seed=2)
    (corner_logits, corner_loss), (logits, loss) = corner(x, y), variant(x, y)
    corner_loss.backward(), loss.backward()
    assert torch.equal(corner_logits, logits) and torch.equal(corner_loss, loss)
    for a, b in zip(corner.parameters(), variant.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    caches = KVCache(), KVCache()
    for piece in (x[:, :7], x[:, 7:8], x[:, 8:20]):
        assert torch.equal(corner(piece, cache=caches[0])[0], variant(piece, cache=caches[1])[0])


def test_configure_and_make():
    own = [dict(model="llama", n_layer=3), dict(model="llama", n_kv_head=2), dict(bias=False)]
    slots = [dict(position="rope"), dict(n_kv_head=2), dict(window=4), dict(bias="norm")]
    slots += [dict(arch="gpt2"), dict(mixer="attention"), dict(head_dim=4)]
    for given in own + slots + [dict(model="llama", rope_scaling="yarn")]:
        corner = CORNERS[given.get("model", "gpt2")][1]
        assert type(make(configure(SIZES | given))) is (corner if given in own else Variant)
    c = configure({"model": "gpt2", "position": "rope"})
    slots = c.position, c.norm, c.mlp, c.bias, c.tie_embeddings
    assert slots == ("rope", "layernorm", "gelu", "all", True)


@pytest.mark.parametrize("arch", ARCH)
def test_named_architectures_train(arch):
    arm = dict(arch=arch, n_embd=32, n_experts=4, top_k=2)
    test_gradient_reaches_every_parameter_and_the_first_loss_is_right("gpt2", arm)


# ---------------------------------------------------------------- gate 1: bite


# Which parameters a key may add, drop or reshape.
OF_ATTENTION = ("mixer", "head_dim", "qk_norm", "n_kv_head", "attn_extra", "conv")
WHERE = dict.fromkeys(OF_ATTENTION, "attn")
WHERE |= dict(mlp="mlp", mlp_width="mlp", ffn_dim_multiplier="mlp")
WHERE |= dict(position="wpe", relative_clip="wpe", norm="norm", block="norm", embed_norm="norm_e")
WHERE |= dict(tie_embeddings="lm_head", residual="residual", bias="", low_rank="")


@gate
def test_bites(base, arm):
    """Switching the part on changes the logits, and of the parameters only what it should."""
    plain, swapped = config(base), config(base, arm)
    if plain == swapped or arm is CORNER:
        pytest.skip("this is the base itself")
    before, after = randomised(plain), randomised(swapped)
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    shared = old.keys() & new.keys()
    reshaped = {key for key in shared if old[key].shape != new[key].shape}
    for key in old.keys() ^ new.keys() | reshaped:
        assert any(slot in WHERE and WHERE[slot] in key for slot in arm), f"{key} changed"
    with torch.no_grad():
        for key in shared - reshaped:
            new[key].copy_(old[key])
    x = tokens(plain)
    assert not torch.allclose(before(x)[0], after(x)[0], atol=1e-6)


def test_a_dead_switch_would_be_seen(monkeypatch):
    """Rotation that is skipped, as in a published "NoPE = RoPE" result, fails the gate above."""
    monkeypatch.setitem(POSITION, "rope", POSITION["none"])
    with pytest.raises(AssertionError):
        test_bites("llama", dict(position="none"))


# ---------------------------------------------------------------- gates 2 and 3: causality, cache


def check_causality(c):
    """To the last bit, but for a mixture of experts: another token in the future may send another
    number of rows through an expert, whose product then rounds otherwise, by 1e-14 in float64."""
    model, x = randomised(c), tokens(c)
    changed = x.clone()
    t = c.block_size // 2
    changed[:, t] = (changed[:, t] + 1) % c.vocab_size
    before, after = model(x)[0], model(changed)[0]
    same = torch.equal
    if getattr(c, "mlp", "").startswith("moe"):
        same = lambda a, b: close(a, b, 1e-14)
    assert same(before[:, :t], after[:, :t]), "a token sees the future"
    assert not torch.equal(before[:, t:], after[:, t:])


def check_cache(c, cuts=None):
    """Prefill, single tokens and chunks give the logits of the full forward pass, also past
    block_size where the model has positions for it."""
    if cuts is None:
        learned = getattr(c, "position", "") == "learned" or isinstance(c, CORNERS["gpt2"][0])
        T = c.block_size if learned else c.block_size + 9
        cuts = sorted({0, 7, 8, 9, 10, 17, *range(18, T + 1, 2 if T % 2 else 1), T})
    model, x = randomised(c), tokens(c, T=cuts[-1])
    full, cache = model(x)[0], KVCache()
    pieces = [model(x[:, a:b], cache=cache)[0] for a, b in itertools.pairwise(cuts)]
    assert close(torch.cat(pieces, 1), full)
    assert close(model(x[:, :9], cache=KVCache(), last_only=True)[0], full[:, 8:9])


@gate
def test_causality(base, arm):
    check_causality(config(base, arm))


@gate
def test_cache(base, arm):
    check_cache(config(base, arm))


@gate
def test_ragged_batch_is_one_at_a_time(base, arm):
    c = config(base, arm)
    model, x = randomised(c), tokens(c)
    padded = torch.cat((x[0, :4], x[1, :6]))  # the second row has 4 tokens of padding
    cache, idx = KVCache(pad=torch.tensor([0, 4])), torch.stack((x[0, :10], padded))
    first = model(idx, cache=cache)[0]
    then = model(torch.stack((x[0, 10:12], x[1, 6:8])), cache=cache)[0]
    for row, pad in ((0, 0), (1, 4)):
        alone = model(x[row : row + 1, : 12 - pad])[0][0]
        assert close(torch.cat((first[row, pad:], then[row])), alone)


@gate
def test_rewinding_forgets(base, arm):
    """Reading, going back and reading something else is the same as having read that at once."""
    c = config(base, arm)
    model, x = randomised(c), tokens(c)
    for pad in (None, torch.tensor([0, 3])):
        cache = KVCache(pad, spare=4)
        model(x[:, :9], cache=cache)
        for wrong in (x[:, 12:16], x[:, 20:21]):
            model(wrong, cache=cache)
            cache.rewind(9)
        got = model(x[:, 9:14], cache=cache)[0]
        expected = model(x[:, :14], cache=KVCache(pad))[0]
        assert close(got, expected[:, 9:])


def test_wrong_masks_would_be_seen(monkeypatch):
    """None at all, as in a guide's grouped-query attention, and a window that is off by one."""

    def everything(self, q, k, v, qpos, kpos, mask, bias):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with monkeypatch.context() as patch:
        patch.setattr(attention.Attention, "attend", everything)
        with pytest.raises(AssertionError, match="sees the future"):
            check_causality(config("llama", dict(n_kv_head=2, embed_norm=True)))
    wider = lambda qpos, kpos, window=0, group=0: visible(qpos, kpos, window + bool(window), group)
    monkeypatch.setattr(attention, "visible", wider)
    with pytest.raises(AssertionError):
        check_cache(config("llama", dict(window=5)))


# ---------------------------------------------------------------- windows


FLEX = [
    dict(window=5, full_every=2),
    dict(block_local=6),
    dict(position="alibi"),
    dict(attn_softcap=1.5),
    dict(position="alibi", window=7, attn_softcap=2.0, n_kv_head=2),
    dict(n_kv_head=1, window=9),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("arm", FLEX, ids=name)
def test_flex_attention_is_attention(arm, monkeypatch):
    """What a compiled model does on a GPU, here in FlexAttention's own eager form."""
    model = randomised(config("llama", arm, n_embd=64)).float()
    idx, calls, real = tokens(model.config), [], attention.flex_attention

    def counted(*args, **more):
        calls.append(1)
        return real(*args, **more)

    with torch.no_grad():
        plain = model(idx, idx)[0]
        monkeypatch.setattr(attention, "compiled_on_gpu", lambda x: True)
        monkeypatch.setattr(attention, "flex_attention", counted)
        torch.testing.assert_close(model(idx, idx)[0], plain, atol=1e-4, rtol=1e-4)
    assert len(calls) == (1 if "full_every" in arm else 2)


@pytest.mark.parametrize(
    "arm",
    [{}, dict(position="relative"), dict(dropout=0.5, window=5), dict(window=5, n_embd=16)],
    ids=name,
)
def test_what_flex_attention_does_not_do_is_left_to_attention(arm, monkeypatch):
    monkeypatch.setattr(attention, "compiled_on_gpu", lambda x: True)
    monkeypatch.setattr(attention, "flex_attention", None)
    model = Variant(config("llama", dict(n_embd=64) | arm))
    assert model(tokens(model.config))[0].isfinite().all()


def test_a_windows_memory_grows_with_the_text():
    """A short prompt takes no more than it would without the window, and the text is the same."""
    c = config("llama", dict(window=1000, block_size=2000))
    model, x, cache, sizes = randomised(c), tokens(c, 2, 300), KVCache(spare=7), []
    for a, b in itertools.pairwise([0, 20, 21, 90, 91, 200, 300]):
        model(x[:, a:b], cache=cache)
        sizes.append(cache.size() // (2 * 2 * c.n_layer * c.n_embd * 8))  # tokens that have room
    assert sizes == [64, 64, 180, 180, 400, 400]
    cache.rewind(150)  # not full yet: any number of tokens can be dropped
    assert close(model(x[:, 150:], cache=cache)[0], model(x)[0][:, 150:])


# ---------------------------------------------------------------- combinations of slots


PAIRS = [
    {a: v} | {b: w}
    for (a, vs), (b, ws) in itertools.combinations(SLOTS.items(), 2)
    for v in vs
    for w in ws
]
TINY = dict(block_size=10, n_layer=1, n_head=2, n_embd=8, vocab_size=11, window=3)


def tiny(base, arm):
    """The smallest configuration of an arm, or None where its words do not go together."""
    scaled = SCALED if arm.get("rope_scaling", "none") != "none" else {}
    mixer = MIXER[arm.get("mixer", "attention")]
    window = TINY["window"] if "window" in mixer.reads else 0
    if "q and k" not in mixer.acted_on:
        scaled = dict(position="sinusoidal")  # it has no place for others
    try:
        return config(base, TINY | dict(window=window) | scaled | arm)
    except UserError:
        return None


@bases
@pytest.mark.slow
def test_all_pairs_of_words(base):
    pairs = [c for c in (tiny(base, arm) for arm in PAIRS) if c]
    assert len(pairs) > 0.85 * len(PAIRS)  # few are refused: rope and qk_norm need attention
    for c in pairs:
        check_causality(c)
        check_cache(c, [0, 5, 6, 10])


# ---------------------------------------------------------------- gates 4 and 5: gradients, loss


@gate
def test_gradient_reaches_every_parameter_and_the_first_loss_is_right(base, arm):
    c = config(base, arm)
    torch.manual_seed(0)
    model = make(c)
    x, y = tokens(c, 8), tokens(c, 8, seed=2)
    logits, loss = model(x, y)
    if getattr(c, "norm", "") != "none":  # without norms nothing holds the size of the logits
        assert abs(loss.item() - math.log(c.vocab_size) - logits.var(-1).mean().item() / 2) < 0.1
    loss.backward()
    # The strengths of `hyper` multiply numbers that are 0 until the first step.
    later = {key for key, _ in model.named_parameters() if key.endswith(".strength")}
    named = dict(model.named_parameters())
    for key, p in named.items():
        assert p.grad is not None and (p.grad.abs().max() > 0 or key in later), key
    blocks = model.blocks.named_modules(prefix="blocks")
    maps = {f"{key}.weight" for key, module in blocks if isinstance(module, torch.nn.Linear)}
    experts = {key for key in named if key.endswith((".gate", ".up", ".down"))}
    assert muon_names(model) == maps | experts
    groups = parameter_groups(model, 0.1)
    assert sorted(key for group in groups for key in group["names"]) == sorted(named)
    decaying = {key for group in groups if group["weight_decay"] for key in group["names"]}
    assert not any(key.endswith("bias") or named[key].dim() < 2 for key in decaying)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(12):
        optimizer.zero_grad()
        after = model(x[:1], y[:1])[1]
        after.backward(), optimizer.step()
    assert after < loss - 0.5
    assert all(named[key].grad.abs().max() > 0 for key in later)


@gate
def test_every_parameter_has_exactly_one_initialiser(base, arm):
    """Each is written once: torch counts the writes. What is not written stays NaN."""
    model = make(config(base, arm))
    for p in model.parameters():
        p.data.fill_(math.nan)
    before = {key: p._version for key, p in model.named_parameters()}
    model.init_weights()
    for key, p in model.named_parameters():
        assert p.isfinite().all(), f"{key} has no initialiser"
        assert p._version == before[key] + 1, f"{key} is initialised twice"


def test_a_part_that_does_not_say_how_it_starts_is_refused(monkeypatch):
    class Foreign(MLP["gelu"]):
        def __init__(self, config):
            super().__init__(config)
            self.extra = torch.nn.Linear(2, 2)

    monkeypatch.setitem(MLP, "foreign", Foreign)
    with pytest.raises(TypeError, match="Linear does not say .*use `linear`"):
        Variant(config("gpt2", dict(mlp="foreign")))


# ---------------------------------------------------------------- gate 6: the papers' formulas


def check_position(word):
    """What it does to the embedding and to the scores; rope's angles are computed in float32."""
    formula, D, pos = references.reference("position", word), 4, torch.arange(3, 12)[None]  # (1, T)
    for H, fraction in ((4, 1.0), (6, 0.5 if word == "rope" else 1.0)):
        sizes = dict(n_head=H, n_embd=H * D, relative_clip=3, rope_fraction=fraction)
        c = config("llama", dict(position=word) | sizes)
        scheme = randomised(c).wpe
        x, (q, k) = torch.randn(1, 9, H * D).double(), torch.randn(2, 1, H, 9, D).double()
        expected = [formula.embed(scheme, x[0, t], int(pos[0, t])) for t in range(9)]
        assert close(scheme.embed(x, pos)[0], torch.stack(expected), 1e-6)

        turned_q, turned_k = scheme.rotate(q, k, scheme.angles(pos))
        scores = turned_q @ turned_k.transpose(2, 3) / D**0.5  # (1, H, T, T)
        bias = scheme.bias(q, pos, pos)
        scores = scores if bias is None else scores + bias
        for h, i in itertools.product(range(H), range(9)):
            for j in range(i + 1):
                places = int(pos[0, i]), int(pos[0, j])
                expected = formula.score(scheme, q[0, h, i], k[0, h, j], *places)
                expected = expected + formula.bias(scheme, q[0, h, i], h, *places)
                assert abs(scores[0, h, i, j] - expected) < 1e-5 * max(1, abs(expected))


def check_norm(word):
    formula, x = references.reference("norm", word), torch.randn(2, 5, 16, dtype=torch.float64)
    for base in CORNERS:
        norm = randomised(config(base, dict(norm=word))).norm_f
        for training in (False, True):
            assert close(norm.train(training)(x), formula(norm, x), 1e-9)


def check_block(word):
    formula = references.reference("block", word)
    block = randomised(config("gpt2", dict(block=word))).blocks[0]
    x, norms = torch.randn(1, 5, 16).double(), [getattr(block, name) for name in block.norms]
    block.attn.forward = lambda h, where, cache: h * 2 + 1
    assert close(block(x, None), formula(x, lambda h: h * 2 + 1, block.mlp, *norms), 1e-9)


def check_mlp(word):
    formula, x = references.reference("mlp", word), torch.randn(2, 3, 16, dtype=torch.float64)
    mlp = randomised(config("gpt2", arm_of("mlp", word))).blocks[0].mlp
    assert close(mlp(x), formula(mlp, x), 1e-9)


def check_mixer(word, arm=None):
    formula = references.reference("mixer", word)
    model = randomised(config("llama", arm or arm_of("mixer", word)))
    pos, idx = torch.arange(6)[None], tokens(model.config, T=6)
    where = Where(model.wpe, pos, model.wpe.angles(pos), idx, {})
    for block in model.blocks:  # what the first layer leaves, the second one uses
        mixer, x = block.attn, torch.randn(2, 6, 16, dtype=torch.float64)
        assert close(mixer(x, where), formula(mixer, x, where), 1e-5)


def check_residual(word):
    formula = references.reference("residual", word)
    model = randomised(config("gpt2", dict(residual=word)))
    x, first = torch.randn(2, 1, 5, 16).double()
    where = SimpleNamespace(first=first)
    sublayers = enumerate((torch.sin, torch.exp))
    for block, (number, sublayer) in itertools.product(model.blocks, sublayers):
        residual = block.residual
        stream = residual.spread(x)
        if stream.dim() == 4:  # streams that have come apart
            stream = stream * torch.linspace(0.5, 2, stream.size(2)).double()[:, None]
        h, kept = residual.read(stream, number, where)
        after = residual.add(kept, sublayer(h))
        for t in range(5):
            expected = formula(residual, stream[0, t], number, first[0, t], sublayer)
            assert close(after[0, t], expected, 1e-9)


def check_rope_scaling(word):
    formula, D = references.reference("rope_scaling", word), 32
    for theta, original in ((10000.0, 16), (500.0, 900)):
        more = dict(rope_theta=theta, rope_original=original)
        c = config("llama", arm_of("rope_scaling", word) | more)
        freq, factor = ROPE_SCALING[word](torch.arange(0, D, 2) / D, c)
        expected = [formula(i, D, theta, c.rope_factor, original) for i in range(D // 2)]
        assert freq.tolist() == pytest.approx([f for f, _ in expected], rel=2e-5)
        assert factor == pytest.approx(expected[0][1])


WORDS = [(slot, word) for slot, words in variant.SLOTS.items() for word in words]


@torch.no_grad()
@pytest.mark.parametrize("slot, word", WORDS)
def test_a_word_is_its_formula(slot, word):
    """Of every word, also of those without a reference, which this names."""
    globals()[f"check_{slot}"](word)


MIXED = [
    dict(n_kv_head=2, head_dim=6),
    dict(window=3),
    dict(block_local=3),
    dict(position="relative", attn_softcap=1.5, qk_norm="head", head_dim=3),
    dict(position="rope", attn_softcap=1.5, qk_norm="full", n_kv_head=2),
    dict(attn_extra="sink", window=3, n_kv_head=2),
    dict(nope_every=2, position="rope"),
    dict(attn_extra="value_residual,value_embed", n_kv_head=2),
    dict(attn_extra="xsa,gate_element", n_kv_head=2, head_dim=6),
    dict(attn_extra="gate_head,sink", attn_softcap=1.5),
    dict(conv=4, attn_extra="gate_head", n_kv_head=2),
    dict(mixer="differential", n_kv_head=2, head_dim=6),
    dict(mixer="mla", position="none", rope_head_dim=4, latent_rank=7),
    dict(mixer="mla", head_dim=6),
]


@torch.no_grad()
@pytest.mark.parametrize("arm", MIXED, ids=name)
def test_a_mixer_with_its_keys_is_its_formula(arm):
    check_mixer(arm.get("mixer", "attention"), arm)


def test_every_extra_is_compared_with_its_formula():
    compared = ",".join(arm.get("attn_extra", "none") for arm in MIXED).split(",")
    assert set(compared) == set(attention.EXTRA), "add an arm with the new word to MIXED"


def test_a_word_without_a_reference_is_named(monkeypatch):
    monkeypatch.setitem(MLP, "mish", MLP["gelu"])
    with pytest.raises(AssertionError, match=r"no reference for MLP\['mish'\]: add one to tests/"):
        test_a_word_is_its_formula("mlp", "mish")


def test_low_rank_starts_like_a_full_matrix():
    torch.manual_seed(0)
    c = config("llama", dict(low_rank=32, n_embd=256))
    blocks = Variant(c).blocks
    for layer, expected in ((blocks[0].attn.wq, 0.02), (blocks[0].mlp.down, 0.01)):
        product = layer.v.weight @ layer.u.weight
        assert product.std().item() == pytest.approx(expected, rel=0.05)


# ---------------------------------------------------------------- keys


def test_options_are_frozen():
    """A new option is a cost to every reader: argue for it, then add it here. Each stands for what
    published models, or the papers' own sizes, cannot be said without."""
    assert " ".join(keys(VariantConfig)) == (
        "block_size vocab_size n_layer n_head n_kv_head n_embd head_dim dropout attn_dropout "
        "tie_embeddings bias "
        "position norm block mlp mixer mlp_width multiple_of ffn_dim_multiplier norm_eps "
        "rope_theta rope_fraction rope_scaling rope_factor rope_original relative_clip window "
        "full_every block_local qk_norm attn_softcap logit_softcap low_rank embed_norm "
        "residual streams attn_extra nope_every "
        "n_experts top_k shared_experts shared_gate moe_balance latent_rank rope_head_dim "
        "state_size expand conv"
    )
    assert len(keys(VariantConfig)) <= 48
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
        (dict(full_every=2), "full_every=2 means nothing to window=0"),
        (dict(position="rope", n_head=16), "rope rotates pairs, and n_embd=16 over n_head=16"),
        (dict(norm="rmsnorm", bias="norm"), "norm=rmsnorm has no bias"),
        (dict(mixer="mla", bias="qkv"), "bias=qkv means nothing to mixer=mla"),
        (dict(attn_extra="sink,none"), "attn_extra=sink,none contradicts or repeats itself"),
        (dict(attn_extra="gate_head,gate_element"), "one gate at most"),
        (dict(mlp="moe", n_experts=2, top_k=3), "top_k=3 is above n_experts=2"),
        (dict(mlp="moe", top_k=1), "a router learns nothing.*choose top_k=2"),
        (dict(mlp="moe", low_rank=3), "low_rank=3 means nothing to mlp=moe"),
        (dict(mlp="none"), "mlp=none leaves a norm of block=pre without use"),
        (dict(mixer="mla", rope_head_dim=3, position="rope"), "rope_head_dim=3 is odd"),
        (dict(mixer="mla", position="alibi"), "scores, which mixer=mla does not have"),
        (dict(mixer="mamba2", position="rope"), "acts on q and k, which mixer=mamba2 does not"),
        (dict(mixer="mamba2", window=4), "window=4 means nothing to mixer=mamba2"),
        (dict(mixer="mamba2", n_kv_head=1), "n_kv_head=1 means nothing to mixer=mamba2"),
        (dict(mixer="attention,attention,mla"), "more mixers than n_layer=2"),
        (dict(mixer="differential", n_kv_head=1), "n_kv_head=1 is odd"),
        (dict(mixer="differential", attn_extra="sink"), "attn_extra=sink means nothing to mixer="),
    ],
    ids=str,
)
def test_impossible_pairs_are_refused_in_a_sentence(arm, words):
    with pytest.raises(UserError, match=words):
        config("gpt2", arm)
