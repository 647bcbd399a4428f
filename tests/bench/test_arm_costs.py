"""What the arms cost: their ratio to the base, a real run's steps, a machine that is not quiet."""

import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch

import train
from bench.ablation import step_times
from bench.ablation.rows import cost_of
from common import runtime
from helpers.ablation import arm
from helpers.runs import losses as logged
from helpers.variants import saved_bytes
from parts import costs as closed_form
from parts.architectures import configure, make

ARMS = arm(swiglu=dict(mlp="swiglu"), crash=dict(norm="rmsnorm"))
SECONDS = {"base": 0.04, "base again": 0.04, "swiglu": 0.03}  # of a step, made up


@pytest.fixture
def timed(planned, monkeypatch):
    """A function that times the arms with steps of made-up lengths, whose speed varies from round
    to round, and returns ({arm: row}, {arm: why it failed}). The arm `crash` fails, and every third
    step of `swiglu` is slow."""

    def step(probe):
        if probe not in made:
            made.append(probe)
        name = list(arms)[made.index(probe) % len(arms)]
        if name == "crash":
            raise RuntimeError("out of memory\nhere")
        count[name] = count.get(name, 0) + 1
        slow = 1.1 if name == "swiglu" and count[name] % 3 == 0 else 1.0
        return SECONDS[name] * (1 + 0.5 * np.sin(count[name])) * slow

    def times(again=1.0, **options):
        made.clear(), count.clear()
        monkeypatch.setitem(SECONDS, "base again", 0.04 * again)
        rows, failed = step_times.time_arms(arms, 1, 20, **options)
        return {row["arm"]: row for row in rows}, failed

    made, count = [], {}
    plan = planned(ARMS)
    arms = {name: plan.run_values(arm) for name, arm in plan.arms.items()}
    monkeypatch.setattr(step_times.Probe, "step", step)
    monkeypatch.setattr(step_times.OtherWork, "share", lambda work: 0.0)
    return times


def test_a_ratio_compares_an_arm_with_the_base_round_by_round(timed):
    rows, failed = timed()
    assert failed == {"crash": "out of memory here"} and rows["base"]["step_ratio"] is None
    ratio = rows["swiglu"]["step_ratio"]
    assert [ratio["low"], ratio["ratio"]] == pytest.approx([0.75] * 2) and ratio["high"] > 0.78
    assert rows["base again"]["step_ratio"]["ratio"] == 1
    assert rows["swiglu"]["milliseconds_per_step"]["median"] == pytest.approx(30, rel=0.2)


def test_memory_is_what_the_forward_pass_keeps(planned):
    """Four numbers per parameter, and what autograd keeps of the eager model, within 3 %."""
    plan = planned(ARMS, "--batch_size=16")
    values = plan.run_values(plan.arms["swiglu"])
    c = configure(values, as_variant=True)
    wanted = 16 * closed_form.parameters(c) + saved_bytes(make(c), 16, 16)
    probe = step_times.Probe(values)
    row = lambda probe: step_times.row_of("swiglu", values, probe, [1.0], None) | {"threads": 1}
    assert cost_of(row(probe), False)["memory_bytes"] == pytest.approx(wanted, rel=0.03)
    weight = weakref.ref(probe.run.model.wte.weight)
    del probe
    assert weight() is None  # nothing of the step holds the model
    half = step_times.Probe(values | {"dtype": "bfloat16"})  # whose states are float32 all the same
    keys_and_values = 2 * 2 * 32 * 4  # layers, width, bytes
    assert cost_of(row(half), False)["kv_bytes_per_token"] == keys_and_values


def test_an_arm_is_timed_by_steps_of_a_real_run(planned, out, tmp_path, monkeypatch):
    """The probe's losses are those that train.py logs for the same values: its data, its seeds, its
    learning rates."""
    plan = planned("--axis=norm", "--gradient_accumulation_steps=2", "--dropout=0.1")
    values = plan.run_values(plan.arms["base"]) | {"seed": 5, "data_seed": 7, "log_interval": 1}
    losses, train_step = [], train.train_step

    def step(run):
        losses.append(train_step(run)[0])
        return losses[-1], 0.0

    monkeypatch.setattr(train, "train_step", step)
    probe = step_times.Probe(values)
    assert probe.step() > 0
    run = tmp_path / "run"
    monkeypatch.setattr(train, "train_step", train_step)
    train.main([*(f"--{key}={value}" for key, value in values.items()), f"--out_dir={run}"])
    assert [loss for _, loss in logged(run)] == losses and not out.exists()


def test_the_machine_is_settled_once_by_the_whole_work_of_the_base(planned, monkeypatch):
    """All arms get what train.py would choose for the base; gradient accumulation counts."""
    rope = arm(rope=dict(position="rope", n_layer=4))

    def settled(*more):
        arms = planned(rope, "--match=none", *more).arms.values()
        return {(made.values["compile"], made.values["dtype"]) for made in arms}

    work = 6 * 27e3 * 4 * 16 * 4  # operations: parameters, batch, context, steps
    monkeypatch.setattr(runtime, "COMPILE_PAYS", 2 * work)
    monkeypatch.setattr(runtime, "BFLOAT16_PAYS", 2 * work)
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: name)
    accumulates = "--gradient_accumulation_steps=8"
    assert settled() == {(False, "float32")}
    assert settled(accumulates) == {(True, "bfloat16")}
    assert settled(accumulates, "--compile=False", "--dtype=float32") == {(False, "float32")}


def test_other_work_is_noticed_and_our_own_is_not(monkeypatch):
    """A busy process beside this one; then made-up clocks: all cores work for 1.5 cores' time, of
    which this process takes as much as it does."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        work = step_times.OtherWork()
        time.sleep(1.5)
        assert work.share() > 0.4 / len(step_times.cores())  # less than one core, if others compete
    finally:
        busy.kill()
        busy.wait()
    if step_times.busy_seconds() is None:
        pytest.skip("this system has no /proc/stat")
    monkeypatch.setattr(step_times, "cores", lambda: [0, 1])
    clock = lambda: 0.5 * time.perf_counter() + time.process_time()
    monkeypatch.setattr(step_times, "busy_seconds", clock)
    work = step_times.OtherWork()
    a = torch.ones(200, 200)
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        a @ a
    assert work.share() == pytest.approx(0.25, abs=0.02)


def test_busy_rounds_are_timed_again_and_decide_nothing_if_it_stays_busy(timed, monkeypatch):
    shares = iter([0.5, 0.0, 0.5, 0.5])
    monkeypatch.setattr(step_times, "wait_until_quiet", lambda *args: False)
    monkeypatch.setattr(step_times.OtherWork, "share", lambda work: next(shares))
    rows, _ = timed(tries=3)
    assert rows["swiglu"]["quiet"] and rows["swiglu"]["step_ratio"]
    rows, _ = timed(tries=2)
    assert all(row["step_ratio"] is None and not row["quiet"] for row in rows.values())
    assert rows["base"]["disturbed"] == "other work kept 50% of the cores busy"
    assert rows["base"]["milliseconds_per_step"]["median"] > 0  # for the predictions


def test_a_base_that_differs_from_itself_shows_a_disturbance(timed):
    rows, _ = timed(again=1.2)
    assert rows["swiglu"]["disturbed"] == "the base again took 1.20 of the base's time"
    assert not timed(again=0.8)[0]["swiglu"]["quiet"]
    assert timed(again=1.01)[0]["swiglu"]["quiet"]


def test_the_seconds_of_a_run_are_of_its_steps_and_evaluations():
    """Of 60 ms; three of 10 batches of 10 ms and 0.4 s, and 20 batches more at the end."""
    values = dict(max_iters=100, eval_interval=50, gradient_accumulation_steps=2)
    values |= dict(batch_size=2, block_size=10, eval_tokens=100)
    seconds = step_times.run_seconds({"milliseconds_per_step": {"median": 60.0}}, values, 400)
    assert seconds == pytest.approx(6 + 100 * 0.06 + 3 * (10 * 0.01 + 0.4) + 20 * 0.01)


def test_times_of_a_busy_machine_are_replaced_once_it_is_quiet(planned, out, quick, monkeypatch):
    plan = planned(ARMS)
    plan.open(step_times.time_sweep(plan))
    plan.lock.close()
    rows = (out / "costs.jsonl").read_text()
    assert not step_times.time_sweep(plan)  # nothing is timed twice
    (out / "costs.jsonl").write_text(rows.replace('"quiet": true', '"quiet": false'))
    monkeypatch.setattr(step_times, "wait_until_quiet", lambda *args: False)
    assert not step_times.time_sweep(plan)
    monkeypatch.setattr(step_times, "wait_until_quiet", lambda *args: True)
    assert {row["arm"] for row in step_times.time_sweep(plan)} == plan.arms.keys()
    for key in ('_per_token": ', '"threads": ', '"hardware": "'):  # other code, another machine
        (out / "costs.jsonl").write_text(rows.replace(key, f"{key}9"))
        assert len(step_times.time_sweep(plan)) == len(plan.arms)
