"""Every word computes the formula of its paper, which references.py writes naively."""

import itertools
from types import SimpleNamespace

import formulas
import pytest
import torch
from mixer_references import with_conv

from helpers.variants import arm_of, close, config, name, randomised, tokens, with_keys
from parts.architectures import CORNERS
from parts.position import Shared, Where
from parts.slots import ROPE_SCALING, SLOTS
from parts.variant import Variant


def check_embed(word):
    """With rows as wide as the model, and with narrower ones."""
    formula = formulas.reference("embed", word)
    for width in (None, 5):
        model = randomised(config("llama", dict(embed=word, ngram_rows=7, ngram_width=width)))
        idx = tokens(model.config, T=9)
        own = model.wte(idx)
        found = model.embed(own, idx)
        for b, t in itertools.product(range(2), range(9)):
            expected = formula(model.embed, own[b, t], idx[b, : t + 1].tolist())
            assert close(found[b, t], expected, 1e-9)


def check_position(word):
    """What it does to the embedding and to the scores; rope's angles are computed in float32."""
    formula, D = formulas.reference("position", word), 4
    pos = torch.tensor([[0, 1, 2, 5, 9, 16, 17, 60, 300]])  # (1, T)
    for H, fraction in ((4, 1.0), (6, 0.5 if word == "rope" else 1.0)):
        sizes = dict(n_head=H, n_embd=H * D, relative_clip=3, rope_fraction=fraction)
        sizes |= dict(block_size=301)
        c = config("llama", dict(position=word) | sizes)
        scheme = randomised(c).wpe
        x, (q, k) = torch.randn(1, 9, H * D).double(), torch.randn(2, 1, H, 9, D).double()
        expected = [formula.embed(scheme, x[0, t], int(pos[0, t])) for t in range(9)]
        assert close(scheme.embed(x, pos)[0], torch.stack(expected), 1e-6)

        turned_q, turned_k = (scheme.turn(x, scheme.angles(pos)) for x in (q, k))
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
    formula, x = formulas.reference("norm", word), torch.randn(2, 5, 16, dtype=torch.float64)
    for base in CORNERS:
        norm = randomised(config(base, dict(norm=word))).norm_f
        for training in (False, True):
            assert close(norm.train(training)(x), formula(norm, x), 1e-9)


def check_block(word):
    formula = formulas.reference("block", word)
    block = randomised(config("gpt2", dict(block=word))).blocks[0]
    x = torch.randn(1, 5, 16).double()
    norms = [getattr(block, f"norm{name}", None) for name in ("1", "2", "1_out", "2_out")]
    norms = [norm for norm in norms if norm is not None]
    block.attn.forward = lambda h, *rest: h * 2 + 1
    assert close(block(x, None), formula(block, x, block.attn, block.mlp, *norms), 1e-9)


def check_mlp(word):
    formula, x = formulas.reference("mlp", word), torch.randn(2, 3, 16, dtype=torch.float64)
    mlp = randomised(config("gpt2", arm_of("mlp", word))).blocks[0].mlp
    assert close(mlp(x), formula(mlp, x), 1e-9)


def check_mixer(word, arm=None):
    if arm is None:
        check_mixer(word, with_keys(word))
    formula = formulas.reference("mixer", word)
    model = randomised(config("llama", arm or arm_of("mixer", word)))
    pos, idx = torch.arange(6)[None], tokens(model.config, T=6)
    where = Where(model.wpe, pos, model.wpe.angles(pos), idx, Shared())
    for block in model.blocks:  # what the first layer leaves, the second one uses
        mixer, x = block.attn, torch.randn(2, 6, 16, dtype=torch.float64)
        assert close(mixer(x, where), formula(mixer, x, where), 1e-5)


def check_residual(word):
    """Each sublayer of a model, after those before it."""
    formula = formulas.reference("residual", word)
    model = randomised(config("gpt2", dict(residual=word)))
    x, first = torch.randn(2, 1, 5, 16).double()
    where = SimpleNamespace(first=first)
    stream = model.blocks[0].residual.spread(x)
    sublayers = enumerate((torch.sin, torch.cos))
    for block, (number, sublayer) in itertools.product(model.blocks, sublayers):
        residual = block.residual
        before = [of_token(stream, t) for t in range(5)]
        h, kept = residual.read(stream, number, where)
        stream = residual.add(kept, sublayer(h))
        for t in range(5):
            expected = formula(residual, before[t], number, first[0, t], sublayer)
            after = of_token(stream, t)
            assert len(after) == len(expected)
            assert all(close(a, b, 1e-9) for a, b in zip(after, expected, strict=True))


def of_token(stream, t):
    """The stream of one token: a tensor, or a list of what sublayers wrote (and its norm)."""
    if isinstance(stream, list):
        return [(h[0] if isinstance(h, tuple) else h)[0, t] for h in stream]
    return stream[0, t]


def check_rope_scaling(word):
    formula, D = formulas.reference("rope_scaling", word), 32
    for theta, original in ((10000.0, 16), (500.0, 900), (500.0, 9000)):
        more = dict(rope_theta=theta, rope_original=original)
        c = config("llama", arm_of("rope_scaling", word) | more)
        freq, factor = ROPE_SCALING[word](c)(torch.arange(0, D, 2) / D)
        expected = [formula(i, D, theta, c.rope_factor, original) for i in range(D // 2)]
        assert freq.tolist() == pytest.approx([f for f, _ in expected], rel=2e-5)
        assert factor == pytest.approx(expected[0][1])


def check_attn_extra(word):
    formulas.reference("attn_extra", word)
    check_mixer("attention", dict(attn_extra=word, n_kv_head=2))


WORDS = [(slot, word) for slot, words in SLOTS.items() for word in words]


@torch.no_grad()
@pytest.mark.parametrize("slot, word", WORDS)
def test_a_word_is_its_formula(slot, word):
    """Of every word, also of those without a reference, which this names."""
    try:
        globals()[f"check_{slot}"](word)
    except AssertionError as error:
        raise AssertionError(f"{slot}={word} is not its formula in references.py") from error


MIXED = [
    dict(n_kv_head=2, head_dim=6),
    dict(block_local=3),
    dict(position="relative", attn_softcap=1.5, qk_norm="head", head_dim=3),
    dict(position="rope", attn_softcap=1.5, qk_norm="full", n_kv_head=2),
    dict(attn_extra="sink", window=3, n_kv_head=2),
    dict(nope_every=2, position="rope"),
    dict(attn_extra="value_residual,value_embed", n_kv_head=2),
    dict(attn_extra="xsa,gate_element", n_kv_head=2, head_dim=6),
    dict(attn_extra="gate_head,sink", attn_softcap=1.5),
    dict(conv=4, attn_extra="gate_head", n_kv_head=2),
    dict(conv_sites="queries,keys,values,output", n_kv_head=2, qk_norm="head", position="rope"),
    dict(conv=3, conv_sites="input,keys", qk_norm="full", head_dim=6),
    dict(kv_shared_by=2, n_kv_head=2, position="rope", attn_extra="xsa,sink", conv_sites="keys"),
    dict(kv_shared_by=2, n_layer=5, window=3),
    dict(mixer="differential", n_kv_head=2, head_dim=6),
    dict(mixer="mla", position="none", rope_head_dim=4, latent_rank=7),
    dict(mixer="mla", head_dim=6),
    dict(mixer="mla", rope_head_dim=8, rope_fraction=0.5),
]


@torch.no_grad()
@pytest.mark.parametrize("arm", MIXED, ids=name)
def test_a_mixer_with_its_keys_is_its_formula(arm):
    check_mixer(arm.get("mixer", "attention"), arm)


@torch.no_grad()
def test_convolutions_of_an_mlp_are_their_formula():
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    arm = dict(conv=3, conv_sites="mlp_input,mlp_inner,mlp_output")
    gated = randomised(config("llama", arm | dict(mlp="swiglu"))).blocks[0].mlp
    read = with_conv(gated.conv_in, x)
    gate = with_conv(gated.conv_gate, gated.gate(read))
    y = gated.down(gate / (1 + (-gate).exp()) * with_conv(gated.conv_up, gated.up(read)))
    assert close(gated(x), with_conv(gated.conv_out, y), 1e-9)

    plain = randomised(config("llama", arm | dict(mlp="relu"))).blocks[0].mlp
    up = with_conv(plain.conv_up, plain.up(with_conv(plain.conv_in, x)))
    assert close(plain(x), with_conv(plain.conv_out, plain.down(up.clamp(min=0))), 1e-9)


def test_low_rank_starts_like_a_full_matrix_and_numbers_as_in_their_papers():
    torch.manual_seed(0)
    c = config("llama", dict(low_rank=32, n_embd=256))
    blocks = Variant(c).blocks
    for layer, expected in ((blocks[0].attn.wq, 0.02), (blocks[0].mlp.down, 0.01)):
        product = layer.v.weight @ layer.u.weight
        assert product.std().item() == pytest.approx(expected, rel=0.05)
    model = Variant(config("llama", dict(norm="dyt", attn_extra="value_residual", residual="mhc")))
    names = ("norm_f.alpha", "blocks.1.attn.share", "blocks.1.residual.connections.0.strength")
    starts = [model.get_parameter(name).mean().item() for name in names]
    assert starts == pytest.approx([0.5, 0.5, 0.01])
    wide = dict(n_embd=256, vocab_size=300)
    model = Variant(config("llama", wide | dict(position="t5", attn_extra="value_embed")))
    spreads = [model.wpe.weight.std(), model.blocks[1].attn.value_table.std()]
    differential = Variant(config("llama", wide | dict(mixer="differential"))).blocks[1].attn
    spreads.append(torch.cat(differential.vectors()).std())
    for word in ("mla", "mamba2", "gated_delta"):  # what is added to the residual stream
        mixer = Variant(config("llama", wide | arm_of("mixer", word))).blocks[0].attn
        spreads.append(mixer.wo.weight.std())
    starts = [1 / 16, 0.02, 0.1, *[0.01] * 3]
    assert [spread.item() for spread in spreads] == pytest.approx(starts, rel=0.2)
