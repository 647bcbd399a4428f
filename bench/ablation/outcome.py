"""The row of a run that has ended: its losses, its trained model's losses beyond the training
context, and a sample of its text."""

import json
from pathlib import Path

import numpy as np
import torch

import sample
from common import files
from common.errors import one_line
from common.runtime import seed_for, set_up
from tokens.token_files import load_split
from training.run_folder import read_log
from weights import checkpoint

CONTEXTS = (1, 2, 4, 8)  # times the training context
SAMPLED = 200  # tokens of the sample
IDENTITY = ("arm", "seed", "lr", "purpose", "config_hash", "code_hash", "out_dir")


# ---------------------------------------------------------------- a trained model


@torch.no_grad()
def extrapolation(model, tokens, runtime, times=CONTEXTS, most=1 << 18):
    """{"1": loss, "2": ...} in nats per token, with 1, 2, 4, 8 times the training context before
    the targets. The targets are the same for all: a quarter of a training context at the end of
    each of several windows, which are spread over tokens (N,). None where the model has no
    positions for the context, or the text is too short. `most` bounds the tokens read for each
    context."""
    T = model.config.block_size
    longest = max((n for n in times if n * T < len(tokens)), default=1)
    count = max(4, min(64, most // (longest * T)))
    ends = np.linspace(longest * T, len(tokens) - 1, count).astype(int)  # of the last targets
    ends = np.unique(ends)
    losses = {}
    for n in times:
        loss = None
        if n <= longest:
            try:
                loss = loss_at_ends(model, tokens, ends, n * T, max(1, T // 4), runtime)
            except ValueError:  # learned positions end at block_size
                loss = None
        losses[str(n)] = loss
    return losses


def loss_at_ends(model, tokens, ends, context, targets, runtime):
    """Mean loss of the last `targets` tokens of windows of `context` tokens with these ends."""
    total, batch = 0.0, max(1, (1 << 14) // context)
    for first in range(0, len(ends), batch):
        part = ends[first : first + batch]
        windows = [np.asarray(tokens[end - context : end + 1]) for end in part]
        windows = torch.from_numpy(np.stack(windows).astype(np.int64))  # (B, context + 1)
        x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        y[:, :-targets] = -1
        with runtime.autocast():
            loss = model(x.to(runtime.device), y.to(runtime.device))[1].item()
        total += loss * len(part)
    return total / len(ends)


@torch.no_grad()
def write_sample(model, tokenizer, prompt, runtime):
    """A prompt and SAMPLED tokens that continue it, with a fixed seed."""
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.start]
    idx = torch.tensor(np.asarray(ids), dtype=torch.long, device=runtime.device)[None]  # (1, T)
    with runtime.autocast():
        stream = sample.generate(
            model,
            idx,
            SAMPLED,
            0.8,
            200,
            seeds=[seed_for(0)],
            vocab_size=tokenizer.vocab_size,
        )
        tokens = [token.item() for token in stream]
    return prompt + tokenizer.decode_bytes(tokens).decode("utf-8", "replace")


def measure_trained(job):
    """{"extrapolation", "sample"} of a run's trained model; {} and None for a run that chooses a
    learning rate, or that has no checkpoint."""
    if job.purpose != "report" or not checkpoint.steps(job.out_dir):
        return {"extrapolation": {}, "sample": None}
    runtime = set_up(job.values["device"], job.values.get("dtype", "auto"))
    model, tokenizer, _, _ = checkpoint.open_run(job.out_dir, "latest", runtime.device)
    folder = Path(job.values.get("data_dir", "data")) / job.values["dataset"]
    tokens = load_split(folder, "val", model.config.block_size)
    text = write_sample(model, tokenizer, job.prompt, runtime)
    return {"extrapolation": extrapolation(model, tokens, runtime), "sample": text}


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


def finished(job):
    """Whether the run's folder is complete already: an array job made it, or the driver was killed
    before it wrote the row."""
    rows, steps = evaluations(job.out_dir), checkpoint.steps(job.out_dir)
    if stored_identity(job.out_dir) != job.identity() or not rows or not steps:
        return False
    return rows[-1]["step"] == steps[-1] == job.values["max_iters"]


def row_of(job, reason, seconds):
    """The row of rows.jsonl of a run that ended, from its folder. It has failed if there is a
    reason, if it lacks its last evaluation, or if its model cannot be measured."""
    rows, last_step = evaluations(job.out_dir), job.values["max_iters"]
    if reason is None and (not rows or rows[-1]["step"] != last_step):
        reason = f"it ended without the evaluation of step {last_step}"
    row = {name: getattr(job, name) for name in IDENTITY}
    if reason is None:
        try:
            row |= measure_trained(job)
        except Exception as error:  # the row of a run must not end the sweep
            reason = f"measuring the trained model: {type(error).__name__}: {one_line(error)}"
    row |= {
        "status": "failed" if reason else "done",
        "reason": reason,
        "wall_seconds": round(seconds, 2),
        "command": job.command,
    }
    return row | origin(job.out_dir) | (final_losses(rows) if rows else {})


def origin(folder):
    """The commit, hardware and versions stored by a run."""
    try:
        versions = json.loads((Path(folder) / "config.json").read_text())["versions"]
        stored = {key: versions[key] for key in ("git_commit", "hardware")}
        return stored | {"versions": versions}
    except (OSError, ValueError, KeyError):
        return {"git_commit": None, "hardware": None}


def final_losses(rows):
    """The losses of a row of rows.jsonl, from the rows of a run's evaluations."""
    best, last = min(rows, key=lambda row: row["val_loss"]), rows[-1]
    return {
        "best_val_loss": best["val_loss"],
        "best_step": best["step"],
        "final_val_loss": last["val_loss"],
        "train_loss": last.get("train_loss"),
        "bits_per_byte": last.get("bits_per_byte"),
        "seconds": last.get("seconds"),
        "curve": [[row["step"], row["val_loss"]] for row in rows],
    }


def drop_checkpoints(job):
    """Remove the checkpoints of a run whose row is written, except those of each arm's first
    reported run, which are kept to sample from."""
    if job.purpose != "report" or job.seed != 0:
        for name in ("ckpt", "latest", "best"):
            files.remove(Path(job.out_dir) / name)
