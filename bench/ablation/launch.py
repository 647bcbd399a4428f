"""
Run the jobs of a sweep on this machine. Each run is a separate process of train.py, started with
the command line that a person would type, so that a crash costs one row only. A run that was
stopped, alone or with its driver, resumes from its last checkpoint.
"""

import contextlib
import ctypes
import itertools
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

from bench.ablation import outcome, quiet
from bench.ablation.outcome import stored_identity
from bench.ablation.source import digest
from common import files
from common.errors import UserError, one_line
from common.files import ROOT
from training.run_folder import hold
from weights import checkpoint

TRAINER = str(ROOT / "train.py")
POLL = 0.2  # seconds between polls of the processes
GRACE = 60  # seconds that a stopped run has for saving
LOCKED = 120  # seconds to wait for a process that still holds a run folder
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass
class Job:
    """One run: `values` are the keys of train.py's command line, without out_dir."""

    arm: str
    seed: int  # of the pair: with the same seed, all arms see the data in the same order
    lr: float  # multiple of the base's learning rate
    purpose: str  # "report", "tune" or "curve"
    out_dir: str
    values: dict
    config_hash: str
    code_hash: str
    data: str  # fingerprint of the data
    kind: str = "text"  # or "pairs", "mixture"
    prompt: str = ""
    limit: float | None = None  # seconds; None: no limit
    threads: int = 1
    processes: int = 1
    trainer: str = TRAINER
    group: str = ""  # the group in Weights & Biases

    @property
    def name(self):
        shows_lr = self.purpose == "tune" or self.lr != 1
        return f"{self.arm} seed {self.seed}" + (f" lr x{self.lr:g}" if shows_lr else "")

    @property
    def command(self):
        return format_command(self)

    @property
    def key(self):
        """The content hash of its result, as `key` gives it for a row."""
        return key(vars(self))

    def identity(self):
        """The facts that must equal those stored in a run folder for the run to resume there."""
        return {"key": self.key, "values": self.values, "data": self.data}


def key(row):
    """The content hash of a result: the code, the configuration, the seed and the purpose."""
    names = ("code_hash", "config_hash", "arm", "seed", "lr", "purpose")
    return digest([row[name] for name in names])


def arguments(job, resume=False):
    """The words after train.py."""
    if resume:
        return ["--init_from=resume", f"--out_dir={job.out_dir}"]
    values = [f"--{name}={value}" for name, value in job.values.items()]
    return [*values, f"--out_dir={job.out_dir}"]


def torchrun(job):
    """The words that make torchrun start the processes of a run."""
    return ["--standalone", f"--nproc_per_node={job.processes}"]


def format_command(job, resume=False):
    """The command as a person would type it."""
    relative = os.path.relpath(job.trainer)
    path = job.trainer if relative.startswith("..") else relative
    program = ["torchrun", *torchrun(job)] if job.processes > 1 else ["python"]
    return shlex.join([*program, path, *arguments(job, resume)])


def argument_list(job, resume=False):
    """The command as it is started, by this very Python."""
    program = ["-m", "torch.distributed.run", *torchrun(job)] if job.processes > 1 else []
    return [sys.executable, *program, job.trainer, *arguments(job, resume)]


# ---------------------------------------------------------------- one run


def die_with_parent():
    """Ask the kernel, in the child before train.py starts, for SIGTERM when the driver dies. Linux
    only: elsewhere an orphaned run ends by itself, and the next driver waits for its folder."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def make_ready(job):
    """Prepare the run's folder and return whether to resume in it. A folder whose run began with
    other code or another configuration is renamed first."""
    folder = Path(job.out_dir)
    stored = stored_identity(folder)
    began = stored is not None or checkpoint.steps(folder)
    if folder.exists() and began and stored != job.identity():
        set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        files.write(folder / "run.json", json.dumps(job.identity()))
    return bool(checkpoint.steps(folder))


def set_aside(folder):
    """Rename a folder to the first of NAME.old1, NAME.old2, ... that is free."""
    names = (folder.with_name(f"{folder.name}.old{number}") for number in itertools.count(1))
    folder.rename(next(name for name in names if not name.exists()))


def locked(job):
    """Whether another process trains in the run's folder: one that a killed driver left behind."""
    try:
        if Path(job.out_dir, "lock").exists():
            hold(Path(job.out_dir)).close()
    except UserError:
        return True
    return False


class Run:
    """A job whose process is running."""

    def __init__(self, job, gpu=None):
        self.job, self.gpu = job, gpu
        self.began = time.perf_counter()
        self.stopped_at = None  # seconds after which it was stopped because it took too long
        self.restarted = False  # whether it began anew because its checkpoint cannot be used
        self.resumed = make_ready(job)
        self.start()

    def start(self):
        more = {"OMP_NUM_THREADS": str(self.job.threads), "PYTHONUNBUFFERED": "1"}
        if self.gpu is not None:
            more["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        if self.job.group:
            more["WANDB_RUN_GROUP"] = self.job.group
        folder = Path(self.job.out_dir)
        with open(folder / "stdout.txt", "ab") as out, open(folder / "stderr.txt", "wb") as error:
            # In its own session: Ctrl-C reaches only the driver, which passes on one signal.
            self.process = subprocess.Popen(
                argument_list(self.job, self.resumed),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                env=os.environ | more,
                start_new_session=True,
                preexec_fn=die_with_parent if LIBC else None,
            )

    def poll(self):
        """(reason of the failure or None, seconds) if the run has ended, else None."""
        status = self.process.poll()
        seconds = time.perf_counter() - self.began
        if status is None:
            self.enforce_limit(seconds)
            return None
        if self.stopped_at is not None:
            return f"over the limit of {self.job.limit:.0f} s", seconds
        if status == 2 and self.resumed and not self.restarted:
            self.restart()
            return None
        return (self.reason(status) if status else None), seconds

    def enforce_limit(self, seconds):
        """Stop a run that exceeds its limit. Kill it if it does not stop within the same time
        again, or within GRACE seconds if that is less."""
        limit = self.job.limit
        if self.stopped_at is None:
            if limit and seconds > limit:
                self.stopped_at = seconds
                self.process.terminate()
        elif seconds > self.stopped_at + min(GRACE, limit):
            self.kill()

    def restart(self):
        """Begin the run anew, because its checkpoint cannot be used."""
        self.restarted, self.resumed = True, False
        set_aside(Path(self.job.out_dir))
        make_ready(self.job)
        self.start()

    def reason(self, status):
        """Why a run failed: the last error that it reports (torchrun says more after it), or the
        last line of its stderr, or the signal that killed it."""
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        text = Path(self.job.out_dir, "stderr.txt").read_text(errors="replace")
        lines = text.strip().splitlines()
        if not lines:
            return f"exit status {status}"
        errors = [line for line in lines if line.startswith("error: ")] or lines
        return one_line(errors[-1]).removeprefix("error: ")

    def stop(self):
        """Let the run save and exit; kill it if it still runs after GRACE seconds."""
        self.process.terminate()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


# ---------------------------------------------------------------- many runs


def worker_slots(workers, device, processes=1):
    """[(GPUs or None, threads)], one for each worker: the visible GPUs in turn, as many as a run
    has processes, and the cores divided among all. workers=None: as many as there are GPUs for, or
    one. Raises UserError if there are fewer GPUs than processes."""
    kind, _, number = device.partition(":")
    gpus = [None]
    if kind == "cuda":
        each = visible_gpus()
        if number:
            each = [each[int(number)]]
        groups = range(len(each) // processes)
        gpus = [",".join(map(str, each[n * processes : (n + 1) * processes])) for n in groups]
        if not gpus:
            fix = "choose fewer processes"
            raise UserError(f"{len(each)} GPUs are visible", f"processes={processes}", fix)
    elif kind == "mps" and processes > 1:
        raise UserError("Metal takes one process", f"processes={processes}", "leave it out")
    workers = workers or len(gpus)
    threads = max(1, len(quiet.cores()) // (workers * processes))
    return [(gpus[i % len(gpus)], threads) for i in range(workers)]


def visible_gpus():
    """The names that CUDA_VISIBLE_DEVICES gives the GPUs, or their numbers."""
    import torch

    named = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return named or list(range(torch.cuda.device_count()))


def run_job(job, stopped, gpu=None, patience=LOCKED):
    """Run a job from start to end, and measure its model on the GPU of its run. Returns its row, or
    None if `stopped()` came true midway: then the run has saved. `patience`: seconds to wait for
    another process that trains in its folder."""
    run, ended, began = None, None, time.perf_counter()
    try:
        while ended is None and not stopped():
            if run:
                ended = run.poll()
            elif locked(job):
                if time.perf_counter() - began > patience:
                    ended = f"another process trains in {job.out_dir}", 0.0
            elif outcome.finished(job):
                ended = None, 0.0
            else:
                try:
                    run = Run(job, gpu)
                except OSError as error:  # usually a full disk
                    ended = f"cannot start: {error}", 0.0
            if ended is None:
                time.sleep(POLL)
    finally:
        if run and ended is None:
            run.stop()
    if ended is None:
        return None
    device = None
    if gpu is not None:
        device = f"cuda:{list(map(str, visible_gpus())).index(gpu.split(',')[0])}"
    return outcome.row_of(job, *ended, device)


def run_local(jobs, slots, stop):
    """Run jobs here, a thread for each slot. Yields (job, row) when one ends. If stop.status is
    set, or the caller gives up, those in progress save."""
    free, given_up = SimpleQueue(), threading.Event()
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
