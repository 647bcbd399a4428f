"""The four ways to pair runs, on losses whose shared parts are known, and a real run."""

import math

import numpy as np
import pairing
import pytest
from scipy import stats

from bench.ablation import sentences
from helpers.ablation import arguments
from training.run_folder import read_rows

PAIRS = 400


def test_each_mode_shares_what_it_says(tmp_path):
    """A loss is the sum of an effect of its initial weights, of its order, and of its own noise:
    the variances of a difference follow."""
    random = np.random.default_rng(0)
    weights, orders = random.normal(0, 1, PAIRS), random.normal(0, 2, PAIRS)
    runs = [("base", i, i) for i in range(PAIRS)]
    runs += [("arm", (i + shift) % PAIRS, i) for i in range(PAIRS) for shift in (0, 1)]
    rows = [
        {
            **dict(zip(("arm", "init", "order"), run, strict=True)),
            "loss": weights[run[1]] + orders[run[2]] + random.normal(0, 0.5) - (run[0] == "arm"),
        }
        for run in runs
    ]
    found = pairing.differences(rows, "arm", PAIRS)
    own = 2 * 0.5**2
    variances = [2 * 1 + 2 * 4 + own, 2 * 1 + own, 2 * 4 + own, own]
    for mode, variance in zip(pairing.MODES, variances, strict=True):
        assert found[mode].var() == pytest.approx(variance, rel=0.25), mode
        assert found[mode].mean() == pytest.approx(-1, abs=0.4)
    text = pairing.page(found, "arm", PAIRS, "the command")
    line = next(line for line in text.splitlines() if line.startswith("| both"))
    ratio = line.split(" | ")[-1].strip("| ")
    assert 0 < float(ratio.split()[0]) < 0.1

    # The report of a sweep says what the page says, and nothing where there is no page.
    assert sentences.pairing(tmp_path) == ""
    (tmp_path / "pairing_arm.md").write_text(text, encoding="utf-8")
    assert f"{ratio} times where they share both, by" in sentences.pairing(tmp_path)


def test_pairing_pays_where_it_halves_the_variance():
    """As the report says: five pairs against five runs of an arm and eleven of the base."""
    alone = 1 / 5 + 1 / 11  # variance of a difference of means, that of a run being 1
    freedom = alone**2 / ((1 / 5) ** 2 / 4 + (1 / 11) ** 2 / 10)  # Welch
    unpaired = stats.t.ppf(0.975, freedom) * math.sqrt(alone)

    def paired(ratio):
        return stats.t.ppf(0.975, 4) * math.sqrt(ratio * 2 / 5)

    assert paired(0.49) < unpaired < paired(0.52)


def test_a_run_starts_from_shared_numbers_and_continues_where_it_was(
    data_dir, tmp_path, monkeypatch
):
    given = arguments(data_dir, tmp_path / "sweep", "--design=leave_one_in", "--compile=False")
    words = [*given, "--arm=rope", "--pairs=4", f"--out={tmp_path}"]
    append = pairing.append

    def stopping(path, row):
        append(path, row)
        if row["arm"] == "rope":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pairing, "append", stopping)
        pairing.main(words)
    rows = read_rows(tmp_path / "pairing" / "rope.jsonl")
    assert [(row["arm"], row["init"], row["order"]) for row in rows] == [
        ("base", 0, 0),
        ("rope", 0, 0),
    ]
    # The same weights but for learned positions: four steps of training apart, not more.
    assert 0 < abs(rows[0]["loss"] - rows[1]["loss"]) < 0.1
    pairing.main(words)
    again = read_rows(tmp_path / "pairing" / "rope.jsonl")
    assert again[:2] == rows and len(again) == 12
    assert "| both |" in (tmp_path / "pairing_rope.md").read_text()
    assert not (tmp_path / "sweep").exists()
