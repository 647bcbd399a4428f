"""The ablation driver at work: what it does when runs crash, hang, are stopped or killed. Most
sweeps here train with a stub of train.py; one trains for real."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ablate
from bench.ablation import fingerprint, measure, plans, runs, schedule, step_times
from common.commands import ROOT
from common.errors import Failure, UserError
from common.runtime import versions
from helpers.ablation import DRIVER, arguments, arm, made_up_times, rows_of, steps_of
from helpers.runs import refusing
from tokens import ngrams
from training.run_folder import lock_run, read_rows

ROPE = arm(rope=dict(position="rope"))


def test_runs_that_crash_or_hang_are_failed_rows(drive, out, data_dir, capsys, monkeypatch):
    monkeypatch.setattr(runs, "time_limit", lambda predicted: 3.0)
    three = arm(crash=dict(norm="dyt"), hang=dict(position="alibi"), rope=dict(position="rope"))
    status = drive(three, "--seeds=2", "--screening")
    rows = rows_of(out)
    assert status == 1 and (out / "report.md").exists() and len(rows) == 10
    assert {name[0] for name, row in rows.items() if row["status"] == "failed"} == {"crash", "hang"}
    reason = "out of memory (batch_size=4): choose a smaller one"
    assert rows["crash", 0, 1, "report"]["reason"] == reason
    assert rows["hang", 1, 1, "report"]["reason"] == "over the limit of 3 s"
    printed = capsys.readouterr().out
    assert "the table" in printed and printed.splitlines()[-1] == str(out / "report.md")
    done = [row for row in rows.values() if row["status"] == "done"]
    given = [dict(re.findall(r"--(\w+)=(\S+)", row["command"])) for row in done]
    # Arms see the data in one order, except the base's second copy; no two runs begin alike.
    for keys, row in zip(given, done, strict=True):
        again = row["arm"] == "base again"
        assert keys["data_seed"] == str(row["seed"] + schedule.REPLICATE_SEED * again)
        assert row["curve"][-1][:2] == [4, row["final_val_loss"]]
        assert row["final_tune"] + 0.2 == pytest.approx(row["final_report"])
        assert row["blocks"] == pytest.approx([row["final_val_loss"], row["final_val_loss"] + 0.2])
        assert row["git_commit"] == "abc" and row["hardware"] == versions("cpu")["hardware"]
    assert len({keys["seed"] for keys in given}) == len(done)

    plan = plans.plan(out)
    counted = json.loads((data_dir / "words/meta.json").read_text())["ngrams"]
    _, _, trigrams, *others = ngrams.losses_at(counted, 4 * 4 * 16, 16)  # steps, batch, context
    (tokens,) = counted["tokens"]  # the text is short, so that one amount is counted
    assert plan["ngrams"] == {"best": [3, trigrams], "trigrams": trigrams, "tokens": tokens}
    assert trigrams < min(others)
    entries = plan["arms"]
    assert list(entries) == ["base", "crash", "hang", "rope", "base again"]
    assert entries["base again"]["replicate"]
    for row in rows.values():
        assert all(row[key] == entries[row["arm"]][key] for key in ("config_hash", "code_hash"))
    # The base again is the base.
    assert len({each["config_hash"] for each in entries.values()}) == 4
    assert {row["arm"] for row in read_rows(out / "costs.jsonl")} == set(entries)

    steps = steps_of(rows["rope", 0, 1, "report"])
    drive(arm(crash=dict(norm="dyt"), rope=dict(position="rope")), "--seeds=2", "--screening")
    assert steps_of(rows["rope", 0, 1, "report"]) == steps
    assert len(read_rows(out / "rows.jsonl")) == 12  # the two that failed are tried again
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 rows here are of arms that are not named (hang 2): they stay" in printed


@pytest.mark.parametrize("kind", ["pipe", "closed"])
def test_a_sweep_that_is_stopped_says_so_whatever_its_streams_are(drive, monkeypatch, capfd, kind):
    def stopped(sweep, stop, start):
        stop.note(signal.SIGHUP, None)
        monkeypatch.setattr(sys, "stdout", refusing(kind))
        print("a line", flush=True)

    monkeypatch.setattr(ablate, "run_sweep", stopped)
    assert drive(ROPE) == 129
    assert "stopped and saved" in capfd.readouterr().err


def test_a_sweep_leaves_a_folder_alone_that_takes_its_name(planned, out, tmp_path):
    sweep = planned(ROPE)
    sweep.open()
    out.rename(tmp_path / "moved")
    (out / "runs").mkdir(parents=True)
    lock_run(out).close()
    for write in (sweep.write_plan, lambda: sweep.keep_row(None, {})):
        with pytest.raises(Failure, match="was moved"):
            write()
    assert sorted(path.name for path in out.iterdir()) == ["lock", "runs"]


def test_a_run_is_not_started_through_a_link(planned, tmp_path):
    sweep = planned(ROPE)
    job = schedule.pending_jobs(sweep)[0]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/stderr.txt").write_text("mine")
    Path(job.out_dir).parent.mkdir(parents=True)
    Path(job.out_dir).symlink_to(tmp_path / "mine")
    assert not runs.make_ready(job)
    assert os.listdir(tmp_path / "mine") == ["stderr.txt"] and Path(job.out_dir).is_dir()
    Path(job.out_dir, "stderr.txt").symlink_to(tmp_path / "mine/stderr.txt")
    with pytest.raises(OSError):
        runs.Run(job)
    assert (tmp_path / "mine/stderr.txt").read_text() == "mine"


def test_a_run_that_diverges_is_a_result_and_is_never_tried_again(drive, out, capsys):
    what = [arm(wild=dict(norm="batchnorm")), "--seeds=2", "--screening"]
    assert drive(*what) == 0
    rows = rows_of(out)
    assert {row["status"] for name, row in rows.items() if name[0] == "wild"} == {"diverged"}
    assert rows["wild", 1, 1, "report"]["reason"] == "loss nan at step 1"
    before = (out / "rows.jsonl").read_text()
    assert drive(*what) == 0 and (out / "rows.jsonl").read_text() == before
    assert drive(*what, "--dry_run") == 0 and "nothing left to run\n" in capsys.readouterr().out
    # Also if the driver was killed before it wrote the row.
    lines = [line for line in before.splitlines(True) if '"diverged"' not in line]
    (out / "rows.jsonl").write_text("".join(lines))
    assert drive(*what, trainer="no/trainer.py") == 0
    assert {row["status"] for row in rows_of(out).values()} == {"done", "diverged"}


@pytest.mark.parametrize(
    "last, data, status, why",
    [
        (3.0, "d", "done", None),
        (5.0, "d", "diverged", "the final loss 5 is above the initial 4"),
        (3.0, "another text", "failed", "measuring the trained model: .*the dataset changed"),
    ],
)
def test_how_a_run_ended(tmp_path, monkeypatch, last, data, status, why):
    """The last evaluation alone scores the whole text, which the curve does not. The third run is
    as when its dataset is prepared from another text while the sweep runs."""
    monkeypatch.setattr(measure.checkpoint, "steps", lambda folder: [4])
    opened = None, None, None, {"data": data}
    monkeypatch.setattr(measure.checkpoint, "open_run", lambda *args: opened)
    if data == "d":
        monkeypatch.setattr(runs, "measure_trained", lambda *args: {})
    log = [{"step": 0, "val_loss": 4.0}, {"step": 4, "val_loss": 9.0, "whole_val_loss": last}]
    log[-1]["report_exact"] = 0.25
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in log))
    values = {"max_iters": 4, "device": "cpu", "dataset": "book"}
    row = runs.row_of(runs.Job("a", 0, 1, "report", str(tmp_path), values, *"chd"), None, 1.0)
    assert row["status"] == status and row["final_val_loss"] == last
    assert row["wrong_answers"] == 0.75 and row["curve"][-1][1] == 9.0
    assert re.match(why or "None", str(row["reason"]))
    assert [runs.time_limit(x) for x in (None, 1.0, 1e3)] == [None, runs.LEAST_LIMIT, 1e4]


def test_stale_rows_are_not_mixed_in(drive, out, monkeypatch, capsys):
    drive(ROPE, "--seeds=1")
    first = rows_of(out)
    monkeypatch.setattr(fingerprint, "compute", lambda values, kind: {"loss": [1.1]})
    assert drive(ROPE, "--seeds=1") == 0
    printed = capsys.readouterr().out
    assert re.search(r"4 rows here are of other code or\sconfiguration \(.*rope 1", printed)
    assert "the code of rope computes something else: loss of step 0 1.0 -> 1.1" in printed
    codes = {row["code_hash"] for row in rows_of(out).values()}
    assert not codes & {row["code_hash"] for row in first.values()}
    assert len(read_rows(out / "rows.jsonl")) == 8
    assert (out / "runs" / "rope-s0-lr1.old1" / "steps.txt").exists()  # kept aside
    drive(ROPE, "--seeds=1", "--max_iters=3")
    assert {row["curve"][-1][0] for row in rows_of(out).values()} == {3}
    assert first["rope", 0, 1, "report"]["curve"][-1][0] == 4


def test_a_second_driver_on_a_folder_is_refused(drive, out, capsys):
    out.mkdir()
    with lock_run(out) as held:
        held.write("1234")
        held.flush()
        with pytest.raises(UserError, match="process 1234 is training here"):
            drive(ROPE)
    assert not (out / "sweep.json").exists() and "timing" not in capsys.readouterr().out


def test_a_dry_run_tells_and_writes_nothing(drive, data_dir, out, capsys, monkeypatch):
    def time_arms(*arguments):
        rows, failed = made_up_times(*arguments)
        return [row | {"quiet": False, "disturbed": "others work"} for row in rows], failed

    monkeypatch.setattr(step_times, "time_arms", time_arms)
    assert drive("--design=leave_one_in", "--seeds=5", "--dry_run") == 0
    printed, warned = capsys.readouterr()
    assert "on a quiet machine the runs take less" in printed and "the report" not in warned
    # 5 for each of five arms, and sqrt(5) * 5 for the base
    assert "5 runs of an arm beside 12 without its change show a difference of 2.1" in printed
    assert "80 times in 100, and a tie within 2.1" in " ".join(printed.split())
    assert "mlp_width is set so that each arm costs what the base does (--match=params)" in printed
    assert "37 runs: 37 in the report\n2 at a time: about 2.2 min" in printed
    assert not out.exists() and "and 30 more runs" in printed
    lines = printed.splitlines()
    assert printed.count("python train.py") == 7  # one for each arm, the base and its copy
    assert "warm-up" not in printed
    assert max(len(line) for line in lines if len(line.split()) > 2) <= 80  # one word stays whole
    what = [ROPE, "--warmup_iters=2", "--lr_grid=[0.5, 1]", "--seeds=5"]
    assert ablate.ablate(*arguments(data_dir, out, *what), dry_run=True) is None
    printed = " ".join(capsys.readouterr().out.split())
    assert "24 runs: 12 to choose learning rates, 12 in the report" in printed
    assert "the warm-up is 2 of 4 steps" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_device_that_is_not_here_is_refused(drive, out):
    with pytest.raises(UserError, match="cuda"):
        drive("--design=leave_one_in", "--device=cuda")
    assert not out.exists()


def test_odd_lines_stop_nothing_and_an_odd_plan_is_refused(drive, out, capsys):
    out.mkdir()
    (out / "sweep.json").write_text('{"arms": ["base"], "margin": 1}')
    with pytest.raises(UserError, match="this is not the plan of a sweep"):
        drive(ROPE)
    (out / "sweep.json").unlink()
    (out / "rows.jsonl").write_text('{}\n{"arm": [], "status": 3}\n[]\n')
    (out / "costs.jsonl").write_text('{"arm": "rope"}\n')
    assert drive(ROPE, "--seeds=2", "--screening") == 0
    assert "rows.jsonl is damaged and read without line 1, 2, 3" in capsys.readouterr().err


@pytest.mark.slow
def test_from_python_a_sweep_returns_its_runs(data_dir, tmp_path, stub):
    """In another working directory, with nothing but the root on the path."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import bench.ablate
assert "repo_root" not in sys.modules
bench.ablate.step_times.ROUNDS, bench.ablate.run_all.__defaults__ = 1, ({stub!r},)
runs = bench.ablate.ablate(
    {str(ROOT / "config/ablate_shakespeare.py")!r}, arms={{"rope": dict(position="rope")}},
    dataset="words", data_dir={str(data_dir)!r}, out_dir="sweep", seeds=1, n_layer=1, n_embd=16,
    block_size=16, n_head=2, max_iters=4, eval_interval=2, device="cpu", eval_tokens=100,
)
assert sorted(runs.arm) == ["base", "base again", "rope"] and runs.val_loss.notna().all()
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"STUB_FORGETS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "sweep" / "report.md").exists()
    module = [sys.executable, "-m", "bench.ablate", "--help"]
    assert subprocess.run(module, cwd=ROOT, capture_output=True).returncode == 0


def alive(out):
    """Processes that still train in a sweep's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"--out_dir={out}/runs" in entry.read_text():
                found.append(entry.parent.name)
    return found


def happens(condition, seconds=60):
    """Whether a condition comes true within some seconds."""
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("how", ["stopped", "given up"])
def test_runs_in_progress_save_when_they_are_no_longer_wanted(tmp_path, stub, monkeypatch, how):
    """One of two runs ends, and the other one saves after its step."""
    monkeypatch.setenv("STUB_SLEEP", "0.1")
    monkeypatch.setattr(runs, "POLL", 0.02)
    monkeypatch.setattr(runs, "row_of", lambda job, reason, *_: {"reason": reason})
    values = {"seed": 0, "data_seed": 0, "learning_rate": 1e-3}
    jobs = []
    for name, steps in (("short", 1), ("long", 200)):
        job = runs.Job(
            arm=name,
            seed=0,
            lr=1,
            purpose="report",
            out_dir=str(tmp_path / name),
            values=values | {"max_iters": steps},
            config_hash="c",
            code_hash="h",
            data="d",
            trainer=stub,
        )
        jobs.append(job)
    stop = SimpleNamespace(status=None)
    machine = SimpleNamespace(slots=[(None, 1)] * 2)
    ended = runs.run_local(jobs, SimpleNamespace(machine=machine), stop)
    job, row = next(ended)
    assert job.arm == "short" and row == {"reason": None}
    assert happens((tmp_path / "long" / "steps.txt").exists)
    if how == "stopped":
        stop.status = 143
        assert list(ended) == []
    else:
        ended.close()
    steps = steps_of(tmp_path / "long")
    assert (tmp_path / "long" / "latest").read_text() == steps[-1] and len(steps) < 200


@pytest.mark.skipif(sys.platform != "linux", reason="looks for orphans in /proc")
@pytest.mark.slow
def test_stopped_and_killed_it_goes_on_and_ends_alike(drive, data_dir, tmp_path, out, stub):
    """Ctrl-C, then kill -9, then to the end: the rows are those of a sweep that nobody disturbed,
    and no step is taken twice."""
    driver, disturbed = tmp_path / "driver.py", tmp_path / "disturbed"
    driver.write_text(DRIVER.format(root=str(ROOT), stub=stub))
    what = [ROPE, "--seeds=2"]
    command = [sys.executable, driver, *arguments(data_dir, disturbed, *what)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "STUB_SLEEP": "0.15"}
    for number, rows in ((signal.SIGINT, 1), (signal.SIGKILL, 2)):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen(command, env=environment, **pipes)
        has_rows = lambda: len(read_rows(disturbed / "rows.jsonl")) >= rows
        happens(lambda: has_rows() or process.poll() is not None)
        time.sleep(0.25)  # into the next runs
        assert process.poll() is None
        process.stdout.close()  # as of `2>&1 | tee log`, where Ctrl-C ends tee first
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else -9)
        no_orphans = lambda: not alive(disturbed)
        assert happens(no_orphans, 0 if number == signal.SIGINT else 10)
        ended = lambda folder: (folder / "steps.txt").exists() and len(steps_of(folder)) == 4
        assert len(rows_of(disturbed)) < 6  # the runs stopped with their driver
        assert not all(map(ended, (disturbed / "runs").iterdir()))
    with open(disturbed / "rows.jsonl", "a") as file:
        file.write('{"arm": "ro')  # a row that a power cut tore
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0 and "the table" in process.stdout
    assert drive(*what) == 0
    curves_of = lambda folder: {name: row["curve"] for name, row in rows_of(folder).items()}
    assert curves_of(disturbed) == curves_of(out) and len(rows_of(out)) == 6
    for row in rows_of(disturbed).values():
        assert row["status"] == "done" and steps_of(row) == ["1", "2", "3", "4"]


def test_workers_share_the_memory_and_the_kernels_of_their_driver(drive, out, monkeypatch):
    """It keeps no GPU's memory from a run. Autocast on a CPU sets the kernels of all threads."""
    measured, emptied = [], []

    def measure(*_):
        measured.append(1)
        time.sleep(0.1)
        assert len(measured) == 1
        return {"sample": measured.pop()}

    monkeypatch.setattr(runs, "measure_trained", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    assert drive(ROPE, "--seeds=2") == 0 and len(emptied) == len(rows_of(out)) == 6


def test_workers_share_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert runs.worker_slots(4, "cpu") == [(None, 2)] * 4
    assert runs.worker_slots(None, "cpu") == [(None, 8)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert runs.worker_slots(4, "cuda") == [("2", 2), ("5", 2)] * 2
    assert runs.worker_slots(None, "cuda:1") == [("5", 8)]


@pytest.mark.slow
def test_a_real_sweep(data_dir, out, monkeypatch):
    """Two arms, two seeds, trained by train.py, reported; and started again, which changes
    nothing."""
    monkeypatch.setattr(step_times, "TRIES", 1)  # no wait for a quiet machine
    length = ["--seeds=2", "--max_iters=12", "--eval_interval=6"]
    what = arguments(data_dir, out, ROPE, *length, "--prompt=the")
    assert ablate.main(what) == 0
    rows = rows_of(out)
    assert len(rows) == 6  # the control group of one arm with two seeds has four runs
    for row in rows.values():
        assert row["status"] == "done"
        assert row["final_val_loss"] < row["first_val_loss"]
    base, rope = rows["base", 0, 1, "report"], rows["rope", 0, 1, "report"]
    assert [point[0] for point in base["curve"]] == [0, 6, 12]
    assert base["sample"].startswith("the") and len(base["sample"]) == 203
    assert base["extrapolation"]["1"]["loss"] > 0
    assert "block_size" in base["extrapolation"]["2"]["why"]
    for entry in rope["extrapolation"].values():
        assert 0 < entry["low"] < entry["loss"] < entry["high"] and entry["window"]["loss"] > 0
    assert base["test_loss"] > 0 and base["final_report"] != base["final_tune"]
    finals = [base[f"final_{part}"] for part in ("val_loss", "tune", "report")]
    assert base["curve"][-1][1:] == finals
    assert len(base["blocks"]) > 1
    cost = {row["arm"]: row for row in read_rows(out / "costs.jsonl")}
    assert cost["base"]["milliseconds_per_step"]["median"] > 0
    assert cost["base"]["threads"] == 1
    assert (out / "report.md").exists()
    assert (out / "runs/base-s0-lr1/ckpt").exists()
    assert not (out / "runs/base-s1-lr1/ckpt").exists()
    before = (out / "rows.jsonl").read_text()
    assert ablate.main(what) == 0 and (out / "rows.jsonl").read_text() == before
