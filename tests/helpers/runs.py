"""Small training runs for tests: data, arguments, losses, weights."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import train
from weights import checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE = [
    *("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=4"),
    *("--log_interval=1", "--warmup_iters=0", "--device=cpu"),
]


def arguments(data_dir, out_dir, *more):
    return [*SIZE, f"--data_dir={data_dir}", "--dataset=words", f"--out_dir={out_dir}", *more]


def losses(out_dir, key="loss"):
    rows = [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row[key]) for row in rows if key in row]


def weights(out_dir):
    """All tensors of the newest checkpoint: weights and optimizer."""
    folder = checkpoint.find(out_dir)
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def same_runs(a, b, more=()):
    """Check that two runs have the same losses, weights and moments; `more` keys of the log."""
    for key in ("loss", "val_loss", "grad_norm", *more):
        one = losses(a, key)
        other = losses(b, key)
        differ = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
        first = differ[:1] or "one run has more steps"
        assert one == other != [], f"the first step that differs, and its {key} in both: {first}"
    assert equal(weights(a), weights(b)), "the losses agree, but not the tensors of the checkpoints"


def nearly_same_losses(a, b, keys=("loss", "val_loss", "grad_norm", "bits_per_byte")):
    """Check that the rows of two runs differ by rounding alone."""
    for key in keys:
        one, other = dict(losses(a, key)), dict(losses(b, key))
        assert len(one) >= 3 and other == pytest.approx(one, abs=2e-5), key


def micro_batches_agree(make):
    """Check that make(keys) trains alike, however its 12 samples are divided. The first loss is the
    mean over all targets, although their number differs between micro-batches."""
    seen = {}
    for size in (12, 3, 1):
        run = make(f"--batch_size={size}", f"--gradient_accumulation_steps={12 // size}")
        mean = run.model(*map(torch.from_numpy, run.samples.get(0, 12)))[1].item()
        seen[size] = [value.item() for _ in range(4) for value in train.train_step(run)]
        assert seen[size][0] == pytest.approx(mean, abs=1e-5)
    for size in (3, 1):
        assert seen[size] == pytest.approx(seen[12], abs=1e-5)


def stop_after(steps, real=train.train_step):
    """Send this process SIGTERM while it takes its step number `steps`; only once."""

    def step_and_signal(run):
        if run.step == steps - 1:
            train.train_step = real
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run)

    train.train_step = step_and_signal


def two_ranks(*argv, program=("train.py",)):
    """The ended process of a command on two ranks, with what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = dict(cwd=ROOT, capture_output=True, text=True, timeout=120)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *program, *argv], env=environment, **options)


def new_run(config):
    """As much of a new Run as its log needs."""
    return SimpleNamespace(
        config=config,
        runtime=SimpleNamespace(device="cpu", dtype="float32"),
        data=SimpleNamespace(meta={}),
        model=SimpleNamespace(config=SimpleNamespace(block_size=16)),
        step=0,
        step_tokens=64,
        saved_config=asdict(config),
        state={"tokens": 0},
        saved=None,
        hold=None,
    )


def ready(data_dir, tmp_path, *more):
    """A Run that is ready for its first step."""
    return made(arguments(data_dir, tmp_path / "ready", "--max_iters=50", *more))


def made(argv):
    """The Run of a command line, as train.main makes it."""
    settings = train.read_config(argv, "")
    runtime = train.set_up(settings.config.device, settings.config.dtype)
    return train.make_run(settings, runtime)


def refusing(kind):
    """A text stream that refuses what is written to it."""
    if kind == "full":
        return open("/dev/full", "w")
    if kind == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return os.fdopen(writer, "w")
    terminal, name = os.openpty()
    stream = os.fdopen(name, "w")
    os.close(terminal)
    return stream
