"""A model trained to count, whose continuations are known."""

import functools

import torch

from helpers.variants import config
from parts.variant import Variant

V, CONTEXT = 7, 12


def progression(start, stride, n):
    return (start + stride * torch.arange(n)) % V


@functools.cache
def trained(key):
    """LLaMA with some parts swapped, trained until its text depends on the prompt."""
    torch.manual_seed(0)
    model = Variant(config("llama", dict(key), vocab_size=V, block_size=CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, fused=True)
    for _ in range(80):
        numbers = torch.randint(1, V, (24, 2))
        idx = progression(*numbers.split(1, dim=1), CONTEXT + 1)
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        if loss < 1:
            break
    assert loss < 1.6  # ln 7 = 1.95 knows nothing
    return model.eval()
