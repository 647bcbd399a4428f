"""The conversion of a checkpoint of nanoGPT, which docs/nanogpt.md prints."""

import re

import pytest
import torch
from torch.nn import functional as F

from common.commands import ROOT
from helpers.families import ours
from helpers.texts import message
from weights import hf

C, H, V, T = 32, 4, 65, 64  # width, heads, vocabulary, context
SHAPES = {  # of the weights of a layer; a bias is as wide as the first of them
    "ln_1": (C,),
    "attn.c_attn": (3 * C, C),
    "attn.c_proj": (C, C),
    "ln_2": (C,),
    "mlp.c_fc": (4 * C, C),
    "mlp.c_proj": (C, 4 * C),
}


def saved(bias):
    """A checkpoint as nanoGPT saves a compiled model, with random numbers."""
    shapes = {"wte": (V, C), "wpe": (T, C), "ln_f": (C,)}
    shapes |= {f"h.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
    model = {}
    for name, shape in shapes.items():
        model[f"_orig_mod.transformer.{name}.weight"] = 0.3 * torch.randn(shape)
        if bias and name not in ("wte", "wpe"):
            model[f"_orig_mod.transformer.{name}.bias"] = 0.3 * torch.randn(shape[0])
    model["_orig_mod.lm_head.weight"] = model["_orig_mod.transformer.wte.weight"]
    sizes = dict(n_layer=2, n_head=H, n_embd=C, block_size=T, bias=bias, vocab_size=V, dropout=0.1)
    return {"model": model, "optimizer": {}, "model_args": sizes, "iter_num": 5}


def logits(model, idx):
    """What nanoGPT's model computes of idx (1, T), from its tensors."""
    tensors = {name.removeprefix("_orig_mod.transformer."): t for name, t in model.items()}

    def norm(x, name):
        return F.layer_norm(x, (C,), tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def linear(x, name):
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def heads(x):
        return x.view(1, -1, H, C // H).transpose(1, 2)

    x = tensors["wte.weight"][idx] + tensors["wpe.weight"][: idx.size(1)]
    for layer in ("h.0", "h.1"):
        q, k, v = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn").split(C, dim=2)
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(1, -1, C), f"{layer}.attn.c_proj")
        h = F.gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"))
        x = x + linear(h, f"{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ tensors["wte.weight"].T


@pytest.mark.parametrize("bias", [False, True])
def test_a_converted_checkpoint_computes_the_same(bias, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(saved(bias), "ckpt.pt")
    page = (ROOT / "docs/nanogpt.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    model = ours(*hf.load_pretrained("from-nanogpt"), dtype=torch.float32)
    idx = torch.randint(V, (1, T))
    expected = logits(torch.load("ckpt.pt", weights_only=True)["model"], idx)
    assert torch.allclose(model(idx)[0], expected, atol=1e-4)


def test_a_checkpoint_of_nanogpt_is_refused_with_the_page_that_converts_it(tmp_path):
    (tmp_path / "ckpt.pt").touch()
    page = "docs/nanogpt.md converts a ckpt.pt"
    assert page in message(hf.load_pretrained, str(tmp_path / "ckpt.pt"))
    assert page in message(hf.load_pretrained, str(tmp_path))
