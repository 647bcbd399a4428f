"""A small model of ours for each family."""

import torch

from parts.architectures import configure, make
from weights.hf import load_weights


def ours(word, values, tensors, dtype=torch.float64, **changes):
    made = make(configure({"model": word} | values | changes)).to(dtype).eval()
    load_weights(made, tensors)
    return made
