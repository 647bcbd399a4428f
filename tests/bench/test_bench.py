"""bench/: the sides of a comparison are of one size and do the same work. No time is asserted."""

import json
import os
from types import SimpleNamespace

import cpu_race
import numpy as np
import pytest
import speed
from cpu_race import Result

from bench.timing import decode, train
from bench.timing.results import turns
from common.runtime import Runtime

TINY = SimpleNamespace(**dict(zip(train.FIELDS, (2, 2, 64, 16, 3, 65, 8), strict=True)))


def sides():
    return train.make_sides(train.SpeedConfig(), TINY, Runtime("cpu", "float32", 0, 1, []))


def test_sides_are_of_one_size_and_take_the_same_step():
    found = sides()
    assert {"our GPT-2", "our LLaMA", "transformers GPT-2", "transformers LLaMA"} <= found.keys()
    sizes = {name: sum(p.numel() for p in side.model.parameters()) for name, side in found.items()}
    assert sizes["our LLaMA"] == sizes["transformers LLaMA"]
    named = found["transformers GPT-2"].model.named_parameters()
    biases = sum(p.numel() for name, p in named if name.endswith("bias"))
    assert sizes["our GPT-2"] == sizes["transformers GPT-2"] - biases
    for side in found.values():
        before = side.loss(side.x, side.y)
        side.step(side.loss)
        after = side.loss(side.x, side.y)
        assert after < before  # one step learns
        assert abs(before.item() - np.log(65)) < 0.5  # the mean over the tokens, in nats
        assert all(p.grad is None for p in side.model.parameters())


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
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    monkeypatch.setattr(decode, "MODES", (("float32", False), ("int8", False)))
    sizes = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--vocab_size=11", "--block_size=32"]
    options = ["--tokens=16", "--steps=2", "--threads=1"]
    speed.main(["decode", *sizes, *options, f"--llamacpp={tmp_path}"])

    text = (tmp_path / "speed.md").read_text()
    rows = {row["what"]: row for row in json.loads((tmp_path / "speed.jsonl").read_text())["rows"]}
    assert "| llama.cpp, F16 | 50 | 50 |" in text and "1 thread on" in text
    assert rows["transformers, cached"]["same text"] == rows[decode.OURS]["same text"] == 16
    int8 = rows["sampling/fast.py, int8, eager"]
    assert int8["times llama.cpp"]["ratio"] == pytest.approx(int8["tokens/s"] / 50)


def test_a_row_of_a_race_has_medians_then_each_round(tmp_path, monkeypatch):
    """Ours takes half of nanoGPT's seconds, and twice its CPU seconds."""
    theirs = [Result(60.0, 40, [(60.0, 1.9)]), Result(80.0, 50, [(70.0, 1.9), (80.0, 1.8)])]
    ours = [Result(30.0, 80, [(20.0, 1.8), (30.0, 1.74)], 1.9), Result(40.0, 100, [(30.0, 2)], 2.0)]
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    cpu_race.report({"nanoGPT": theirs, "ours": ours}, 2, ["--nanogpt=/home/me"])
    text = (tmp_path / "speed.md").read_text()
    assert (tmp_path / "cpu_race.png").stat().st_size > 10000
    row = "| ours | 35 (30, 40) | 0.50 (0.50, 0.50) | 90 (80, 100) | 2.00 (2.00, 2.00) |"
    assert f"{row} 1.8700 (1.7400, 2.0000) | 1.9500 (1.9000, 2.0000) | 1.8700 " in text
    assert "| not measured | 1.9000 (1.9000, 1.9000) |" in text
    assert "`python bench/cpu_race.py --nanogpt=PATH`. " in text and "nanoGPT on 2 threads" in text


def test_a_run_of_a_race_starts_cold_and_its_cpu_seconds_count(tmp_path, monkeypatch):
    script = """import os
assert not os.listdir(os.environ["TMPDIR"]) and "OMP_NUM_THREADS" not in os.environ
assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == os.environ["TMPDIR"]
sum(range(10**7))
print("step 9: train loss 1.0, val loss 2.5, 2.25 on the whole")"""
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = cpu_race.race(cpu_race.Entrant([], tmp_path), tmp_path, tmp_path / "cache")
    assert 0.02 < result.cpu <= result.wall and result.points[0][1] == 2.25
