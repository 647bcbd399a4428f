"""The keys of attention and T5's bias against independent modules, in float64, and what a layer
with a convolution remembers.

    python -m pytest tests/parts/test_attention_keys.py
"""

import math

import pytest
import test_costs as cost_gates
import torch
from test_attention_words import causal, close, in_float64, read

import sample
import train
from common.errors import UserError
from helpers.runs import arguments, losses
from helpers.variants import config, randomised, tokens
from parts import costs
from parts.architectures import idle
from parts.cache import KVCache
from parts.position import POSITION, Where
from parts.variant import Variant
from weights.export import to_hf

SIZES = dict(hidden_size=16, num_attention_heads=4, head_dim=4, num_hidden_layers=2)


def with_weights(theirs, mixer):
    """Their attention in float64, with the four matrices of ours."""
    theirs = theirs.double()
    for name in "qkvo":
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(mixer, f"w{name}").weight)
    return theirs


# ---------------------------------------------------------------- one model for each key
# Each returns (ours, theirs) for the same tokens; detail(mixer) makes a mistake in ours.


def attn_gate(monkeypatch, detail):
    """Qwen3-Next: a gate for each element, norms of q and k, half a head rotated."""
    theirs_of = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    arm = dict(attn_gate="element", qk_norm="head", n_kv_head=2, rope_fraction=0.5)
    model = randomised(config("llama", arm))
    mixer = model.blocks[1].attn
    theirs = theirs_of.Qwen3NextAttention(
        theirs_of.Qwen3NextConfig(
            **SIZES,
            num_key_value_heads=2,
            rms_norm_eps=model.config.norm_eps,
            attn_implementation="eager",
        ),
        layer_idx=1,
    )
    both = [m.weight.view(4, 4, 16) for m in (mixer.wq, mixer.gate)]  # of each head
    theirs.q_proj.weight.data = torch.cat(both, 1).flatten(0, 1)
    for name in "kvo":
        getattr(theirs, f"{name}_proj").weight.data = getattr(mixer, f"w{name}").weight
    for ours, norm in ((mixer.q_norm, theirs.q_norm), (mixer.k_norm, theirs.k_norm)):
        norm.weight.data = ours.weight - 1  # theirs adds the 1
    detail(mixer)
    x, y, angles = read(model, layer=1)
    in_float64(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    return y, theirs(x, angles, causal(9))[0]


def attn_sink(monkeypatch, detail):
    """gpt-oss, with a window of 5 tokens."""
    theirs_of = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    model = randomised(config("llama", dict(attn_sink=True, window=5, n_kv_head=2)))
    mixer = model.blocks[1].attn
    theirs = theirs_of.GptOssAttention(
        theirs_of.GptOssConfig(
            **SIZES, num_key_value_heads=2, attention_bias=False, attn_implementation="eager"
        ),
        layer_idx=1,
    )
    theirs = with_weights(theirs, mixer)
    theirs.sinks.copy_(mixer.sinks)
    detail(mixer)
    x, y, angles = read(model, layer=1)
    window = torch.full((9, 9), -torch.inf).double().tril(-5)[None, None]
    in_float64(monkeypatch)
    angles = [part[..., :2] for part in angles]  # theirs are not repeated for the second half
    return y, theirs(x, angles, causal(9) + window)[0]


def nope_every(monkeypatch, detail):
    """SmolLM3, whose second layer of two has no positions."""
    theirs_of = pytest.importorskip("transformers.models.smollm3.modeling_smollm3")
    model = randomised(config("llama", dict(nope_every=2, n_kv_head=2)))
    their_config = theirs_of.SmolLM3Config(
        **SIZES,
        num_key_value_heads=2,
        no_rope_layer_interval=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    modules = [theirs_of.SmolLM3Attention(their_config, layer_idx=layer) for layer in (0, 1)]
    modules = [with_weights(m, model.blocks[i].attn) for i, m in enumerate(modules)]
    detail(model.blocks[1].attn)
    results = [read(model, layer) for layer in (0, 1)]
    in_float64(monkeypatch)
    theirs = [
        m(x, angles, causal(9))[0] for m, (x, _, angles) in zip(modules, results, strict=True)
    ]
    return torch.cat([y for _, y, _ in results]), torch.cat(theirs)


def value_residual(monkeypatch, detail):
    """x-transformers. Its share of the own values is one per token and head, sigmoid(x W + b): here
    the same for all, as in the paper. It also gates each head."""
    theirs_of = pytest.importorskip("x_transformers.x_transformers")
    arm = dict(value_residual=True, attn_gate="head", position="none")
    model = randomised(config("llama", arm))
    mixers = [block.attn for block in model.blocks]
    mixers[1].share.fill_(0.3)
    in_float64(monkeypatch)
    layers = []
    for mixer in mixers:
        theirs = theirs_of.Attention(
            16,
            dim_head=4,
            heads=4,
            causal=True,
            gate_value_heads=True,
            learned_value_residual_mix=mixer.share is not None,
        ).double()
        for name, weight in dict(q=mixer.wq, k=mixer.wk, v=mixer.wv, out=mixer.wo).items():
            getattr(theirs, f"to_{name}").weight.copy_(weight.weight)
        theirs.to_v_head_gate.weight.copy_(mixer.gate.weight)
        theirs.to_v_head_gate.bias.zero_()
        layers.append(theirs)
    layers[1].to_value_residual_mix[0].weight.zero_()
    layers[1].to_value_residual_mix[0].bias.fill_(math.log(0.7 / 0.3))
    detail(mixers[1])

    x = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    where = Where(model.wpe, torch.arange(9)[None], None, None, {})
    ours = [mixer(x[i], where) for i, mixer in enumerate(mixers)]
    first, inside = layers[0](x[0], return_intermediates=True)
    second = layers[1](x[1], value_residual=inside.values)
    return torch.cat(ours), torch.cat((first, second))


def conv(monkeypatch, detail):
    """torch's own convolution, as the authors' code uses it, before attention without one."""
    model = randomised(config("llama", dict(conv=4)))
    mixer = model.blocks[1].attn
    theirs = torch.nn.Conv1d(16, 16, 4, groups=16, padding=3, bias=False).double()
    theirs.weight.copy_(mixer.conv.weight[:, None])
    detail(mixer)
    x, y, _ = read(model, layer=1)
    mixer.conv = None
    pos = torch.arange(9)[None]
    where = Where(model.wpe, pos, model.wpe.angles(pos), None, {})
    return y, mixer(x + theirs(x.mT)[..., :9].mT, where)


def without(name, value=None):
    return lambda mixer: setattr(mixer, name, value)


KEYS = {  # the reference of each key, and mistakes that the comparison must show
    attn_gate: [
        without("gate"),
        lambda mixer: mixer.gate.weight.copy_(mixer.gate.weight.roll(4, 0)),  # of other heads
    ],
    attn_sink: [without("sinks"), lambda mixer: mixer.sinks.neg_()],
    nope_every: [without("turns", True)],
    value_residual: [without("share"), lambda mixer: mixer.share.fill_(0.7), without("gate")],
    conv: [without("conv"), lambda mixer: mixer.conv.weight.copy_(mixer.conv.weight.flip(1))],
}


@torch.no_grad()
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.__name__)
def test_it_is_theirs(key, monkeypatch):
    assert close(*key(monkeypatch, lambda mixer: None))


@torch.no_grad()
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.__name__)
def test_a_mistake_would_be_seen(key, monkeypatch):
    for mistake in KEYS[key]:
        with monkeypatch.context() as patch:
            assert not close(*key(patch, mistake))


# ---------------------------------------------------------------- position=t5


def t5():
    """(our bias of 300 tokens, theirs), (1, H, 300, 300) below the diagonal."""
    theirs_of = pytest.importorskip("transformers.models.t5.modeling_t5")
    model = randomised(config("llama", dict(position="t5")))
    their_config = theirs_of.T5Config(d_model=16, num_heads=4, is_decoder=True)
    theirs = theirs_of.T5Attention(their_config, has_relative_attention_bias=True, layer_idx=0)
    theirs.relative_attention_bias.weight.data = model.wpe.weight
    pos, q = torch.arange(300)[None], torch.zeros(1, 4, 300, 4, dtype=torch.float64)
    return model.wpe.bias(q, pos, pos).tril(), theirs.compute_bias(300, 300).tril()


@torch.no_grad()
def test_t5s_bias_is_transformers(monkeypatch):
    assert torch.equal(*t5())
    monkeypatch.setattr(POSITION["t5"], "farthest", 127)
    assert not torch.equal(*t5())


# ---------------------------------------------------------------- what a layer with conv remembers


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["attention", "differential", "mla"])
def test_the_weights_have_a_dropout_of_their_own(mixer):
    """In training alone, as much as is given, and as much as elsewhere where nothing is given."""

    def changed(**values):
        model = randomised(config("llama", dict(mixer=mixer, **values)))
        attention = model.blocks[1].attn
        attention.dropout.p = 0.0
        x, before = tokens(model.config), model(tokens(model.config))[0]
        for drop in (model.dropout, *(block.mlp.dropout for block in model.blocks)):
            drop.p = 0.0
        model.blocks[0].attn.dropout.p = 0.0
        return not torch.equal(model.train()(x)[0], before)

    assert changed(attn_dropout=0.5) and changed(dropout=0.5)
    assert not changed(dropout=0.5, attn_dropout=0.0)


def test_the_convolution_keeps_its_last_inputs():
    """conv - 1 inputs, beside keys and values and beside a ring; and what costs says of them."""
    for window, kept in ((0, 64), (5, 5)):  # room for 64 tokens
        model = Variant(config("llama", dict(conv=4, window=window))).eval()
        cache = KVCache()
        model(tokens(model.config, 3, 10), cache=cache)
        assert [layer.inputs.shape for layer in cache.layers] == [(3, 3, 16)] * 2
        assert cache.size() == 4 * 3 * 2 * (2 * 16 * kept + 3 * 16)
        assert cache.size() == 3 * costs.kv_bytes(model.config, 64)


def test_it_goes_back_as_far_as_it_has_inputs():
    model, x = randomised(config("llama", dict(conv=4))), tokens(config("llama"), 1, 20)
    cache = KVCache(spare=4)
    model(x, cache=cache)
    cache.rewind(18)
    cache.rewind(16)
    assert close(model(x[:, 16:], cache=cache)[0], model(x)[0][:, 16:])
    with pytest.raises(ValueError, match="to 15: the convolution has 4 spare inputs"):
        cache.rewind(15)
    cache = KVCache()
    model(x[:, :2], cache=cache)
    with pytest.raises(ValueError, match="the convolution has 0 spare inputs"):
        cache.rewind(1)


@torch.no_grad()
def test_padding_leaves_no_trace_in_it():
    model, x = randomised(config("llama", dict(conv=4, window=5))), tokens(config("llama"), 1, 12)
    padded = torch.cat((x[:, :1].expand(-1, 5), x), dim=1)
    cache, alone = KVCache(torch.tensor([5])), KVCache()
    for a, b in ((0, 2), (2, 9), (9, 10), (10, 12)):
        model(padded[:, a + 5 * (a > 0) : b + 5], cache=cache)
        model(x[:, a:b], cache=alone)
    for one, two in zip(cache.layers, alone.layers, strict=True):
        assert close(one.inputs, two.inputs, 1e-12) and one.inputs.any()


def test_it_starts_as_the_authors_code_and_stands_before_attention_alone():
    torch.manual_seed(0)
    mixers = [block.attn for block in Variant(config("llama", dict(conv=4), n_embd=256)).blocks]
    theirs = torch.nn.Conv1d(256, 256, 4, groups=256, bias=False)
    for mixer in mixers:
        assert mixer.conv.weight.abs().max() <= theirs.weight.abs().max() * 1.05
        assert mixer.conv.weight.std().item() == pytest.approx(theirs.weight.std().item(), rel=0.1)

    hybrid = dict(mixer="gated_delta,attention")
    for key, widths in {None: (4, None), 2: (2, 2)}.items():
        model = Variant(config("llama", hybrid | ({} if key is None else dict(conv=key))))
        assert [block.attn.conv and block.attn.conv.width for block in model.blocks] == [*widths]
    for word in ("mla", "differential"):
        with pytest.raises(UserError, match=f"conv=4 means nothing to mixer={word}.*add attention"):
            config("llama", dict(mixer=word, conv=4))
    assert "conv" not in idle(dict(conv=4))


def test_no_mask_is_made_where_no_layer_reads_one():
    """A chunk of a long prompt would have one of chunk times text."""
    for arm, reads in {
        "window": (dict(window=5), False),
        "state": (dict(mixer="mamba2", position="none"), False),
        "both": (dict(mixer="mamba2,attention"), True),
    }.values():
        model, cache = Variant(config("llama", arm)).eval(), KVCache()
        for piece in tokens(model.config, 1, 20).split(10, 1):
            model(piece, cache=cache)
        assert (cache.made is not None) == reads
        assert cache.mask.shape == (1, 1, 10, 20)


# ---------------------------------------------------------------- through the scripts


@pytest.mark.parametrize(
    "key", ["conv=4", "residual=hyper", pytest.param("position=t5", marks=pytest.mark.slow)]
)
def test_they_train_and_write(key, data_dir, tmp_path, capsys):
    out = tmp_path / "out"
    more = [f"--{key}", "--model=llama", "--window=40", "--optimizer=muon"]
    train.main(arguments(data_dir, out, "--max_iters=16", "--learning_rate=1e-2", *more))
    trained = dict(losses(out))
    assert trained[16] < trained[1] - 0.2
    capsys.readouterr()
    for extra in ("--dtype=int8", "--draft=lookup"):
        sample.main([f"--out_dir={out}", "--device=cpu", extra, "--max_new_tokens=40"])
        assert len(capsys.readouterr().out) > 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm", [dict(conv=4), dict(position="t5"), dict(residual="hyper", block="parallel")], ids=str
)
def test_they_compile(arm):
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = randomised(config("llama", arm, n_embd=32), std=0.2).float()
        net = torch.compile(model, dynamic=False, fullgraph=True) if compiled else model
        loss = net(tokens(model.config), tokens(model.config, seed=2))[1]
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert close(a, b, 1e-4)


@pytest.mark.parametrize("key, value", [("conv", 4), ("position", "t5"), ("residual", "hyper")])
def test_export_names_what_it_cannot_say(key, value):
    model = Variant(config("llama", {key: value}))
    with pytest.raises(UserError, match=f"{key}=.*no Hugging Face model has this"):
        to_hf("llama", vars(model.config), model.state_dict())


def test_costs_of_a_convolution():
    """2 C conv FLOPs and C conv parameters in each layer."""
    plain, with_it = (cost_gates.configure(**cost_gates.SMALL, conv=conv) for conv in (None, 4))
    layers, C = plain.n_layer, plain.n_embd
    assert costs.parameters(with_it) - costs.parameters(plain) == layers * 4 * C
    flops = [costs.flops_per_token(c, 32) for c in (plain, with_it)]
    assert flops[1] - flops[0] == layers * 2 * 4 * C
