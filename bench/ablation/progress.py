"""A sweep prints its plan, its current work and the progress of its runs: on a terminal as rich's
bar, elsewhere as one line when something begins or ends."""

import contextlib
import sys
import textwrap

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from training.run_folder import duration

WIDTH = 80  # columns


def say(text):
    """Print a text in lines of 80 columns, without breaking a word."""
    print(textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False), flush=True)


@contextlib.contextmanager
def doing(what):
    """Show what is being done until the block ends; gives a function that shows a detail of it."""
    if not sys.stdout.isatty():
        print(what, flush=True)
        yield lambda detail: None
        return
    console = Console(highlight=False)
    with console.status(what) as status:
        console.show_cursor(True)
        yield lambda detail: status.update(f"{what}: {detail}"[: console.width - 4])


def plan_table(sweep, jobs):
    """A table of 80 columns: the arms, their changes, runs, costs and time."""
    table = Table(box=None, padding=(0, 1, 0, 0), width=WIDTH)
    table.add_column("arm", overflow="fold", max_width=20)
    table.add_column("changes", overflow="fold", ratio=1)
    for heading in ("runs", "a run", "ms/step", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, arm in sweep.arms.items():
        width = {key: value for key, value in arm.values.items() if key == "mlp_width"}
        text = ",".join(f"{key}={value}" for key, value in (arm.changes | width).items())
        if arm.against not in ("base", name):
            text += f" (compared with {arm.against})"
        cells = [str(sum(job.arm == name for job in jobs))]
        if name in sweep.predicted:
            cells.append(duration(sweep.predicted[name]))
        row = sweep.costs.get(name)
        if row:
            milliseconds = row["milliseconds_per_step"]["median"]
            cells += [f"{milliseconds:.1f}", f"{row['parameters']:,}"]
        table.add_row(name, text.replace(",", ", "), *cells)  # so that no word is broken
    return table


class RunBar(Progress):
    """The progress of runs: a bar for all of them, and a line for each that ends. Off a terminal
    there are only the lines."""

    def __init__(self, sweep, jobs):
        self.sweep, self.jobs = sweep, jobs
        percentage = TextColumn("{task.percentage:3.0f}%")
        super().__init__(
            *(TextColumn("{task.description}"), BarColumn(20), percentage),
            *(TimeElapsedColumn(), TimeRemainingColumn()),
            console=Console(highlight=False, soft_wrap=not sys.stdout.isatty()),
            disable=not sys.stdout.isatty(),
        )
        left = [self.seconds(job) for job in jobs if job.key not in sweep.rows]
        self.add_task(f"{self.count} runs", total=sum(left))

    def start(self):
        super().start()
        self.console.show_cursor(True)  # so that a kill at any time leaves the terminal as it was

    def seconds(self, job):
        """The predicted seconds of a run, in which work is measured; 1 if it is not known."""
        return self.sweep.predicted.get(job.arm, 1.0)

    @property
    def count(self):
        """How many of the runs have ended: 3/16."""
        return f"{sum(job.key in self.sweep.rows for job in self.jobs)}/{len(self.jobs)}"

    def ended(self, job, row):
        """Advance the bar by a run that ended, and print a line about it."""
        self.update(self.task_ids[0], advance=self.seconds(job), description=f"{self.count} runs")
        if row["status"] == "done":
            final, best = row["final_val_loss"], row["best_val_loss"]
            outcome = f"final {final:.4f}, best {best:.4f}, {row['wall_seconds']:.0f} s"
        else:
            outcome = f"{row['status'].upper()}: {row['reason']}"
        self.console.print(f"[{self.count}] {job.name}: {outcome}", markup=False)
