"""
Weights from and to Hugging Face's format, against transformers itself: the same random weights,
odd sizes, float64. The weights are large, so that a wrong detail shows; that each one does is
tested too.

    python -m pytest tests/weights/test_formats.py
"""

import json
import math
import os
import re
import shutil
import socket
import sys
from fnmatch import fnmatch

import pytest
import safetensors.torch
import torch

from common.errors import UserError
from helpers.formats import IDX, difference, parts, refused
from helpers.models import random_weights, tokens
from model_llama import MLP, LlamaConfig
from parts.architectures import CORNERS, configure, make
from weights import hf
from weights.export import to_hf
from weights.hf import llama_width, load_pretrained, load_weights, to_ours

transformers = pytest.importorskip("transformers")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

GPT2 = dict(
    vocab_size=999, n_positions=33, n_embd=35, n_head=5, n_layer=2, bos_token_id=0, eos_token_id=0
)
LLAMA = dict(
    vocab_size=999,
    max_position_embeddings=33,
    hidden_size=84,
    num_attention_heads=14,
    num_key_value_heads=7,
    num_hidden_layers=2,
    intermediate_size=107,
    rms_norm_eps=1e-3,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
kinds = pytest.mark.parametrize("kind", ["gpt2", "llama"])  # the rest: test_families.py


def theirs(kind, **changes):
    """A random transformers model in float64, no gain 1 and no bias 0."""
    torch.manual_seed(0)
    if kind == "gpt2":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**GPT2 | {"attn_implementation": "sdpa"} | changes)
        )
    else:  # "eager" computes the softmax in float32
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**LLAMA | {"attn_implementation": "sdpa"} | changes)
        )
    return random_weights(made.double().eval(), 0.5)


def ours(word, values, tensors, dtype=torch.float64, **changes):
    made = make(configure({"model": word} | values | changes)).to(dtype).eval()
    assert type(made) is CORNERS[word][1]
    load_weights(made, tensors)
    return made


def lift_float32(monkeypatch):
    """transformers computes RMSNorm in float32; for a strict comparison, in what it is given."""

    def forward(self, x):
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


# ---------------------------------------------------------------- the same function


@pytest.mark.parametrize("tie", [True, False])
def test_gpt2_equals_transformers(tie):
    reference = theirs("gpt2", tie_word_embeddings=tie)
    word, values, tensors = to_ours(*parts(reference))
    assert word == "gpt2" and values["tie_embeddings"] == tie and values["bias"] is True
    assert difference(reference, ours(word, values, tensors)) < 1e-9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 14},
        {"num_key_value_heads": 1, "intermediate_size": 1},
        {"hidden_size": 28, "num_attention_heads": 7, "intermediate_size": 999},
    ],
    ids=str,
)
def test_llama_equals_transformers(changes, monkeypatch):
    reference = theirs("llama", **changes)
    word, values, tensors = to_ours(*parts(reference))
    made = ours(word, values, tensors)
    assert (
        word == "llama"
        and made.blocks[0].mlp.gate.out_features == reference.config.intermediate_size
    )
    assert difference(reference, made) < 1e-5
    lift_float32(monkeypatch)
    assert difference(reference, made) < 1e-9
    assert difference(reference, made, tokens(1, 70, vocab=999)) < 1e-9, "past block_size too"


@pytest.mark.parametrize(
    "kind, change, least",
    [
        ("gpt2", {"activation_function": "gelu"}, 1e-5),  # the erf form
        ("gpt2", {"activation_function": "relu"}, 1e-2),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, 1e-6),
        ("gpt2", {"scale_attn_weights": False}, 1e-2),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, 1e-2),
        ("llama", {"rms_norm_eps": 1e-5}, 1e-5),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 1e-2),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
            1e-2,
        ),
        ("llama", {"hidden_act": "gelu"}, 1e-2),
        ("llama", "no rope", 1e-2),
        ("llama", "interleaved rope", 1e-2),
        ("llama", "tiled heads", 1e-2),
    ],
    ids=str,
)
def test_a_wrong_detail_shows(kind, change, least, monkeypatch):
    """The reference with one detail changed is far from ours: the tests above would notice."""
    made = ours(*to_ours(*parts(theirs(kind))))
    lift_float32(monkeypatch)
    assert difference(theirs(kind), made) < 1e-9
    if isinstance(change, dict):
        wrong = theirs(kind, **change)
    else:
        wrong = theirs(
            kind, attn_implementation="eager"
        )  # where the parts are functions to be replaced
        assert difference(wrong, made) < 1e-5
        name, part = {
            "no rope": ("apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k)),
            "interleaved rope": (
                "rotate_half",
                lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
            ),
            "tiled heads": ("repeat_kv", lambda x, n: x.repeat(1, n, 1, 1)),
        }[change]
        monkeypatch.setattr(modeling_llama, name, part)
    assert difference(wrong, made) > least


# ---------------------------------------------------------------- files


def save(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@kinds
@pytest.mark.parametrize("shard", ["50KB", "1GB"])
def test_a_folder_saved_by_transformers(kind, shard, tmp_path):
    reference = theirs(kind).float()
    reference.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard == "50KB")
    made = ours(*load_pretrained(str(tmp_path)), dtype=torch.float32)
    assert difference(reference, made) < 1e-3
    if shard == "1GB":  # any name will do where there is one file
        (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
        assert (
            difference(reference, ours(*load_pretrained(str(tmp_path)), dtype=torch.float32)) < 1e-3
        )


@kinds
@pytest.mark.parametrize("tie", [True, False])
def test_round_trip(kind, tie, tmp_path):
    """theirs -> ours -> theirs gives every tensor back to the bit, and transformers reads the
    folder."""
    reference = theirs(kind, tie_word_embeddings=tie)
    config, tensors = parts(reference)
    word, values, _ = to_ours(config, tensors)
    made = ours(*to_ours(config, tensors))
    new_config, new_tensors = to_hf(word, values, made.state_dict())
    assert new_tensors.keys() == tensors.keys()
    assert all(torch.equal(new_tensors[name], tensors[name]) for name in tensors)
    assert to_ours(new_config, new_tensors)[1] == values
    (tmp_path / "config.json").write_text(json.dumps(new_config))
    safetensors.torch.save_file(new_tensors, tmp_path / "model.safetensors", {"format": "pt"})
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert type(again) is type(reference) and not any(info.values())
    assert (again(IDX).logits - reference(IDX).logits).abs().max() < 1e-9


def test_ours_from_scratch_to_transformers(tmp_path):
    """What only ours has: a GPT-2 without biases, and LLaMA's default width."""
    for word, values in (
        ("gpt2", dict(bias=False)),
        ("llama", dict(n_kv_head=1, norm_eps=1e-4, rope_theta=77.0)),
    ):
        config_class, model_class = CORNERS[word]
        config = config_class(
            block_size=33, vocab_size=999, n_layer=2, n_head=5, n_embd=40, **values
        )
        made = random_weights(model_class(config).eval(), 0.5)
        new_config, tensors = to_hf(word, vars(config), made.state_dict())
        (tmp_path / "config.json").write_text(json.dumps(new_config))
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert difference(reference, made) < 1e-3


def test_older_files(tmp_path):
    """Names without the prefix, tables among the weights, a tied head written out, rope_theta at
    the top."""
    config, tensors = parts(theirs("gpt2"))
    old = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    old |= {
        "h.0.attn.bias": torch.ones(1, 1, 33, 33),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
        "lm_head.weight": old["wte.weight"].clone(),
    }
    del config["tie_word_embeddings"]  # then it is tied
    save(folder := tmp_path / "old", config, old)
    assert difference(theirs("gpt2"), ours(*load_pretrained(str(folder)))) < 1e-9
    assert difference(theirs("gpt2"), ours(*to_ours(config, tensors))) < 1e-9

    config, tensors = parts(theirs("llama"))
    del config["rope_parameters"], config["tie_word_embeddings"], config["head_dim"]
    for rope in (
        {"rope_scaling": None, "rope_theta": 500.0},
        {"rope_scaling": {"type": "default"}, "rope_theta": 500},
        {"rope_parameters": {"rope_theta": 500.0}},
    ):
        assert difference(theirs("llama"), ours(*to_ours(config | rope, tensors))) < 1e-5
    config, tensors = parts(theirs("llama", num_key_value_heads=14))
    for key in ("rope_parameters", "rms_norm_eps", "num_key_value_heads"):
        del config[key]
    without = to_ours(config, tensors)[1]
    assert (without["rope_theta"], without["norm_eps"], without["n_kv_head"]) == (
        10000.0,
        1e-6,
        None,
    )


@pytest.mark.parametrize("n_embd", [2, 14, 84, 4096, 5120, 8192])
def test_any_mlp_width(n_embd):
    """The multiplier gives exactly their width, whatever it is."""
    for width in [*range(1, 300), 11008, 14336, 28672, 27648, 18944]:
        values = llama_width(width, n_embd)
        with torch.device("meta"):
            assert MLP(LlamaConfig(n_head=1, n_embd=n_embd, **values)).up.out_features == width


# ---------------------------------------------------------------- into our model


def test_a_smaller_block_size_takes_the_first_positions():
    reference = theirs("gpt2")
    word, values, tensors = to_ours(*parts(reference))
    made = ours(word, values, tensors, block_size=20)
    assert made.wpe.weight.shape == (20, 35)
    assert difference(reference, made, IDX[:, :20]) < 1e-9
    with pytest.raises(UserError, match=r"wpe.weight is \(33, 35\), not \(40, 35\)"):
        ours(word, values, tensors, block_size=40)
    word, values, tensors = to_ours(*parts(theirs("llama")))
    assert difference(theirs("llama"), ours(word, values, tensors, block_size=5)) < 1e-5


def test_heads_tied_and_untied():
    reference = theirs("gpt2")
    word, values, tensors = to_ours(*parts(reference))
    untied = ours(word, values, tensors, tie_embeddings=False)
    assert untied.lm_head.weight is not untied.wte.weight and difference(reference, untied) < 1e-9
    word, values, tensors = to_ours(*parts(theirs("gpt2", tie_word_embeddings=False)))
    with pytest.raises(UserError, match="head that differs from .*tie_embeddings=False"):
        ours(word, values, tensors, tie_embeddings=True)


@kinds
def test_a_head_that_config_json_calls_tied_and_is_not(kind, tmp_path):
    """transformers does not tie what differs."""
    reference = theirs(kind, tie_word_embeddings=False).float()
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.lm_head.weight is not opened.get_input_embeddings().weight
    made = ours(*load_pretrained(str(tmp_path)), dtype=torch.float32)
    assert torch.equal(made.lm_head.weight, opened.lm_head.weight)


def test_weights_are_copied_and_cast():
    word, values, tensors = to_ours(*parts(theirs("llama").bfloat16()))
    made = ours(word, values, tensors, dtype=torch.float32)
    assert made.wte.weight.dtype == torch.float32 and torch.equal(
        made.wte.weight, tensors["wte.weight"].float()
    )
    tensors["wte.weight"].zero_()
    assert made.wte.weight.abs().sum() > 0 and made.wte.weight.requires_grad


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("blocks.1.attn.wq.bias"), r"no blocks.1.attn.wq.bias"),
        (
            lambda t: [t.pop(name) for name in list(t) if "norm" in name],
            r"no blocks.0.norm1.bias, no blocks.0.norm1.weight, no blocks.0.norm2.bias and 7 more",
        ),
        (lambda t: t.update(extra=torch.ones(1)), r"no place for extra"),
        (
            lambda t: t.update({"norm_f.weight": torch.ones(34)}),
            r"norm_f.weight is \(34,\), not \(35,\)",
        ),
        (lambda t: t.pop("wte.weight"), r"no wte.weight"),
    ],
)
def test_load_weights_is_strict(change, words):
    word, values, tensors = to_ours(*parts(theirs("gpt2")))
    made = ours(word, values, tensors)
    before = {name: p.clone() for name, p in made.named_parameters()}
    tensors = {name: torch.zeros_like(t) for name, t in tensors.items()}
    change(tensors)
    with pytest.raises(UserError, match=words):
        load_weights(made, tensors)
    assert all(torch.equal(p, before[name]) for name, p in made.named_parameters()), (
        "nothing was copied"
    )


@pytest.mark.parametrize(
    "kind, key, value",
    [
        ("gpt2", "activation_function", "quick_gelu"),
        ("gpt2", "layer_norm_epsilon", 1e-6),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "quantization_config", {"bits": 8}),
        ("llama", "hidden_act", "gelu"),
        ("llama", "head_dim", 128),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "sliding_window", 4096),
        ("llama", "partial_rotary_factor", 0.5),
        # a size or a number that is none
        ("gpt2", "n_embd", None),
        ("gpt2", "n_head", 0),
        ("gpt2", "n_layer", "two"),
        ("gpt2", "tie_word_embeddings", "yes"),
        ("llama", "num_attention_heads", True),
        ("llama", "intermediate_size", None),
        ("llama", "rms_norm_eps", -1),
        ("llama", "num_key_value_heads", 2.5),
        ("gpt2", "n_layer", "2"),
        ("gpt2", "n_positions", -1),
        ("gpt2", "n_inner", {"a": 1}),
        ("gpt2", "layer_norm_epsilon", {"a": "b" * 1000}),
        ("llama", "rms_norm_eps", math.nan),
        ("llama", "rms_norm_eps", math.inf),
        ("llama", "rms_norm_eps", 10**400),
        ("llama", "hidden_act", ["silu"]),
        ("llama", "mlp_bias", {"a": 1}),
        ("llama", "tie_word_embeddings", 1),
        # a size that the tensors do not have
        ("gpt2", "n_positions", 10**15),
        ("gpt2", "n_layer", 10**9),
        ("llama", "num_hidden_layers", 10**9),
        ("llama", "hidden_size", 84 * 10**13),
        ("llama", "vocab_size", 10**12),
        ("llama", "vocab_size", 998),
        ("llama", "intermediate_size", 10**15),
        ("llama", "intermediate_size", 10**30),
        ("llama", "num_key_value_heads", 14),
        ("llama", "num_attention_heads", 10**9),
    ],
)
def test_a_configuration_that_is_not_ours(kind, key, value):
    config, tensors = parts(theirs(kind))
    message = refused(to_ours, config | {"head_dim": None, key: value}, tensors)
    sizes = {  # told by the tensor that has another shape, or by what does not divide what
        "n_positions": "wpe",
        "hidden_size": "no model has these sizes",
        "vocab_size": "wte.weight is",
        "intermediate_size": "no model has these sizes" if value == 10**30 else "mlp.",
        "num_key_value_heads": "attn.wk",
        "num_attention_heads": "n_head",
    }
    assert key in message or sizes[key] in message
    assert "config.json" in message and len(message) < 400
    assert "leave out" not in message


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400], ids=str)
def test_a_rope_theta_that_is_no_number(value):
    config, tensors = parts(theirs("llama"))
    rope = {"rope_type": "default", "rope_theta": value}
    assert "rope_theta" in refused(to_ours, config | {"rope_parameters": rope}, tensors)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: (t * 10).to(torch.int8), "is of type int8"),
        (lambda t: t.to(torch.float8_e4m3fn), "is of type float8"),
        (lambda t: t > 0, "is of type bool"),
        (lambda t: t.index_fill(0, torch.tensor([1]), math.nan), "holds NaN"),
        (lambda t: t.index_fill(0, torch.tensor([1]), -math.inf), "holds NaN or infinity"),
        (lambda t: t.double().index_fill(0, torch.tensor([1]), 1e300), "holds NaN or infinity"),
    ],
)
def test_tensors_that_are_no_weights(change, words, tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"
    config, tensors = parts(theirs("llama").float())
    save(tmp_path, config, tensors | {name: change(tensors[name])})
    message = refused(load_pretrained, str(tmp_path))
    assert words in message and name in message


@pytest.mark.parametrize(
    "rope, word",
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor must be float"),
        ({"rope_scaling": {"rope_type": ["x"], "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": "x",
                }
            },
            "original_max_position_embeddings must be int",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 20,
                    "low_freq_factor": 2.0,
                }
            },
            "low_freq_factor=2.0",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 20,
                    "beta_fast": 16,
                }
            },
            "beta_fast=16",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 20,
                    "attention_factor": 2.0,
                }
            },
            "attention_factor=2.0",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor=0.5",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta"),
        ({"rope_scaling": "dynamic"}, "rope_type='dynamic'"),
    ],
)
def test_a_rope_that_is_not_ours(rope, word):
    config, tensors = parts(theirs("llama"))
    del config["rope_parameters"]
    assert word in refused(to_ours, config | rope, tensors)


@kinds
def test_tensors_that_do_not_fit(kind):
    config, tensors = parts(theirs(kind))
    assert "bert" in refused(to_ours, config | {"model_type": "bert"}, tensors)
    for garbage in ([], {}, {"model_type": ["gpt2"]}, None, "x"):
        assert "model_type" in refused(to_ours, garbage, tensors)
    first = next(name for name in tensors if "0" in name and name.endswith("weight"))
    assert f"no tensor {first}" in refused(
        to_ours, config, {name: t for name, t in tensors.items() if name != first}
    )
    assert "score.weight" in refused(to_ours, config, tensors | {"score.weight": torch.ones(2)})
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    message = refused(to_ours, config | {layers: 1}, tensors)
    assert "no place for" in message and "more" in message and message.count("1.") == 3
    assert "no tensor" in refused(to_ours, config | {layers: 3}, tensors)
    assert "shape" in refused(to_ours, config, tensors | {first: torch.tensor(1.0)})
    if kind == "gpt2":
        for shape in ((3, 3, 3), (35, 2)):
            assert "shape" in refused(
                to_ours, config, tensors | {"transformer.h.0.attn.c_attn.weight": torch.ones(shape)}
            )
    else:
        assert "q_proj.bias" in refused(
            to_ours, config, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(84)}
        )
        assert "lm_head.weight" in refused(
            to_ours, config, {name: t for name, t in tensors.items() if name != "lm_head.weight"}
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole folder, single and in shards, to be damaged in copies."""
    root = tmp_path_factory.mktemp("saved")
    theirs("llama").float().save_pretrained(root / "whole")
    theirs("llama").float().save_pretrained(root / "shards", max_shard_size="50KB")
    return root


def second(folder):
    return sorted(folder.glob("model-*.safetensors"))[1]


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "kind, damage, words",
    [
        ("whole", lambda f: (f / "config.json").unlink(), "config.json"),
        ("whole", lambda f: (f / "config.json").write_text("{oops"), "config.json"),
        ("whole", lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json"),
        ("whole", lambda f: (f / "config.json").write_text("[1, 2]"), "config.json"),
        ("whole", lambda f: (f / "config.json").write_text("[" * 200_000), "nested too deep"),
        ("whole", lambda f: (f / "config.json").write_text('{"rope_theta": NaN}'), "NaN"),
        ("whole", lambda f: truncate(f / "model.safetensors"), "model.safetensors"),
        ("whole", lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
        (
            "whole",
            lambda f: (f / "model.safetensors").write_bytes(b"\x80\x02}q\x00."),
            "model.safetensors",
        ),
        (
            "whole",
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pytorch_model.bin would need unpickling",
        ),
        (
            "whole",
            lambda f: (f / "model.safetensors").rename(f / "model.pt"),
            "model.pt would need unpickling",
        ),
        ("whole", lambda f: (f / "model.safetensors").unlink(), "no .*safetensors"),
        ("shards", lambda f: truncate(second(f)), "model-00002-of"),
        ("shards", lambda f: second(f).unlink(), "model-00002-of"),
        ("shards", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json"),
        ("shards", lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json"),
        (
            "shards",
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
            "weight_map .*index.json",
        ),
        (
            "shards",
            lambda f: (f / "model.safetensors.index.json").write_text("[" * 200_000),
            "index.json",
        ),
    ],
)
def test_a_damaged_folder(saved, kind, damage, words, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved / kind, folder)
    damage(folder)
    assert re.search(words, refused(load_pretrained, str(folder)))


def test_names_that_are_no_model(tmp_path, monkeypatch):
    """Nothing of this asks the network."""
    monkeypatch.setattr(hf, "fetch", lambda name: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    long = "n" * 300
    for name in ("gtp2", "resum", "/no/such/folder", "./here", "a/b/c", "~/nothing", long):
        message = refused(load_pretrained, name)
        assert "gpt2-medium" in message and f"init_from={name}" in message
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert "not a folder" in refused(load_pretrained, str(tmp_path / "weights.safetensors"))


def test_no_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda name: name)  # its answer without one
    assert "init_from=~/nothing" in refused(load_pretrained, "~/nothing")


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refused(load_pretrained, "some/model")


def test_the_hub_out_of_reach(saved, monkeypatch, tmp_path):
    """No network: one line that says what to do instead, at once."""
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path)
    )  # nothing downloaded before
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2-medium", "some-body/llama-not-there"):
        message = refused(load_pretrained, name)
        assert "huggingface.co/" in message and name in message and "give its folder" in message
    # what was downloaded before is still there
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, local_files_only, **kwargs: str(local_files_only and saved / "whole"),
    )
    assert load_pretrained("gpt2-medium")[0] == "llama"


def test_the_hub(saved, monkeypatch):
    """gpt2-xl is openai-community/gpt2-xl; of a repository nothing but safetensors, config and
    tokenizer is fetched."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "model_info",
        lambda self, name, timeout: (
            asked.append((name, timeout)) or type("Info", (), {"sha": "abc"})
        ),
    )
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **kwargs: asked.append((name, kwargs)) or str(saved / "shards"),
    )
    assert load_pretrained("gpt2-xl")[0] == "llama"
    (name, timeout), (again, kwargs) = asked
    assert (
        name == again == "openai-community/gpt2-xl"
        and timeout <= 10
        and kwargs["revision"] == "abc"
    )

    def fetched(name):
        return any(fnmatch(name, pattern) for pattern in kwargs["allow_patterns"])

    assert all(
        fetched(name)
        for name in (
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        )
    )
    assert not any(
        fetched(name)
        for name in (
            "pytorch_model.bin",
            "model.pt",
            "rust_model.ot",
            "tf_model.h5",
            "onnx/model.onnx",
            "consolidated.safetensors",
        )
    )
