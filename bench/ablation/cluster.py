"""Run a sweep on a Ray cluster, or as a SLURM array job."""

import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from bench.ablation.launch import GRACE, make_ready, row_of
from common import files
from common.errors import one_line
from common.files import ROOT


def import_ray():
    """Import Ray, connected to the cluster of RAY_ADDRESS, or else to a new one on this machine."""
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    return ray


def run_on_ray(jobs, out_dir, gpu_share, threads, cuda, stop):
    """Run jobs as tasks of a Ray cluster. A run takes `threads` CPUs and, on CUDA, 1/gpu_share of a
    GPU. The nodes see this repo and the sweep's folder under the same paths (a shared file system).
    Ray restarts a task whose node is lost, and the run resumes from its last checkpoint. Yields as
    `run_local` does."""
    ray = import_ray()

    def task(root, values, stop_file):  # pickled by value: a node needs only the repo
        sys.path.insert(0, root)
        from bench.ablation import launch

        row = launch.run_job(launch.Job(**values), Path(stop_file).exists, patience=math.inf)
        return row and row | {"node": ray.get_runtime_context().get_node_id()}

    needs = {"num_cpus": threads, "num_gpus": 1 / gpu_share if cuda else 0}
    remote = ray.remote(**needs, max_retries=3)(task)
    # Ray kills a cancelled task before its run can save, so a file tells the tasks to stop.
    stop_file = Path(out_dir).absolute() / "stop"
    stop_file.unlink(missing_ok=True)
    pending = {}  # reference of a task: its job
    for job in jobs:
        job.threads = threads
        values = asdict(job) | {"out_dir": str(Path(job.out_dir).absolute())}
        pending[remote.remote(str(ROOT), values, str(stop_file))] = job
    try:
        while pending and not stop.status:
            ready, _ = ray.wait(list(pending), timeout=1.0)
            for reference in ready:
                job = pending.pop(reference)
                try:
                    row = ray.get(reference)
                except ray.exceptions.RayError as error:
                    row = row_of(job, f"Ray: {one_line(error)}", 0.0)
                if row:
                    yield job, row | {"out_dir": job.out_dir}
    finally:
        if pending:
            stop_file.touch()
            ray.wait(list(pending), num_returns=len(pending), timeout=GRACE)
            stop_file.unlink(missing_ok=True)


def write_slurm(jobs, out_dir, threads, cuda, options=""):
    """Write out_dir/commands.txt, one run per line, and out_dir/slurm.sh, an array job with a task
    per line, which uses the Python (of a virtual environment) that runs now. options: more of
    sbatch's. Returns the path of the script."""
    out_dir, lines = Path(out_dir), []
    for job in jobs:
        make_ready(job)
        latest = shlex.quote(f"{job.out_dir}/latest")
        # exec: the run replaces the shell, so that the signal reaches it.
        resume, begin = job.command(resume=True), job.command()
        lines.append(f"if test -e {latest}; then exec {resume}; else exec {begin}; fi")
    files.write(out_dir / "commands.txt", "".join(line + "\n" for line in lines))
    name = shlex.quote(str(out_dir / "commands.txt"))
    text = [
        "#!/bin/bash",
        f"#SBATCH --job-name={out_dir.name}",
        f"#SBATCH --array=0-{len(jobs) - 1}",
        f"#SBATCH --cpus-per-task={threads}",
        *(["#SBATCH --gres=gpu:1"] if cuda else []),
        "#SBATCH --signal=B:TERM@60",
        "#SBATCH --requeue",
        f"#SBATCH --output={out_dir}/slurm-%a.txt",
        *(f"#SBATCH {option}" for option in shlex.split(options)),
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        f"export OMP_NUM_THREADS={threads}",
        f'eval "$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {name})"',
    ]
    files.write(out_dir / "slurm.sh", "\n".join(text) + "\n")
    return out_dir / "slurm.sh"
