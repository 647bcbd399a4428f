"""The caveats of a report are computed from the rows: each says what was changed, and a clean sweep
has none."""

import json

import pytest

from bench.ablation import report
from bench.ablation.caveats import CAVEATS, caveats
from helpers.sweeps import make_sweep

CLEAN = {
    "effects": {"base": 0.0, "base-again": 0.0, "rope": -0.1},
    "diverged": (),
    "stale": False,
    "noise": 0.002,
}


@pytest.fixture
def said(tmp_path):
    """The caveats of a sweep as a text. `row_of` changes rope's reported rows."""

    def make(row_of=None, **keys):
        _, rows, costs = make_sweep(tmp_path, **keys)
        reported = {"arm": "rope", "purpose": "report"}.items()
        rows = [row | (row_of or {}) if reported <= row.items() else row for row in rows]
        for name, lines in (("rows.jsonl", rows), ("costs.jsonl", costs.values())):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / name).write_text(text)
        (section,) = report.sections([tmp_path])
        return "\n".join(f"{text} {', '.join(what)}" for text, what in caveats(section))

    return make


def test_a_sweep_with_many_faults_has_many_caveats(said):
    text = said(killed=("swiglu",))
    for words in (
        "no mean includes them. swiglu: killed by signal 9 (out of memory?) (5)",
        "left out. gqa (1)",
        "edge of the grid; try beyond it. untied (2 ×)",
        "in what was to be matched. untied (+0.80 %)",
    ):
        assert words in text, words


def test_a_clean_sweep_has_no_caveat(said):
    assert len(CAVEATS) <= 15
    assert said(**CLEAN) == ""


CHANGES = {  # what must be said -> the change of the clean sweep
    "at the base's learning rate, which favours": {"lr_grid": [1]},
    "is over three times the margin of a tie": {"margin": 1e-4},
    "no replicate of the base": {"effects": {"base": 0.0, "rope": -0.1}},
    "differs from its replicate": {"effects": CLEAN["effects"] | {"base-again": 0.5}},
    "training text more than once; fresh text could change the result. 2 times": {
        "base_values": {"max_iters": 10, "batch_size": 4, "block_size": 25, "learning_rate": 1e-3},
        "data": {"train_tokens": 500, "val_tokens": 1, "dataset": "x", "fingerprint": "y"},
    },
    "of the text that it sees. So this is a screening, and its words are those of one. 1.751 beside"
    " 1.700 of trigrams, 1.600 of 5-grams": {"ngrams": {"trigrams": 1.7, "best": [5, 1.6]}},
    "it beats trigrams, but not the best n-grams of its text. 1.751": {
        "ngrams": {"trigrams": 1.8, "best": [5, 1.6]}
    },
}


@pytest.mark.parametrize("words", CHANGES)
def test_caveats_are_computed_from_the_data(said, words):
    assert words in said(**CLEAN | CHANGES[words])


def test_what_changed_after_a_report_is_said(tmp_path):
    make_sweep(tmp_path, **CLEAN)
    report.write([tmp_path])
    make_sweep(tmp_path, **CLEAN, margin=0.02, margin_source="given")
    report.write([tmp_path])
    assert (
        "- This changed after a report was read. `margin`" in (tmp_path / "report.md").read_text()
    )
