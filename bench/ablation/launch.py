"""
Running the runs of a sweep: each is train.py in a process of its own, started by the command line that a person would
type, so that a crash is one failed row. On this machine (a queue over workers and GPUs), on a Ray cluster, or as a
SLURM array job. A run that is stopped, with its driver or alone, goes on at its last checkpoint.
"""

import ctypes
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.ablation.measure import finished, row_of
from common import files
from common.errors import UserError, one_line
from common.files import ROOT
from training.run_folder import hold
from weights import checkpoint

TRAINER = str(ROOT / "train.py")
POLL = 0.2  # seconds between looks at the processes
GRACE = 60  # seconds that a stopped run has to save
LOCKED = 120  # seconds to wait for a process that still holds a run folder
RAY = "ray==2.60.0"
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass
class Job:
    """One run: `values` are the keys of train.py's command line, without out_dir."""

    arm: str
    seed: int  # of the pair: every arm sees these data in this order
    lr: float  # multiple of the base's learning rate
    purpose: str  # "report" or "tune"
    out_dir: str
    values: dict
    config_hash: str
    code_hash: str
    data: str  # fingerprint of the data
    prompt: str = ""
    limit: float | None = None  # seconds; None: no limit
    threads: int = 1
    trainer: str = TRAINER
    group: str = ""  # of Weights & Biases

    @property
    def name(self):
        return f"{self.arm} seed {self.seed}" + f" lr x{self.lr:g}" * (
            self.purpose == "tune" or self.lr != 1
        )

    @property
    def command(self):
        return told(self)

    @property
    def key(self):
        return key(asdict(self))

    def identity(self):
        """What a run folder must have been begun with for the run to go on in it."""
        return {"key": self.key, "values": self.values, "data": self.data}


def key(row):
    """The content hash by which a result is known: the code, the configuration, the seed, what it is for."""
    return digest(
        [row.get(name) for name in ("code_hash", "config_hash", "arm", "seed", "lr", "purpose")]
    )


def digest(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def arguments(job, resume=False):
    """The words after `python`."""
    if resume:
        return [job.trainer, "--init_from=resume", f"--out_dir={job.out_dir}"]
    return [
        job.trainer,
        *(f"--{name}={value}" for name, value in job.values.items()),
        f"--out_dir={job.out_dir}",
    ]


def told(job, resume=False):
    """The command as a person types it."""
    path, *rest = arguments(job, resume)
    near = os.path.relpath(path)
    return shlex.join(["python", near if not near.startswith("..") else path, *rest])


# ---------------------------------------------------------------- one run


def die_with_parent():
    """In the child, before train.py: SIGTERM when the driver is gone, however it went (Linux; elsewhere a run that is
    orphaned ends by itself, and its folder is waited for)."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def make_ready(job):
    """Make the run's folder ready and say whether to resume in it. What was begun with other code or another
    configuration steps aside."""
    folder = Path(job.out_dir)
    try:
        found = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        found = None
    if (
        found != job.identity()
        and folder.exists()
        and (found is not None or checkpoint.steps(folder))
    ):
        set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        files.write(folder / "run.json", json.dumps(job.identity()))
    return bool(checkpoint.steps(folder))


def set_aside(folder):
    aside = next(
        path
        for n in range(1, 10**6)
        if not (path := folder.with_name(f"{folder.name}.old{n}")).exists()
    )
    folder.rename(aside)


def locked(job):
    """Whether another process trains in the run's folder: one that a killed driver left, saving."""
    try:
        if (Path(job.out_dir) / "lock").exists():
            hold(Path(job.out_dir)).close()
        return False
    except UserError:
        return True


class Run:
    """A job whose process runs."""

    def __init__(self, job, gpu=None):
        self.job, self.gpu, self.began, self.over, self.again = (
            job,
            gpu,
            time.perf_counter(),
            None,
            False,
        )
        self.resumed = make_ready(job)
        self.start()

    def start(self):
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.job.threads),
            "PYTHONUNBUFFERED": "1",
        }
        environment |= {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}
        environment |= {"WANDB_RUN_GROUP": self.job.group} if self.job.group else {}
        folder = Path(self.job.out_dir)
        with open(folder / "stdout.txt", "ab") as out, open(folder / "stderr.txt", "wb") as error:
            # A session of its own: the terminal's Ctrl-C reaches the driver alone, which passes one signal on.
            self.process = subprocess.Popen(
                [sys.executable, *arguments(self.job, self.resumed)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent if LIBC else None,
            )

    def poll(self):
        """(why it failed or None, seconds) when the run has ended, else None."""
        status = self.process.poll()
        seconds = time.perf_counter() - self.began
        if status is None:
            if self.job.limit and seconds > self.job.limit and self.over is None:
                self.over = seconds
                self.process.terminate()
            elif self.over is not None and seconds > self.over + min(GRACE, self.job.limit):
                self.kill()
            return None
        if (
            status == 2 and self.resumed and not self.again and self.over is None
        ):  # the checkpoint cannot be used: begin anew, once
            self.again, self.resumed = True, False
            set_aside(Path(self.job.out_dir))
            make_ready(self.job)
            self.start()
            return None
        reason = (
            f"over the limit of {self.job.limit:.0f} s"
            if self.over is not None
            else status and self.reason(status)
        )
        return reason or None, seconds

    def reason(self, status):
        lines = (
            (Path(self.job.out_dir) / "stderr.txt").read_text(errors="replace").strip().splitlines()
        )
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return one_line(lines[-1]).removeprefix("error: ") if lines and status > 0 else how

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def end(runs):
    """Stop processes: each saves and exits; what does not within GRACE seconds is killed."""
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


def slots(workers, device):
    """[(GPU or None, threads)] of so many workers: the cores divided among them, the visible GPUs in turn. workers
    None: one for each GPU, or one."""
    kind, _, number = device.partition(":")
    gpus = [None]
    if kind == "cuda":
        import torch

        seen = [
            gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu
        ] or list(range(torch.cuda.device_count()))
        gpus = [seen[int(number)]] if number else seen
    workers = workers or len(gpus)
    threads = max(
        1,
        (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        // workers,
    )
    return [(gpus[i % len(gpus)], threads) for i in range(workers)]


def local(jobs, places, stop):
    """Run jobs on this machine. Yields (job, row) as each ends, and None now and then; ends when all have, or when
    stop.status says so, after the runs in progress have saved."""
    waiting, free, running, first_seen = list(jobs), list(places), {}, {}
    try:
        while (waiting or running) and not stop.status:
            ended = []
            for run, place in list(running.items()):
                how = run.poll()
                if how is not None:
                    del running[run]
                    free.append(place)
                    ended.append((run.job, *how))
            for job in list(waiting):
                if not free:
                    break
                waiting.remove(job)
                if locked(job):
                    since = first_seen.setdefault(job.key, time.perf_counter())
                    if time.perf_counter() - since > LOCKED:
                        ended.append((job, f"another process trains in {job.out_dir}", 0.0))
                    else:
                        waiting.append(job)
                elif finished(job):
                    ended.append((job, None, 0.0))
                else:
                    place = free.pop(0)
                    job.threads = place[1]
                    try:
                        running[Run(job, place[0])] = place
                    except OSError as error:  # the disk is full, most often
                        free.append(place)
                        ended.append((job, f"cannot start: {error}", 0.0))
            for (
                job,
                reason,
                seconds,
            ) in ended:  # after the next ones have begun: this may take seconds
                yield job, row_of(job, reason, seconds)
            yield None
            if not ended:
                time.sleep(POLL)
    finally:
        end(running)


def run_one(job, stop):
    """A job from start to end in this process: its row, or None if the file `stop` appeared meanwhile and the run was saved."""
    how = run = None
    try:
        while how is None and not Path(stop).exists():
            if run is None and not locked(job):
                if finished(job):
                    return row_of(job, None, 0.0)
                run = Run(job)
            time.sleep(POLL)
            how = run and run.poll()
    finally:
        if run and how is None:
            end([run])
    return how and row_of(job, *how)


def ray_engine(jobs, out_dir, share, threads, cuda, stop):
    """Run jobs as tasks of a Ray cluster: the one that RAY_ADDRESS names, else this machine as one. A task takes
    `threads` CPUs and, on CUDA, 1/share of a GPU. The nodes see this repo and the sweep's folder under the same paths (a
    shared file system); a task whose node is lost is started again and goes on from its last checkpoint. Results are
    known by their content hash. Yields as `local` does."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "ray is not installed", "engine=ray", f"pip install {RAY}, or leave engine out"
        ) from None

    def task(root, told, stop):  # pickled by value: a node needs nothing but the repo
        import sys

        sys.path.insert(0, root)
        from bench.ablation import launch

        job = launch.Job(**told)
        return (launch.run_one(job, stop) or {}) | {
            "key": job.key,
            "node": ray.get_runtime_context().get_node_id(),
        }

    if not ray.is_initialized():
        ray.init(
            log_to_driver=False, logging_level="error"
        )  # RAY_ADDRESS, or a cluster of this machine
    remote = ray.remote(num_cpus=threads, num_gpus=1 / share if cuda else 0, max_retries=3)(task)
    wanted = {job.key: job for job in jobs}
    pending, halt = (
        {},
        Path(out_dir).absolute() / "stop",
    )  # a cancelled task would be killed before its run has saved
    halt.unlink(missing_ok=True)
    for job in jobs:
        job.threads = threads
        pending[
            remote.remote(
                str(ROOT), {**asdict(job), "out_dir": str(Path(job.out_dir).absolute())}, str(halt)
            )
        ] = job
    try:
        while pending and not stop.status:
            ready, _ = ray.wait(list(pending), timeout=1.0)
            for reference in ready:
                job = pending.pop(reference)
                try:
                    row = ray.get(reference)
                except ray.exceptions.RayError as error:
                    row = row_of(job, f"Ray: {one_line(error)}", 0.0) | {"key": job.key}
                if row["key"] in wanted:
                    yield wanted.pop(row["key"]), row | {"out_dir": job.out_dir}
            yield None
    finally:
        if pending:
            halt.touch()
            ray.wait(list(pending), num_returns=len(pending), timeout=GRACE)
            halt.unlink(missing_ok=True)


def slurm(jobs, out_dir, threads, cuda, limit):
    """Write out_dir/commands.txt, a run a line, and out_dir/slurm.sh, the array job over the lines. Returns the script."""
    out_dir, lines = Path(out_dir), []
    for job in jobs:
        make_ready(job)
        latest = shlex.quote(f"{job.out_dir}/latest")
        lines.append(
            f"if test -e {latest}; then exec {told(job, True)}; else exec {told(job)}; fi"
        )  # in the shell's place, so that it gets the signal
    files.write(out_dir / "commands.txt", "".join(line + "\n" for line in lines))
    minutes = [f"#SBATCH --time={max(1, round(limit / 60))}"] if limit else []
    name = shlex.quote(str(out_dir / "commands.txt"))
    text = [
        "#!/bin/bash",
        f"#SBATCH --job-name={out_dir.name}",
        f"#SBATCH --array=0-{len(jobs) - 1}",
        f"#SBATCH --cpus-per-task={threads}",
        *["#SBATCH --gres=gpu:1"] * cuda,
        *minutes,
        "#SBATCH --signal=B:TERM@60",
        "#SBATCH --requeue",
        f"#SBATCH --output={out_dir}/slurm-%a.txt",
        f"export OMP_NUM_THREADS={threads}",
        f'eval "$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {name})"',
    ]
    files.write(out_dir / "slurm.sh", "\n".join(text) + "\n")
    return out_dir / "slurm.sh"
