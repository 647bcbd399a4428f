"""Windows and groups in blocks, on a CPU: equal to the mask, and without the work that it hides.

Run: python -m pytest tests/parts/test_blocks.py"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parts import attention
from parts.architectures import configure, make
from parts.cache import KVCache

SIZES = dict(arch="llama", n_layer=2, n_head=4, n_embd=32, vocab_size=31, multiple_of=8)
ARMS = [
    dict(window=5),
    dict(window=1),
    dict(block_local=6),
    dict(window=5, full_every=2),
    dict(window=5, n_kv_head=1, position="learned"),
    dict(window=7, n_kv_head=2, attn_softcap=2.0, attn_sink=True),
    dict(block_local=4, n_kv_head=2, attn_sink=True),
    dict(window=5, conv=4, xsa=True, attn_gate="head", value_residual=True),
    dict(mixer="differential", window=5, n_kv_head=2),
]


def model_of(values, T=64):
    """A model with large weights, in float64."""
    torch.manual_seed(0)
    model = make(configure(SIZES | dict(block_size=T) | values)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    return model


def results(model, x):
    """The logits of x (B, T), and the gradient of each parameter."""
    model.zero_grad()
    model(x, x)[1].backward()
    return [model(x)[0].detach(), *(p.grad for p in model.parameters())]


def name(values):
    return ",".join(f"{key}={value}" for key, value in values.items())


@pytest.mark.parametrize("T", [28, 37])  # a whole number of blocks, or not
@pytest.mark.parametrize("values", ARMS, ids=name)
def test_blocks_are_the_mask(values, T, monkeypatch):
    calls, real = [], attention.Attention.blocked
    monkeypatch.setattr(
        attention.Attention, "blocked", lambda *args: calls.append(1) or real(*args)
    )
    model, x = model_of(values), torch.randint(31, (3, T))
    masked = results(model, x)
    assert not calls  # the text is short
    monkeypatch.setattr(attention, "LONG", 1)
    blocked = results(model, x)
    assert len(calls) == (2 if "full_every" in values else 4)
    for a, b in zip(blocked, masked, strict=True):
        assert (a - b).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("values", [dict(window=8), dict(block_local=8)], ids=name)
def test_the_work_grows_with_the_text_and_not_with_its_square(values):
    def flops(T, more):
        model = make(configure(SIZES | dict(block_size=T, n_layer=1) | more))
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, T, dtype=torch.long))
        return counter.get_total_flops()

    seen = 16 if "window" in values else 8  # keys that a query is compared with
    linear = flops(512, {}) - 4 * 512 * 512 * 32
    assert flops(512, values) - linear <= 4 * 512 * seen * 32
    assert flops(1024, values) < 2.02 * flops(512, values)
    assert flops(508, values) > 3 * 508 * 508 * 32  # shorter than LONG: all, and a mask


def test_only_where_they_fit(monkeypatch):
    """Not with a cache, a bias, dropout while training, or few blocks."""
    calls, real = [], attention.Attention.blocked
    monkeypatch.setattr(
        attention.Attention, "blocked", lambda *args: calls.append(1) or real(*args)
    )
    monkeypatch.setattr(attention, "LONG", 1)
    x = torch.randint(31, (1, 20))
    for values in (dict(window=6), dict(window=5, position="alibi"), dict(window=5, dropout=0.1)):
        model_of(values).train()(x)
    model = model_of(dict(window=5, dropout=0.1)).eval()
    cached = model(x, cache=KVCache())[0]
    assert not calls
    assert (model(x)[0] - cached).abs().max() < 1e-12 and len(calls) == 2
