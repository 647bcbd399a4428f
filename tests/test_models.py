"""
The two models, pinned: sizes, the gates (causality, cache, ragged batches), the same numbers as the
parts of parts/, rotary positions, loss, dropout, initialisation.

    python -m pytest tests/test_models.py
"""

import difflib
import math

import pytest
import torch
from torch.nn import functional as F

import model_llama
from common.commands import ROOT
from common.configurator import build
from helpers import gates
from helpers.models import random_weights
from helpers.variants import CORNER, SIZES, bases, config, randomised, tokens
from model import GPT, GPTConfig
from model_llama import Llama, LlamaConfig, rotary, rotate
from parts.architectures import CORNERS, make
from parts.cache import KVCache
from parts.variant import Variant


def count(module):
    return sum(p.numel() for p in module.parameters())


def on_meta(model_class, config):
    with torch.device("meta"):
        return model_class(config)


def test_gpt2_124m():
    assert count(on_meta(GPT, GPTConfig())) == 124_439_808
    # without biases: 12 blocks of 2 norms, 4 C x C, C x 4C and 4C x C, and the last norm
    biases = (12 * (2 + 4 + 4 + 1) + 1) * 768
    assert count(on_meta(GPT, GPTConfig(bias=False))) == 124_439_808 - biases


def test_llama_7b():
    sizes = LlamaConfig(vocab_size=32000, n_layer=32, n_head=32, n_embd=4096)
    assert count(on_meta(Llama, sizes)) == 6_738_415_616


@pytest.mark.parametrize(
    "n_embd, multiplier, multiple_of, width",
    [
        (4096, None, 256, 11008),  # LLaMA 7B
        # LLaMA 2 70B; the multiplier before the two thirds would give 32768
        (8192, 1.3, 4096, 28672),
        (4096, 1.3, 1024, 14336),  # LLaMA 3 8B
        (48, None, 7, 133),  # 128 rounded up
        (48, None, 1, 128),
    ],
)
def test_mlp_width(n_embd, multiplier, multiple_of, width):
    sizes = dict(n_head=8, n_embd=n_embd, ffn_dim_multiplier=multiplier, multiple_of=multiple_of)
    mlp = on_meta(model_llama.MLP, LlamaConfig(**sizes))
    assert mlp.gate.weight.shape == mlp.up.weight.shape == (width, n_embd)
    assert mlp.down.weight.shape == (n_embd, width)


@bases
def test_the_readable_model_passes_the_gates(base):
    gates.check(base, CORNER)


@bases
def test_corner_is_the_readable_model_to_the_last_bit(base):
    config_class, model_class = CORNERS[base]
    torch.manual_seed(3)
    corner = model_class(build(config_class, SIZES))
    torch.manual_seed(3)
    variant = Variant(config(base))
    differ = "differ from what parts/ gives with the same words"
    assert list(corner.state_dict()) == list(variant.state_dict())
    for a, b in zip(corner.state_dict().values(), variant.state_dict().values(), strict=True):
        assert torch.equal(a, b), f"the first values {differ}"  # of one seed
    with torch.no_grad():
        for a, b in zip(corner.parameters(), variant.parameters(), strict=True):
            b.copy_(torch.nn.init.normal_(a, 0.0, 0.3))
    c = config(base)
    x = tokens(c)
    y = tokens(c, seed=2)
    corner_logits, corner_loss = corner(x, y)
    logits, loss = variant(x, y)
    corner_loss.backward()
    loss.backward()
    assert torch.equal(corner_logits, logits), f"the logits {differ}"
    assert torch.equal(corner_loss, loss), "the loss is not what parts/ gives with the same words"
    for a, b in zip(corner.parameters(), variant.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), f"the gradients {differ}"
    own = KVCache()
    other = KVCache()
    for piece in (x[:, :7], x[:, 7:8], x[:, 8:20]):
        cached = corner(piece, cache=own)[0]
        assert torch.equal(cached, variant(piece, cache=other)[0]), f"with a cache, logits {differ}"


def test_rmsnorm_is_computed_in_fp32():
    norm = random_weights(model_llama.RMSNorm(768, 1e-5), 1.0).bfloat16()
    x = 30 * torch.randn(50, 768).bfloat16()
    naive = lambda x, weight: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
    in_fp32 = naive(x.float(), norm.weight.float())
    step = in_fp32.abs() * 2.0**-8  # the most that one rounding to bf16 takes away
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert ((y.float() - in_fp32).abs() <= step).all()
    in_bf16 = naive(x, norm.weight).float()
    assert ((in_bf16 - in_fp32).abs() > step).any(), "computed in bf16 it would not pass"


@pytest.mark.parametrize("theta", [10000.0, 100.0])
def test_rope_is_metas_complex_form(theta):
    """Meta rotates neighbouring pairs (x_2i, x_2i+1) as complex numbers, we rotate (x_i, x_i+D/2).
    The scores are the same once the rows of wq and wk are sorted within each head: even rows first,
    then odd rows."""
    torch.manual_seed(0)
    sizes = LlamaConfig(n_embd=48, n_head=6, n_kv_head=2, rope_theta=theta)
    attn = random_weights(model_llama.Attention(sizes).double(), 0.3)
    x = torch.randn(2, 9, 48, dtype=torch.float64)
    y = attn(x, rotary(torch.arange(9)[None], theta, 8))
    # our rows in Meta's order
    interleaved = lambda w: w.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
    frequency = theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = torch.outer(torch.arange(9, dtype=torch.float64), frequency)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # (T, 1, D/2) complex

    def metas(wq, wk):
        q = (x @ wq.T).unflatten(-1, (6, 4, 2))  # (B, T, H, D/2, 2)
        k = (x @ wk.T).unflatten(-1, (2, 4, 2))
        q, k = (
            torch.view_as_real(torch.view_as_complex(z) * turn).flatten(-2).transpose(1, 2)
            for z in (q, k)
        )
        v = attn.wv(x).unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attn.wo(mixed.transpose(1, 2).flatten(2))

    wq, wk = attn.wq.weight, attn.wk.weight
    off = (y - metas(interleaved(wq), interleaved(wk))).abs().max()
    assert off < 1e-5, "attention is not Meta's: rotation, mask or groups"  # our angles are fp32
    assert (y - metas(wq, wk)).abs().max() > 0.1, "without the permutation it is another model"


def test_rope_of_a_cast_model_is_fp32():
    cos, sin = rotary(torch.arange(3000)[None], 10000.0, 8)
    assert cos.dtype == sin.dtype == torch.float32
    # the last angle: 2999 radians would be 2992 or 3008 in bf16
    assert abs(cos[0, 0, 2999, 0].double() - math.cos(2999)) < 1e-3
    assert rotate(torch.ones(1, 1, 3000, 8).bfloat16(), cos, sin).dtype == torch.bfloat16
    names = make(config("llama", CORNER)).state_dict()
    assert not any("rope" in name or "freq" in name for name in names), "no table in checkpoints"


def test_gpt2_refuses_past_block_size():
    c = config("gpt2", CORNER)
    made, cache = make(c), KVCache()
    with pytest.raises(ValueError, match="25 .*24"):
        made(tokens(c, 1, 25))
    made(tokens(c, 1, 23), cache=cache)
    with pytest.raises(ValueError, match="26 .*24"):
        made(tokens(c, 1, 3), cache=cache)
    made(tokens(c, 1, 1), cache=cache)  # nothing was lost


@bases
def test_loss_is_the_mean_over_targets_that_count(base):
    c = config(base, CORNER)
    made, idx, targets = randomised(c), tokens(c, 3, 9), tokens(c, 3, 9, seed=2)
    targets[0], targets[1, 2:5] = -1, -1
    loss = made(idx, targets)[1]
    logp = made(idx)[0].log_softmax(-1)
    counted = [(b, t) for b in range(3) for t in range(9) if targets[b, t] >= 0]
    expected = sum(-logp[b, t, targets[b, t]] for b, t in counted) / 15
    assert len(counted) == 15 and abs(loss - expected) < 1e-5


@bases
def test_dropout_acts_where_gpt2_had_it(base, monkeypatch):
    """On the embedding, the attention's weights, and what each sublayer adds."""
    c, real, calls = config(base, CORNER, dropout=0.25), F.scaled_dot_product_attention, []
    made = make(c)
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **kw: calls.append(("weights", kw["dropout_p"])) or real(*args, **kw),
    )
    for name, module in made.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda m, args, out, name=name: calls.append((name, m.p if m.training else 0.0))
            )
    for p in (0.25, 0.0):
        calls.clear()
        made.train(p > 0)(tokens(c))
        assert calls == [("dropout", p)] + [
            (place, p)
            for i in range(2)
            for place in ("weights", f"blocks.{i}.attn.dropout", f"blocks.{i}.mlp.dropout")
        ]


@bases
def test_initialisation(base):
    sizes = dict(n_layer=8, n_embd=64, vocab_size=999, block_size=100)
    torch.manual_seed(0)
    made = make(config(base, CORNER, tie_embeddings=False, **sizes))
    kinds = set()
    for name, p in made.named_parameters():
        if p.dim() == 2:
            residual = name.endswith(("attn.wo.weight", "mlp.down.weight"))
            expected = 0.02 / math.sqrt(16) if residual else 0.02
            five_errors = 5 / math.sqrt(2 * p.numel())
            assert abs(p.std() / expected - 1) < five_errors, name
            assert abs(p.mean()) < 5 * expected / math.sqrt(p.numel()), name
            kinds.add(residual)
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
    assert kinds == {True, False}


def test_the_two_files_stay_close():
    """`diff model.py model_llama.py` lists what LLaMA changed: it must not grow by accident."""
    a, b = (
        (ROOT / name).read_text("utf-8").splitlines() for name in ("model.py", "model_llama.py")
    )
    changed = [line for line in difflib.ndiff(a, b) if line[0] in "+-"]
    assert len(changed) <= 136
    assert len(a) <= 170 and len(b) <= 200
