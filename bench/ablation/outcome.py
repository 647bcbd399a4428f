"""The row of a run that has ended: its losses, its trained model's losses beyond the training
context, and a sample of its text."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import sample
import train
from bench.ablation.contexts import CONTEXTS, extrapolation
from bench.ablation.losses import WRONG
from common import files
from common.errors import Failure, one_line
from common.runtime import seed_for, set_up
from tokens.mixture import open_split
from tokens.token_files import load_meta, load_split
from training import parallel
from training.failures import DIVERGED
from training.losses import mean_loss
from training.run_folder import read_log
from weights import checkpoint

SAMPLED = 200  # tokens of the sample
HALVES = ("val_tune", "val_report")  # columns of an evaluation
COLUMN_OF = dict(zip(("exact", "accuracy"), WRONG, strict=True))  # {measure: column of a row}
KINDS = {"pairs": "prompts and answers", "mixture": "several datasets"}
IDENTITY = ("arm", "seed", "lr", "purpose", "config_hash", "code_hash", "out_dir")


# ---------------------------------------------------------------- a trained model


@torch.no_grad()
def write_sample(model, tokenizer, prompt, runtime):
    """A prompt and SAMPLED tokens that continue it, with a fixed seed."""
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.start]
    idx = torch.tensor(np.asarray(ids), dtype=torch.long, device=runtime.device)[None]  # (1, T)
    with runtime.autocast():
        more = {"seeds": [seed_for(0)], "vocab_size": tokenizer.vocab_size}
        tokens = [token.item() for token in sample.generate(model, idx, SAMPLED, 0.8, 200, **more)]
    return prompt + tokenizer.decode_bytes(tokens).decode("utf-8", "replace")


def measure_trained(job, device=None):
    """{"extrapolation", "sample", "test_loss"} of a run's trained model, on a device (None: the
    run's). Empty for a run that is not reported, or that has no checkpoint. Raises Failure if the
    model was trained on other data than the sweep's."""
    found = {"extrapolation": {}, "sample": None, "test_loss": None}
    if job.purpose != "report" or not checkpoint.steps(job.out_dir):
        return found
    runtime = set_up(device or job.values["device"], job.values.get("dtype", "auto"))
    model, tokenizer, _, state = checkpoint.open_run(job.out_dir, "latest", runtime.device)
    if state["data"] != job.data:
        name = job.values["dataset"]
        raise Failure("the dataset changed while the sweep ran", name, "start the sweep again")
    found["sample"] = write_sample(model, tokenizer, job.prompt, runtime)
    if job.kind != "text":
        why = {"why": f"not measured on {KINDS[job.kind]}"}
        return found | {"extrapolation": {str(n): why for n in CONTEXTS}}
    folder = Path(job.values.get("data_dir", "data")) / job.values["dataset"]
    tokens = load_split(folder, "val", model.config.block_size)
    found["extrapolation"] = extrapolation(model, tokens, runtime)
    if "test" in load_meta(folder)["splits"]:
        found["test_loss"] = test_loss(model, folder, runtime, job.values["batch_size"])
    return found


def test_loss(model, folder, runtime, batch_size):
    """The loss in nats per token on the test split, of which nothing was chosen."""
    split = open_split(folder, "test", model.config.block_size)
    learner = SimpleNamespace(model=model, net=parallel.Loss(model))
    config = SimpleNamespace(batch_size=batch_size)
    run = SimpleNamespace(learner=learner, runtime=runtime, config=config)
    loss = mean_loss(train.evaluate(run, split, 0))
    model.eval()
    return loss


# ---------------------------------------------------------------- a run's folder


def stored_identity(folder):
    """The Job.identity stored in a run folder, or None."""
    try:
        return files.parse_json((Path(folder) / "run.json").read_bytes())
    except (OSError, ValueError):
        return None


def evaluations(folder):
    """The rows of the evaluations in a run's log."""
    rows = read_log(Path(folder) / "log.jsonl")
    return [row for row in rows if row.get("val_loss") is not None]


def diverged(folder):
    """The reason of a run that ended because its loss or gradient was not finite, or None."""
    try:
        return files.parse_json((Path(folder) / DIVERGED).read_bytes())["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finished(job):
    """Whether the run in the folder has ended, by an array job or a driver that was killed."""
    rows, steps = evaluations(job.out_dir), checkpoint.steps(job.out_dir)
    if stored_identity(job.out_dir) != job.identity():
        return False
    if diverged(job.out_dir):
        return True
    return bool(rows and steps) and rows[-1]["step"] == steps[-1] == job.values["max_iters"]


def row_of(job, reason, seconds, device=None):
    """The row of rows.jsonl of a run that ended, from its folder.

    It has diverged if its loss or gradient was not finite, or if it ends with a higher loss than it
    began with. It has failed if there is another reason, if it lacks its last evaluation, or if its
    model cannot be measured (on `device`, None: the run's)."""
    rows, last_step = evaluations(job.out_dir), job.values["max_iters"]
    losses = final_losses(rows, job.kind) if rows else {}
    status, why = "diverged", diverged(job.out_dir)
    if why is None and reason is None and (not rows or rows[-1]["step"] != last_step):
        reason = f"it ended without the evaluation of step {last_step}"
    if why is None and reason is None:
        first, final = losses["first_val_loss"], losses["final_val_loss"]
        if first is not None and final > first:
            why = f"the final loss {final:.4g} is above the initial {first:.4g}"
    if why is None:
        status = "failed" if reason else "done"

    row = {name: getattr(job, name) for name in IDENTITY}
    if status == "done":
        try:
            row |= measure_trained(job, device)
        except Exception as error:  # the row of a run must not end the sweep
            status = "failed"
            reason = f"measuring the trained model: {type(error).__name__}: {one_line(error)}"
    row |= {
        "status": status,
        "reason": why or reason,
        "wall_seconds": round(seconds, 2),
        "command": job.command,
    }
    return row | origin(job.out_dir) | losses


def origin(folder):
    """The commit, hardware and versions stored by a run."""
    try:
        versions = json.loads((Path(folder) / "config.json").read_text())["versions"]
        stored = {key: versions[key] for key in ("git_commit", "hardware")}
        return stored | {"versions": versions}
    except (OSError, ValueError, KeyError):
        return {"git_commit": None, "hardware": None}


def final_losses(rows, kind="text"):
    """The losses of a row of rows.jsonl, from the rows of a run's evaluations. A text too short to
    be halved counts as both halves. Bits per byte say nothing about the answers of pairs; of these
    the row holds the shares that are wrong."""
    points = [
        [row["step"], row["val_loss"], *(row.get(half, row["val_loss"]) for half in HALVES)]
        for row in rows
    ]
    best, last = min(points, key=lambda point: point[1]), points[-1]
    right = {key: rows[-1].get(f"report_{key}", rows[-1].get(f"val_{key}")) for key in COLUMN_OF}
    return {
        "first_val_loss": points[0][1] if points[0][0] == 0 else None,
        **dict(zip(("final_val_loss", "final_tune", "final_report"), last[1:], strict=True)),
        **dict(zip(("best_step", "best_val_loss", "best_tune", "best_report"), best, strict=True)),
        "train_loss": rows[-1].get("train_loss"),
        "bits_per_byte": None if kind == "pairs" else rows[-1].get("bits_per_byte"),
        "seconds": rows[-1].get("seconds"),
        "curve": points,
        "blocks": rows[-1].get("val_blocks"),
        **{COLUMN_OF[key]: 1 - share for key, share in right.items() if share is not None},
    }


def drop_checkpoints(job):
    """Remove a run's checkpoints; those of an arm's first reported run stay, to sample from."""
    if job.purpose != "report" or job.seed != 0:
        for name in ("ckpt", "latest", "best"):
            files.remove(Path(job.out_dir) / name)
