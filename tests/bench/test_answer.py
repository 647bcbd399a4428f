"""The committed page of the answer: it follows from the committed rows, and its differences are
those that a few lines without our code compute from them."""

import json
import shutil

import answer
import numpy as np
import pytest
from scipy import stats

from bench.ablation import figures
from common.files import ROOT

SHELVES = [path.parent for path in answer.ANSWER.glob("*/sweep.json")]
SHELVES = [path for path in SHELVES if not path.name.startswith(("tune", "recipe"))]


@pytest.mark.slow
def test_the_page_follows_from_the_rows(tmp_path, monkeypatch):
    """And reading_a_report.md shows two rows of a report. The pixels of pictures are not drawn."""
    monkeypatch.setattr(figures, "saved", lambda *_, **__: b"")
    copy = tmp_path / "answer"
    shutil.copytree(answer.ANSWER, copy, ignore=shutil.ignore_patterns("runs"))
    answer.main([str(copy)])
    for name in ("index.html", "index.md"):
        assert (copy / name).read_text() == (answer.ANSWER / name).read_text(), name
    example = (ROOT / "docs/reading_a_report.md").read_text(encoding="utf-8").splitlines()[7:9]
    assert all(row in (copy / "gpt2/report.md").read_text() for row in example)


def reported(shelf):
    """{arm: [runs, 2] of its losses on the reported half and on the test split} of a shelf, by
    plain reading of its rows."""
    plan = json.loads((shelf / "sweep.json").read_text())
    lines = [json.loads(line) for line in (shelf / "rows.jsonl").read_text().splitlines()]
    losses = {}
    for line in lines:
        arm, rate = line["arm"], plan["chosen_lr"].get(line["arm"], 1)
        facts = plan["arms"].get(arm, {})
        same = all(line[key] == facts.get(key) for key in ("code_hash", "config_hash"))
        if same and (line["purpose"], line["status"], line["lr"]) == ("report", "done", rate):
            losses.setdefault(arm, {})[line["seed"]] = line["final_report"], line["test_loss"]
    return plan, {arm: np.array(list(by_seed.values())) for arm, by_seed in losses.items()}


@pytest.mark.parametrize("shelf", SHELVES, ids=lambda shelf: shelf.name)
def test_the_differences_are_those_of_the_rows(shelf):
    plan, losses = reported(shelf)
    copy = ["base again"] * (plan["chosen_lr"].get("base again", 1) == 1)
    control = np.concatenate([losses[arm] for arm in ["base", *copy]])
    cards = (answer.ANSWER / "index.md").read_text().replace("\u2212", "-").splitlines()
    facts = plan["arms"]
    arms = [arm for arm in losses if facts[arm]["changes"] and not facts[arm]["curve"]]
    assert len(arms) >= 4
    for arm in arms:
        low, high = stats.ttest_ind(losses[arm], control, equal_var=False).confidence_interval(0.95)
        middle = losses[arm].mean(0) - control.mean(0)
        ends = zip(middle, low, high, strict=True)
        shown = " | ".join(f"{m:+.3f} [{a:+.3f}, {b:+.3f}]" for m, a, b in ends)
        cards_of_arm = [card.replace("\u2020", "") for card in cards if f"| {arm} |" in card]
        assert any(shown in card for card in cards_of_arm), (arm, shown)
