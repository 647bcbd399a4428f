"""The faster ways to compute attention: in blocks of a window, and by FlexAttention."""

import pytest
import test_costs as cost_gates
import torch

from helpers.variants import close, config, name, randomised, tokens
from parts import fast_attention
from parts.attention import Attention
from parts.cache import KVCache
from parts.variant import Variant

FLEX = [
    dict(window=5, full_every=2, attn_softcap=2.0),  # another mask in each layer
    dict(block_local=6),
    dict(position="alibi", window=7, attn_softcap=2.0, n_kv_head=2),
    dict(window=5, attn_extra="sink"),
    dict(window=5, mixer="differential"),
    dict(window=5, qk_norm="head"),
    dict(window=5, attn_extra="value_residual"),
    dict(window=5, attn_extra="value_embed"),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("autocast", [False, True])  # which makes q, k and v of different formats
@pytest.mark.parametrize("arm", FLEX, ids=name)
def test_flex_attention_is_attention(arm, autocast, monkeypatch):
    """What a compiled model does on a GPU, here in FlexAttention's own eager form."""
    model = randomised(config("llama", arm, n_embd=64)).float()
    idx, calls, real = tokens(model.config), [], fast_attention.flex_attention

    def counted(*args, **more):
        calls.append(1)
        return real(*args, **more)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = model(idx, idx)[0]
        monkeypatch.setattr(fast_attention, "compiled_on_gpu", lambda x: True)
        monkeypatch.setattr(fast_attention, "flex_attention", counted)
        assert close(model(idx, idx)[0], plain, 0.05 if autocast else 1e-4)
    known = not {"sink", "differential"} & {*arm.values()}  # scores that it can compute
    assert len(calls) == (2 if known else 0)


@pytest.mark.parametrize(
    "arm",
    [{}, dict(position="relative"), dict(dropout=0.5, window=5), dict(window=5, n_embd=16)],
    ids=name,
)
def test_what_flex_attention_does_not_do_is_left_to_attention(arm, monkeypatch):
    monkeypatch.setattr(fast_attention, "compiled_on_gpu", lambda x: True)
    monkeypatch.setattr(fast_attention, "flex_attention", None)
    model = Variant(config("llama", dict(n_embd=64) | arm))
    assert model(tokens(model.config))[0].isfinite().all()


BLOCKS = [
    dict(window=1),
    dict(block_local=6),
    dict(window=5, full_every=2),
    dict(window=5, n_kv_head=1, position="learned", head_dim=6),
    dict(window=7, n_kv_head=2, attn_softcap=2.0, attn_extra="sink"),
    dict(block_local=4, n_kv_head=2, attn_extra="sink"),
    dict(window=5, conv=4, attn_extra="xsa,gate_head,value_residual"),
    dict(window=5, kv_shared_by=2, attn_extra="xsa", conv_sites="output"),
    dict(mixer="differential", window=5, n_kv_head=2),
]


@pytest.fixture
def blocked(monkeypatch):
    """The calls of the form in blocks."""
    calls = []
    real = fast_attention.blocked
    spy = lambda *args: calls.append(1) or real(*args)
    monkeypatch.setattr(fast_attention, "blocked", spy)
    return calls


def logits_and_gradients(model, x):
    model.zero_grad()
    model(x, x)[1].backward()
    return [model(x)[0].detach(), *(p.grad for p in model.parameters())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("arm", [FLEX[0], FLEX[2]], ids=name)
def test_flex_attention_compiled_for_a_gpu_is_attention(arm):
    """Its values and gradients."""
    torch._dynamo.reset()
    model = randomised(config("llama", arm, n_embd=64)).float().cuda().train()
    x = tokens(model.config).cuda()
    eager = logits_and_gradients(model, x)
    compiled = logits_and_gradients(torch.compile(model, dynamic=False), x)
    for a, b in zip(compiled, eager, strict=True):
        assert close(a, b, 0.01)


@pytest.mark.parametrize("T", [28, 37])  # a whole number of blocks, or not
@pytest.mark.parametrize("arm", BLOCKS, ids=name)
def test_blocks_are_the_mask(arm, T, blocked, monkeypatch):
    model = randomised(config("llama", dict(block_size=64) | arm), std=0.3).train()
    x = tokens(model.config, 3, T)
    masked = logits_and_gradients(model, x)
    assert not blocked  # the text is short
    monkeypatch.setattr(fast_attention, "LONG", 1)
    results = logits_and_gradients(model, x)
    assert len(blocked) == (2 if "full_every" in arm else 4)
    for a, b in zip(results, masked, strict=True):
        assert close(a, b, 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("arm", [dict(window=8), dict(block_local=8)], ids=name)
def test_the_work_grows_with_the_text_and_not_with_its_square(arm):
    def flops(T, arm):
        model = Variant(config("llama", dict(block_size=T, n_layer=1, n_embd=32) | arm))
        return T * cost_gates.flops(model, T)

    seen = 16 if "window" in arm else 8  # keys that a query is compared with
    linear = flops(512, {}) - 4 * 512 * 512 * 32
    assert flops(512, arm) - linear <= 4 * 512 * seen * 32
    assert flops(1024, arm) < 2.02 * flops(512, arm)
    assert flops(508, arm) > 3 * 508 * 508 * 32  # shorter than LONG: all, and a mask


def test_only_where_they_fit(blocked, monkeypatch):
    """Not with a cache, a bias, dropout while training, or few blocks."""
    monkeypatch.setattr(fast_attention, "LONG", 1)
    for arm in (dict(window=6), dict(window=5, position="alibi"), dict(window=5, dropout=0.1)):
        model = randomised(config("llama", arm)).train()
        model(tokens(model.config, 1, 20))
    model.eval()
    x = tokens(model.config, 1, 20)
    cached = model(x, cache=KVCache())[0]
    assert not blocked
    assert close(model(x)[0], cached, 1e-12) and len(blocked) == 2
    for part in (Attention, type("Own", (Attention,), {"attend": None})):
        mixer = part(config("llama", dict(window=5, head_dim=16)), 0)
        assert (part is Attention) == fast_attention.suits_flex(mixer, torch.zeros(16), model.wpe)
