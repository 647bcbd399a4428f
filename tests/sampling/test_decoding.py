"""Sampling with every word of every slot: with a cache, in a batch or beyond the context the text
is the same as without. The models are trained until their text depends on the prompt."""

import math

import pytest
import torch

import sample
from helpers.progression import progression, trained
from helpers.texts import tiny_bpe
from helpers.variants import ARMS, config, name
from sample import probabilities, steps
from sampling.reader import Reader, ragged
from sampling.text import Sample
from tokens.tokenizer import ByteTokenizer

# Numbers that continue in equal strides, modulo 7. The next one follows from two tokens, and the
# stride is the prompt's.
BASE = config("llama")
MORE = [dict(arch="gpt2"), dict(window=5, block="parallel", position="alibi", n_kv_head=2)]
DIFFERENT = [{}, *(arm for arm in ARMS if config("llama", arm) != BASE), *MORE]
# What says which earlier tokens a token reads, and what is kept of them. Of the other arms, whose
# caches the gates test, a few stand for all.
READING = {"position", "mixer", "window", "full_every", "block_local", "conv"}
OTHERS = [*MORE, dict(mlp="moe"), dict(attn_extra="value_embed")]


class Uncached(Reader):
    """Reads the whole text again for each token."""

    def read(self, idx, last=1):
        self.cache = None
        return super().read(idx, last)


def written(model, idx, n, **more):
    """(tokens (B, n), logits (B, n, V))"""
    tokens, logits = zip(*steps(model, idx, n, **more), strict=True)
    return torch.cat(tokens, dim=1), torch.stack(logits, dim=1)


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, marks=[] if set(arm) <= READING or arm in OTHERS else pytest.mark.slow)
        for arm in DIFFERENT
    ],
    ids=name,
)
def test_cached_and_batched_text_is_the_text(arm, monkeypatch):
    """Greedy within the model's block_size, and drawn in a longer context (beyond the window), from
    prompts of 4 and 17 tokens: the cache, a batch and a ragged batch give the text of one row."""
    model, n = trained(tuple(arm.items())), 9
    rows = [progression(1, 3, 4), progression(2, 1, 17)]
    idx, pad = ragged(rows)
    drawn = dict(temperature=1.2, top_k=5, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    for more in (dict(temperature=0), drawn if model.wpe.limit else drawn | dict(context=24)):
        both, both_logits = written(model, idx, n, pad=pad, seeds=[5, 6], **more)
        for row, seed, got, got_logits in zip(rows, (5, 6), both, both_logits, strict=True):
            with monkeypatch.context() as patched:
                patched.setattr(sample, "Reader", Uncached)
                text, logits = written(model, row[None], n, seeds=[seed], **more)
            cached, cached_logits = written(model, row[None], n, seeds=[seed], **more)
            assert torch.equal(text, cached) and torch.equal(text[0], got)
            tolerance = 1e-5 * max(1, logits.abs().max())
            assert (logits - cached_logits).abs().max() < tolerance
            assert (logits[0] - got_logits).abs().max() < tolerance
        assert not torch.equal(*both), "the text depends on the prompt"


LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        (dict(temperature=0.5), [0.01, 0.16, 0.04, 0.09]),
        (dict(temperature=0), [0, 1, 0, 0]),
        (dict(top_k=2), [0, 0.4, 0, 0.3]),
        (dict(top_k=9), [0.1, 0.4, 0.2, 0.3]),  # above the vocabulary: all of it
        (dict(top_p=1e-300), [0, 1, 0, 0]),  # 0 in float32
        (dict(top_p=0.6), [0, 0.4, 0, 0.3]),
        (dict(top_p=0.7001), [0, 0.4, 0.2, 0.3]),
        (dict(top_p=0.5, shift=-LOGITS), [1, 1, 0, 0]),  # two of four equal ones reach it exactly
        (dict(top_p=1.0), [0.1, 0.4, 0.2, 0.3]),
        (dict(min_p=0), [0.1, 0.4, 0.2, 0.3]),
        (dict(min_p=0.7), [0, 0.4, 0, 0.3]),
        (dict(min_p=1), [0, 1, 0, 0]),
        # of two tokens that have been seen, a positive logit is divided, a negative one multiplied
        (dict(repetition_penalty=2.0, seen=torch.tensor([[0, 1, 0]])), [0.01, 0.16, 0.2, 0.3]),
        (
            dict(repetition_penalty=2.0, seen=torch.tensor([[0]]), shift=3.0),
            [0.1**0.5 * math.exp(-1.5), 0.4, 0.2, 0.3],
        ),
    ],
    ids=str,
)
def test_settings_of_the_draw(settings, expected):
    expected = torch.tensor([expected])
    got = probabilities(LOGITS + settings.pop("shift", 0.0), **settings)
    assert torch.allclose(got, expected / expected.sum(), atol=1e-6)


@pytest.mark.parametrize("value", [1e-300, 1e300])
@pytest.mark.parametrize("key", ["temperature", "repetition_penalty"])
def test_extreme_settings_are_still_probabilities(key, value):
    logits = torch.tensor([[2.0, -1.0, 0.0, 1.0], [-3.0, -1.0, -2.0, -4.0]])
    p = probabilities(logits, **{key: value}, seen=torch.tensor([[0, 1, 2, 3]] * 2))
    assert torch.allclose(p.sum(-1), torch.ones(2)) and (p >= 0).all()


def test_probabilities_are_those_of_the_token_drawn():
    sample = Sample("", [], ByteTokenizer(), explain=True)
    sample.add(3, LOGITS[0])  # at temperature 1, whatever it was drawn at
    assert math.exp(sample.logprobs[0]) == pytest.approx(0.3)
    assert sample.top[0][:2] == [(1, pytest.approx(0.4)), (3, pytest.approx(0.3))]


def test_stop_is_never_shown_in_part_and_cuts_where_it_first_appears():
    sample = Sample("", [], ByteTokenizer(), stop="abac")
    shown = [sample.add(token, None) for token in b"xababac"]
    assert shown == ["x", "", "", "", "ab", "", ""]
    assert sample.done and sample.text == "xab" and sample.end() == ""
    assert sample.tokens == list(b"xababac")
    sample = Sample("", [], ByteTokenizer(), stop="abac")
    shown = [sample.add(token, None) for token in "aéa".encode()]
    assert "".join([*shown, sample.end()]) == "aéa" == sample.text
    sample = Sample("", [], ByteTokenizer())
    assert [sample.add("é".encode()[0], None), sample.end()] == ["", "�"]
    sample = Sample("", [], tiny_bpe(), stop="\n")
    assert sample.add(259, None) == sample.text == ""  # a token of two line ends
