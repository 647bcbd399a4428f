"""When verdicts are read, and what a look can find: planned and unplanned looks, the history of
reports, and the further seeds that an undecided arm needs."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from bench.ablation import contrasts, looks, rows, verdicts
from helpers.sweeps import CALM, ROPE, judge, make_sweep, with_runs, write_lines
from training.run_folder import read_rows


def test_a_claim_that_all_runs_together_do_not_bear_is_taken_back(tmp_path):
    """The deciding evidence gives the direction. The least p over the looks, with the sign
    of all runs, would say worse."""
    given = {"effects": ROPE | {"rope": 0.012}, "noise": 0.002, "looks": [5, 12]}
    sweep, lines, _ = make_sweep(tmp_path, seeds=12, **given, **CALM)
    low = {"final_report": 1.72}  # 0.01 below the base
    lines = with_runs(lines, "rope", lambda seed: low if seed < 5 else {})
    at_first = [line for line in lines if line["purpose"] != "report" or line["seed"] < 5]
    assert judge(sweep, at_first)[1]["rope"]["verdict"] == "better"
    rope = judge(sweep, lines)[1]["rope"]
    assert rope["verdict"] == "undecided" and rope["p_holm"] < 0.05 and rope["difference"] > 0
    assert rope["reason"] == "seen at a look, but not by all runs together"


@pytest.mark.parametrize(
    ("tests", "shares", "verdict"),  # (p, p of a tie, difference) at each look
    [
        ([(1e-4, 1, -1), (0.01, 1, -0.5)], [0.45, 0.45], "better"),
        ([(1e-4, 1, -1), (0.01, 1, 0.5)], [0.45, 0.45], "undecided"),
        ([(1e-4, 1, -1), (0.06, 1, -0.5)], [0.45, 0.45], "undecided"),
        ([(1e-4, 1, -1), (1e-6, 1, 0.5)], [0.45, 0.45], "worse"),
        ([(0.5, 1e-4, 0.1), (0.5, 0.01, 0.1)], [0.45, 0.45], "tie"),
        ([(0.5, 1e-4, 0.1), (0.5, 0.06, 0.1)], [0.45, 0.45], "undecided"),
        ([(1, 1, 0), (1e-4, 1, -1)], [0.9, 0.0], "undecided"),  # no look of its own
    ],
)
def test_the_direction_is_that_of_the_deciding_look(tests, shares, verdict):
    p, p_tie, difference = (np.array(column, float)[:, None] for column in zip(*tests, strict=True))
    assert contrasts.family_verdicts(p, p_tie, difference, shares)["verdict"][0] == verdict


def look_again(folder, **keys):
    """(facts, lines of the history) of a report in a folder with a sweep of these settings."""
    make_sweep(folder, effects=keys.pop("effects", ROPE), **CALM, **keys)
    return report([folder])[1], read_rows(folder / "history.jsonl", looks.is_line)


def report(folders):
    """(table, facts) of a report of some folders, which their histories note."""
    ((plan, paths),) = rows.sweeps(folders)
    history = looks.read(paths, plan)
    runs = rows.load(paths)
    table, facts = verdicts.judge(runs, plan, history)
    looks.record(paths, plan, runs, table, facts, history)
    return table, facts


def shares_of(facts, key="share"):
    return pytest.approx([getattr(look, key) for look in facts.looks])


def test_each_report_adds_what_it_read_to_the_history(tmp_path):
    _, lines = look_again(tmp_path, seeds=3)
    assert len(lines) == 1 and lines[0]["arms"] == ["rope"] and lines[0]["looks"] == [3]
    assert lines[0]["runs"]["rope"] == [0, 1, 2]
    assert len(look_again(tmp_path, seeds=3)[1]) == 1  # it read nothing new
    assert len(look_again(tmp_path, seeds=3, margin=0.02)[1]) == 2


def test_more_seeds_after_a_report_are_a_look_that_nobody_planned(tmp_path):
    for seeds, shares in ((3, [0.9, 0]), (6, [0.9, 0.05, 0]), (9, [0.9, 0.05, 0.025, 0])):
        assert shares == shares_of(look_again(tmp_path, seeds=seeds)[0])
    assert shares_of(look_again(tmp_path / "new", seeds=6)[0]) == [0.9, 0]  # one planned look


def test_controls_that_are_added_after_a_look_do_not_take_it_again(tmp_path):
    sweep, lines, _ = make_sweep(tmp_path, seeds=12, looks=[5], effects=ROPE, **CALM)
    lines = [line for line in lines if line["arm"] != "rope" or line["seed"] < 5]
    write_lines(tmp_path, [line for line in lines if line["arm"] == "rope" or line["seed"] < 4])
    first, _ = report([tmp_path])
    write_lines(tmp_path, lines)
    (tmp_path / "sweep.json").write_text(json.dumps(sweep | {"controls": 14}))
    again, facts = report([tmp_path])
    assert (first.n_control[0], again.n_control[0]) == (8, 14) and shares_of(facts) == [0.9, 0]
    assert again.p_looks.equals(first.p_looks) and report([tmp_path])[0].equals(again)


def test_a_second_report_of_the_same_runs_says_the_same(tmp_path):
    """With more runs than planned, also of the rung that another one is compared with."""
    effects, arms = ROPE | {"swiglu": -0.07}, {"swiglu": {"against": "rope"}}
    make_sweep(tmp_path, seeds=7, looks=[5], effects=effects, arms=arms, **CALM)
    first, _ = report([tmp_path])
    assert report([tmp_path])[0].p_looks.equals(first.p_looks)


def test_another_margin_or_list_of_arms_leaves_its_trace(tmp_path):
    look_again(tmp_path, seeds=5)
    margin, _ = look_again(tmp_path, seeds=5, margin=0.02)
    assert shares_of(margin) == [0.9, 0] and shares_of(margin, "tie_share") == [0.05, 0]
    effects = {"base": 0.0, "base-again": 0.0, "gqa": 0.0}
    assert look_again(tmp_path, effects=effects)[0].family == 2  # rope was there, too


def test_rows_in_another_folder_do_not_hide_a_look(tmp_path):
    look_again(tmp_path / "a", seeds=3)
    make_sweep(tmp_path / "b", seeds=6, effects=ROPE, **CALM)
    assert shares_of(report([tmp_path / "a", tmp_path / "b"])[1]) == [0.9, 0.05, 0]
    assert len((tmp_path / "b/history.jsonl").read_text().splitlines()) == 1


def test_a_report_of_an_unfinished_sweep_spends_nothing(tmp_path):
    _, lines, _ = make_sweep(tmp_path, seeds=8, effects=ROPE, **CALM)
    for end in (2, 4, 6, 8):
        part = [line for line in lines if line["purpose"] != "report" or line["seed"] < end]
        write_lines(tmp_path, part)
        frame, facts = report([tmp_path])
        assert (frame.verdict[0] == "better") == (end == 8)
    assert shares_of(facts) == [0.9, 0]


def test_more_seeds_are_as_many_as_the_power_needs(tmp_path):
    effects = ROPE | {"swiglu": -0.010}
    sweep, lines, _ = make_sweep(tmp_path, effects=effects, noise=0.01, seeds=5, **CALM)
    frame, found, facts = judge(sweep, lines)
    row = found["swiglu"]
    assert row["verdict"] == "undecided" and 1 <= row["more_seeds"] < 300
    n = row["n"] + row["more_seeds"]
    z = stats.norm.isf(0.05 * 0.05 / 2 / 2)  # the first look beyond the plan, Holm's first step
    chance = stats.norm.sf(z - abs(row["difference"]) / (row["se"] * math.sqrt(5 / n)))
    assert chance == pytest.approx(0.8, abs=0.06)
    wide = judge(sweep | {"looks": [5, 60]}, lines)[1]["swiglu"]
    assert wide["more_seeds"] >= 55  # at least up to the next look
    assert facts.smallest_visible == pytest.approx(0.01 * 2.5, rel=0.5)


def test_the_power_to_differ_is_that_of_the_noncentral_t():
    chance = looks.to_differ(2.0, 1.0, 10, 0.05)
    assert chance == pytest.approx(stats.nct.sf(stats.t.isf(0.025, 10), 10, 2.0))
