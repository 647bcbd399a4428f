"""What a sweep shows: on a terminal (a pseudo-terminal of 80 columns), and elsewhere."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.ablation import launch, terminal
from bench.ablation.terminal import Doing, Progress, say
from common.files import ROOT
from helpers.ablation import DRIVER, arguments, arm

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def job(name, seed, folder="out"):
    values = {"max_iters": 200}
    return launch.Job(name, seed, 1, "report", str(folder), values, "c", "h", "d")


def state_of(*names, **rows):
    """What Progress reads of a sweep."""
    return SimpleNamespace(
        rows=rows,
        arms=dict.fromkeys(names),
        predicted=dict.fromkeys(names, 10.0),
        slots=[(None, 1)],
        config=SimpleNamespace(metric="final_val_loss"),
        planned_jobs=lambda: [],
    )


def row_of(name="rope", **more):
    losses = {"final_val_loss": 1.5, "best_val_loss": 1.25, "wall_seconds": 20.0}
    return {"arm": name, "status": "done"} | losses | more


def drawn(renderable, width=80):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


# ---------------------------------------------------------------- on a terminal


def test_the_table_of_progress_is_redrawn(capsys):
    jobs = [job("rope", seed) for seed in range(2)]
    state = state_of("rope")
    with Progress(state, jobs, terminal=True) as progress:
        state.rows[jobs[0].key] = row_of()
        capsys.readouterr()
        progress.show(jobs[0], state.rows[jobs[0].key])
        first = capsys.readouterr().out
        # 20 s: what the first run took, and not the 10 s that were predicted
        for words in ("1/2", "1.5000", "20 s"):
            assert words in first
        progress.show(jobs[0], state.rows[jobs[0].key])
        assert capsys.readouterr().out.count("\x1b[1A") >= 2  # lines up


def test_the_table_shows_how_far_each_run_is(tmp_path):
    jobs = [job("rope", seed, tmp_path / f"rope-{seed}") for seed in range(4)]
    state = state_of("rope", "base")
    progress = Progress(state, [*jobs, job("base", 0, tmp_path / "base")], terminal=False)
    for one in jobs[:2]:
        folder = tmp_path / f"rope-{one.seed}"
        folder.mkdir()
        (folder / "stderr.txt").write_text("")
    rows = [{"step": 50, "loss": 2.5}, {"step": 100, "val_loss": 2.25}]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "rope-0" / "log.jsonl").write_text(text + '\n{"step": 15')  # torn
    state.rows[jobs[2].key] = row_of()
    state.rows[jobs[3].key] = row_of(status="diverged", final_val_loss=9.0)
    lines = drawn(progress.draw())
    (line,) = (line for line in lines if line.startswith("rope"))
    assert line.split() == ["rope", "1/4", "50%", "2.2500", "+1", "1.5000", "30", "s", "1"]
    assert max(map(len, lines)) <= 80
    # 40 s of two runs where 20 s were predicted; half of one run is done: 2 * (1.5 + 1) * 10 s
    assert lines[-1].strip() == "0 s so far, about 50 s left"
    state.planned_jobs = lambda: [*jobs, job("base", 1), job("base", 2)]  # two are not among these
    last = drawn(Progress(state, jobs, terminal=False).draw())[-1]
    assert last.endswith(" left, then 20 s of other runs")
    (tmp_path / "rope-1" / "log.jsonl").write_text('{"step": 200, "val_loss": 2.0}\n')
    assert "rope seed 1 measuring" in progress.line()
    os.utime(tmp_path / "rope-0" / "stderr.txt", (0, 0))  # it was stopped before this began
    assert "rope seed 0" not in progress.line()


def test_a_short_terminal_shows_the_arms_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LINES", "10")
    names = [f"arm{number}" for number in range(20)]
    jobs = [job(name, 0, tmp_path / name) for name in names]
    (tmp_path / "arm17").mkdir()
    (tmp_path / "arm17" / "stderr.txt").write_text("")
    lines = drawn(Progress(state_of(*names), jobs, terminal=False).draw())
    assert len(lines) == 8 and lines[1].startswith("arm17")
    assert "14 more arms are not shown" in lines[-1]


def test_the_plan_fits_80_columns_and_loses_no_change():
    changes = {"position": "yarn", "mlp": "swiglu", "n_kv_head": 2, "learning_rate": 0.0003}
    long = SimpleNamespace(changes=changes, values={"mlp_width": 1368}, against="base", match=None)
    short = SimpleNamespace(changes={"norm": "dyt"}, values={}, against="rope", match=None)
    state = state_of("a name that is longer than its column is wide", "dyt")
    state.arms = dict(zip(state.arms, (long, short), strict=True))
    state.costs = {name: {"parameters": 123_456_789} for name in state.arms}
    lines = drawn(terminal.plan_table(state, [job("dyt", seed) for seed in range(3)]), width=200)
    assert max(map(len, lines)) <= 80
    text = "".join(line[24:60] for line in lines).replace(" ", "")
    for key, value in changes.items():
        assert f"{key}={value}".replace(" ", "") in text
    last = [line.split() for line in lines if "dyt" in line][-1]
    assert last[-4:] == ["3", "10", "s", "123,456,789"]
    assert "(compared with rope)" in " ".join(lines[-2:])


# ---------------------------------------------------------------- elsewhere


def test_without_a_terminal_there_is_a_line_for_each_run_and_few_others(capsys, monkeypatch):
    """In 1.5 s, with a first pause of 0.2 s that doubles: lines after 0.2, 0.6, 1.4 s."""
    monkeypatch.setattr(terminal, "HEARTBEAT", 0.2)
    jobs, state = [job("rope", seed) for seed in range(2)], state_of("rope")
    with Progress(state, jobs, terminal=False) as progress:
        time.sleep(1.5)
        state.rows[jobs[0].key] = row_of()
        progress.show(jobs[0], state.rows[jobs[0].key])
    *waiting, last = capsys.readouterr().out.splitlines()
    assert 1 <= len(waiting) <= 3 and all(line.startswith("[0/2] ") for line in waiting)
    assert last == "[1/2] rope seed 0: final 1.5000, best 1.2500, 20 s; about 20 s left"


def test_what_is_being_done_is_said_once_and_again_after_a_while(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "HEARTBEAT", 0.2)
    say("nothing is being done, so this is not shown")
    with Doing("timing 3 arms", terminal=False):
        say("rope, step 3 of 50")
        time.sleep(0.4)
    say("nor this")
    first, *later = capsys.readouterr().out.splitlines()
    assert first == "timing 3 arms"
    assert set(later) <= {"timing 3 arms (0 s): rope, step 3 of 50"} and later


# ---------------------------------------------------------------- a whole sweep on a terminal


class OnTerminal:
    """The driver, on the stand-in for train.py, on a terminal of 24 lines of 80 columns."""

    def __init__(self, data_dir, out, stub, *more, sleep=0.3):
        code = DRIVER.format(root=str(ROOT), stub=stub)
        words = [sys.executable, "-c", code, *arguments(data_dir, out, *more)]
        environment = os.environ | {"TERM": "xterm", "STUB_SLEEP": str(sleep)}
        for key in ("COLUMNS", "LINES"):
            environment.pop(key, None)
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            size = struct.pack("HHHH", 24, 80, 0, 0)
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)
            os.execve(words[0], words, environment)
        self.chunks = []  # (time, text)

    def read(self, until=None, seconds=100):
        """Read until a text appears, or to the end. Returns all the text so far."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and not (until and until in self.text):
            ready, _, _ = select.select([self.terminal], [], [], 1)
            try:
                chunk = os.read(self.terminal, 1 << 16) if ready else None
            except OSError:  # the other end is closed
                break
            if chunk == b"":
                break
            if chunk:
                self.chunks.append((time.perf_counter(), chunk.decode(errors="replace")))
        assert until is None or until in self.text, self.text[-2000:]
        return self.text

    @property
    def text(self):
        return "".join(chunk for _, chunk in self.chunks)

    @property
    def lines(self):
        """The lines without colours and movements."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)
        return [line.rstrip() for line in re.split(r"[\r\n]+", plain)]

    def status(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def on_terminal(data_dir, tmp_path, stub):
    rope = arm(rope=dict(position="rope"))
    more = [rope, "--seeds=2", "--screening=True", "--again=False"]
    return lambda *extra, **kw: OnTerminal(data_dir, tmp_path / "out", stub, *more, *extra, **kw)


@pytest.mark.slow
def test_a_sweep_on_a_terminal_is_never_silent_and_never_wide(on_terminal):
    """At most two seconds without output, once torch is imported; on a machine with other work,
    longer in proportion."""
    found = on_terminal()
    found.read()
    assert found.status() == 0 and "the table" in found.lines
    assert max(map(len, found.lines)) <= 80
    times = [when for when, _ in found.chunks]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert max(gaps) <= 2 * max(1.0, os.getloadavg()[0] / os.cpu_count())
    text = "\n".join(found.lines)
    for words in ("checking the arms", "timing 2 arms in turn", "4 runs: 4 to report", "50%"):
        assert words in text
    assert "python train.py" not in text and "--max_iters" not in text  # commands: --dry_run


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C twice", "kill"])
def test_a_sweep_that_ends_at_once_leaves_the_cursor(on_terminal, how):
    """And the same command continues."""
    found = on_terminal(sleep=1)
    found.read(until="25%")
    if how == "kill":
        os.kill(found.pid, signal.SIGKILL)
    else:
        os.write(found.terminal, b"\x03")
        found.read(until="stopping")
        os.write(found.terminal, b"\x03")
    text = found.read(seconds=20)
    assert found.status() == (-9 if how == "kill" else 130)
    assert HIDE in text and text.rindex(SHOW) > text.rindex(HIDE)
    again = on_terminal(sleep=0)
    again.read()
    assert again.status() == 0 and "the table" in again.lines


def test_a_dry_run_prints_costs_and_commands(on_terminal):
    found = on_terminal("--dry_run=True")
    found.read()
    assert found.status() == 0
    text = " ".join(found.lines)
    assert "ms/step" in text and text.count("train.py") == 4
