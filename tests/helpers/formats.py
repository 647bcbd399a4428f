"""Comparing our models with those of other formats."""

import json
import os

import torch

from helpers.models import random_weights, tokens
from parts.architectures import configure, make

IDX = tokens(3, 33, vocab=999)


def parts(model):
    """config.json and the tensors of a transformers model, as a file has them: each expert apart,
    without a tied head."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = dict(revert_weight_conversion(model, model.state_dict()))
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return json.loads(model.config.to_json_string(use_diff=False)), tensors


@torch.no_grad()
def difference(reference, made, idx=IDX):
    """The largest difference of the logits, over their spread."""
    expected = reference(idx).logits
    return ((made(idx)[0] - expected).abs().max() / expected.std()).item()


def small_model(word, vocab_size=256, **more):
    """A readable model with random weights."""
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=4, n_embd=32, block_size=64, vocab_size=vocab_size)
    if word == "llama":
        sizes["n_kv_head"] = 2
    return random_weights(make(configure({"model": word} | sizes | more)).eval(), 0.4)


def replace_by_pipe(path):
    """By a pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(path)
