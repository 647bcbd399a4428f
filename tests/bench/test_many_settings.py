"""Measuring in many settings: the plan, the rates, the order of the runs, and the worths."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.ablation import page_worths
from bench.ablation.arms import base_model
from bench.ablation.checks import check_arm
from bench.settings import plan as plans
from bench.settings import rates, run, setting, sweep, worths
from common.errors import UserError

ANSWER = "config/answer/settings.py"
STEPS = 40
MLP = {"gpt2": {}, "llama": {"multiple_of": 8}}
ELSEWHERE = {"put_in": {"conv": 4}, "only": {"model": "gpt2"}}  # a part for other settings


@pytest.fixture(scope="module")
def answer():
    return plans.read([ANSWER], "")


def levels(each):
    """The levels of a setting's factors, -1 or 1, by their letters."""
    factors = each.factors
    high = {
        "A": factors["text"] == "python",
        "B": factors["tokens"] == "bpe1024",
        "C": factors["optimizer"] == "adamw",
        "D": factors["base"] == "gpt2",
        "E": factors["width"] == 128,
        "F": factors["layers"] == 5,
        "G": factors["length"] == 2.4,
        "H": factors["context"] == 256,
    }
    return {letter: 1 if is_high else -1 for letter, is_high in high.items()}


# ---------------------------------------------------------------- the plan


def test_the_plan_is_the_fraction_it_says(answer):
    cells = [levels(each) for each in answer.settings]
    for x in cells:
        assert x["E"] == x["B"] * x["C"] * x["D"]
        assert x["F"] == x["A"] * x["C"] * x["D"]
        assert x["G"] == x["A"] * x["B"] * x["C"]
        assert x["H"] == x["A"] * x["B"] * x["D"]
    assert len({tuple(x.values()) for x in cells}) == 16
    for one, other in itertools.combinations("ABCDEFGH", 2):
        assert sum(x[one] * x[other] for x in cells) == 0
    for letter in "ABCDEFGH":
        assert sum(x[letter] for x in cells[:4]) == 0


def test_a_cell_is_named_by_its_place_in_the_standard_order(answer):
    for each in answer.settings:
        x = levels(each)
        bits = [(x[letter] + 1) // 2 for letter in "ABCD"]
        number = 1 + 8 * bits[0] + 4 * bits[1] + 2 * bits[2] + bits[3]
        assert each.name == f"c{number:02d}"


def test_no_setting_of_the_test_is_in_the_plan(answer):
    test = plans.read([ANSWER, "--settings=held_out"], "").settings
    assert len(test) == 4 and all(each.held_out for each in test)
    planned = [each.factors for each in answer.settings]
    assert all(each.factors not in planned for each in test)


def test_batches_and_warmup_are_the_same_everywhere(answer):
    for each in answer.settings:
        values = each.values
        assert values["batch_size"] * values["block_size"] == 1536
        assert values["warmup_iters"] == values["max_iters"] // 10


def test_the_command_line_narrows_the_plan():
    assert [s.name for s in plans.read([ANSWER, "--settings=2"], "").settings] == ["c04", "c06"]
    named = plans.read([ANSWER, "--settings=h1,c16", "--arms=RoPE", "--passes=2"], "")
    assert [s.name for s in named.settings] == ["h1", "c16"]
    assert [part.name for part in named.parts] == ["RoPE"]
    assert named.config.passes == 2
    mine = plans.read([ANSWER, '--arms={"mine": {"qk_norm": "head"}}'], "")
    assert mine.parts[0].put_in == {"qk_norm": "head"}
    for wrong, fix in (("settings=x", "c04"), ("arms=rope", "mean RoPE"), ("pass=1", "--passes=1")):
        with pytest.raises(UserError, match=fix):
            plans.read([ANSWER, f"--{wrong}"], "")


def test_a_part_is_taken_out_of_a_base_that_has_it(answer):
    by_name = {part.name: part for part in answer.parts}
    for each in answer.settings:
        values = each.values
        is_llama = values["model"] == "llama"
        for name in ("RoPE", "SwiGLU", "RMSNorm", "No biases", "Untied head"):
            assert by_name[name].is_in(values) == is_llama, name
        for name in ("QK norm", "Value residual", "Convolution"):
            assert not by_name[name].is_in(values)
            assert by_name[name].arm(values).changes == by_name[name].put_in
    llama = {"model": "llama"}
    assert by_name["RoPE"].arm(llama).changes == {"position": "learned"}
    with pytest.raises(UserError):
        plans.Part("RoPE", {"position": "rope"}, {}).arm(llama)


def test_further_parts_run_only_when_they_are_named(answer):
    """Each fits the settings whose values it asks for, and changes what they compute."""
    names = list(answer.config.more_arms)
    assert len(answer.parts) == 8 and not {part.name for part in answer.parts} & {*names}
    named = plans.read([ANSWER, "--settings=c04,c13", "--arms=" + ",".join(names)], "")
    assert [part.name for part in named.parts] == names
    for each in named.settings:
        for part in named.parts:
            if part.fits(each.values):
                arm = part.arm(each.values)
                check_arm(arm, each.values)
                assert base_model(arm.values) != base_model(each.values)
    parts = {part.name: part for part in named.parts}
    for each in answer.settings:
        five = parts["All five together"].arm(each.values)
        check_arm(five, each.values)
        other = {"gpt2": "llama", "llama": "gpt2"}[each.values["model"]]
        assert base_model(five.values) == base_model(each.values | {"model": other} | MLP[other])
        heads = parts["Wide heads"].arm(each.values).changes["n_head"]
        assert each.values["n_embd"] // heads == 64
        window = parts["Window"].arm(each.values).changes["window"]
        assert window == each.values["block_size"] // 4
        assert parts["Half RoPE"].fits(each.values) == (each.values["model"] == "llama")


def test_all_missing_datasets_are_named_at_once(tmp_path, monkeypatch):
    plan = plans.read([ANSWER, "--settings=c04,c13"], "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        sweep.check_datasets(plan)
    assert "prepare.py $name" in str(caught.value)
    assert "plays_byte" in str(caught.value) and "python_bpe1024" in str(caught.value)


# ---------------------------------------------------------------- rates


def quadratic(places, level, best, curve):
    return [(x, level + curve * (x - best) ** 2) for x in places]


def test_the_place_and_the_value_of_the_best_rate():
    places = [math.log(multiple) for multiple in (0.7, 1, 1.4)]
    curves = [quadratic(places, 2.0, 0.1, 0.3), quadratic(places, 2.1, -0.2, 0.3)]
    curve = rates.curvature(curves)
    assert curve == pytest.approx(0.3)
    for points, level, best in zip(curves, (2.0, 2.1), (0.1, -0.2), strict=True):
        place = rates.best_place(points, curve, *worths.NEAR)
        assert place == pytest.approx(best)
        loss, share = rates.value_at(points, curve, place)
        assert loss == pytest.approx(level)
        assert 1 / 3 <= share < 1
        assert rates.residuals(points, curve)[0] == pytest.approx(0, abs=1e-12)


def test_rates_from_a_diverged_run_on_are_no_candidates():
    points = [*quadratic([-0.35, 0.0], 2.0, 0.5, 0.3), (0.35, math.inf), (0.7, 1.0)]
    assert rates.finite(points) == points[:2]
    assert rates.best_place(points, 0.3, -0.35, 0.35) == 0.0  # not beyond what has trained
    assert rates.best_place([(0.0, math.inf)], 0.3, -0.35, 0.35) is None


def test_a_curve_that_bends_the_wrong_way_has_no_curvature():
    places = [-0.35, 0.0, 0.35]
    assert rates.curvature([quadratic(places, 2.0, 0.0, -0.3)]) is None
    assert rates.best_place([(-0.35, 2.2), (0.0, 2.0), (0.35, 2.1)], None, -0.35, 0.35) == 0.0


def test_the_bias_of_a_steep_left_side_is_small():
    """The loss rises by 0.6 per squared unit below the best rate and by 0.3 above it. The best
    rates of the arms lie up to 0.3 away from the base's, whose quadratic is the same."""
    rng = np.random.default_rng(0)
    places = [math.log(multiple) for multiple in (0.7, 1, 1.4)]

    def loss(x, best):
        return 0.6 * (x - best) ** 2 if x < best else 0.3 * (x - best) ** 2

    errors = []
    for _ in range(200):
        bests = rng.uniform(-0.3, 0.3, 8)
        halves = []
        for _ in range(2):  # of the validation text: the runs' noise is the same in both
            halves.append([[(x, loss(x, best)) for x in places] for best in bests])
        noise = rng.normal(0, 0.005, (8, 3))
        for half in halves:
            for points, row in zip(half, noise, strict=True):
                points[:] = [(x, y + e) for (x, y), e in zip(points, row, strict=True)]
        curve = rates.curvature(halves[0])
        for choosing, reported in zip(*halves, strict=True):
            place = rates.best_place(choosing, curve, *worths.NEAR)
            errors.append(rates.value_at(reported, curve, place)[0])
    assert abs(np.mean(errors)) < 0.005  # less than the noise of one run


# ---------------------------------------------------------------- the order of the runs


def course_of(tmp_path, monkeypatch, loss, **keys):
    """A Course whose runs have the loss(job), with what it needs of data and code."""
    values = dict(
        dataset="plays_byte",
        optimizer="muon",
        model="llama",
        n_embd=32,
        n_head=1,
        n_layer=2,
        block_size=32,
        batch_size=48,
        max_iters=STEPS,
        warmup_iters=4,
        learning_rate=8e-3,
        eval_tokens=1000,
        device="cpu",
        dtype="float32",
        compile=False,
    )
    facts = {"vocab_size": 65, "fingerprint": "data", "kind": "text"}
    stored = {"tokens": [1000, 10_000_000], "losses": [[3.0, 2.8, 2.5, 2.4, 2.4, 2.4]] * 2}
    monkeypatch.setattr(setting, "open_data", lambda base: (facts, None, stored))
    config = plans.SettingsConfig(out_dir=str(tmp_path), **keys)
    parts = plans.parts_of({"QK norm": {"qk_norm": "head"}, "Elsewhere": ELSEWHERE})
    plan = plans.Plan(config, [], parts, [])
    machine = {"torch": "2.13.0", "hardware": "a CPU", "git_commit": "abc"}
    course = setting.Course(plan, plans.Setting("c01", values, False), machine)
    open_course(course)
    course.loss = loss
    return course


def open_course(course):
    course.check()

    def set_hashes(arms, data):
        for arm in arms.values():
            arm.code_hash = f"code of {arm.name}"

    course.recognise(set_hashes)
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
            losses = dict.fromkeys(("val_loss", rates.CHOOSING, rates.REPORTED), course.loss(job))
            status = "diverged" if math.isinf(course.loss(job)) else "done"
            if status == "diverged":
                losses = {}
            course.keep_row(job, losses | {"status": status, "reason": None})
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
    assert len({(job.arm, job.seed, job.values["learning_rate"]) for job in jobs}) == len(jobs)
    shares = [job.values["warmup_iters"] / job.values["max_iters"] for job in jobs]
    assert shares == pytest.approx([0.1] * len(jobs), abs=0.01)

    (measured,) = worths.load(tmp_path)
    assert measured.admitted
    (worth,) = worths.worths_of(measured)
    assert worth.log_worth == pytest.approx(math.log(1.2), abs=0.02)
    assert worth.censored == 0 and 0 < worth.se < 0.02 and worth.runs == 3
    row = page_worths.of_planned(measured, worth)
    assert list(row.values())[:5] == ["QK norm", "c01", 1, "llama", "plays"]
    assert row["low"] < row["worth"] < row["high"] and row["worth"] == pytest.approx(1.2, rel=0.02)


def test_a_stopped_setting_goes_on_where_it_was(tmp_path, monkeypatch):
    course = course_of(tmp_path, monkeypatch, falling)
    first = course.next_jobs()
    for job in first[:3]:
        course.keep_row(job, {"status": "done", "val_loss": falling(job)} | halves(job))
    with open(tmp_path / "c01/rows.jsonl", "a") as file:
        file.write('{"arm": "base", "multiple": 1e999}\n{"arm": "ba')  # an odd line, a cut one
    again = course_of(tmp_path, monkeypatch, falling)
    assert [job.key for job in again.next_jobs()] == [job.key for job in first[3:]]
    assert len(run_all(again)) == 2 + 4 + 6 + 1


def halves(job):
    return dict.fromkeys((rates.CHOOSING, rates.REPORTED), falling(job))


def test_a_best_rate_at_an_end_is_sought_further(tmp_path, monkeypatch):
    course = course_of(tmp_path, monkeypatch, lambda job: falling(job, best=math.log(3)))
    jobs = run_all(course)
    assert sum(job.purpose == "rate" for job in jobs) == 7
    assert course.best_rate == pytest.approx(8e-3 * 3, rel=0.02)


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
    measured.facts["arms"]["QK norm"]["taken_out"] = True
    (taken_out,) = worths.worths_of(measured)
    assert (taken_out.censored, taken_out.log_worth) == (-censored, -worth.log_worth)


def test_a_plan_tells_the_runs_that_are_left_of_parts_and_of_bases(tmp_path, monkeypatch, capsys):
    """Of a setting whose first pass is stored, of a new one, and of one that was stopped when its
    base had not learned."""
    timed_on = []  # so many threads

    def step():
        timed_on.append(torch.get_num_threads())
        return 3.6

    monkeypatch.setattr(sweep, "Probe", lambda values: SimpleNamespace(step=step))
    monkeypatch.setattr(sweep, "recognise", lambda course, plan: open_course(course))
    run_all(course_of(tmp_path / "a", monkeypatch, falling))
    stored = course_of(tmp_path / "a", monkeypatch, falling, passes=2)
    new = course_of(tmp_path / "b", monkeypatch, falling)
    stopped = course_of(tmp_path / "c", monkeypatch, falling)
    while jobs := stopped.next_jobs():
        stopped.keep_row(jobs[0], {"status": "done", "val_loss": 4.0} | halves(jobs[0]))
    plan = SimpleNamespace(config=plans.SettingsConfig(workers=2))
    torch.set_num_threads(2)
    sweep.print_plan(plan, [stored, new, stopped])
    torch.set_num_threads(1)
    printed = capsys.readouterr().out
    assert [line.split()[-3:] for line in printed.splitlines() if " muon " in line] == [
        ["0", "2", "0.0"],
        ["15", "1", "0.3"],
        ["15", "1", "0.6"],
    ]
    assert "c01: timing its step (2 of 3)" in printed and set(timed_on) == {1}
    assert "34 of 50 runs are left, about 0.9 hours, 2 at a time:\n4 of parts, and 30 of" in printed
    assert max(map(len, printed.splitlines())) <= 80


# ---------------------------------------------------------------- one run


def test_a_run_gives_the_numbers_of_train_py(data_dir, tmp_path):
    import train

    values = dict(
        data_dir=str(data_dir),
        dataset="words",
        model="llama",
        n_layer=1,
        n_head=1,
        n_embd=16,
        block_size=32,
        batch_size=4,
        max_iters=12,
        warmup_iters=1,
        learning_rate=1e-2,
        seed=3,
        device="cpu",
        dtype="float32",
        compile=False,
    )
    result = run.run_once(values)
    argv = [f"--{key}={value}" for key, value in values.items()]
    rows = train.main([*argv, f"--out_dir={tmp_path}/out", "--eval_interval=12"]).rows
    for column in ("val_loss", rates.CHOOSING, rates.REPORTED):
        assert result[column] == rows[-1][column]
    assert result["status"] == "done" and 0 < result["step_cpu_seconds"] <= result["cpu_seconds"]
    diverged = run.run_once(values | {"learning_rate": 1e4, "grad_clip": 0})
    assert diverged["status"] == "diverged" and diverged["reason"]
