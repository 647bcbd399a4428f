"""The number format of a run on a CPU."""

import pytest
import torch
from torch.nn import functional as F

from common import runtime
from model_llama import Llama, LlamaConfig


@pytest.fixture
def formats(monkeypatch):
    """The formats of the queries of all calls of torch's attention."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", runtime.plain_attention)
    seen, plain = [], runtime.plain_attention

    def attention(q, *more, **named):
        seen.append(q.dtype)
        return plain(q, *more, **named)

    monkeypatch.setattr(runtime, "plain_attention", attention)
    return seen


def loss_and_gradients(dtype):
    """The loss of a small model, and its gradients as one vector."""
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = Llama(LlamaConfig(**sizes))
    x = torch.randint(0, 11, (4, 17))
    with runtime.Runtime("cpu", dtype, 0, 1, []).autocast():
        loss = model(x[:, :-1], x[:, 1:])[1]
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_on_a_cpu_attention_stays_in_float32(formats):
    exact, gradient = loss_and_gradients("float32")
    assert not formats  # float32 changes nothing
    rounded, rounded_gradient = loss_and_gradients("bfloat16")
    assert formats == [torch.float32] * 2
    assert rounded != exact and rounded == pytest.approx(exact, rel=2e-3)
    assert (rounded_gradient - gradient).norm() < 0.02 * gradient.norm()


def test_outside_of_autocast_attention_is_torchs_own(formats):
    runtime.Runtime("cpu", "bfloat16", 0, 1, []).autocast()
    q, k, v = torch.randn(3, 1, 2, 4, 8).bfloat16()
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert formats == [torch.bfloat16] and y.dtype == torch.bfloat16


def test_a_mask_of_numbers_may_be_in_bfloat16():
    q, k, v = torch.randn(3, 1, 2, 4, 8).bfloat16()
    mask = torch.randn(1, 2, 4, 4).bfloat16()
    with runtime.Runtime("cpu", "bfloat16", 0, 1, []).autocast():
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    whole = [a.float() for a in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask.float())
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected.bfloat16())
