"""
Run the jobs of a sweep on this machine. Each run is a separate process of train.py, started with
the command line that a person would type, so that a crash costs one row only. A run that was
stopped, alone or with its driver, resumes from its last checkpoint.
"""

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.ablation import outcome
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
        return key(asdict(self))

    def identity(self):
        """The facts that must equal those stored in a run folder for the run to resume there."""
        return {"key": self.key, "values": self.values, "data": self.data}


def key(row):
    """The content hash of a result: the code, the configuration, the seed and the purpose."""
    names = ("code_hash", "config_hash", "arm", "seed", "lr", "purpose")
    return digest([row.get(name) for name in names])


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
    number = 1
    while folder.with_name(f"{folder.name}.old{number}").exists():
        number += 1
    folder.rename(folder.with_name(f"{folder.name}.old{number}"))


def locked(job):
    """Whether another process trains in the run's folder: one that a killed driver left behind."""
    try:
        if (Path(job.out_dir) / "lock").exists():
            hold(Path(job.out_dir)).close()
        return False
    except UserError:
        return True


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
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.job.threads),
            "PYTHONUNBUFFERED": "1",
        }
        if self.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        if self.job.group:
            environment["WANDB_RUN_GROUP"] = self.job.group
        folder = Path(self.job.out_dir)
        with open(folder / "stdout.txt", "ab") as out, open(folder / "stderr.txt", "wb") as error:
            # In its own session: Ctrl-C reaches only the driver, which passes on one signal.
            self.process = subprocess.Popen(
                argument_list(self.job, self.resumed),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                env=environment,
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
        text = (Path(self.job.out_dir) / "stderr.txt").read_text(errors="replace").strip()
        if not text:
            return f"exit status {status}"
        lines = text.splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines
        return one_line(errors[-1]).removeprefix("error: ")

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def end(runs):
    """Stop runs: each saves and exits. Those that still run after GRACE seconds are killed."""
    for run in runs:
        run.process.terminate()
    limit = time.perf_counter() + GRACE
    for run in runs:
        try:
            run.process.wait(max(0.1, limit - time.perf_counter()))
        except subprocess.TimeoutExpired:
            run.kill()
            run.process.wait()


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
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    threads = max(1, cores // (workers * processes))
    return [(gpus[i % len(gpus)], threads) for i in range(workers)]


def visible_gpus():
    """The names that CUDA_VISIBLE_DEVICES gives the GPUs, or their numbers."""
    import torch

    named = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return named or list(range(torch.cuda.device_count()))


class Queue:
    """Jobs that wait for a worker, those that run, and those whose trained model is measured. A
    model is measured in a thread and on the GPU of its own run, whose slot is not free before."""

    def __init__(self, jobs, slots):
        self.waiting, self.free = list(jobs), list(slots)
        self.running = {}  # Run: its slot
        self.measuring = {}  # Future of a row: (job, slot)
        self.threads = ThreadPoolExecutor(len(slots))
        self.locked_since = {}  # key of a job: when its folder was first seen locked

    def collect(self):
        """[(job, row)] of the runs that have ended and were measured since the last call."""
        for run, slot in list(self.running.items()):
            end_of_run = run.poll()
            if end_of_run is not None:
                del self.running[run]
                self.measure(run.job, slot, *end_of_run)
        done = [future for future in self.measuring if future.done()]
        ended = [(self.measuring.pop(future), future.result()) for future in done]
        self.free += [slot for (_, slot), _ in ended]
        return [(job, row) for (job, _), row in ended]

    def measure(self, job, slot, reason, seconds):
        """Make the row of a job that has ended, in its slot."""
        device = None
        if slot[0] is not None:
            device = f"cuda:{list(map(str, visible_gpus())).index(slot[0].split(',')[0])}"
        row = self.threads.submit(outcome.row_of, job, reason, seconds, device)
        self.measuring[row] = job, slot

    @property
    def busy(self):
        return bool(self.waiting or self.running or self.measuring)

    def start_next(self):
        """Start jobs while slots are free. Those that are finished already, or cannot start, are
        measured."""
        for job in list(self.waiting):
            if not self.free:
                break
            self.waiting.remove(job)
            if locked(job):
                since = self.locked_since.setdefault(job.key, time.perf_counter())
                if time.perf_counter() - since > LOCKED:
                    reason = f"another process trains in {job.out_dir}"
                    self.measure(job, self.free.pop(0), reason, 0.0)
                else:
                    self.waiting.append(job)
            elif outcome.finished(job):
                self.measure(job, self.free.pop(0), None, 0.0)
            else:
                self.start(job, self.free.pop(0))

    def start(self, job, slot):
        """Start a job in a slot."""
        gpu, job.threads = slot
        try:
            self.running[Run(job, gpu)] = slot
        except OSError as error:  # usually a full disk
            self.measure(job, slot, f"cannot start: {error}", 0.0)


def run_local(jobs, slots, stop):
    """Run jobs on this machine. Yields (job, row) when a job ends, and None at every poll. Returns
    when all jobs have ended, or, if stop.status is set, when the runs in progress have saved."""
    queue = Queue(jobs, slots)
    try:
        while queue.busy and not stop.status:
            ended = queue.collect()
            queue.start_next()
            yield from ended
            yield None
            if not ended:
                time.sleep(POLL)
    finally:
        end(queue.running)
        queue.threads.shutdown(cancel_futures=True)
