"""The runs of a sweep and their order: learning rates, the curve of tokens, the margin, and the
planned seeds. The sweeps train with a stub of train.py."""

import math
from collections import Counter

import pytest

from bench.ablation import plans, schedule
from bench.ablation import rows as frames
from common.errors import UserError
from helpers.ablation import arm, rows_of
from training.run_folder import read_rows

ROPE = arm(rope=dict(position="rope"))


def test_the_base_chooses_its_rate_like_an_arm(drive, out, monkeypatch):
    """It was given half its best rate. Its copy and its curve take the rate that it chooses. A grid
    is extended twice at most, on seeds that are not reported, and not beyond the best rate."""
    monkeypatch.setattr(schedule, "TUNE_SEEDS", 2)
    grid = ["--lr_grid=[0.5,1]", "--learning_rate=5e-4", "--min_lr=5e-5", "--curve=[0.5]"]
    assert drive(ROPE, "--seeds=2", *grid) == 0
    plan, runs = plans.plan(out), frames.load(out)
    assert plan["chosen_lr"] == {"base": 2, "rope": 4, "base again": 2}
    tuned = runs[runs.purpose == "tune"]
    assert set(tuned.seed) == {1000, 1001}
    for name in ("base", "rope"):
        assert set(tuned.rate[tuned.arm == name]) == {0.5, 1, 2, 4}
    assert set(runs.rate[runs.purpose == "curve"]) == {2}
    reported = runs[runs.purpose == "report"]
    assert dict(Counter(reported.arm)) == {"base": 2, "rope": 2, "base again": 2}
    command = reported.command[reported.arm == "rope"].iloc[0]
    assert "--learning_rate=0.002 " in command and "--min_lr=0.0002 " in command
    assert set(runs.arm[runs.control]) == {"base", "base again"}
    assert plans.judged_arms(plan) == ["rope"] and "before the arms" in plan["margin_source"]


@pytest.mark.parametrize(
    "losses, chosen",
    [
        ({1: [2.0, 2.01, 2.02], 2: [1.99, 1.994, 2.004]}, 2),
        ({0.5: [1.0, math.nan], 1: [2.0, 2.01], 2: [1.9, 1.91]}, 2),
        ({0.5: [2.5, 2.6], 1: [2.0, math.inf], 2: [2.4, math.inf]}, 0.5),
        ({1: [math.inf] * 2, 2: [math.inf] * 2}, 1),
        ({1: [math.nan] * 2}, 1),
        ({2: [2.0], 1: [2.0], 4: [2.0]}, 1),  # of equal ones the lowest
    ],
)
def test_the_rate_with_the_least_mean_loss_is_chosen(losses, chosen):
    assert schedule.chosen_rate(losses) == chosen


def test_the_margin_is_fixed_before_the_arms_are_reported(drive, out):
    """By the curve and three runs of the base; it does not change with runs that come later. The
    runs to report go seed by seed over all arms."""
    what = [ROPE, "--curve=[0.5,2]", "--workers=1"]
    assert drive(*what, "--seeds=2") == 0
    rows = read_rows(out / "rows.jsonl")
    planned = {"base": 2, "base again": 2, "rope": 2, "base x0.5": 3, "base x2": 3}
    assert Counter(row["arm"] for row in rows) == planned
    last = [(row["arm"], row["seed"]) for row in rows[-4:]]
    assert last == [("rope", 0), ("base again", 0), ("rope", 1), ("base again", 1)]
    purposes = {row["arm"]: row["purpose"] for row in rows}
    assert purposes["base x2"] == "curve" and purposes["base"] == "report"
    assert {row["curve"][-1][0] for row in rows if row["arm"] == "base x2"} == {8}
    plan = plans.plan(out)
    assert plan["margin"] > 0 and "before the arms" in plan["margin_source"]
    assert plan["arms"]["base x0.5"]["curve"] == 0.5
    assert drive(*what, "--seeds=2") == 0 and plans.plan(out)["margin"] == plan["margin"]
    with pytest.raises(UserError, match=rf"margin={plan['margin']} \(asked: margin=0.5\)"):
        drive(*what, "--seeds=2", "--margin=0.5")


def test_a_margin_that_was_given_stays_and_is_in_the_command_of_the_report(drive, out):
    """Another one, once an arm was seen, would choose what is a tie: also with other arms."""
    assert drive(ROPE, "--seeds=2", "--margin=0.5") == 0
    assert drive(ROPE, "--seeds=2") == 0
    plan = plans.plan(out)
    assert (plan["margin"], plan["margin_source"]) == (0.5, "given")
    assert plan["command"].endswith(" --margin=0.5")
    with pytest.raises(UserError, match=r"margin=0.5 \(asked: margin=0.1\)"):
        drive(arm(relu=dict(mlp="relu")), "--seeds=2", "--margin=0.1")


def test_a_sweep_keeps_the_seeds_that_it_planned_and_fixes_no_margin_later(drive, out, planned):
    assert drive(ROPE, "--seeds=2", "--first_seed=5") == 0
    assert {name[1] for name in rows_of(out)} == {5, 6}
    jobs = schedule.report_jobs(planned(ROPE, "--seeds=2", "--first_seed=5"))
    assert {job.number for job in jobs} == {0, 1}
    with pytest.raises(UserError, match=r"asked: seeds=3\).*--first_seed=7"):
        drive(ROPE, "--seeds=3", "--first_seed=5")
    with pytest.raises(UserError, match=r"first_seed=5 \(asked: first_seed=4\)"):
        drive(ROPE, "--seeds=2", "--first_seed=4")
    with pytest.raises(UserError, match=r"first_seed=5 \(asked: controls=9\)"):
        drive(ROPE, "--seeds=2", "--first_seed=5", "--controls=9")
    for arms in (ROPE, arm(relu=dict(mlp="relu"))):
        assert drive(arms, "--seeds=2", "--first_seed=5", "--curve=[0.5]") == 0
        assert plans.plan(out)["margin"] is None
