"""Longer contexts than in training: losses beside a computation by hand."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train
from common.errors import UserError
from common.runtime import set_up
from extras import extrapolate
from helpers.runs import arguments
from parts.slots import ROPE_SCALING
from prepare import prepare
from tokens.token_files import load_split
from weights import checkpoint

RUNS = {
    "learned": ["--model=gpt2"],
    "rope": ["--model=llama"],
    "alibi": ["--model=llama", "--position=alibi"],
}


@pytest.fixture(autouse=True)
def few_windows(monkeypatch):
    monkeypatch.setattr(extrapolate, "TOKENS", 8 * 128)  # 8 windows of the text


@pytest.fixture(scope="module")
def world(data_dir, tmp_path_factory):
    """A folder with a short run of each kind, with a context of 16."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in RUNS.items():
        short = ["--max_iters=20", "--learning_rate=1e-2", "--eval_interval=20", *more]
        train.main(arguments(data_dir, folder / name, *short))
    return folder


def lines_of(data_dir, *outs):
    """(context of training, the lines of some runs)."""
    config = extrapolate.ExtrapolateConfig(data_dir=str(data_dir), device="cpu")
    return extrapolate.lines_of(outs, config, set_up("cpu", "float32"))


@pytest.mark.slow
@torch.no_grad()
def test_every_run_and_scaling_scores_the_same_targets(world, data_dir, capsys):
    outs = [str(world / name) for name in RUNS]
    context, found = lines_of(data_dir, *outs)
    lines = {title.removeprefix(f"{world}/"): losses for title, losses in found.items()}
    scaled = [f"rope, {word}" for word in ROPE_SCALING if word != "none"]
    assert list(lines) == ["learned", "rope", *scaled, "alibi"] and context == 16

    # NTK-aware scaling by hand: rope with another theta. Heads are 16 wide.
    tokens = load_split(data_dir / "words", "val", 16)
    folder = checkpoint.find(world / "rope")
    keys = json.loads((folder / "config.json").read_text())
    theta = 10000 * 8 ** (16 / 14)
    model = checkpoint.load_model(folder, keys | dict(rope_theta=theta, arch="llama")).eval()
    ends = np.unique(np.linspace(128, len(tokens) - 1, 8).astype(int))
    for n, context in ("8", 128), ("0.5", 8), ("1.5", 24):
        losses = []
        for end in ends:
            ids = torch.tensor(tokens[end - context : end + 1].astype(np.int64))
            logits = model(ids[None, :-1])[0][0]
            losses.append(F.cross_entropy(logits[-4:], ids[-4:]).item())
        assert lines["rope, ntk"][n]["loss"] == pytest.approx(np.mean(losses), abs=1e-5)

    extrapolate.main([f"--data_dir={data_dir}", "--device=cpu", *outs])
    page = capsys.readouterr().out
    assert "loss" in lines["learned"]["1"] and "loss" not in lines["learned"]["1.5"]
    assert f"No loss for {world}/learned: cannot read 128 tokens: block_size is 16" in page
    rows = {row.split()[0]: row for row in page.split("16 tokens\n")[1].splitlines() if row}
    for losses in lines.values():
        assert f" {losses['1']['loss']:.3f} ±" in rows["16"]
        assert f" {losses['1']['window']['loss']:.3f} ±" in rows["baseline"]


def test_a_loss_has_half_the_width_of_its_interval():
    assert extrapolate.text_of({"loss": 2.0, "low": 1.9, "high": 2.1}) == "2.000 ± 0.100"


def test_runs_that_cannot_be_compared_are_refused(world, data_dir, tmp_path):
    more = ["--max_iters=1", "--block_size=8", "--model=llama"]
    train.main(arguments(data_dir, tmp_path / "short", *more))
    with pytest.raises(UserError, match="words at block_size=16 .* words at block_size=8"):
        lines_of(data_dir, str(world / "rope"), str(tmp_path / "short"))


def test_each_run_is_scored_in_its_own_tokens(world, data_dir, tmp_path, monkeypatch):
    """The last of two runs of a dataset with this name was trained on other characters. Another
    form of the same tokens is no difference."""
    (tmp_path / "words.txt").write_text("others, with a comma\n" * 300)
    prepare("words", input=str(tmp_path / "words.txt"), tokenizer="char", data_dir=str(tmp_path))
    train.main(arguments(tmp_path, tmp_path / "run", "--max_iters=1", *RUNS["rope"]))
    with pytest.raises(UserError, match="this dataset has other tokens than the model"):
        lines_of(data_dir, str(world / "rope"), str(tmp_path / "run"))
    monkeypatch.setattr("tokens.tokenizer.CharTokenizer.to_json", lambda self: id(self))
    extrapolate.tokens_of(data_dir / "words", checkpoint.open_run(world / "rope")[1], 16)
