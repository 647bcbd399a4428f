"""
Run folders as they are compared: losses, costs, configuration, and whether a run is still going.
Everything is read from log.jsonl, config.json and the newest checkpoint; nothing is written.
"""

import contextlib
import json
import math
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from bench.ablation.settings import variant_config
from bench.ablation.stats import listed
from common import files
from common.configurator import check, keys
from common.errors import UserError
from parts.architectures import idle
from parts.costs import parameters
from tokens.mixture import mixed_fingerprint
from tokens.token_files import load_meta
from training.failures import DIVERGED
from training.run_folder import duration, read_log
from training.settings import ONE_START, TrainConfig
from weights import checkpoint
from weights.checks import check_config

NEEDED = ("dataset", "data_dir", "max_iters", "batch_size", "gradient_accumulation_steps")
UNTOLD = {*ONE_START, "arch", "data_dir", "log", "wandb_log", "wandb_project", "wandb_run_name"}
NO_RUN = "leave it out, or train there first"


@dataclass
class Run:
    """A run folder. An evaluation that lacks a number has nan for it."""

    name: str
    config: dict  # as it is stored
    settings: dict  # what it says, with every slot named, and the versions; without idle keys
    last_step: int  # of the log
    steps: np.ndarray  # [evaluations], ascending
    seconds: np.ndarray  # [evaluations], of training steps alone
    losses: np.ndarray  # [evaluations], of the validation split, nats per token
    bits: np.ndarray  # [evaluations], bits per byte of the same
    step_tokens: int
    tokens_per_second: float  # median over the log; nan if no step is in it
    parameters: float  # nan if they are unknown
    data: str | None  # fingerprint of the data; None before the first checkpoint
    text: tuple | None  # what tells the text whatever its tokens; None if the dataset is not here
    remarks: list = field(default_factory=list)  # sentences about this run

    @property
    def tokens(self):
        return self.steps * self.step_tokens

    @property
    def finished(self):
        """Whether the last evaluation is that of the last step."""
        return len(self.steps) > 0 and self.steps[-1] >= self.config["max_iters"]


def read_run(folder, name):
    """The Run in a folder. Raises UserError if there is none."""
    folder = Path(folder)
    config = read_config(folder)
    rows, remarks = read_log(folder / "log.jsonl"), []
    whole = [row for row in rows if math.isfinite(number(row, "val_loss") + number(row, "step"))]
    evaluations = [row for _, row in sorted({row["step"]: row for row in whole}.items())]
    speeds = [number(row, "tokens_per_second") for row in rows]
    speeds = [speed for speed in speeds if math.isfinite(speed)]
    versions, count = config.get("versions"), math.nan
    settings = config | (versions if isinstance(versions, dict) else {})
    try:
        check_config(config, folder / "config.json")
        model = variant_config(config)
        count, settings = parameters(model), settings | asdict(model)
        settings = {key: settings[key] for key in settings.keys() - idle(asdict(model))}
    except UserError as error:  # such as a word that a later version has dropped
        remarks.append(f"{name}: its parameters are unknown: {error.parts[0]}.")

    data = data_of(folder)
    steps, seconds, losses, bits = (
        np.array([number(row, key) for row in evaluations])
        for key in ("step", "seconds", "val_loss", "bits_per_byte")
    )
    samples = config["batch_size"] * config["gradient_accumulation_steps"]
    made = Run(
        name,
        config,
        settings,
        max((row["step"] for row in rows), default=0),
        steps,
        seconds,
        losses,
        bits,
        samples * config["block_size"],
        statistics.median(speeds) if speeds else math.nan,
        count,
        data,
        text_of(config, data),
        remarks,
    )
    made.remarks += state_remarks(made, folder)
    return made


def number(row, key):
    """A number of a log row; nan if it is missing, too large, or something else."""
    value = row.get(key)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan


def read_config(folder):
    """config.json of a run folder, with the keys that a comparison needs. Raises UserError if the
    folder is no run, or a key has a wrong type."""
    path = folder / "config.json"
    if not folder.is_dir():
        what = "no folder" if folder.exists() else "no such folder"
        raise UserError(what, folder, NO_RUN)
    if (folder / "sweep.json").exists():
        fix = f"compare its arms with python {files.script('bench/report.py')} {folder}"
        raise UserError("this is a sweep, not a run", folder, fix)
    if not path.exists():
        raise UserError("no run here", folder, NO_RUN)
    config = files.read_json(path, NO_RUN)
    kinds = keys(TrainConfig) | {"block_size": int}
    for key in (*NEEDED, "block_size"):
        if key not in config:
            raise UserError(f"no run here: config.json lacks {key}", folder, NO_RUN)
        check(key, config[key], kinds[key], path)
    return config


def data_of(folder):
    """The fingerprint of a run's data, from its newest checkpoint; None if that has none."""
    with contextlib.suppress(UserError, OSError):
        state = files.read_json(checkpoint.find(folder) / "state.json", NO_RUN)
        return state["data"] if isinstance(state.get("data"), str) else None
    return None


def text_of(config, data):
    """(sha256 of the source, bytes of the validation split) of each dataset of a run, which do not
    depend on its tokens; None if the datasets are not here, or are not the run's any more."""
    folders = [Path(config["data_dir"]) / name.strip() for name in config["dataset"].split(",")]
    try:
        metas = [load_meta(folder) for folder in folders]
    except (UserError, OSError, ValueError):
        return None
    if mixed_fingerprint(metas) != data:
        return None
    return tuple((meta["source_sha256"], meta["splits"]["val"]["bytes"]) for meta in metas)


# ---------------------------------------------------------------- remarks


def state_remarks(made, folder):
    """What a reader must know about the state of a run, in sentences."""
    path, found = folder / "log.jsonl", []
    if not path.exists():
        return [f"{made.name} has no log yet."]
    if not path.read_bytes().endswith((b"\n", b"}")) and path.stat().st_size:
        found.append(f"{made.name}: the last line of its log is cut off, and left out.")
    if not len(made.steps):
        found.append(f"{made.name} has no evaluation yet, so it has no curve.")
    if made.finished:
        return found

    where = f"step {made.last_step:,} of {made.config['max_iters']:,}"
    age = duration(max(0.0, time.time() - path.stat().st_mtime))
    if (folder / DIVERGED).exists():
        found.append(f"{made.name} diverged after {where}.")
    elif is_alive(folder):
        found.append(f"{made.name} is still going: {where}.")
    else:
        found.append(
            f"{made.name} is not finished: {where}; no process on this machine trains it, and its"
            f" log was written {age} ago."
        )
    return found


def is_alive(folder):
    """Whether the process whose id is in the lock of a run folder exists on this machine. The lock
    itself is not tried: a run that starts at that moment would be refused."""
    try:
        process = int((folder / "lock").read_text())
        if process > 0:
            os.kill(process, 0)
        return process > 0
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False


# ---------------------------------------------------------------- what may be compared


def differing(runs):
    """{key: [its value in each run]} of the keys that differ among the runs that have them. A run
    without a key, such as rope_theta where there is no rope, has None."""
    found = {}
    for key in sorted({key for each in runs for key in each.settings.keys() - UNTOLD}):
        values = [each.settings[key] for each in runs if key in each.settings]
        if len({json.dumps(value, sort_keys=True) for value in values}) > 1:
            found[key] = [each.settings.get(key) for each in runs]
    return found


def comparable(runs):
    """(whether losses may be compared, whether bits per byte may, sentences that say what not)."""
    prints = [each.data or each.config["dataset"] for each in runs]
    if not all(each.data for each in runs):  # a run without a checkpoint has only the name
        prints = [each.config["dataset"] for each in runs]
    same_tokens, texts, notes = len(set(prints)) < 2, {each.text for each in runs}, []
    same_text = same_tokens or len(texts) == 1 and None not in texts
    if not same_tokens:
        names = listed(dict.fromkeys(each.config["dataset"] for each in runs))
        known = "bits per byte can be" if same_text else "bits per byte only on the same text"
        kind = "one text with different tokens" if same_text else "different data"
        notes.append(f"The runs have {kind} ({names}): losses cannot be compared, {known}.")
    for key, what in (
        ("objective", "different objectives, so their losses are different things"),
        ("eval_tokens", "evaluations of different lengths, so they are scored on different text"),
    ):
        if len({json.dumps(each.config.get(key)) for each in runs}) > 1:
            notes.append(f"The runs have {what} ({key}).")
            same_tokens = same_text = False
    return same_tokens, same_text, notes
