"""What a sweep shows on a terminal of 80 columns, and elsewhere."""

from types import SimpleNamespace

from rich.console import Console

from bench.ablation import launch, progress


def job(name, seed):
    return launch.Job(name, seed, 1, "report", "out", {"max_iters": 200}, "c", "h", "d")


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


def test_the_bar_shows_how_many_runs_have_ended():
    jobs, state = [job("rope", seed) for seed in range(4)], state_of("rope")
    bar = progress.RunBar(state, jobs)
    state.rows[jobs[2].key] = ROW
    bar.ended(jobs[2], ROW)
    (line,) = [line for each in bar.get_renderables() for line in drawn(each)]
    assert line.startswith("1/4 runs") and " 25%" in line and len(line) <= 80


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
