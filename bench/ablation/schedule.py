"""The order of a sweep's runs: those that choose each arm's learning rate, the base at several
numbers of tokens, the runs to report seed by seed over all arms, then more seeds for undecided
arms."""

import itertools
import math
import statistics

from bench.ablation import launch, rows, worth
from bench.ablation.identity import digest
from bench.ablation.progress import RunBar, say
from bench.ablation.sweep import CURVE_SEEDS

EXTENSIONS = 2  # times that a grid of rates is extended if the chosen rate is at its edge
CONTROLS = 8  # runs of the base when another kind of machine continues a sweep
BETTER = 2  # standard errors by which another rate must beat the base's


def run_sweep(sweep, stop, start=launch.run_local):
    """Run all runs of a sweep. start(jobs, sweep, stop) runs jobs and yields (job, row) when one
    ends. Returns False if the sweep was stopped midway."""
    for jobs in phases(sweep):
        if not run_jobs(sweep, jobs, stop, start):
            return False
    return run_more_seeds(sweep, stop, start)


def phases(sweep):
    """The jobs of each phase of a sweep, in turn; those of a phase depend on the rows of the phases
    before. The curve comes before the runs to report: the margin is fixed by then."""
    yield sweep.tuning_jobs()
    while choose_learning_rates(sweep):
        yield sweep.tuning_jobs()
    curve = sweep.curve_jobs()
    if curve:
        yield curve + sweep.report_jobs(names=["base"], most=CURVE_SEEDS)
    fix_margin(sweep)
    sweep.write_plan()
    yield sweep.report_jobs()


def own_controls(sweep):
    """Runs of the base on this kind of machine, where the reported runs so far are of others:
    a report joins only machines whose runs of the base agree (rows.machines_apart)."""
    here, base = sweep.facts["hardware"], sweep.arms["base"]
    reported = [row for row in sweep.rows.values() if row["purpose"] == "report"]
    known = [row["arm"] == "base" for row in reported if row.get("hardware") == here]
    if not reported or len(known) == len(reported) or sum(known) >= CONTROLS:
        return []
    first = int(digest(here)[:7], 16)  # other seeds than those of the plan, and on each machine
    return [sweep.job(base, first + number, 1.0, "report") for number in range(CONTROLS)]


def choose_learning_rates(sweep):
    """Choose the multiple of the learning rate of each arm and of the base's replicate by the loss
    on the tuning half of the validation text. Returns whether one is at the edge of its grid, which
    is then longer, so that further runs are needed."""
    longer, grids = False, {} if sweep.config.lr_grid == [1] else sweep.grids
    for name, grid in grids.items():
        losses = {}
        for job in sweep.tuning_jobs([name]):
            row = sweep.rows.get(job.key, {})
            loss = {"done": row.get("final_tune"), "diverged": math.inf}.get(row.get("status"))
            losses.setdefault(job.lr, []).append(math.nan if loss is None else loss)
        chosen = sweep.chosen_lr[name] = chosen_rate(losses)
        further = {min(grid): chosen / 2, max(grid): chosen * 2}.get(chosen)
        if further and len(grid) > 1 and len(grid) - len(sweep.config.lr_grid) < EXTENSIONS:
            grid.append(further)
            longer = True
    return longer


def chosen_rate(losses):
    """The multiple 1, unless the one with the least mean is better by BETTER standard errors of the
    difference, with one variance for all multiples. losses: {multiple: losses of its runs}, inf
    where a run diverged, nan where one failed. A multiple with a failed run is not chosen, and none
    but 1 while a run at 1 has failed."""
    losses = {lr: values for lr, values in losses.items() if not any(map(math.isnan, values))}
    means = {lr: statistics.fmean(values) for lr, values in losses.items()}
    best = min(means, key=lambda lr: (means[lr], lr), default=1.0)
    if not math.isfinite(means.get(best, math.inf)):
        return 1.0
    finite = [values for lr, values in losses.items() if math.isfinite(means[lr])]
    variance = statistics.fmean(map(statistics.variance, finite))
    error = math.sqrt(2 * variance / len(losses[best]))  # all multiples have as many runs
    return best if means[best] < means.get(1, -math.inf) - BETTER * error else 1.0


def fix_margin(sweep):
    """Fix the smallest difference that counts, from the base's runs at several multiples of its
    tokens, unless it is given or was fixed before."""
    if sweep.margin is not None or not sweep.curve_jobs():
        return
    curve = worth.curve_of(rows.load(sweep.out))
    margin = curve.margin() if curve else math.nan
    if math.isfinite(margin):
        sweep.margin = margin
        sweep.margin_source = "5 % of the tokens, fixed before the arms' reported runs"


def run_jobs(sweep, jobs, stop, start):
    """Run the jobs that are not done, and write their rows. Returns False if stopped."""
    reports = any(job.purpose == "report" and job.key not in sweep.rows for job in jobs)
    if reports and start is launch.run_local:
        jobs = own_controls(sweep) + jobs
    pending = [job for job in jobs if job.key not in sweep.rows]
    if not pending:
        return not stop.status
    with RunBar(sweep, jobs) as bar:
        for job, row in start(pending, sweep, stop):
            sweep.keep_row(job, row)
            bar.ended(job, row)
    return not stop.status


def run_more_seeds(sweep, stop, start):
    """After each look but the last, run more seeds of the undecided arms and of what they are
    compared with. The looks are planned beforehand, and the verdicts correct for all of them
    (looks.py), so that errors hold although verdicts are read several times. Returns False if
    stopped."""
    from bench.ablation import verdicts

    for first, end in itertools.pairwise(sweep.looks):
        # A resumed sweep decides by the rows that were known at this look.
        planned, runs = sweep.planned_runs(first), rows.load(sweep.out)
        number = runs.seed - sweep.config.first_seed  # of the run among those of its arm
        known = (runs.purpose != "report") | (number < runs.arm.map(planned))
        undecided = verdicts.undecided(runs[known], rows.plan(sweep.out))
        if undecided is not None:
            say(f"after {first} seeds, undecided: {', '.join(undecided) or 'nothing'}")
        if not undecided:
            return True
        compared = {sweep.arms[name].against for name in undecided}
        names = [*undecided, *compared, *sweep.control_arms()]
        if not run_jobs(sweep, sweep.report_jobs(first, end, names), stop, start):
            return False
    return True
