"""A sweep prints its plan, its current work and the progress of its runs: on a terminal as rich's
bar, elsewhere as one line when something begins or ends."""

import contextlib
import math
import sys
import textwrap
import time
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from bench.ablation import plans, power
from bench.ablation.arms import BASE, described
from common.commands import WIDTH
from common.errors import WRAP, printable
from training.run_folder import duration
from training.settings import TrainConfig

SILENCE = 30  # seconds after which a line off a terminal shows that work goes on
PURPOSES = {
    "tune": "to choose learning rates",
    "curve": "for the curve of tokens",
    "report": "in the report",
}


def cell(text):
    """A text for rich, in which [brackets] are not markup."""
    return Text(printable(text))


class Output(Console):
    """Standard output. rich would end the process where nothing reads it any more, as in `| head`:
    this error is raised, so that the runs save."""

    def on_broken_pipe(self):
        raise


def say(text):
    """Print a text in lines of 80 columns, without breaking a word."""
    print(textwrap.fill(printable(text), WIDTH, **WRAP), flush=True)


@contextlib.contextmanager
def doing(what):
    """Show what is being done until the block ends; gives a function that shows a detail of it: off
    a terminal, at most every SILENCE seconds."""
    if not sys.stdout.isatty():
        print(what, flush=True)
        shown_at = time.monotonic()

        def show(detail):
            nonlocal shown_at
            if time.monotonic() >= shown_at + SILENCE:
                shown_at = time.monotonic()
                print(f"{what}: {detail}", flush=True)

        yield show
        return
    console = Output(highlight=False)
    with console.status(what) as status:
        console.show_cursor(True)
        yield lambda detail: status.update(cell(f"{what}: {detail}"[: console.width - 4]))


def print_plan(sweep, jobs):
    """Print the arms, the runs that are left, their time, and what they can show."""
    Output(width=WIDTH, highlight=False).print(plan_table(sweep, jobs))
    if any((arm.match or {}).get("adjusted") for arm in sweep.arms.values()):
        match = sweep.config.match
        say(f"mlp_width is set so that each arm costs what the base does (--match={match})")
    if not jobs:
        say("nothing left to run")
        return
    counts = Counter(job.purpose for job in jobs)
    texts = [f"{counts[purpose]} {text}" for purpose, text in PURPOSES.items() if counts[purpose]]
    say(f"{len(jobs)} runs: {', '.join(texts)}")
    time = "an unknown time, since the arms are not timed here"
    if sweep.predicted:
        seconds = sum(sweep.predicted[job.arm] for job in jobs)
        time = f"about {duration(seconds / len(sweep.machine.slots))}"
    say(f"{len(sweep.machine.slots)} at a time: {time}")
    if any(row.get("quiet") is False for row in sweep.costs.values()):
        say("other programs slowed the timing: on a quiet machine the runs take less")
    steps = sweep.arms[BASE].values["max_iters"]
    warmup = sweep.arms[BASE].values.get("warmup_iters", TrainConfig.warmup_iters)
    if 3 * warmup >= steps:
        say(f"the warm-up is {warmup} of {steps} steps: the base may learn little. Train longer")
    say(what_it_shows(sweep))


def what_it_shows(sweep):
    """The smallest difference and tie that a sweep can show."""
    seeds = sweep.config.seeds
    plan = sweep.outline()
    counts = sweep.planned_runs()
    done = Counter(row["arm"] for row in sweep.rows.values() if row["purpose"] == "report")
    control = sum(max(counts[name], done[name]) for name in plans.control_group(plan))
    if "ladder" in sweep.config.designs:
        control = seeds  # of the rung below
    family = len(plans.counted_arms(plan, sweep.measured))
    se = math.sqrt(1 / seeds + 1 / control)
    if sweep.config.screening:
        df = sum(counts.values()) - len(counts)
    else:
        df = seeds + control - 2 if seeds >= power.least_runs(family) else 0
    what = f"{seeds} runs of an arm beside {control} without its change"
    if seeds < 2 or df < 1:
        return f"{what} decide nothing: give more --seeds"
    level = power.ALPHA / family
    visible = power.smallest_visible(se, df, level)
    tie = power.smallest_tie(se, df, level)
    text = f"{what} show a difference of {visible:.1f} standard deviations of a run 80 times in 100"
    return text if sweep.config.screening else f"{text}, and a tie within {tie:.1f}"


def plan_table(sweep, jobs):
    """A table of 80 columns: the arms, their changes, runs, costs and time."""
    table = Table(box=None, padding=(0, 1, 0, 0), width=WIDTH)
    table.add_column("arm", overflow="fold", max_width=20)
    table.add_column("changes", overflow="fold", ratio=1)
    for heading in ("runs", "a run", "ms/step", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, arm in sweep.arms.items():
        text = described(arm.changes, arm.match)
        if arm.against != BASE:
            text += f" (compared with {arm.against})"
        cells = [str(sum(job.arm == name for job in jobs))]
        if name in sweep.predicted:
            cells.append(duration(sweep.predicted[name]))
        row = sweep.costs.get(name)
        if row:
            milliseconds = row["milliseconds_per_step"]["median"]
            cells += [f"{milliseconds:.1f}", f"{row['parameters']:,}"]
        table.add_row(cell(name), cell(text), *cells)
    return table


class RunBar(Progress):
    """The progress of runs: a bar for all of them, and a line for each that ends. Off a terminal
    there are only the lines."""

    def __init__(self, sweep, jobs):
        self.sweep = sweep
        self.jobs = jobs
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Output(highlight=False, soft_wrap=not sys.stdout.isatty()),
            disable=not sys.stdout.isatty(),
        )
        total = sum(self.seconds(job) for job in jobs)
        done = sum(self.seconds(job) for job in jobs if job.key in sweep.rows)
        self.add_task(f"{self.count} runs", total=total, completed=done)

    def start(self):
        super().start()
        self.console.show_cursor(True)  # so that a kill at any time leaves the terminal as it was

    def seconds(self, job):
        """The predicted seconds of a run, in which work is measured; 1 if it is not known."""
        return self.sweep.predicted.get(job.arm, 1.0)

    @property
    def count(self):
        """The runs that have ended, of all: 3/16."""
        return f"{sum(job.key in self.sweep.rows for job in self.jobs)}/{len(self.jobs)}"

    def ended(self, job, row):
        """Advance the bar by a run that ended, and print a line about it."""
        self.update(self.task_ids[0], advance=self.seconds(job), description=f"{self.count} runs")
        if row["status"] == "done":
            outcome = f"final {row['final_val_loss']:.4f}, {row['wall_seconds']:.0f} s"
        else:
            outcome = f"{row['status'].upper()}: {row['reason']}"
        self.console.print(cell(f"[{self.count}] {job.name}: {outcome}"))
