"""Checkpoints that are old, new, crafted or half written, and disks that refuse."""

import collections
import errno
import json
import os
import pickle
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
import train
from common import files
from common.errors import Failure, UserError
from parts.architectures import ARCH, configure, make
from prepare import prepare
from training import run_folder
from training.settings import TrainConfig
from weights import checkpoint, checks

ROOT = Path(__file__).resolve().parent.parent.parent
FORMAT_1 = (
    ROOT / "tests" / "checkpoints" / "format1"
)  # 20 of 40 steps by the code of FORMAT 1, and the text it trained on
LOSSES = {
    21: 1.463037,
    22: 1.461660,
    30: 1.303072,
    40: 1.282067,
}  # of that code without an interruption


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare("words", input=str(FORMAT_1 / "text.txt"), tokenizer="char", data_dir=str(folder))
    return folder


@pytest.fixture
def out(tmp_path):
    """A copy of the checkpoint of FORMAT 1 as a run folder."""
    return Path(shutil.copytree(FORMAT_1, tmp_path / "run"))


def resume(out, data_dir, *more):
    return train.main(
        [
            "--init_from=resume",
            f"--out_dir={out}",
            f"--data_dir={data_dir}",
            "--max_iters=40",
            *more,
        ]
    )


def reseal(folder):
    """Compute the checksums anew, as somebody who crafts a checkpoint would."""
    names = [path.name for path in folder.iterdir() if path.name != "checksums.json"]
    (folder / "checksums.json").write_text(
        json.dumps({name: files.sha256_of(folder / name) for name in sorted(names)})
    )


def copy_as(out, step):
    """A second, later checkpoint, by copying the one there is."""
    new = shutil.copytree(out / "ckpt" / "000020", out / "ckpt" / f"{step:06d}")
    (new / "state.json").write_text(
        json.dumps(json.loads((new / "state.json").read_text()) | {"step": step})
    )
    reseal(new)
    return new


# ---------------------------------------------------------------- formats


def test_format_1_samples(out, capsys):
    sample.main(
        [
            f"--out_dir={out}",
            "--device=cpu",
            "--start=the k",
            "--temperature=0",
            "--num_samples=1",
            "--max_new_tokens=24",
        ]
    )
    assert capsys.readouterr().out.startswith("the k she she she she she she")


def test_format_1_resumes(out, data_dir):
    assert not resume(out, data_dir)
    rows = {
        row["step"]: row["loss"] for row in run_folder.read_log(out / "log.jsonl") if "loss" in row
    }
    assert {step: rows[step] for step in LOSSES} == pytest.approx(LOSSES, abs=1e-4)
    assert checkpoint.FORMAT == 1, (
        "keep a checkpoint of the format before in tests/checkpoints, and a test like this one"
    )


def test_a_newer_format_is_refused(out, data_dir):
    folder = checkpoint.find(out)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format": checkpoint.FORMAT + 1}))
    reseal(folder)
    for read in (lambda: resume(out, data_dir), lambda: checkpoint.open_run(out)):
        with pytest.raises(
            UserError, match=f"has format 2, this code reads 1 .*{folder}.*update this repo"
        ):
            read()


# ---------------------------------------------------------------- crafted, with fitting checksums


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def edit_json(name, change):
    def edit(folder):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return edit


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
        "no safetensors file.*model",
        True,
    ),
    "torch.save for weights": (
        lambda folder: torch.save({"x": Bomb()}, folder / "model.safetensors"),
        "no safetensors file.*model",
        True,
    ),
    "pickle for moments": (
        lambda folder: (folder / "optimizer.safetensors").write_bytes(pickle.dumps(Bomb())),
        "no safetensors file.*optimizer",
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
    "text for a number of samples": (
        edit_json("state", lambda state: state | {"samples": {"words": "all"}}),
        "samples.words must be float, not 'all'.*state.json",
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


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "config.json",
        "tokenizer.json",
        "checksums.json",
    ],
)
def test_sampling_from_a_damaged_checkpoint_names_it_and_the_one_before(out, name):
    folder = copy_as(out, 40)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"(corrupt|not whole).*\({folder}.*go back to step 20"):
        checkpoint.open_run(out)
    (out / "ckpt" / "000020" / "state.json").unlink()  # that one is of no use either
    with pytest.raises(UserError, match="no other checkpoint is left"):
        checkpoint.open_run(out)


# ---------------------------------------------------------------- a save that is cut short


def test_no_room_for_a_checkpoint_is_seen_before_it_is_written(out, data_dir, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    needed = sum(
        (out / "ckpt" / "000020" / name).stat().st_size
        for name in ("model.safetensors", "optimizer.safetensors")
    )
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(10**9, 10**9, needed))
    monkeypatch.setattr(
        checkpoint.safetensors.torch, "save_file", lambda *args: pytest.fail("the write began")
    )
    with pytest.raises(
        Failure,
        match=rf"cannot save step 40: [\d,]+ bytes are needed, {needed:,} are free \({out}"
        ".*free the disk.*step 20",
    ):
        resume(out, data_dir)
    assert [path.name for path in out.glob("ckpt/*")] == ["000020"]


def test_a_folder_that_became_read_only(out, data_dir, monkeypatch):
    def refuse(path, *args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint.Path, "mkdir", refuse)
    with pytest.raises(
        Failure, match="cannot save step 40: Permission denied.*make the folder writable"
    ):
        checkpoint.save(out, 40, {}, {}, {}, {}, {}, False)


def test_killed_while_an_old_checkpoint_is_removed(out, monkeypatch):
    """What bears a step's name is whole at every instant."""
    for step in (30, 40):
        copy_as(out, step)

    def die(path, **more):
        os.unlink(Path(path) / "config.json")
        raise KeyboardInterrupt

    state = json.loads((out / "ckpt" / "000040" / "state.json").read_text()) | {"best_step": 50}
    monkeypatch.setattr(checkpoint.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(out, 50, {}, {}, state, {"model": "llama"}, {}, True)
    monkeypatch.undo()
    assert 50 in checkpoint.steps(out) and not any(
        map(checkpoint.flaw, (out / "ckpt" / f"{step:06d}" for step in checkpoint.steps(out)))
    )


def test_killed_before_the_file_best_was_written(out, monkeypatch):
    state = json.loads((out / "ckpt" / "000020" / "state.json").read_text()) | {"best_step": 40}
    real = files.write

    def die(path, data):
        if path.name == "best":
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(files, "write", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(out, 40, {}, {}, state, {"model": "llama"}, {}, True)
    monkeypatch.undo()
    assert (out / "best").read_text() == "20\n" and checkpoint.find(out, "best").name == "000040"
    checkpoint.save(out, 60, {}, {}, state, {"model": "llama"}, {}, False)
    assert (out / "best").read_text() == "40\n" and checkpoint.steps(out) == [40, 60]


def test_a_renamed_checkpoint_is_found_where_it_lies(out):
    """By this version or an earlier one. Reading changes nothing, as a run may be saving."""
    for step, name in ((40, "000040.old"), (60, ".000060.old-0123456789abcdef")):
        renamed = copy_as(out, step).rename(out / "ckpt" / name)
        (out / "ckpt" / f"{step + 1:06d}.tmp").mkdir()
        before = tree(out)
        assert checkpoint.steps(out)[-1] == step and checkpoint.find(out) == renamed
        assert checkpoint.find(out, step) == renamed
        assert checkpoint.open_run(out)[3]["step"] == step
        assert tree(out) == before
        checkpoint.settle(out)
        assert names(out / "ckpt") == ["000020", f"{step:06d}"]
        shutil.rmtree(out / "ckpt" / f"{step:06d}")


def test_a_checkpoint_replaced_while_it_is_read_is_read_again(out, monkeypatch):
    real, calls = checkpoint.read, []

    def read(folder):
        calls.append(folder)
        if len(calls) == 1:
            shutil.rmtree(folder)
            copy_of(out, "000020")
        return real(folder)

    def copy_of(out, name):
        shutil.copytree(FORMAT_1 / "ckpt" / "000020", out / "ckpt" / name)

    renamed = (out / "ckpt" / "000020").rename(out / "ckpt" / "000020.old")
    monkeypatch.setattr(checkpoint, "read", read)
    assert checkpoint.open_run(out)[3]["step"] == 20
    assert calls == [renamed, out / "ckpt" / "000020"]


def test_a_reader_beside_a_save_always_finds_a_checkpoint(out):
    """The checkpoint is replaced again and again while another thread looks for it."""
    found, done = [], threading.Event()

    def look():
        while not done.is_set():
            found.append(checkpoint.steps(out))

    reader = threading.Thread(target=look)
    reader.start()
    for n in range(300):
        new = shutil.copytree(FORMAT_1 / "ckpt" / "000020", out / "ckpt" / f".{n}")
        checkpoint.put_in_place(new, out / "ckpt" / "000020")
        checkpoint.settle(out)
    done.set()
    reader.join()
    assert len(found) > 10 and all(steps == [20] for steps in found)


# ---------------------------------------------------------------- surroundings of a run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def tree(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def save_again(out, step):
    state = json.loads((FORMAT_1 / "ckpt" / "000020" / "state.json").read_text())
    return checkpoint.save(out, step, {}, {}, state, {"model": "llama"}, {}, True)


@pytest.fixture(autouse=True)
def nothing_warned():
    files.warned.clear()


def refuse(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("function", ["rmtree", "rename"])
def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(out, monkeypatch, capsys, function):
    save_again(out, 40)
    if function == "rmtree":
        monkeypatch.setattr(shutil, "rmtree", refuse(errno.EBUSY))
    else:
        monkeypatch.setattr(Path, "rename", refuse(errno.EBUSY))
    assert save_again(out, 60).is_dir() and save_again(out, 80).is_dir()
    err = capsys.readouterr().err
    assert err.count("warning: cannot remove") >= 1 and "Device or resource busy" in err
    assert checkpoint.find(out).name == "000080" and not checkpoint.flaw(checkpoint.find(out))
    monkeypatch.undo()
    save_again(out, 100)
    assert names(out / "ckpt") == ["000080", "000100"]


def test_what_else_lies_in_ckpt_is_left_alone(out):
    root = out / "ckpt"
    for name in ("notes.tmp", "notes.old", "000030.tmp", "000050", "²"):
        (root / name).write_text("mine")
    for name in ("backup.old", "000020.old2", "0000020", ".000020.partial", "000020.tmp.mine"):
        (root / name).mkdir()
    before = names(root)
    save_again(out, 60)
    assert names(root) == sorted([*before, "000060"])
    assert checkpoint.steps(out) == [20, 60]
    with pytest.raises(Failure, match="cannot save step 50: .*move what has this name out of"):
        save_again(out, 50)
    assert (root / "000050").read_text() == "mine"


def test_leftovers_of_interrupted_saves_are_removed(out):
    for name in ("000010.tmp", ".000010.partial-0123456789abcdef"):
        (out / "ckpt" / name).mkdir()
    shutil.copytree(out / "ckpt" / "000020", out / "ckpt" / "000020.old")
    save_again(out, 60)
    assert names(out / "ckpt") == ["000020", "000060"]


def test_a_file_system_that_cannot_flush_folders_saves(out, monkeypatch, capsys):
    real = os.fsync

    def fsync(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    assert not checkpoint.flaw(save_again(out, 60))
    assert "cannot flush folders" in capsys.readouterr().err


def test_a_colleague_may_read_a_checkpoint(out):
    modes = {stat.S_IMODE(path.stat().st_mode) for path in save_again(out, 60).iterdir()}
    assert modes == {0o666 & ~files.UMASK}


def test_a_checkpoint_that_may_not_be_read(out, monkeypatch):
    path = out / "ckpt" / "000020" / "model.safetensors"

    def sha256_of(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "sha256_of", sha256_of)
    with pytest.raises(UserError, match=f"cannot read the checkpoint: Permission.*{path}.*owner"):
        checkpoint.open_run(out)


@pytest.mark.parametrize("which", ["²", "-1", "1e3", "newest", "9" * 5000])
def test_a_checkpoint_that_has_no_such_name(out, which):
    with pytest.raises(UserError, match="no checkpoint is called"):
        checkpoint.find(out, which)


@pytest.mark.parametrize("name", ["a\0b", "n" * 300, "\ud800"])
def test_a_run_folder_that_cannot_be(tmp_path, name):
    with pytest.raises(UserError, match="cannot look for checkpoints|no checkpoint here"):
        checkpoint.open_run(tmp_path / name)


# ---------------------------------------------------------------- what config.json claims


CLAIMS = {  # what config.json is changed to, and the words of the error
    "n_layer=1000000000": ({"n_layer": 10**9}, "n_layer=1000000000, and the weights have 1 "),
    "n_layer='2'": ({"n_layer": "2"}, "n_layer must be int, not '2'"),
    "n_layer=0": ({"n_layer": 0}, "n_layer=0 is below 1"),
    "vocab_size=10^12": ({"vocab_size": 10**12}, "vocab_size=1000000000000, and the weights have"),
    "n_embd=10^15": ({"n_embd": 10**15}, "n_embd=1000000000000000, and the weights have 8"),
    "n_embd=null": ({"n_embd": None}, "n_embd must be int, not None"),
    "n_head=0": ({"n_head": 0}, "n_head=0 is below 1"),
    "n_head=3": ({"n_head": 3}, "n_embd=8 is not divisible by n_head=3"),
    "block_size=-1": ({"block_size": -1}, "block_size=-1 is below 1"),
    "multiple_of=10^15": ({"multiple_of": 10**15}, "weights do not fit the model.*mlp"),
    "multiple_of=10^18": ({"multiple_of": 10**18}, "no model has these sizes"),
    "a part that has no weights": (
        {"position": "learned", "block_size": 10**12},
        "weights do not fit the model: wpe",
    ),
    "norm_eps=NaN": ({"norm_eps": float("nan")}, "norm_eps: NaN is not a JSON number"),
    "rope_theta=Infinity": ({"rope_theta": float("inf")}, "rope_theta: Infinity is not a JSON"),
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
