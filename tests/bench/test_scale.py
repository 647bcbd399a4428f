"""The design of several sizes: its sweeps, and the slopes of effects whose truth is known."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.ablation import design_report, report, scale, stats
from bench.ablation.losses import sort_rows

SIZES = "--sizes={'a':{'n_embd':16},'b':{'n_embd':32},'c':{'n_embd':64,'learning_rate':5e-4}}"
ARMS = "--arms={'rms':{'norm':'rmsnorm'}}"
VALUES = {"model": "gpt2", "vocab_size": 65, "block_size": 64, "n_layer": 2, "n_head": 2}
VALUES |= {"batch_size": 8, "gradient_accumulation_steps": 1}
WIDTHS = (16, 32, 64)


def sections(effects, seeds=8, sd=0.008, seed=0, margin=0.02, diverged=()):
    """Analysed sweeps of three sizes. effects: {arm: its effect at each of them}."""
    random, found = np.random.default_rng(seed), []
    for place, width in enumerate(WIDTHS):
        arms = {"base": {}, "base again": {"again": True, "against": "base"}}
        arms |= {name: {"against": "base"} for name in effects}
        sweep = {"base": "base", "metric": "final_val_loss", "looks": [seeds], "seeds": seeds}
        sweep |= {"margin": margin, "chosen_lr": {}, "screening": False, "arms": arms}
        sweep["base_values"] = VALUES | {"n_embd": width, "max_iters": 10 * width}
        planned = stats.history.planned_runs(sweep, seeds)
        rows = [
            row(name, number, 2 + effects.get(name, [0] * 3)[place] + random.normal(0, sd))
            for name, count in planned.items()
            for number in range(count)
        ]
        for one in rows:
            if (one["arm"], width) in diverged:
                one |= {"status": "diverged", "final_report": None}
        runs = sort_rows(sweep, rows)
        main = stats.analyse(sweep, runs)
        given = dict(sweep=sweep, runs=runs, main=main, folders=[Path(f"w{width}")], effects=None)
        found.append(SimpleNamespace(**given, scale=None, named=str))
    return found


def row(arm, seed, loss):
    return {
        **{"arm": arm, "seed": seed, "lr": 1, "purpose": "report", "status": "done"},
        **{"code_hash": "x", "config_hash": "y", "final_report": loss, "best_report": loss},
        "blocks": None,
    }


# ---------------------------------------------------------------- slopes

PLANTED = {
    "grows": [-0.02, -0.06, -0.10],
    "fades": [-0.10, -0.06, -0.02],
    "turns": [0.05, 0.0, -0.1],
    "holds": [-0.04, -0.04, -0.04],
}


def test_the_words_of_slopes():
    found = {one.arm: one for one in scale.analyse(sections(PLANTED, sd=0.004)).slopes}
    words = {name: one.word for name, one in found.items()}
    assert words == dict(grows="grows", fades="fades", turns="changes sign", holds="holds")
    assert found["turns"].why == "by the fitted line better at the largest size"
    noisy = scale.analyse(sections(PLANTED, sd=0.2)).slopes
    assert {one.word for one in noisy} == {"cannot tell"}


def test_nothing_holds_without_a_margin():
    found = scale.analyse(sections({"holds": [-0.04] * 3}, margin=None, sd=0.001, seed=1))
    assert np.isnan(found.margin) and found.slopes[0].word == "cannot tell"
    note = design_report.scale_table(found).note
    assert "no margin" in note


def test_the_slope_is_per_factor_of_ten_of_the_base_s_compute():
    made = sections({"x": [0, 0, 0]}, sd=1e-9)
    flops = [scale.training_flops(section.sweep)[0] for section in made]
    x = np.log10(flops)
    line = 0.03 * (x - x[0]) - 0.01
    found = scale.analyse(sections({"x": line}, sd=1e-9)).slopes[0]
    assert found.mean == pytest.approx(0.03, abs=1e-6)
    assert found.line == pytest.approx((-0.01, line[-1]), abs=1e-6)
    # 6 FLOPs for each parameter and token, and those of attention.
    parameters = scale.training_flops(made[2].sweep)[1]
    assert flops[2] == pytest.approx(6 * parameters * 640 * 8 * 64, rel=0.15)


def test_the_interval_covers_the_slope_and_a_constant_effect_is_no_slope():
    """Although the variance of one arm at one size is much larger."""
    covered, claims = [], []
    for seed in range(100):
        made = sections({"x": [-0.05] * 3}, seeds=4, seed=seed)
        rows = made[0].runs.done["x"]
        for one in rows.values():  # twice the sd
            one["final_report"] += one["final_report"] - 1.95
        slope = scale.analyse(made).slopes[0]
        covered.append(slope.low <= 0 <= slope.high)
        claims.append(slope.word in ("grows", "fades", "changes sign"))
    assert np.mean(covered) >= 0.95 - 2 * np.sqrt(0.05 * 0.95 / 100)
    assert np.mean(claims) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 100)


def test_missing_and_diverged_runs_leave_no_slope():
    made = sections(PLANTED, diverged=[("grows", 32)])
    del made[1].runs.done["fades"][3]
    found = {one.arm: one for one in scale.analyse(made).slopes}
    assert found["grows"].word == found["fades"].word == "cannot tell"
    assert found["grows"].why == "runs diverged"
    assert found["fades"].why == "planned runs are missing"
    assert found["holds"].word == "holds"


def test_a_figure_and_a_table_of_all_arms():
    made = sections(PLANTED, diverged=[("grows", 32)])
    made[0].scale = scale.analyse(made)
    table = design_report.scale_table(made[0].scale)
    assert table.headings[3:6] == ["w16", "w32", "w64"]
    words = [line[1].text for line in table.rows]
    assert words == ["cannot tell", "fades", "changes sign", "holds"]
    figure = design_report.effects_against_compute(made[0], report.figures.Tips())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["grows: cannot tell", "fades: fades", "turns: changes sign", "holds: holds"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["runs diverged"]
