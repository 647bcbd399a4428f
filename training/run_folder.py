"""What a run keeps in its folder: lock, log.jsonl, loss.png; its status line."""

import errno
import json
import math
import os
import sys
from pathlib import Path

from tqdm import tqdm

from common import files
from common.errors import Failure, UserError, one_line
from parts import moe
from weights.checkpoint import steps

# These begin as nanoGPT's do, so that scripts that parse its logs can parse ours.
REPORT = (
    "iter {step}: loss {loss:.4f}, time {milliseconds:.2f}ms, {tokens_per_second:,.0f} tok/s, "
    "lr {lr:.2e}, norm {grad_norm:.2f}{more}"
)
EVALUATION = "step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
MEASURES = {  # key of an evaluation's row: how it is printed
    "bits_per_byte": "{:.4f} bits per byte",
    "val_exact": "{:.1%} of the answers right",
    "val_accuracy": "{:.1%} of their tokens",
    "val_reward_accuracy": "{:.1%} of the chosen answers preferred",
    "val_reward_margin": "by {:.3f}",
}
FILES = ("lock", "log.jsonl", "config.json", "latest", "best", "loss.png")
LISTS = ("val_blocks", "router_entropy", "expert_load")  # keys in log.jsonl whose value is one
UNITS = {"days": 86400, "h": 3600, "min": 60, "s": 1}  # seconds
USED = "continue with --init_from=resume, start anew with --overwrite, or choose another --out_dir"
# The progress bar: while steps are taken, and while something else is done. Both fit 80 columns.
STEPPING = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
WAITING = "{desc} (step {n_fmt} of {total_fmt})"
CURVES = (  # key in log.jsonl, legend, style
    ("loss", "training batches", dict(color="#999999", lw=0.8)),
    ("train_loss", "train split", dict(color="#4477aa", marker=".")),
    ("val_loss", "validation split", dict(color="#cc3311", marker=".")),
)


def duration(seconds):
    """Seconds as text, such as 3.5 h. A unit is used for two of it or more."""
    unit = next((unit for unit, length in UNITS.items() if seconds >= 2 * length), "s")
    digits = 1 if seconds >= 0.1 else 3
    return f"{seconds / UNITS[unit]:.{digits}f} {unit}"


def step_row(run, loss, norm, lr, seconds):
    """The log row of the step that was just taken. `seconds` is the mean time of the steps since
    the last reading."""
    speed = run.step_tokens / seconds
    return {
        "step": run.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": norm,
        "tokens": run.step * run.step_tokens,
        "seconds": run.state["seconds"],
        "milliseconds": seconds * 1000,
        "tokens_per_second": speed,
    } | moe.statistics(run.learner.model)


def evaluation_lines(row):
    """The printed form of an evaluation's row: one line, and one more for each of several
    datasets."""
    lines = [EVALUATION.format(**row) + measures_words(row)]
    for name, loss in row.get("val_losses", {}).items():
        bits = row["val_bits_per_byte"][name]
        lines.append(f"  {name}: val loss {loss:.4f}, {bits:.4f} bits per byte")
    return "\n".join(lines)


def measures_words(row):
    """What an evaluation's row holds beside the losses, as the end of a line."""
    found = {key: row[key] for key in MEASURES if row.get(key) is not None}
    return "".join(f", {MEASURES[key].format(value)}" for key, value in found.items())


# ---------------------------------------------------------------- the folder and its lock


def check_out_dir(out_dir, resuming=False, overwrite=False):
    """Raise UserError if a run cannot use out_dir: it is not writable, another process trains
    there, or it holds a run that is neither resumed nor moved aside. Nothing is written."""
    check_place(out_dir)
    out_dir = Path(out_dir)
    if (out_dir / "lock").exists():
        hold(out_dir).close()
    if resuming or not steps(out_dir):
        return
    if not overwrite:
        raise UserError("there is a run here already", f"out_dir={out_dir}", USED)
    if Path.cwd().is_relative_to(out_dir.resolve()):
        what = "this command runs inside the folder that --overwrite moves aside"
        raise UserError(what, f"out_dir={out_dir}", "start it from outside that folder")


def check_place(out_dir):
    """Raise UserError if no run folder can be at this path, or if a file of a run is a folder."""
    path, where = Path(out_dir).absolute(), f"out_dir={out_dir}"
    fix = "choose another --out_dir"
    nearest = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError("cannot write here", where, fix)

    longest = os.pathconf(nearest, "PC_NAME_MAX")  # bytes
    for part in path.relative_to(nearest).parts:
        if "\0" in part:
            raise UserError("a name with a null character", f"out_dir={str(out_dir)!r}", fix)
        if len(part.encode("utf-8", "surrogatepass")) > longest:
            raise UserError(f"a name of more than {longest} bytes", where, fix)

    for name in FILES:
        if (path / name).is_dir():
            fix = f"move it out of the way, or {fix}"
            raise UserError("a folder where a run keeps a file", path / name, fix)


def hold(out_dir):
    """Take the lock of a run folder and return its open file. The lock is released when the file is
    closed or the process ends. Raises UserError if another process holds it."""
    path = Path(out_dir) / "lock"
    try:
        return files.lock(path)
    except BlockingIOError:
        process = path.read_text(errors="replace").strip() or "?"
        fix = "wait for it, or choose another --out_dir"
        raise UserError(f"process {process} is training here", f"out_dir={out_dir}", fix) from None
    except OSError as error:
        what = f"cannot lock the run folder: {error.strerror}"
        raise UserError(what, path, "choose another --out_dir") from None


def sign(held):
    """Write the process id into a lock file that this process holds; returns the file."""
    held.truncate(0)
    held.write(str(os.getpid()))
    held.flush()
    return held


def open_out_dir(out_dir, resuming=False, overwrite=False):
    """Prepare a run folder and return its lock. An old run in it is resumed or moved aside."""
    out_dir = Path(out_dir)
    check_out_dir(out_dir, resuming, overwrite)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        held = hold(out_dir)
        if steps(out_dir) and not resuming:
            aside = next_free(out_dir)
            out_dir.rename(aside)
            print(f"the run that was in {out_dir} is now in {aside}")
            return open_out_dir(out_dir)
    except OSError as error:
        what = f"cannot write here: {error.strerror}"
        raise UserError(what, f"out_dir={out_dir}", "choose another --out_dir") from None

    for name in FILES:
        for leftover in files.leftovers(out_dir / name):
            files.remove(leftover)
    return sign(held)


def next_free(out_dir):
    """The first of NAME.old1, NAME.old2, ... that does not exist."""
    number = 1
    while os.path.lexists(out_dir.with_name(f"{out_dir.name}.old{number}")):
        number += 1
    return out_dir.with_name(f"{out_dir.name}.old{number}")


# ---------------------------------------------------------------- the log


def read_rows(path, valid=lambda row: True):
    """The rows of a JSONL file, none if it does not exist. Lines that are not JSON objects, or not
    `valid`, are skipped with one warning; a last line that a crash cut short, without a warning."""
    try:
        *lines, last = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        what = f"cannot read: {error.strerror}"
        raise UserError(what, path, "make it readable, or move it away") from None

    rows, skipped = [], []
    for number, line in enumerate([*lines, last], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and valid(row):
            rows.append(row)
        elif line.strip() and number <= len(lines):
            skipped.append(str(number))
    if skipped:
        shown = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        files.warn_once(f"{path} is damaged and read without line {shown}")
    return rows


def read_log(path, last_step=None):
    """The rows of a log.jsonl, up to a step if one is given."""

    def valid(row):
        blocks = row.get("val_blocks", [])
        lists = [row.get(key, []) for key in LISTS]
        numbers = [value for key, value in row.items() if key not in LISTS]
        if type(row.get("step")) is not int or not all(isinstance(each, list) for each in lists):
            return False
        return not any(isinstance(value, str | list) for value in [*numbers, *blocks])

    return [row for row in read_rows(path, valid) if last_step is None or row["step"] <= last_step]


def curves(rows, title):
    """A figure of the loss curves of some rows. Each ends with its name and its last value."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes, ends = figure.subplots(), []
    for key, label, style in CURVES:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            (line,) = axes.plot(*zip(*points, strict=True), **style)
            ends.append((points[-1], f"{label} {points[-1][1]:.3f}", line.get_color()))

    sizes = {row["tokens"] // row["step"] for row in rows if row.get("tokens")}
    unit = f" ({sizes.pop():,} tokens each)" if len(sizes) == 1 else ""
    axes.set(xlabel=f"steps{unit}", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

    name_lines(axes, ends)
    return figure


def name_lines(axes, ends):
    """Write the names of lines at the right edge of their axes, at the heights of their ends. Names
    that would overlap move up; a thin line joins each name with the end of its line. ends:
    [((x, y), name, colour)]. The limits of y must be set."""
    points = axes.get_figure().get_figheight() * 72 * 0.8  # height of the axes, about
    height = points / (axes.get_ylim()[1] - axes.get_ylim()[0])
    right = max((x for (x, _), *_ in ends), default=0)
    free = -math.inf  # where the next name may stand, in points
    for (x, y), text, colour in sorted(ends, key=lambda end: end[0][1]):
        place = max(y * height, free)
        offset = (14, place - y * height)
        axes.plot([x, right], [y, y], ":", color=colour, lw=0.8)
        joined = dict(arrowstyle="-", color=colour, lw=0.6, relpos=(0, 0.5), shrinkA=0, shrinkB=0)
        style = dict(color=colour, fontsize=9, va="center", annotation_clip=False)
        style |= dict(textcoords="offset points", arrowprops=joined)
        axes.annotate(text, (right, y), offset, **style)
        free = place + 12


def draw(rows, path):
    """Draw the loss curves of some rows as a PNG; returns whether that worked. A failure prints a
    warning and never stops a run."""
    try:
        curves(rows, Path(path).resolve().parent.name).savefig(path, dpi=110)
        return True
    except Exception as error:
        print(f"warning: no {path}: {one_line(error)}", file=sys.stderr)
        return False


class RunLog:
    """The log of a run in out_dir that continues after `step`, or starts if it is None. Rows of
    later steps, which a killed run logged but did not save, are dropped."""

    def __init__(self, out_dir, step, max_iters, peak_speed=math.inf):
        path = Path(out_dir) / "log.jsonl"
        self.picture = Path(out_dir) / "loss.png"
        self.drawing = True  # False after the first failure: one warning is enough
        self.rows = [] if step is None else read_log(path, step)
        files.write(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open until close())
        self.loggers = []  # those of training/loggers.py
        self.peak_speed = peak_speed  # tokens/s
        self.broken = False  # whether nothing reads our output any more, as in `| head`
        self.bar = tqdm(
            total=max_iters,
            initial=step or 0,
            unit="step",
            disable=not sys.stdout.isatty(),
            dynamic_ncols=True,
            bar_format=STEPPING,
            file=sys.stdout,
        )
        self.phases = set()  # those that were printed

    def keep(self, row):
        """Write a row to log.jsonl. Raises Failure if the disk refuses."""
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }  # JSON has no infinity
        self.rows.append(row)
        line = (json.dumps(row) + "\n").encode()
        try:  # unbuffered, since a buffer would try again on exit
            if os.write(self.file.fileno(), line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            fix = f"{files.remedy(error)}, then continue with --init_from=resume"
            raise Failure(f"cannot write: {error.strerror}", self.file.name, fix) from error
        for logger in self.loggers:
            logger.log({key: row[key] for key in row if key not in LISTS})

    def report(self, row):
        """Log the row of a step; show it on the bar or, without a terminal, as a line."""
        row = row | {"mfu": row["tokens_per_second"] / self.peak_speed}
        self.keep(row)
        words = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s"
        utilisation = f", MFU {row['mfu']:.1%}"
        self.bar.set_postfix_str(words + utilisation, refresh=False)
        if self.bar.disable:
            seconds = (self.bar.total - row["step"]) * row["milliseconds"] / 1000
            left = f", {duration(seconds)} left" if seconds else ""
            self.show(REPORT.format(**row, more=utilisation + left))

    def evaluation(self, row):
        """Log the row of an evaluation, print it, and redraw the curves."""
        self.keep(row)
        self.bar.clear()
        self.show(evaluation_lines(row))
        self.bar.refresh()
        self.drawing = self.drawing and draw(self.rows, self.picture)

    def phase(self, what):
        """Say what the run is doing while it takes no steps; "" when it goes on. Without a terminal
        each phase is printed once."""
        self.bar.bar_format = WAITING if what else STEPPING
        self.bar.set_description_str(what)
        if self.bar.disable and what not in self.phases | {""}:
            self.phases.add(what)
            self.show(what)

    def show(self, line):
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self.broken = True

    def close(self):
        self.bar.close()
        self.file.close()
        for logger in self.loggers:
            logger.close()
