"""A training run seen from outside: commands in separate processes, and the files of the run
folder. Nothing here calls the tested code except through its command line."""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, SAVE_EVERY = 24, 8
KEYS = [
    *("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4"),
    *("--gradient_accumulation_steps=2", "--dropout=0.2", "--learning_rate=3e-3"),
    *("--warmup_iters=3", "--log_interval=1", "--device=cpu", "--compile=False"),
    *("--dataset=words", f"--eval_interval={SAVE_EVERY}"),
    *(f"--max_iters={STEPS}", f"--lr_decay_iters={STEPS}"),
]
FILES = [
    *("model.safetensors", "optimizer.safetensors", "config.json", "state.json"),
    *("tokenizer.json", "checksums.json"),
]
LOGGED = ("loss", "grad_norm", "lr", "train_loss", "val_loss")


class Process:
    """A script of this repo in its own process. Its output goes to files, which never fill up."""

    def __init__(self, argv, prefix=()):
        self.files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        clean = {key: value for key, value in os.environ.items() if key not in ranks}
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, *argv],
            cwd=ROOT,
            stdout=self.files[0],
            stderr=self.files[1],
            env=clean | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

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

    def expect(self, status, pattern="", seconds=300):
        """Wait for the end: this exit status, a pattern in what it printed, no traceback, and for
        an error one last line that says what, where, and what to do."""
        try:
            exit_status = self.popen.wait(timeout=seconds)
        finally:
            self.kill()
        out, err = self.printed()
        last = (err.strip().splitlines() or out.strip().splitlines() or [""])[-1]
        assert exit_status == status, last
        assert re.search(pattern, out + err), last
        assert "Traceback" not in err
        assert status not in (1, 2) or re.match(r"error: .* \(.*\): ", last), last


class Lab:
    """A scratch folder with a dataset, and the undisturbed runs."""

    def __init__(self, scratch):
        self.scratch, self.references, self.count = scratch, {}, 0
        draw, text = random.Random("data"), scratch / "data.txt"
        words = ["the", "king", "of", "rome", "shall", "speak", "no", "more"]
        text.write_text("".join(draw.choice(words) + draw.choice("    \n") for _ in range(12000)))
        argv = ["prepare.py", "words", f"--input={text}", "--tokenizer=char"]
        Process([*argv, f"--data_dir={scratch}/data"]).expect(0)

    def folder(self, source=None):
        """A new run folder, copied from `source` if given."""
        self.count += 1
        out = self.scratch / f"run{self.count}"
        return shutil.copytree(source, out) if source else out

    def argv(self, out, *more):
        """The command that begins a run in `out`, or resumes it if there is a checkpoint."""
        folders = [f"--data_dir={self.scratch}/data", f"--out_dir={out}"]
        resume = ["--init_from=resume"] if newest(out) else []
        return ["train.py", *KEYS, *folders, *resume, *more]

    def start(self, out, *more, prefix=()):
        return Process(self.argv(out, *more), prefix)

    def reference(self, *more):
        """The folder of an undisturbed run with these keys."""
        if more not in self.references:
            out = self.folder()
            self.start(out, *more).expect(0, "best validation loss")
            self.references[more] = out
        return self.references[more]

    def part_way(self):
        """A copy of a run that has written two of its three checkpoints."""
        return self.folder(self.reference(f"--max_iters={SAVE_EVERY * 2}"))

    def to_the_end(self, out):
        """Resume a run, which must end like the undisturbed one."""
        self.start(out).expect(0)
        assert result(out) == result(self.reference())


def rows(out):
    """The complete rows of log.jsonl."""
    parsed = []
    if (out / "log.jsonl").exists():
        for line in (out / "log.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                parsed.append(json.loads(line))
    return parsed


def newest(out):
    """The step of the newest checkpoint, 0 if there is none. One that a save renamed counts."""
    names = (path.name for path in out.glob("ckpt/*"))
    matches = [re.fullmatch(r"(\d+)|\.(\d+)\.old-[0-9a-f]+", name) for name in names]
    return max((int(match[1] or match[2]) for match in matches if match), default=0)


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(out):
    """{path: sha256} of all files below."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {path.relative_to(out): sha256_of(path) for path in files}


def result(out):
    """All that must be equal between two runs: the logged values of each step, in order, the
    tensors of the last checkpoint, and the best step."""
    folder = out / "ckpt" / f"{newest(out):06d}"
    values = {
        f"{key} of step {row['step']}, line {i}": row[key]
        for i, row in enumerate(rows(out))
        for key in LOGGED
        if key in row
    }
    for file in ("model.safetensors", "optimizer.safetensors"):
        for name, value in load_file(folder / file).items():
            values[name] = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    best = json.loads((folder / "state.json").read_text())["best_step"]
    return values | {"newest": newest(out), "best": best}


def assert_complete(out):
    """Every checkpoint of a run folder matches its checksums."""
    for folder in out.glob("ckpt/[0-9]*"):
        sums = json.loads((folder / "checksums.json").read_text())
        for name in FILES[:-1]:
            assert sha256_of(folder / name) == sums[name], folder / name
