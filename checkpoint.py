"""
Run folders: atomic save and load, and the models by name.

    out_dir/config.json    the resolved configuration, versions, git commit
    out_dir/log.jsonl      a line per report and evaluation
    out_dir/ckpt/000250/   model.safetensors optimizer.safetensors state.json config.json tokenizer.json
    out_dir/latest  best   the step each names

A checkpoint is written under a temporary name, with checksums, fsynced, and renamed to its step;
`latest` and `best` change afterwards. So at every instant at least one whole checkpoint exists.
Tensors are safetensors and everything else JSON: nothing is ever unpickled.
"""
import hashlib
import json
import os
import shutil
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from configurator import build
from errors import Failure, UserError
from tokenizer import tokenizer_from_json
from variants import choose

FORMAT = 1  # of the checkpoint folder; raised when an older reader could no longer understand it


def write(path, data):
    """Write text or bytes to `path` atomically: temporary name, fsync, rename, fsync of the folder."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path):
    """Flush a file or a folder to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- saving


def save(out_dir, step, weights, moments, state, config, tokenizer, best):
    """Save a checkpoint of `step`: weights {name: tensor}, optimizer state {"name/state name": tensor}, and what
    JSON can hold; best: whether it is the best so far. The last two and the best are
    kept. Failure when the disk refuses; then the checkpoints of before are as they were."""
    root = Path(out_dir) / "ckpt"
    root.mkdir(parents=True, exist_ok=True)
    settle(out_dir)
    folder, temporary = root / f"{step:06d}", root / f"{step:06d}.tmp"
    try:
        temporary.mkdir()
        safetensors.torch.save_file(weights, temporary / "model.safetensors")
        safetensors.torch.save_file(moments, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps({**state, "format": FORMAT, "step": step}, indent=1))
        (temporary / "config.json").write_text(json.dumps(config, indent=1))
        (temporary / "tokenizer.json").write_text(json.dumps(tokenizer))
        sums = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
        (temporary / "checksums.json").write_text(json.dumps(sums, indent=1))
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        if folder.exists():  # this step was saved before: it steps aside, and is looked for there
            os.rename(folder, root / f"{step:06d}.old")
        os.rename(temporary, folder)
        sync(root)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):  # a full disk, most often
            last = pointer(out_dir, "latest")
            raise Failure(f"cannot save step {step}: {getattr(error, 'strerror', None) or error}", folder, f"free the disk, then --init_from=resume goes on from {f'step {last}' if last else 'the start'}") from error
        raise
    write(Path(out_dir) / "latest", f"{step}\n")
    if best:
        write(Path(out_dir) / "best", f"{step}\n")
    settle(out_dir)
    keep = {*steps(out_dir)[-2:], pointer(out_dir, "best"), step}
    for old in steps(out_dir):
        if old not in keep:
            shutil.rmtree(root / f"{old:06d}")
    return folder


def settle(out_dir):
    """End what a killed save began: bring back a checkpoint that stepped aside for one that never came, and
    drop what is left."""
    for old in (Path(out_dir) / "ckpt").glob("*.old"):
        if old.with_suffix("").exists():
            shutil.rmtree(old)
        else:
            old.rename(old.with_suffix(""))
    for leftover in (Path(out_dir) / "ckpt").glob("*.tmp"):
        shutil.rmtree(leftover)


# ---------------------------------------------------------------- loading


def steps(out_dir):
    """The steps of the whole checkpoints in out_dir, ascending."""
    return sorted(int(path.name) for path in (Path(out_dir) / "ckpt").glob("*") if path.name.isdigit())


def pointer(out_dir, name):
    """The step that out_dir/latest or out_dir/best names, None if there is none."""
    try:
        return int((Path(out_dir) / name).read_text())
    except (OSError, ValueError):
        return None


def find(out_dir, which="latest"):
    """The checkpoint folder that `which` (latest, best, or a step) names in a run folder."""
    out_dir, which = Path(out_dir), str(which)
    there = steps(out_dir)
    if not there and list((out_dir / "ckpt").glob("*.old")):
        settle(out_dir)
        there = steps(out_dir)
    if not there:
        raise UserError("no checkpoint here", f"out_dir={out_dir}", "train first, or name another run folder with --out_dir")
    if which not in ("latest", "best") and not which.isdigit():
        raise UserError(f"no checkpoint is called {which}", f"out_dir={out_dir}", "choose latest, best, or a step")
    # The newest one there is: the file `latest` may name one that was removed, or be older after a kill.
    step = there[-1] if which == "latest" else pointer(out_dir, "best") if which == "best" else int(which)
    if step not in there:
        raise UserError(f"no checkpoint of step {step}", f"out_dir={out_dir}", f"there are {there or 'none'}")
    return out_dir / "ckpt" / f"{step:06d}"


def verify(folder):
    """Compare every file of a checkpoint with its checksum; UserError naming the first bad one, and the
    checkpoint to go back to."""
    others = [step for step in steps(folder.parent.parent) if step != int(folder.name)]
    fix = f"go back to step {others[-1]}: remove this folder" if others else "no other checkpoint is left here"
    try:
        sums = json.loads((folder / "checksums.json").read_text())
        for name, expected in (dict.fromkeys(("model.safetensors", "state.json", "config.json", "tokenizer.json")) | sums).items():
            found = sha256(folder / name)
            if found != expected:
                raise UserError(f"the checkpoint is corrupt: sha256 {found[:12]}, not {str(expected)[:12]}", folder / name, fix)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the checkpoint is not whole: {error}", folder, fix) from None


def read(folder):
    """(state, config, tokenizer) of a checkpoint folder, verified."""
    folder = Path(folder)
    verify(folder)
    state, config, tokenizer = (json.loads((folder / f"{name}.json").read_text()) for name in ("state", "config", "tokenizer"))
    if not {"format", "step", "data"} <= state.keys() or not isinstance(config.get("model"), str):
        raise UserError("this is no checkpoint of ours", folder, "name a folder that train.py wrote")
    if state["format"] > FORMAT:
        raise UserError(f"the checkpoint has format {state['format']}, this code reads {FORMAT}", folder, "update this repo")
    return state, config, tokenizer


def load_model(folder, config, device="cpu"):
    """The model of a checkpoint folder on `device`, from its stored configuration."""
    try:
        config_class, model_class, values = choose(config)
    except KeyError:
        raise UserError(f"unknown model {config['model']}", folder, "update this repo") from None
    model = model_class(build(config_class, values))
    try:
        safetensors.torch.load_model(model, str(Path(folder) / "model.safetensors"))
    except (RuntimeError, SafetensorError) as error:
        raise UserError(f"the weights do not fit the model: {first_names(error)}", folder, "was it saved by another model?") from None
    return model.to(device)


def optimizer_tensors(folder):
    """The optimizer state of a checkpoint, {"parameter name/state name": tensor}; UserError if it has none."""
    path = Path(folder) / "optimizer.safetensors"
    if not path.exists():
        raise UserError("this checkpoint has weights only", folder, "it samples but cannot be resumed")
    return safetensors.torch.load_file(path)


def first_names(error, most=3):
    """A long error of missing or misshapen weights, cut to its first few lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:most]) + (f"; and {len(lines) - most} more" if len(lines) > most else "")


def open_run(out_dir, which="latest", device="cpu"):
    """(model in evaluation mode, tokenizer, config, state) of a run folder: all that sampling needs."""
    folder = find(out_dir, which)
    state, config, tokenizer = read(folder)
    return load_model(folder, config, device).eval(), tokenizer_from_json(tokenizer), config, state
