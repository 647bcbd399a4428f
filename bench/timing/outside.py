"""
A training run as it is seen from outside: commands in processes of their own, and what lies in the run folder.
bench/faults.py breaks such runs; nothing here calls the code that is tested, other than by its command line.
"""

import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from safetensors.torch import load_file

from common.files import ROOT

SIZE = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=32",
    "--batch_size=4",
    "--gradient_accumulation_steps=2",
    "--dropout=0.2",
    "--learning_rate=3e-3",
    "--warmup_iters=3",
    "--log_interval=1",
    "--device=cpu",
    "--compile=False",
    "--dataset=words",
]
FILES = [
    "model.safetensors",
    "optimizer.safetensors",
    "config.json",
    "state.json",
    "tokenizer.json",
    "checksums.json",
]
LOGGED = ("loss", "grad_norm", "lr", "train_loss", "val_loss")


class Process:
    """A script of this repo that runs on its own; its words go to files, so that no pipe can fill."""

    started = []

    def __init__(self, argv, prefix=(), environment={}, limits={}):
        def limit():
            for kind, size in limits.items():
                resource.setrlimit(kind, (size, size))

        self.files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, *argv],
            cwd=ROOT,
            stdout=self.files[0],
            stderr=self.files[1],
            preexec_fn=limit if limits else None,
            env=clean | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment,
            start_new_session=True,
        )
        self.started.append(self)

    def until(self, condition, pause=0.002):
        """Wait for a condition; False if the process ends before."""
        while self.popen.poll() is None:
            if condition():
                return True
            time.sleep(pause)
        return False

    def kill(self):
        """kill -9 the process and all it started; False if it had ended by itself."""
        alive = self.popen.poll() is None
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()
        return alive

    def said(self):
        """What it has printed so far to stdout and stderr."""
        return [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in self.files]

    def ended(self, status, words="", seconds=300):
        """What is wrong with its end: "" if it exits with this status, having said words that match, and no traceback
        but, for an error, one line that names the place."""
        try:
            found = self.popen.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"still running after {seconds} s"
        out, err = self.said()
        last = (err.strip().splitlines() or out.strip().splitlines() or [""])[-1]
        if found != status:
            return f"exit {found}, not {status}: {last}"
        if (
            not re.search(words, out + err)
            or "Traceback" in err
            or status in (1, 2)
            and not re.match(r"error: .* \(.*\): ", last)
        ):
            return f"exit {found}, but not in the words {words!r}: {last}"
        return ""


class Lab:
    """A scratch folder with two data sets, the undisturbed runs, and the score."""

    def __init__(self, scratch, kills, short, seed):
        self.scratch, self.kills, self.short, self.random = (
            scratch,
            kills,
            short,
            random.Random(seed),
        )
        self.steps, self.every = (24, 8) if short else (60, 20)
        self.score, self.notes, self.numbers = {}, {}, itertools.count()
        self.references, self.stopped = {}, None
        for name in ("data", "other"):
            words, chance = (
                ["the", "king", "of", "rome", "shall", "speak", "no", "more"],
                random.Random(name),
            )
            (scratch / f"{name}.txt").write_text(
                "".join(chance.choice(words) + chance.choice("    \n") for _ in range(12000))
            )
            if name == "data" or not short:
                problem = Process(
                    [
                        "prepare.py",
                        "words",
                        f"--input={scratch}/{name}.txt",
                        "--tokenizer=char",
                        f"--data_dir={scratch}/{name}",
                    ]
                ).ended(0)
                self.check("the data", problem)

    def check(self, row, problem):
        """Count a try of a fault; a problem is what was seen instead of what is owed."""
        passed, tries = self.score.get(row, (0, 0))
        self.score[row] = passed + (not problem), tries + 1
        if problem:
            print(f"FAILED {row}: {problem}", flush=True)

    def folder(self, source=None):
        """A run folder of its own, copied from `source` if there is one."""
        out = self.scratch / f"run{next(self.numbers)}"
        return shutil.copytree(source, out) if source else out

    def argv(self, out, *more, arm=()):
        """The command that begins a run in `out`, or goes on with it where there is a checkpoint."""
        return [
            "train.py",
            *SIZE,
            *arm,
            f"--max_iters={self.steps}",
            f"--lr_decay_iters={self.steps}",
            f"--eval_interval={self.every}",
            f"--data_dir={self.scratch}/data",
            f"--out_dir={out}",
            *["--init_from=resume"] * bool(newest(out)),
            *more,
        ]

    def start(self, out, *more, arm=(), **how):
        return Process(self.argv(out, *more, arm=arm), **how)

    def reference(self, arm=()):
        """The folder of an undisturbed run."""
        if arm not in self.references:
            self.references[arm] = self.folder()
            self.check(
                "an undisturbed run",
                self.start(self.references[arm], arm=arm).ended(0, "best validation loss"),
            )
        return self.references[arm]

    def part_way(self):
        """A copy of a run of which two checkpoints are written and a third is to come."""
        if not self.stopped:
            self.stopped = self.folder()
            self.check(
                "an undisturbed run",
                self.start(self.stopped, f"--max_iters={self.every * 2}").ended(0),
            )
        return self.folder(self.stopped)

    def to_the_end(self, out, argv=None, arm=()):
        """Go on with a run, by a command or by that which it began with: what differs at its end from the undisturbed one."""
        return Process(argv or self.argv(out, arm=arm)).ended(0) or differs(
            out, self.reference(arm)
        )


def rows(out):
    """The lines of log.jsonl that are whole."""
    found = []
    for line in (
        (out / "log.jsonl").read_text(errors="replace").splitlines()
        if (out / "log.jsonl").exists()
        else []
    ):
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return found


def logged(out, step, key):
    return any(row["step"] == step and key in row for row in rows(out))


def newest(out):
    """The newest checkpoint's step, 0 if there is none. One that steps aside for its successor counts."""
    return max(
        (
            int(path.stem)
            for path in out.glob("ckpt/*")
            if path.stem.isdigit() and path.suffix != ".tmp"
        ),
        default=0,
    )


def tree(out):
    """{path: sha256} of all files below."""
    return {
        path.relative_to(out): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def tensors(folder):
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def digest(out):
    """All that has to be equal: what was logged of each step, in order, the tensors of the last checkpoint, and the best step."""
    folder = out / "ckpt" / f"{newest(out):06d}"
    found = {
        f"{key} of step {row['step']}, line {i}": row[key]
        for i, row in enumerate(rows(out))
        for key in LOGGED
        if key in row
    }
    found |= {
        name: hashlib.sha256(value.numpy().tobytes()).hexdigest()
        for name, value in tensors(folder).items()
    }
    return found | {
        "newest": newest(out),
        "best": json.loads((folder / "state.json").read_text())["best_step"],
    }


def differs(out, reference):
    """In what a run differs from the undisturbed one, "" if in nothing."""
    found, expected = digest(out), digest(reference)
    wrong = [key for key in found | expected if found.get(key) != expected.get(key)]
    return (
        f"not as undisturbed: {wrong[0]}: {found.get(wrong[0])}, not {expected.get(wrong[0])}, and {len(wrong) - 1} more"
        if wrong
        else ""
    )


def broken(out):
    """What is not whole in a run folder by the checksums in it, "" if nothing."""
    for folder in out.glob("ckpt/*"):
        if folder.name.isdigit():
            sums = (
                json.loads((folder / "checksums.json").read_text())
                if (folder / "checksums.json").exists()
                else {}
            )
            for name in FILES[:-1]:
                if not (folder / name).exists() or hashlib.sha256(
                    (folder / name).read_bytes()
                ).hexdigest() != sums.get(name):
                    return f"{folder / name} is not whole"
    return ""


def changed(before, out):
    """The first file that is not as it was, "" if all are."""
    after = tree(out)
    return next(
        (f"{path} changed" for path in before | after if before.get(path) != after.get(path)), ""
    )
