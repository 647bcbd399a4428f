"""
Folders of Hugging Face's format: older, sharded, damaged, of another family, on the hub. That they
compute the same is tested in test_families.py.
"""

import json
import math
import os
import re
import shutil
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from common.errors import UserError
from helpers.bpe import bpe
from helpers.families import CASES, IDX, THETA, ours, theirs
from helpers.formats import difference, parts, replace_by_pipe
from helpers.texts import message
from model_llama import MLP, LlamaConfig
from weights import hf, tokenizers
from weights.families import FAMILIES
from weights.hf import load_pretrained, to_ours

pytest.importorskip("transformers")
kinds = pytest.mark.parametrize("kind", ["gpt2", "llama"])


def save(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


# ---------------------------------------------------------------- files


@kinds
@pytest.mark.parametrize("shard", ["50KB", "1GB"])
def test_a_folder_saved_by_transformers(kind, shard, tmp_path):
    reference = theirs(kind).float()
    reference.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard == "50KB")
    if shard == "1GB":  # any name will do where there is one file
        (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    made = ours(*load_pretrained(str(tmp_path)), dtype=torch.float32)
    assert difference(reference, made, IDX) < 1e-3


def test_older_files(tmp_path):
    """Names without the prefix, tables among the weights, a tied head written out, rope_theta at
    the top, GPT-NeoX's own names for it."""
    config, tensors = parts(theirs("gpt2"))
    old = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    old |= {
        "h.0.attn.bias": torch.ones(1, 1, 33, 33, dtype=torch.bool),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
        "lm_head.weight": old["wte.weight"].clone(),
    }
    del config["tie_word_embeddings"]  # then it is tied
    made = ours(*load_pretrained(save(tmp_path, config, old)))
    assert difference(theirs("gpt2"), made, IDX) < 1e-9

    config, tensors = parts(theirs("llama"))
    del config["rope_parameters"], config["tie_word_embeddings"], config["head_dim"]
    older = {"rope_scaling": {"type": "default"}, "rope_theta": 500}
    for rope in (older | {"rope_scaling": None}, older, {"rope_parameters": {"rope_theta": 500.0}}):
        assert difference(theirs("llama"), ours(*to_ours(config | rope, tensors)), IDX) < 1e-5

    config, tensors = parts(theirs("gpt-neox"))
    del config["rope_parameters"]
    own = {"rotary_pct": 0.5, "rotary_emb_base": 500.0}
    unread = {"rope_theta": 3.0, "partial_rotary_factor": 1.0, "rope_type": "x", "factor": 2}
    made = ours(*to_ours(config | own | unread, tensors))
    assert difference(theirs("gpt-neox"), made, IDX) < 1e-5


def test_limits_of_mamba2_as_transformers_4_writes_them(tmp_path):
    """With Infinity, which JSON does not have; other numbers may not be infinite."""
    config, tensors = parts(theirs("mamba2"))
    folder = save(tmp_path, config | {"time_step_limit": [0.0, math.inf]}, tensors)
    assert "Infinity]" in (tmp_path / "config.json").read_text()
    assert difference(theirs("mamba2"), ours(*load_pretrained(folder)), IDX) < 1e-5
    content = tokenizers.to_tokenizer_json(bpe().to_json())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ids = hf.load_tokenizer(folder).encode("the king")
    assert ids.tolist() == bpe().encode("the king").tolist()
    folder = save(tmp_path, config | {"layer_norm_epsilon": math.inf}, tensors)
    assert "layer_norm_epsilon cannot be inf" in message(load_pretrained, folder)


@pytest.mark.parametrize("n_embd", [2, 14, 84, 4096, 5120, 8192])
def test_any_mlp_width(n_embd):
    """The multiplier gives exactly their width, whatever it is."""
    for width in [*range(1, 300), 11008, 14336, 28672, 27648, 18944]:
        values = hf.llama_width(width, n_embd)
        with torch.device("meta"):
            assert MLP(LlamaConfig(n_head=1, n_embd=n_embd, **values)).up.out_features == width


def test_a_smaller_block_size_takes_the_first_positions():
    reference = theirs("gpt2")
    word, values, tensors = to_ours(*parts(reference))
    made = ours(word, values, tensors, block_size=20)
    assert difference(reference, made, IDX[:, :20]) < 1e-9
    with pytest.raises(UserError, match=r"wpe.weight is \(64, 35\), not \(70, 35\)"):
        ours(word, values, tensors, block_size=70)
    word, values, tensors = to_ours(*parts(theirs("llama")))
    assert difference(theirs("llama"), ours(word, values, tensors, block_size=5), IDX) < 1e-5


@kinds
def test_heads_tied_and_untied(kind, tmp_path):
    """Also one that config.json calls tied and is not: transformers does not tie what differs."""
    reference = theirs("gpt2")
    untied = ours(*to_ours(*parts(reference)), tie_embeddings=False)
    assert untied.lm_head.weight is not untied.wte.weight
    assert difference(reference, untied, IDX) < 1e-9
    config, tensors = parts(theirs(kind, tie_word_embeddings=False))
    word, values, weights = to_ours(config, tensors)
    with pytest.raises(UserError, match="head that differs from .*tie_embeddings=False"):
        ours(word, values, weights, tie_embeddings=True)
    made = ours(*load_pretrained(save(tmp_path, config | {"tie_word_embeddings": True}, tensors)))
    assert torch.equal(made.lm_head.weight, tensors["lm_head.weight"])


HUGE = 10**9
REFUSED = {  # {model_type: [(key, value, what the message names instead of the key)]}
    "gpt2": [("layer_norm_epsilon", {"a": "b" * 1000}), ("model_type", "bert")],
    "llama": [
        ("num_attention_heads", HUGE, "n_head"),
        ("rms_norm_eps", math.nan),
        ("num_hidden_layers", HUGE),
        ("vocab_size", 10**12, "wte.weight is"),
        ("intermediate_size", 10**18, "this model cannot be made"),
        ("rope_parameters", {"full_attention": {"rope_theta": 5.0}}, "full_attention"),
        ("rope_parameters", THETA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("hidden_size", None, "hidden_size is missing"),
        ("rope_scaling", "dynamic", "rope_type='dynamic' (rope_scaling of config.json)"),
        ("rope_scaling", {"type": "linear"}, "factor is missing (rope_scaling"),
        ("rope_scaling", {"type": "linear", "factor": "x"}, "factor must be float"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}, "beta_fast=16"),
    ],
    "gpt_neox": [
        ("head_dim", 10),  # transformers reads it, and computes another function
        ("rope_parameters", THETA | {"partial_rotary_factor": 0.25}, "rotary_pct"),  # 3 of 12
    ],
    "qwen3": [("layer_types", ["full_attention", "sliding_attention"])],
    "smollm3": [("no_rope_layers", [0, 1, 1])],
    # It norms queries and keys after rope, which cancels the temperature of YaRN.
    "nanochat": [
        ("rope_parameters", THETA | {"rope_type": "yarn", "factor": 4.0}, "rope_type='yarn'"),
    ],
    "mixtral": [("num_local_experts", HUGE), ("num_experts_per_tok", 6, "top_k")],
    "mamba2": [("n_groups", 7), ("head_dim", 64)],
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_refused(kind):
    """A configuration that is not ours, in one line that names the key: a wrong type of any key
    that is read, and another value of any that is fixed. Tensors that do not fit it."""
    # A key that leaves the table would be read past in silence.
    assert sum(len(family.fixed) for family in FAMILIES.values()) == 130
    family, case = FAMILIES[kind], next(case for case in CASES if CASES[case][0] == kind)
    config, tensors = parts(theirs(case))
    rope = config.get("rope_parameters") or {}
    wrong = {key.name: ["x"] for key in family.keys.values()} | dict.fromkeys(family.fixed, "x")
    read = [(key, wrong[key]) for key in wrong if key not in ("rope_type", "factor")]
    for key, value, *instead in [*read, *REFUSED.get(kind, [])]:
        inner = {"rope_parameters": rope | {key: value}} if key in wrong else {}
        said = message(to_ours, config | inner | {key: value}, tensors)
        named = (instead or [family.in_rope.get(key, key)])[0]
        assert named in said and "config.json" in said and len(said) < 400
    name = next((name for name in tensors if "norm" in name or "ln_" in name), "lm_head.weight")
    without = {other: t for other, t in tensors.items() if other != name}
    assert f"no tensor {name}" in message(to_ours, config, without)
    assert "no place for" in message(to_ours, config, tensors | {"extra": torch.ones(1)})
    first = next(name for name in tensors if "0" in name and name.endswith("weight"))
    for shape in ((), (3, 3, 3), (35, 2)):
        said = message(to_ours, config, tensors | {first: torch.ones(shape)})
        assert "shape that does not fit" in said or f"is {shape}" in said


# ---------------------------------------------------------------- files that are damaged


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole folder, single and in shards, to be damaged in copies."""
    root = tmp_path_factory.mktemp("saved")
    theirs("llama").float().save_pretrained(root / "single")
    theirs("llama").float().save_pretrained(root / "shards", max_shard_size="50KB")
    return root


def second(folder):
    return sorted(folder.glob("model-*.safetensors"))[1]


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def move_into(folder, inner):
    shutil.copytree(folder, folder / inner)
    (folder / CONFIG).unlink()


def as_a_run(folder):
    (folder / WEIGHTS).unlink()
    (folder / CONFIG).write_text('{"max_iters": 5}')


def with_others_without_index(folder):
    (folder / INDEX).unlink()
    shutil.copy(second(folder), folder / "model-00001-of-00099.safetensors")


CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "kind, damage, words",
    [
        ("single", lambda f: (f / CONFIG).unlink(), f"no {CONFIG}"),
        ("single", lambda f: move_into(f, "snapshots/1"), "give the folder in it, .*snapshots/1"),
        ("single", text(CONFIG, b"{oops"), CONFIG),
        ("single", lambda f: truncate(f / WEIGHTS), WEIGHTS),
        ("single", lambda f: (f / WEIGHTS).rename(f / "model.pt"), "model.pt would need unpickl"),
        ("single", lambda f: (f / WEIGHTS).unlink(), "no .*safetensors"),
        ("single", as_a_run, "this run has no checkpoint"),
        ("single", lambda f: replace_by_pipe(f / CONFIG), "it is a pipe or a device"),
        ("single", lambda f: replace_by_pipe(f / WEIGHTS), f"it is a pipe or a device.*{WEIGHTS}"),
        ("shards", lambda f: truncate(second(f)), "model-00002-of"),
        ("shards", lambda f: second(f).unlink(), "cannot read .*model-00002-of"),
        ("shards", text(INDEX, b'{"weight_map": {"a": "../a"}}'), "weight_map does not.*index"),
        ("shards", with_others_without_index, "is in model-00001-of-00099.* and in model-"),
        ("single", text("adapter_config.json", b"{}"), "adapter_config.json is of an adapter"),
    ],
)
def test_a_damaged_folder(saved, kind, damage, words, tmp_path):
    folder = shutil.copytree(saved / kind, tmp_path / "copy")
    damage(folder)
    assert re.search(words, message(load_pretrained, str(folder)))


def test_the_index_decides_which_shards_belong_to_the_model(saved, tmp_path):
    folder = shutil.copytree(saved / "shards", tmp_path / "copy")
    other = {"model.norm.weight": torch.ones(84)}
    safetensors.torch.save_file(other, folder / "model-00099-of-00099.safetensors")
    read = load_pretrained(str(folder))[2]
    for name, tensor in load_pretrained(str(saved / "single"))[2].items():
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize(
    "case, prefix, table",
    [
        ("gpt2", "_orig_mod.", "transformer.wte.weight"),
        ("llama-tied", "module._orig_mod.", "model.embed_tokens.weight"),
    ],
)
def test_names_with_a_wrapper_and_a_tied_matrix_under_its_other_name(case, prefix, table, tmp_path):
    config, tensors = parts(theirs(case))
    tensors["lm_head.weight"] = tensors.pop(table)
    wrapped = {prefix + name: tensor for name, tensor in tensors.items()}
    made = ours(*load_pretrained(save(tmp_path, config, wrapped)))
    assert difference(theirs(case), made, IDX) < 1e-5
    assert made.lm_head.weight is made.wte.weight


def test_names_that_ask_no_network(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "fetch", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.setattr(os.path, "expanduser", lambda name: name)  # its answer without a home
    monkeypatch.chdir(tmp_path)
    for name in ("gtp2", "/no/such/folder", "a/b/c", "~/nothing", "n" * 300):
        said = message(load_pretrained, name)
        assert "gpt2-medium" in said and f"init_from={name}" in said
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert "not a folder" in message(load_pretrained, str(tmp_path / "weights.safetensors"))
    for name in ("meta.json", "train.bin"):
        (tmp_path / name).touch()
    assert "a dataset, not a model" in message(hf.load_tokenizer, str(tmp_path), "--tokenizer")
    shutil.copytree(saved / "single", "gpt2")  # a folder comes first, as in transformers
    assert load_pretrained("gpt2")[0] == "llama"
    assert "tokenizer.json): write it with transformers" in message(hf.load_tokenizer, "gpt2")


def test_the_hub_out_of_reach(monkeypatch, tmp_path):
    """No network: one line that says what to do instead, at once."""
    import huggingface_hub

    unreachable = OSError("no network in tests")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unreachable))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = message(load_pretrained, "some-body/llama-not-there")
    assert "huggingface.co/some-body/llama-not-there" in said and "give its folder" in said


def test_the_hub(saved, monkeypatch, tmp_path):
    """gpt2-xl is openai-community/gpt2-xl; of a repository nothing but safetensors, config and
    tokenizer is fetched, and without a network it is found again."""
    import huggingface_hub

    wanted = [CONFIG, WEIGHTS, INDEX, "model-00001-of-00002.safetensors", "tokenizer.json"]
    others = ["pytorch_model.bin", "model.pt", "onnx/model.onnx", "consolidated.safetensors"]
    stored = [huggingface_hub.RepoFile(path=name, size=1, oid="") for name in wanted + others]
    name = "openai-community/gpt2-xl"
    snapshot = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / ("a" * 40)
    shutil.copytree(saved / "single", snapshot)
    for empty in wanted[2:]:
        (snapshot / empty).touch()

    api = huggingface_hub.HfApi
    info = Mock(return_value=SimpleNamespace(sha=snapshot.name))
    download = Mock()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(api, "model_info", info)
    monkeypatch.setattr(api, "list_repo_tree", Mock(return_value=stored))
    monkeypatch.setattr("huggingface_hub._snapshot_download.hf_hub_download", download)
    assert load_pretrained("gpt2-xl")[0] == "llama"
    assert {call.kwargs["filename"] for call in download.mock_calls} == {*wanted}
    assert info.mock_calls[0].args == (name,) and info.mock_calls[0].kwargs["timeout"] <= 10
    info.side_effect = OSError("no network in tests")
    assert hf.fetch.__wrapped__(name) == snapshot
