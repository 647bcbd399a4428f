"""sampling/attention_map.py: the weights explain what the model's own attention computes."""

import pytest
import torch

from helpers.variants import ARMS, CORNER, config, name, randomised, tokens
from sampling.attention_map import attention_weights, has_map


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
