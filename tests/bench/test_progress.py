"""What a sweep shows on a terminal of 80 columns, and elsewhere."""

import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.ablation import progress, runs
from helpers.runs import refusing


def test_a_reader_that_leaves_is_an_error_and_does_not_end_the_process(monkeypatch):
    """So that the runs save."""
    monkeypatch.setattr(sys, "stdout", refusing("pipe"))
    with pytest.raises(BrokenPipeError):
        progress.Output().print("text")


def test_each_run_that_ends_has_a_line_and_moves_the_bar(capsys):
    jobs = [runs.Job("rope", seed, 1, "report", "out", {}, *"chd") for seed in range(2)]
    done = {"status": "done", "final_val_loss": 1.5, "best_val_loss": 1.25, "wall_seconds": 20.0}
    ends = [done, {"status": "diverged", "reason": "loss nan [at step 1]"}]
    sweep, drawn = SimpleNamespace(rows={}, predicted={"rope": 10.0}), Console(width=80)

    with progress.doing("timing 3 arms") as say, progress.RunBar(sweep, jobs) as bar:
        say("not shown")
        for job, row in zip(jobs, ends, strict=True):
            sweep.rows[job.key] = row
            bar.ended(job, row)
            with drawn.capture() as capture:
                drawn.print(*bar.get_renderables())
            (line,) = capture.get().splitlines()
            assert line.startswith(f"{len(sweep.rows)}/2 runs") and len(line) <= 80
            assert f" {50 * len(sweep.rows)}%" in line
    assert capsys.readouterr().out.splitlines() == [
        "timing 3 arms",
        "[1/2] rope seed 0: final 1.5000, best 1.2500, 20 s",
        "[2/2] rope seed 1: DIVERGED: loss nan [at step 1]",
    ]


def test_names_of_arms_are_no_markup():
    assert progress.cell("[/b]:smile:\x1b[2J").plain == r"[/b]:smile:\x1b[2J"
