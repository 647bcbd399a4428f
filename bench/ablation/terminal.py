"""The terminal output of a sweep: its plan and its progress, in tables drawn by rich."""

import sys
import time

from bench.ablation import factorial

WIDTH = 80  # of the plan


def format_duration(seconds):
    """Seconds in a readable unit: 90 s, 5 min, 2.0 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def make_table(names, **options):
    """A table of rich without lines: the first column is text, the others are numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), **options)
    table.add_column(names[0], no_wrap=True, min_width=14)
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


# ---------------------------------------------------------------- before the runs


def print_plan(sweep):
    """Print the arms, what they change, what they cost, and the predicted time of a run."""
    from rich.console import Console

    console = Console(width=WIDTH, highlight=False)
    console.print(changes_table(sweep))
    console.print()
    console.print(costs_table(sweep))
    cells = [arm.cell for arm in sweep.arms.values() if arm.cell]
    if cells:
        console.print(factorial.describe(cells))


def changes_table(sweep):
    """The arms, what they are compared with, and their changes."""
    table = make_table(["arm"], width=WIDTH)
    table.add_column("compared with", overflow="fold")
    table.add_column("changes", overflow="fold", ratio=1)
    for name, arm in sweep.arms.items():
        changes = dict(arm.changes)
        if "mlp_width" in arm.values:
            changes["mlp_width"] = arm.values["mlp_width"]
        text = ", ".join(f"{key}={value}" for key, value in changes.items())
        table.add_row(name, "" if name == "base" else arm.against, text)
    return table


def costs_table(sweep):
    """The costs of the arms: in closed form, and as measured here."""
    names = ["arm", "a run", "parameters", "match", "MFLOP", "KV bytes", "ms/step", "decode ms"]
    caption = "MFLOP, KV bytes and decode ms are per token"
    table = make_table(names, caption=caption, caption_justify="left")
    for name, arm in sweep.arms.items():
        row = sweep.costs.get(name)
        cells = cost_cells(arm, row) if row else []
        table.add_row(name, format_duration(sweep.predicted[name]), *cells)
    return table


def cost_cells(arm, row):
    """The cells of an arm in the table of costs, from its row of costs.jsonl."""
    return [
        f"{row['parameters']:,}",
        f"{arm.match['residual_percent']:+.2f}%" if arm.match else "",
        f"{row['flops_per_token'] / 1e6:.2f}",
        f"{row['kv_bytes_per_token']:.0f}",
        f"{row['milliseconds_per_step']['median']:.1f}",
        f"{row['decode_ms_per_token']['median']:.2f}",
    ]


# ---------------------------------------------------------------- while it runs


class Progress:
    """The progress of a sweep: on a terminal a table that rich redraws, else a line for each run
    that ends. A context manager, which restores the terminal."""

    def __init__(self, sweep, jobs, terminal=None):
        self.sweep, self.jobs = sweep, jobs
        self.began = self.drawn_at = time.perf_counter()
        self.done_before = {job.key for job in jobs if self.status(job) == "done"}
        self.live = None
        if sys.stdout.isatty() if terminal is None else terminal:
            from rich.console import Console
            from rich.live import Live

            console = Console(force_terminal=True, highlight=False)
            self.live = Live(console=console, auto_refresh=False)

    def __enter__(self):
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error):
        if self.live:
            self.live.stop()

    def status(self, job):
        return self.sweep.rows.get(job.key, {}).get("status")

    def seconds_left(self):
        """{arm: predicted seconds}, corrected by the ratio of actual to predicted times so far."""
        predicted, rows = self.sweep.predicted, self.sweep.rows
        taken = foreseen = 0.0
        for job in self.jobs:
            row = rows.get(job.key)
            if row and job.key not in self.done_before and row["wall_seconds"] > 1:
                taken += row["wall_seconds"]
                foreseen += predicted[job.arm]
        slowdown = taken / foreseen if foreseen else 1.0
        left = dict.fromkeys(self.sweep.arms, 0.0)
        for job in self.jobs:
            if job.key not in rows:
                left[job.arm] += predicted[job.arm] * slowdown / len(self.sweep.slots)
        return left

    def table(self):
        """One row per arm, and the time that is left."""
        left = self.seconds_left()
        so_far = format_duration(time.perf_counter() - self.began)
        caption = f"{so_far} so far, about {format_duration(sum(left.values()))} left"
        names = ["arm", "done", "mean", "best", "time left", "failed"]
        table = make_table(names, caption=caption, caption_justify="left")
        for name in dict.fromkeys(job.arm for job in self.jobs):
            table.add_row(*self.cells(name, left[name]))
        return table

    def cells(self, name, seconds_left):
        """The cells of an arm in the table of progress."""
        jobs = [job for job in self.jobs if job.arm == name]
        done = [self.sweep.rows[job.key] for job in jobs if self.status(job) == "done"]
        failed = sum(self.status(job) in ("failed", "diverged") for job in jobs)
        mean = best = ""
        if done:
            mean = f"{sum(row[self.sweep.config.metric] for row in done) / len(done):.4f}"
            best = f"{min(row['best_val_loss'] for row in done):.4f}"
        left = format_duration(seconds_left) if seconds_left else ""
        return name, f"{len(done)}/{len(jobs)}", mean, best, left, str(failed or "")

    def show(self, job=None, row=None):
        """Show the row of a job that ended; without a row, update the elapsed time."""
        if self.live:
            now = time.perf_counter()
            if row or now - self.drawn_at > 1:
                self.live.update(self.table(), refresh=True)
                self.drawn_at = now
        elif row:
            print(self.line(job, row), flush=True)

    def line(self, job, row):
        """The line to print for a run that ended if there is no terminal."""
        ended = sum(other.key in self.sweep.rows for other in self.jobs)
        if row["status"] != "done":
            outcome = f"{row['status'].upper()}: {row['reason']}"
        else:
            final, best = row["final_val_loss"], row["best_val_loss"]
            outcome = f"final {final:.4f}, best {best:.4f}, {row['wall_seconds']:.0f} s"
        left = format_duration(sum(self.seconds_left().values()))
        return f"[{ended}/{len(self.jobs)}] {job.name}: {outcome}; about {left} left"
