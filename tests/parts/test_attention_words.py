"""Two words of the slot mixer against transformers: latent and differential attention.

python -m pytest tests/parts/test_attention_words.py
python -m pytest tests/parts/test_attention_words.py -m slow    # compiled
"""

import math

import pytest
import torch

import sample
import train
from common.errors import UserError
from helpers.runs import arguments, losses
from helpers.variants import config, randomised, tokens
from parts.architectures import idle
from parts.cache import KVCache
from parts.differential import Differential
from parts.mla import LatentAttention
from parts.position import Where
from parts.variant import Variant
from sampling.attention_map import write_map
from sampling.fast import prepare, quantize
from weights.export import to_hf

WORDS = pytest.mark.parametrize("word", ["mla", "differential"])


def close(a, b, tolerance=1e-9):
    return (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def read(model, layer=0, T=9):
    """(x, what a layer's mixer makes of it, the angles' (cos, sin) of its rotated part)."""
    mixer, pos = model.blocks[layer].attn, torch.arange(T)[None]
    x = torch.randn(2, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    angles = model.wpe.angles(pos, getattr(mixer, "turned", None))
    cos, sin = (torch.cat((part, part), -1)[:, 0].double() for part in angles)
    return x, mixer(x, Where(model.wpe, pos, model.wpe.angles(pos), None, {})), (cos, sin)


def causal(T):
    return torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]


def in_float64(monkeypatch):
    """Transformers computes softmax and sums in float32: here they stay in float64."""
    real_softmax, real_sum = torch.nn.functional.softmax, torch.sum
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim, dtype=None: real_softmax(x, dim)
    )
    monkeypatch.setattr(torch, "sum", lambda x, dim, dtype=None: real_sum(x, dim))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **more: tensor)


# ---------------------------------------------------------------- mla


@torch.no_grad()
def check_deepseek(monkeypatch):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    model = randomised(config("llama", dict(mixer="mla", latent_rank=6, rope_head_dim=4)))
    ours = model.blocks[1].attn
    theirs = deepseek.DeepseekV3Attention(
        deepseek.DeepseekV3Config(
            hidden_size=16,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=6,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            rope_interleave=False,
            attn_implementation="eager",
        ),
        layer_idx=1,
    ).double()
    theirs.q_proj.weight.copy_(ours.wq.weight)
    theirs.kv_a_proj_with_mqa.weight.copy_(ours.wd.weight)
    theirs.kv_a_layernorm.weight.copy_(ours.latent_norm.weight)
    theirs.kv_a_layernorm.variance_epsilon = model.config.norm_eps
    theirs.kv_b_proj.weight.copy_(ours.wu.weight)
    theirs.o_proj.weight.copy_(ours.wo.weight)
    x, y, angles = read(model, layer=1)
    in_float64(monkeypatch)
    assert close(y, theirs(x, angles, causal(9))[0])


def test_it_is_deepseeks(monkeypatch):
    check_deepseek(monkeypatch)


def test_a_wrong_scale_would_be_seen(monkeypatch):
    """That of the part which is not rotated."""
    real = LatentAttention.compressed

    def wrong(self, x, where):
        q, past = real(self, x, where)
        return q * math.sqrt((self.width + self.turned) / self.width), past

    monkeypatch.setattr(LatentAttention, "compressed", wrong)
    with pytest.raises(AssertionError):
        check_deepseek(monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("base", ["gpt2", "llama"])  # with biases and without
def test_one_token_in_the_other_order_is_the_same(base, monkeypatch):
    """Decoding takes the short way for one token, and never for more, low rank or int8."""
    taken = []
    real = LatentAttention.absorbed
    monkeypatch.setattr(LatentAttention, "absorbed", lambda *args: taken.append(1) or real(*args))
    arm = dict(mixer="mla", latent_rank=5, position="none")
    model, x = randomised(config(base, arm)), tokens(config(base), T=14)
    full, cache = model(x)[0], KVCache()
    pieces = [model(x[:, a:b], cache=cache)[0] for a, b in ((0, 6), (6, 7), (7, 8), (8, 14))]
    assert close(torch.cat(pieces, 1), full) and len(taken) == 2 * 2  # two tokens, two layers

    ragged = KVCache(pad=torch.tensor([0, 3]))
    padded = torch.stack((x[0], torch.cat((x[0, :3], x[1, :11]))))
    pieces = [model(padded[:, a:b], cache=ragged)[0] for a, b in ((0, 6), (6, 7), (7, 14))]
    assert close(torch.cat(pieces, 1)[1, 3:], model(x[1:, :11])[0][0])

    for change in (lambda c: randomised(config(base, arm | dict(low_rank=3))), int8):
        taken.clear()
        model = change(model)
        cache = KVCache()
        model(x[:, :6], cache=cache), model(x[:, 6:7], cache=cache)
        assert not taken


def int8(model):
    quantize(model.float())
    return model


def test_the_cache_holds_the_latent_and_the_shared_key():
    model = Variant(config("llama", dict(mixer="mla", latent_rank=6, rope_head_dim=4))).eval()
    cache = KVCache()
    model(tokens(model.config, 3, 10), cache=cache)
    held = [tensor.numel() for layer in cache.layers for tensor in layer.tensors()]
    assert held == [3 * 64 * (6 + 4), 0] * 2  # room for 64 tokens
    plain = Variant(config("llama", dict(mixer="mla"), n_embd=128, n_head=4))
    assert (plain.blocks[0].attn.rank, plain.blocks[0].attn.turned) == (32, 16)  # C/4, D/2


def test_norm_eps_has_an_effect_on_norms_within_a_mixer():
    values = dict(norm="layernorm", norm_eps=0.1, mlp="gelu", position="none")
    assert "norm_eps" in idle(values)
    for word in ("mla", "differential", "attention,mla"):
        assert "norm_eps" not in idle(values | dict(mixer=word))


# ---------------------------------------------------------------- differential


@torch.no_grad()
def check_diffllama(monkeypatch, layer=1, **arm):
    theirs_of = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    model = randomised(config("llama", dict(mixer="differential") | arm))
    ours, K = model.blocks[layer].attn, model.config.n_kv_head
    ours.pair_norm.weight.fill_(1.0)  # theirs has no weight
    theirs = theirs_of.DiffLlamaAttention(
        theirs_of.DiffLlamaConfig(
            hidden_size=16,
            num_attention_heads=4,
            num_key_value_heads=K,
            rms_norm_eps=model.config.norm_eps,
            attn_implementation="eager",
        ),
        layer_idx=layer,
    ).double()
    for name in "qkvo":
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, f"w{name}").weight)
    for name in ours.vectors:
        getattr(theirs, name).copy_(getattr(ours, name))
    x, y, angles = read(model, layer)
    in_float64(monkeypatch)
    assert close(y, theirs(x, angles, causal(9))[0])


@pytest.mark.parametrize("layer, arm", [(0, {}), (1, {}), (1, dict(n_kv_head=2))])
def test_it_is_diffllamas(monkeypatch, layer, arm):
    check_diffllama(monkeypatch, layer, **arm)


def test_a_layer_counted_from_one_would_be_seen(monkeypatch):
    real = Differential.__init__

    def late(self, config, layer):
        real(self, config, layer)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * (layer + 1))

    monkeypatch.setattr(Differential, "__init__", late)
    with pytest.raises(AssertionError):
        check_diffllama(monkeypatch)


def test_what_both_heads_see_is_subtracted():
    """With equal heads and a strength of 1, nothing is left."""
    model = randomised(config("llama", dict(mixer="differential", n_layer=1, position="none")))
    mixer = model.blocks[0].attn
    q, k, v = torch.randn(3, 1, 4, 6, 4, dtype=torch.float64)
    q[:, 2:], k[:, 2:] = q[:, :2], k[:, :2]
    mixer.start = 1.0 - sum(
        sign * (a * b).sum().exp().item()
        for sign, (a, b) in zip((1, -1), mixer.products(), strict=True)
    )
    seen = []
    mixer.pair_norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    mixer.attend(q, k, v, None, None, None, None)
    assert seen[0].abs().max() < 1e-12


def test_the_strength_starts_at_its_published_value():
    torch.manual_seed(0)
    model = Variant(config("llama", dict(mixer="differential", n_layer=4)))
    starts = [block.attn.start for block in model.blocks]
    assert starts == pytest.approx([0.2, 0.35551, 0.47071, 0.55606], abs=1e-5)
    for block in model.blocks:
        raised, lowered = ((a * b).sum().exp().item() for a, b in block.attn.products())
        assert abs(raised - lowered) < 0.2


# ---------------------------------------------------------------- both


@WORDS
def test_they_train_and_write(data_dir, tmp_path, capsys, word):
    out = tmp_path / "out"
    more = [f"--mixer=attention,{word}", "--model=llama", "--optimizer=muon"]
    train.main(arguments(data_dir, out, "--max_iters=16", "--learning_rate=1e-2", *more))
    trained = dict(losses(out))
    assert trained[16] < trained[1] - 0.2
    capsys.readouterr()
    for dtype in ("float32", "int8"):
        sample.main([f"--out_dir={out}", "--device=cpu", f"--dtype={dtype}", "--max_new_tokens=40"])
        assert len(capsys.readouterr().out) > 40


@WORDS
@pytest.mark.slow
def test_they_compile(word):
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Variant(config("llama", dict(mixer=word), n_embd=32))
        net = torch.compile(model, dynamic=False, fullgraph=True) if compiled else model
        loss = net(tokens(model.config), tokens(model.config, seed=2))[1]
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert close(a, b, 1e-5)


@WORDS
def test_what_does_not_know_them_says_so(word):
    model = Variant(config("llama", dict(mixer=word)))
    with pytest.raises(UserError, match=f"mixer={word}.*no Hugging Face model has this"):
        to_hf("llama", vars(model.config), model.state_dict())
    assert "corners only" in prepare(model)[1][0]
    with pytest.raises(UserError, match="layer 0 has no attention to draw"):
        write_map("map.png", "", model, None, "", 0)
