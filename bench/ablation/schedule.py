"""The runs of a sweep in their order: those that choose learning rates; the base at several numbers
of tokens, and its first runs to report, which fix the margin; all other runs, seed by seed."""

import math
import statistics

from bench.ablation import plans, rows, runs, worth
from bench.ablation.arms import BASE
from bench.ablation.identity import digest
from bench.ablation.progress import RunBar
from common.runtime import seed_for

TUNING_SEED = 1000  # first seed of the runs that choose a learning rate
TUNE_SEEDS = 3  # runs at each rate
REPLICATE_SEED = 10_000  # added to the data's seed of the base's second copy
CURVE_SEEDS = 3  # runs of the base at each other multiple of its tokens
EXTENSIONS = 2  # times that a grid of rates is extended if the chosen rate is at its edge
CONTROLS = 8  # runs of the base when another kind of machine continues a sweep


def job_of(sweep, arm, seed, lr, purpose):
    """A run of an arm. A seed gives all arms one order of the data, and each its own weights."""
    values = dict(arm.values)
    if lr != 1:
        values["learning_rate"] *= lr
        if values.get("min_lr") is not None:
            values["min_lr"] *= lr
    values["seed"] = seed_for(int(digest(arm.name)[:8], 16), seed) % 10**9
    values["data_seed"] = seed + REPLICATE_SEED if arm.replicate else seed
    folder = sweep.out / "runs" / f"{arm.name.replace(' ', '-')}-s{seed}-lr{lr:g}"
    return runs.Job(
        arm=arm.name,
        seed=seed,
        lr=lr,
        purpose=purpose,
        out_dir=str(folder),
        values=values,
        config_hash=arm.config_hash,
        code_hash=arm.code_hash,
        data=sweep.data["fingerprint"],
        kind=sweep.data["kind"],
        prompt=sweep.config.prompt,
        limit=runs.time_limit(sweep.predicted.get(arm.name)),
        threads=sweep.machine.threads,
        trainer=sweep.trainer,
        number=seed - sweep.config.first_seed,
    )


def tuning_jobs(sweep, names=None):
    """The runs that choose a learning rate for the base and each arm (of those named, None: all),
    on seeds that are not reported."""
    if sweep.config.lr_grid == [1]:
        return []
    jobs = []
    for seed in range(TUNING_SEED, TUNING_SEED + TUNE_SEEDS):
        for name, grid in sweep.grids.items():
            if names is None or name in names:
                for lr in grid:
                    jobs.append(job_of(sweep, sweep.arms[name], seed, lr, "tune"))
    return jobs


def curve_jobs(sweep):
    """The runs of the base at other multiples of its tokens."""
    jobs = []
    for seed in range(CURVE_SEEDS):
        for arm in sweep.arms.values():
            if arm.curve:
                lr = sweep.chosen_lr.get(BASE, 1.0)
                jobs.append(job_of(sweep, arm, seed, lr, "curve"))
    return jobs


def report_jobs(sweep, names=None, most=math.inf):
    """The runs to report, of all or some arms, seed by seed; at most `most` runs of each arm."""
    planned = sweep.planned_runs()
    jobs = []
    for number in range(max(planned.values())):
        for name, count in planned.items():
            if (names is None or name in names) and number < min(count, most):
                seed = sweep.config.first_seed + number
                lr = sweep.chosen_lr.get(name, 1.0)
                jobs.append(job_of(sweep, sweep.arms[name], seed, lr, "report"))
    return jobs


def pending_jobs(sweep):
    """The planned runs that are not done."""
    jobs = tuning_jobs(sweep) + curve_jobs(sweep) + report_jobs(sweep)
    return [job for job in jobs if job.key not in sweep.rows]


# ---------------------------------------------------------------- their order


def run_sweep(sweep, stop, start):
    """Run all runs of a sweep. start(jobs, sweep, stop) runs jobs and yields (job, row) when one
    ends. Returns False if the sweep was stopped midway."""
    for jobs in phases(sweep):
        run_jobs(sweep, jobs, stop, start)
        if stop.status:
            return False
    return True


def phases(sweep):
    """Yield the jobs of each phase of a sweep, which depend on the rows of the phases before. The
    curve comes before the runs to report: the margin is fixed by then."""
    yield tuning_jobs(sweep)
    while choose_learning_rates(sweep):
        yield tuning_jobs(sweep)
    sweep.write_plan()  # with the rates: rows.why_left_out names rows of other rates
    curve = curve_jobs(sweep)
    if curve:
        yield curve + report_jobs(sweep, names=[BASE], most=CURVE_SEEDS)
    fix_margin(sweep)
    sweep.write_plan()
    yield report_jobs(sweep)


def run_jobs(sweep, jobs, stop, start):
    """Run the jobs that are not done, and write their rows, until all have ended or `stop`."""
    pending = [job for job in jobs if job.key not in sweep.rows]
    if start is runs.run_local and any(job.purpose == "report" for job in pending):
        jobs = own_controls(sweep) + jobs
        pending = [job for job in jobs if job.key not in sweep.rows]
    if not pending:
        return
    with RunBar(sweep, jobs) as bar:
        for job, row in start(pending, sweep, stop):
            sweep.keep_row(job, row)
            bar.ended(job, row)


def own_controls(sweep):
    """Runs of the base on this kind of machine, where the reported runs so far come from others: a
    report joins only machines whose runs of the base agree (rows.machines_apart)."""
    here = sweep.machine.facts["hardware"]
    reported = [row for row in sweep.rows.values() if row["purpose"] == "report"]
    ours = [row for row in reported if row.get("hardware") == here]
    controls = [row for row in ours if row["arm"] == BASE]
    if not reported or len(ours) == len(reported) or len(controls) >= CONTROLS:
        return []
    first = int(digest(here)[:7], 16)  # seeds that neither the plan nor another machine has
    base = sweep.arms[BASE]
    lr = sweep.chosen_lr.get(BASE, 1.0)
    return [job_of(sweep, base, first + number, lr, "report") for number in range(CONTROLS)]


# ---------------------------------------------------------------- what is chosen between phases


def choose_learning_rates(sweep):
    """Choose the multiple of the learning rate of the base and of each arm by the loss on the
    tuning half of the validation text. Returns whether one is at the edge of its grid, which is
    then longer, so that further runs are needed."""
    if sweep.config.lr_grid == [1]:
        return False
    longer = False
    for name, grid in sweep.grids.items():
        losses = {}
        for job in tuning_jobs(sweep, [name]):
            losses.setdefault(job.lr, []).append(tuning_loss(sweep.rows.get(job.key, {})))
        chosen = chosen_rate(losses)
        sweep.chosen_lr[name] = chosen
        may_extend = len(grid) - len(sweep.config.lr_grid) < EXTENSIONS
        if may_extend and chosen == min(grid):
            grid.append(chosen / 2)
            longer = True
        elif may_extend and chosen == max(grid):
            grid.append(chosen * 2)
            longer = True
    for name, arm in sweep.arms.items():
        if arm.replicate:
            sweep.chosen_lr[name] = sweep.chosen_lr[BASE]
    return longer


def tuning_loss(row):
    """The loss by which a rate is chosen: inf of a run that diverged, nan of one that failed."""
    if row.get("status") == "diverged":
        return math.inf
    loss = row.get("final_tune") if row.get("status") == "done" else None
    return math.nan if loss is None else loss


def chosen_rate(losses):
    """The multiple with the least mean loss; 1 if there is none. losses: {multiple: losses of its
    runs}, inf where a run diverged, nan where one failed: then the multiple is not chosen."""
    means = {}
    for lr, values in losses.items():
        mean = statistics.fmean(values)
        if math.isfinite(mean):
            means[lr] = mean
    return min(means, key=lambda lr: (means[lr], lr), default=1.0)


def fix_margin(sweep):
    """Fix the smallest difference that counts, from the base's runs at several multiples of its
    tokens, unless it is given or was fixed before, or an arm has been reported already."""
    if sweep.margin is not None or not curve_jobs(sweep):
        return
    control = plans.control_group(sweep.outline())
    if sweep.measured - {*control}:
        return
    curve = worth.curve_of(rows.load(sweep.out))
    margin = curve.margin() if curve else math.nan
    if math.isfinite(margin):
        sweep.margin = margin
        sweep.margin_source = "5 % of the tokens, fixed before the arms' reported runs"
