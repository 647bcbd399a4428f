"""Measuring in many settings: the order of the runs, and the worths."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.ablation import page_tables, page_worths
from bench.settings import plan as plans
from bench.settings import rates, run, setting, sweep, worths
from common.errors import UserError
from helpers.sweeps import cost_of, write_lines

STEPS = 40
TINY = dict(
    model="llama",
    n_layer=2,
    n_head=1,
    n_embd=32,
    block_size=32,
    batch_size=48,
    max_iters=STEPS,
    warmup_iters=4,
    learning_rate=8e-3,
    device="cpu",
    dtype="float32",
    compile=False,
)
PARTS = {
    "QK norm": {"put_in": {"qk_norm": "head"}, "take_out": {"qk_norm": "none"}},
    "Elsewhere": {"put_in": {"conv": 4}, "only": {"model": "gpt2"}},  # for other settings
}


def course_of(tmp_path, monkeypatch, loss, **keys):
    """A Course whose runs have the loss(job), with what it needs of data and code."""
    values = TINY | {"dataset": "plays_byte", "optimizer": "muon", "eval_tokens": 1000}
    facts = {"vocab_size": 65, "fingerprint": "data", "kind": "text"}
    stored = {"tokens": [1000, 10_000_000], "losses": [[3.0, 2.8, 2.5, 2.4, 2.4, 2.4]] * 2}
    monkeypatch.setattr(setting, "open_data", lambda base: (facts, None, stored))
    config = plans.SettingsConfig(out_dir=str(tmp_path), **keys)
    plan = plans.Plan(config, [], plans.parts_of(PARTS))
    machine = {"torch": "2.13.0", "hardware": "a CPU", "git_commit": "abc"}
    course = setting.Course(plan, plans.Setting("c01", values, False), machine)
    assert not course.is_admitted  # nobody has looked at it
    open_course(course)
    course.loss = loss
    return course


def open_course(course):
    course.check()
    for arm in course.arms.values():
        arm.code_hash = f"code of {arm.name}"
    course.recognise()
    course.next_jobs()


def run_all(course):
    """Run everything, as bench/settings/sweep.py does. Returns the jobs in their order."""
    done = []
    while True:
        jobs = course.next_jobs()
        if not jobs and course.needs_more_tokens:
            course.write()
            course.doublings += 1
            open_course(course)
            continue
        if not jobs:
            course.write()
            return done
        for job in jobs:
            loss = course.loss(job)
            row = {"status": "diverged", "reason": None}
            if math.isfinite(loss):  # the reported half would choose a lower rate
                reported = loss + 0.05 * math.log(job.values["learning_rate"])
                row |= {"val_loss": loss, rates.CHOOSING: loss, rates.REPORTED: reported}
                row["status"] = "done"
            course.keep_row(job, row)
            done.append(job)


def falling(job, best=0.18, worth=1.2):
    """A loss with a best rate, which falls with the tokens; QK norm is worth 1.2."""
    tokens = job.values["max_iters"] / STEPS
    if job.arm == "QK norm":
        tokens *= worth
    x = math.log(job.values["learning_rate"] / 8e-3) - best
    noise = 1e-4 * ((job.seed * 7919) % 13 - 6)
    return 1.5 + 0.5 * tokens**-0.5 + 0.2 * x**2 + noise


def test_the_runs_of_a_setting_and_the_worth_of_a_part(tmp_path, monkeypatch):
    course = course_of(tmp_path, monkeypatch, falling, passes=2)
    jobs = run_all(course)
    purposes = [job.purpose for job in jobs]
    assert purposes == ["rate"] * 5 + ["base"] * 4 + ["curve"] * 6 + ["arm"] * 3
    assert course.best_rate == pytest.approx(8e-3 * 1.2, rel=0.02)
    hundreds = {(job.purpose, job.values["data_seed"] // 100) for job in jobs}
    assert hundreds == {("rate", 0), ("base", 1), ("curve", 2), ("arm", 0)}  # seeds of their own
    assert len({(job.arm, job.seed, job.values["learning_rate"]) for job in jobs}) == len(jobs)
    shares = [job.values["warmup_iters"] / job.values["max_iters"] for job in jobs]
    assert shares == pytest.approx([0.1] * len(jobs), abs=0.01)

    older = cost_of("QK norm", 12, "a CPU")
    costs = [cost_of("QK norm", 6, "a CPU") | {"code_hash": "code of QK norm"}, older]
    costs.append(cost_of("base", 0, "a CPU") | {"code_hash": "code of base"})
    write_lines(tmp_path / "c01", costs, "costs.jsonl")
    (measured,) = worths.load(tmp_path)
    assert measured.admitted and measured.cost("QK norm", "step_ratio") == 1.25
    (worth,) = worths.worths_of(measured)
    assert worth.log_worth == pytest.approx(math.log(1.2), abs=0.02)
    assert worth.censored == 0 and 0 < worth.se < 0.02 and worth.runs == 3
    points = measured.points("QK norm", rates.REPORTED)
    choosing = measured.points("QK norm", rates.CHOOSING)  # this half decides which rate is best
    place = rates.best_place(choosing, 0.2, *worths.NEAR)
    wanted = rates.value_at(points, 0.2, place)
    given = dict.fromkeys((rates.CHOOSING, rates.REPORTED), 0.2)
    assert worths.best_of(measured, "QK norm", points, given) == wanted
    (cells,) = page_tables.plan_table(SimpleNamespace(planned=[measured])).to_dict("records")
    assert cells["loss of the base"] == f"{measured.facts['admission']['loss']:.3f}"
    row = page_worths.of_planned(measured, worth)
    assert list(row.values())[:5] == ["QK norm", "c01", 1, "llama", "plays"]
    wanted = [math.exp(worth.log_worth + z * worth.se) for z in (-1.96, 0, 1.96)]
    assert [row["low"], row["worth"], row["high"]] == pytest.approx(wanted)


def test_a_stopped_setting_goes_on_where_it_was(tmp_path, monkeypatch):
    course = course_of(tmp_path, monkeypatch, falling)
    first = course.next_jobs()
    for job in first[:3]:
        losses = dict.fromkeys(("val_loss", rates.CHOOSING, rates.REPORTED), falling(job))
        course.keep_row(job, losses | {"status": "done"})
    assert setting.stored_settings(tmp_path / "c01")["admission"] is None  # but it is there
    course.machine["torch"] = "2.14.0+cpu"
    with pytest.raises(UserError, match="of torch 2.13.0, and this is 2.14.0"):
        course.check()
    with open(tmp_path / "c01/rows.jsonl", "a") as file:
        file.write('{"arm": "base", "multiple": 1e999}\n{"arm": "ba')  # an odd line, a cut one
    again = course_of(tmp_path, monkeypatch, falling)
    assert [job.key for job in again.next_jobs()] == [job.key for job in first[3:]]
    assert len(run_all(again)) == 2 + 4 + 6 + 1
    row = vars(first[0]) | {"learning_rate": 0.1}
    assert setting.key_of(row | {"arm": "mine"}) != setting.key_of(row)  # although it is the same


@pytest.mark.parametrize("best", [3, 0.3])
def test_a_best_rate_at_an_end_is_sought_further(tmp_path, monkeypatch, best):
    course = course_of(tmp_path, monkeypatch, lambda job: falling(job, best=math.log(best)))
    jobs = run_all(course)
    assert sum(job.purpose == "rate" for job in jobs) == 7
    assert course.best_rate == pytest.approx(8e-3 * best, rel=0.02)


def test_a_base_that_has_not_learned_trains_longer(tmp_path, monkeypatch):
    def slow(job):
        return falling(job) + (0.9 if job.values["max_iters"] < 1.9 * STEPS else 0)

    course = course_of(tmp_path, monkeypatch, slow)
    run_all(course)
    stored = json.loads((tmp_path / "c01/settings.json").read_text())
    assert stored["doublings"] == 1 and stored["admission"]["admitted"]
    assert stored["base_values"]["max_iters"] == 2 * STEPS
    (measured,) = worths.load(tmp_path)
    assert len(measured.rows) == 5 + 4 + 6 + 1  # rows of the shorter length are left out
    edited = plans.Setting("c01", course.setting.values | {"n_layer": 3}, False)
    plan = plans.Plan(plans.SettingsConfig(out_dir=str(tmp_path)), [], [])
    assert setting.Course(plan, edited, {}).doublings == 0


def test_a_base_that_never_learns_is_not_admitted(tmp_path, monkeypatch):
    course = course_of(tmp_path, monkeypatch, lambda job: falling(job) + 2)
    jobs = run_all(course)
    stored = json.loads((tmp_path / "c01/settings.json").read_text())
    assert stored["doublings"] == setting.DOUBLINGS and not stored["admission"]["admitted"]
    assert not any(job.purpose == "arm" for job in jobs)
    assert worths.table(worths.load(tmp_path))[1] == []


def test_admission_wants_a_loss_that_falls_less_and_less():
    curve = {0.25: [2.6], 0.5: [2.3], 1: [2.1], 1.4: [2.05], 2: [2.0]}
    assert setting.admission(curve, 2.4)["admitted"]
    assert not setting.admission(curve, 2.1)["admitted"]
    assert not setting.admission(curve | {2: [1.8]}, 2.4)["admitted"]
    diverged = setting.admission(curve | {2: [math.inf]}, 2.4)  # json has no infinity
    assert diverged == {"admitted": False, "why": "a run of the base diverged at its best rate"}


def test_the_interval_of_a_worth_contains_it(monkeypatch):
    """In 95 of 100 settings: it carries the noise of the part, of the base, and of its curve."""
    random = np.random.default_rng(0)
    multiples = {"base x0.25": 0.25, "base x0.5": 0.5, "base x1.4": 1.4, "base x2": 2.0}
    facts = {"best_rate": 0.01, "arms": {"part": {"part": True, "taken_out": False}}}
    covered = []
    for _ in range(200):
        rows = []

        def add(arm, purpose, multiple, log_worth=0.0, rows=rows):
            loss = 2 - 0.3 * (math.log(multiple) + log_worth) + random.normal(0, 0.03)
            losses = {rates.CHOOSING: loss, rates.REPORTED: loss}
            row = {"arm": arm, "purpose": purpose, "multiple": multiple, "learning_rate": 0.01}
            rows.append(row | losses | {"status": "done"})

        for _ in range(4):
            add("base", "base", 1.0)
        for arm, multiple in multiples.items():
            for _ in range(2 if multiple < 1 else 1):
                add(arm, "curve", multiple)
        add("part", "arm", 1.0, log_worth=-0.4)
        (worth,) = worths.worths_of(worths.Measured("c01", facts, rows))
        covered.append(abs(worth.log_worth + 0.4) <= 1.96 * worth.se or worth.censored)
    assert 0.92 <= np.mean(covered) <= 0.985


@pytest.mark.parametrize("loss, censored", [(math.inf, -1), (5.0, -1), (1.0, 1)])
def test_a_worth_beyond_the_curve_is_censored(tmp_path, monkeypatch, loss, censored):
    def beyond(job):
        return loss if job.purpose == "arm" else falling(job)

    run_all(course_of(tmp_path, monkeypatch, beyond))
    (worth,) = worths.worths_of(worths.load(tmp_path)[0])
    assert worth.censored == censored
    assert worth.log_worth == pytest.approx(math.log(0.25 if censored < 0 else 2))
    measured = worths.load(tmp_path)[0]
    keys = page_worths.COSTS.values()
    measured.costs = {"base": dict.fromkeys(keys, 1.0), "QK norm": dict.fromkeys(keys, 1.25)}
    measured.facts["arms"]["QK norm"]["taken_out"] = True
    (taken_out,) = worths.worths_of(measured)
    assert (taken_out.censored, taken_out.log_worth) == (-censored, -worth.log_worth)
    assert page_worths.of_planned(measured, taken_out)["step_time"] == pytest.approx(1 / 1.25)


class Done:
    """A worker whose runs end at once, with the loss of the course."""

    def __init__(self):
        self.job = None
        self.process = SimpleNamespace(terminate=lambda: None)

    def start(self, job):
        self.job = job
        Path(job.out_dir).mkdir(parents=True)

    def result(self):
        job, self.job = self.job, None
        if Done.fails(job):
            return job, {"status": "failed", "reason": "no memory"}
        losses = dict.fromkeys(("val_loss", rates.CHOOSING, rates.REPORTED), falling(job))
        return job, losses | {"status": "done", "reason": None, "seconds": 1}


@pytest.mark.parametrize(
    "fails, admitted, left",
    [
        (lambda job: False, True, 0),
        (lambda job: job.purpose == "arm", True, 1),
        (lambda job: job.arm == "base x2", False, 1),
    ],
)
def test_a_run_that_fails_leaves_the_others(tmp_path, monkeypatch, fails, admitted, left):
    """The setting is written where its base is measured; the next command tries the run again."""
    monkeypatch.setattr(sweep, "Worker", Done)
    monkeypatch.setattr(Done, "fails", fails, raising=False)
    monkeypatch.setattr(sweep, "ended", lambda workers, seconds: [w for w in workers if w.job])
    monkeypatch.setattr(sweep, "recognise", lambda course, plan: open_course(course))
    course = course_of(tmp_path, monkeypatch, falling)
    plan = SimpleNamespace(config=plans.SettingsConfig(workers=2))
    assert sweep.measure(plan, [course], SimpleNamespace(status=None)) == left
    assert (
        len([*tmp_path.glob("*/runs/*")]) == left
    )  # a run that failed goes on from its checkpoint
    assert course.is_admitted == admitted
    assert [each.admitted for each in worths.load(tmp_path)] == [admitted]
    again = course_of(tmp_path, monkeypatch, falling)
    assert len(again.next_jobs()) == left


def test_arms_of_another_base_are_not_kept(tmp_path, monkeypatch):
    """settings.json keeps the arms that a command leaves out while their base is the same."""
    run_all(course_of(tmp_path, monkeypatch, falling))
    for hashed, kept in (("code of base", True), ("another", False)):
        course = course_of(tmp_path, monkeypatch, falling)
        course.parts = []
        course.check()
        for arm in course.arms.values():
            arm.config_hash = course.stored["arms"][arm.name]["config_hash"]
            arm.code_hash = hashed if arm.name == "base" else f"code of {arm.name}"
        course.write()
        assert ("QK norm" in setting.stored_settings(course.folder)["arms"]) == kept


def test_an_arm_of_new_code_takes_the_place_of_the_old_one_when_it_has_run(tmp_path, monkeypatch):
    """A command that is stopped before leaves the measured worth as it is."""
    run_all(course_of(tmp_path, monkeypatch, falling))
    course = course_of(tmp_path, monkeypatch, falling)
    before = course.stored["arms"]["QK norm"]
    course.arms["QK norm"].code_hash = "new code"
    course.recognise()
    (job,) = course.next_jobs()
    course.write()
    assert setting.stored_settings(course.folder)["arms"]["QK norm"] == before
    run_all(course)
    assert setting.stored_settings(course.folder)["arms"]["QK norm"]["code_hash"] == "new code"


def test_the_steps_of_a_part_are_timed_in_one_setting(tmp_path, monkeypatch, capsys):
    """In the first that is admitted, once for each code, and nowhere if another has timed it."""
    timed = []

    def time_arms(values, threads):
        timed.append(sorted(values))
        return [cost_of(name, 6, "a CPU") | {"quiet": True} for name in values], None

    waits = iter([False, True, True])
    monkeypatch.setattr(sweep, "wait_until_quiet", lambda seconds, show: next(waits))
    monkeypatch.setattr(sweep.step_times, "time_arms", time_arms)
    course = course_of(tmp_path, monkeypatch, falling)
    refused = SimpleNamespace(is_admitted=False)
    plan = SimpleNamespace(out=tmp_path)
    run_all(course)
    sweep.time_parts(plan, [refused])
    sweep.time_parts(plan, [refused, course])
    out = capsys.readouterr().out
    assert timed == [] and "waiting for a quiet machine" in out and "keeps this machine busy" in out
    sweep.time_parts(plan, [refused, course])
    sweep.time_parts(plan, [course])
    course.arms["QK norm"].code_hash = "changed"
    course.write()
    sweep.time_parts(plan, [course])
    assert timed == [["QK norm", "base"]] * 2 and next(waits, None) is None


def test_a_plan_tells_the_runs_that_are_left_of_parts_and_of_bases(tmp_path, monkeypatch, capsys):
    """Of a setting whose first pass is stored, of a new one, and of one that was stopped when its
    base had not learned."""
    timed_on = []  # so many threads

    def timed(step, run):
        timed_on.append(torch.get_num_threads())
        return 3.6

    monkeypatch.setattr(sweep, "start_run", lambda values: None)
    monkeypatch.setattr(sweep, "timed", timed)
    monkeypatch.setattr(sweep, "recognise", lambda course, plan: open_course(course))
    run_all(course_of(tmp_path / "a", monkeypatch, falling))
    stored = course_of(tmp_path / "a", monkeypatch, falling, passes=2)
    new = course_of(tmp_path / "b", monkeypatch, falling)
    stopped = course_of(tmp_path / "c", monkeypatch, falling)
    losses = {"status": "done", rates.CHOOSING: 2.0, rates.REPORTED: 2.0}
    while jobs := stopped.next_jobs():
        stopped.keep_row(jobs[0], losses | {"val_loss": 4.0})
    plan = SimpleNamespace(config=plans.SettingsConfig(workers=2))
    torch.set_num_threads(2)
    sweep.print_plan(plan, [stored, new, stopped])
    torch.set_num_threads(1)
    printed = capsys.readouterr().out
    rows = [["0", "2", "0.0"], ["15", "1", "0.3"], ["15", "1", "0.6"]]
    assert [line.split()[-3:] for line in printed.splitlines() if " muon " in line] == rows
    assert "c01: timing its step (2 of 3)" in printed and set(timed_on) == {1}
    assert "34 of 50 runs are left, about 0.9 hours, 2 at a time:\n4 are of parts" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_a_run_gives_the_numbers_of_train_py_also_interrupted(data_dir, tmp_path, monkeypatch):
    values = TINY | {"data_dir": str(data_dir), "dataset": "words", "batch_size": 4, "dropout": 0.1}
    result = run.run_once(values, f"{tmp_path}/once")
    assert result["status"] == "done" and not (tmp_path / "once").exists()  # too short to be saved
    argv = [f"--{key}={value}" for key, value in values.items()]
    rows = run.train.main([*argv, f"--out_dir={tmp_path}/out", "--eval_interval=20"]).rows
    bad = run.run_once(values | {"learning_rate": 1e4, "grad_clip": 0}, f"{tmp_path}/bad")
    assert bad["status"] == "diverged" and bad["reason"]

    steps = []
    train_step = run.train.train_step

    def interrupted(training):
        steps.append(training.step)
        if len(steps) == 13:
            raise KeyboardInterrupt
        train_step(training)

    monkeypatch.setattr(run.train, "train_step", interrupted)
    monkeypatch.setattr(run, "SAVED", 0)
    with pytest.raises(KeyboardInterrupt):
        run.run_once(values, f"{tmp_path}/part")
    assert run.run_once(values, f"{tmp_path}/part")["val_loss"] == result["val_loss"]
    assert steps == [*range(13), *range(12, STEPS)]
    columns = ("val_loss", rates.CHOOSING, rates.REPORTED)
    assert [result[column] for column in columns] == [rows[-1][column] for column in columns]


@pytest.mark.slow
def test_a_worker_outlives_a_run_that_fails_and_is_replaced_when_it_is_killed(data_dir):
    values = TINY | {"data_dir": str(data_dir), "dataset": "words", "batch_size": 4}
    worker = run.Worker()
    told = []
    for n_head, kill in ((3, False), (2, True), (2, False)):
        job = SimpleNamespace(values=values | {"n_head": n_head}, out_dir=str(data_dir / "run"))
        worker.start(job)
        if kill:
            worker.process.kill()
        assert run.ended([worker], seconds=120) == [worker]
        ended, result = worker.result()
        assert ended is job and worker.job is None
        told.append((result["status"], result["reason"]))
    worker.process.terminate()
    assert told[0][0] == "failed" and "n_head=3" in told[0][1]
    assert told[1:] == [("failed", "its process ended with status -9"), ("done", None)]
