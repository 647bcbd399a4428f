"""What a sweep shows on a terminal of 80 columns, and elsewhere."""

import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.ablation import power, progress, runs
from helpers.ablation import arm
from helpers.runs import refusing


def test_a_reader_that_leaves_is_an_error_and_does_not_end_the_process(monkeypatch):
    """So that the runs save."""
    monkeypatch.setattr(sys, "stdout", refusing("pipe"))
    with pytest.raises(BrokenPipeError):
        progress.Output().print("text")


def test_each_run_that_ends_has_a_line_and_moves_the_bar(capsys):
    jobs = [runs.Job("rope", seed, 1, "report", "out", {}, *"chd") for seed in range(2)]
    done = {"status": "done", "final_val_loss": 1.5, "wall_seconds": 20.0}
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
        "[1/2] rope seed 0: final 1.5000, 20 s",
        "[2/2] rope seed 1: DIVERGED: loss nan [at step 1]",
    ]


def test_work_shows_off_a_terminal_that_it_goes_on(monkeypatch, capsys):
    times = iter([0, 20, 31, 31, 40, 62, 62])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with progress.doing("checking the arms") as show:
        for number in range(1, 5):  # after 20, 31, 40 and 62 seconds
            show(f"arm {number}")
    lines = ["checking the arms", "checking the arms: arm 2", "checking the arms: arm 4"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_rung_is_compared_with_as_many_runs_of_the_rung_below(planned):
    rungs = arm(rms=dict(norm="rmsnorm"), rope=dict(position="rope"))
    told = progress.what_it_shows(planned("--design=ladder", rungs, "--seeds=5"))
    visible = power.smallest_visible((2 / 5) ** 0.5, 8, power.ALPHA / 2)
    assert told.startswith("5 runs of an arm beside 5 without") and f"of {visible:.1f} st" in told


def test_the_plan_counts_the_runs_of_the_base_and_the_arms_that_are_there(planned):
    sweep = planned(arm(rope=dict(position="rope")), "--seeds=5")
    assert "5 runs of an arm beside 7 without" in progress.what_it_shows(sweep)
    sweep.rows = {seed: {"arm": "base", "purpose": "report"} for seed in range(9)}
    assert "5 runs of an arm beside 12 without" in progress.what_it_shows(sweep)
    sweep.measured = {"rope", *"abcdef"}
    assert progress.what_it_shows(sweep).endswith("decide nothing: give more --seeds")


def test_names_of_arms_are_no_markup():
    assert progress.cell("[/b]:smile:\x1b[2J").plain == r"[/b]:smile:\x1b[2J"
