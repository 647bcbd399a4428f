"""The committed page of the answer: it follows from the committed rows, and its differences are
those that a few lines without our code compute from them."""

import json
import runpy
import shutil

import answer
import numpy as np
import pytest
from scipy import stats

from bench.ablation import figures
from common.commands import ROOT

SHELVES = [path.parent for path in answer.ANSWER.glob("*/sweep.json")]
SHELVES = [path for path in SHELVES if not path.name.startswith(("tune", "recipe"))]


@pytest.mark.slow
def test_the_page_follows_from_the_rows(tmp_path, monkeypatch):
    """And reading_a_report.md shows two rows of a report. The pixels of pictures are not drawn."""
    monkeypatch.setattr(figures, "saved", lambda *_, **__: b"")
    copy = tmp_path / "answer"
    shutil.copytree(answer.ANSWER, copy, ignore=shutil.ignore_patterns("runs"))
    stored = answer.ANSWER
    monkeypatch.setattr(answer, "ANSWER", copy)
    answer.main([])
    for name in ("index.html", "index.md", "worths.csv"):
        assert (copy / name).read_text() == (stored / name).read_text(), name
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
    control = ("base", "base again")
    for arm, by_seed in losses.items():
        planned = len(by_seed) if arm in control else plan["seeds"]
        losses[arm] = np.array([by_seed[seed] for seed in sorted(by_seed)[:planned]])
    return plan, losses


@pytest.mark.parametrize("shelf", SHELVES, ids=lambda shelf: shelf.name)
def test_the_differences_are_those_of_the_rows(shelf):
    plan, losses = reported(shelf)
    control = np.concatenate([losses[arm] for arm in ("base", "base again")])
    cards = (answer.ANSWER / "index.md").read_text().replace("\u2212", "-").splitlines()
    facts = plan["arms"]
    arms = [arm for arm in losses if facts[arm]["changes"] and not facts[arm]["curve"]]
    assert len(arms) >= 4
    parts = runpy.run_path(str(answer.CONFIG))["parts"].values()
    taken_out = {arm for part in parts for arm in part.get("out_of", {}).values()}
    for arm in arms:
        low, high = stats.ttest_ind(losses[arm], control, equal_var=False).confidence_interval(0.95)
        middle = losses[arm].mean(0) - control.mean(0)
        if arm in taken_out:  # the page tells all of the part
            middle, low, high = -middle, -high, -low
        ends = zip(middle, low, high, strict=True)
        shown = " | ".join(f"{m:+.3f} [{a:+.3f}, {b:+.3f}]" for m, a, b in ends)
        assert any(shown in card for card in cards if f"| {arm} |" in card), (arm, shown)
