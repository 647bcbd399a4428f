"""What a difference is worth in tokens: read off a curve whose truth is known."""

import math

import numpy as np
import pytest

from bench.ablation import stats
from bench.ablation.worth import Curve, Worth, curve_from, margin_from
from helpers.sweeps import loss_of_tokens, make_sweep

MULTIPLES = (0.25, 0.5, 1, 2)


def curve_of(se=1e-6):
    return Curve([(k, loss_of_tokens(k), se, 3) for k in MULTIPLES])


@pytest.mark.parametrize("k", [0.3, 0.5, 0.7, 1, 1.4, 1.9])
def test_a_loss_is_worth_the_tokens_at_which_the_base_reaches_it(k):
    curve = curve_of()
    assert curve.loss_at(k) == pytest.approx(loss_of_tokens(k), abs=1e-3)
    worth = curve.worth(curve.loss_at(k), 1e-6, 8)
    assert (worth.k, worth.low, worth.high) == pytest.approx((k, k, k), rel=2e-3)


def test_the_curve_is_never_extrapolated():
    curve = curve_of()
    assert math.isnan(curve.loss_at(2.1)) and math.isnan(curve.loss_at(0.2))
    above = curve.worth(loss_of_tokens(2) - 0.1, 1e-6, 8)
    below = curve.worth(loss_of_tokens(0.25) + 0.1, 1e-6, 8)
    assert (above.k, below.k) == (math.inf, 0)
    assert (str(above), str(below)) == ("more than 2 ×", "less than 0.25 ×")
    wide = curve.worth(loss_of_tokens(1.8), 0.05, 8)
    assert wide.k == pytest.approx(1.8, abs=0.01) and wide.high == math.inf
    assert str(wide).startswith("1.8 × (0.") and str(wide).endswith("to more than 2)")


def test_the_interval_covers_the_truth_95_times_in_100():
    """It carries the errors of the arm and of all points of the curve."""
    random, covered, by_arm_alone = np.random.default_rng(0), 0, 0
    for _ in range(200):
        losses = {
            k: random.normal(loss_of_tokens(k), 0.007, 18 if k == 1 else 3) for k in MULTIPLES
        }
        arm = random.normal(loss_of_tokens(1.4), 0.007, 8)
        curve, se = curve_from(losses), arm.std(ddof=1) / math.sqrt(8)
        worth = curve.worth(arm.mean(), se, 8)
        covered += worth.low <= 1.4 <= worth.high
        exact = Curve([(*point[:2], 0.0, point[3]) for point in curve.points])
        alone = exact.worth(arm.mean(), se, 8)
        by_arm_alone += alone.low <= 1.4 <= alone.high
    assert 0.92 <= covered / 200 <= 0.99 and by_arm_alone < covered - 5


def test_the_worth_in_time_divides_by_the_ratio_of_steps_and_carries_its_error():
    curve = curve_of()
    exact = curve.worth(loss_of_tokens(1.4), 1e-6, 8, (1.25, 1.25, 1.25))
    loose = curve.worth(loss_of_tokens(1.4), 1e-6, 8, (1.25, 1.15, 1.36))
    assert exact.k == loose.k == pytest.approx(1.4 / 1.25, abs=5e-3)
    assert exact.high - exact.low < 0.01
    assert (loose.low, loose.high) == pytest.approx((1.4 / 1.36, 1.4 / 1.15), abs=0.02)
    above = curve.worth(loss_of_tokens(2) - 0.1, 1e-6, 8, (1.25, 1.2, 1.3))
    assert str(above) == "more than 1.6 ×"


def test_means_that_rise_with_the_tokens_do_not_break_the_curve():
    curve = Curve(
        [(0.25, 2.0, 0.01, 3), (0.5, 1.9, 0.01, 3), (1, 1.7, 0.01, 9), (2, 1.72, 0.01, 3)]
    )
    losses = [curve.loss_at(k) for k in (0.25, 0.4, 0.5, 0.8, 1, 1.5, 2)]
    assert losses == sorted(losses, reverse=True)
    assert 0.25 < curve.worth(1.8, 0.01, 8).k < 1


def test_the_margin_is_what_5_percent_of_the_tokens_are_worth():
    margin = margin_from(curve_of())
    truth = (loss_of_tokens(0.95) - loss_of_tokens(1.05)) / 2
    assert margin == pytest.approx(truth, rel=0.1)
    assert margin_from(Curve([(0.5, 2.0, 0, 3), (1, 1.9, 0, 3)])) > 0  # nothing above 1


def test_a_curve_needs_the_base_and_another_point():
    assert curve_from({1: [1.0, 2.0]}) is None and curve_from({0.5: [1.0], 2: [1.0]}) is None
    single = curve_from({0.5: [2.0], 1: [1.9]})
    worth = single.worth(1.95, 0.01, 8)
    assert 0.5 < worth.k < 1 and math.isnan(worth.low) and "(" not in str(worth)


def test_how_a_worth_is_written():
    assert str(Worth(1.4, 1.2, 1.7, 0.25, 2)) == "1.4 × (1.2 to 1.7)"
    assert str(Worth(0.3, 0.0, 0.5, 0.25, 2)) == "0.30 × (less than 0.25 to 0.50)"
    assert str(Worth(1.0, 0.97, 1.049, 0.5, 4)) == "1.0 × (0.97 to 1.0)"
    assert str(Worth(12.2, 9.96, math.inf, 0.5, 16)) == "12 × (10 to more than 16)"
    assert str(Worth(math.inf, 1.9, math.inf, 0.25, 2)) == "more than 2 × (1.9 to more than 2)"


def test_the_worths_of_a_sweep_are_those_of_its_planted_effects(tmp_path):
    effect = loss_of_tokens(1.5) - loss_of_tokens(1)
    effects = {"base": 0.0, "base-again": 0.0, "rope": effect, "gqa": -effect}
    sweep, rows, costs = make_sweep(tmp_path, effects=effects, noise=1e-4, diverged=(), stale=False)
    analysis = stats.analyse(sweep, stats.sort_rows(sweep, rows), costs)
    found = {verdict.arm: verdict for verdict in analysis.verdicts}
    assert found["rope"].worth.k == pytest.approx(1.5, abs=0.02)
    ratio = costs["rope"]["step_ratio"]["ratio"]
    assert found["rope"].worth_time.k == pytest.approx(1.5 / ratio, abs=0.02)
    assert found["gqa"].worth.k < 1 and found["base-again"].worth is None
    assert analysis.curve.points[2][0] == 1 and analysis.curve.points[2][3] == analysis.base_n

    unpriced = stats.analyse(sweep, stats.sort_rows(sweep, rows), {})
    assert unpriced.verdicts[0].worth and unpriced.verdicts[0].worth_time is None
    without = [row for row in rows if row["purpose"] != "curve"]
    assert stats.analyse(sweep, stats.sort_rows(sweep, without)).verdicts[0].worth is None


def test_the_margin_of_a_sweep_is_the_stored_one_or_the_curve_s(tmp_path):
    sweep, rows, _ = make_sweep(tmp_path, noise=1e-4)
    runs = stats.sort_rows(sweep, rows)
    stored = stats.analyse(sweep | {"margin": 0.03, "margin_source": "given"}, runs)
    assert (stored.margin, stored.margin_source) == (0.03, "given")
    late = stats.analyse(sweep | {"margin": None}, runs)
    assert late.margin == pytest.approx(0.0052, rel=0.1) and "after the runs" in late.margin_source
