"""
Measure how much each part matters: swap one part at a time, train with several seeds, and report.

    python bench/ablate.py config/ablate_shakespeare.py --workers=2
    python bench/ablate.py config/ablate_shakespeare.py --axis=position --out_dir=out-positions
    python bench/ablate.py config/ladder_gpt2_to_llama.py --dry_run
    python bench/ablate.py config/answer/gpt2.py --also=small

A sweep is a folder, out_dir. Stop it at any time; the same command continues it. The keys of
train.py, except seed and the like, set the base, in a config file or on the command line. The
sweep's own keys are:
"""

import sys
from collections import Counter

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from common.errors import run, starting

if __name__ == "__main__":
    starting("bench/ablate.py")

from rich.console import Console

from bench.ablation import costs, launch, rows
from bench.ablation.progress import WIDTH, doing, plan_table, say
from bench.ablation.schedule import run_sweep
from bench.ablation.settings import AblateConfig, read, split_columns
from bench.ablation.sweep import Sweep
from common.configurator import print_help
from common.runtime import StopRequest
from training.run_folder import duration

DRY_ROUNDS = 5  # rounds of timing in a dry run


def plan(sweep):
    """Measure what the arms cost and print the plan. Returns the new rows of costs.jsonl."""
    config, new_costs = sweep.config, []
    sweep.read_rows()
    jobs = sweep.pending_jobs()
    if sweep.device_is_here and (jobs or not config.dry_run):
        new_costs = sweep.measure(DRY_ROUNDS if config.dry_run else costs.ROUNDS)
    Console(width=WIDTH, highlight=False).print(plan_table(sweep, jobs))
    if not jobs:
        say(f"no run is pending{', up to the first look' * (len(sweep.looks) > 1)}")
        return new_costs
    counts = Counter(job.purpose for job in jobs)
    words = {"tune": "to choose learning rates", "curve": "for the curve of tokens"}
    words["report"] = "to report"
    texts = [f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind]]
    time = "an unknown time, since the arms are not timed here"
    if sweep.predicted:
        seconds = sum(sweep.predicted[job.arm] for job in jobs)
        time = f"about {duration(seconds / len(sweep.slots))}"
    say(f"{len(jobs)} runs: {', '.join(texts)}")
    say(f"{len(sweep.slots)} at a time: {time}{' to the first look' * (len(sweep.looks) > 1)}")
    for seeds in sweep.looks:
        say(sweep.decides(seeds))
    return new_costs


def run_one(sweep, start=launch.run_local):
    """Plan, run and report a sweep, whose runs `start` starts. Returns the exit status."""
    new_costs = plan(sweep)
    if sweep.config.dry_run:
        shown = [job for job in sweep.report_jobs(most=1) if job.key not in sweep.rows]
        for job in shown:
            print(job.command())
        if more := len(sweep.pending_jobs()) - len(shown):
            say(f"and {more} more runs, at other seeds, learning rates and numbers of tokens")
        return 0

    sweep.open(new_costs)
    try:
        stop = StopRequest()
        if not run_sweep(sweep, stop, start):
            print(f"stopped and saved; the same command continues:\n{sweep.command}")
            return stop.status
        with doing("writing the report"):
            from bench.ablation import report

            page = report.write([sweep.out])
        print(report.terminal([sweep.out]))
        failed = [row for row in sweep.rows.values() if row["status"] == "failed"]
        for row in failed:
            run_name = f"{row['arm']} seed {row['seed']}"
            print(f"error: {run_name} failed ({row['out_dir']}): {row['reason']}", file=sys.stderr)
        print(page)
        return 1 if failed else 0
    finally:
        sweep.lock.close()


def ablate(*config_files, **keys):
    """Run a sweep and return its runs, as bench/ablation/rows.py describes them:

        ablate("config/ablate_shakespeare.py", workers=2, out_dir="out-shakespeare")

    Raises UserError for a mistake; a run that fails is a row with this status."""
    argv = [*config_files, *(f"--{key}={value}" for key, value in keys.items())]
    main(argv)
    return rows.load([read(words, __doc__)[0].out_dir for words in sweeps_of(argv)])


def sweeps_of(argv):
    """The command line of each sweep: of each column that --also lists, or argv alone."""
    rest, columns = split_columns(argv)
    return [[*rest, f"--also={name}"] for name in columns] or [argv]


def main(argv, trainer=launch.TRAINER):
    print_help(argv, __doc__, [AblateConfig])
    statuses = []
    for sweep in [Sweep(words, __doc__, trainer) for words in sweeps_of(argv)]:
        statuses.append(run_one(sweep))
        if statuses[-1] not in (0, 1):
            break
    return max(statuses)


if __name__ == "__main__":
    run(main)
