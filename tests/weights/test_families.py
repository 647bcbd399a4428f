"""
Every family of families.py against transformers itself: the same random weights, odd sizes,
float64, texts past the window and past the scaling's threshold. The weights are large, so that a
wrong detail shows.
"""

import json

import pytest
import safetensors.torch
import torch

from common.errors import UserError
from helpers.families import CASES, CORNERS, EAGER, IDX, ours, theirs
from helpers.formats import difference, parts
from helpers.models import random_weights, tokens
from parts.architectures import ARCH, configure, make
from parts.variant import Variant
from weights.export import to_hf
from weights.families import FAMILIES
from weights.hf import to_ours

transformers = pytest.importorskip("transformers")

WORD = {"gpt2": "gpt2", "bloom": "gpt2", "falcon": "gpt2", "gpt_neox": "gpt2"}
cases = pytest.mark.parametrize("case", CASES)


def opened(folder, config, tensors):
    """(the transformers model of a folder with these files, in float64, what was not loaded)."""
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, **EAGER, output_loading_info=True
    )


def lift_float32(monkeypatch, kind):
    """transformers computes norms, states, routers, the softmax and ALiBi in float32; for a strict
    comparison, in float64 if it is given that."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    for name in ("float", "to", "type"):
        real = getattr(torch.Tensor, name)

        def stay(tensor, *args, real=real, **named):
            lower = args[0] is torch.float32 if args else not named
            stays = lower and tensor.dtype == torch.float64
            return tensor if stays else real(tensor, *args, **named)

        monkeypatch.setattr(torch.Tensor, name, stay)
    if kind == "bloom":
        from transformers.models.bloom import modeling_bloom as modeling

        own = modeling.build_alibi_tensor

        def alibi(mask, n, dtype):
            slopes = own(torch.ones(1, 2), n, torch.float64)[:, 0, 1]  # at position 1
            return (slopes[:, None] * torch.arange(mask.shape[1])).repeat(len(mask), 1)[:, None]

        monkeypatch.setattr(modeling, "build_alibi_tensor", alibi)
        gelu = lambda self, x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
        monkeypatch.setattr(modeling.BloomGelu, "forward", gelu)  # its constant has 8 digits


@cases
def test_equals_transformers(case, tmp_path, monkeypatch):
    """theirs -> ours -> theirs gives every tensor back to the bit, and transformers reads the
    folder."""
    kind, _, expected = CASES[case]
    reference = theirs(case)
    config, tensors = parts(reference)
    word, values, weights = to_ours(config, tensors)
    made = ours(word, values, weights)
    assert word == WORD.get(kind, "llama") and isinstance(made, Variant) == (case not in CORNERS)
    assert expected.items() <= values.items()

    new_config, new_tensors = to_hf(word, vars(made.config), made.state_dict())
    assert new_config["model_type"] == kind
    assert new_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(new_tensors[name], tensor)
    same_word, same_values, _ = to_ours(new_config, new_tensors)
    assert (same_word, same_values) == (word, values)
    loaded, info = opened(tmp_path, new_config, new_tensors)
    assert type(loaded) is type(reference) and not any(info.values())
    assert (loaded(IDX).logits - reference(IDX).logits).abs().max() < 1e-5

    assert difference(reference, made, IDX) < 1e-5
    lift_float32(monkeypatch, kind)
    # nanochat's norm comes after the turn, by angles of float32: cos² + sin² is 1 to 1e-7 only.
    assert difference(reference, made, IDX) < (1e-6 if kind == "nanochat" else 1e-9)


def test_a_window_that_is_null_absent_or_not_used():
    config, tensors = parts(theirs("mistral"))
    assert not to_ours(config | {"sliding_window": None}, tensors)[1].get("window")
    del config["sliding_window"]
    assert to_ours(config, tensors)[1]["window"] == 4096

    config, tensors = parts(theirs("qwen2"))
    unused = dict(sliding_window=32768, use_sliding_window=False, max_window_layers=24)
    assert not to_ours(config | unused, tensors)[1].get("window")


@pytest.mark.parametrize("case", ["llama-yarn", "llama-3"])
@pytest.mark.parametrize("at_the_top", [None, 32])  # powers of 2: float32 rounds both alike
def test_a_scaling_without_its_original_context(case, at_the_top, monkeypatch):
    """transformers takes max_position_embeddings, or the one that stands beside it."""
    kind, config, _ = CASES[case]
    scaling = dict(config["rope_parameters"])
    if not at_the_top:  # else that one counts
        del scaling["original_max_position_embeddings"]
    changes = {"rope_parameters": dict(scaling)}  # transformers adds to it what is absent
    if at_the_top:
        changes["original_max_position_embeddings"] = at_the_top
    reference = theirs(case, **changes)
    _, tensors = parts(reference)
    lift_float32(monkeypatch, kind)
    written = {"model_type": kind} | config | changes | {"rope_theta": 500.0}
    del scaling["rope_theta"]
    for place in ("rope_parameters", "rope_scaling"):
        del written["rope_parameters"]
        written[place] = scaling
        word, values, weights = to_ours(dict(written), tensors)
        assert values["rope_original"] == (at_the_top or 64)
        assert difference(reference, ours(word, values, weights), IDX) < 1e-9
        written["rope_parameters"] = {"rope_type": "linear", "factor": 3.0}  # rope_scaling counts


@pytest.mark.parametrize("kind", FAMILIES)
def test_absent_keys_mean_what_they_mean_upstream(kind):
    """A configuration without the keys that have a default in transformers means the same here."""
    family = FAMILIES[kind]
    names = {new: old for old, new in (family.older | family.in_rope).items()}
    default = json.loads(transformers.AutoConfig.for_model(kind).to_json_string(use_diff=False))
    flat = default | (default.get("rope_parameters") or {})
    keys = {key.name: key.default for key in family.keys.values()} | family.absent
    for key, value in keys.items():
        for name in {key, names.get(key)} & flat.keys():
            computed = name in ("num_key_value_heads", "head_dim") and value is None
            if not isinstance(value, type) and not computed and key != "ffn_hidden_size":
                assert flat[name] == value, key


CHANGED = [  # architectures with another part or size
    ("gpt-neox", dict(bias="none")),  # transformers has it with biases only
    ("llama", dict(n_head=5, head_dim=8)),  # LlamaConfig refuses that; Mistral's is the same model
    ("mamba2", dict(low_rank=4)),
    ("mixtral", dict(n_experts=1, top_k=1)),
]


@pytest.mark.parametrize("arch, changes", [*((arch, {}) for arch in ARCH), *CHANGED])
def test_named_architectures(arch, changes, tmp_path):
    """The model_type that --arch=NAME is exported as, or the part that no family has."""
    sizes = dict(block_size=64, vocab_size=99, n_layer=2, n_head=8, n_embd=64) | changes
    made = random_weights(make(configure({"model": "gpt2", "arch": arch} | sizes)).eval(), 0.4)
    blocked = {
        "low_rank": "has low_rank=4 .*mamba2",
        "n_experts": "n_experts=1",
        "transformer2017": "block=post, .*position=sinusoidal",
        "balanced": "mlp=gelu",
        "gpt-oss": "attn_extra=sink",
        "deepseek-v3": "mixer=mla",
        "qwen3-next": "mixer=gated_delta",
    }
    for word in blocked.keys() & {arch, *changes}:
        with pytest.raises(UserError, match=blocked[word]):
            to_hf("gpt2", vars(made.config), made.state_dict())
        return
    config, tensors = to_hf("gpt2", vars(made.config), made.state_dict())
    llama = "mistral" if "head_dim" in changes else "llama"
    kinds = {"llama": llama, "llama2-70b": "llama", "llama3": "llama"}
    assert config["model_type"] == kinds.get(arch, arch.replace("-", "_"))
    reference, info = opened(tmp_path, config, tensors)
    assert not any(info.values())
    assert difference(reference, made.double(), tokens(2, 61)) < 1e-3
