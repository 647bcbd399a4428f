"""
Run the jobs of a sweep on this machine, and make the row of each run that ends. A run is a separate
process of train.py, started with the command line that a person would type, so that a crash costs
one row only. A run that was stopped, alone or with its driver, resumes from its last checkpoint.
"""

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from bench.ablation.identity import digest
from bench.ablation.measure import measure_trained
from bench.ablation.step_times import cores
from common import files
from common.commands import ROOT
from common.errors import UserError, one_line, tell
from training.run_folder import DIVERGED, lock_run, next_free, read_log
from weights import checkpoint

TRAINER = str(ROOT / "train.py")
POLL = 0.2  # seconds between polls of the processes
GRACE = 60  # seconds that a stopped run has for saving
LOCKED = 120  # seconds to wait for a process that still holds a run folder
LEAST_LIMIT = 600  # seconds that every run may take
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

RESULT = ("code_hash", "config_hash", "arm", "seed", "lr", "purpose")  # what tells results apart
HALVES = ("val_loss_tune", "val_loss_report")  # columns of an evaluation
COLUMN_OF = {"exact": "wrong_answers", "accuracy": "wrong_tokens"}  # {measure: column of a row}
MEASURING = threading.Lock()  # autocast on a CPU chooses the kernel of attention for all threads


@dataclass
class Job:
    """One run: `values` are the keys of train.py's command line, without out_dir."""

    arm: str
    seed: int  # with the same seed, all arms see the data in the same order
    lr: float  # multiple of the given learning rate
    purpose: str  # "tune" (for the rate), "curve" (for the worth) or "report" (for the verdict)
    out_dir: str
    values: dict
    config_hash: str
    code_hash: str
    data: str  # fingerprint of the data
    kind: str = "text"  # or "pairs"
    prompt: str = ""
    limit: float | None = None  # seconds; None: no limit
    threads: int = 1
    trainer: str = TRAINER
    number: int = 0  # of a reported run: its seed above first_seed

    @property
    def name(self):
        name = f"{self.arm} seed {self.seed}"
        if self.purpose == "tune" or self.lr != 1:
            name += f" lr x{self.lr:g}"
        return name

    def arguments(self, resume=False):
        """The words after train.py."""
        values = {"init_from": "resume"} if resume else self.values
        return [f"--{key}={value}" for key, value in (values | {"out_dir": self.out_dir}).items()]

    def command(self, resume=False):
        """The command as a person would type it."""
        relative = os.path.relpath(self.trainer)
        path = self.trainer if relative.startswith("..") else relative
        return shlex.join(["python", path, *self.arguments(resume)])

    @property
    def key(self):
        """The content hash of its result, as `key` gives it for a row."""
        return key(vars(self))

    def identity(self):
        """The facts that must equal those stored in a run folder for the run to resume there."""
        return {"key": self.key, "values": self.values, "data": self.data}


def key(row):
    """The content hash of a result: the code, the configuration, the seed and the purpose."""
    return digest([row[name] for name in RESULT])


def time_limit(predicted):
    """Seconds after which a run has failed; None if its time was not predicted."""
    return None if predicted is None else max(LEAST_LIMIT, 10 * predicted)


# ---------------------------------------------------------------- a run's folder


def stored(folder, name):
    """The content of a JSON file of a run folder; {} if it is missing, or no JSON object."""
    try:
        content = files.parse_json((Path(folder) / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def make_ready(job):
    """Prepare the run's folder and return whether to resume in it. A folder whose run began with
    other code or another configuration is renamed first."""
    folder = Path(job.out_dir)
    began = (folder / "run.json").exists() or checkpoint.steps(folder)
    if folder.is_symlink() or (began and stored(folder, "run.json") != job.identity()):
        folder.rename(next_free(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        files.write(folder / "run.json", json.dumps(job.identity()))
    return bool(checkpoint.steps(folder))


def is_locked(job):
    """Whether another process trains in the run's folder: one that a killed driver left behind."""
    try:
        if Path(job.out_dir, "lock").exists():
            lock_run(Path(job.out_dir)).close()
    except (UserError, OSError):
        return True
    return False


def evaluations(folder):
    """The rows of the evaluations in a run's log."""
    rows = read_log(Path(folder) / "log.jsonl")
    return [row for row in rows if row.get("val_loss") is not None]


def is_finished(job):
    """Whether the run in the folder has ended, by an array job or a driver that was killed."""
    if stored(job.out_dir, "run.json") != job.identity():
        return False
    rows = evaluations(job.out_dir)
    steps = checkpoint.steps(job.out_dir)
    at_end = rows and steps and rows[-1]["step"] == steps[-1] == job.values["max_iters"]
    return bool(stored(job.out_dir, DIVERGED) or at_end)


def drop_checkpoints(job):
    """Remove a run's checkpoints. An arm's first reported run keeps them, to sample from."""
    if job.purpose != "report" or job.number:
        for name in ("ckpt", "latest", "best"):
            files.remove(Path(job.out_dir) / name)


# ---------------------------------------------------------------- the row of a run


def row_of(job, failure, seconds, device=None):
    """The row of rows.jsonl of a run that ended, from its folder. failure: why it failed, or None.

    It has diverged if its loss or gradient was not finite, or if it ends with a higher loss than it
    began with. Else it has failed if `failure` says so, if it lacks its last evaluation, or if its
    model cannot be measured (on `device`, None: the run's)."""
    rows = evaluations(job.out_dir)
    last_step = job.values["max_iters"]
    losses = final_losses(rows) if rows else {}
    divergence = stored(job.out_dir, DIVERGED).get("reason")
    if divergence is None and failure is None:
        first = losses.get("first_val_loss")
        final = losses.get("final_val_loss")
        if not rows or rows[-1]["step"] != last_step:
            failure = f"it ended without the evaluation of step {last_step}"
        elif first is not None and final > first:
            divergence = f"the final loss {final:.4g} is above the initial {first:.4g}"
    status = "failed" if failure else "done"
    if divergence is not None:
        status = "diverged"

    row = {name: getattr(job, name) for name in [*RESULT, "out_dir"]}
    if status == "done":
        try:
            with MEASURING:
                row |= measure_trained(job, device)
        except Exception as error:  # the row of a run must not end the sweep
            status = "failed"
            failure = f"measuring the trained model: {type(error).__name__}: {one_line(error)}"
    row |= {
        "status": status,
        "reason": divergence or failure,
        "wall_seconds": round(seconds, 2),
        "command": job.command(),
    }
    versions = stored(job.out_dir, "config.json").get("versions") or {}
    return row | {key: versions.get(key) for key in ("git_commit", "hardware")} | losses


def halves_of(row, loss):
    """[loss of the first half of the text, of the second] from the row of an evaluation; where it
    has no halves, `loss` stands for them."""
    return [row.get(half, loss) for half in HALVES]


def final_losses(rows):
    """The losses of a row of rows.jsonl, from the rows of a run's evaluations. A text too short to
    be halved counts as both halves. Pairs also have the shares of wrong answers and wrong tokens.
    If the last evaluation alone scored the whole split, the curve is of what all scored."""
    last_row = rows[-1]
    whole = last_row.get("whole_val_loss")
    final = last_row["val_loss"] if whole is None else whole
    final_tune, final_report = halves_of(last_row, final)
    points = []
    for row in rows:
        loss = row["val_loss"]
        halves = halves_of(row, loss) if whole is None else [loss, loss]
        points.append([row["step"], loss, *halves])
    wrong = {}
    for name, column in COLUMN_OF.items():
        right = last_row.get(f"report_{name}", last_row.get(f"val_{name}"))
        if right is not None:
            wrong[column] = 1 - right
    return wrong | {
        "first_val_loss": rows[0]["val_loss"] if rows[0]["step"] == 0 else None,
        "final_val_loss": final,
        "final_tune": final_tune,
        "final_report": final_report,
        "train_loss": last_row.get("train_loss"),
        "seconds": last_row.get("seconds"),
        "curve": points,
        "blocks": last_row.get("val_blocks"),
    }


# ---------------------------------------------------------------- one run


def die_with_parent():
    """Ask the kernel, in the child before train.py starts, for SIGTERM when the driver dies. Linux
    only: elsewhere an orphaned run ends by itself, and the next driver waits for its folder."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Run:
    """A job whose process is running."""

    def __init__(self, job, gpu=None):
        self.job = job
        self.gpu = gpu
        self.stderr = Path(job.out_dir, "stderr.txt")
        self.began = time.perf_counter()
        self.stopped_at = None  # seconds after which it was stopped because it took too long
        self.start()

    def start(self):
        torch.cuda.empty_cache()  # the run may need what this process kept of timing and measuring
        self.resumed = make_ready(self.job)
        more = {"OMP_NUM_THREADS": str(self.job.threads), "PYTHONUNBUFFERED": "1"}
        if self.gpu is not None:
            more["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        with (
            open(self.stderr.with_name("stdout.txt"), "ab", opener=files.no_link) as out,
            open(self.stderr, "wb", opener=files.no_link) as err,
        ):
            # In its own session: Ctrl-C reaches only the driver, which passes on one signal.
            self.process = subprocess.Popen(
                [sys.executable, self.job.trainer, *self.job.arguments(self.resumed)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | more,
                start_new_session=True,
                preexec_fn=die_with_parent if LIBC else None,
            )

    def poll(self):
        """(reason of the failure or None, seconds) if the run has ended, else None. A run that
        takes too long is stopped, and killed if it does not stop."""
        status = self.process.poll()
        limit = self.job.limit
        seconds = time.perf_counter() - self.began
        if status is None:
            if self.stopped_at is None and limit and seconds > limit:
                self.stopped_at = seconds
                self.process.terminate()
            elif self.stopped_at is not None and seconds > self.stopped_at + min(GRACE, limit):
                self.kill()
            return None
        if self.stopped_at is not None:
            return f"over the limit of {limit:.0f} s", seconds
        if status == 2 and self.resumed:  # its checkpoint cannot be used: begin anew
            self.stderr.parent.rename(next_free(self.stderr.parent))
            self.start()
            return None
        return (self.reason(status) if status else None), seconds

    def reason(self, status):
        """Why a run failed: the last error that it reports, or the last line of its stderr, or the
        signal that killed it."""
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        lines = self.stderr.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines
        return one_line((errors or [f"exit status {status}"])[-1]).removeprefix("error: ")

    def stop(self):
        """Let the run save and exit; kill it if it still runs after GRACE seconds."""
        tell(f"stopping {self.job.name}, which saves")
        self.process.terminate()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_job(job, stopped, gpu=None, patience=LOCKED):
    """Run a job from start to end, and measure its model on the GPU of its run. Returns its row, or
    None if `stopped()` came true midway: then the run has saved. `patience`: seconds to wait for
    another process that trains in its folder."""
    run = None
    ending = None  # once the run has ended: (reason of the failure or None, seconds)
    began = time.perf_counter()
    try:
        while ending is None and not stopped():
            if run:
                ending = run.poll()
            elif is_locked(job):
                if time.perf_counter() - began > patience:
                    ending = (f"another process trains in {job.out_dir}", 0.0)
            elif is_finished(job):
                ending = (None, 0.0)
            else:
                try:
                    run = Run(job, gpu)
                except OSError as error:  # usually a full disk
                    ending = (f"cannot start: {error}", 0.0)
            if ending is None:
                time.sleep(POLL)
    finally:
        if run and ending is None:
            run.stop()
    if ending is None:
        return None
    failure, seconds = ending
    device = None if gpu is None else f"cuda:{visible_gpus().index(gpu)}"
    return row_of(job, failure, seconds, device)


# ---------------------------------------------------------------- many runs


def worker_slots(workers, device):
    """[(GPU or None, threads)], one for each worker: the visible GPUs in turn, and the cores
    divided among all. workers=None: one per GPU, or one."""
    kind, _, number = device.partition(":")
    gpus = visible_gpus() if kind == "cuda" else []
    if number and gpus:
        gpus = [gpus[int(number)]]
    gpus = gpus or [None]  # also on a login node
    workers = workers or len(gpus)
    threads = max(1, len(cores()) // workers)
    return [(gpus[number % len(gpus)], threads) for number in range(workers)]


def visible_gpus():
    """The names that CUDA_VISIBLE_DEVICES gives the GPUs, or their numbers, as texts."""
    named = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def run_local(jobs, sweep, stop):
    """Run jobs on this machine, a thread for each slot of the sweep. Yields (job, row) when one
    ends. If stop.status is set, or the caller gives up, the runs in progress save."""
    slots = sweep.machine.slots
    free = SimpleQueue()
    given_up = threading.Event()
    for slot in slots:
        free.put(slot)

    def work(job):
        slot = free.get()
        gpu, job.threads = slot
        try:
            return job, run_job(job, lambda: stop.status or given_up.is_set(), gpu)
        finally:
            free.put(slot)

    with ThreadPoolExecutor(len(slots)) as pool:
        try:
            for future in as_completed([pool.submit(work, job) for job in jobs]):
                job, row = future.result()
                if row:
                    yield job, row
        finally:
            given_up.set()
