"""extras/gallery.py: what is drawn is what the model's own code does."""

import re

import numpy as np
import pytest
import torch

from common.commands import ROOT
from extras import gallery
from model_llama import rotary
from parts.architectures import configure, make
from tokens.tokenizer import ByteTokenizer

SIZES = dict(model="llama", n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=257)


def model_with(**keys):
    torch.manual_seed(0)
    return make(configure(SIZES | keys)).eval()


def drawn_in(axes):
    return np.ma.getdata(axes.images[0].get_array())


def test_rope_is_drawn_on_the_circle_and_its_scores_depend_on_the_distance():
    *circles, scores = gallery.rope().axes[:4]
    cos, sin = rotary(torch.arange(24)[None], 10000.0, 16)
    for axes, pair in zip(circles, (0, 2, 4), strict=True):
        expected = torch.stack((cos[0, 0, :, pair], sin[0, 0, :, pair]), 1)
        assert np.allclose(axes.collections[0].get_offsets(), expected, atol=1e-6)
    values = drawn_in(scores)
    assert np.allclose(values, values.T, atol=1e-4) and np.ptp(values) > 5
    for distance in (0, 1, 5):
        assert np.ptp(values.diagonal(distance)) < 1e-4


@pytest.mark.parametrize("keys", gallery.MASKS.values(), ids=str)
def test_a_mask_is_what_the_heads_of_that_model_weigh(keys):
    attention_map = pytest.importorskip("extras.attention_map")
    model = model_with(**keys)
    weights = attention_map.attention_weights(model, torch.arange(16)[None], 1)
    seen = gallery.mask(keys, 16)
    assert seen.sum() > 16 and ((weights > 0) == seen).all()


def test_masks_while_sampling():
    assert (gallery.cached_mask(10, 6) == gallery.mask({}, 16)[10:]).all()
    padded = gallery.cached_mask(0, 16, pad=6)
    assert not padded[:, :6].any() and (padded[:, 6:] == gallery.mask({}, 10)).all()
    assert (gallery.cached_mask(10, 6, pad=6) == padded[4:]).all()
    figure = gallery.masks()
    assert len(figure.axes) == 6 and all(axes.collections for axes in figure.axes)


@pytest.mark.parametrize("across", [None, 1])
def test_attention_is_the_models_own(across):
    attention_map = pytest.importorskip("extras.attention_map")
    model = model_with()
    prompt = "abcab"
    figure = gallery.attention(model, ByteTokenizer(), prompt, "a title", across)
    idx = torch.tensor([list(prompt.encode())])
    for layer in range(2):
        weights = attention_map.attention_weights(model, idx, layer)
        for head in range(2):
            axes = figure.axes[2 * layer + head]
            back = sum(weights[head, i, j] * (i - j) for i in range(5) for j in range(5)) / 5
            assert np.array_equal(drawn_in(axes), weights[head])
            assert axes.get_title() == f"{layer}.{head}: {back:.1f} back"


def test_pictures_are_written(tmp_path, monkeypatch):
    pytest.importorskip("extras.attention_map")
    folder = tmp_path / "gallery"
    monkeypatch.setattr(gallery, "PICTURES", {"alibi": gallery.PICTURES["alibi"]})
    run = model_with(), ByteTokenizer(), {"model": "llama", "dataset": "d"}, {"step": 7}
    monkeypatch.setattr(gallery, "open_run", lambda out_dir: run)
    gallery.draw_all(gallery.GalleryConfig(llama="out", prompt="abc"), folder)

    names = sorted(path.name for path in folder.iterdir())
    assert names == ["alibi.png", "attention-llama-narrow.png", "attention-llama.png"]
    assert (folder / "alibi.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_all_pictures():
    folder = ROOT / "docs/gallery"
    page = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"gallery/([\w-]+\.png)", page))
    assert shown == {path.name for path in folder.iterdir()}
