"""
A training run seen from outside: commands in separate processes, and the files in the run folder.
bench/faults.py breaks such runs. Nothing here calls the tested code except through its command
line.
"""

import contextlib
import functools
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

KEYS = [
    *("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4"),
    *("--gradient_accumulation_steps=2", "--dropout=0.2", "--learning_rate=3e-3"),
    *("--warmup_iters=3", "--log_interval=1", "--device=cpu", "--compile=False"),
    "--dataset=words",
]
FILES = [
    *("model.safetensors", "optimizer.safetensors", "config.json", "state.json"),
    *("tokenizer.json", "checksums.json"),
]
LOGGED = ("loss", "grad_norm", "lr", "train_loss", "val_loss")
WORDS = ["the", "king", "of", "rome", "shall", "speak", "no", "more"]


class Wrong(Exception):
    """A run did not behave as it must."""


class Process:
    """A script of this repo in its own process. Its output goes to files, which never fill up."""

    started = []

    def __init__(self, argv, prefix=(), environment=None, limits=None):
        def limit():
            for kind, size in limits.items():
                resource.setrlimit(kind, (size, size))

        self.files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        clean = {key: value for key, value in os.environ.items() if key not in ranks}
        more = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (environment or {})
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, *argv],
            cwd=ROOT,
            stdout=self.files[0],
            stderr=self.files[1],
            preexec_fn=limit if limits else None,
            env=clean | more,
            start_new_session=True,
        )
        self.started.append(self)

    def until(self, condition, pause=0.002):
        """Wait for a condition. Returns False if the process ends first."""
        while self.popen.poll() is None:
            if condition():
                return True
            time.sleep(pause)
        return False

    def kill(self):
        """kill -9 the process and all it started. Returns False if it had ended by itself."""
        alive = self.popen.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        return alive

    def printed(self):
        """[stdout, stderr] printed so far."""
        return [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in self.files]

    def expect(self, status, words="", seconds=300):
        """Wait for its end. Raises Wrong unless it exits with this status and has printed words
        that match, no traceback, and for an error one line that names the place."""
        try:
            found = self.popen.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Wrong(f"still running after {seconds} s") from None
        out, err = self.printed()
        last = (err.strip().splitlines() or out.strip().splitlines() or [""])[-1]
        if found != status:
            raise Wrong(f"exit {found}, not {status}: {last}")
        if not re.search(words, out + err):
            raise Wrong(f"exit {found}, but not in the words {words!r}: {last}")
        if "Traceback" in err or status in (1, 2) and not re.match(r"error: .* \(.*\): ", last):
            raise Wrong(f"exit {found}, but not with one line that says what to do: {last}")


class Lab:
    """A scratch folder with two datasets, the undisturbed runs, and the score."""

    def __init__(self, scratch, kills, short, seed):
        self.scratch, self.kills, self.short = scratch, kills, short
        self.random = random.Random(seed)
        self.steps, self.save_every = (24, 8) if short else (60, 20)
        self.score = {}  # {row: (tries passed, tries)}
        self.notes = {}  # {row: a note for the table}
        self.numbers = itertools.count()
        for name in ["data"] if short else ["data", "other"]:
            self.prepare(name)

    def prepare(self, name):
        """Prepare a dataset of random words."""
        text = self.scratch / f"{name}.txt"
        draw = random.Random(name)
        words = (draw.choice(WORDS) + draw.choice("    \n") for _ in range(12000))
        text.write_text("".join(words))
        argv = ["prepare.py", "words", f"--input={text}", "--tokenizer=char"]
        with self.trial("the data"):
            Process([*argv, f"--data_dir={self.scratch}/{name}"]).expect(0)

    @contextlib.contextmanager
    def trial(self, row):
        """Count one try of a fault, under this row of the table. It fails if Wrong is raised."""
        passed, tries = self.score.get(row, (0, 0))
        try:
            yield
            passed += 1
        except Wrong as wrong:
            print(f"FAILED {row}: {wrong}", flush=True)
        self.score[row] = passed, tries + 1

    def folder(self, source=None):
        """A run folder of its own, copied from `source` if given."""
        out = self.scratch / f"run{next(self.numbers)}"
        return shutil.copytree(source, out) if source else out

    def argv(self, out, *more, arm=()):
        """The command that begins a run in `out`, or resumes it if there is a checkpoint."""
        steps = [f"--max_iters={self.steps}", f"--lr_decay_iters={self.steps}"]
        folders = [f"--data_dir={self.scratch}/data", f"--out_dir={out}"]
        resume = ["--init_from=resume"] if newest(out) else []
        saves = f"--eval_interval={self.save_every}"
        return ["train.py", *KEYS, *arm, *steps, saves, *folders, *resume, *more]

    def start(self, out, *more, arm=(), **how):
        return Process(self.argv(out, *more, arm=arm), **how)

    @functools.cache  # noqa: B019 (there is one lab)
    def reference(self, *more, arm=()):
        """The folder of an undisturbed run."""
        out = self.folder()
        with self.trial("an undisturbed run"):
            self.start(out, *more, arm=arm).expect(0, "best validation loss")
        return out

    def part_way(self):
        """A copy of a run that has written two of its three checkpoints."""
        return self.folder(self.reference(f"--max_iters={self.save_every * 2}"))

    def to_the_end(self, out, argv=None):
        """Resume a run with a command. Raises Wrong unless it ends like the undisturbed one."""
        Process(argv or self.argv(out)).expect(0)
        same(out, self.reference())


# ---------------------------------------------------------------- the files of a run folder


def rows(out):
    """The complete rows of log.jsonl."""
    found = []
    if (out / "log.jsonl").exists():
        for line in (out / "log.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def logged(out, step, key):
    return any(row["step"] == step and key in row for row in rows(out))


def newest(out):
    """The step of the newest checkpoint, 0 if there is none. One that a save renamed counts."""
    names = (path.name for path in out.glob("ckpt/*"))
    found = [re.fullmatch(r"(\d+)|\.(\d+)\.old-[0-9a-f]+", name) for name in names]
    return max((int(match[1] or match[2]) for match in found if match), default=0)


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(out):
    """{path: sha256} of all files below."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {path.relative_to(out): sha256_of(path) for path in files}


def tensors(folder):
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def digest(out):
    """Everything that must be equal between two runs: the logged values of each step, in order, the
    tensors of the last checkpoint, and the best step."""
    folder = out / "ckpt" / f"{newest(out):06d}"
    found = {
        f"{key} of step {row['step']}, line {i}": row[key]
        for i, row in enumerate(rows(out))
        for key in LOGGED
        if key in row
    }
    for name, value in tensors(folder).items():
        found[name] = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    best = json.loads((folder / "state.json").read_text())["best_step"]
    return found | {"newest": newest(out), "best": best}


# ---------------------------------------------------------------- checks; each raises Wrong


def same(out, reference):
    """Check that a run ended like the undisturbed one."""
    found, expected = digest(out), digest(reference)
    wrong = [key for key in found | expected if found.get(key) != expected.get(key)]
    if wrong:
        key = wrong[0]
        values = f"{found.get(key)}, not {expected.get(key)}"
        raise Wrong(f"not like the undisturbed run: {key}: {values}, and {len(wrong) - 1} more")


def whole(out):
    """Check that every checkpoint in a run folder matches its checksums."""
    for folder in out.glob("ckpt/[0-9]*"):
        path = folder / "checksums.json"
        sums = json.loads(path.read_text()) if path.exists() else {}
        for name in FILES[:-1]:
            file = folder / name
            if not file.exists() or sha256_of(file) != sums.get(name):
                raise Wrong(f"{file} is not whole")


def unchanged(before, out):
    """Check that the files under `out` are the same as in `before`, an earlier tree(out)."""
    after = tree(out)
    for path in before | after:
        if before.get(path) != after.get(path):
            raise Wrong(f"{path} changed")
