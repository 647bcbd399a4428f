"""
Race our training runs against nanoGPT's own code on a CPU, in turn, from a cold start to the end:

    python bench/cpu_race.py --nanogpt=../nanoGPT

nanoGPT runs its documented CPU setting (4 layers, 128 wide, context 64, batch 12, 2000 iterations)
at the thread count that is fastest for it here. Its dataset must be prepared (python
data/shakespeare_char/prepare.py), and so must ours. Our runs are `python train.py CONFIG`. Our loss
is over the whole validation split; nanoGPT's is its own estimate. Ours were chosen by it, so the
loss on the test split, which nothing has looked at, stands beside it. Writes
bench/results/cpu_race.md and cpu_race.png.
"""

import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from common.configurator import PositiveInt, build, load
from common.errors import Failure, UserError, run
from common.files import ROOT, write
from common.runtime import versions

NANOGPT = [
    *("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--dropout=0.0"),
    *("--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4"),
    *("--n_head=4", "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000"),
]
OURS = [
    *("config/llama_shakespeare.py", "config/gpt2_shakespeare.py"),
    "config/llama_laptop.py",  # to the loss that nanoGPT reaches on an A100
]


@dataclass
class RaceConfig:
    nanogpt: str = "../nanoGPT"  # where nanoGPT is checked out
    rounds: PositiveInt = 2  # runs of each


@dataclass
class Entrant:
    """One side: the words after `python train.py`, the folder they run in, and the threads (None:
    torch's choice)."""

    command: list
    folder: Path = ROOT
    threads: int | None = None


def race(entrant, out_dir, cache):
    """Run a training command with an empty compiler cache. Returns (seconds from start to end,
    [(seconds, validation loss), ...]). Raises Failure if it fails."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    if entrant.threads:
        environment["OMP_NUM_THREADS"] = str(entrant.threads)
    began, points = time.perf_counter(), []
    process = subprocess.Popen(
        [sys.executable, "train.py", *entrant.command, f"--out_dir={out_dir}"],
        cwd=entrant.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        match = re.match(r"step \d+: .*val loss ([\d.]+)(?:, ([\d.]+) on the whole)?", line)
        if match:
            points.append((time.perf_counter() - began, float(match[2] or match[1])))
    if process.wait():
        reason = (process.stderr.read().strip().splitlines() or ["no message"])[-1]
        raise Failure(f"a run failed: {reason}", " ".join(entrant.command), "run it by itself")
    return time.perf_counter() - began, points


def test_loss(out_dir):
    """The loss of a run of ours on the test split. Raises Failure."""
    words = ["--init_from=resume", "--eval_only", "--split=test", f"--out_dir={out_dir}"]
    command = [sys.executable, "train.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"train.py failed: {done.stderr.strip()[-200:]}", out_dir, "run it by itself")
    return float(re.search(r"test loss ([\d.]+)", done.stdout)[1])


def best_threads(nanogpt, scratch):
    """The thread count at which nanoGPT's first 100 iterations are fastest here."""
    times = {}
    for threads in (1, os.cpu_count()) * 2:
        short = [*NANOGPT, "--max_iters=100", "--eval_interval=1000"]
        seconds, _ = race(Entrant(short, nanogpt, threads), scratch / "short", scratch)
        times[threads] = min(seconds, times.get(threads, math.inf))
    listed = ", ".join(f"{n} threads {seconds:.0f} s" for n, seconds in sorted(times.items()))
    print(f"nanoGPT, 100 iterations: {listed}", flush=True)
    return min(times, key=times.get)


def run_rounds(config, nanogpt, scratch):
    """({name: [(seconds, points, test loss or None) of each round]}, nanoGPT's thread count). Each
    round of ours has its own seed."""
    threads, runs = best_threads(nanogpt, scratch), {}
    for number in range(config.rounds):
        entrants = {"nanoGPT": Entrant(NANOGPT, nanogpt, threads)}
        entrants |= {name: Entrant([name, f"--seed={1337 + number}"]) for name in OURS}
        for name, entrant in entrants.items():
            out_dir = scratch / f"{number}-{Path(name).stem.replace(' ', '-')}"
            seconds, points = race(entrant, out_dir, out_dir.with_suffix(".cache"))
            unseen = test_loss(out_dir) if entrant.folder == ROOT else None
            runs.setdefault(name, []).append((seconds, points, unseen))
            summary = f"{seconds:.0f} s, validation loss {points[-1][1]:.4f}, test loss {unseen}"
            print(f"round {number + 1}: {name}: {summary}", flush=True)
    return runs, threads


def main(argv):
    values, words = load(argv, [RaceConfig], __doc__)
    config = build(RaceConfig, values)
    nanogpt = Path(config.nanogpt)
    if words or not (nanogpt / "data/shakespeare_char/train.bin").exists():
        fix = "clone nanoGPT there, and run its data/shakespeare_char/prepare.py"
        raise UserError("no prepared nanoGPT here", f"nanogpt={nanogpt}", fix)
    if not (ROOT / "data/shakespeare_char/meta.json").exists():
        fix = "run: python prepare.py shakespeare_char"
        raise UserError("our dataset is not prepared", "data/shakespeare_char", fix)
    with tempfile.TemporaryDirectory() as scratch:
        runs, threads = run_rounds(config, nanogpt, Path(scratch))
    report(runs, threads, argv)


def row(name, results, baseline):
    """A line of the table: medians, then each round. `baseline`: the results of nanoGPT."""
    limit = statistics.median(seconds for seconds, *_ in baseline)
    seconds, curves, tests = zip(*results, strict=True)
    ratios = [ours / theirs[0] for ours, theirs in zip(seconds, baseline, strict=True)]
    unseen = [loss for loss in tests if loss is not None]
    at_limit = [
        min((loss for moment, loss in points if moment <= limit), default=math.nan)
        for points in curves
    ]
    cells = [
        name,
        with_rounds(seconds, ".0f"),
        with_rounds(ratios, ".2f"),
        with_rounds([points[-1][1] for points in curves], ".4f"),
        with_rounds(unseen, ".4f") if unseen else "not measured",
        f"{statistics.median(at_limit):.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def with_rounds(values, form):
    """The median, and each value in brackets."""
    return f"{statistics.median(values):{form}} ({', '.join(f'{v:{form}}' for v in values)})"


def draw(runs, path):
    """The curves of all runs: validation loss against seconds, a colour for each entrant."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes, lowest = figure.subplots(), math.inf
    for number, (name, results) in enumerate(runs.items()):
        last = statistics.median(points[-1][1] for _, points, _ in results)
        label = f"{name.removeprefix('config/').removesuffix('.py')} {last:.3f}"
        for _, points, _ in results:
            axes.plot(*zip(*points, strict=True), f"C{number}.-", linewidth=0.9, ms=3, label=label)
            label = None  # once for each entrant
            lowest = min(lowest, points[-1][1])
    axes.set(
        xlabel="seconds from the command, all starting cold",
        ylabel="validation loss (nats per character)",
        ylim=(lowest - 0.05, 2.6),
    )
    axes.legend(title="the median of the final losses")
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


def report(runs, threads, argv):
    """Write bench/results/cpu_race.md and the curves."""
    facts = versions()
    words = ["--nanogpt=PATH" if arg.startswith("--nanogpt") else arg for arg in argv]
    lines = [
        "# From a cold start to a validation loss on Shakespeare's characters, on a CPU",
        "",
        f"{facts['hardware']}, {facts['cpus']} cores, torch {facts['torch']}, "
        f"Python {facts['python']}, {platform.system()}; commit {facts['git_commit']}.",
        f"`python bench/cpu_race.py {' '.join(words)}`; nanoGPT on {threads} "
        f"thread{'s' if threads > 1 else ''}, its better choice here. Medians over the rounds, "
        "then each round.",
        "",
        "| | seconds in all | times nanoGPT's | final validation loss | test loss "
        "| loss when nanoGPT ended |",
        "|---|---|---|---|---|---|",
        *(row(name, results, runs["nanoGPT"]) for name, results in runs.items()),
    ]
    draw(runs, ROOT / "bench/results/cpu_race.png")
    page = [*lines, "", "![loss against seconds](cpu_race.png)", ""]
    write(ROOT / "bench/results/cpu_race.md", "\n".join(page))
    print("\n".join(lines))


if __name__ == "__main__":
    run(main)
