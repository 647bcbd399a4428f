"""
Run a sweep on a Ray cluster, or write its runs as SLURM array jobs:

    python -m extras.cluster CONFIG --engine=ray
    python -m extras.cluster CONFIG --emit=slurm --sbatch="--partition=gpu --account=me"

All nodes must see this repo, the folder in which this is typed and the sweep's folder under the
same paths. With ray, --workers=N puts N runs on each GPU. With slurm, this command writes one array
job: start it with sbatch, and type the command again when it has ended, until all runs are done. It
takes the keys of bench/ablate.py, and:
"""

import math
import os
import shlex
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.need(*early.ABLATE)
    early.start("extras.cluster")

from bench import ablate
from bench.ablation import runs, schedule
from common import files
from common.commands import ROOT
from common.configurator import build, from_text, keys, print_help
from common.errors import UserError, one_line, run


@dataclass
class ClusterConfig:
    engine: Literal["ray"] | None = None  # run the sweep on the cluster of RAY_ADDRESS
    emit: Literal["slurm"] | None = None  # write the next array job
    sbatch: str = ""  # options of the array job, such as "--partition=gpu --account=me"


def split_keys(argv):
    """(ClusterConfig, the command line of bench/ablate.py)."""
    kinds = keys(ClusterConfig)
    given = {}
    rest = []
    for arg in argv:
        key, _, text = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and key in kinds:
            given[key] = from_text(text, kinds[key])
        else:
            rest.append(arg)
    config = build(ClusterConfig, given)
    if (config.engine is None) == (config.emit is None):
        fix = "give --engine=ray or --emit=slurm; without either, use bench/ablate.py"
        what = "two engines are given" if config.engine else "no engine is given"
        raise UserError(what, "engine, emit", fix)
    return config, rest


def main(argv, trainer=runs.TRAINER):
    """Run, or write the array job of, each sweep of a command line. Returns the exit status."""
    print_help(argv, __doc__, [ClusterConfig])
    config, rest = split_keys(argv)
    status = 0
    for sweep in ablate.make_sweeps(rest, trainer, elsewhere=True):
        sweep.command = shlex.join(["python", "-m", "extras.cluster", *argv])
        if config.emit == "slurm":
            emit(sweep, config.sbatch)
            continue
        ended = ablate.run_one(sweep, run_on_ray)
        status = max(status, ended)
        if ended not in (0, 1):  # stopped by a signal
            break
    return status


# ---------------------------------------------------------------- Ray


def threads_of(sweep):
    """The CPUs of a run: one beside a GPU, whatever this machine has; else as many as here."""
    if sweep.machine.device_kind == "cuda":
        return 1
    return sweep.machine.threads


def run_on_ray(jobs, sweep, stop):
    """Run jobs as tasks of a Ray cluster. Yields (job, row) when one ends, as runs.run_local
    does. A run takes `threads` CPUs and, on CUDA, 1/workers of a GPU. Ray restarts a task whose
    node is lost, and the run resumes from its last checkpoint."""
    import ray

    if not ray.is_initialized():  # the cluster of RAY_ADDRESS, or else a new one on this machine
        ray.init(log_to_driver=False, logging_level="error")

    def task(root, folder, values, stop_file):  # pickled by value: a node needs only the repo
        sys.path.insert(0, root)
        os.chdir(folder)  # of the driver: data_dir is relative to it
        from bench.ablation import runs

        row = runs.run_job(runs.Job(**values), Path(stop_file).exists, patience=math.inf)
        return row and row | {"node": ray.get_runtime_context().get_node_id()}

    threads = threads_of(sweep)
    gpus = 1 / (sweep.config.workers or 1) if sweep.machine.device_kind == "cuda" else 0
    remote = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=3)(task)
    # Ray kills a cancelled task before its run can save, so a file tells the tasks to stop.
    stop_file = Path(sweep.out).absolute() / "stop"
    stop_file.unlink(missing_ok=True)
    pending = {}  # reference of a task: its job
    for job in jobs:
        job.threads = threads
        values = asdict(job) | {"out_dir": str(Path(job.out_dir).absolute())}
        pending[remote.remote(str(ROOT), os.getcwd(), values, str(stop_file))] = job
    try:
        while pending and not stop.status:
            ready, _ = ray.wait(list(pending), timeout=1.0)
            for reference in ready:
                job = pending.pop(reference)
                try:
                    row = ray.get(reference)
                except ray.exceptions.RayError as error:
                    row = runs.row_of(job, f"Ray: {one_line(error)}", 0.0)
                if row:
                    yield job, row | {"out_dir": job.out_dir}
    finally:
        if pending:
            stop_file.touch()
            ray.wait(list(pending), num_returns=len(pending), timeout=runs.GRACE)
            stop_file.unlink(missing_ok=True)


# ---------------------------------------------------------------- SLURM


def emit(sweep, options):
    """Gather the runs that have ended, and write the array job of the phase that comes next."""
    sweep.load_rows()
    if sweep.config.dry_run:
        print(f"{len(schedule.pending_jobs(sweep))} runs")
        return
    sweep.open()
    with closing(sweep.lock):
        device = None if sweep.machine.is_here else "cpu"  # on a login node
        for phase in schedule.phases(sweep):
            for job in phase:
                if job.key not in sweep.rows and runs.is_finished(job):
                    sweep.keep_row(job, runs.row_of(job, None, 0.0, device))
            jobs = [job for job in phase if job.key not in sweep.rows]
            if jobs:
                script = write_slurm(jobs, sweep, options)
                print(f"{len(jobs)} runs: start them with sbatch {script}")
                print(f"Task N prints to {Path(sweep.out) / 'slurm-N.txt'}.")
                print("When they have ended, type this command again.")
                return
    print("all runs are done: bench/ablate.py with the other arguments writes the report")


def write_slurm(jobs, sweep, options):
    """Write OUT/commands.txt, one run per line, and OUT/slurm.sh, an array job with a task per
    line, which uses the Python (of a virtual environment) that runs now. options: more of
    sbatch's, written as they were typed. Returns the path of the script."""
    lines = []
    for job in jobs:
        runs.make_ready(job)
        latest = shlex.quote(f"{job.out_dir}/latest")
        # exec: the run replaces the shell, so that the signal reaches it.
        resume = job.command(resume=True)
        lines.append(f"if test -e {latest}; then exec {resume}; else exec {job.command()}; fi")
    commands = sweep.out / "commands.txt"
    files.write(commands, "".join(line + "\n" for line in lines))
    python = shlex.quote(str(Path(sys.executable).parent))
    text = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(sweep.out.name)}",
        f"#SBATCH --array=0-{len(jobs) - 1}",
        f"#SBATCH --cpus-per-task={threads_of(sweep)}",
        "#SBATCH --signal=B:TERM@60",
        "#SBATCH --requeue",
        f"#SBATCH --output={shlex.quote(f'{sweep.out}/slurm-%a.txt')}",
    ]
    if sweep.machine.device_kind == "cuda":
        text.append("#SBATCH --gres=gpu:1")
    if options:
        text.append(f"#SBATCH {options}")
    text += [
        f"export PATH={python}:$PATH",
        f"export OMP_NUM_THREADS={threads_of(sweep)}",
        f'eval "$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(commands))})"',
    ]
    script = sweep.out / "slurm.sh"
    files.write(script, "\n".join(text) + "\n")
    return script


if __name__ == "__main__":
    run(main)
