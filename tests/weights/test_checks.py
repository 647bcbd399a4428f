"""Crafted checkpoints, whose checksums fit: what they claim is checked before it is believed."""

import json
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from helpers.checkpoints import FORMAT_1, copy_run, edit_json, prepare_words, reseal, resume
from parts.architectures import ARCH, configure, make
from training.settings import TrainConfig
from weights import checkpoint, checks


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return prepare_words(tmp_path_factory.mktemp("data"))


@pytest.fixture
def out(tmp_path):
    return copy_run(tmp_path / "run")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def edit_tensors(name, change):
    def edit(folder):
        path = folder / f"{name}.safetensors"
        save_file(change(load_file(path)), path)

    return edit


def without(key, values):
    return {name: value for name, value in values.items() if name != key}


WQ = "blocks.0.attn.wq.weight"
SPOILT = {  # name: (how, what the error says, whether sampling finds it as well)
    "pickle for weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb())),
        "cannot read this safetensors file.*model",
        True,
    ),
    "torch.save for weights": (
        lambda folder: torch.save({"x": Bomb()}, folder / "model.safetensors"),
        "cannot read this safetensors file.*model",
        True,
    ),
    "pickle for moments": (
        lambda folder: (folder / "optimizer.safetensors").write_bytes(pickle.dumps(Bomb())),
        "cannot read this safetensors file.*optimizer",
        False,
    ),
    "state is a list": (
        edit_json("state", lambda state: [1]),
        "a JSON list where.*state.json",
        True,
    ),
    "state without an entry": (
        edit_json("state", lambda state: without("best_step", state)),
        "missing: best_step.*state.json",
        True,
    ),
    "format is a word": (
        edit_json("state", lambda state: state | {"format": "x"}),
        "format must be int, not 'x'.*state.json",
        True,
    ),
    "config without model": (
        edit_json("config", lambda config: without("model", config)),
        "key model is missing.*config.json",
        True,
    ),
    "unknown model": (edit_json("config", lambda config: config | {"model": "rnn"}), "rnn", True),
    "text for a number": (
        edit_json("state", lambda state: state | {"seconds": "long"}),
        "seconds must be float, not 'long'.*state.json",
        True,
    ),
    "text for a step": (
        edit_json("state", lambda state: state | {"step": "20"}),
        "step must be int, not '20'.*state.json",
        True,
    ),
    "a negative step": (
        edit_json("state", lambda state: state | {"step": -1}),
        "step=-1 is negative.*state.json",
        True,
    ),
    "too many digits": (
        edit_json("state", lambda state: state | {"seconds": 10**400}),
        "seconds is too large.*state.json",
        True,
    ),
    "nested too deep": (
        lambda folder: (folder / "config.json").write_text("[" * 200_000 + "]" * 200_000),
        "nested too deep.*config.json",
        True,
    ),
    "not json": (
        lambda folder: (folder / "config.json").write_text("{"),
        "not JSON.*config.json",
        True,
    ),
    "a weight too few": (
        edit_tensors("model", lambda tensors: without(WQ, tensors)),
        f"weights do not fit the model.*{WQ}",
        True,
    ),
    "a weight too many": (
        edit_tensors("model", lambda tensors: tensors | {"module.x": torch.zeros(1)}),
        "weights do not fit the model.*module.x",
        True,
    ),
    "a weight of another shape": (
        edit_tensors("model", lambda tensors: tensors | {WQ: torch.zeros(3, 8)}),
        f"weights do not fit the model.*{WQ}",
        True,
    ),
    "four weights too few": (
        edit_tensors("model", lambda tensors: dict(list(tensors.items())[4:])),
        "weights do not fit the model",
        True,
    ),
    "a moment too few": (
        edit_tensors(
            "optimizer",
            lambda tensors: {name: value for name, value in tensors.items() if WQ not in name},
        ),
        f"optimizer state does not fit.*{WQ}",
        False,
    ),
    "a moment of no weight": (
        edit_tensors("optimizer", lambda tensors: tensors | {"module.x/exp_avg": torch.zeros(1)}),
        "optimizer state does not fit.*module.x",
        False,
    ),
    "a moment of another shape": (
        edit_tensors("optimizer", lambda tensors: tensors | {f"{WQ}/exp_avg": torch.zeros(3, 8)}),
        f"optimizer state does not fit.*{WQ}",
        False,
    ),
}


@pytest.mark.parametrize("spoil, words, sampled", SPOILT.values(), ids=SPOILT.keys())
def test_what_a_crafted_checkpoint_lacks_is_named(
    out, data_dir, tmp_path, monkeypatch, spoil, words, sampled
):
    monkeypatch.chdir(tmp_path)
    folder = checkpoint.find(out)
    spoil(folder)
    reseal(folder)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for read in [lambda: resume(out, data_dir)] + [lambda: checkpoint.open_run(out)] * sampled:
        with pytest.raises(UserError, match=words) as caught:
            read()
        text = str(caught.value)
        assert (
            caught.value.status == 2
            and "\n" not in text
            and str(folder) in text
            and "weights_only" not in text
            and len(text) < 600
        )
    assert {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"
    } == before
    assert not Path("exploded").exists()


# ---------------------------------------------------------------- what config.json claims


CLAIMS = {  # what config.json is changed to, and the words of the error
    "n_layer=1000000000": ({"n_layer": 10**9}, "n_layer=1000000000, but there are "),
    "n_layer='2'": ({"n_layer": "2"}, "n_layer must be int, not '2'"),
    "n_layer=0": ({"n_layer": 0}, "n_layer=0 is below 1"),
    "vocab_size=10^12": ({"vocab_size": 10**12}, "weights do not fit the model.*wte.weight"),
    "n_embd=10^15": ({"n_embd": 10**15}, "no model has these sizes"),
    "n_embd=null": ({"n_embd": None}, "n_embd must be int, not None"),
    "n_head=0": ({"n_head": 0}, "n_head=0 is below 1"),
    "n_head=3": ({"n_head": 3}, "n_embd=8 is not divisible by n_head=3"),
    "block_size=-1": ({"block_size": -1}, "block_size=-1 is below 1"),
    "multiple_of=10^15": ({"multiple_of": 10**15}, "weights do not fit the model.*mlp"),
    "multiple_of=10^18": ({"multiple_of": 10**18}, "no model has these sizes"),
    "a part that has no weights": (
        {"position": "learned", "block_size": 10**12},
        "weights do not fit the model: no wpe",
    ),
    "norm_eps=NaN": ({"norm_eps": float("nan")}, "NaN is not a JSON number"),
    "rope_theta=Infinity": ({"rope_theta": float("inf")}, "Infinity is not a JSON"),
    "rope_theta=text": ({"rope_theta": "x"}, "rope_theta must be float, not 'x'"),
    "rope_theta=10^400": ({"rope_theta": 10**400}, "rope_theta is too large"),
    "bias={}": ({"bias": {"on": True}}, "bias cannot be {'on': True}"),
    "rope_thetta": ({"rope_thetta": 1e4}, "unknown key rope_thetta, which resembles rope_theta"),
    "arch": ({"arch": "rwkv"}, "arch cannot be 'rwkv'"),
    "model=[]": ({"model": []}, "model cannot be \\[\\]"),
    "tie_embeddings=1": ({"tie_embeddings": 1}, "tie_embeddings must be bool, not 1"),
}


@pytest.mark.parametrize("claim, words", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_claim_is_checked_before_it_is_believed(out, data_dir, claim, words):
    """One line that names the file and the key, at once, for sampling and for resuming."""
    folder = checkpoint.find(out)
    edit_json("config", lambda config: config | claim)(folder)
    reseal(folder)
    for read in (lambda: checkpoint.open_run(out), lambda: resume(out, data_dir)):
        began = time.perf_counter()
        with pytest.raises(UserError, match=words) as caught:
            read()
        text = str(caught.value)
        assert caught.value.status == 2 and "\n" not in text and str(folder) in text
        assert time.perf_counter() - began < 5


def test_a_key_of_training_is_no_misspelt_key_of_a_model():
    config = json.loads((FORMAT_1 / "ckpt" / "000020" / "config.json").read_text())
    checks.check_config(config | vars(TrainConfig(model="llama")), Path("config.json"))


def test_a_tokenizer_larger_than_the_model(out):
    folder = checkpoint.find(out)
    edit_json("tokenizer", lambda tokenizer: tokenizer | {"chars": tokenizer["chars"] + "xyz"})(
        folder
    )
    reseal(folder)
    with pytest.raises(UserError, match="tokenizer has 20 tokens, the model 17 .*tokenizer.json"):
        checkpoint.open_run(out)


def test_a_tokenizer_that_is_none_is_named_by_its_file(out):
    folder = checkpoint.find(out)
    edit_json("tokenizer", lambda tokenizer: {"kind": "char", "chars": 5})(folder)
    reseal(folder)
    with pytest.raises(UserError, match=f"tokenizer.*{folder / 'tokenizer.json'}"):
        checkpoint.open_run(out)


def test_variants_load_as_they_were_saved(tmp_path):
    """Each architecture's tensors are those that its configuration announces."""
    for arch in ARCH:
        sizes = dict(n_layer=2, n_embd=32, n_head=4, vocab_size=256, block_size=16, multiple_of=8)
        values = {"model": "llama", "arch": arch, **sizes}
        model = make(configure(values))
        once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        tensors = {name: value for name, value in model.state_dict().items() if name in once}
        folder = tmp_path / arch
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        loaded = checkpoint.load_model(folder, values).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in tensors.items()), arch
