"""The gates that every part passes, made from the dictionaries of parts/slots.py: a new word is
tested without writing a test, but for its formula in references.py.

    python -m pytest tests/parts -k swiglu               # one word alone, in seconds
    python -m pytest -m slow tests/parts/test_gates.py   # GPT-2's arms, combinations of slots
"""

import itertools

import pytest
import torch

from common.errors import UserError
from helpers import gates
from helpers.variants import SCALED, SLOTS, bases, config, gate, randomised, with_keys
from parts import attention
from parts.architectures import ARCH, make
from parts.attn_extra import Extra
from parts.cache import visible
from parts.slots import ATTN_EXTRA, MIXER, MLP, POSITION
from parts.variant import Variant


@gate
def test_gates(base, arm):
    gates.check(base, arm)


@pytest.mark.parametrize("arch", ARCH)
def test_named_architectures_train(arch):
    torch.manual_seed(0)
    gates.learns(make(config("gpt2", dict(arch=arch, n_embd=32, n_experts=4, top_k=2))))


@torch.no_grad()
def test_a_dead_switch_would_be_seen(monkeypatch):
    """Rotation that is skipped, as in a published "NoPE = RoPE" result."""
    monkeypatch.setitem(POSITION, "rope", POSITION["none"])
    rope = randomised(config("llama"))
    arm = dict(position="none")
    with pytest.raises(AssertionError, match="are those without"):
        gates.changes_logits(rope, randomised(config("llama", arm)), arm)


@torch.no_grad()
def test_wrong_masks_would_be_seen(monkeypatch):
    """None at all, as in a guide's grouped-query attention, and a window that is off by one."""

    def everything(self, q, k, v, qpos, kpos, mask, bias):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with monkeypatch.context() as patch:
        patch.setattr(attention.Attention, "attend", everything)
        with pytest.raises(AssertionError, match="sees the future"):
            gates.causality(randomised(config("llama", dict(n_kv_head=2, embed_norm=True))))
    monkeypatch.setitem(MIXER, "own", type("Own", (attention.Attention,), {"attend": everything}))
    with pytest.raises(AssertionError, match="with a cache differ"):
        gates.cached(randomised(config("llama", with_keys("own"))))
    wider = lambda qpos, kpos, window=0, group=0: visible(qpos, kpos, window + bool(window), group)
    monkeypatch.setattr(attention, "visible", wider)
    with pytest.raises(AssertionError):
        gates.cached(randomised(config("llama", dict(window=5))))


def test_parameters_that_would_not_start_or_train_are_refused(monkeypatch):
    class Foreign(MLP["gelu"]):
        def __init__(self, config):
            super().__init__(config)
            self.extra = torch.nn.Linear(2, 2)

    class HeadGain(Extra):
        def __init__(self, attention, config, layer):
            self.gain = torch.nn.Linear(2, 2)

    monkeypatch.setitem(MLP, "foreign", Foreign)
    monkeypatch.setitem(ATTN_EXTRA, "gain", HeadGain)
    with pytest.raises(TypeError, match="Linear does not say .*use `linear`"):
        Variant(config("gpt2", dict(mlp="foreign")))
    with pytest.raises(TypeError, match="on `attention`"):
        Variant(config("gpt2", dict(attn_extra="gain")))


PAIRS = [
    {a: v} | {b: w}
    for (a, vs), (b, ws) in itertools.combinations(SLOTS.items(), 2)
    for v in vs
    for w in ws
]
TINY = dict(block_size=10, n_layer=1, n_head=2, n_embd=8, vocab_size=11, window=3)


def tiny(base, arm):
    """The smallest configuration of an arm, or None where its words do not go together."""
    scaled = SCALED if arm.get("rope_scaling", "none") != "none" else {}
    mixer = MIXER[arm.get("mixer", "attention")]
    window = TINY["window"] if "window" in mixer.reads else 0
    if "q and k" not in mixer.acted_on:
        scaled = dict(position="sinusoidal")  # it has no place for others
    try:
        return config(base, TINY | dict(window=window) | scaled | arm)
    except UserError:
        return None


@torch.no_grad()
@bases
@pytest.mark.slow
def test_all_pairs_of_words(base):
    pairs = [c for c in (tiny(base, arm) for arm in PAIRS) if c]
    assert len(pairs) > 0.85 * len(PAIRS)  # few are refused: rope and qk_norm need attention
    for c in pairs:
        model = randomised(c)
        gates.causality(model)
        gates.cached(model, [0, 5, 6, 10])
