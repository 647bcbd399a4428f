"""Crafted checkpoints, whose checksums fit: what they claim is checked before it is believed."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from common.configurator import keys
from common.errors import Failure
from helpers.checkpoints import edit_json, reseal, resume
from helpers.texts import message
from parts.architectures import ARCH, MODEL_KEYS, configure, make
from training.settings import TrainConfig
from weights import checkpoint, checks


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def tensors(name, change):
    def edit(folder):
        path = folder / f"{name}.safetensors"
        save_file(change(load_file(path)), path)

    return edit


def model(**changes):
    return tensors("model", lambda weights: weights | changes)


def moments(**changes):
    return tensors("optimizer", lambda moments: moments | changes)


def content(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def state(**changes):
    return edit_json("state", lambda entries: entries | changes)


def config(**changes):
    return edit_json("config", lambda values: values | changes)


def without(key, values):
    return {name: value for name, value in values.items() if key not in name}


WQ, ONES = "blocks.0.attn.wq.weight", torch.ones(3, 8)
BOMB = pickle.dumps(Bomb())
UNFIT, MOMENTS_UNFIT = "weights do not fit the model", "optimizer state does not fit"
SPOILT = [  # (how, what the error says)
    (content("model.safetensors", BOMB), "cannot read this safetensors file.*model"),
    (edit_json("state", lambda state: [1]), "JSON is a list.*state.json"),
    (edit_json("state", lambda state: without("best_step", state)), "missing: best_step.*state"),
    (state(format="x"), "format must be int, not 'x'.*state.json"),
    (state(format=checkpoint.FORMAT + 1), "has format 2, this code reads 1 .*update this repo"),
    (state(step=-1), "step=-1 is out of range.*state.json"),
    (state(tokens="x"), "tokens must be int, not 'x'.*state.json.: choose another checkpoint"),
    (config(model=None), "model cannot be None.*config.json"),
    (tensors("model", lambda weights: without(WQ, weights)), f"{UNFIT}.*no {WQ}"),
    (model(**{"module.x": torch.zeros(1)}), f"{UNFIT}.*no place for module.x"),
    (model(**{WQ: ONES}), rf"{UNFIT}.*{WQ} is \(3, 8\)"),
    (model(**{WQ: ONES.int()}), f"{WQ} is of type int32"),
    (model(**{WQ: ONES * float("nan")}), f"{WQ} holds NaN or infinity"),
    (model(**{WQ: ONES.double() * -1e300}), f"{WQ} holds NaN or infinity"),
    (config(n_layer=999), "n_layer=999, but there are "),
    (config(rope_twist=True), "unknown key rope_twist.*update this repo"),
    (config(own_keys="pull"), "own_keys must be list"),
    (config(vocab_size=10**12), f"{UNFIT}.*wte.weight"),
    (config(n_embd=10**15), "this model cannot be made"),
    (config(n_head=3), "n_embd=8 is not divisible by n_head=3"),
    (config(position="learned", block_size=10**12), f"{UNFIT}: no wpe"),
    (config(norm_eps=float("nan")), "NaN is not a JSON number"),
    (config(arch="rwkv"), "arch cannot be 'rwkv'"),
]
SPOILT_MOMENTS = [  # what only resuming finds
    (content("optimizer.safetensors", BOMB), "cannot read this safetensors file.*optimizer"),
    (tensors("optimizer", lambda moments: without(WQ, moments)), f"{MOMENTS_UNFIT}.*{WQ}"),
    (config(device=5), "device must be str, not 5.*config.json"),
    (config(dtype=None), "dtype cannot be None.*config.json"),
    (edit_json("config", lambda c: without("optimizer", c) | {"dtype": 0}), "dtype cannot be 0"),
    (lambda folder: (folder / "optimizer.safetensors").unlink(), "No such file.*--init_from=RUN"),
    (moments(**{"module.x/step": torch.zeros(())}), f"{MOMENTS_UNFIT}.*module.x"),
    (moments(**{f"{WQ}/exp_avg": ONES}), f"{MOMENTS_UNFIT}.*{WQ}"),
]


@pytest.mark.parametrize("spoil, words", SPOILT + SPOILT_MOMENTS)
def test_a_crafted_checkpoint_is_refused(out, data_dir, tmp_path, monkeypatch, spoil, words):
    """In one line that names the file and the key or tensor, at once, for sampling and resuming;
    nothing is changed and nothing is run."""
    monkeypatch.chdir(tmp_path)
    folder = checkpoint.find(out)
    spoil(folder)
    reseal(folder)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    sampled = [lambda: checkpoint.open_run(out)] * ((spoil, words) in SPOILT)
    for read in [lambda: resume(out, data_dir), *sampled]:
        said = message(read)
        assert re.search(words, said) and str(folder) in said and len(said) < 600
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "lock"]
    assert {path: path.read_bytes() for path in files} == before
    assert not Path("exploded").exists()


@pytest.mark.parametrize("sums", ['{"../../latest": "0"}', '{"/etc/passwd": "0"}', "[]"])
def test_checksums_are_of_the_own_files_alone(out, sums):
    folder = checkpoint.find(out)
    (folder / "checksums.json").write_text(sums)
    said = message(checkpoint.open_run, out)
    assert str(folder) in said and ("latest" in said) == ("latest" in sums)
    assert "sha256" not in said, "nothing else is read"


def test_a_program_may_have_keys_of_its_own(out):
    folder = checkpoint.find(out)
    edit_json("config", lambda values: values | {"pull": 0.5, "own_keys": ["pull"]})(folder)
    reseal(folder)
    assert checkpoint.read(folder)[1]["pull"] == 0.5


def test_every_key_of_a_run_is_known():
    assert keys(TrainConfig).keys() <= MODEL_KEYS | {*checks.RUN_KEYS}


def test_what_does_not_fit_into_memory_is_one_line_before_it_is_made(out, data_dir, monkeypatch):
    monkeypatch.setattr(checks, "memory_here", lambda: 4 * 1128)
    assert checkpoint.open_run(out)  # 1,128 parameters
    where = ["--device=cpu", f"--data_dir={data_dir}", "--dataset=words", f"--out_dir={out}-new"]
    where += ["--model=llama", "--n_head=1", "--n_layer=1", "--block_size=8", "--multiple_of=8"]
    with pytest.raises(Failure, match="out of memory: .*choose a smaller model"):
        train.main([*where, "--n_embd=4"])
    assert not train.main([*where, "--n_embd=4", "--eval_only"]).status  # it has no gradients
    assert "this model cannot be made" in message(train.main, [*where, "--n_embd=1000000000000000"])
    monkeypatch.setattr(checks, "memory_here", lambda: 4 * 1127)
    with pytest.raises(Failure, match="out of memory: 1,128 parameters"):
        checkpoint.open_run(out)


def test_a_tokenizer_that_does_not_fit_is_named_by_its_file(out):
    folder = checkpoint.find(out)
    edit_json("tokenizer", lambda content: content | {"chars": content["chars"] + "xyz"})(folder)
    reseal(folder)
    said = message(checkpoint.open_run, out)
    assert "tokenizer has 20 tokens, the model 17 " in said
    assert str(folder / "tokenizer.json") in said


@pytest.mark.parametrize("values", [{"arch": arch} for arch in ARCH] + [{"norm": "batchnorm"}])
def test_variants_load_as_they_were_saved(values, tmp_path):
    """Each architecture's tensors are those that its configuration announces."""
    sizes = dict(n_layer=2, n_embd=32, n_head=4, vocab_size=256, block_size=16, multiple_of=8)
    values = {"model": "llama", **values, **sizes}
    model = make(configure(values))
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    saved = {name: value for name, value in model.state_dict().items() if name in once}
    save_file(saved, tmp_path / "model.safetensors")
    loaded = checkpoint.load_model(tmp_path, values).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
