"""What the arms cost: both forms, their ratio to the base, and a machine that is not quiet."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from bench.ablation import measure, quiet, sweep
from bench.ablation.settings import AblateConfig, variant_config
from common.configurator import build
from common.errors import Failure
from helpers.ablation import arguments, arm
from helpers.variants import saved_bytes
from parts import costs
from parts.architectures import make

ARMS = arm(swiglu=dict(mlp="swiglu"), crash=dict(norm="rmsnorm"))
# Seconds of a step, made up: GPT-2's GELU is slow only where it is not compiled.
SECONDS = {
    ("base", "eager"): 0.04,
    ("base", "compiled"): 0.02,
    ("base again", "eager"): 0.04,
    ("base again", "compiled"): 0.02,
    ("swiglu", "eager"): 0.03,
    ("swiglu", "compiled"): 0.025,
    ("crash", "eager"): 0.1,
}


@pytest.fixture
def timed(data_dir, tmp_path, monkeypatch):
    """A function that times the arms with steps of made-up lengths, whose speed varies from round
    to round, and returns ({arm: row}, {arm: why it failed}). Compiling `crash` fails."""

    def step(probe, form=None):
        name = next(name for name, made in probes.items() if made is probe)
        if (name, form) not in SECONDS:
            raise RuntimeError("cannot compile\nthis")
        count[name, form] = count.get((name, form), 0) + 1
        return SECONDS[name, form] * (1 + 0.5 * np.sin(count[name, form]))

    def times(again=1.0, **options):
        found = sweep.Sweep(arguments(data_dir, tmp_path / "out", ARMS, "--compile=False"), "")
        arms = {name: found.run_values(each) for name, each in found.arms.items() if not each.curve}
        monkeypatch.setitem(SECONDS, ("base again", "eager"), 0.04 * again)
        rows, failed = measure.arm_costs(arms, 1, {"hardware": "x"}, 20, **options)
        return {row["arm"]: row for row in rows}, failed

    probes, count, make = {}, {}, measure.Timings.__init__

    def init(timings, *args):
        make(timings, *args)
        timings.probes = probes

    monkeypatch.setattr(measure.Timings, "__init__", init)
    monkeypatch.setattr(measure.Probe, "step", step)
    monkeypatch.setattr(measure, "why_no_compiling", lambda device: "")
    monkeypatch.setattr(quiet.OtherWork, "share", lambda work: 0.0)
    return times


# ---------------------------------------------------------------- two forms


def test_a_ratio_compares_the_faster_form_of_each(timed):
    """Eager, swiglu takes 0.75 of the base's time: kernels. Each in its faster form: 1.25."""
    rows, failed = timed(both=True)
    assert not failed and rows["base"]["step_ratio"] is None
    found = rows["swiglu"]["step_ratio"]
    assert (found["form"], found["base_form"]) == ("compiled", "compiled")
    assert found["low"] <= found["ratio"] <= found["high"] and found["ratio"] == pytest.approx(1.25)
    assert rows["base again"]["step_ratio"]["ratio"] == 1
    forms = rows["swiglu"]["forms"]
    assert rows["swiglu"]["milliseconds_per_step"] == forms["eager"]["milliseconds_per_step"]
    assert forms["compiled"]["milliseconds_per_step"]["median"] == pytest.approx(25, rel=0.2)
    assert forms["compiled"]["tokens_per_second"] > forms["eager"]["tokens_per_second"]


def test_an_arm_that_cannot_be_compiled_has_its_eager_form(timed):
    rows, failed = timed(both=True)
    assert not failed and rows["crash"]["forms"]["compiled"] == {"why": "cannot compile this"}
    found = rows["crash"]["step_ratio"]
    assert (found["form"], found["base_form"]) == ("eager", "compiled")
    assert found["ratio"] == pytest.approx(5)
    assert measure.has_forms(rows["crash"], both=True)


def test_only_the_form_that_trains_is_timed_if_both_are_not_wanted(timed):
    rows, _ = timed()
    assert rows["swiglu"]["forms"]["compiled"] == {"why": measure.NOT_TIMED}
    assert rows["swiglu"]["step_ratio"]["ratio"] == pytest.approx(0.75)
    assert measure.has_forms(rows["swiglu"], False) and not measure.has_forms(rows["swiglu"], True)
    assert not measure.has_forms({"arm": "a row of an older version"}, False)


def test_both_forms_are_timed_unless_it_is_a_screening_or_a_dry_run():
    assert build(AblateConfig, {}).time_forms
    assert not build(AblateConfig, {"screening": True}).time_forms
    assert not build(AblateConfig, {"dry_run": True}).time_forms
    assert not build(AblateConfig, {"design": "factorial"}).time_forms
    assert build(AblateConfig, {"screening": True, "time_forms": True}).time_forms


def test_without_a_compiler_a_row_says_so(monkeypatch):
    assert measure.why_no_compiling("mps") == "eager is safer on Metal"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "needs a C++ compiler" in measure.why_no_compiling("cpu")
    assert measure.why_no_compiling("cuda") == ""


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_memory_is_what_the_forward_pass_keeps(data_dir, tmp_path, mlp):
    """Four numbers per parameter, and what autograd keeps of the eager model, within 3 %."""
    what = arguments(data_dir, tmp_path, arm(swiglu=dict(mlp="swiglu")), "--compile=False")
    found = sweep.Sweep([*what, "--batch_size=16"], "")
    values = found.run_values(found.arms["swiglu" if mlp == "swiglu" else "base"])
    probe = measure.Probe(values)
    probe.step()
    c = variant_config(values)
    wanted = 16 * costs.parameters(c) + saved_bytes(make(c), 16, 16)
    assert probe.held_bytes() == pytest.approx(wanted, rel=0.03)


@pytest.mark.slow
def test_both_forms_take_the_same_steps(data_dir, tmp_path, monkeypatch):
    """A compiled step, really compiled, continues where an eager one ended, and keeps about as many
    bytes."""
    found = sweep.Sweep(arguments(data_dir, tmp_path, arm(rope=dict(position="rope"))), "")
    probe, losses = measure.Probe(found.run_values(found.arms["base"])), []
    taken = measure.train.train_step

    def step(run):
        losses.append(taken(run)[0].item())

    monkeypatch.setattr(measure.train, "train_step", step)
    held = []
    for form in ("eager", "compiled", "eager"):
        probe.step(form)
        held.append(probe.held_bytes())
    again = measure.Probe(found.run_values(found.arms["base"]))
    for _ in range(3):
        again.step("eager")
    assert losses[:3] == pytest.approx(losses[3:], abs=1e-4)
    assert held[0] == held[2] == pytest.approx(held[1], rel=0.05)


# ---------------------------------------------------------------- a quiet machine


def test_other_work_is_noticed_and_our_own_is_not(monkeypatch):
    """A busy process beside this one; then made-up clocks: all cores work for 1.5 cores' time, of
    which this process takes as much as it does."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        work = quiet.OtherWork()
        time.sleep(1.5)
        assert work.share() > 0.4 / len(quiet.cores())  # less than one core, if others compete
    finally:
        busy.kill()
        busy.wait()
    if quiet.busy_seconds() is None:
        pytest.skip("this system has no /proc/stat")
    monkeypatch.setattr(quiet, "cores", lambda: [0, 1])
    clock = lambda: 0.5 * time.perf_counter() + time.process_time()  # noqa: E731
    monkeypatch.setattr(quiet, "busy_seconds", clock)
    work = quiet.OtherWork()
    a = torch.ones(200, 200)
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        a @ a
    assert work.share() == pytest.approx(0.25, abs=0.02)


def test_busy_rounds_are_timed_again(timed, monkeypatch):
    shares = iter([0.5, 0.0])
    monkeypatch.setattr(quiet, "wait_until_quiet", lambda patience: None)
    monkeypatch.setattr(quiet.OtherWork, "share", lambda work: next(shares))
    rows, _ = timed(tries=3)
    assert rows["swiglu"]["quiet"] and rows["swiglu"]["step_ratio"] and not list(shares)


def test_times_of_a_busy_machine_decide_nothing(timed, monkeypatch):
    monkeypatch.setattr(quiet, "wait_until_quiet", lambda patience: None)
    monkeypatch.setattr(quiet.OtherWork, "share", lambda work: 0.5)
    rows, _ = timed(tries=2)
    assert all(row["step_ratio"] is None and not row["quiet"] for row in rows.values())
    assert rows["base"]["disturbed"] == "other work kept 50% of the cores busy"
    assert rows["base"]["milliseconds_per_step"]["median"] > 0  # for the predictions


def test_a_base_that_differs_from_itself_shows_a_disturbance(timed):
    rows, _ = timed(again=1.2)
    assert not rows["swiglu"]["quiet"]
    assert rows["swiglu"]["disturbed"] == "the base again took 1.20 of the base's time, eager"
    assert timed(again=1.01)[0]["swiglu"]["quiet"]


def test_the_wait_for_a_quiet_machine_ends(monkeypatch):
    monkeypatch.setattr(quiet.OtherWork, "share", lambda work: 1.0)
    monkeypatch.setattr(quiet.time, "sleep", lambda seconds: None)
    began = time.perf_counter()
    quiet.wait_until_quiet(0.2)
    assert 0.2 <= time.perf_counter() - began < 2


def test_stored_times_of_a_busy_machine_are_replaced_once_it_is_quiet(
    data_dir, tmp_path, quick, monkeypatch
):
    found = sweep.Sweep(arguments(data_dir, tmp_path, ARMS, "--compile=False"), "")
    found.open(found.measure())
    found.lock.close()
    rows = (tmp_path / "costs.jsonl").read_text()
    assert not found.measure()  # nothing is timed twice
    (tmp_path / "costs.jsonl").write_text(rows.replace('"quiet": true', '"quiet": false'))
    monkeypatch.setattr(quiet, "is_quiet", lambda: False)
    assert not found.measure()
    monkeypatch.setattr(quiet, "is_quiet", lambda: True)
    assert {row["arm"] for row in found.measure()} == {"base", "base again", "swiglu", "crash"}


def test_arms_are_not_matched_in_time_on_a_busy_machine(data_dir, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(measure, "why_disturbed", lambda *args: "other work")
    found = sweep.Sweep(arguments(data_dir, tmp_path, ARMS, "--match=time"), "")
    with pytest.raises(Failure, match="cannot time the arms: other work .match=time.: try again"):
        found.measure()
    assert not (tmp_path / "costs.jsonl").exists()
