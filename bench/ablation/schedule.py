"""The order of a sweep's runs: first those that choose learning rates, then those to report, then
more seeds for undecided arms."""

import itertools
import math

from bench.ablation import cluster, launch
from bench.ablation.outcome import drop_checkpoints
from bench.ablation.terminal import Progress, format_duration


def run_sweep(sweep, stop):
    """Run all runs of a sweep. Returns False if it was stopped midway."""
    if not run_jobs(sweep, sweep.tuning_jobs(), stop):
        return False
    sweep.choose_learning_rates()
    content = sweep.describe()
    if not run_jobs(sweep, sweep.report_jobs(), stop):
        return False
    return not sweep.config.budget_seconds or run_more_seeds(sweep, content, stop)


def run_jobs(sweep, jobs, stop):
    """Run those of the jobs that are not done, and write their rows. Returns False if stopped."""
    pending = [job for job in jobs if job.key not in sweep.rows]
    for job in pending:
        print(job.command, flush=True)
    with Progress(sweep, jobs) as progress:
        for event in start_engine(sweep, pending, stop):
            if event is None:
                progress.show()
                continue
            job, row = event
            sweep.add_row(job, row)
            if row["status"] == "done":
                drop_checkpoints(job)
            progress.show(job, row)
    return not stop.status


def start_engine(sweep, jobs, stop):
    """The events of running some jobs: (job, row) when one ends, None in between."""
    if sweep.config.engine == "local":
        return launch.run_local(jobs, sweep.slots, stop)
    cuda, gpu_share = sweep.device_kind == "cuda", sweep.config.workers or 1
    return cluster.run_on_ray(jobs, sweep.out, gpu_share, sweep.threads, cuda, stop)


# ---------------------------------------------------------------- a budget


def run_more_seeds(sweep, content, stop):
    """Spend the budget: after each look, run more seeds of the undecided arms, those that need the
    fewest first. The looks are planned beforehand, which keeps p-values valid although
    verdicts are read several times. `content` is that of sweep.json. Returns False if stopped."""
    from bench.ablation import stats

    for first, end in itertools.pairwise(content["looks"]):
        # A resumed sweep decides by the rows that were known at this look.
        rows = [
            row for row in sweep.rows.values() if row["purpose"] == "tune" or row["seed"] < first
        ]
        undecided = dict(stats.undecided(content, rows))
        used = sum(row["wall_seconds"] for row in rows) / len(sweep.slots)
        seconds_left = content["budget_seconds"] - used
        names = affordable(sweep, undecided, end - first, seconds_left)
        if not names:
            print(
                f"after {first} seeds: {why_none(undecided, seconds_left, end - first)}", flush=True
            )
            return True
        chosen = ", ".join(name for name in sweep.arms if name in names)
        print(
            f"after {first} seeds, undecided: {', '.join(undecided)}; up to {end} for {chosen}",
            flush=True,
        )
        if not run_jobs(sweep, sweep.report_jobs(first, end, names), stop):
            return False
    return True


def affordable(sweep, undecided, seeds, seconds_left):
    """The names of arms whose next seeds fit into the time that is left, with the arms that they
    are compared with. undecided: {arm: seeds that it needs, None if unknown}."""
    names = set()
    for name in sorted(undecided, key=lambda name: undecided[name] or math.inf):
        arm = sweep.arms[name]
        needed = {name, arm.against, *(arm.pair or ()), "base", "base again"} & set(sweep.arms)
        seconds = sum(sweep.predicted[other] for other in names | needed)
        if seconds * seeds / len(sweep.slots) <= seconds_left:
            names |= needed
    return names


def why_none(undecided, seconds_left, seeds):
    """Why no arm gets more seeds."""
    if not undecided:
        return "nothing is undecided that more seeds could decide"
    left, arms = format_duration(max(0, seconds_left)), ", ".join(undecided)
    return f"the {left} left are too short for {seeds} more seeds of {arms}"


# ---------------------------------------------------------------- an array job


def emit(sweep):
    """Write the array job of the runs that come next: those that choose learning rates, then those
    that are reported. Returns the exit status."""
    jobs = [job for job in sweep.tuning_jobs() if job.key not in sweep.rows]
    if not jobs:
        sweep.choose_learning_rates()
        jobs = [job for job in sweep.report_jobs() if job.key not in sweep.rows]
    if not jobs:
        print("all runs are done: the same command without emit writes the report")
        return 0
    cuda, limit = sweep.device_kind == "cuda", sweep.config.limit_seconds
    script = cluster.write_slurm(jobs, sweep.out, sweep.threads, cuda, limit)
    print(f"{len(jobs)} runs: sbatch {script}\nthen gather them: the same command without emit")
    return 0
