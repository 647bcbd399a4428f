"""
Race our training runs against nanoGPT's own code on a CPU, in turn, from a cold start to the end:

    python -m extras.speed race --nanogpt=../nanoGPT
    python -m extras.speed race --alone=gpt2_shakespeare --device=cuda  # one run, without nanoGPT

nanoGPT runs its documented CPU setting (4 layers, 128 wide, context 64, batch 12, 2000 iterations)
at the thread count that is fastest for it here. Its dataset must be prepared (python
data/shakespeare_char/prepare.py), and so must ours. Our runs are `python train.py CONFIG`. Our loss
is over the whole validation split; nanoGPT's is its own estimate. Our configs were chosen by their
validation loss, so the table also shows their loss on the test split, which chose nothing. Draws
cpu_race.png beside the page. A run alone is stopped when its time is up, and judged by its lowest
validation loss.
"""

import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.ablation.rows import threads_text
from common.commands import ROOT
from common.configurator import PathName, PositiveInt
from common.errors import Failure, UserError
from extras.speed import results

NANOGPT = [
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile=False",
    "--dropout=0.0",
    "--eval_iters=20",
    "--log_interval=1",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--max_iters=2000",
    "--lr_decay_iters=2000",
]
OURS = [
    "config/llama_shakespeare.py",
    "config/gpt2_shakespeare.py",
    "config/best_shakespeare.py",  # to about the loss that nanoGPT reaches on an A100
]


@dataclass
class SpeedConfig:
    nanogpt: PathName = "../nanoGPT"  # where nanoGPT is checked out
    rounds: PositiveInt = 2  # runs of each
    alone: str = ""  # a file of config/ that runs by itself instead, such as gpt2_shakespeare
    words: str = ""  # further arguments of train.py for it
    seconds: PositiveInt = 90  # after which it is stopped
    device: str = "cpu"  # of it


@dataclass
class Entrant:
    """One side: the words after `python train.py`, the folder they run in, and the threads (None:
    torch's choice)."""

    command: list
    folder: Path = ROOT
    threads: int | None = None


@dataclass
class Result:
    wall: float  # seconds from start to end
    cpu: float  # seconds of all its processes
    points: list  # [(seconds from the start, validation loss), ...]
    unseen: float | None = None  # the loss on the test split


def race(entrant, out_dir, cache, limit=None):
    """The Result of a training command. It finds nothing compiled: `cache` is a new folder, also
    for temporary files, among which torch keeps compiled headers. After `limit` seconds a signal
    makes it save and stop. Raises Failure if it fails."""
    cache.mkdir(parents=True)
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    environment["TMPDIR"] = str(cache)
    environment.pop("OMP_NUM_THREADS", None)
    if entrant.threads:
        environment["OMP_NUM_THREADS"] = str(entrant.threads)
    began = time.perf_counter()
    cpu_before = cpu_seconds()
    process = subprocess.Popen(
        [sys.executable, "train.py", *entrant.command, f"--out_dir={out_dir}"],
        cwd=entrant.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if limit:
        timer = threading.Timer(limit, process.terminate)
        timer.daemon = True  # it may outlive the run
        timer.start()
    points = []
    last_line = "no message"
    for line in process.stdout:
        last_line = line.strip() or last_line
        match = re.match(r"step \d+: .*val loss ([\d.]+)(?:.*, ([\d.]+) on the whole)?", line)
        if match:
            points.append((time.perf_counter() - began, float(match[2] or match[1])))
    stopped = 143 if limit else 0  # it has saved
    if process.wait() not in (0, stopped):
        raise Failure(f"a run failed: {last_line}", " ".join(entrant.command), "run it by itself")
    return Result(time.perf_counter() - began, cpu_seconds() - cpu_before, points)


def cpu_seconds():
    """CPU seconds of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_loss(out_dir):
    """The loss of a run of ours on the whole test split."""
    words = ["--init_from=resume", "--eval_only", "--split=test", "--eval_tokens=0"]
    words.append(f"--out_dir={out_dir}")
    command = [sys.executable, "train.py", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(re.search(r"test loss ([\d.]+)", done.stdout)[1])


def best_threads(nanogpt, scratch):
    """The thread count at which nanoGPT's first 100 iterations are fastest here."""
    times = {}
    for number, threads in enumerate((1, os.cpu_count()) * 2):
        short = Entrant([*NANOGPT, "--max_iters=100", "--eval_interval=1000"], nanogpt, threads)
        seconds = race(short, scratch / "short", scratch / f"short-{number}").wall
        times[threads] = min(seconds, times.get(threads, math.inf))
    listed = ", ".join(f"{n} threads {seconds:.0f} s" for n, seconds in sorted(times.items()))
    print(f"nanoGPT, 100 iterations: {listed}", flush=True)
    return min(times, key=times.get)


def run_rounds(config, nanogpt, threads, scratch):
    """{name: [Result of each round]}. Each round of ours has its own seed, and every second round
    takes the sides in reverse order."""
    runs = {}
    for number in range(config.rounds):
        sides = [("nanoGPT", Entrant(NANOGPT, nanogpt, threads))]
        ours = ["--device=cpu", f"--seed={1337 + number}"]
        sides += [(name, Entrant([name, *ours])) for name in OURS]
        if number % 2:
            sides.reverse()
        for name, entrant in sides:
            out_dir = scratch / f"{number}-{Path(name).stem}"
            result = race(entrant, out_dir, out_dir.with_suffix(".cache"))
            if entrant.folder == ROOT:
                result.unseen = test_loss(out_dir)
            runs.setdefault(name, []).append(result)
            _, loss = result.points[-1]
            print(
                f"round {number + 1}: {name}: {result.wall:.0f} s, {result.cpu:.0f} CPU s, "
                f"validation loss {loss:.4f}",
                flush=True,
            )
    return runs


def row_of(name, runs):
    """The row of an entrant, with lists that hold a number of each round."""
    mine = runs[name]
    theirs = runs["nanoGPT"]
    limit = statistics.median(result.wall for result in theirs)
    early = []
    for result in mine:
        losses = [loss for seconds, loss in result.points if seconds <= limit]
        early.append(min(losses, default=math.nan))
    pairs = list(zip(mine, theirs, strict=True))
    row = {
        "what": name,
        "wall s": [result.wall for result in mine],
        "wall / nanoGPT": [ours.wall / other.wall for ours, other in pairs],
        "CPU s": [result.cpu for result in mine],
        "CPU / nanoGPT": [ours.cpu / other.cpu for ours, other in pairs],
        "validation loss": [result.points[-1][1] for result in mine],
        "test loss": None,
        "when nanoGPT ended": early,
    }
    if mine[0].unseen is not None:
        row["test loss"] = [result.unseen for result in mine]
    return row


def draw(runs, path):
    """The curves of all runs: validation loss against seconds, a colour for each entrant."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lowest = math.inf
    for number, (name, finished) in enumerate(runs.items()):
        last = statistics.median(result.points[-1][1] for result in finished)
        label = f"{name.removeprefix('config/').removesuffix('.py')} {last:.3f}"
        for result in finished:
            seconds = [point[0] for point in result.points]
            losses = [point[1] for point in result.points]
            axes.plot(seconds, losses, f"C{number}.-", linewidth=0.9, ms=3, label=label)
            label = None  # once for each entrant
            lowest = min(lowest, losses[-1])
    axes.set(
        xlabel="seconds from the command, all starting cold",
        ylabel="validation loss (nats per character)",
        ylim=(lowest - 0.05, 2.6),
    )
    axes.legend(title="the median of the final losses")
    axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def measured(runs, threads):
    """The measurement of all entrants, with their curves in cpu_race.png."""
    draw(runs, results.folder() / "cpu_race.png")
    about = f"{os.cpu_count()} cores; nanoGPT on {threads_text(threads)}, the faster here."
    return {"name": "", "about": about, "rows": [row_of(name, runs) for name in runs]}


def run_alone(config, device):
    """The measurement of one run of ours."""
    name = f"config/{config.alone}.py"
    entrant = Entrant([name, f"--device={device}", *config.words.split()])
    with tempfile.TemporaryDirectory() as scratch:
        out_dir = Path(scratch, "run")
        result = race(entrant, out_dir, Path(scratch, "cache"), config.seconds)
        steps = int((out_dir / "latest").read_text())
    when, lowest = min(result.points, key=lambda point: point[1])
    row = {"what": name, "wall s": result.wall, "validation loss": lowest}
    row |= {"lowest after, s": when, "steps": steps}
    about = f"Alone; if it runs longer than {config.seconds} s, it is stopped."
    return {"name": config.alone, "about": about, "rows": [row]}


def measure(config, device):
    if config.alone:
        yield run_alone(config, device)
        return
    if device != "cpu":
        fix = "leave it out, or name a run with --alone"
        raise UserError("this race is run on a CPU", f"device={device}", fix)
    nanogpt = Path(config.nanogpt)
    if not (nanogpt / "data/shakespeare_char/train.bin").exists():
        fix = "clone it, run its data/shakespeare_char/prepare.py, and give --nanogpt=FOLDER"
        raise UserError("no prepared nanoGPT here", f"nanogpt={nanogpt}", fix)
    if not (ROOT / "data/shakespeare_char/meta.json").exists():
        raise UserError("no dataset", "data", "run: python prepare.py shakespeare_char")
    with tempfile.TemporaryDirectory() as scratch:
        threads = best_threads(nanogpt, Path(scratch))
        runs = run_rounds(config, nanogpt, threads, Path(scratch))
    yield measured(runs, threads)
