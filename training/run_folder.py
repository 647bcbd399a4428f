"""A run folder while a run is in it: its lock, the first and last words, the status line, log.jsonl, loss.png, Weights & Biases."""

import errno
import fcntl
import json
import math
import os
import sys
from pathlib import Path

from tqdm import tqdm

from common.errors import Failure, UserError, one_line
from common.files import remedy, write
from weights.checkpoint import steps

# nanoGPT's words first, so that scripts that read its logs read ours.
REPORT = "iter {step}: loss {loss:.4f}, time {milliseconds:.2f}ms, {tokens_per_second:,.0f} tok/s, lr {lr:.2e}, norm {grad_norm:.2f}"
EVALUATION = "step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}, {bits_per_byte:.4f} bits per byte"


def evaluation_lines(row):
    """The row of an evaluation as it is printed: a line, and one more for each of several data sets."""
    sets = [
        f"  {name}: val loss {loss:.4f}, {row['val_bits_per_byte'][name]:.4f} bits per byte"
        for name, loss in row.get("val_losses", {}).items()
    ]
    return "\n".join([EVALUATION.format(**row), *sets])


def check_out_dir(out_dir, resuming=False, overwrite=False):
    """UserError if a run cannot go into out_dir: it cannot be written, another process trains there, or
    it holds a run that is neither resumed nor moved aside. Nothing is written."""
    out_dir = Path(out_dir)
    nearest = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError("cannot write here", f"out_dir={out_dir}", "choose another --out_dir")
    if (out_dir / "lock").exists():
        hold(out_dir).close()
    if steps(out_dir) and not resuming and not overwrite:
        raise UserError(
            "there is a run here already",
            f"out_dir={out_dir}",
            "go on with --init_from=resume, start anew with --overwrite, or choose another --out_dir",
        )


def hold(out_dir):
    """The lock of a run folder, held while the file returned is open, so until this process ends, however
    it ends; UserError if another process holds it."""
    held = open(out_dir / "lock", "a+")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.seek(0)
        raise UserError(
            f"process {held.read().strip() or '?'} is training here",
            f"out_dir={out_dir}",
            "wait for it, or choose another --out_dir",
        ) from None
    return held


def sign(held):
    """Write into a lock who holds it; returns the lock."""
    held.truncate(0)
    held.write(str(os.getpid()))
    held.flush()
    return held


def open_out_dir(out_dir, resuming=False, overwrite=False):
    """Make a run folder ready and return its lock. An old run in it is resumed, or moved aside."""
    out_dir = Path(out_dir)
    check_out_dir(out_dir, resuming, overwrite)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write here: {error.strerror}", f"out_dir={out_dir}", "choose another --out_dir"
        ) from None
    held = hold(out_dir)
    if steps(out_dir) and not resuming:
        aside = next(
            path
            for n in range(1, 10**6)
            if not (path := out_dir.with_name(f"{out_dir.name}.old{n}")).exists()
        )
        out_dir.rename(aside)
        print(f"the run that was in {out_dir} is now in {aside}")
        return open_out_dir(out_dir)
    return sign(held)


def read_rows(path, last_step=None):
    """The rows of a log.jsonl, up to a step; a line torn by a crash is passed over."""
    path, rows = Path(path), []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if last_step is None or row["step"] <= last_step:
            rows.append(row)
    return rows


def draw(rows, path):
    """The loss curves of some rows as a PNG; whether it could be drawn. A failure is a warning: it never stops a run."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for key, label, style in (
            ("loss", "training batches", dict(color="#bbbbbb", lw=0.8)),
            ("train_loss", "train split", dict(color="#4477aa", marker=".")),
            ("val_loss", "validation split", dict(color="#cc3311", marker=".")),
        ):
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points), label=label, **style)
        axes.set(
            xlabel="step", ylabel="loss, nats per token", title=Path(path).resolve().parent.name
        )
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=110)
        return True
    except Exception as error:
        print(f"warning: no {path}: {one_line(error)}", file=sys.stderr)
        return False


def start_wandb(project, name, config, state):
    """A function that logs a row to Weights & Biases. A failure, now or later, is one warning."""
    try:
        import wandb

        run = wandb.init(
            project=project, name=name, config=config, id=state.get("wandb_id"), resume="allow"
        )
        state["wandb_id"] = run.id  # a resumed run goes on in the same chart
    except Exception as error:
        print(
            f"warning: wandb does not start, the run goes on without it: {one_line(error)}",
            file=sys.stderr,
        )
        return None

    lost = []

    def log(row):
        try:
            run.log(row, step=row["step"])
        except Exception as error:
            if not lost:
                print(
                    f"warning: wandb loses rows, log.jsonl has them: {one_line(error)}",
                    file=sys.stderr,
                )
            lost.append(row["step"])

    return log


class RunLog:
    """The log of a run in out_dir from `step` on, None for a new one: rows beyond the step are dropped."""

    def __init__(self, out_dir, step, max_iters, wandb_log=None):
        path = Path(out_dir) / "log.jsonl"
        self.picture, self.drawing = (
            Path(out_dir) / "loss.png",
            True,
        )  # until it fails: one warning is enough
        self.rows = [] if step is None else read_rows(path, step)
        write(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = open(path, "a", encoding="utf-8")
        self.wandb_log = wandb_log
        self.broken = False  # whether whoever reads our output has gone
        self.bar = tqdm(
            total=max_iters,
            initial=step or 0,
            unit="step",
            disable=not sys.stdout.isatty(),
            dynamic_ncols=True,
            file=sys.stdout,
        )

    def keep(self, row):
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }  # JSON has no infinity
        self.rows.append(row)
        try:
            line = (json.dumps(row) + "\n").encode()
            if os.write(self.file.fileno(), line) < len(
                line
            ):  # past the buffers, which would try again at the exit
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise Failure(
                f"cannot write: {error.strerror}",
                self.file.name,
                f"{remedy(error)}, then go on with --init_from=resume",
            ) from error
        if self.wandb_log:
            self.wandb_log(row)

    def report(self, row):
        """A row about a step: shown on the bar, or as a line where there is no terminal."""
        self.keep(row)
        self.bar.set_postfix_str(
            f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s", refresh=False
        )
        if self.bar.disable:
            self.show(REPORT.format(**row))

    def evaluation(self, row):
        """A row about an evaluation: a line that stays, and the curves drawn anew."""
        self.keep(row)
        self.bar.clear()
        self.show(evaluation_lines(row))
        self.bar.refresh()
        self.drawing = self.drawing and draw(self.rows, self.picture)

    def show(self, line):
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self.broken = True

    def close(self):
        self.bar.close()
        self.file.close()
