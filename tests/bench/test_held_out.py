"""The test of the predictions, which are written before the settings of the test run, and the
table of the factors."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from bench.ablation import page_tables
from bench.settings import held_out, plan, sweep, worths
from common.errors import UserError

ANSWER = "config/answer/settings.py"
PARTS = ("Large", "Small", "None", "Harm")
MEANS = dict(zip(PARTS, (0.3, 0.12, 0.0, -0.25), strict=True))


def write_setting(folder, name, shift=0.0, test=False, factors=None):
    """The files of a measured setting whose base falls by 0.2 nats for each e-fold of tokens."""
    random = np.random.default_rng(int.from_bytes(name.encode()))
    multiples = {"base": 1.0} | {f"base x{k:g}": k for k in (0.25, 0.5, 1.4, 2.0)}
    lines = []

    def add(arm, multiple, loss, purpose, seed):
        ends = dict.fromkeys(("val_loss", "val_loss_tune", "val_loss_report"), loss)
        lines.append(
            {
                "arm": arm,
                "purpose": purpose,
                "status": "done",
                "multiple": multiple,
                "learning_rate": 0.01,
                "tokens": 1000,
                "seed": seed,
                "code_hash": "code",
                "config_hash": arm,
            }
            | ends
        )

    for arm, multiple in multiples.items():
        for seed in (1, 2):
            noise = 0.002 * (-1) ** seed
            loss = 2 - 0.2 * math.log(multiple) + noise
            add(arm, multiple, loss, "base" if arm == "base" else "curve", seed)
    for part in PARTS:
        worth = MEANS[part] + shift + random.normal(0, 0.03)
        add(part, 1.0, 2 - 0.2 * worth, "arm", 1)
    facts = {
        "held_out": test,
        "factors": factors or {},
        "best_rate": 0.01,
        "admission": {"admitted": True},
        "arms": {
            arm: {
                "part": arm in PARTS,
                "taken_out": False,
                "code_hash": "code",
                "config_hash": arm,
            }
            for arm in (*multiples, *PARTS)
        },
    }
    (folder / name).mkdir()
    (folder / name / "settings.json").write_text(json.dumps(facts))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / name / "rows.jsonl").write_text(text)


def test_the_test_is_predicted_before_it_runs_and_then_scored(tmp_path):
    for name in ("a", "b", "c"):
        write_setting(tmp_path, name)
    with pytest.raises(UserError, match="too few settings"):
        held_out.main([str(tmp_path)])
    assert held_out.scored(tmp_path) == []
    for name in ("d", "e", "f"):
        write_setting(tmp_path, name)
    held_out.main([str(tmp_path)])
    content = json.loads((tmp_path / plan.PREDICTIONS).read_text())
    assert content["settings"] == list("abcdef")
    assert list(content["predictions"]) == list(PARTS)
    assert content["predictions"]["Large"]["p_helps"] > 0.95
    assert content["predictions"]["Harm"]["p_helps"] < 0.05
    assert held_out.scored(tmp_path) == []  # nothing has run

    write_setting(tmp_path, "h1", test=True)
    write_setting(tmp_path, "h2", shift=2.0, test=True)
    scored = {(each.setting, each.part): each for each in held_out.scored(tmp_path)}
    assert len(scored) == 8
    assert scored["h1", "Large"].covered and scored["h1", "Large"].called
    assert not scored["h2", "None"].covered
    assert scored["h2", "Large"].log_worth == pytest.approx(math.log(2))  # the curve's end
    with pytest.raises(UserError, match="the test has run"):
        held_out.main([str(tmp_path)])
    # The settings of the test do not enter the model.
    columns, _ = worths.table(worths.load(tmp_path))
    assert set(columns["setting"]) == set("abcdef")


def test_no_setting_of_the_test_runs_before_it_is_predicted(tmp_path):
    argv = [ANSWER, f"--out_dir={tmp_path}"]
    sweep.check_predicted(plan.read([*argv, "--settings=4"], ""))
    asked = plan.read([*argv, "--settings=c04,h1"], "")
    with pytest.raises(UserError, match=r"not predicted yet.*h1"):
        sweep.check_predicted(asked)
    (tmp_path / plan.PREDICTIONS).write_text("{}")
    sweep.check_predicted(asked)


def page_of(planned):
    """What the tables read of a Page."""
    return SimpleNamespace(planned=planned, planned_columns=worths.table(planned)[0])


def test_the_table_of_the_factors_marks_what_a_part_depends_on(tmp_path):
    assert page_tables.factors_table(page_of([])) is None
    for each in plan.read([ANSWER], "").settings:
        shift = 0.3 * (each.factors["optimizer"] == "muon")
        write_setting(tmp_path, each.name, shift, factors=each.factors)
    write_setting(tmp_path, "h3", test=True, factors={"text": "summaries"})
    table = page_tables.factors_table(page_of(worths.load(tmp_path)))
    assert list(table["part"]) == list(PARTS)
    marked = [heading for heading in table.columns[1:] if table[heading].str.endswith("*").all()]
    assert marked == ["optimizer: muon ÷ adamw"]
    ratios = [float(cell.split()[0]) for cell in table[marked[0]]]
    assert ratios == pytest.approx([math.exp(0.3)] * 4, rel=0.06)
    assert "text: python ÷ plays" in table.columns
