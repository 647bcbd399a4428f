"""What is shown of a model: loss on a text, surprise in colours, columns, attention maps."""

import io
import math
import re
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread
from rich.cells import cell_len

from common.errors import UserError
from helpers.progression import CONTEXT, progression, trained
from helpers.variants import ARMS, CORNER, config, name, randomised, tokens
from sample import steps
from sampling import look
from sampling.attention_map import attention_weights, has_map, picture, write_map
from sampling.decoding import pieces
from tokens.tokenizer import ByteTokenizer


def test_surprise_is_the_loss_and_what_sampling_says_of_its_own_text():
    """Within the context the mean is the model's own loss. Beyond it the surprise of each token is
    the one it had when it was sampled."""
    model = trained(())
    idx = progression(3, 2, CONTEXT + 1)[None]
    got = look.surprise(model, idx[0, 1:].tolist(), int(idx[0, 0]))
    assert abs(got.mean() - model(idx[:, :-1], idx[:, 1:])[1]) < 1e-6
    ids, said = [], []
    for token, logits in steps(model, torch.tensor([[1]]), 40, temperature=1.0, seeds=[3]):
        ids.append(token.item())
        said.append(-logits.log_softmax(-1)[0, ids[-1]].item())
    assert torch.allclose(look.surprise(model, ids, 1), torch.tensor(said).double(), atol=1e-5)


def test_scores_stand_in_columns(capsys):
    long = "a/long/path/" * 9
    model = trained(())
    tokenizer = SimpleNamespace(start=0, vocab_size=7, decode_bytes=bytes, to_json=dict)
    tokenizer.encode = lambda text: progression(1, 2, 9)
    opened = [SimpleNamespace(name=name, model=model, tokenizer=tokenizer) for name in ("a", long)]
    score = look.score_text(model, tokenizer, "text")
    assert score["tokens"] == score["bytes"] == 9 and len(score["surprise"]) == 9
    assert score["perplexity"] == pytest.approx(math.exp(score["nats_per_token"]))
    assert score["bits_per_byte"] == pytest.approx(score["nats_per_token"] / math.log(2))
    config = SimpleNamespace(context=None, score="file", jsonl=False, skip_unknown=False)
    look.report_score(opened, "", config)
    lines = capsys.readouterr().out.splitlines()[:3]
    assert len({len(line) for line in lines}) == 1  # no line is wrapped
    assert lines[1].split()[:3] == ["a", "9", f"{score['nats_per_token']:.4f}"]
    assert lines[2].split() == [long, *lines[1].split()[1:]]


def test_colours_follow_the_surprise_and_the_text_is_whole():
    nats = torch.tensor([0.1, 0.7, 3.0, 9.0, 100.0])
    painted, legend = look.coloured(["a", "b\n", "\x1b[2J", "é", "z"], nats).rsplit("\n", 1)
    assert painted == (
        "a\033[38;5;16;48;5;230mb↵\033[0m\n"
        "\033[38;5;16;48;5;208m\\x1b[2J\033[0m\033[97;48;5;53mé\033[0m\033[97;48;5;53mz\033[0m"
    )
    assert all(f"\033[{colour}m" in legend for _, colour in look.LEVELS if colour)
    assert pieces(ByteTokenizer(), "aé".encode()) == ["a", "", "é"]


def test_columns(capsys, monkeypatch):
    """On a terminal of 83 columns."""
    stdout = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(look, "sys", SimpleNamespace(stdout=stdout))
    for key, value in (("TERM", "xterm-256color"), ("COLUMNS", "83")):
        monkeypatch.setenv(key, value)
    texts = ["one two three " * 8, "中文字" * 30 + "\nend\x07[bold]"]
    look.show_columns(["first", "[second]"], texts)
    shown = re.sub("\033.*?m", "", capsys.readouterr().out)
    lines = [line.split("│") for line in shown.splitlines() if "│" in line]
    assert all(cell_len(line) <= 83 for line in shown.splitlines())
    assert [cell.strip() for cell in lines[0]] == ["first", "[second]"]
    left, right = zip(*lines[1:], strict=True)
    assert " ".join(" ".join(left).split()) == texts[0].strip(), "words are not broken"
    assert "".join(cell.strip() for cell in right) == "中文字" * 30 + "end\\x07[bold]"
    monkeypatch.setenv("COLUMNS", "60")  # too narrow
    look.show_columns(["first", "second"], ["one", "two"])
    assert capsys.readouterr().out == "first:\none\n\nsecond:\ntwo\n"


def check_map(model, idx):
    """Weights times values is what layer 1 gives to wo."""
    attn, T, seen = model.blocks[1].attn, idx.size(1), {}
    hooks = [
        attn.wv.register_forward_hook(lambda module, inputs, v: seen.update(v=v)),
        attn.wo.register_forward_pre_hook(lambda module, inputs: seen.update(y=inputs[0])),
    ]
    model(idx)
    for hook in hooks:
        hook.remove()
    H, K = attn.n_head, getattr(attn, "n_kv_head", attn.n_head)
    weights = attention_weights(model, idx, 1).double()
    v = seen["v"].double().view(T, K, -1).transpose(0, 1).repeat_interleave(H // K, 0)  # (H, T, D)
    y = (weights @ v).transpose(0, 1).reshape(T, -1)
    assert torch.allclose(y, seen["y"][0].double(), atol=1e-5)
    assert torch.allclose(weights.sum(-1), torch.ones(H, T).double(), atol=1e-5)
    assert weights.triu(1).abs().max() == 0
    assert not attn.wv._forward_hooks and not attn.wo._forward_pre_hooks


READABLE = [CORNER, CORNER | dict(n_kv_head=2), CORNER | dict(model="gpt2")]


@torch.no_grad()
@pytest.mark.parametrize("arm", READABLE + ARMS, ids=name)
def test_attention_map_explains_the_models_attention(arm):
    """With more tokens than a head has features, with fewer, and with one."""
    model = randomised(config("llama", arm)).float()
    plain = arm.get("attn_extra", "none") == "none"
    attention = arm.get("mixer", "attention").split(",")[-1] == "attention"
    assert has_map(model.blocks[1].attn) == (plain and attention)
    for T in (1, 3, 11) if plain and attention else ():
        check_map(model, tokens(model.config, 1, T))


def test_picture_is_a_png_with_a_panel_per_head():
    png = picture(torch.eye(30).repeat(3, 1, 1), ["$a_b", "␣", "中"] * 10, "a title")
    pixels = imread(io.BytesIO(png))
    assert png.startswith(b"\x89PNG") and pixels.shape[0] > 500 < pixels.shape[1]


def test_a_layer_without_attention_has_no_map(tmp_path):
    model = SimpleNamespace(blocks=[SimpleNamespace(attn=object())])
    with pytest.raises(UserError, match="layer 0 has no attention"):
        write_map(tmp_path / "map.png", "run", model, None, "a", 0)
