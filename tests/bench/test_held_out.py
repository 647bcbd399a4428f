"""The test of the predictions, which are written before the settings of the test run."""

import json
import math

import pytest

from bench.ablation import effects, predictions
from bench.settings import held_out, plan, sweep, table, worths
from common.errors import UserError
from helpers.planned_settings import write_setting

ANSWER = "config/answer/settings.py"
MEANS = {"Large": 0.3, "Small": 0.12, "None": 0.0, "Harm": -0.25}


def test_the_test_is_predicted_before_it_runs_and_then_scored(tmp_path, capsys):
    for name in ("a", "b", "c"):
        write_setting(tmp_path, name, MEANS)
    with pytest.raises(UserError, match="every part of 4 planned settings"):
        held_out.main([str(tmp_path)])
    assert held_out.scored(tmp_path) == []
    for name in ("d", "e", "f"):
        write_setting(tmp_path, name, MEANS)
    held_out.main([str(tmp_path)])
    content = json.loads((tmp_path / plan.PREDICTIONS).read_text())
    assert list(content) == list(MEANS)
    assert content["Large"]["settings"] == list("abcdef")
    assert content["Large"]["p_helps"] > 0.95
    assert content["Harm"]["p_helps"] < 0.05
    assert held_out.scored(tmp_path) == []  # nothing has run
    with pytest.raises(UserError, match="every part of 4"):
        held_out.main([str(tmp_path)])

    write_setting(tmp_path, "h1", MEANS, test=True)
    write_setting(tmp_path, "h2", {part: mean + 2 for part, mean in MEANS.items()}, test=True)
    scored = {(each.setting, each.part): each for each in held_out.scored(tmp_path)}
    assert len(scored) == 8
    assert scored["h1", "Large"].covered and scored["h1", "Large"].called
    assert not scored["h2", "None"].covered
    known, new = (worths.table(worths.load(tmp_path), held_out=test)[0] for test in (False, True))
    for each in predictions.predict(known, new):
        same = scored[each.setting, each.part]
        assert (same.low, same.high) == pytest.approx((each.low, each.high), abs=0.01)
    assert scored["h2", "Large"].log_worth == pytest.approx(math.log(2))  # the curve's end
    # The settings of the test do not enter the model.
    columns, _ = worths.table(worths.load(tmp_path))
    assert set(columns["setting"]) == set("abcdef")
    capsys.readouterr()
    table.show(tmp_path, [plan.Part("Large", {"conv": 4})])
    printed, large = capsys.readouterr().out, effects.fit(columns)[0]
    assert table.span(large.new_low, large.new_high) in printed and "Small" not in printed
    table.show(tmp_path, [plan.Part("Large", {"conv": 8})])
    assert "left out: a has another change named Large" in capsys.readouterr().out


def test_a_part_that_is_measured_later_is_predicted_if_the_test_has_not_run_it(tmp_path):
    """The predictions that were written before stay as they are, whatever was measured since."""
    for name in "abcd":
        write_setting(tmp_path, name, {"Large": 0.3, "None": 0.0})
    held_out.main([str(tmp_path)])
    before = json.loads((tmp_path / plan.PREDICTIONS).read_text())
    write_setting(tmp_path, "h1", {"Large": 0.3, "Small": 0.1}, test=True)
    for name in "efghi":
        write_setting(tmp_path, name, {"Large": 0.9, "Small": 0.1, "Harm": -0.3})
    held_out.main([str(tmp_path)])
    after = json.loads((tmp_path / plan.PREDICTIONS).read_text())
    assert list(after) == ["Large", "None", "Harm"]  # Small has run in the test
    assert {part: after[part] for part in before} == before
    with pytest.raises(UserError, match="more than one folder"):
        held_out.main([str(tmp_path), "h1"])
    assert after["Harm"]["settings"] == list("efghi")
    assert [each.part for each in held_out.scored(tmp_path)] == ["Large"]


def test_no_setting_of_the_test_runs_before_it_is_predicted(tmp_path):
    argv = [ANSWER, f"--out_dir={tmp_path}"]
    sweep.check_predicted(plan.read([*argv, "--settings=4"], ""))
    asked = plan.read([*argv, "--settings=c04,h1"], "")
    with pytest.raises(UserError, match=r"not predicted yet.*h1"):
        sweep.check_predicted(asked)
    (tmp_path / plan.PREDICTIONS).write_text("{}")
    sweep.check_predicted(asked)  # nothing is measured, so nothing can be predicted
    for name in "abcd":
        write_setting(tmp_path, name, {"RoPE": 0.5, "QK norm": 0.0})
    with pytest.raises(UserError, match=r"not predicted yet.*RoPE, QK norm"):
        sweep.check_predicted(asked)
    held_out.main([str(tmp_path)])
    sweep.check_predicted(asked)


def test_a_prediction_is_of_the_first_pass(tmp_path):
    """The runs in the test have no rate of their own either."""
    for name in "abcd":
        write_setting(tmp_path / "both", name, MEANS, gain=0.05)
        write_setting(tmp_path / "first", name, MEANS)
    predicted = [held_out.unpredicted(tmp_path / folder) for folder in ("both", "first")]
    assert predicted[0] == predicted[1]
    for folder, gain in (("both", 0.05), ("first", 0.0)):
        held_out.main([str(tmp_path / folder)])
        write_setting(tmp_path / folder, "h", MEANS, test=True, gain=gain)
    scored = [held_out.scored(tmp_path / folder) for folder in ("both", "first")]
    assert scored[0] == scored[1] != []
