"""The caveats of a report are computed from the rows: each says what was changed, and a clean sweep
has none."""

import json

import pytest

from bench.ablation.caveats import caveats
from bench.ablation.sweeps import gather
from helpers.sweeps import make_sweep

CLEAN = {
    "effects": {"base": 0.0, "base-again": 0.0, "rope": -0.1},
    "diverged": (),
    "stale": False,
    "noise": 0.002,
}


@pytest.fixture
def said(tmp_path):
    """The caveats of a synthetic sweep as one text. `row_of` and `cost_of` change rope's reported
    rows and its costs, `disturbed` says why no arm could be timed."""

    def make(disturbed="", row_of=None, cost_of=None, **keys):
        _, rows, costs = make_sweep(tmp_path, **keys)
        reported = {"arm": "rope", "purpose": "report"}.items()
        rows = [row | (row_of or {}) if reported <= row.items() else row for row in rows]
        costs = {arm: cost | {"disturbed": disturbed} for arm, cost in costs.items()}
        if cost_of:
            costs["rope"] |= cost_of
        for name, lines in (("rows.jsonl", rows), ("costs.jsonl", costs.values())):
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (section,) = gather([tmp_path])
        return "\n".join(caveats(section))

    return make


def test_a_sweep_with_many_faults_has_many_caveats(said):
    text = said(killed=("swiglu",))
    for words in (
        "swiglu seed 0 1 2 3 4 (killed by signal 9 (out of memory?))",
        "1 stale row left out: gqa seed 5",
        "These arms overfit: untied (at 6",
        "edge of the grid; a better one may lie outside: untied (2 x)",
        "within 0.5 %: untied (+0.80 %)",
    ):
        assert words in text, words


def test_a_clean_sweep_has_no_caveat(said):
    assert said(**CLEAN) == ""


CHANGES = {  # what must be said -> the change of the clean sweep
    "could not be measured well, so there is no worth in time and no verdict at equal time: other"
    " work kept 60% of the cores busy": {"disturbed": "other work kept 60% of the cores busy"},
    "at the base's learning rate, which favours": {"lr_grid": [1]},
    "the margin of a tie is 0.0001. Effects between the two stay undecided": {"margin": 1e-4},
    "Nothing was matched": {"match": "none"},
    "no second copy of the base": {"effects": {"base": 0.0, "rope": -0.1}},
    "The base differs from its second copy by +0.49": {
        "effects": CLEAN["effects"] | {"base-again": 0.5}
    },
    "may see another number of tokens: rope": {"arms": {"rope": {"changes": {"batch_size": 4}}}},
    "The base reads its training text 2 times": {
        "base_values": {"max_iters": 10, "batch_size": 4, "block_size": 25, "learning_rate": 1e-3},
        "data": {"train_tokens": 500, "val_tokens": 1, "dataset": "x", "fingerprint": "y"},
    },
    "different hardware: H200 and Xeon": {"row_of": {"hardware": "H200"}},
    "worse than those that chose their rate: rope (1.6": {"row_of": {"final_tune": 9.0}},
    "with other code, so the report omits them: rope": {"cost_of": {"code_hash": "old"}},
}


@pytest.mark.parametrize("words", CHANGES)
def test_caveats_are_computed_from_the_data(said, words):
    assert words in said(**CLEAN | CHANGES[words])
