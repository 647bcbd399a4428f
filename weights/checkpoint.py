"""
Checkpoints: how a run is saved, found, verified and loaded.

    out_dir/ckpt/000250/   {model,optimizer}.safetensors {state,config,tokenizer,checksums}.json
    out_dir/latest, best   text files, each with the number of a step

A checkpoint is written under a temporary name, with checksums, fsynced, and renamed to its step;
`latest` and `best` change afterwards. So, after the first save, a complete checkpoint exists at
every moment. Only the process that trains writes here. Nothing is ever unpickled.
"""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open

from common import files
from common.errors import Failure, UserError, one_line
from parts.architectures import configure, make
from parts.costs import NoInitialValues
from tokens.tokenizer import tokenizer_from_json
from weights import checks
from weights.checks import FOREIGN, FORMAT

REFERENCE = "reference/"  # begins the names of tensors of the loss (only preferences have some)
MOMENTS = "optimizer.safetensors"
OVERHEAD = 1 << 16  # bytes of headers, checksums and partly filled blocks
STEP = r"(?:[0-9]{6}|[1-9][0-9]{6,})"
NAMES = {  # the folders in ckpt/ that are ours; .tmp and .old are names of earlier versions
    "complete": re.compile(STEP),
    "renamed": re.compile(rf"\.{STEP}\.old-[0-9a-f]{{16}}|{STEP}\.old"),
    "unfinished": re.compile(rf"\.{STEP}\.partial-[0-9a-f]{{16}}|{STEP}\.tmp"),
}

# Keys of earlier versions that are words of attn_extra now: {key: {value: word}}.
FORMER = {
    "attn_gate": {"head": "gate_head", "element": "gate_element"},
    "attn_sink": {True: "sink"},
    "value_residual": {True: "value_residual"},
    "value_embed": {True: "value_embed"},
    "xsa": {True: "xsa"},
}


# ---------------------------------------------------------------- the folders


def step_of(folder):
    """The step of a checkpoint folder, also of one that a save has renamed."""
    return int(re.search("[0-9]+", folder.name)[0])


def entries(out_dir):
    """[(kind of NAMES, step, folder)] of our folders in ckpt/. Reads the directory once and no path
    again, because a save may rename a checkpoint at any time."""
    try:
        with os.scandir(Path(out_dir) / "ckpt") as scan:
            present = [Path(entry) for entry in scan if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:  # ValueError: no path has this name
        what = f"cannot look for checkpoints: {one_line(error)}"
        raise UserError(what, repr(str(out_dir)), "choose another folder") from None
    return [
        (kind, step_of(path), path)
        for path in sorted(present)
        for kind, pattern in NAMES.items()
        if pattern.fullmatch(path.name)
    ]


def checkpoints(out_dir):
    """{step: folder} of the whole checkpoints in a run folder, ascending. A save that replaces a
    checkpoint renames the old one first; until the new one is in place, the old one counts."""
    present = entries(out_dir)
    folders = {step: folder for kind, step, folder in present if kind == "renamed"}
    folders |= {step: folder for kind, step, folder in present if kind == "complete"}
    return dict(sorted(folders.items()))


def steps(out_dir):
    """The steps of the whole checkpoints in a run folder, ascending."""
    return list(checkpoints(out_dir))


def best_of(out_dir):
    """The step of the best checkpoint, or None. state.json of the newest one is read before the
    file `best`: a kill may have come before that file was written."""
    try:
        present = checkpoints(out_dir)
        state = files.read_json(present[max(present)] / "state.json", FOREIGN)
        if state["best_step"] in list(present):  # a list, since the value may be unhashable
            return state["best_step"]
        return int(files.regular(Path(out_dir) / "best").read_text())
    except (OSError, ValueError, LookupError, UserError):
        return None


def runs_beside(out_dir):
    """The names of the run folders in the folder of a missing one, the six newest of them."""
    try:
        found = [path for path in Path(out_dir).parent.glob("*/ckpt") if steps(path.parent)]
        newest = sorted(found, key=os.path.getmtime, reverse=True)
    except (OSError, ValueError, UserError):  # just removed, or no path has this name
        return ""
    return ", ".join(str(path.parent) for path in newest[:6])


def find(out_dir, which="latest", key="out_dir"):
    """The checkpoint folder that `which` (latest, best, or a step) names in a run folder.
    Raises UserError if it is not there. key: the key of the run folder that messages name."""
    which = str(which)
    where = f"checkpoint={which} of {out_dir}"
    present = checkpoints(out_dir)
    if not present:
        fix = f"train first, or name {runs_beside(out_dir) or 'another run folder'}"
        folder = Path(out_dir)
        if (folder / "state.json").is_file():  # a checkpoint itself
            fix = f"name its run, {folder.parent.parent}; this is its step {folder.name}"
        raise UserError("no checkpoint here", f"{key}={out_dir}", fix)

    if which == "latest":  # not from the file `latest`, which is out of date after a kill
        step = max(present)
    elif which == "best":
        step = best_of(out_dir)
        if step is None:
            fix = f"choose latest, or a step from {list(present)}"
            raise UserError("the best step was not saved", where, fix)
    elif re.fullmatch("[0-9]{1,18}", which):
        step = int(which)
    else:
        raise UserError(f"no checkpoint is called {which}", where, "choose latest, best, or a step")
    if step not in present:
        raise UserError(f"no checkpoint of step {step}", where, f"choose from {list(present)}")
    return present[step]


# ---------------------------------------------------------------- saving


def save(out_dir, step, weights, moments, state, config, tokenizer, best):
    """Save a checkpoint of `step` and return its folder. Takes the weights {name: tensor}, the
    optimizer state `moments` {"parameter name/state name": tensor}, three dictionaries for JSON,
    and whether it is the best so far. Keeps the last two checkpoints and the best. Raises Failure
    if the write fails; the earlier checkpoints then stay as they are."""
    folder = Path(out_dir) / "ckpt" / f"{step:06d}"
    temporary = files.partial(folder)
    texts = {
        "state": json.dumps({**state, "format": FORMAT, "step": step}, indent=1),
        "config": json.dumps(config, indent=1),
        "tokenizer": json.dumps(tokenizer),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        settle(out_dir)
        check_room(folder.parent, weights, moments, texts)
        write_files(temporary, weights, moments, texts)
        put_in_place(temporary, folder)
    except (OSError, SafetensorError) as error:  # a full disk, most often
        what = f"cannot save step {step}: {getattr(error, 'strerror', None) or error}"
        last = max(checkpoints(out_dir), default=None)
        resume = "start again"
        if last is not None:
            resume = f"--init_from=resume continues from step {last}"
        raise Failure(what, folder, f"{files.remedy(error)}, then {resume}") from error
    finally:
        files.remove(temporary)

    files.write(Path(out_dir) / "latest", f"{step}\n")
    best_step = step if best else best_of(out_dir)
    if best_step is not None:
        files.write(Path(out_dir) / "best", f"{best_step}\n")
    settle(out_dir)
    present = checkpoints(out_dir)
    newest = list(present)[-2:]
    for old in present.keys() - {*newest, best_step, step}:
        discard(present[old])
    return folder


def check_room(root, weights, moments, texts):
    """Raise OSError if the disk has too little room for a checkpoint."""
    needed = OVERHEAD + sum(len(text) for text in texts.values())
    needed += sum(tensor.nbytes for tensor in (*weights.values(), *moments.values()))
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")


def write_files(folder, weights, moments, texts):
    """Write the files of a checkpoint into a new folder, with their checksums, and flush them."""
    folder.mkdir()
    for name, tensors in (("model", weights), ("optimizer", moments)):
        path = folder / f"{name}.safetensors"
        safetensors.torch.save_file(tensors, path)
        files.share(path)
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text)
    sums = {path.name: files.sha256_of(path) for path in sorted(folder.iterdir())}
    (folder / "checksums.json").write_text(json.dumps(sums, indent=1))
    for path in folder.iterdir():
        files.sync(path)
    files.sync(folder)


def put_in_place(temporary, folder):
    """Rename a finished checkpoint to its final name. A folder cannot replace another in one
    operation, so an old checkpoint of the same step is renamed first; `checkpoints` still finds it
    under that name."""
    if folder.is_dir():
        os.rename(folder, files.partial(folder, "old"))
    os.rename(temporary, folder)
    files.sync(folder.parent)


def settle(out_dir):
    """Clean up after an interrupted save: restore a checkpoint that it renamed and never replaced,
    and remove unfinished ones. Only the process that trains may do this."""
    for kind, step, path in entries(out_dir):
        folder = path.with_name(f"{step:06d}")
        if kind == "unfinished":
            files.remove(path)
        elif kind == "renamed" and folder.is_dir():
            discard(path)
        elif kind == "renamed":
            path.rename(folder)


def discard(folder):
    """Remove a checkpoint. It gets a temporary name first, so that a kill during the removal leaves
    no partial checkpoint under a checkpoint's name."""
    temporary = files.partial(folder.with_name(f"{step_of(folder):06d}"))
    try:
        folder.rename(temporary)
    except OSError as error:
        files.warn_once(f"cannot remove {folder}: {error.strerror}; remove it by hand")
    else:
        files.remove(temporary)


# ---------------------------------------------------------------- verifying


def flaw(folder):
    """Compare a checkpoint with its checksums. Returns None if they match, else (what, where)."""
    required = ("model.safetensors", "state.json", "config.json", "tokenizer.json")
    try:
        sums = files.parse_json(files.regular(folder / "checksums.json").read_bytes())
        foreign = sums.keys() - {*required, MOMENTS}
        if foreign:
            what = f"checksums.json names {checks.first_three(foreign)}, no file of a checkpoint"
            return what, folder / "checksums.json"
        if not (folder / MOMENTS).exists():  # the weights alone can be sampled
            sums.pop(MOMENTS, None)
        expected = dict.fromkeys(required) | sums  # None, so a flaw, for a file that sums lacks
        for name, sha256 in expected.items():
            actual = files.sha256_of(folder / name)
            if actual != sha256:
                what = f"sha256 {actual[:12]}, not {str(sha256)[:12]}"
                return f"the checkpoint is corrupt: {what}", folder / name
    except PermissionError as error:
        what = f"cannot read the checkpoint: {error.strerror}"
        raise UserError(what, error.filename, "ask its owner for permission") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"the checkpoint is not whole: {error}", folder
    return None


def with_todays_keys(config):
    """The stored configuration of a run, with today's keys instead of FORMER."""
    if "attn_extra" in config or FORMER.keys().isdisjoint(config):
        return config
    extras = [words[config[key]] for key, words in FORMER.items() if config.get(key) in words]
    kept = {key: value for key, value in config.items() if key not in FORMER}
    return kept | {"attn_extra": ",".join(extras) or "none"}


def read(folder):
    """(state, config, tokenizer) of a checkpoint folder, as dictionaries. Raises UserError unless
    the checksums match and every value has the type and range that later code relies on."""
    folder = Path(folder)
    wrong = flaw(folder)
    if wrong:
        others = checkpoints(folder.parent.parent)
        others.pop(step_of(folder), None)
        good = next((step for step in reversed(others) if not flaw(others[step])), None)
        fix = "start again" if good is None else f"go back to step {good}: remove this folder"
        raise UserError(*wrong, fix)

    state = files.read_json(folder / "state.json", FOREIGN)
    config = files.read_json(folder / "config.json", FOREIGN)
    tokenizer = files.read_json(folder / "tokenizer.json", FOREIGN)
    checks.check_state(state, folder / "state.json")
    config = with_todays_keys(config)
    checks.check_config(config, folder / "config.json")
    return state, config, tokenizer


# ---------------------------------------------------------------- loading


def load_model(folder, config, device="cpu", fix=FOREIGN):
    """The model of a checkpoint folder on `device`. One with a smaller block_size than the stored
    one takes the first learned positions. Raises UserError, which names `fix`, if the tensors do
    not fit the configuration."""
    path = Path(folder) / "model.safetensors"
    tensors = checks.read_tensors(path)
    made = configure(config)
    positions = tensors.get("wpe.weight")
    is_learned = getattr(made, "position", "learned") == "learned"  # not t5's or relative's table
    if is_learned and positions is not None and positions.dim() == 2:
        tensors["wpe.weight"] = positions[: made.block_size]
    checks.check_fit(config, tensors, path, fix)
    with NoInitialValues():  # the file has them all
        model = make(made)
    model.load_state_dict(tensors, strict=False)  # of a tied weight's names the file has one
    return model.to(device)


def optimizer_tensors(folder):
    """The optimizer state of a checkpoint, {"parameter name/state name": tensor}, and what is
    stored with it under REFERENCE, (rows,) each. Raises UserError if it is missing or does not fit
    the weights."""
    path = folder / MOMENTS
    tensors = checks.read_tensors(path, "start a new run from these weights: --init_from=RUN")
    with safe_open(folder / "model.safetensors", "pt") as file:
        weights = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118

    wrong = []
    with_state = set()
    for key, tensor in tensors.items():
        name = key.rpartition("/")[0]
        if not key.startswith(REFERENCE):
            with_state.add(name)
            if list(tensor.shape) not in ([], weights.get(name)):  # []: a count of steps
                wrong.append(key)
    if with_state:  # none before the first step; afterwards every matrix has a state
        wrong += [name for name in weights if len(weights[name]) > 1 and name not in with_state]
    wrong += with_state - weights.keys()
    if wrong:
        what = f"the optimizer state does not fit the model: {checks.first_three(wrong)}"
        raise UserError(what, path, FOREIGN)
    return tensors


def open_run(out_dir, which="latest", device="cpu", key="out_dir"):
    """(model in evaluation mode, tokenizer, config, state) of a run folder, for sampling."""
    folder = find(out_dir, which, key)
    try:
        state, config, tokenizer = read(folder)
        model = load_model(folder, config, device).eval()
    except (OSError, SafetensorError, UserError):
        if folder.is_dir():
            raise
        return open_run(out_dir, which, device, key)  # a save has just removed this one: again

    path = folder / "tokenizer.json"
    tokenizer = tokenizer_from_json(tokenizer, path)
    checks.check_vocabulary(tokenizer, model.config.vocab_size, path, FOREIGN)
    return model, tokenizer, config, state
