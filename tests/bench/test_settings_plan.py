"""Measuring in many settings: the plan and the rates."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from bench.ablation.checks import check_arm
from bench.settings import plan as plans
from bench.settings import rates, worths
from common.errors import UserError
from parts.architectures import configure

ANSWER = "config/answer/settings.py"
MLP = {"gpt2": {}, "llama": {"multiple_of": 8}}


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
    for x, each in zip(cells, answer.settings, strict=True):  # named by its place in the order
        place = 1 + sum(bit for key, bit in zip("ABCD", (8, 4, 2, 1), strict=True) if x[key] > 0)
        assert each.name == f"c{place:02d}"


def test_no_setting_of_the_test_is_in_the_plan(answer):
    test = plans.read([ANSWER, "--settings=held_out"], "").settings
    assert len(test) == 4 and all(each.held_out for each in test)
    planned = [each.factors for each in answer.settings]
    assert all(each.factors not in planned for each in test)


def test_the_command_line_narrows_the_plan(answer, tmp_path, monkeypatch):
    assert [s.name for s in plans.read([ANSWER, "--settings=2"], "").settings] == ["c04", "c06"]
    named = plans.read([ANSWER, "--settings=h1,c16", "--arms=RoPE", "--passes=2"], "")
    assert [s.name for s in named.settings] == ["h1", "c16"]
    assert [part.name for part in named.parts] == ["RoPE"]
    assert named.config.passes == 2
    mine = plans.read([ANSWER, '--arms={"mine": {"qk_norm": "head"}}'], "")
    assert mine.parts[0].put_in == {"qk_norm": "head"}
    twice = plans.read([ANSWER, "--settings=c04,c04", "--arms=RoPE,RoPE"], "")
    assert len(twice.settings) == len(twice.parts) == 1
    nested = 'arms={"mine": {"put_in": "swiglu"}}'
    wrong = {
        "settings=x": "c04",
        "arms=rope": "mean RoPE",
        'arms={"RoPE": {"position": "alibi"}}': "choose a new name",
        'arms={"mine": {"put_in": {"conv": 4}, "only": {"modell": "gpt2"}}}': "choose others",
        "pass=1": "passes",
        'arms={"base x2": {"conv": 4}}': "its curve has this name",
        nested: "put_in",
    }
    for words, fix in wrong.items():
        with pytest.raises(UserError, match=fix):
            plans.read([ANSWER, f"--{words}"], "")
    wrong = {
        'settings = {"a": 1}; arms = "RoPE"': "type --arms",
        'settings = {"a": 1}': "setting a",
        'settings = {"a/b": {}}': "cannot name a folder",
        "settings = {1: {}}": "cannot name a folder",
        "settings = {}": "no settings",
    }
    for line, fix in wrong.items():
        (tmp_path / "wrong.py").write_text(line)
        with pytest.raises(UserError, match=fix):
            plans.read([str(tmp_path / "wrong.py")], "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plans.read([ANSWER, "--out_dir=~/x"], "").out == tmp_path / "x"
    incomplete = dict(answer.settings[0].values)
    del incomplete["warmup_iters"]
    with pytest.raises(UserError, match="no warmup_iters .setting c04"):
        plans.check_values(incomplete, "c04")
    doubled = answer.settings[0].values | {"gradient_accumulation_steps": 2}
    assert plans.tokens_of(doubled) == 2 * plans.tokens_of(answer.settings[0].values)


def test_a_part_is_taken_out_of_a_base_that_has_it(answer):
    by_name = {part.name: part for part in answer.parts}
    for each in answer.settings:
        is_llama = each.values["model"] == "llama"
        for name in ("RoPE", "SwiGLU", "RMSNorm", "No biases", "Untied head"):
            assert by_name[name].is_in(each.values) == is_llama, name
        for name in ("QK norm", "Value residual", "Convolution"):
            assert not by_name[name].is_in(each.values)
            assert by_name[name].arm(each.values).changes == by_name[name].put_in
    llama = {"model": "llama"}
    assert by_name["RoPE"].arm(llama).changes == {"position": "learned"}
    with pytest.raises(UserError):
        plans.Part("RoPE", {"position": "rope"}, {}).arm(llama)


def variant(values):
    return configure(values, as_variant=True)


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
                assert variant(arm.values) != variant(each.values)
    parts = {part.name: part for part in named.parts}
    for each in answer.settings:
        five = parts["All five together"].arm(each.values)
        check_arm(five, each.values)
        other = {"gpt2": "llama", "llama": "gpt2"}[each.values["model"]]
        assert variant(five.values) == variant(each.values | {"model": other} | MLP[other])
        heads = parts["Wide heads"].arm(each.values).changes["n_head"]
        assert each.values["n_embd"] // heads == 64
        window = parts["Window"].arm(each.values).changes["window"]
        assert window == each.values["block_size"] // 4
        assert parts["Half RoPE"].fits(each.values) == (each.values["model"] == "llama")


def quadratic(places, level, best, curve):
    return [(x, level + curve * (x - best) ** 2) for x in places]


def test_the_place_and_the_value_of_the_best_rate():
    places = [math.log(multiple) for multiple in (0.7, 1, 1.4)]
    curves = [quadratic(places, 2.0, 0.1, 0.3), quadratic(places, 2.1, -0.2, 0.3)]
    curve = rates.common_curvature(curves)
    assert curve == pytest.approx(0.3)
    for points, level, best in zip(curves, (2.0, 2.1), (0.1, -0.2), strict=True):
        place = rates.best_place(points, curve, *worths.NEAR)
        assert place == pytest.approx(best)
        loss, share = rates.value_at(points, curve, place)
        assert loss == pytest.approx(level)
        at, line = np.array([1, place]), np.stack([np.ones(3), places], 1)
        assert share == pytest.approx(at @ np.linalg.inv(line.T @ line) @ at)
        assert rates.residuals(points, curve) == pytest.approx((0, 3 - 2), abs=1e-12)


def test_rates_from_a_diverged_run_on_are_no_candidates():
    points = [*quadratic([-0.35, 0.0], 2.0, 0.5, 0.3), (0.35, math.inf), (0.7, 1.0)]
    assert rates.before_divergence(points) == points[:2]
    assert rates.best_place(points, 0.3, -0.35, 0.35) == 0.0  # not beyond what has trained
    assert rates.best_place(quadratic([0.0, 0.7], 2.0, -0.5, 0.3), 0.3, -0.35, 0.35) == 0.0
    assert rates.best_place([(0.0, math.inf)], 0.3, -0.35, 0.35) is None


def test_a_curve_that_bends_the_wrong_way_has_no_curvature():
    places = [-0.35, 0.0, 0.35]
    assert rates.common_curvature([quadratic(places, 2.0, 0.0, -0.3)]) is None
    points = [(-0.35, 2.2), (0.0, 2.0), (0.35, 2.4)]
    place = rates.best_place(points, None, -0.35, 0.35)
    assert place == 0.0
    # The least of three losses that differ by noise alone would be too low.
    assert rates.value_at(points, None, place) == pytest.approx((2.2, 1 / 3))
    assert rates.residuals(points, None) == pytest.approx((0.08, 2))


def test_the_curvature_costs_the_noise_a_degree_of_freedom():
    points = [(-0.35, 2.1), (0.0, 2.0), (0.35, 2.2)]
    squares, degrees = rates.residuals(points, 0.2)
    equal = {"equal": [(0.0, 1.0)] * 11}  # ten degrees of freedom more
    noise = worths.noise_of(worths.Measured("c01", {}, []), points, equal, 0.2)
    wider = stats.t.ppf(0.975, degrees + 9) / 1.96
    assert noise == pytest.approx(wider * math.sqrt(squares / (degrees + 9)), rel=1e-4)
