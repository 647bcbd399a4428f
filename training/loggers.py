"""
Where else a run's log goes: `--log=tensorboard,wandb,csv`. log.jsonl is always written.

A logger is started by start(run_name, out_dir, config, state, rows) and returns (write(row),
close()); `rows` are those of the run so far, if it is resumed. Each library writes in its own way.
A logger that fails prints one warning and never stops a run.
"""

import csv
import sys
from pathlib import Path

from common.errors import one_line

COLUMNS = (  # of log.csv
    *("step", "loss", "train_loss", "val_loss", "bits_per_byte", "lr", "grad_norm", "tokens"),
    *("seconds", "milliseconds", "tokens_per_second", "mfu"),
)


def start_tensorboard(run_name, out_dir, config, state, rows):
    """TensorBoard's files in out_dir/tensorboard. Rows of steps that were not saved are purged."""
    from torch.utils.tensorboard import SummaryWriter

    begin = state["step"] + 1 if state.get("step") else 0
    writer = SummaryWriter(Path(out_dir) / "tensorboard", purge_step=begin)

    def write(row):
        for key, value in row.items():
            if isinstance(value, dict):
                writer.add_scalars(key, value, row["step"])
            elif key != "step" and value is not None:
                writer.add_scalar(key, value, row["step"])

    return write, writer.close


def start_wandb(run_name, out_dir, config, state, rows):
    """Weights & Biases. The id is stored in `state`, so that a resumed run continues the same
    charts."""
    import wandb

    project, stored = config["wandb_project"], state.get("wandb_id")
    run = wandb.init(project=project, name=run_name, config=config, id=stored, resume="allow")
    state["wandb_id"] = run.id
    return lambda row: run.log(row, step=row["step"]), lambda: None  # it ends with the process


def start_csv(run_name, out_dir, config, state, rows):
    """out_dir/log.csv: a line for each logged step and each evaluation."""
    file = open(Path(out_dir) / "log.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)

    def write(row):
        writer.writerow(row)
        file.flush()

    return write, file.close


LOGGERS = {
    "none": None,
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "csv": start_csv,
}


class Logger:
    """A logger of LOGGERS that has started, or has failed to. Its first failure prints a warning;
    rows that it loses are in log.jsonl."""

    def __init__(self, name, *settings):
        self.name, self.warned = name, False
        self.write = self.end = None
        self.attempt("does not start, the run continues without it", self.start, settings)

    def start(self, *settings):
        self.write, self.end = LOGGERS[self.name](*settings)

    def attempt(self, what, work, arguments=()):
        try:
            work(*arguments)
        except Exception as error:  # of any kind: it comes from a library of others
            if not self.warned:
                print(f"warning: {self.name} {what}: {one_line(error)}", file=sys.stderr)
            self.warned = True

    def log(self, row):
        if self.write:
            self.attempt("loses rows, log.jsonl has them", self.write, [row])

    def close(self):
        if self.end:
            self.attempt("does not close", self.end)


def start_loggers(config, saved_config, state, rows):
    """The Loggers that a TrainConfig asks for, each once."""
    names = dict.fromkeys(config.log.split(",") + ["wandb"] * config.wandb_log)
    settings = (config.wandb_run_name or config.out_dir, config.out_dir, saved_config, state, rows)
    return [Logger(name, *settings) for name in names if name != "none"]
