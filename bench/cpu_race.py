"""
Our runs on a CPU beside nanoGPT's own code, from a cold start to the end, in turn:

    python bench/cpu_race.py --nanogpt=../nanoGPT

nanoGPT runs its documented CPU setting (4 layers, 128 wide, context 64, batch 12, 2000 iterations), at
the thread count that suits it best here; its data must be there (python data/shakespeare_char/prepare.py).
Ours are what `python train.py CONFIG` does, data prepared beforehand too. With --sprint both also race to a loss
of 1.70, nanoGPT with the best settings that we found for its own code, ours with fewer steps. Writes
bench/results/cpu_race.md and cpu_race.png. A loss of ours scores the whole validation split; nanoGPT's is its own estimate.
"""

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

import repo_root  # noqa: F401

from common.configurator import build, load
from common.errors import UserError, run
from common.files import ROOT
from common.runtime import versions

NANOGPT = [
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile=False",
    "--eval_iters=20",
    "--log_interval=1",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--max_iters=2000",
    "--lr_decay_iters=2000",
    "--dropout=0.0",
]
OURS = ["config/llama_shakespeare.py", "config/gpt2_shakespeare.py"]
# To 1.70: nanoGPT's rate, its end and the length were searched for (AdamW and cosine are all it has), of ours the length.
SPRINT = "1.70"
NANOGPT_SPRINT = [
    *NANOGPT,
    *["--learning_rate=5e-3", "--min_lr=0.0", "--max_iters=2700", "--lr_decay_iters=2700"],
]
OURS_SPRINT = [OURS[0], "--max_iters=380", "--eval_interval=380"]
MARKS = (1.886, 1.75, 1.70, 1.65, 1.60)


@dataclass
class RaceConfig:
    nanogpt: str = "../nanoGPT"  # where nanoGPT is checked out
    rounds: int = 2  # runs of each
    sprint: bool = False  # also to 1.70, each with the settings that are soonest there
    compile: bool = False  # ours compiled, on an empty compiler cache


def race(command, folder, threads, fresh):
    """Run a training command; returns (seconds from start to end, [(seconds, validation loss), ...])."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(fresh)}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    began, points = time.perf_counter(), []
    process = subprocess.Popen(
        [sys.executable, "train.py", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        found = re.match(r"step \d+: .*val loss ([\d.]+)", line)
        if found:
            points.append((time.perf_counter() - began, float(found[1])))
    if process.wait():
        raise RuntimeError(
            f"{' '.join(command)} failed: {process.stderr.read().strip().splitlines()[-1]}"
        )
    return time.perf_counter() - began, points


def best_threads(nanogpt, scratch):
    """The thread count at which nanoGPT's first 100 iterations are fastest here."""
    times = {}
    for threads in (1, os.cpu_count()) * 2:
        short = [*NANOGPT, "--max_iters=100", "--eval_interval=1000", f"--out_dir={scratch}/short"]
        times[threads] = min(race(short, nanogpt, threads, scratch)[0], times.get(threads, 1e9))
    return min(times, key=times.get), times


def time_to(points, mark):
    return next((seconds for seconds, loss in points if loss <= mark), None)


def main(argv):
    values, words = load(argv, [RaceConfig], __doc__)
    config = build(RaceConfig, values)
    nanogpt = Path(config.nanogpt)
    if words or not (nanogpt / "data/shakespeare_char/train.bin").exists():
        raise UserError(
            "no prepared nanoGPT here",
            f"nanogpt={nanogpt}",
            "check it out, and run its data/shakespeare_char/prepare.py",
        )
    if not (ROOT / "data/shakespeare_char/meta.json").exists():
        raise UserError(
            "our data are not prepared",
            "data/shakespeare_char",
            "run: python prepare.py shakespeare_char",
        )
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        threads, times = best_threads(nanogpt, scratch)
        print(
            "nanoGPT, 100 iterations: "
            + ", ".join(f"{n} threads {seconds:.0f} s" for n, seconds in sorted(times.items())),
            flush=True,
        )
        for number in range(config.rounds):
            own = [f"--seed={1337 + number}", f"--compile={config.compile}"]
            entrants = {"nanoGPT": (NANOGPT, nanogpt, threads)} | {
                name: ([name, *own], ROOT, None) for name in OURS
            }
            if config.sprint:
                entrants |= {
                    f"nanoGPT to {SPRINT}": (NANOGPT_SPRINT, nanogpt, threads),
                    f"LLaMA to {SPRINT}": ([*OURS_SPRINT, *own], ROOT, None),
                }
            for name, (command, folder, n) in entrants.items():
                place = Path(scratch, f"{number}-{Path(name).stem.replace(' ', '-')}")
                runs.setdefault(name, []).append(
                    race([*command, f"--out_dir={place}"], folder, n, place.with_suffix(".cache"))
                )
                seconds, points = runs[name][-1]
                print(
                    f"round {number + 1}: {name}: {seconds:.0f} s, validation loss {points[-1][1]:.4f}",
                    flush=True,
                )
    report(runs, threads, argv)


def report(runs, threads, argv):
    """Write bench/results/cpu_race.md and the curves."""
    from matplotlib.figure import Figure

    limit = statistics.median(seconds for seconds, _ in runs["nanoGPT"])
    facts = versions()
    lines = [
        "# From a cold start to a validation loss on Shakespeare's characters, on a CPU",
        "",
        f"{facts['hardware']}, {facts['cpus']} cores, torch {facts['torch']}, Python {facts['python']}, {platform.system()}; commit {facts['git_commit']}.",
        f"`python bench/cpu_race.py {' '.join('--nanogpt=PATH' if arg.startswith('--nanogpt') else arg for arg in argv)}`; nanoGPT on {threads} thread{'s' * (threads > 1)}, its better choice here. Medians over the rounds, then each round.",
        "",
        "| | seconds, all told | final validation loss | loss when nanoGPT was done | "
        + " | ".join(f"s to {mark}" for mark in MARKS)
        + " |",
        "|---|---|---|---|" + "---|" * len(MARKS),
    ]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, results), color in zip(
        runs.items(), ("#999999", "#cc3311", "#4477aa", "#555555", "#ee8866")
    ):
        ends = [points[-1][1] for _, points in results]
        then = [
            min((loss for seconds, loss in points if seconds <= limit), default=float("nan"))
            for _, points in results
        ]
        marks = [[time_to(points, mark) for _, points in results] for mark in MARKS]
        lines.append(
            f"| {name} | {statistics.median(seconds for seconds, _ in results):.0f} ({', '.join(f'{seconds:.0f}' for seconds, _ in results)}) "
            f"| {statistics.median(ends):.4f} ({', '.join(f'{end:.4f}' for end in ends)}) | {statistics.median(then):.4f} | "
            + " | ".join(
                f"{statistics.median(found):.0f}" if None not in found else "never"
                for found in marks
            )
            + " |"
        )
        for number, (_, points) in enumerate(results):
            axes.plot(*zip(*points), color=color, marker=".", label=name if not number else None)
    axes.set(
        xlabel="seconds from the command",
        ylabel="validation loss, nats per character",
        ylim=(1.5, 2.6),
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    figure.savefig(results / "cpu_race.png", dpi=110)
    (results / "cpu_race.md").write_text(
        "\n".join(lines) + "\n\n![loss against seconds](cpu_race.png)\n", encoding="utf-8"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    run(main)
