"""
Whole training runs on this machine, started as a user starts them:

    python bench/speed.py shakespeare  # the Shakespeare configs: time, loss, speed
    python bench/speed.py memory       # --dry_run's estimate beside the measured peak, 124 M
    python bench/speed.py ranks        # two processes beside one: the same losses, and the speed

shakespeare continues a run that was interrupted. Where a dataset is missing, give --dataset.
"""

import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.timing.results import row
from common.configurator import PositiveInt
from common.errors import Failure
from common.files import ROOT
from training.run_folder import read_log
from weights.checkpoint import checkpoints

CONFIGS = {
    "shakespeare": ("gpt2_shakespeare", "llama_shakespeare"),
    "memory": ("gpt2_124m", "llama_124m"),
    "ranks": ("gpt2_shakespeare",),
}


@dataclass
class SpeedConfig:
    configs: list | None = None  # files of config/, without .py; None: those of the measurement
    more: str = ""  # keys for train.py, such as --more="--dataset=mine --max_iters=20"
    out_dir: str = "out-speed"  # where the runs are
    steps: int = 20  # of ranks
    threads: PositiveInt = 1
    device: str = "auto"
    dtype: str = "auto"


def train(argv, processes=1):
    """What train.py printed, in one or more processes. Raises Failure with its last line."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["train.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failure(f"train.py failed: {last}", shlex.join(argv), "run it by itself")
    return done.stdout


def whole_run(name, argv, out_dir):
    """The row of a config that is trained to its end."""
    begin = [f"config/{name}.py", "--overwrite"]
    if out_dir.exists() and checkpoints(out_dir):
        begin = ["--init_from=resume"]
    train([*begin, *argv, f"--out_dir={out_dir}"])
    rows = read_log(out_dir / "log.jsonl")
    best = min(line["val_loss"] for line in rows if "val_loss" in line)
    steps = [line for line in rows if "tokens_per_second" in line]
    speed = statistics.median(line["tokens_per_second"] for line in steps)
    value = f"validation loss {best:.4f}, {steps[-1]['seconds']:.0f} s, {speed:,.0f} tokens/s"
    return row(name, value)


def memory_row(name, argv):
    """The row of --dry_run's estimate beside what it measured."""
    printed = train([f"config/{name}.py", *argv, "--dry_run"])
    text = re.search(r"^  memory +(.*)", printed, re.MULTILINE)[1]
    sizes = re.findall(r"([0-9.]+) (kB|MB|GB|TB)", text)
    value = row(name, text)
    if "measured" in text:
        powers = {"kB": 1, "MB": 2, "GB": 3, "TB": 4}
        measured, estimated = (float(n) * 1000 ** powers[unit] for n, unit in sizes[:2])
        value["ratio"] = estimated / measured
    return value


def rank_row(how, argv, out_dir, steps):
    """The row of two processes beside one: their last losses, and the ratios of tokens/s."""
    speeds, losses = {}, {}
    for processes in (1, 2):
        folder = out_dir / f"{how}-{processes}"
        train([*argv, f"--parallel={how}", f"--out_dir={folder}", "--overwrite"], processes)
        rows = [line for line in read_log(folder / "log.jsonl") if "loss" in line]
        losses[processes] = rows[-1]["loss"]
        speeds[processes] = [line["tokens_per_second"] for line in rows[-steps:]]
    ratios = [both / alone for alone, both in zip(speeds[1], speeds[2], strict=True)]
    return row(how, f"loss {losses[1]:.4f} with one process, {losses[2]:.4f} with two", ratios)


def measure(what, config, device):
    out_dir, configs = Path(config.out_dir), config.configs or CONFIGS[what]
    argv = [f"--device={device}", f"--dtype={config.dtype}", *shlex.split(config.more)]
    if what == "shakespeare":
        rows = [whole_run(name, argv, out_dir / name) for name in configs]
    elif what == "memory":
        rows = [memory_row(name, argv) for name in configs]
    else:
        short = ["--log_interval=1", "--gradient_accumulation_steps=2", "--warmup_iters=0", *argv]
        short = [f"config/{configs[0]}.py", *short, f"--max_iters={config.steps}"]
        rows = [rank_row(how, short, out_dir, max(2, config.steps // 2)) for how in ("ddp", "fsdp")]
    about = {
        "shakespeare": "Whole runs, in their own mode; evaluations come on top of the seconds.",
        "memory": "The largest moment of a step.",
        "ranks": f"{config.steps} steps of {configs[0]}, the global batch unchanged.",
    }
    unit = {"memory": "estimated / measured", "ranks": "tokens/s, two processes / one"}
    return {"name": what, "about": about[what], "unit": unit.get(what, "none"), "rows": rows}
