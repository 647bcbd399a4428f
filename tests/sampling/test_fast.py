"""sampling/fast.py: the fast model writes what the model writes, with fewer bytes."""

import copy
import functools
import math
import shutil

import pytest
import torch
from torch.nn import functional as F

from model import GPT
from parts.architectures import configure, make
from parts.cache import KVCache
from sample import generate
from sampling import fast as inference
from sampling.fast import Int8Linear, prepare

SIZES = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=27, block_size=32)
TEXT = "the king of rome shall speak no more and the queen of spain shall speak to all "
CORNERS = {
    "gpt2": dict(model="gpt2"),
    "gpt2 without biases": dict(model="gpt2", bias=False),
    "llama": dict(model="llama", multiple_of=8),
    "llama with shared keys, tied": dict(
        model="llama", n_kv_head=2, tie_embeddings=True, multiple_of=64
    ),  # 128 wide: a row that int8's kernel takes
}
MODELS = CORNERS | {"mistral": dict(arch="mistral", window=8, multiple_of=8)}
IDS = torch.tensor([ord(c) - 96 if c != " " else 0 for c in TEXT * 40])


@functools.cache
def trained(name):
    """A model whose text depends on its prompt."""
    torch.manual_seed(0)
    model = make(configure(SIZES | MODELS[name]))
    for p in model.parameters():
        if p.dim() == 1:  # no bias at 0 and no gain at 1, where a lost one would not show
            torch.nn.init.normal_(p, p.mean().item(), 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        starts = torch.randint(len(IDS) - 33, (12,))
        x = torch.stack([IDS[i : i + 33] for i in starts])
        model(x[:, :-1], x[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


@pytest.fixture(params=CORNERS)
def corner(request):
    return trained(request.param)


def text(model, prompt, n=60, **more):
    """n greedy tokens, past block_size."""
    return torch.cat(list(generate(model, prompt, n, temperature=0, **more)), 1)


def prompt(n):
    return IDS[None, 5 : 5 + n]


def stepped(fast):
    """How many tokens took the fast path, from now on: a list that grows."""
    seen, run = [], fast.run
    fast.run = lambda token, kpos, **more: (seen.append(len(kpos)), run(token, kpos, **more))[1]
    return seen


@torch.inference_mode()
def loss(model, n=20):
    x = torch.stack([IDS[i : i + 33] for i in range(0, 33 * n, 33)])
    return model(x[:, :-1], x[:, 1:])[1].item()


# ---------------------------------------------------------------- the fast way is the model's way


def test_a_table_of_positions_is_no_longer_than_needed(monkeypatch):
    """A context of 10^12 tokens is a claim; tokens after the table are read the slower way."""
    monkeypatch.setattr(inference, "POSITIONS", 12)
    model = copy.deepcopy(trained("llama"))
    expected = text(model, prompt(5), 20)
    model.config.block_size = 10**12
    fast, _ = prepare(model)
    seen = stepped(fast)
    assert len(fast.w["rope"]) == 12
    assert torch.equal(text(fast, prompt(5), 20), expected) and len(seen) == 7


def test_greedy_text_and_logits_are_the_models(corner, monkeypatch):
    """Past block_size GPT-2 refuses and LLaMA goes on. The cache grows with every other token."""
    monkeypatch.setattr("parts.cache.capacity", lambda needed: needed + 1)
    fast, _ = prepare(copy.deepcopy(corner))
    seen = stepped(fast)
    for p in (prompt(1), prompt(9), prompt(32), prompt(40)):
        assert torch.equal(text(fast, p), text(corner, p))
    assert len(seen) > 200, "most tokens took the fast path"
    assert len({tuple(text(corner, prompt(n), 12)[0].tolist()) for n in (3, 6, 9, 12)}) > 2

    caches = KVCache(), KVCache()
    past = [] if isinstance(corner, GPT) else [1]
    with torch.inference_mode():  # also with pieces of several tokens between, as in speculation
        for sizes in ([4], [1] * 16, [5], [1] * 7, past):
            for size in sizes:
                piece = IDS[None, caches[0].length :][:, :size]
                logits = [
                    model(piece, cache=cache, last_only=True)[0]
                    for model, cache in zip((corner, fast), caches, strict=True)
                ]
                assert (logits[0] - logits[1]).abs().max() < 2e-5
    if not past:
        with pytest.raises(ValueError, match="33 tokens: block_size is 32"):
            fast(prompt(1), cache=caches[1])
    for a, b in zip(*(cache.layers.values() for cache in caches), strict=True):
        assert torch.allclose(a.k[:, :, :32], b.k[:, :, :32], atol=1e-5)
        assert torch.allclose(a.v[:, :, :32], b.v[:, :, :32], atol=1e-5)


def test_batches_ragged_ones_losses_and_what_has_no_cache_go_through_the_model(corner):
    fast, _ = prepare(copy.deepcopy(corner))
    seen = stepped(fast)
    both = torch.cat((prompt(9), IDS[None, 30:39]))
    assert torch.equal(text(fast, both, 20), text(corner, both, 20))
    assert math.isclose(loss(fast), loss(corner), rel_tol=1e-5)
    assert torch.allclose(fast(prompt(9))[0], corner(prompt(9))[0], atol=1e-5)
    logits = []
    for model in (fast, corner):
        cache = KVCache(pad=torch.tensor([3]))
        model(prompt(9), cache=cache)
        logits.append(model(prompt(1), cache=cache)[0])
    assert torch.allclose(*logits, atol=1e-5)
    assert not seen


# ---------------------------------------------------------------- fewer bytes


def test_int8_rounds_each_row_by_half_a_step_at_most():
    torch.manual_seed(0)
    weight = torch.randn(30, 128) * torch.logspace(-3, 3, 30)[:, None]
    weight[7] = 0.0
    q, scale = inference.quantized(weight)
    assert q.dtype is torch.int8 and q.abs().max() == 127 and q[7].abs().max() == 0
    assert ((q * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    x = torch.randn(3, 5, 128)
    for K in (8, 24, 88):  # widths that the packed kernel would not read right
        got = inference.int8_linear(x[:1, :1, :K], q[:, :K].contiguous(), scale)
        assert torch.allclose(got, x[:1, :1, :K] @ (q[:, :K] * scale[:, None]).t(), rtol=1e-4)
    exact = x.double() @ (q * scale[:, None]).double().t()
    # many rows in fp32; of one, x and the sum have 8 bits in bfloat16
    for rows, tolerance in ((x, 1e-5), (x[:1, :1], 2**-7)):
        y = inference.int8_linear(rows, q, scale)
        assert y.shape == (*rows.shape[:-1], 30) and y.dtype is torch.float32
        error = (y - exact[: rows.size(0), : rows.size(1)]).abs()
        assert (error <= tolerance * rows.norm(dim=-1, keepdim=True) * weight.norm(dim=1)).all()


def check_all_is_int8(model):
    """Check that a model holds a quarter of its bytes in every matrix."""
    linears = [m for m in model.modules() if isinstance(m, (Int8Linear, torch.nn.Linear))]
    assert linears and all(type(m) is Int8Linear and m.weight.dtype is torch.int8 for m in linears)


@pytest.mark.parametrize("dtype, most", [("int8", 0.01), ("bfloat16", 0.02), ("float16", 0.002)])
def test_what_fewer_bytes_cost(corner, dtype, most):
    """In nats per token on text like that of training, where the loss is near 0.1. The text still
    belongs to the language."""
    fast, _ = prepare(copy.deepcopy(corner), dtype)
    assert fast.w["qkv"].dtype is getattr(torch, dtype)
    if dtype == "int8":
        check_all_is_int8(fast)
    before, after = loss(corner), loss(fast)
    assert before < 0.4 and abs(after - before) < most, (before, after)
    seen = stepped(fast)
    losses, cache = [], KVCache()
    with torch.inference_mode():
        for i in range(31):
            logits = fast(IDS[None, i : i + 1], cache=cache)[0][0, -1].float()
            losses.append(F.cross_entropy(logits, IDS[i + 1]))
        together = corner(IDS[None, :31], IDS[None, 1:32])[1]
    assert len(seen) == 30 and abs(torch.stack(losses).mean() - together) < 5 * most


def test_int8_holds_a_quarter_in_every_matrix_of_a_variant():
    made, _ = prepare(copy.deepcopy(trained("mistral")), "int8")
    check_all_is_int8(made)
    assert abs(loss(made) - loss(trained("mistral"))) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_stacked_weights_are_the_models_own_memory(corner, dtype):
    fast, _ = prepare(copy.deepcopy(corner), dtype)
    stacked = fast.w["qkv"].untyped_storage().data_ptr()
    for block in fast.model.blocks:
        for linear in (block.attn.wq, block.attn.wk, block.attn.wv):
            assert linear.weight.untyped_storage().data_ptr() == stacked
    shapes = [{key: t.shape for key, t in m.state_dict().items()} for m in (corner, fast.model)]
    assert shapes[0].items() <= shapes[1].items()


# ---------------------------------------------------------------- compiled


def test_where_compiling_fails_it_is_said_and_eager_serves(monkeypatch, tmp_path):
    def fail(*args):
        raise RuntimeError("it does not work")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inference, "compile_step", fail)
    plain = trained("llama")
    fast, how = prepare(copy.deepcopy(plain), compile=True)
    assert "eager (compiling failed: RuntimeError it does not work)" in how
    paths = {inference.artefact(plain, dtype) for dtype in ("float32", "int8")}
    assert len(paths) == 2  # the one is not read for the other
    idx = torch.tensor([[1]])
    torch.testing.assert_close(fast(idx, cache=KVCache())[0], plain(idx, cache=KVCache())[0])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_compiled_computes_the_same_before_it_is(corner, dtype):
    fast, _ = prepare(copy.deepcopy(corner), dtype)
    ops = inference.Compiled
    fast.run = functools.partial(inference.read_token, w=fast.w, config=fast.config, ops=ops)
    seen, caches = stepped(fast), (KVCache(), KVCache())
    tolerance = 1e-4 if dtype == "float32" else 0.05
    with torch.inference_mode():
        for token in IDS[None, :32, None].unbind(1):
            a, b = fast(token, cache=caches[0])[0], fast.model(token, cache=caches[1])[0]
            assert (a - b).abs().max() < tolerance * b.abs().max()
    assert len(seen) == 31


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_is_eager(name, dtype, monkeypatch, tmp_path):
    """While the cache grows, and again from the file on disk, with other weights of that shape."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    shape = dict(n_kv_head=2, multiple_of=8) if name == "llama" else {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = make(configure(SIZES | dict(n_layer=1, block_size=160, model=name) | shape))
        for p in model.parameters():
            torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.3)
        made, how = prepare(copy.deepcopy(model), dtype, compile=True)
        assert how == "decoding compiled"
        other, tolerance = model.eval(), 1e-4
        if dtype == "int8":  # a row at a time, eager int8 has bfloat16 sums
            other, tolerance = prepare(copy.deepcopy(model), dtype, compile=False)[0].model, 0.3
        caches = KVCache(), KVCache()
        with torch.inference_mode():
            for i in range(150):
                token = IDS[None, i : i + 1]
                a, b = made(token, cache=caches[0])[0], other(token, cache=caches[1])[0]
                assert (a - b).abs().max() < tolerance * b.abs().max(), i
        assert len(list((tmp_path / "decode").iterdir())) == 1
