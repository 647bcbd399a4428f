"""What a difference is worth in tokens: read off a curve whose truth is known."""

import math

import numpy as np
import pytest

from bench.ablation import plans, rows, verdicts
from bench.ablation.contrasts import pooled_variance
from bench.ablation.worth import Curve, curve_of
from helpers.sweeps import CALM, ROPE, judge, loss_of_tokens, make_sweep, reported

MULTIPLES = (0.25, 0.5, 1, 2)
# Its points have next to no noise.
EXACT = Curve({k: loss_of_tokens(k) + np.array([-1e-6, 0, 1e-6]) for k in MULTIPLES})


@pytest.mark.parametrize("k", [0.3, 0.5, 0.7, 1, 1.4, 1.9])
def test_a_loss_is_worth_the_tokens_at_which_the_base_reaches_it(k):
    assert EXACT.loss_at(k) == pytest.approx(loss_of_tokens(k), abs=1e-3)
    assert EXACT.worth(EXACT.loss_at(k), 1e-6, 8) == pytest.approx((k, k, k), rel=2e-3)


def test_the_curve_is_never_extrapolated():
    assert math.isnan(EXACT.loss_at(2.1)) and math.isnan(EXACT.loss_at(0.2))
    assert EXACT.worth(loss_of_tokens(2) - 0.1, 1e-6, 8)[0] == math.inf
    assert EXACT.worth(loss_of_tokens(0.25) + 0.1, 1e-6, 8)[0] == 0
    k, low, high = EXACT.worth(loss_of_tokens(1.8), 0.05, 8)
    assert k == pytest.approx(1.8, abs=0.01) and low < k < high == math.inf


def test_the_interval_covers_the_truth_95_times_in_100():
    """It carries the errors of the arm and of all points of the curve."""
    random, covered, by_arm_alone = np.random.default_rng(0), 0, 0
    for _ in range(200):
        counts = {k: 18 if k == 1 else 3 for k in MULTIPLES}
        losses = {k: random.normal(loss_of_tokens(k), 0.007, n) for k, n in counts.items()}
        arm = random.normal(loss_of_tokens(1.4), 0.007, 8)
        curve, se = Curve(losses), arm.std(ddof=1) / math.sqrt(8)
        _, low, high = curve.worth(arm.mean(), se, 8)
        covered += low <= 1.4 <= high
        curve.errors = 0 * curve.errors
        _, low, high = curve.worth(arm.mean(), se, 8)
        by_arm_alone += low <= 1.4 <= high
    assert 0.92 <= covered / 200 <= 0.99 and by_arm_alone < covered - 5


def test_the_worth_in_time_divides_by_the_ratio_of_steps_and_carries_its_error():
    exact = EXACT.worth(loss_of_tokens(1.4), 1e-6, 8, (1.25, 1.25, 1.25))
    loose = EXACT.worth(loss_of_tokens(1.4), 1e-6, 8, (1.25, 1.15, 1.36))
    assert exact[0] == loose[0] == pytest.approx(1.4 / 1.25, abs=5e-3)
    assert exact[2] - exact[1] < 0.01
    assert loose[1:] == pytest.approx((1.4 / 1.36, 1.4 / 1.15), abs=0.02)


def test_means_that_rise_with_the_tokens_do_not_break_the_curve():
    curve = Curve({0.25: [2.0], 0.5: [1.9], 1: [1.69, 1.71], 2: [1.72]})
    losses = [curve.loss_at(k) for k in (0.25, 0.4, 0.5, 0.8, 1, 1.5, 2)]
    assert losses == sorted(losses, reverse=True)
    assert 0.25 < curve.worth(1.8, 0.01, 8)[0] < 1


def test_the_margin_is_what_5_percent_of_the_tokens_are_worth():
    truth = (loss_of_tokens(0.95) - loss_of_tokens(1.05)) / 2
    assert EXACT.margin() == pytest.approx(truth, rel=0.1)
    assert Curve({0.5: [2.0], 1: [1.9]}).margin() > 0  # nothing above 1


def test_single_runs_give_no_interval_and_few_a_wide_one():
    k, low, _ = Curve({0.5: [2.0], 1: [1.9]}).worth(1.95, 0.01, 8)
    assert 0.5 < k < 1 and math.isnan(low)
    few, many = (np.ptp(np.log(EXACT.worth(loss_of_tokens(1), 0.004, n)[1:])) for n in (3, 1000))
    assert few / many == pytest.approx(4.30 / 1.96, rel=0.15)  # by t


def test_the_worths_of_a_sweep_are_those_of_its_planted_effects(tmp_path):
    effect = loss_of_tokens(1.5) - loss_of_tokens(1)
    effects = {"base": 0.0, "base-again": 0.0, "rope": effect, "gqa": -effect, "much": -0.3}
    sweep, lines, prices = make_sweep(tmp_path, effects=effects, noise=1e-4, **CALM)
    runs, plan = rows.load(tmp_path), plans.plan(tmp_path)
    frame = verdicts.judge(runs, plan)[0].set_index("name")
    rope, ratio = frame.loc["rope"], prices["rope"]["step_ratio"]["ratio"]
    assert rope.worth == pytest.approx(1.5, abs=0.02)
    assert rope.worth_time == pytest.approx(1.5 / ratio, abs=0.02)
    assert frame.worth["gqa"] < 1 and math.isnan(frame.worth["base-again"])
    assert frame.worth["much"] == math.inf
    assert curve_of(runs.assign(stuck=True)) is not None  # a base that never learns has one
    at_1 = curve_of(runs).means[2]
    assert at_1 == pytest.approx(verdicts.judge(runs, plan)[1].base_mean)

    unpriced = verdicts.judge(rows.table(lines, plan), plan)[0]
    assert unpriced.worth[0] == rope.worth and math.isnan(unpriced.worth_time[0])
    assert math.isnan(verdicts.judge(runs[runs.purpose != "curve"], plan)[0].worth[0])


def test_the_worths_of_a_screening_have_the_pooled_error(tmp_path):
    effects = ROPE | {"rope": -0.02}
    sweep, lines, _ = make_sweep(tmp_path, 3, effects, screening=True, **CALM)
    rope = judge(sweep, lines)[1]["rope"]
    variance, df = pooled_variance([reported(lines, arm) for arm in effects])
    curve = curve_of(rows.load(tmp_path))
    wanted = curve.worth(rope["val_loss_report"], math.sqrt(variance / 3), df + 1)
    assert rope["worth_low"] == pytest.approx(wanted[1])


def test_the_margin_of_a_sweep_is_the_stored_one_or_the_curve_s(tmp_path):
    sweep, *_ = make_sweep(tmp_path, noise=1e-4)
    runs = rows.load(tmp_path)
    stored = sweep | {"margin": 0.03, "margin_source": "given"}
    facts = verdicts.judge(runs, stored)[1]
    assert (facts.margin, facts.margin_source) == (0.03, "given")
    facts = verdicts.judge(runs, sweep | {"margin": None})[1]
    assert facts.margin == pytest.approx(0.0052, rel=0.1)
    assert "after the runs" in facts.margin_source
