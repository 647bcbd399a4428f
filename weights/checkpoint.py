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

import errno
import json
import os
import shutil
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open

from common.configurator import build
from common.errors import Failure, UserError
from common.files import remedy, sha256_of, sync, write
from parts.architectures import CORNERS, choose
from tokens.tokenizer import tokenizer_from_json

FORMAT = 1  # of the checkpoint folder; raised when an older reader could no longer understand it
OVERHEAD = (
    1 << 16
)  # bytes of a checkpoint besides its tensors and texts: headers, checksums, the ends of blocks


# ---------------------------------------------------------------- saving


def save(out_dir, step, weights, moments, state, config, tokenizer, best):
    """Save a checkpoint of `step`: weights {name: tensor}, optimizer state {"name/state name": tensor}, and what
    JSON can hold; best: whether it is the best so far. The last two and the best are
    kept. Failure when the disk refuses; then the checkpoints of before are as they were."""
    root = Path(out_dir) / "ckpt"
    folder, temporary = root / f"{step:06d}", root / f"{step:06d}.tmp"
    texts = {
        "state": json.dumps({**state, "format": FORMAT, "step": step}, indent=1),
        "config": json.dumps(config, indent=1),
        "tokenizer": json.dumps(tokenizer),
    }
    needed = (
        sum(tensor.nbytes for tensor in (*weights.values(), *moments.values()))
        + sum(map(len, texts.values()))
        + OVERHEAD
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        settle(out_dir)
        free = shutil.disk_usage(root).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")
        temporary.mkdir()
        safetensors.torch.save_file(weights, temporary / "model.safetensors")
        safetensors.torch.save_file(moments, temporary / "optimizer.safetensors")
        for name, text in texts.items():
            (temporary / f"{name}.json").write_text(text)
        sums = {path.name: sha256_of(path) for path in sorted(temporary.iterdir())}
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
            last = (steps(out_dir) or [None])[-1]
            way_on = (
                f"then --init_from=resume goes on from step {last}" if last else "then start again"
            )
            raise Failure(
                f"cannot save step {step}: {getattr(error, 'strerror', None) or error}",
                folder,
                f"{remedy(error)}, {way_on}",
            ) from error
        raise
    write(Path(out_dir) / "latest", f"{step}\n")
    best_one = step if best else pointer(out_dir, "best")
    if best_one is not None:
        write(Path(out_dir) / "best", f"{best_one}\n")
    settle(out_dir)
    keep = {*steps(out_dir)[-2:], best_one, step}
    for old in steps(out_dir):
        if (
            old not in keep
        ):  # renamed first: what bears a step's name is whole, also when killed here
            os.rename(root / f"{old:06d}", root / f"{old:06d}.tmp")
            shutil.rmtree(root / f"{old:06d}.tmp")
    return folder


def bring_back(out_dir):
    """Give a checkpoint its name again that stepped aside for one that never came."""
    for old in (Path(out_dir) / "ckpt").glob("*.old"):
        if not old.with_suffix("").exists():
            old.rename(old.with_suffix(""))


def settle(out_dir):
    """End what a killed save began, and drop what is left of it."""
    bring_back(out_dir)
    for leftover in [
        *(Path(out_dir) / "ckpt").glob("*.old"),
        *(Path(out_dir) / "ckpt").glob("*.tmp"),
    ]:
        shutil.rmtree(leftover)


# ---------------------------------------------------------------- loading


def steps(out_dir):
    """The steps of the whole checkpoints in out_dir, ascending."""
    return sorted(
        int(path.name) for path in (Path(out_dir) / "ckpt").glob("*") if path.name.isdigit()
    )


def pointer(out_dir, name):
    """The step that out_dir/latest or out_dir/best names, None if there is none. What is best, the newest checkpoint
    knows better than the file, which a kill may have left as it was."""
    try:
        newest = Path(out_dir) / "ckpt" / f"{steps(out_dir)[-1]:06d}"
        known = (
            json.loads((newest / "state.json").read_text())["best_step"] if name == "best" else None
        )
        return known if known in steps(out_dir) else int((Path(out_dir) / name).read_text())
    except (OSError, ValueError, LookupError, TypeError):
        return None


def find(out_dir, which="latest"):
    """The checkpoint folder that `which` (latest, best, or a step) names in a run folder."""
    out_dir, which = Path(out_dir), str(which)
    bring_back(out_dir)
    there = steps(out_dir)
    if not there:
        raise UserError(
            "no checkpoint here",
            f"out_dir={out_dir}",
            "train first, or name another run folder with --out_dir",
        )
    if which not in ("latest", "best") and not which.isdigit():
        raise UserError(
            f"no checkpoint is called {which}",
            f"out_dir={out_dir}",
            "choose latest, best, or a step",
        )
    # The newest one there is: the file `latest` may name one that was removed, or be older after a kill.
    step = (
        there[-1]
        if which == "latest"
        else pointer(out_dir, "best")
        if which == "best"
        else int(which)
    )
    if step not in there:
        raise UserError(
            f"no checkpoint of step {step}", f"out_dir={out_dir}", f"there are {there or 'none'}"
        )
    return out_dir / "ckpt" / f"{step:06d}"


def flaw(folder):
    """What is wrong with a checkpoint by its checksums, as (what, where); None if it is whole."""
    try:
        sums = json.loads((folder / "checksums.json").read_text())
        for name, expected in (
            dict.fromkeys(("model.safetensors", "state.json", "config.json", "tokenizer.json"))
            | sums
        ).items():
            found = sha256_of(folder / name)
            if found != expected:
                return (
                    f"the checkpoint is corrupt: sha256 {found[:12]}, not {str(expected)[:12]}",
                    folder / name,
                )
    except (OSError, ValueError, TypeError) as error:
        return f"the checkpoint is not whole: {error}", folder


def verify(folder):
    """Compare every file of a checkpoint with its checksum; UserError naming the first bad one, and the
    newest whole checkpoint to go back to."""
    wrong = flaw(folder)
    if wrong:
        others = [
            step for step in reversed(steps(folder.parent.parent)) if step != int(folder.name)
        ]
        good = next((step for step in others if not flaw(folder.with_name(f"{step:06d}"))), None)
        raise UserError(
            *wrong,
            "no other checkpoint is left here"
            if good is None
            else f"go back to step {good}: remove this folder",
        )


def read(folder):
    """(state, config, tokenizer) of a checkpoint folder, verified."""
    folder = Path(folder)
    verify(folder)
    try:
        state, config, tokenizer = (
            json.loads((folder / f"{name}.json").read_text())
            for name in ("state", "config", "tokenizer")
        )
        missing = [
            key
            for key in ("format", "step", "data", "best_val_loss", "best_step", "seconds")
            if key not in state
        ]
        if (
            missing
            or type(state["format"]) is not int
            or not isinstance(config["model"], str)
            or not isinstance(tokenizer, dict)
        ):
            raise ValueError(
                f"state.json without {', '.join(missing)}"
                if missing
                else "an entry of another kind"
            )
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"this is no checkpoint of ours: {type(error).__name__} {error}",
            folder,
            "name a folder that train.py wrote",
        ) from None
    if state["format"] > FORMAT:
        commit = (config.get("versions") or {}).get("git_commit")
        raise UserError(
            f"the checkpoint has format {state['format']}, this code reads {FORMAT}",
            folder,
            f"update this repo; commit {commit} wrote it",
        )
    if config["model"] not in CORNERS:
        raise UserError(f"unknown model {config['model']}", folder, "update this repo")
    return state, config, tokenizer


def load_model(folder, config, device="cpu"):
    """The model of a checkpoint folder on `device`, from its stored configuration."""
    config_class, model_class, values = choose(config)
    model = model_class(build(config_class, values))
    try:
        safetensors.torch.load_model(model, str(Path(folder) / "model.safetensors"))
    except (RuntimeError, SafetensorError) as error:
        raise UserError(
            f"the weights do not fit the model: {first_names([line.strip() for line in str(error).splitlines() if line.strip()])}",
            folder,
            "was it saved by another model?",
        ) from None
    return model.to(device)


def optimizer_tensors(folder):
    """The optimizer state of a checkpoint, {"parameter name/state name": tensor}; UserError if it has none."""
    path = Path(folder) / "optimizer.safetensors"
    if not path.exists():
        raise UserError(
            "this checkpoint has weights only", folder, "it samples but cannot be resumed"
        )
    try:
        tensors = safetensors.torch.load_file(path)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    except SafetensorError as error:
        raise UserError(
            f"this is no safetensors file: {error}", path, "it was not written by train.py"
        ) from None
    whose = {key: key.rpartition("/")[0] for key in tensors}
    wrong = [
        key
        for key, name in whose.items()
        if name not in shapes or tensors[key].dim() and list(tensors[key].shape) != shapes[name]
    ]
    if tensors:  # before the first step there is no state at all; after it, all matrices have one
        wrong += [
            name for name, shape in shapes.items() if len(shape) > 1 and name not in whose.values()
        ]
    if wrong:
        raise UserError(
            f"the optimizer state does not fit the model: {first_names(wrong)}",
            path,
            "was it saved by another model?",
        )
    return tensors


def first_names(lines, most=3):
    """A long list of missing or misshapen weights, cut to its first few."""
    return "; ".join(lines[:most]) + (
        f"; and {len(lines) - most} more" if len(lines) > most else ""
    )


def open_run(out_dir, which="latest", device="cpu"):
    """(model in evaluation mode, tokenizer, config, state) of a run folder: all that sampling needs."""
    folder = find(out_dir, which)
    state, config, tokenizer = read(folder)
    return load_model(folder, config, device).eval(), tokenizer_from_json(tokenizer), config, state
