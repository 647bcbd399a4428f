"""extras/attention_map.py: the picture, and its mistakes."""

import io

import pytest
import torch
from matplotlib.image import imread

from common.errors import UserError
from extras.attention_map import attention_weights, has_map, main, picture
from helpers.variants import ARMS, CORNER, config, name, randomised, tokens
from parts.attn_extra import Extra


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
    plain = plain and "kv_shared_by" not in arm and "values" not in arm.get("conv_sites", "")
    attention = arm.get("mixer", "attention").split(",")[-1] == "attention"
    assert has_map(model.blocks[1].attn) == (plain and attention)
    for T in (1, 3, 11) if plain and attention else ():
        check_map(model, tokens(model.config, 1, T))
    assert has_map(model.blocks[0].attn) or arm.get("attn_extra") != "value_residual"
    model.blocks[1].attn.extras = {"own": type("Own", (Extra,), {"output": None})(None, None, 1)}
    assert not has_map(model.blocks[1].attn)


def test_picture_is_a_png_with_a_panel_per_head():
    png = picture(torch.eye(30).repeat(3, 1, 1), ["$a_b", "␣", "中"] * 10, "a title")
    pixels = imread(io.BytesIO(png))
    assert png.startswith(b"\x89PNG") and pixels.shape[0] > 500 < pixels.shape[1]


def test_attention_is_written_as_a_picture(runs, tmp_path, capsys):
    out = tmp_path / "map.png"
    for _ in range(2):  # our own file is renewed
        main([runs[0], "--start=the king", f"--out={out}", "--layer=1", "--device=cpu"])
    shown = capsys.readouterr()
    assert out.read_bytes().startswith(b"\x89PNG")
    assert shown.out == "" and "layer 1" in shown.err
    out.write_text("mine")
    with pytest.raises(UserError, match="was not written by extras/attention_map.py"):
        main([runs[0], "--start=the", f"--out={out}", "--device=cpu"])
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    "number, more, words",
    [
        (0, ["--out=no/such/map.png"], "must be a .png in a folder .*out=no/such/map.png"),
        (0, ["--out=notes.txt"], "out=notes.txt"),
        (0, ["--out=/dev/full"], "out=/dev/full"),
        (0, ["--layer=2"], "layer=2"),
        (1, ["--context=17"], "context=17"),  # GPT-2 has positions for 16
        (0, ["second"], "name one model"),
        (0, ["--temperature=3"], "temperature changes nothing"),
    ],
)
def test_mistakes(runs, number, more, words):
    with pytest.raises(UserError, match=words):
        main([runs[number], "--start=the", "--device=cpu", *more])
