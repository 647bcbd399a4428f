"""The dry run: its numbers are the run's, its memory is what a step takes from the
allocator, and nothing is written."""

import re
from itertools import accumulate

import pytest
from torch.profiler import ProfilerActivity, profile

import train
from extras import dry_run
from helpers.runs import arguments, losses, ready
from training import step_costs
from training.optim import OPTIMIZER
from weights import checkpoint

MORE = ["--arch=falcon --activation_checkpointing"]
MORE += [f"--model=llama --optimizer={word}" for word in OPTIMIZER]


@pytest.mark.parametrize("more", MORE)
def test_dry_run_predicts_the_run_and_writes_nothing(data_dir, tmp_path, monkeypatch, capsys, more):
    monkeypatch.setattr(dry_run, "STEPS", 3)
    options = f"--max_iters=7 --eval_interval=3 --gradient_accumulation_steps=2 {more}"
    out = tmp_path / "run"
    run = arguments(data_dir, out, *options.split())
    assert dry_run.main(run) == 0 and not out.exists()
    printed = capsys.readouterr().out.partition("would cost")[2]
    rows = dict(re.findall(r"^  (\w+) +(.*)", printed, re.MULTILINE))
    train.main(run)
    count = sum(p.numel() for p in checkpoint.open_run(out)[0].parameters())
    assert rows["parameters"] == f"{count:,}" and rows["tokens"] == "896 in 7 steps"
    assert f"gradients {step_costs.size(4 * count)}, activations " in rows["memory"]
    evaluations = f"{len(losses(out, 'val_loss'))} evaluations of "
    assert "7 steps of " in rows["time"] and evaluations in rows["time"]
    files = [checkpoint.find(out) / f"{name}.safetensors" for name in ("model", "optimizer")]
    real = sum(file.stat().st_size for file in files)
    predicted, unit = rows["checkpoints"].split(" each")[0].split()
    assert float(predicted) * 1000 == pytest.approx(real, rel=0.15)  # file headers come on top
    assert unit == "kB"

    # Of a run that goes on: what is left. It is there as it was.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    capsys.readouterr()
    assert dry_run.main(["--init_from=resume", f"--out_dir={out}", "--max_iters=10"]) == 0
    printed = capsys.readouterr().out
    assert "3 steps of " in printed and "2 evaluations of " in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_dry_run_measures_its_seconds(data_dir, tmp_path, capsys, monkeypatch):
    """With a clock of our own: a step takes 2 s, the first 7 s, a token that is scored 1 ms."""
    clock, steps = [0.0], []
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock[0])

    def step(run):
        clock[0] += 2 if steps else 7
        steps.append(0)

    def score(run):
        clock[0] += 0.001 * (run.config.eval_tokens + min(run.config.eval_tokens, 100))

    run = ready(data_dir, tmp_path, "--eval_interval=20", "--eval_tokens=400")
    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(train, "score", score)
    monkeypatch.setattr(train, "EVAL_TRAIN_TOKENS", 100)
    dry_run.dry_run(run)  # 50 steps: evaluations at 0, 20, 40 and 50
    assert len(steps) == 21
    last = len(run.data.splits["val"].tokens) / 1000  # scores the whole split
    parts = f"50 steps of 2000.0 ms, 4 evaluations of 0.5 s and {last:.1f} s more for the last, "
    total = f"{100 + 4 * 0.5 + last + 5:.1f} s: {parts}the first step 5.0 s more"
    printed = capsys.readouterr().out
    assert f"time         {total}" in printed
    c = dry_run.variant_config(run)
    flops = dry_run.training_flops_per_token(c, c.block_size)
    step = flops * run.step_tokens
    assert f" {flops / 1e6:,.2f} MFLOP per token, {50 * step:.2g} FLOP in all" in printed
    assert f" tokens/s, {step / 2e9:,.1f} GFLOP/s" in printed


def nodes(tree):
    for node in tree:
        yield node
        yield from nodes(node.children)


def most_bytes(work):
    """The most bytes that work() has from torch's CPU allocator at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    tree = nodes(profiler.profiler.kineto_results.experimental_event_tree())
    changes = sorted((n for n in tree if n.name == "[memory]"), key=lambda n: n.start_time_ns)
    return max(accumulate(change.typed[1].alloc_size for change in changes))


SHAPES = {
    "deep": ["--n_layer=6", "--n_embd=96", "--n_head=3", "--batch_size=8", "--block_size=64"],
    "few tokens": ["--n_layer=2", "--n_embd=128", "--n_head=4", "--batch_size=2"],
}
KINDS = ["gpt2", "llama", "llama --vocab_size=5000 --multiple_of=8"]
KINDS += ["gpt2 --gradient_accumulation_steps=2", "gpt2 --activation_checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_estimate_is_the_peak_of_the_allocator(data_dir, tmp_path, kind, shape, dtype):
    keys = f"--dtype={dtype} --model={kind}".split()
    run = ready(data_dir, tmp_path, *SHAPES[shape], *keys)
    for _ in range(2):  # makes the moments
        train.train_step(run)
    parts = dry_run.memory(run)
    measured = parts["weights and moments"] + most_bytes(lambda: train.train_step(run))
    assert dry_run.peak(run, parts) == pytest.approx(measured, rel=0.1)
