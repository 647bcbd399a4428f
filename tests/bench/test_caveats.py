"""The caveats of a report against synthetic sweeps with one fault each."""

import pytest

from bench.ablation import stats
from bench.ablation.caveats import caveats
from helpers.sweeps import make_sweep

CLEAN = {
    "effects": {"base": 0.0, "base-again": 0.0, "rope": -0.1},
    "failed": (),
    "stale": False,
    "seeds": 6,
    "margin": 0.02,
}


@pytest.fixture
def said(tmp_path):
    """The caveats of a synthetic sweep as one text. `row_of` and `cost_of` change rope's rows and
    costs, `again` is the time per step of the base's second copy, `load` the machine's."""

    def make(again=36.0, load=0.1, row_of=None, cost_of=None, **keys):
        sweep, rows, costs = make_sweep(tmp_path, **keys)
        for cost in costs.values():
            cost["load_average"] = load
        if "base-again" in costs:
            costs["base-again"]["milliseconds_per_step"]["median"] = again
        rows = [row | row_of if row_of and row["arm"] == "rope" else row for row in rows]
        if cost_of:
            costs["rope"] |= cost_of
        runs = stats.sort_rows(sweep, rows)
        return "\n".join(caveats(sweep, runs, costs, stats.analyse(sweep, runs, costs)))

    return make


def test_a_sweep_with_many_faults_has_many_caveats(said):
    text = said()
    for words in (
        "5 failed runs: post seed 1 2 3 4 5 (the loss is not finite at step 412)",
        "1 stale row left out: gqa seed 6",
        "cannot fall below 0.0625",
        "These arms overfit",
        "untied (at 6",
        "edge of the grid, so a better one may lie outside: untied (2 x)",
        "within 0.5 %: untied (+0.80 %)",
        "one standard deviation of the base's runs",
        "spread over seeds more than twice as much as the base: untied",
    ):
        assert words in text, words


def test_a_clean_sweep_has_no_caveat(said):
    assert said(**CLEAN) == ""


CHANGES = {  # of the clean sweep -> what must be said then
    "the same model, but their times per step differ by +25%": {"again": 45.0},
    "The machine was busy": {"load": 3.0},
    "not re-tuned": {"lr_grid": [1]},
    "may stop early. It decides at 4, 8 and 12 seeds, and each p-value is multiplied by the number"
    " of planned looks, 3": {"looks": [4, 8, 12]},
    "too few seeds: 3": {"seeds": 3},
    "With one seed there is no interval": {"seeds": 1},
    "Nothing was matched": {"match": "none"},
    "costs of these arms were not measured: base, base-again and rope": {"costs": False},
    "no second copy of the base": {"effects": {"base": 0.0, "rope": -0.1}},
    "The best loss is chosen on the split": {"metric": "best_val_loss"},
    "No learning rate has been chosen yet": {"chosen_lr": {}},
    "The base differs from its second copy by +0.5": {
        "effects": CLEAN["effects"] | {"base-again": 0.5}
    },
    "not paired batch by batch and may see another number of tokens: rope": {
        "arms": {"rope": {"changes": {"batch_size": 4}}}
    },
    "different hardware: H200 and Xeon": {"row_of": {"hardware": "H200"}},
    "of these pairs were made on different hardware: rope seed 1": {"row_of": {"hardware": "H200"}},
    "The costs were measured on different hardware": {"cost_of": {"hardware": "H200"}},
    "measured with other code than the sweep's": {"cost_of": {"code_hash": "old"}},
    "in closed form": {"cost_of": {"peak_memory": "closed form"}},
}


@pytest.mark.parametrize("words", CHANGES)
def test_caveats_are_computed_from_the_data(said, words):
    assert words in said(**CLEAN | CHANGES[words])
