"""extras/speed: the sides of a comparison have one size and do the same work, and measurements are
stored with their facts. No time is checked."""

import json
import os
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from bench.ablation.step_times import ratio
from common.commands import ROOT
from common.errors import UserError
from common.runtime import Runtime
from extras.speed import __main__ as speed
from extras.speed import attention, decode, optimizer, page, race, results
from extras.speed import train as train_step
from extras.speed.race import Result
from helpers.runs import made
from parts.architectures import configure
from training import terminal
from training.evaluation import mean_loss
from training.optim import AdamW, Muon


@pytest.fixture(autouse=True)
def tiny(tmp_path, monkeypatch):
    """Shapes that take no time, and results in tmp_path."""
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    for name in train_step.SHAPES:
        shape = train_step.Shape(n_layer=2, n_head=2, n_embd=64, block_size=16, batch_size=3)
        monkeypatch.setitem(train_step.SHAPES, name, shape)


@pytest.fixture
def measured(tmp_path):
    """A function that runs a measurement and returns its line of speed.jsonl and the page."""
    threads = torch.get_num_threads()

    def measure(*argv):
        speed.main(list(argv))
        line = json.loads((tmp_path / "speed.jsonl").read_text().splitlines()[-1])
        return line, (tmp_path / "speed.md").read_text()

    yield measure
    torch.set_num_threads(threads)


def checked(line, text):
    """{what: row} of a measurement. Its facts and rows are on the page, each ratio in its
    interval."""
    assert line["command"] in text and str(line["commit"]) in text and line["hardware"] in text
    for row in line["rows"]:
        assert f"\n| {row['what']} |" in text
        for value in row.values():
            if isinstance(value, dict):
                assert 0 < value["low"] <= value["ratio"] <= value["high"]
    return {row["what"]: row for row in line["rows"]}


def test_sides_are_of_one_size_and_take_the_same_step():
    runtime, shape = Runtime("cpu", "float32", 0, 1), train_step.SHAPES["S"]
    found = train_step.make_sides(train_step.SpeedConfig(), shape, runtime)
    assert found.keys() >= {"our GPT-2", "our LLaMA", "transformers GPT-2", "transformers LLaMA"}
    sizes = {name: sum(p.numel() for p in side.model.parameters()) for name, side in found.items()}
    assert sizes["our LLaMA"] == sizes["transformers LLaMA"]
    theirs = found["transformers GPT-2"].model.named_parameters()
    biases = sum(p.numel() for name, p in theirs if name.endswith("bias"))
    assert sizes["our GPT-2"] == sizes["transformers GPT-2"] - biases
    for side in found.values():
        before = side.loss(side.x, side.y)
        side.step(side.loss)
        after = side.loss(side.x, side.y)
        assert after < before  # one step learns
        assert abs(before.item() - np.log(65)) < 0.5  # the mean over the tokens, in nats
        assert all(p.grad is None for p in side.model.parameters())
    named = train_step.make_sides(train_step.SpeedConfig(only="LLaMA"), shape, runtime)
    assert named.keys() == {"our LLaMA", "transformers LLaMA"}


def test_the_formula_and_the_kernels_compute_the_same_attention():
    torch.manual_seed(0)
    *qkv, gradient = torch.randn(4, 2, attention.H, 24, attention.D)
    for tensor in qkv:
        tensor.requires_grad_()
    results = {}
    for name in (attention.FORMULA, "torch's choice", "FlashAttention"):
        y = attention.SIDES[name](*qkv)
        results[name] = torch.stack([y, *torch.autograd.grad(y, qkv, gradient)])
    for result in results.values():
        torch.testing.assert_close(result, results[attention.FORMULA])


def test_attention_may_run_out_of_memory(measured, monkeypatch):
    """Which is a result: the other sides and lengths are still timed."""

    def formula(q, k, v):
        if q.size(2) == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return attention.formula(q, k, v)

    monkeypatch.setitem(attention.SIDES, attention.FORMULA, formula)
    real, times = attention.times_in_turn, []
    timed = lambda *given: times.append(real(*given)) or times[-1]
    monkeypatch.setattr(attention, "times_in_turn", timed)
    lengths = ["--tokens=128", "--shortest=32", "--longest=64"]
    line, text = measured("attention", "--device=cpu", "--steps=2", *lengths)
    rows = checked(line, text)
    theirs, ours = (times[0][name].sum(1) for name in (attention.FORMULA, "FlashAttention"))
    assert rows["32 tokens, FlashAttention"]["times the formula"] == ratio(theirs / ours)
    assert len(rows) == 10
    failed = {"what": "64 tokens, the formula", "forward, ms": "out of memory"}
    assert rows["64 tokens, the formula"] == failed
    assert rows["64 tokens, FlashAttention"].keys() == {"what", "forward, ms", "backward, ms"}
    assert "| 64 tokens, the formula | out of memory |" in text


def test_optimizers_are_timed_at_both_shapes(measured, monkeypatch):
    real, times = optimizer.time_shape, {}
    monkeypatch.setattr(optimizer, "time_shape", lambda *given: times.update(real(*given)) or times)
    line, text = measured("optimizer", "--device=cpu", "--steps=3")
    (row,) = line["rows"]
    steps = [times["model"] + times[key] for key in ("muon", "adamw")]
    assert row["step with Muon / with AdamW"] == ratio(steps[0] / steps[1])
    assert row["torch's Muon / Muon"] == ratio(times["torch"] / times["muon"])
    assert row["Muon, ms"] > row["AdamW, ms"]
    assert "**S, 1 thread on" in text and "**M, 1 thread on" in text


def test_each_ratio_of_training_steps_has_its_direction(measured, monkeypatch):
    """Seconds made up: ours takes half of theirs, compiled, and 48 tokens in 0.1 s."""
    made = {"our": (0.4, 0.1), "transformers": (0.3, 0.2)}

    def compare(sides, config, dtypes):
        times = {}
        for name in sides:
            eager, compiled = made[name.split()[0]]
            times[name, "eager bfloat16"] = np.full(5, eager)
            times[name, "compiled bfloat16"] = np.full(5, compiled)
        return times, dict.fromkeys(times, 3000000000.0)

    monkeypatch.setattr(train_step, "compare", compare)
    monkeypatch.setattr(train_step, "peak_flops", lambda runtime: 1e9)
    pytest.importorskip("transformers")
    line, text = measured("train", "--device=cpu", "--shape=S")
    row = checked(line, text)["our GPT-2"]
    assert row["times transformers"]["ratio"] == 2 and row["compiled bfloat16, ms"] == 100
    c = configure({"model": "gpt2", "arch": "gpt2"} | train_step.SHAPES["S"].model_keys())
    share = train_step.training_flops_per_token(c, 16) * 48 / 0.1 / 1e9
    cells = f"| 480 | 2.00 (2.00 to 2.00) | {share:.1%} | 3.00 | 400 | 100 |"
    assert f"| our GPT-2 | {row['M parameters']:.2f} {cells}" in text


def test_the_shape_of_the_answer_is_timed_with_muon(measured, monkeypatch):
    """Our models alone, after the shape S."""
    made, side = [], train_step.Side
    monkeypatch.setattr(train_step, "Side", lambda *words: made.append(side(*words)) or made[-1])
    line, text = measured("train", "--device=cpu", "--steps=2", "--compile=False")
    assert checked(line, text).keys() == {"our GPT-2", "our LLaMA"}
    assert "**A, 1 thread on" in text and "**S, 1 thread on" in text
    assert [type(each.optimizers[0]) for each in (made[0], made[-1])] == [AdamW, Muon]


def test_a_batch_of_texts_is_timed_beside_transformers(measured):
    pytest.importorskip("transformers")
    assert decode.timed(lambda n: time.sleep(0.1), 1, 100)[1] > 20  # 1,000 tokens a second
    sizes = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--vocab_size=11", "--block_size=32"]
    options = ["--tokens=4", "--steps=2", "--threads=1", "--batch_size=3"]
    line, text = measured("decode", *sizes, *options)
    rows = checked(line, text)
    assert rows.keys() == {decode.OURS, decode.TRANSFORMERS} and line["name"] == "batch 3"
    assert {row["same text"] for row in rows.values()} == {4}


@pytest.mark.slow
def test_decoding_is_timed_beside_other_engines(measured, tmp_path, monkeypatch):
    """A stand-in for llama.cpp prints the tokens, and as their speed the bytes of the weights."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    pytest.importorskip("extras.gguf")
    (tmp_path / "node_modules" / "node-llama-cpp").mkdir(parents=True)
    node = tmp_path / "bin" / "node"
    node.parent.mkdir()
    node.write_text('#!/bin/sh\ntest -s "$3" && echo 1 2\necho "tok/s: $(wc -c <"$3")" >&2\n')
    node.chmod(0o755)
    monkeypatch.setenv("PATH", f"{node.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(decode, "MODES", (("float32", False), ("int8", False)))
    sizes = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--vocab_size=11", "--block_size=32"]
    options = ["--tokens=16", "--steps=2", "--threads=1"]
    line, text = measured("decode", *sizes, *options, f"--llamacpp={tmp_path}")
    rows = {row["what"]: row for row in line["rows"]}
    sizes = [rows[f"llama.cpp, {kind}"]["tokens/s"] for kind in ("F32", "F16", "Q8_0")]
    assert sizes[0] > sizes[1] > sizes[2] and "1 thread on" in text
    assert rows["transformers, cached"]["same text"] == rows[decode.OURS]["same text"] == 16
    int8 = rows["sampling/fast.py, int8, eager"]
    assert int8["times llama.cpp"]["ratio"] == pytest.approx(int8["tokens/s"] / sizes[2])


def test_a_row_of_a_race_has_medians_then_each_round(tmp_path):
    """Ours takes half of nanoGPT's seconds, and twice its CPU seconds."""
    theirs = [Result(60.0, 40, [(60.0, 1.9)]), Result(80.0, 50, [(70.0, 1.9), (80.0, 1.8)])]
    ours = [Result(30.0, 80, [(20.0, 1.8), (30.0, 1.74)], 1.9), Result(40.0, 100, [(30.0, 2)], 2.0)]
    measured = race.measured({"nanoGPT": theirs, "ours": ours}, 2)
    command = results.command_text(["race", "--nanogpt=/home/me"])
    results.record("race", measured, "cpu", command)
    text = page.page()
    assert (tmp_path / "cpu_race.png").stat().st_size > 10000
    row = "| ours | 35 (30, 40) | 0.50 (0.50, 0.50) | 90 (80, 100) | 2.00 (2.00, 2.00) |"
    assert f"{row} 1.8700 (1.7400, 2.0000) | 1.9500 (1.9000, 2.0000) | 1.8700 " in text
    assert "| not measured | 1.9000 (1.9000, 1.9000) |" in text
    assert "`python -m extras.speed race --nanogpt=PATH`. " in text
    assert "nanoGPT on 2 threads" in text


def test_a_run_of_ours_is_judged_by_all_of_the_test_split(runs, monkeypatch, capsys):
    """Its command is given to train.main here, since a process takes seconds to start."""

    def run_here(command, **options):
        assert command[:2] == [sys.executable, "train.py"] and options["cwd"] == ROOT
        capsys.readouterr()
        train.main(command[2:])
        return SimpleNamespace(stdout=capsys.readouterr().out)

    monkeypatch.setattr(race, "subprocess", SimpleNamespace(run=run_here, PIPE=None))
    run = made(["--init_from=resume", f"--out_dir={runs[0]}"])
    sums = train.evaluate(run, run.data.open_split("test", 16), 0)
    assert race.test_loss(runs[0]) == pytest.approx(mean_loss(sums), abs=1e-4)


def test_a_run_of_a_race_starts_cold_and_its_cpu_seconds_count(tmp_path, monkeypatch):
    script = """import os
assert not os.listdir(os.environ["TMPDIR"]) and "OMP_NUM_THREADS" not in os.environ
assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == os.environ["TMPDIR"]
sum(range(10**7))
"""
    row = {"step": 9, "train_loss": 1, "val_loss": 2.5, "bits_per_byte": 3, "whole_val_loss": 2.25}
    script += f"print({terminal.evaluation_lines(row)!r})"
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = race.race(race.Entrant([], tmp_path), tmp_path, tmp_path / "cache")
    assert 0.02 < result.cpu <= result.wall and result.points[0][1] == 2.25


def test_a_race_is_fair(tmp_path, monkeypatch):
    """nanoGPT has the threads that are fastest for it, and each round of ours its own seed."""
    begun = []
    ended = lambda entrant: Result(9.0 if entrant.threads == 1 else 5.0, 1, [(1.0, 2.0)])
    monkeypatch.setattr(race, "race", lambda side, *_: begun.append(side) or ended(side))
    monkeypatch.setattr(race, "test_loss", lambda out_dir: 2.0)
    monkeypatch.setattr(race.os, "cpu_count", lambda: 4)
    assert race.best_threads(tmp_path, tmp_path) == 4
    race.run_rounds(race.SpeedConfig(), tmp_path, 4, tmp_path)
    seeds = {side.command[-1] for side in begun if side.folder == ROOT}
    assert seeds == {"--seed=1337", "--seed=1338"}


def test_a_run_alone_is_stopped_and_judged_by_its_lowest_loss(measured, tmp_path, monkeypatch):
    script = """import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
folder = pathlib.Path(sys.argv[-1].partition("=")[2])
folder.mkdir()
(folder / "latest").write_text("000018")
for loss in (2.5, 1.5, 1.75):
    print(f"step 9: train loss 1.0, val loss {loss}")
time.sleep(60 if sys.argv[1:4] == ["config/a.py", "--device=cpu", "--seed=2"] else 0)"""
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setattr(race, "Entrant", partial(race.Entrant, folder=tmp_path))
    line, text = measured("race", "--alone=a", "--words=--seed=2", "--seconds=1")
    row = checked(line, text)["config/a.py"]
    assert 1 <= row["wall s"] < 50 and row["lowest after, s"] < 1
    assert row["validation loss"] == 1.5 and row["steps"] == 18
    assert "cpu_race.png" not in text


@pytest.mark.parametrize("argv", [[], ["train", "decode"], ["flash"], ["page", "--steps=2"]])
def test_one_measurement_is_named(argv):
    with pytest.raises(UserError, match="python -m extras.speed train, optimizer"):
        speed.main(argv)


def test_the_page_has_the_newest_measurement_of_each_machine(monkeypatch):
    """Not measured on a GPU, until it is; a measurement on a CPU is none on a GPU."""
    assert page.page().count("not measured (`") == 7
    facts = {"torch": "2", "git_commit": "c"}
    names = {"cpu": "a CPU", "cuda": "a chip", "cuda:0": "a chip"}
    monkeypatch.setattr(results, "versions", lambda device: facts | {"hardware": names[device]})
    for device, median in (("cpu", 2.0), ("cpu", 3.0), ("cuda", 5.0), ("cuda:0", 7.0)):
        rows = [{"what": "T = 512", "kernel, ms": None, "ratio": ratio([median, median])}]
        measured = {"name": "", "about": "Attention.", "rows": rows}
        command = results.command_text(["train", "--nanogpt=/home/me"])
        results.record("train", measured, device, command, threads=2 if median == 2.0 else 1)
    text = page.page()
    assert "**2 threads on a CPU** | | |\n| T = 512 | not measured | 2.00 (2.00 to 2.00) |" in text
    assert "|  | kernel, ms | ratio |" in text and "5.00" not in text
    assert "**a chip** | | |\n| T = 512 | not measured | 7.00 (7.00 to 7.00) |" in text
    assert "**1 thread on a CPU** | | |\n| T = 512 | not measured | 3.00 (3.00 to 3.00) |" in text
    assert "gpu.sh train" not in text and "not measured (`" in text
    assert "`python -m extras.speed train --nanogpt=PATH`" in text


def test_the_page_in_the_repo_is_the_one_of_its_rows(monkeypatch):
    monkeypatch.delenv("BENCH_RESULTS", raising=False)
    stored = (ROOT / "bench/results/speed.md").read_text(encoding="utf-8")
    assert stored == page.page(), "run: python -m extras.speed page"
