"""A sweep prints its plan, its current work, and the progress of its runs.

On a terminal, rich redraws lines twice a second, also while this process computes. Elsewhere a
sweep prints a line when something begins or ends. After 30 seconds without a line it prints its
current work, then after twice as long each time, up to ten minutes."""

import contextlib
import json
import shutil
import sys
import threading
import time
from pathlib import Path

WIDTH = 80  # columns
HEARTBEAT = 30  # seconds without a line until the first line about the current work
LONGEST_PAUSE = 600  # seconds between two of them
TAIL = 16384  # bytes at the end of a log, which hold its last row
MARGIN = 4  # lines of a terminal that are left to other output


def format_duration(seconds):
    """Seconds in a readable unit: 90 s, 5 min, 2.0 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# ---------------------------------------------------------------- what is going on


class Screen:
    """Shows the current work until its block ends: on a terminal what a child's `draw()` returns,
    again and again; elsewhere its `line()`, when nothing was printed for a while. The cursor stays
    visible, so that a kill at any time leaves the terminal as it was."""

    def __init__(self, terminal=None, transient=False):
        self.live, self.ended = None, threading.Event()
        self.began = self.printed_at = time.perf_counter()
        self.pause = HEARTBEAT
        if sys.stdout.isatty() if terminal is None else terminal:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=sys.stdout, force_terminal=True, highlight=False)
            self.live = Live(
                console=console, get_renderable=self.draw, refresh_per_second=2, transient=transient
            )
        else:
            self.thread = threading.Thread(target=self.beat, daemon=True)

    def __enter__(self):
        if self.live:
            self.live.start(refresh=True)
            self.live.console.show_cursor(True)
        else:
            self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        if self.live:
            self.live.stop()
        else:
            self.thread.join()

    def beat(self):
        """Print a line whenever nothing was printed for a while, until the block ends."""
        while not self.ended.wait(min(1, HEARTBEAT / 4)):
            if time.perf_counter() - self.printed_at > self.pause:
                pause = min(2 * self.pause, LONGEST_PAUSE)
                self.print(self.line())
                self.pause = pause

    def so_far(self):
        return format_duration(time.perf_counter() - self.began)

    def print(self, text):
        """Print a line, where there is no terminal."""
        print(text, flush=True)
        self.printed_at, self.pause = time.perf_counter(), HEARTBEAT


class Doing(Screen):
    """Says that something is being done, for how long, and the detail last given to `say`."""

    current = None  # the one whose block is running

    def __init__(self, what, terminal=None):
        self.what, self.detail = what, ""
        super().__init__(terminal, transient=True)

    def line(self):
        return f"{self.what} ({self.so_far()})" + (f": {self.detail}" if self.detail else "")

    def draw(self):
        from rich.text import Text

        return Text(self.line(), no_wrap=True, overflow="ellipsis")

    def __enter__(self):
        if not self.live:
            print(self.what, flush=True)
        Doing.current = self
        return super().__enter__()

    def __exit__(self, *error):
        Doing.current = None
        super().__exit__(*error)


def say(detail):
    """Show a detail of what is being done, if anything is."""
    if Doing.current:
        Doing.current.detail = detail


# ---------------------------------------------------------------- before the runs


def make_table(names, **options):
    """A table of rich without lines: the first column is text, the others are numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), **options)
    table.add_column(names[0], overflow="fold", max_width=24)
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_plan(sweep, jobs):
    """Print the arms, their changes, runs, parameters and time; in a dry run also their costs."""
    from rich.console import Console

    from bench.ablation import factorial  # which imports torch

    console = Console(width=WIDTH, highlight=False)
    console.print(plan_table(sweep, jobs))
    cells = [arm.cell for arm in sweep.arms.values() if arm.cell]
    if cells:
        console.print(factorial.describe(cells))
    if sweep.config.dry_run:
        console.print()
        console.print(costs_table(sweep))


def plan_table(sweep, jobs):
    table = make_table(["arm"], width=WIDTH)
    table.add_column("changes", overflow="fold", ratio=1)
    for name in ("runs", "a run", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, arm in sweep.arms.items():
        width = {key: value for key, value in arm.values.items() if key == "mlp_width"}
        changes = arm.changes | width
        text = ", ".join(f"{key}={value}" for key, value in changes.items())
        if arm.against not in ("base", name):
            text += f" (compared with {arm.against})"
        runs = sum(job.arm == name for job in jobs)
        row = sweep.costs.get(name) or {}
        seconds, parameters = format_duration(sweep.predicted[name]), row.get("parameters")
        table.add_row(name, text, str(runs), seconds, f"{parameters:,}" if parameters else "")
    return table


def costs_table(sweep):
    """The costs of the arms: in closed form, and as measured here."""
    names = ["arm", "match", "MFLOP", "KV bytes", "ms/step", "its form", "decode ms"]
    caption = "MFLOP, KV bytes and decode ms are per token"
    table = make_table(names, caption=caption, caption_justify="left", width=WIDTH)
    for name, arm in sweep.arms.items():
        row = sweep.costs.get(name)
        table.add_row(name, *(cost_cells(arm, row) if row else []))
    return table


def cost_cells(arm, row):
    """The cells of an arm in the table of costs, from its row of costs.jsonl."""
    return [
        f"{arm.match['residual_percent']:+.2f}%" if arm.match else "",
        f"{row['flops_per_token'] / 1e6:.2f}",
        f"{row['kv_bytes_per_token']:.0f}",
        f"{row['milliseconds_per_step']['median']:.1f}",
        "compiled" if row["compile"] else "eager",
        f"{row['decode_ms_per_token']['median']:.2f}",
    ]


# ---------------------------------------------------------------- while it runs


def last_row(path):
    """The last whole row of a log; {} if there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and "step" in row:
                    return row
    return {}


class Progress(Screen):
    """The progress of runs: a table with a line for each arm, or a line for each run that ends."""

    def __init__(self, sweep, jobs, terminal=None):
        self.sweep, self.jobs, self.began_at = sweep, jobs, time.time()
        self.keys = {job.key: job for job in jobs}
        self.done_before = {key for key in self.keys if self.status(key) == "done"}
        known = self.keys.keys() | sweep.rows.keys()
        later = [job for job in sweep.planned_jobs() if job.key not in known]
        self.later = sum(sweep.predicted[job.arm] for job in later) / len(sweep.slots)
        super().__init__(terminal)

    def status(self, key):
        return self.sweep.rows.get(key, {}).get("status")

    def running(self):
        """{key of a job: last row of its log} of the runs that have started and have no row yet."""
        found = {}
        for key, job in self.keys.items():
            emptied = Path(job.out_dir, "stderr.txt")  # by a run that starts
            with contextlib.suppress(OSError):
                if key not in self.sweep.rows and emptied.stat().st_mtime >= self.began_at - 1:
                    found[key] = last_row(emptied.with_name("log.jsonl"))
        return found

    def seconds_left(self, running):
        """{arm: predicted seconds}, corrected by the ratio of actual to predicted times so far."""
        predicted, rows = self.sweep.predicted, self.sweep.rows
        taken = foreseen = 0.0
        for key, job in self.keys.items():
            row = rows.get(key)
            if row and key not in self.done_before and row["wall_seconds"] > 1:
                taken += row["wall_seconds"]
                foreseen += predicted[job.arm]
        slowdown = taken / foreseen if foreseen else 1.0
        left = dict.fromkeys(self.sweep.arms, 0.0)
        for key, job in self.keys.items():
            if key not in rows:
                share = 1 - running.get(key, {}).get("step", 0) / job.values.get("max_iters", 1)
                left[job.arm] += predicted[job.arm] * share * slowdown / len(self.sweep.slots)
        return left

    # ------------------------------------------------------------ on a terminal

    def draw(self):
        """A line for each arm, and the time that is left. Where the terminal is too short for all
        arms, those that run come first."""
        from rich.console import Group
        from rich.text import Text

        running = self.running()
        left = self.seconds_left(running)
        arms = list(dict.fromkeys(job.arm for job in self.jobs))
        room = max(3, shutil.get_terminal_size().lines - MARGIN)
        caption = self.summary(left)
        if len(arms) > room:
            caption += f"; {len(arms) - room} more arms are not shown"
            active = {self.keys[key].arm for key in running}
            arms = sorted(arms, key=lambda name: (name not in active, not left[name]))[:room]
        table = make_table(["arm", "done", "running", "mean", "time left", "failed"])
        for name in arms:
            table.add_row(*self.cells(name, left[name], running))
        return Group(table, Text(caption, no_wrap=True, overflow="ellipsis"))

    def summary(self, left):
        """How long it has taken and will take."""
        text = f"{self.so_far()} so far, about {format_duration(sum(left.values()))} left"
        return text + (f", then {format_duration(self.later)} of other runs" if self.later else "")

    def cells(self, name, seconds_left, running):
        """The cells of an arm in the table of progress."""
        keys = [key for key, job in self.keys.items() if job.arm == name]
        words = [self.status(key) for key in keys]
        rows = [self.sweep.rows[key] for key in keys if self.status(key) == "done"]
        losses = [row[self.sweep.config.metric] for row in rows]
        active = [self.running_text(key, running[key]) for key in keys if key in running]
        more = f" +{len(active) - 1}" if len(active) > 1 else ""
        return (
            name,
            f"{len(losses)}/{len(keys)}",
            "".join(active[:1]) + more,
            f"{sum(losses) / len(losses):.4f}" if losses else "",
            format_duration(seconds_left) if seconds_left else "",
            str(words.count("failed") + words.count("diverged") or ""),
        )

    def running_text(self, key, row):
        """How far a run is, and its last loss: 45% 2.3141."""
        share = row.get("step", 0) / self.keys[key].values.get("max_iters", 1)
        if share >= 1:
            return "measuring"  # the trained model
        loss = row.get("val_loss", row.get("loss"))
        return f"{share:.0%}" + (f" {loss:.4f}" if isinstance(loss, float) else "")

    # ------------------------------------------------------------ elsewhere

    def show(self, job, row):
        """Show the row of a job that ended."""
        if self.live:
            self.live.refresh()
        else:
            self.print(self.line_of(job, row))

    def counted(self):
        return f"[{sum(key in self.sweep.rows for key in self.keys)}/{len(self.jobs)}]"

    def line(self):
        """The line to print if no run has ended for a while."""
        running = self.running()
        texts = [f"{self.keys[key].name} {self.running_text(key, running[key])}" for key in running]
        return f"{self.counted()} {self.summary(self.seconds_left(running))}: {', '.join(texts)}"

    def line_of(self, job, row):
        """The line to print for a run that ended."""
        if row["status"] == "done":
            final, best = row["final_val_loss"], row["best_val_loss"]
            outcome = f"final {final:.4f}, best {best:.4f}, {row['wall_seconds']:.0f} s"
        else:
            outcome = f"{row['status'].upper()}: {row['reason']}"
        left = format_duration(sum(self.seconds_left(self.running()).values()))
        return f"{self.counted()} {job.name}: {outcome}; about {left} left"
