"""Attention, its keys, T5's bias, latent and differential attention against independent modules in
float64; and windows in blocks."""

import functools
import itertools
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from helpers.variants import close, config, randomised, tokens
from parts.cache import KVCache
from parts.mla import LatentAttention
from parts.part import short_convs
from parts.position import Shared, Where
from parts.variant import Variant
from sampling.fast import quantize

SIZES = dict(hidden_size=16, num_attention_heads=4, head_dim=4, num_hidden_layers=2)


def in_float64(monkeypatch):
    """Transformers computes softmax, norms and sums in float32: here they stay in float64."""
    real_softmax, real_sum = F.softmax, torch.sum
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: real_softmax(x, dim))
    monkeypatch.setattr(torch, "sum", lambda x, dim, dtype=None: real_sum(x, dim))
    for method in ("to", "float"):
        monkeypatch.setattr(torch.Tensor, method, lambda tensor, *args, **more: tensor)


def outputs(model, theirs, monkeypatch, window=0, angles_twice=True):
    """What the mixer of layer 1 and `theirs` make of the same 9 tokens."""
    mixer, pos = model.blocks[1].attn, torch.arange(9)[None]
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ours = mixer(x, Where(model.wpe, pos, model.wpe.angles(pos), None, Shared()))

    angles = model.wpe.angles(pos, getattr(mixer, "key_width", None))
    angles = [part[:, 0].double() for part in angles]
    if angles_twice:  # for the second half of a head, too
        angles = [torch.cat((part, part), -1) for part in angles]
    hidden = torch.full((9, 9), -torch.inf, dtype=torch.float64)
    mask = hidden.triu(1) + (hidden.tril(-window) if window else 0)
    in_float64(monkeypatch)
    return ours, theirs(x, angles, mask[None, None])[0]


def attention_of(word, name, **more):
    """An attention of transformers, in float64: the class `name` in the model `word`."""
    modeling = pytest.importorskip(f"transformers.models.{word}.modeling_{word}")
    config_class = getattr(modeling, f"{name}Config")
    their_config = config_class(**SIZES | dict(attn_implementation="eager") | more)
    return getattr(modeling, f"{name}Attention")(their_config, layer_idx=1).double()


def give(theirs, mixer, matrices="qkvo"):
    """Copy the matrices of our attention into theirs."""
    for matrix in matrices:
        getattr(theirs, f"{matrix}_proj").weight.copy_(getattr(mixer, f"w{matrix}").weight)


# ---------------------------------------------------------------- one model for each part
# Each returns (ours, theirs) for the same tokens; detail(mixer) makes a mistake in ours.


def attn_gate(monkeypatch, detail):
    """Qwen3-Next: a gate for each element, norms of q and k, half a head rotated; and heads wider
    than n_embd / n_head."""
    arm = dict(attn_extra="gate_element", qk_norm="head", n_kv_head=2, rope_fraction=0.5)
    model = randomised(config("llama", arm | dict(head_dim=8)))
    mixer, eps = model.blocks[1].attn, model.config.norm_eps
    sizes = dict(head_dim=8, num_key_value_heads=2, rms_norm_eps=eps)
    theirs = attention_of("qwen3_next", "Qwen3Next", **sizes)
    both = [m.weight.view(4, 8, 16) for m in (mixer.wq, mixer.gate)]  # of each head
    theirs.q_proj.weight.copy_(torch.cat(both, 1).flatten(0, 1))
    give(theirs, mixer, "kvo")
    for ours, norm in ((mixer.q_norm, theirs.q_norm), (mixer.k_norm, theirs.k_norm)):
        norm.weight.copy_(ours.weight - 1)  # theirs adds the 1
    detail(mixer)
    return outputs(model, theirs, monkeypatch)


def attn_sink(monkeypatch, detail):
    """gpt-oss, with a window of 5 tokens."""
    model = randomised(config("llama", dict(attn_extra="sink", window=5, n_kv_head=2)))
    mixer = model.blocks[1].attn
    theirs = attention_of("gpt_oss", "GptOss", num_key_value_heads=2, attention_bias=False)
    give(theirs, mixer)
    theirs.sinks.copy_(mixer.sinks)
    detail(mixer)
    return outputs(model, theirs, monkeypatch, window=5, angles_twice=False)


def value_residual(monkeypatch, detail):
    """x-transformers. Its share of the own values is one per token and head, sigmoid(x W + b): here
    the same for all, as in the paper. It also gates each head."""
    theirs_of = pytest.importorskip("x_transformers.x_transformers")
    arm = dict(attn_extra="value_residual,gate_head", position="none")
    model = randomised(config("llama", arm))
    mixers = [block.attn for block in model.blocks]
    mixers[1].share.fill_(0.3)
    in_float64(monkeypatch)
    layers, sizes = [], dict(dim=16, dim_head=4, heads=4, causal=True, gate_value_heads=True)
    for mixer in mixers:
        mixed = hasattr(mixer, "share")
        theirs = theirs_of.Attention(**sizes, learned_value_residual_mix=mixed).double()
        for matrix, weight in dict(q=mixer.wq, k=mixer.wk, v=mixer.wv, out=mixer.wo).items():
            getattr(theirs, f"to_{matrix}").weight.copy_(weight.weight)
        theirs.to_v_head_gate.weight.copy_(mixer.gate.weight)
        theirs.to_v_head_gate.bias.zero_()
        layers.append(theirs)
    layers[1].to_value_residual_mix[0].weight.zero_()
    layers[1].to_value_residual_mix[0].bias.fill_(math.log(0.7 / 0.3))
    detail(mixers[1])

    x = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    where = Where(model.wpe, torch.arange(9)[None], None, None, Shared())
    ours = [mixer(x[i], where) for i, mixer in enumerate(mixers)]
    first, inside = layers[0](x[0], return_intermediates=True)
    second = layers[1](x[1], value_residual=inside.values)
    return torch.cat(ours), torch.cat((first, second))


def t5(monkeypatch, detail):
    """The bias of 300 tokens."""
    theirs_of = pytest.importorskip("transformers.models.t5.modeling_t5")
    model = randomised(config("llama", dict(position="t5")))
    their_config = theirs_of.T5Config(d_model=16, num_heads=4, is_decoder=True)
    theirs = theirs_of.T5Attention(their_config, has_relative_attention_bias=True, layer_idx=0)
    theirs.relative_attention_bias.weight.data = model.wpe.weight
    detail(model.wpe)
    pos, q = torch.arange(300)[None], torch.zeros(1, 4, 300, 4, dtype=torch.float64)
    return model.wpe.bias(q, pos, pos).tril(), theirs.compute_bias(300, 300).tril()


def mla(monkeypatch, detail):
    """DeepSeek-V3, without a latent for queries."""
    arm = dict(mixer="mla", latent_rank=6, rope_head_dim=4, head_dim=6)
    model = randomised(config("llama", arm))
    ours = model.blocks[1].attn
    latent = dict(q_lora_rank=None, kv_lora_rank=6, rope_interleave=False, num_key_value_heads=4)
    widths = dict(qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=6)
    theirs = attention_of("deepseek_v3", "DeepseekV3", **latent | widths)
    give(theirs, ours, "qo")
    theirs.kv_a_proj_with_mqa.weight.copy_(ours.wd.weight)
    theirs.kv_a_layernorm.weight.copy_(ours.latent_norm.weight)
    theirs.kv_a_layernorm.variance_epsilon = model.config.norm_eps
    theirs.kv_b_proj.weight.copy_(ours.wu.weight)
    detail(ours)
    return outputs(model, theirs, monkeypatch)


def differential(monkeypatch, detail):
    """DiffLlama, with the heads that share keys and values."""
    model = randomised(config("llama", dict(mixer="differential", n_kv_head=2)))
    ours = model.blocks[1].attn
    ours.pair_norm.weight.fill_(1.0)  # theirs has no weight
    sizes = dict(num_key_value_heads=2, rms_norm_eps=model.config.norm_eps)
    theirs = attention_of("diffllama", "DiffLlama", **sizes)
    give(theirs, ours)
    for vector in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        getattr(theirs, vector).copy_(getattr(ours, vector))
    detail(ours)
    return outputs(model, theirs, monkeypatch)


def having(attribute, value):
    return lambda mixer: setattr(mixer, attribute, value)


def without(word):
    """The mistake that a word of attn_extra is not there."""
    return lambda mixer: mixer.extras.pop(word)


MODELS = {  # the independent model of each part, and mistakes that the comparison must show
    attn_gate: [
        without("gate_element"),
        lambda mixer: mixer.gate.weight.copy_(mixer.gate.weight.roll(4, 0)),  # of other heads
    ],
    attn_sink: [without("sink"), lambda mixer: mixer.sinks.neg_()],
    value_residual: [
        without("value_residual"),
        without("gate_head"),
        lambda mixer: mixer.share.fill_(0.7),
    ],
    t5: [having("farthest", 127)],
    mla: [lambda mixer: mixer.wq.weight.mul_(math.sqrt(10 / 6))],  # scaled as if none were rotated
    differential: [having("start", 0.8 - 0.6 * math.exp(-0.3 * 2))],  # layers counted from one
}


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_it_is_theirs_and_a_mistake_would_be_seen(model, monkeypatch):
    with monkeypatch.context() as patch:
        assert close(*model(patch, lambda mixer: None), 1e-9)
    for mistake in MODELS[model]:
        with monkeypatch.context() as patch:
            assert not close(*model(patch, mistake), 1e-9)


# ---------------------------------------------------------------- latent attention


@torch.no_grad()
@pytest.mark.parametrize("base", ["gpt2", "llama"])  # with biases and without
def test_one_token_in_the_other_order_is_the_same(base, monkeypatch):
    """Decoding takes the short way for one token, and never for more, low rank or int8."""
    taken = []
    real = LatentAttention.absorbed
    monkeypatch.setattr(LatentAttention, "absorbed", lambda *args: taken.append(1) or real(*args))
    arm = dict(mixer="mla", latent_rank=5, position="none", head_dim=6)
    model, x = randomised(config(base, arm)), tokens(config(base), T=14)
    full, cache = model(x)[0], KVCache()
    pieces = [model(x[:, a:b], cache=cache)[0] for a, b in ((0, 6), (6, 7), (7, 8), (8, 14))]
    assert close(torch.cat(pieces, 1), full, 1e-9)
    assert len(taken) == 2 * 2  # two tokens, two layers

    ragged = KVCache(pad=torch.tensor([0, 3]))
    padded = torch.stack((x[0], torch.cat((x[0, :3], x[1, :11]))))
    pieces = [model(padded[:, a:b], cache=ragged)[0] for a, b in ((0, 6), (6, 7), (7, 14))]
    assert close(torch.cat(pieces, 1)[1, 3:], model(x[1:, :11])[0][0], 1e-9)

    low_rank, int8 = randomised(config(base, arm | dict(low_rank=3))), model.float()
    quantize(int8)
    for other in (low_rank, int8):
        taken.clear()
        cache = KVCache()
        other(x[:, :6], cache=cache), other(x[:, 6:7], cache=cache)
        assert not taken


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["attention", "differential", "mla"])
def test_the_weights_have_a_dropout_of_their_own(mixer):
    """In training alone, as much as is given, and as much as elsewhere where nothing is given."""

    def changed(**values):
        model = randomised(config("llama", dict(mixer=mixer, **values)))
        x, before = tokens(model.config), model(tokens(model.config))[0]
        for drop in (model.dropout, *(block.mlp.dropout for block in model.blocks)):
            drop.p = 0.0
        for block in model.blocks:
            block.attn.dropout.p = 0.0
        return not torch.equal(model.train()(x)[0], before)

    assert changed(attn_dropout=0.5) and changed(dropout=0.5)
    assert not changed(dropout=0.5, attn_dropout=0.0)
    for more in (dict(attn_softcap=2.0), dict(position="t5")):
        assert mixer == "mla" or changed(attn_dropout=0.5, **more)


def test_which_layers_a_key_acts_in():
    def mixers(**arm):
        return [block.attn for block in Variant(config("llama", arm)).blocks]

    assert [mixer.window for mixer in mixers(window=5, full_every=2)] == [5, 0]
    hybrid = "gated_delta,attention"
    assert [mixer.conv.width for mixer in mixers(mixer=hybrid, conv=2)] == [2, 2]
    state, attention = mixers(mixer=hybrid)
    assert state.conv.width == 4 and not short_convs(attention)

    def read(**arm):
        return [getattr(mixer, "kv_layer", None) for mixer in mixers(kv_shared_by=2, **arm)]

    latent, delta = mixers(mixer="mla,gated_delta", n_embd=64)  # widths that no key gives
    assert (latent.rank, latent.key_width, delta.shape) == (16, 8, (4, 8, 16))
    both = mixers(n_layer=4, attn_extra="value_embed,value_residual", mixer=hybrid)
    assert [hasattr(mixer, "value_table") for mixer in both] == [False, True, False, True]
    assert [hasattr(mixer, "share") for mixer in both] == [False, False, False, True]
    assert read(n_layer=5) == [0, 0, 2, 2, 4]
    assert read(n_layer=6, mixer="mamba2,attention") == [None, 1, None, 1, None, 5]
    c = config("llama", dict(mixer=hybrid, conv_sites="mlp_output"))
    assert all(short_convs(block.mlp) for block in Variant(c).blocks)


def copied(x):
    """x as fsdp gives it to each block: with copies of dictionaries and tuples."""
    if isinstance(x, dict):
        return {key: copied(value) for key, value in x.items()}
    return type(x)(*map(copied, x)) if isinstance(x, Where) else x


def test_shared_keys_reach_each_block():
    """Also where a block is computed again in the backward pass, as by activation checkpointing,
    the last block first; and from copies, as with fsdp."""

    def again(forward):
        return functools.partial(recompute, forward, use_reentrant=False)

    def from_copies(forward):
        return lambda *args: forward(*map(copied, args))

    gradients = []
    for change in (lambda forward: forward, again, from_copies):
        model = randomised(config("llama", dict(kv_shared_by=2, n_layer=4))).train()
        for block in model.blocks:
            block.forward = change(block.forward)
        x = tokens(model.config)
        model(x, x)[1].backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, *others in zip(*gradients, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_no_mask_is_made_where_no_layer_reads_one():
    """A chunk of a long prompt would have one of chunk times text."""
    for arm, reads in (
        (dict(window=5), False),
        (dict(mixer="mamba2", position="none"), False),
        (dict(mixer="mamba2,attention"), True),
    ):
        model, cache = Variant(config("llama", arm)).eval(), KVCache()
        for piece in tokens(model.config, 1, 20).split(10, 1):
            model(piece, cache=cache)
        assert (cache.made is not None) == reads
        assert cache.mask.shape == (1, 1, 10, 20)


@pytest.mark.parametrize("window", [0, 1000])
def test_a_memory_grows_with_the_text(window):
    """A short prompt takes no more than it would without the window, and the text is the same."""
    c = config("llama", dict(window=window, block_size=2000))
    model, x, cache, sizes = randomised(c), tokens(c, 2, 300), KVCache(spare=7), []
    for a, b in itertools.pairwise([0, 20, 21, 90, 91, 200, 300]):
        model(x[:, a:b], cache=cache)
        sizes.append(cache.size() // (2 * 2 * c.n_layer * c.n_embd * 8))  # tokens that have room
    assert sizes == [64, 64, 180, 180, 400, 400]
    cache.rewind(150)  # not full yet: any number of tokens can be dropped
    assert close(model(x[:, 150:], cache=cache)[0], model(x)[0][:, 150:])
