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


def test_the_bars_show_how_far_each_run_is(tmp_path):
    jobs = [job("rope", seed, tmp_path / f"rope-{seed}") for seed in range(4)]
    state = state_of("rope")
    bars = progress.RunBars(state, jobs)
    for running in jobs[:2]:
        folder = tmp_path / f"rope-{running.seed}"
        folder.mkdir()
        (folder / "stderr.txt").write_text("")
    rows = [{"step": 50, "loss": 2.5}, {"step": 100, "val_loss": 2.25}]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "rope-0" / "log.jsonl").write_text(text + '\n{"step": 15')  # torn
    state.rows[jobs[2].key] = ROW
    lines = [line for each in bars.get_renderables() for line in drawn(each)]
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert lines[0].startswith("1/4 runs") and " 38%" in lines[0]  # (1 + 0.5) / 4
    assert lines[1].startswith("rope seed 0 2.2500") and " 50%" in lines[1]
    assert lines[2].startswith("rope seed 1 ") and "  0%" in lines[2]
    state.rows[jobs[0].key] = ROW
    os.utime(tmp_path / "rope-1" / "stderr.txt", (0, 0))
    assert len([line for each in bars.get_renderables() for line in drawn(each)]) == 1


def test_without_a_terminal_there_is_a_line_for_each_run(capsys):
    jobs, state = [job("rope", seed) for seed in range(2)], state_of("rope")
    with progress.doing("timing 3 arms") as say, progress.RunBars(state, jobs) as bars:
        say("not shown")
        state.rows[jobs[0].key] = ROW
        bars.ended(jobs[0], ROW)
        state.rows[jobs[1].key] = {"status": "diverged", "reason": "loss nan [at step 1]"}
        bars.ended(jobs[1], state.rows[jobs[1].key])
    assert capsys.readouterr().out.splitlines() == [
        "timing 3 arms",
        "[1/2] rope seed 0: final 1.5000, best 1.2500, 20 s",
        "[2/2] rope seed 1: DIVERGED: loss nan [at step 1]",
    ]
