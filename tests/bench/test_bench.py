"""bench/: that the sides of a comparison are the same size and do the same work. No times are
asserted."""

import os
from types import SimpleNamespace

import cpu_race
import numpy as np
import pytest
import speed
from matplotlib.figure import Figure

from bench.timing import decode, page, train
from bench.timing.results import interval, turns
from common.errors import Failure

TINY = SimpleNamespace(**dict(zip(train.FIELDS, (2, 2, 64, 16, 3, 65, 8), strict=True)))


def sides():
    config = train.SpeedConfig()
    return train.make_sides(config, TINY, "cpu")


def test_sides_are_of_one_size_and_take_the_same_step():
    found = sides()
    assert {"our GPT-2", "our LLaMA", "transformers GPT-2", "transformers LLaMA"} <= found.keys()
    sizes = {name: sum(p.numel() for p in side.model.parameters()) for name, side in found.items()}
    assert sizes["our LLaMA"] == sizes["transformers LLaMA"]
    biases = sum(
        p.numel()
        for name, p in found["transformers GPT-2"].model.named_parameters()
        if name.endswith("bias")
    )
    assert sizes["our GPT-2"] == sizes["transformers GPT-2"] - biases
    for side in found.values():
        before = side.loss(side.x, side.y)
        side.step(side.loss)
        after = side.loss(side.x, side.y)
        assert (
            after < before and abs(before.item() - np.log(65)) < 0.5
        )  # the mean over the tokens, in nats; one step learns
        assert all(p.grad is None for p in side.model.parameters())


def test_interval_holds_the_median_and_narrows():
    rng = np.random.default_rng(0)
    few, many = (interval(1.2 + 0.1 * rng.standard_normal(n)) for n in (8, 400))
    assert (
        few[1] < few[0] < few[2] and many[2] - many[1] < few[2] - few[1] and many[1] < 1.2 < many[2]
    )


def test_in_turns_no_side_always_follows_the_same_one():
    rounds = [[name for number, name in turns("abc", 6) if number == wanted] for wanted in range(6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {each[0] for each in rounds} == {each[-1] for each in rounds} == {"a", "b", "c"}
    before = {(one, two) for each in rounds for one, two in zip(each, each[1:], strict=False)}
    assert len(before) == 6  # every side follows every other


@pytest.mark.slow
def test_decoding_is_timed_beside_other_engines(tmp_path, monkeypatch):
    """A stand-in for llama.cpp prints the tokens and their speed."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    (tmp_path / "node_modules" / "node-llama-cpp").mkdir(parents=True)
    node = tmp_path / "bin" / "node"
    node.parent.mkdir()
    node.write_text('#!/bin/sh\ntest -s "$3" && echo 1 2\necho "tok/s: 50" >&2\n')
    node.chmod(0o755)
    monkeypatch.setenv("PATH", f"{node.parent}:{os.environ['PATH']}")
    written = []
    monkeypatch.setattr(page, "main", lambda: None)
    monkeypatch.setattr(decode, "MODES", (("float32", False), ("int8", False)))
    monkeypatch.setattr(decode, "write", lambda lines, name: written.append((name, lines)))
    sizes = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--vocab_size=11", "--block_size=32"]
    options = ["--tokens=16", "--rounds=2", "--threads=1"]
    speed.main(["decode", *sizes, *options, f"--llamacpp={tmp_path}"])

    name, lines = written[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    speeds = {row[0]: row[1:] for row in cells}
    assert name == "speed_decode"
    assert speeds["llama.cpp, F16"][:2] == ["50 (50)", "1.00 (1.00 to 1.00)"]
    assert speeds["transformers, cached"][2] == speeds[decode.OURS][2] == "16"
    assert "sampling/fast.py, int8, eager" in speeds


def test_the_curves_of_a_race_are_named_once_for_each_entrant(tmp_path, monkeypatch):
    curves = {"nanoGPT": 1.9, "config/llama_shakespeare.py": 1.6, "LLaMA to 1.70": 1.7}
    runs = {
        name: [
            (60.0 + seed, [(5.0, 3.0), (60.0 + seed, loss + seed / 10)], loss)
            for seed in (-1, 0, 1)
        ]
        for name, loss in curves.items()
    }
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append(figure))
    cpu_race.draw(runs, tmp_path / "race.png")
    (axes,) = figures[0].axes
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["nanoGPT 1.900", "llama_shakespeare 1.600", "LLaMA to 1.70 1.700"]
    assert len(axes.lines) == 9  # one for each seed


def test_a_row_of_a_race_has_medians_then_each_round():
    """Ours reaches 1.886 in both rounds and 1.75 in one, and twice as fast as nanoGPT."""
    theirs = [(60.0, [(60.0, 1.9)], None), (80.0, [(70.0, 1.9), (80.0, 1.8)], None)]
    ours = [(30.0, [(20.0, 1.8), (30.0, 1.74)], 1.9), (40.0, [(30.0, 1.88)], 2.0)]
    assert cpu_race.row("ours", ours, theirs) == (
        "| ours | 35 (30, 40) | 0.50 (0.50, 0.50) | 1.8100 (1.7400, 1.8800) "
        "| 1.9500 (1.9000, 2.0000) | 1.8100 |"
    )
    assert "| not measured | 1.9000 |" in cpu_race.row("nanoGPT", theirs, theirs)


def test_a_race_whose_run_fails_ends_in_one_line(tmp_path):
    """The run itself, and the evaluation on the test split."""
    with pytest.raises(Failure, match="a run failed: error: "):
        cpu_race.race(cpu_race.Entrant(["nonsense"]), tmp_path / "out", tmp_path / "cache")
    with pytest.raises(Failure, match="train.py failed: "):
        cpu_race.test_loss(tmp_path / "none")
