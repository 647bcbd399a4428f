"""What a sweep shows on a terminal of 80 columns, and elsewhere."""

import json
import os
from types import SimpleNamespace

from rich.console import Console

from bench.ablation import launch, progress


def job(name, seed, folder="out"):
    values = {"max_iters": 200}
    return launch.Job(name, seed, 1, "report", str(folder), values, "c", "h", "d")


def state_of(*names):
    """What the progress reads of a sweep."""
    return SimpleNamespace(
        rows={}, arms=dict.fromkeys(names), predicted=dict.fromkeys(names, 10.0), costs={}
    )


def drawn(renderable, width=80):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


ROW = {"status": "done", "final_val_loss": 1.5, "best_val_loss": 1.25, "wall_seconds": 20.0}


def test_the_bar_shows_how_far_the_runs_are(tmp_path):
    jobs = [job("rope", seed, tmp_path / f"rope-{seed}") for seed in range(4)]
    state = state_of("rope")
    bar = progress.RunBar(state, jobs)
    text = "\n".join(json.dumps({"step": step}) for step in (50, 100))
    for seed in (0, 1):
        (tmp_path / f"rope-{seed}").mkdir()
        (tmp_path / f"rope-{seed}" / "log.jsonl").write_text(text + '\n{"step": 15')  # torn
    os.utime(tmp_path / "rope-1" / "log.jsonl", (0, 0))  # of an earlier sweep
    state.rows[jobs[2].key] = ROW
    (line,) = [line for each in bar.get_renderables() for line in drawn(each)]
    assert line.startswith("1/4 runs") and " 38%" in line and len(line) <= 80  # (1 + 0.5) / 4


def test_without_a_terminal_there_is_a_line_for_each_run(capsys):
    jobs, state = [job("rope", seed) for seed in range(2)], state_of("rope")
    with progress.doing("timing 3 arms") as say, progress.RunBar(state, jobs) as bar:
        say("not shown")
        state.rows[jobs[0].key] = ROW
        bar.ended(jobs[0], ROW)
        state.rows[jobs[1].key] = {"status": "diverged", "reason": "loss nan [at step 1]"}
        bar.ended(jobs[1], state.rows[jobs[1].key])
    assert capsys.readouterr().out.splitlines() == [
        "timing 3 arms",
        "[1/2] rope seed 0: final 1.5000, best 1.2500, 20 s",
        "[2/2] rope seed 1: DIVERGED: loss nan [at step 1]",
    ]
