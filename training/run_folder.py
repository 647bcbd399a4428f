"""The run folder: its lock, log.jsonl, loss.png, and where else the log goes."""

import contextlib
import csv
import errno
import io
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

from common import files
from common.errors import Failure, UserError, one_line, printable
from parts import moe
from weights import checkpoint

DIVERGED = "diverged.json"  # in the folder of a run whose loss or gradient was not finite
WRITTEN = ("config.json", "log.jsonl", "log.csv", "loss.png", "latest", "best", DIVERGED)
IN_PLACE = ("lock", "ckpt", "tensorboard", "runs", "paper")  # what runs and sweeps write in place
CSV_COLUMNS = """
    step loss train_loss val_loss whole_val_loss bits_per_byte lr grad_norm tokens seconds
    milliseconds tokens_per_second mfu val_exact val_accuracy val_reward_accuracy val_reward_margin
""".split()  # noqa: SIM905
LISTS = ("val_blocks", "router_entropy", "expert_load")  # keys whose value is a list
UNITS = {"days": 86400, "h": 3600, "min": 60, "s": 1}  # seconds
USED = "continue with --init_from=resume, start anew with --overwrite, or choose another --out_dir"
CURVES = (  # key in log.jsonl, legend, style
    ("loss", "training batches", dict(color="#999999", lw=0.8)),
    ("train_loss", "train split", dict(color="#4477aa", marker=".")),
    ("val_loss", "validation split", dict(color="#cc3311", marker=".")),
    ("whole_val_loss", "the whole of it", dict(color="#cc3311", marker="x", lw=0)),
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
    where = f"out_dir={out_dir}"
    out_dir = Path(out_dir)
    parents = (out_dir.absolute(), *out_dir.absolute().parents)
    nearest = next(folder for folder in parents if os.path.exists(folder))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError("cannot write here", where, "choose another --out_dir")
    for path in (out_dir / name for name in IN_PLACE):
        if os.path.islink(path):
            what = "this is a symlink, and a run does not write through one"
            raise UserError(what, path, "remove the link, or choose another --out_dir")
    if os.path.isfile(ckpt := out_dir / "ckpt"):
        raise UserError("this is not a folder", ckpt, "remove it, or choose another --out_dir")
    if os.path.exists(out_dir / "lock"):  # False for a name that is too long
        lock_run(out_dir).close()
    steps = checkpoint.steps(out_dir)
    if steps and not resuming:
        if not overwrite:
            raise UserError("out_dir already contains a run", where, USED)
        for path in out_dir.iterdir():
            if path.is_dir() and path.name not in ("ckpt", "tensorboard"):
                what = "overwriting moves the whole of out_dir, and this is not part of the run"
                raise UserError(what, path, "move it elsewhere, or choose another --out_dir")
    there = [out_dir / name for name in WRITTEN if os.path.lexists(out_dir / name)]
    if there and not steps and not has_our_config(out_dir):
        what = "train.py did not write this file, and would overwrite it"
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
            print(printable(f"the run that was in {out_dir} is now in {aside}"))
            return open_out_dir(out_dir)
    except OSError as error:
        what = f"cannot write here: {error.strerror}"
        raise UserError(what, f"out_dir={out_dir}", "choose another --out_dir") from None

    for name in WRITTEN:
        for leftover in files.leftovers(out_dir / name):
            files.remove(leftover)
    return Hold(out_dir, lock)


class Hold:
    """A run folder that this process has locked. The folder stays the run's when it is renamed, and
    another folder that takes its name is not the run's."""

    def __init__(self, folder, lock):
        self.folder = Path(folder)
        self.lock = lock
        self.descriptor = os.open(folder, os.O_RDONLY)

    def find(self):
        """Where the folder is now. One that was removed is made again, and so is its lock. Raises
        Failure if another folder has its name, or another process trains in it."""
        if not files.is_open_as(self.folder, self.descriptor):
            self.follow()
        if not files.is_open_as(self.folder / "lock", self.lock.fileno()):
            try:
                self.lock = lock_run(self.folder, write_id=True)
            except UserError as error:
                raise Failure(*error.parts) from None
        return self.folder

    def follow(self):
        """Find the folder under its new name."""
        name = ""
        with contextlib.suppress(OSError):  # only Linux knows it
            name = os.readlink(f"/proc/self/fd/{self.descriptor}")
        if files.is_open_as(name, self.descriptor):
            moved = f"the folder {self.folder} is now {name}: the run goes on there"
            files.warn_once(moved, "note")
            self.folder = Path(name)
        elif os.path.lexists(self.folder):
            what = "the folder of this run was moved, and another one now has its name"
            raise Failure(what, f"out_dir={self.folder}", "start again with another --out_dir")
        else:
            files.warn_once(f"{self.folder} was moved or removed: it is made again")
            self.folder.mkdir(parents=True)
            os.close(self.descriptor)
            self.descriptor = os.open(self.folder, os.O_RDONLY)

    def close(self):
        self.lock.close()
        os.close(self.descriptor)


def own_folder(run):
    """The folder of a run that is about to write: out_dir, or where it was moved."""
    if run.hold:
        folder = str(run.hold.find())
        if folder != str(Path(run.config.out_dir)):
            run.config = replace(run.config, out_dir=folder)
            run.saved_config = run.saved_config | {"out_dir": folder}
    return Path(run.config.out_dir)


def next_free(folder):
    """The first of NAME.old1, NAME.old2, ... that does not exist."""
    number = 1
    folder = folder.absolute()
    while os.path.lexists(path := folder.with_name(f"{folder.name}.old{number}")):
        number += 1
    return path


# ---------------------------------------------------------------- the rows of the log


def step_row(run, loss, norm, lr, step_seconds):
    """The log row of the step just taken. step_seconds: the mean since the last reading."""
    return {
        "step": run.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": norm,
        "tokens": run.state["tokens"],
        "seconds": run.state["seconds"],
        "milliseconds": step_seconds * 1000,
        "tokens_per_second": run.step_tokens / step_seconds,
    } | moe.statistics(run.model)


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

    rows = []
    skipped = []
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
        if type(row.get("step")) is not int:
            return False
        for key, value in row.items():
            if isinstance(value, str) or isinstance(value, list) != (key in LISTS):
                return False
        return True

    rows = read_rows(path, valid)
    if last_step is None:
        return rows
    return [row for row in rows if row["step"] <= last_step]


# ---------------------------------------------------------------- the curves


def curves(rows, title, lines=()):
    """A figure of the loss curves of some rows. The legend holds their last values; `lines` are
    evaluation.yardsticks."""
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
    """Draw the loss curves of some rows as a PNG. A failure gives a warning only."""
    content = io.BytesIO()
    try:
        name = printable(Path(path).absolute().parent.name, figure=True)
        curves(rows, name, lines).savefig(content, dpi=110)
        files.write(path, content.getvalue())
    except Exception as error:
        files.warn_once(f"no {path}: {one_line(error)}", about=path)


# ---------------------------------------------------------------- where else the log goes
# A logger is started by start(config, state, rows), where config holds the saved settings and rows
# the log of the run so far. It returns (write(row), close()).


def start_tensorboard(config, state, rows):
    """TensorBoard's files in out_dir/tensorboard. Rows of steps that were not saved are purged."""
    from torch.utils.tensorboard import SummaryWriter

    begin = rows[-1]["step"] + 1 if rows else 0
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

    def close():  # not left to the exit of the process: os._exit ends a rank
        charts.finish(exit_code=int(sys.exc_info()[0] is not None))  # 1 if an error ends the run

    return lambda row: charts.log(row, step=row["step"]), close


def start_csv(config, state, rows):
    """out_dir/log.csv: a line for each logged step and each evaluation."""
    path = Path(config["out_dir"]) / "log.csv"
    files.write(path, "")
    keys = dict(newline="", encoding="utf-8", buffering=1, opener=files.no_link)
    file = open(path, "a", **keys)  # noqa: SIM115 (open until close())
    writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return writer.writerow, file.close


LOGGERS = {"none": None, "tensorboard": start_tensorboard, "wandb": start_wandb, "csv": start_csv}


def attempt(name, work, *arguments):
    """Return work(*arguments) of a logger. A failure gives a warning only."""
    try:
        return work(*arguments)
    except Exception as error:  # of any kind: it comes from a library of others
        words = f"{name} fails, log.jsonl has all rows: {one_line(error)}"
        files.warn_once(words, about=name)


# ---------------------------------------------------------------- the log


class LogFile:
    """The rows of a run: log.jsonl, and the loggers asked for. Rows of later steps, which
    a killed run logged but did not save, are dropped."""

    def __init__(self, run):
        self.run = run
        out_dir = own_folder(run)
        files.remove(out_dir / DIVERGED)
        self.rows = []
        if run.saved is not None:
            self.rows = read_log(out_dir / "log.jsonl", run.step)
        self.file = self.rewritten(out_dir / "log.jsonl")

        self.loggers = {}
        for name in sorted({*run.config.log.split(",")} - {"none"}):
            logger = attempt(name, LOGGERS[name], run.saved_config, run.state, self.rows)
            if logger:
                self.loggers[name] = logger

    def rewritten(self, path):
        """Write config.json and all rows of log.jsonl. Returns log.jsonl, open for the next row."""
        files.write(path.with_name("config.json"), json.dumps(self.run.saved_config, indent=1))
        files.write(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        return open(path, "a", encoding="utf-8", opener=files.no_link)  # noqa: SIM115

    def keep(self, row):
        """Write a row to log.jsonl, which is made again if somebody removed it. Raises Failure if
        the disk refuses."""
        path = own_folder(self.run) / "log.jsonl"
        if not os.path.lexists(path):
            files.warn_once(f"{path} was removed: it is written again")
            self.file.close()
            self.file = self.rewritten(path)
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

    def close(self):
        self.file.close()
        for name, (_, close) in self.loggers.items():
            attempt(name, close)
