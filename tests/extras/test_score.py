"""extras/score.py: the loss on a text, its surprise in colours."""

import json
import math

import pytest
import torch

from common.errors import UserError
from extras import score
from helpers.progression import CONTEXT, progression, trained
from sample import load, steps
from tokens.tokenizer import ByteTokenizer


def test_surprise_is_the_loss_and_what_sampling_says_of_its_own_text():
    """Within the context the mean is the model's own loss. Beyond it the surprise of each token is
    the one it had when it was sampled."""
    model = trained(())
    idx = progression(3, 2, CONTEXT + 1)[None]
    got = score.surprise(model, idx[0, 1:].tolist(), int(idx[0, 0]))
    assert abs(got.mean() - model(idx[:, :-1], idx[:, 1:])[1]) < 1e-6
    ids, said = [], []
    for token, logits in steps(model, torch.tensor([[1]]), 40, temperature=1.0, seeds=[3]):
        ids.append(token.item())
        said.append(-logits.log_softmax(-1)[0, ids[-1]].item())
    assert torch.allclose(score.surprise(model, ids, 1), torch.tensor(said).double(), atol=1e-5)


def test_scores_of_a_text(runs, capsys):
    model, tokenizer = load(runs[0])
    found = score.score_text(model, tokenizer, "the king of Zoë")
    assert found["tokens"] == 15 == len(found["surprise"]) and found["bytes"] == 16
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))
    total = found["nats_per_token"] * 15
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / 16)
    long = "a/long/path/" * 9
    score.print_scores([found | {"model": name} for name in ("a", long)])
    lines = capsys.readouterr().out.splitlines()[:3]
    assert len({len(line) for line in lines}) == 1  # no line is wrapped
    assert lines[1].split()[:3] == ["a", "15", f"{found['nats_per_token']:.4f}"]
    assert lines[2].split() == [long, *lines[1].split()[1:]]


def test_the_scores_of_two_models(runs, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("the king of Zoë\n", encoding="utf-8")
    argv = [*runs, f"--text={file}", "--device=cpu"]
    score.main(argv)
    shown = capsys.readouterr().out
    assert "compare only bits per byte" in shown and "[k]" in shown and "\033" not in shown
    score.main([*argv, "--jsonl"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["model"] for row in rows] == runs
    assert [row["bytes"] for row in rows] == [17, 17] == [len(rows[1]["surprise"])] * 2
    file.write_text("the king €\n", encoding="utf-8")
    score.main([*argv, "--skip_unknown"])
    assert "no number here can be compared" in capsys.readouterr().out
    file.write_text("")
    with pytest.raises(UserError, match="text.txt"):
        score.main(argv)
    with pytest.raises(UserError, match="nowhere.txt"):
        score.main([runs[0], "--text=nowhere.txt"])
    with pytest.raises(UserError, match="seed changes nothing here"):
        score.main([*argv, "--seed=3"])


def test_colours_follow_the_surprise_and_the_text_is_whole():
    nats = torch.tensor([0.1, 0.7, 3.0, 9.0, 100.0])
    painted = score.coloured(["a", "b\n", "\x1b[2J", "é", "z"], nats)
    assert painted.startswith("a\033[38;5;16;48;5;230mb↵\033[0m\n") and "\x1b[2J" not in painted
    assert score.texts_of(ByteTokenizer(), "aé".encode()) == ["a", "", "é"]
