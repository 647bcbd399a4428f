"""The run folder (lock, log.jsonl, loss.png), and what a run prints while it trains."""

import csv
import errno
import json
import math
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from common import files
from common.errors import Failure, UserError, one_line
from parts import moe
from training.losses import yardsticks
from weights import checkpoint

# These begin as nanoGPT's do, so that scripts that parse its logs can parse ours.
REPORT = (
    "iter {step}: loss {loss:.4f}, time {milliseconds:.2f}ms, {tokens_per_second:,.0f} tok/s, "
    "lr {lr:.2e}, norm {grad_norm:.2f}{more}"
)
EVALUATION = "step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
MEASURES = {  # key of an evaluation's row: how it is printed
    "bits_per_byte": "{:.4f} bits per byte",
    "whole_val_loss": "{:.4f} on the whole split",
    "val_exact": "{:.1%} of the answers right",
    "val_accuracy": "{:.1%} of their tokens",
    "val_reward_accuracy": "{:.1%} of the chosen answers preferred",
    "val_reward_margin": "by {:.3f}",
}
WRITTEN = ("config.json", "log.jsonl", "loss.png")  # in each run folder
DIVERGED = "diverged.json"  # in the folder of a run whose loss or gradient was not finite
LISTS = ("val_blocks", "router_entropy", "expert_load")  # keys whose value is a list
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
    """Seconds as text, such as 3.5 h. The unit is the largest of which there are at least two."""
    unit = next((unit for unit, length in UNITS.items() if seconds >= 2 * length), "s")
    digits = 1 if seconds >= 0.1 else 3
    return f"{seconds / UNITS[unit]:.{digits}f} {unit}"


# ---------------------------------------------------------------- the folder and its lock


def check_out_dir(out_dir, resuming=False, overwrite=False):
    """Raise UserError if a run cannot use out_dir: it is not writable, another process trains
    there, or it holds a run that is neither resumed nor moved aside. Nothing is written."""
    out_dir, where = Path(out_dir), f"out_dir={out_dir}"
    parents = (out_dir.absolute(), *out_dir.absolute().parents)
    nearest = next(folder for folder in parents if os.path.exists(folder))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError("cannot write here", where, "choose another --out_dir")
    if os.path.exists(out_dir / "lock"):  # False for a name that is too long
        lock_run(out_dir).close()
    steps = checkpoint.steps(out_dir)
    if steps and not resuming and not overwrite:
        raise UserError("there is a run here already", where, USED)
    there = [out_dir / name for name in WRITTEN if os.path.lexists(out_dir / name)]
    if there and not steps and not has_our_config(out_dir):
        what = "train.py would replace this file, which is not of a run of its own"
        raise UserError(what, there[0], "choose another --out_dir")


def has_our_config(out_dir):
    """Whether the config.json of a folder is one that train.py wrote."""
    try:
        return "max_iters" in files.read_json(out_dir / "config.json", "")
    except UserError:
        return False


def lock_run(out_dir, write_id=False):
    """Take the lock of a run folder and return its open file; `write_id` writes the process id into
    it. The lock is released when the file is closed or the process ends. Raises UserError if
    another process holds it, or the file cannot be opened."""
    path = Path(out_dir) / "lock"
    try:
        lock = files.lock(path)
        if write_id:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        return lock
    except BlockingIOError:
        process = path.read_text(errors="replace").strip() or "?"
        fix = "wait for it, or choose another --out_dir"
        raise UserError(f"process {process} is training here", f"out_dir={out_dir}", fix) from None
    except OSError as error:  # another user's file, or a full disk
        what = f"cannot lock this folder: {error.strerror}"
        raise UserError(what, f"out_dir={out_dir}", "choose another --out_dir") from None


def open_out_dir(out_dir, resuming=False, overwrite=False):
    """Prepare a run folder and return its lock. An old run in it is resumed or moved aside."""
    out_dir = Path(out_dir)
    check_out_dir(out_dir, resuming, overwrite)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_run(out_dir, write_id=True)
        if checkpoint.steps(out_dir) and not resuming:
            aside = next_free(out_dir)
            out_dir.rename(aside)
            print(f"the run that was in {out_dir} is now in {aside}")
            return open_out_dir(out_dir)
    except OSError as error:
        what = f"cannot write here: {error.strerror}"
        raise UserError(what, f"out_dir={out_dir}", "choose another --out_dir") from None

    for name in ("log.jsonl", "config.json", "latest", "best", DIVERGED):
        for leftover in files.leftovers(out_dir / name):
            files.remove(leftover)
    return lock


def next_free(folder):
    """The first of NAME.old1, NAME.old2, ... that does not exist."""
    number, folder = 1, folder.absolute()
    while os.path.lexists(path := folder.with_name(f"{folder.name}.old{number}")):
        number += 1
    return path


# ---------------------------------------------------------------- the rows of the log


def step_row(run, loss, norm, lr, seconds):
    """The log row of the step that was just taken. `seconds` is the mean time of the steps since
    the last reading."""
    return {
        "step": run.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": norm,
        "tokens": run.step * run.step_tokens,
        "seconds": run.state["seconds"],
        "milliseconds": seconds * 1000,
        "tokens_per_second": run.step_tokens / seconds,
    } | moe.statistics(run.model)


def evaluation_lines(row):
    """The printed form of an evaluation's row: one line, and one more for each of several
    datasets."""
    lines, bits = [EVALUATION.format(**row) + measures_text(row)], row.get("val_bits_per_byte")
    for name, loss in row.get("val_losses", {}).items():
        lines.append(f"  {name}: val loss {loss:.4f}, {bits[name]:.4f} bits per byte")
    return "\n".join(lines)


def measures_text(row):
    """What an evaluation's row holds beside the losses, as the end of a line."""
    present = {key: row[key] for key in MEASURES if row.get(key) is not None}
    return "".join(f", {MEASURES[key].format(value)}" for key, value in present.items())


def read_rows(path, valid=lambda row: True):
    """The rows of a JSONL file, none if it does not exist. Lines that are not JSON objects, or not
    `valid`, are skipped with one warning; a last line that a crash cut short, without a warning."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        what = f"cannot read: {error.strerror}"
        raise UserError(what, path, "make it readable, or move it away") from None

    rows, skipped = [], []
    for number, line, row in files.json_lines(lines):
        if isinstance(row, dict) and valid(row):
            rows.append(row)
        elif line.strip() and number < len(lines):
            skipped.append(str(number))
    if skipped:
        shown = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        files.warn_once(f"{path} is damaged and read without line {shown}")
    return rows


def read_log(path, last_step=None):
    """The rows of a log.jsonl, up to a step if one is given."""

    def valid(row):
        good = all(isinstance(row[key], list) == (key in LISTS) for key in row)
        return type(row.get("step")) is int and good and str not in map(type, row.values())

    return [row for row in read_rows(path, valid) if last_step is None or row["step"] <= last_step]


# ---------------------------------------------------------------- the curves


def curves(rows, title, lines=()):
    """A figure of the loss curves of some rows. The legend holds their last values; `lines` are
    losses.yardsticks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label, style in CURVES:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{label} {points[-1][1]:.3f}", **style)
    for name, loss in dict(lines).items():
        axes.axhline(loss, color="#777777", lw=0.7)
        left = axes.get_yaxis_transform()  # across: shares of the axes; up: losses
        axes.text(0.01, loss, f"{name} {loss:.3f}", size="small", va="bottom", transform=left)

    sizes = {row["tokens"] // row["step"] for row in rows if row.get("tokens")}
    unit = f" ({sizes.pop():,} tokens each)" if len(sizes) == 1 else ""
    axes.set(xlabel=f"steps{unit}", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def draw(rows, path, lines):
    """Draw the loss curves of some rows as a PNG. Without them a run goes on."""
    try:
        curves(rows, Path(path).resolve().parent.name, lines).savefig(path, dpi=110)
    except Exception as error:
        files.warn_once(f"no {path}: {one_line(error)}", about=path)


# ---------------------------------------------------------------- where else the log goes
# A logger is started by start(config, state, rows), where config holds the saved settings and rows
# those of the run so far. It returns (write(row), close()).


def start_tensorboard(config, state, rows):
    """TensorBoard's files in out_dir/tensorboard. Rows of steps that were not saved are purged."""
    from torch.utils.tensorboard import SummaryWriter

    begin = state["step"] + 1 if state.get("step") else 0
    writer = SummaryWriter(Path(config["out_dir"]) / "tensorboard", purge_step=begin)

    def write(row):
        for key, value in row.items():
            if isinstance(value, dict):
                writer.add_scalars(key, value, row["step"])
            elif key != "step" and value is not None:
                writer.add_scalar(key, value, row["step"])

    return write, writer.close


def start_wandb(config, state, rows):
    """Weights & Biases, in WANDB_PROJECT of the environment. The id is stored in `state`, so that a
    resumed run continues the same charts."""
    import wandb

    project = os.environ.get("WANDB_PROJECT", "nanoparts")
    names = {"project": project, "name": os.environ.get("WANDB_NAME", config["out_dir"])}
    charts = wandb.init(**names, config=config, id=state.get("wandb_id"), resume="allow")
    state["wandb_id"] = charts.id
    return lambda row: charts.log(row, step=row["step"]), lambda: None  # it ends with the process


def start_csv(config, state, rows):
    """out_dir/log.csv: a line for each logged step and each evaluation."""
    columns = "step loss train_loss val_loss bits_per_byte lr grad_norm tokens seconds milliseconds"
    path = Path(config["out_dir"]) / "log.csv"
    file = open(path, "w", newline="", encoding="utf-8", buffering=1)  # noqa: SIM115
    columns = [*columns.split(), "tokens_per_second", "mfu"]
    writer = csv.DictWriter(file, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return writer.writerow, file.close


LOGGERS = {"none": None, "tensorboard": start_tensorboard, "wandb": start_wandb, "csv": start_csv}


def attempt(name, work, *arguments):
    """What work(*arguments) of a logger returns. If it fails, the run goes on."""
    try:
        return work(*arguments)
    except Exception as error:  # of any kind: it comes from a library of others
        words = f"{name} fails, log.jsonl has all rows: {one_line(error)}"
        files.warn_once(words, about=name)


# ---------------------------------------------------------------- the log


class RunLog:
    """The log of a Run: log.jsonl, loss.png, the loggers asked for, and a bar or lines on stdout.
    Rows of later steps, which a killed run logged but did not save, are dropped."""

    def __init__(self, run, peak_speed=None):
        self.run, out_dir = run, Path(run.config.out_dir)
        files.write(out_dir / "config.json", json.dumps(run.saved_config, indent=1))
        files.remove(out_dir / DIVERGED)
        path, self.picture = out_dir / "log.jsonl", out_dir / "loss.png"
        self.rows = [] if run.saved is None else read_log(path, run.step)
        files.write(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open until close())
        names = dict.fromkeys(run.config.log.split(","))  # each once
        settings = (run.saved_config, run.state, self.rows)
        begun = {name: attempt(name, LOGGERS[name], *settings) for name in names if name != "none"}
        self.loggers = {name: logger for name, logger in begun.items() if logger}
        self.peak_speed = peak_speed  # tokens/s at an MFU of 1, None if it is not known
        self.broken = False  # whether nothing reads our output any more, as in `| head`
        look = dict(unit="step", dynamic_ncols=True, bar_format=STEPPING, file=sys.stdout)
        look |= dict(disable=not sys.stdout.isatty())
        self.bar = tqdm(total=run.config.max_iters, initial=run.step, **look)
        self.phases = set()  # those that were printed
        self.estimate_at = None  # when an estimate is printed, unless a bar shows it

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
        for name, (write, _) in self.loggers.items():
            attempt(name, write, {key: row[key] for key in row if key not in LISTS})

    def advance(self):
        """Note that a step was taken."""
        self.bar.update()
        self.estimate_at = self.estimate_at or time.perf_counter() + 5  # after the slow first step

    def estimate_due(self):
        """Whether to say how long the run takes: once, some seconds after its first step."""
        return self.bar.disable and time.perf_counter() > (self.estimate_at or math.inf)

    def estimate(self, step, seconds):
        """Print the time left if that is due; `seconds` is that of a step."""
        if self.estimate_due():
            self.estimate_at = math.inf
            left = self.bar.total - step
            self.show(f"about {duration(left * seconds)} for the {left:,} steps left")

    def report(self, row):
        """Log the row of a step; show it on the bar or, without a terminal, as a line."""
        utilisation = ""
        if self.peak_speed:
            row = row | {"mfu": row["tokens_per_second"] / self.peak_speed}
            utilisation = f", MFU {row['mfu']:.1%}"
        self.keep(row)
        speed = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s"
        self.bar.set_postfix_str(speed + utilisation, refresh=False)
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
        draw(self.rows, self.picture, yardsticks(self.run))

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
        for name, (_, close) in self.loggers.items():
            attempt(name, close)


class NoLog:
    """The log of the ranks other than 0: it keeps nothing."""

    broken, rows = False, ()
    advance = estimate_due = estimate = report = evaluation = phase = close = (
        lambda self, *arguments: None
    )
