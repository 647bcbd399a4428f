"""The mixers with a state of fixed size, beyond the gates: over several chunks,
their three forms, and against transformers."""

import formulas
import pytest
import test_costs as cost_gates
import torch

from helpers import gates
from helpers.variants import close, config, name, randomised, tokens
from parts import costs, recurrence
from parts.cache import KVCache
from parts.gated_delta import GatedDelta
from parts.mamba2 import Mamba2
from parts.variant import Variant

WORDS = {"gated_delta": GatedDelta, "mamba2": Mamba2}
words = pytest.mark.parametrize("word", WORDS)
LONG = 150  # tokens: two chunks and a part of one


def arm(word, **more):
    return dict(mixer=word, position="none") | more


def mixer_of(word, **more):
    """A mixer in float64 with nothing left at zero or one."""
    return randomised(config("llama", arm(word, n_layer=1) | more)).blocks[0].attn


def drawn(word, T, dtype):
    """(a mixer, a state, the inputs of its recurrence for T tokens)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixer = mixer_of(word)
    S = normal(2, *mixer.shape)
    log_alpha = -(normal(2, T, 4) - 1).exp()
    if word == "gated_delta":
        q, k = (a / a.norm(dim=-1, keepdim=True) for a in normal(2, 2, T, 4, 2))
        inputs = q, k, normal(2, T, 4, 4), log_alpha, normal(2, T, 4).sigmoid()
    else:
        inputs = normal(2, T, 8), normal(2, T, 8), normal(2, T, 4, 4), log_alpha
    return mixer, S.to(dtype), [a.to(dtype) for a in inputs]


@words
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, LONG])
def test_chunks_and_one_by_one_are_the_same(word, T, dtype, tolerance):
    mixer, S, inputs = drawn(word, T, dtype)
    y, states = mixer.recurrent(S, *inputs)
    for length in {T, max(1, T - 1), min(T, 3)}:
        chunked, after = mixer.chunked(S, *(a[:, :length] for a in inputs))
        assert close(chunked, y[:, :length], tolerance)
        assert close(after, states[:, length - 1], tolerance)


@words
def test_strong_decays_stay_finite(word):
    """A token that forgets all but e^-1000: the chunked form divides by no decay."""
    mixer, S, inputs = drawn(word, 70, torch.float32)
    inputs[3] = 1000 * inputs[3]
    for a in inputs:
        a.requires_grad_()
    y, after = mixer.chunked(S, *inputs)
    assert close(y, mixer.recurrent(S, *inputs)[0])
    (y.sum() + after.sum()).backward()
    assert all(a.grad.isfinite().all() for a in inputs)


@torch.no_grad()
@words
@pytest.mark.parametrize("more", [{}, dict(state_size=3, expand=2, conv=2), dict(conv=1)])
def test_over_chunks_it_is_its_formula(word, more, monkeypatch):
    monkeypatch.setattr(recurrence, "CHUNK", 5)
    mixer, x = mixer_of(word, **more), torch.randn(1, 13, 16, dtype=torch.float64)
    formula = formulas.reference("mixer", word)
    assert close(mixer(x, None), formula(mixer, x, None), 1e-9)


def test_gates_over_several_chunks(monkeypatch):
    monkeypatch.setattr(recurrence, "CHUNK", 5)  # 24 tokens are five chunks
    for word in WORDS:
        gates.check("gpt2", arm(word))
        gates.check("llama", arm(word))


# Layers that forget their past.
SPARE = [
    arm("mamba2"),
    arm("gated_delta"),
    dict(conv=4),
    dict(conv=3, conv_sites="keys,mlp_inner", kv_shared_by=2),
    dict(window=5),
]


@pytest.mark.parametrize("change", SPARE, ids=name)
def test_it_goes_back_as_far_as_it_has_copies(change):
    model = randomised(config("llama", change))
    x = tokens(model.config, 1, 20)
    for T in (3, 20):  # fewer tokens than copies, and more
        cache = KVCache(spare=4)
        model(x[:, :T], cache=cache)
        cache.rewind(T - 2)
        cache.rewind(T - 3)
        y = model(x[:, T - 3 : T], cache=cache)[0]
        assert close(y, model(x[:, :T])[0][:, T - 3 :])
    cache.rewind(18)
    model(x[:, 18:19], cache=cache)  # it has kept no more than before
    with pytest.raises(ValueError, match="from 20 tokens to 15"):
        cache.rewind(15)


@words
def test_costs_over_several_chunks(word):
    for T in (64, 100, 130):
        c = cost_gates.configure(mixer=word, **cost_gates.SMALL | dict(block_size=T))
        counted = cost_gates.flops(Variant(c).eval(), T)
        assert costs.flops_per_token(c, T) == pytest.approx(counted, rel=1e-12)


@words
def test_it_starts_as_the_authors_code(word):
    torch.manual_seed(0)
    mixer = Variant(config("llama", arm(word, n_head=64, n_embd=128, n_layer=1))).blocks[0].attn
    dt, log_alpha = mixer.decay(torch.zeros(1, 1, 64))
    assert 0.001 <= dt.min() < 0.003 and 0.04 < dt.max() <= 0.1
    rate = -log_alpha / dt
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16.001
    assert mixer.conv.weight.abs().max() <= 0.5 and mixer.conv.weight.std() > 0.25


def check_against_qwen3_next(detail=None):
    """Our gated_delta, with the weights of their module, computes what theirs does, with 2 heads of
    3 for keys and 8 for values; in float32, as their code does inside. detail(mixer) breaks
    ours."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    sizes = dict(hidden_size=8, num_hidden_layers=1, layer_types=["linear_attention"])
    sizes |= dict(linear_num_key_heads=2, linear_key_head_dim=3, rms_norm_eps=0.01)
    sizes |= dict(linear_num_value_heads=2, linear_value_head_dim=8)
    theirs = modeling.Qwen3NextGatedDeltaNet(modeling.Qwen3NextConfig(**sizes), 0)
    torch.manual_seed(0)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.0, 0.4)
    w = theirs.state_dict()
    heads = w["in_proj_qkvz.weight"].view(2, -1, 8).split((3, 3, 8, 8), dim=1)
    q, k, v, z = (part.flatten(0, 1) for part in heads)
    b, a = w["in_proj_ba.weight"].view(2, 2, 8).unbind(1)
    ours = dict(wq=q, wk=k, wv=v, wz=z, wb=b, wa=a, wo=w["out_proj.weight"])
    ours |= dict(conv=w["conv1d.weight"][:, 0], norm=w["norm.weight"])
    weights = {f"{name}.weight": tensor for name, tensor in ours.items()}
    weights |= {"decay.log_rate": w["A_log"], "decay.bias": w["dt_bias"]}

    sizes = dict(n_head=2, n_embd=8, state_size=3, expand=2, norm_eps=0.01)
    mixer = mixer_of("gated_delta", **sizes).float()
    mixer.load_state_dict(weights)
    if detail:
        detail(mixer)
    x = torch.randn(2, 70, 8)
    with torch.no_grad():
        return close(mixer(x, None), theirs(x))


def test_it_is_transformers_and_a_mistake_would_be_seen():
    """test_families.py compares mamba2."""
    assert check_against_qwen3_next()
    for mistake in (
        lambda mixer: setattr(mixer.norm, "eps", 1e-5),
        lambda mixer: mixer.conv.weight.data.copy_(mixer.conv.weight.flip(1)),
        lambda mixer: mixer.decay.log_rate.data.add_(0.1),
    ):
        assert not check_against_qwen3_next(mistake)


@words
def test_in_16_bits_the_state_stays_in_32(word):
    model = randomised(config("llama", arm(word, block_size=LONG)), std=0.2).float()
    x = tokens(model.config)
    exact, loss = model(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(x, x)[1]
    rough.backward()
    assert rough.item() == pytest.approx(loss.item(), abs=2e-4)
    assert all(p.grad.isfinite().all() for p in model.parameters())

    model, cache = model.to(torch.bfloat16), KVCache()
    pieces = [model(piece, cache=cache)[0] for piece in (x[:, :90], x[:, 90:91])]
    assert cache.layers[0].states.dtype == torch.float32
    assert close(torch.cat(pieces, 1).float(), exact[:, :91], 0.02)
