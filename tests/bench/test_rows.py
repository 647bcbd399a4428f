"""The table of runs: which lines count, what an odd line does, costs, several machines."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from bench.ablation import plans, rows, schedule
from bench.ablation.schedule import own_controls
from common.errors import UserError
from helpers.sweeps import ROPE, SWEEP, make_sweep, plan_of, write_lines


def make(out, **given):
    """(sweep, lines, the line of a reported run of rope)."""
    sweep, lines, _ = make_sweep(out, effects=ROPE, diverged=(), stale=False, **given)
    return sweep, lines, next(x for x in lines if x["arm"] == "rope" and x["purpose"] == "report")


def test_the_table_has_a_row_for_each_run(tmp_path):
    sweep, lines, rope = make(tmp_path, seeds=3, test_split=True)
    runs = rows.load(tmp_path)
    assert list(runs.columns) == [*rows.COLUMNS, *rows.COSTS] and len(runs) == len(lines)
    assert set(runs.sweep) == {tmp_path.name} and set(runs.text) == {"shakespeare_char"}
    assert runs.current.all() and set(runs.arm[runs.control]) == {"base", "base-again"}
    row = runs[(runs.arm == "rope") & (runs.seed == 0) & (runs.purpose == "report")].iloc[0]
    halves = [rope["final_report"], rope["final_tune"], rope["final_val_loss"]]
    assert [row.val_loss_report, row.val_loss_tune, row.val_loss] == halves
    assert row.test_loss == rope["test_loss"]
    assert (row.blocks, row.curve) == (rope["blocks"], rope["curve"])
    assert (row.step_ratio, row.parameters) == (1 + 2 / 24, 802_000)
    assert runs.tokens[runs.purpose == "curve"].unique().tolist() == [0.25, 0.5, 2]
    assert (runs.step_ratio[runs.arm == "base"] == 1).all()


def test_bits_per_byte_are_computed_from_the_losses_or_left_blank(tmp_path):
    _, _, rope = make(tmp_path / "new")
    make(tmp_path / "old")
    plan = json.loads((tmp_path / "old/sweep.json").read_text())
    plan["data"]["bits_per_byte"] = None
    (tmp_path / "old/sweep.json").write_text(json.dumps(plan))
    bits = rows.load(tmp_path / "new").query("arm == 'rope' and seed == 0").bits_per_byte
    assert bits.iloc[0] == pytest.approx(1.4427 * rope["final_val_loss"])
    assert rows.load(tmp_path / "old").bits_per_byte.isna().all()


@pytest.mark.parametrize(
    ("change", "stale", "failed"),
    [
        ({"lr": 2}, 1, 0),
        ({"seed": 9, "code_hash": "other"}, 1, 0),
        ({"config_hash": "other"}, 1, 0),
        ({"arm": "unplanned"}, 1, 0),
        ({"arm": "base x2", "purpose": "curve", "config_hash": "c-base x2", "lr": 2}, 1, 0),
        ({"seed": 9, "status": "failed", "final_report": None}, 0, 1),
        ({"status": "failed", "final_report": None}, 0, 0),  # a failure replaces no result
    ],
    ids=str,
)
def test_only_rows_of_this_plan_count(tmp_path, change, stale, failed):
    _, lines, rope = make(tmp_path)
    runs = rows.load(tmp_path).query("arm == 'rope' and purpose == 'report'")
    expected = runs.val_loss_report.mean()
    wrong = rope | {"final_report": 9.9}
    for line, same in ((wrong | change, True), (wrong, False)):  # the last line of a run counts
        write_lines(tmp_path, [*lines, line])
        runs = rows.load(tmp_path)
        current = runs[runs.current & (runs.status == "done") & (runs.purpose == "report")]
        assert (current.val_loss_report[current.arm == "rope"].mean() == expected) == same
        if same:
            assert (~runs.current).sum() == stale and (runs.status == "failed").sum() == failed


def test_a_loss_that_is_not_finite_has_diverged_and_stays_a_result(tmp_path):
    _, lines, rope = make(tmp_path)
    for end in ({"final_report": float("nan")}, {"status": "diverged", "final_report": None}):
        write_lines(tmp_path, [*lines, rope | end, rope | {"status": "failed"}])
        runs = rows.load(tmp_path)
        assert (runs.status == "diverged").sum() == 1 and not (runs.status == "failed").any()


ODD_ROWS = [{}, {"arm": 3}, {"lr": None}, {"status": "cancelled"}, {"curve": 3}]
ODD_ROWS += [{"final_report": None}, {"lr": 10**400}, {"curve": [["a", 1, 1, 1]]}]
ODD_ROWS += [{"blocks": ["a"]}, {"extrapolation": {"1": 3}}, {"extrapolation": {"x": {}}}]


@pytest.mark.parametrize("odd", ODD_ROWS, ids=lambda odd: str(odd)[:40])
def test_an_odd_row_is_named_and_left_out(tmp_path, capsys, odd):
    _, lines, rope = make(tmp_path)
    before = rows.load(tmp_path)
    write_lines(tmp_path, [lines[0], rope | {"seed": 77} | odd if odd else {}, *lines[1:]])
    runs = rows.load(tmp_path)
    assert runs.equals(before)
    assert "rows.jsonl is damaged and read without line 2" in capsys.readouterr().err


ODD_COSTS = [{"parameters": 10**400}, {"milliseconds_per_step": None}, {"threads": "two"}]
ODD_COSTS += [{"milliseconds_per_step": {}}, {"milliseconds_per_step": {"median": "fast"}}]


@pytest.mark.parametrize("odd", ODD_COSTS, ids=lambda odd: str(odd)[:40])
def test_odd_costs_are_named_and_left_out(tmp_path, capsys, odd):
    _, _, prices = make_sweep(tmp_path, effects=ROPE, diverged=(), stale=False)
    before = rows.costs(tmp_path, plans.plan(tmp_path))
    write_lines(tmp_path, [*prices.values(), prices["rope"] | odd], "costs.jsonl")
    assert rows.costs(tmp_path, plans.plan(tmp_path)).equals(before)
    printed = capsys.readouterr().err
    assert f"costs.jsonl is damaged and read without line {len(prices) + 1}" in printed


PLAN = SWEEP | {"arms": {"base": plan_of("base")}, "chosen_lr": {}, "seeds": 5}
ODD_FACTS = [{"against": "nobody"}, {"changes": []}, {"curve": "2"}, {"match": 3}]
ODD_ARMS = ["position=rope", None, *(plan_of("rope") | facts for facts in ODD_FACTS)]
PLANS = [PLAN | {"margin": "wide"}, PLAN | {"base": "nobody"}]
PLANS += [PLAN | {"arms": PLAN["arms"] | {"odd": facts}} for facts in ODD_ARMS]
PLANS.append({key: PLAN[key] for key in PLAN if key != "controls"})


@pytest.mark.parametrize("content", ["{nope", "{}", *map(json.dumps, PLANS)], ids=range(11))
def test_a_folder_without_a_plan_or_with_an_odd_arm_is_refused_in_one_line(tmp_path, content):
    assert plans.is_plan(PLAN)
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(UserError, match=r"sweep\.json\): move it away"):
        rows.load(tmp_path)


def test_times_measured_beside_other_work_are_left_out(tmp_path):
    _, _, prices = make_sweep(tmp_path, effects=ROPE, diverged=(), stale=False)
    prices["rope"]["quiet"] = False
    write_lines(tmp_path, prices.values(), "costs.jsonl")
    costs = rows.costs(tmp_path, plans.plan(tmp_path)).set_index("arm")
    assert costs.loc["rope", ["step_ratio", "ms_per_step"]].isna().all()
    assert costs.parameters.notna().all() and costs.step_ratio["base-again"] == 1 + 1 / 24
    quiet = prices["rope"] | {"quiet": True}  # timed again, then elsewhere and by other code
    others = [quiet | {"parameters": 1, key: "other"} for key in ("hardware", "code_hash")]
    write_lines(tmp_path, [others[0], *prices.values(), quiet, others[1]], "costs.jsonl")
    costs = rows.costs(tmp_path, plans.plan(tmp_path))
    rope = costs[costs.arm == "rope"].iloc[0]
    assert (rope.step_ratio, rope.parameters) == (1 + 2 / 24, 802_000)


def test_a_run_above_the_trigrams_of_its_text_is_stuck(tmp_path):
    _, lines, _ = make(tmp_path)
    assert not rows.load(tmp_path).stuck.any()  # nothing was counted
    ends = sorted(x["final_val_loss"] for x in lines if x["arm"] == "rope" and x["seed"] < 1000)
    trigrams = (ends[0] + ends[1]) / 2
    make(tmp_path, ngrams={"best": [5, 1.0], "trigrams": trigrams})
    runs = rows.load(tmp_path)
    assert runs.stuck[(runs.arm == "rope") & (runs.purpose == "report")].sum() == len(ends) - 1
    shorter = runs[runs.tokens < 1]
    assert (shorter.val_loss > trigrams).any() and not shorter.stuck.any()
    assert not runs.stuck[runs.status != "done"].any()


@pytest.mark.parametrize(
    "shift, controls, seed, joined",
    [(0, 3, 50, True), (0.1, 3, 50, False), (0, 1, 50, False), (0.1, 3, 0, False)],
)
def test_machines_are_joined_if_their_bases_agree(tmp_path, shift, controls, seed, joined):
    """If not, the other one's runs from the same seeds replace none, nor do failures its runs."""
    sweep, lines, _ = make(tmp_path, seeds=6)
    (tmp_path / "sweep.json").write_text(json.dumps(sweep | {"seeds": 9}))
    done = [x for x in lines if x["purpose"] == "report" and x["status"] == "done"]
    done = [x for x in done if x["seed"] < {"rope": 3, "base": controls}.get(x["arm"], 0)]
    more = [x | {"seed": x["seed"] + seed, "hardware": "another machine"} for x in done]
    more = [x | {"final_report": x["final_report"] + shift} for x in more]
    failures = [x | {"status": "failed", "hardware": None} for x in more]
    write_lines(tmp_path, [*lines, *more, *failures])
    runs = rows.load(tmp_path)
    count = (3 + controls) * (seed > 0)
    assert (runs.current & (runs.machine == "another machine")).sum() == joined * count
    assert len(runs) == len(lines) + count and runs.current.sum() == len(lines) + joined * count


def test_no_machine_is_joined_with_one_whose_base_is_hardly_known():
    """Welch's test of one run has no p, and no p is below 5 %."""
    row = dict(current=True, purpose="report", status="done", val_loss_report=1.7)
    runs = [row | dict(machine="A", control=number == 0) for number in range(5)]
    runs += [row | dict(machine="B", control=True) for number in range(3)]
    assert rows.machines_apart(pd.DataFrame(runs)) == ["B"]


def test_another_machine_trains_the_base_first(monkeypatch):
    monkeypatch.setattr(schedule, "job_of", lambda *job: job)
    machine = SimpleNamespace(facts={"hardware": "B"})
    sweep = SimpleNamespace(machine=machine, arms={"base": "base"}, chosen_lr={})
    sweep.rows = {k: {"arm": "base", "purpose": "report", "hardware": "B"} for k in range(3)}
    assert own_controls(sweep) == []
    sweep.rows |= {k: {"arm": "base", "purpose": "report", "hardware": "A"} for k in range(3, 9)}
    assert len({seed for _, _, seed, *_ in own_controls(sweep)} - {*range(1000)}) == 8
    sweep.rows |= dict.fromkeys(range(9, 14), sweep.rows[0])
    assert own_controls(sweep) == []
