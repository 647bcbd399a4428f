"""
Measure what parts are worth: train a base, and arms with one part swapped, with several seeds.

    python bench/ablate.py config/ablate_shakespeare.py --workers=2
    python bench/ablate.py config/ablate_shakespeare.py --axis=position --out_dir=out-positions
    python bench/ablate.py config/ladder_gpt2_to_llama.py --dry_run
    python bench/ablate.py config/answer/gpt2.py --also=small
    python bench/ablate.py config/answer/settings.py --settings=4

A sweep is a folder, out_dir. Stop it at any time; the same command continues it. The keys of
train.py, except its seeds and out_dir, set the base of a sweep, in a config file or on the command
line. A file of many settings (FILE --help) has them within `settings`. The sweep's own keys are:
"""

import sys
from contextlib import closing

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from common import early
from common.commands import command, in_lines
from common.errors import run, tell

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.need(*early.ABLATE)
    early.start("bench/ablate.py")

from bench.ablation import rows, runs, step_times
from bench.ablation.arms import list_arms
from bench.ablation.progress import doing, print_plan, say
from bench.ablation.schedule import pending_jobs, report_jobs, run_sweep
from bench.ablation.settings import read
from bench.ablation.sweep import make_sweep
from bench.settings import plan as settings_plan
from common.runtime import StopRequest


def make_sweeps(argv, trainer=runs.TRAINER, elsewhere=False):
    """Read the config of a command line, list its arms and check them. Returns [Sweep]: one for
    each column (another size, text or optimizer) that --also names, or one for the sweep itself.
    trainer: the script that trains a run. elsewhere: the runs go to other machines."""
    sweeps = []
    for settings in read(argv, __doc__):
        arms = list_arms(settings.config, settings.base)
        sweeps.append(make_sweep(settings, arms, trainer, elsewhere))
    return sweeps


def run_one(sweep, start=runs.run_local):
    """Run a sweep, judge its arms and report; in a dry run, print its plan alone. start(jobs,
    sweep, stop) runs jobs and yields (job, row) when one ends. Returns the exit status."""
    new_costs = show_plan(sweep)
    if sweep.config.dry_run:
        return 0

    sweep.open(new_costs)
    try:
        with closing(StopRequest()) as stop:
            completed = complete(sweep, stop, start)
        if not completed:
            text = f"stopped and saved; the same command continues:\n{in_lines(sweep.command)}"
            if tell(text, sys.stdout):  # stdout is closed
                tell(text)  # on stderr
            return stop.status
        with doing("writing the report"):
            from bench.ablation import report  # matplotlib takes a second to import

            sections = report.judge([sweep.out])
            page = report.write(sections)
        print(report.terminal(sections))
        print(page)
        return int(any(row["status"] == "failed" for row in sweep.rows.values()))
    finally:
        sweep.lock.close()


def complete(sweep, stop, start):
    """Run all runs of a sweep. Returns False if it was stopped midway. A terminal that closes stops
    it, too: it sends a signal, and then refuses what is printed."""
    try:
        return run_sweep(sweep, stop, start)
    except OSError:
        if not stop.status:
            raise
        return False


def show_plan(sweep):
    """Time the arms, and print the plan. Returns the new rows of costs.jsonl."""
    sweep.load_rows()
    jobs = pending_jobs(sweep)
    new_costs = []
    if sweep.machine.is_here and (jobs or not sweep.config.dry_run):
        new_costs = step_times.time_sweep(sweep)
    print_plan(sweep, jobs)
    if sweep.config.dry_run:
        print_commands(sweep, jobs)
    return new_costs


def print_commands(sweep, jobs):
    """Print the command of one run of each arm, and the number of the others."""
    shown = [job for job in report_jobs(sweep, most=1) if job.key not in sweep.rows]
    for job in shown:
        print(command("train.py", *job.arguments()))
    more = len(jobs) - len(shown)
    if more:
        say(f"and {more} more runs, at other seeds, learning rates and numbers of tokens")


def ablate(*config_files, **keys):
    """Run a sweep and return its runs, as bench/ablation/rows.py describes them:

        ablate("config/ablate_shakespeare.py", workers=2, out_dir="out-shakespeare")

    Raises UserError for a mistake. A failed run is a row with this status. None in a dry run."""
    options = [f"--{key}={value}" for key, value in keys.items()]
    _, sweeps = run_all([*config_files, *options])
    begun = [sweep.out for sweep in sweeps if sweep.lock]
    return rows.load(begun) if begun else None


def run_all(argv, trainer=runs.TRAINER):
    """Run the sweeps of a command line one after the other; all are checked before the first one
    runs. Returns (exit status, [Sweep])."""
    sweeps = make_sweeps(argv, trainer)
    worst = 0
    for sweep in sweeps:
        status = run_one(sweep)
        worst = max(worst, status)
        if status not in (0, 1):  # stopped by a signal
            break
    return worst, sweeps


def main(argv, trainer=runs.TRAINER):
    if settings_plan.is_asked(argv):
        from bench.settings import sweep as settings_sweep  # here, since other sweeps do without

        return settings_sweep.main(argv, __doc__)
    status, _ = run_all(argv, trainer)
    return status


if __name__ == "__main__":
    run(main)
