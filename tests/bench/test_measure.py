"""What is measured of a trained model: its losses with other contexts, and a sweep of pairs."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ablate
from bench.ablation import measure, plans
from common.runtime import set_up
from helpers.ablation import arguments, arm, rows_of
from helpers.sweeps import write_lines
from parts.architectures import configure, make
from prepare import prepare


def test_extrapolation_scores_the_same_tokens_with_more_before_them():
    torch.manual_seed(0)
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=11, multiple_of=8)
    model = make(configure({"model": "llama"} | sizes)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    tokens, runtime = np.random.default_rng(0).integers(0, 11, 400), set_up("cpu", "float32")
    found = measure.extrapolation(model, tokens, runtime, most=64 * 8)  # 8 windows
    ends = np.unique(np.linspace(64, 399, 8).astype(int))

    def loss_at(end, context, targets):
        """Of the last tokens of a window."""
        logits = model(torch.tensor(tokens[end - context : end])[None])[0][0, -targets:]
        wanted = torch.tensor(tokens[end + 1 - targets : end + 1])
        return torch.nn.functional.cross_entropy(logits, wanted).item()

    for n in (1, 4):
        each = [loss_at(end, 8 * n, 2) for end in ends]
        entry = found[str(n)]
        assert entry["loss"] == pytest.approx(sum(each) / len(each), abs=1e-5)
        half = 2.365 * np.std(each, ddof=1) / len(each) ** 0.5  # t of 7 degrees of freedom
        assert entry["high"] - entry["loss"] == pytest.approx(half, rel=1e-3)
        assert entry["window"] == found["1"]["window"]
    # The training context of 8 tokens slides with each target.
    slid = [loss_at(end, 8, 1) for last in ends for end in (last, last - 1)]
    assert found["4"]["window"]["loss"] == pytest.approx(sum(slid) / len(slid), abs=1e-5)
    assert measure.extrapolation(model, tokens[:18], runtime)["1"]["loss"] > 0  # 1 target
    short = measure.extrapolation(model, tokens[:20], runtime)
    assert short["8"]["why"] == "the validation text has 20 tokens" and "loss" in short["2"]


def test_the_last_stride_counts_with_its_targets(monkeypatch):
    """Nine targets in strides of two: here the loss of a stride is its number of targets."""
    model = SimpleNamespace(config=SimpleNamespace(block_size=36))
    losses = lambda model, tokens, ends, context, targets, runtime: np.full(len(ends), targets)
    monkeypatch.setattr(measure, "losses_at_ends", losses)
    assert measure.sliding_losses(model, [], np.array([99]), 9, None) == pytest.approx(17 / 9)


@pytest.fixture(scope="module")
def answers(data_dir):
    """Beside words: pairs."""
    words = (data_dir / "words.txt").read_text().split()
    pairs = [{"prompt": f"{a} ", "answer": b} for a, b in pairwise(words[:301])]
    path = write_lines(data_dir, pairs, "answers.jsonl")
    prepare("answers", input=str(path), tokenizer="byte", data_dir=str(data_dir))


@pytest.mark.slow
def test_pairs_are_measured_for_what_they_are(answers, data_dir, out):
    what = [arm(rope=dict(position="rope")), "--dataset=answers", "--seeds=1", "--screening"]
    assert ablate.main(arguments(data_dir, out, *what)) == 0
    rows = rows_of(out)
    assert plans.plan(out)["data"]["kind"] == "pairs" and len(rows) == 3
    for row in rows.values():
        assert row["status"] == "done" and row["final_val_loss"] < row["first_val_loss"]
        # Nats per answer's token are no bits per byte of the pairs.
        assert row["extrapolation"] == {}
