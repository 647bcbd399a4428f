"""Comparing our models with those of other formats."""

import json
import signal

import pytest
import torch

from common.errors import UserError
from helpers.models import tokens

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


# ---------------------------------------------------------------- what is refused, in one line


def refused(call, *args):
    """The one line of a UserError that comes within seconds."""

    def give_up(*_):
        pytest.fail("it takes too long")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    try:
        with pytest.raises(UserError) as caught:
            call(*args)
    finally:
        signal.alarm(0)
    assert "\n" not in str(caught.value) and caught.value.status == 2
    return str(caught.value)
