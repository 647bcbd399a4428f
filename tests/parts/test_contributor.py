"""Adding a part is one class and one word in one file, and its formula in references.py: four
parts, each added from outside as a contributor would, pass every gate, and --help, costs, catalogue
and ablation know them."""

import math
import re

import pytest
import references
import test_costs as cost_gates
import test_variants as gates
import torch
import torch.nn as nn
from torch.nn import functional as F

from bench.ablation.arms import list_arms
from bench.ablation.settings import AblateConfig
from common.configurator import help_text
from parts import costs
from parts.cache import Recurrent
from parts.mlp import MLP, GatedMLP, PlainMLP
from parts.norm import NORM, Norm
from parts.part import MIXER, Mixer, linear
from parts.variant import SLOTS, VariantConfig


def an_activation():
    MLP["contributor_activation"] = PlainMLP.of("Misra 2019, arXiv:1908.08681", F.mish)


def a_gated_mlp():
    MLP["contributor_gated"] = GatedMLP.of("made up for this test", torch.sin)


def a_norm():
    class ScaleNorm(Norm):
        """scale * x / |x|, with one learned number that starts at sqrt(C)."""

        paper = "Nguyen & Salazar 2019, arXiv:1910.05895"
        biased = False

        def __init__(self, width, config):
            super().__init__()
            self.width = width
            self.scale = nn.Parameter(torch.empty(1))

        def reset(self):
            nn.init.constant_(self.scale, math.sqrt(self.width))

        def forward(self, x):
            return self.scale / x.norm(dim=-1, keepdim=True).clamp(min=1e-5) * x

    NORM["contributor_norm"] = ScaleNorm


def a_mixer_with_a_state():
    class Ema(Mixer):
        """h_t = a h_(t-1) + (1 - a) v_t in each channel, with a learned a = sigmoid(decay)."""

        paper = "Ma et al. 2022, arXiv:2209.10655"
        state = Recurrent

        def __init__(self, config, layer):
            super().__init__()
            self.wv = linear(config.n_embd, config.n_embd, config)
            self.wo = linear(config.n_embd, config.n_embd, config, residual=True)
            self.decay = nn.Parameter(torch.empty(config.n_embd))
            self.dropout = nn.Dropout(config.dropout)

        def reset(self):
            nn.init.uniform_(self.decay, 0.0, 3.0)

        def forward(self, x, where, cache=None):
            v, a, h = self.wv(x), self.decay.sigmoid(), 0  # v (B, T, C)
            if cache is not None:
                v, h = cache.without_padding(v), cache.last()
            states = []
            for new in ((1 - a) * v).unbind(1):  # (B, C)
                h = a * h + new
                states.append(h)
            states = torch.stack(states, dim=1)  # (B, T, C)
            if cache is not None:
                cache.update(states)
            return self.dropout(self.wo(states))

        def held(self, T):
            return len(self.decay)  # one number per channel, however long the text

    MIXER["contributor_mixer"] = Ema


# and in references.py:


def mish(x):
    return x * math.tanh(math.log1p(math.exp(x)))


def scalenorm(norm, x):
    return norm.scale * x / x.square().sum(-1, keepdim=True).sqrt()


def ema(mixer, x, where):
    v, a = mixer.wv(x), 1 / (1 + (-mixer.decay).exp())
    h = torch.zeros_like(v)
    for t in range(x.size(1)):
        for s in range(t + 1):
            h[:, t] += (1 - a) * a ** (t - s) * v[:, s]
    return mixer.wo(h)


PARTS = {  # word: (its slot, what adds it, its formula)
    "contributor_activation": ("mlp", an_activation, references.plain(mish)),
    "contributor_gated": ("mlp", a_gated_mlp, references.gated(math.sin)),
    "contributor_norm": ("norm", a_norm, scalenorm),
    "contributor_mixer": ("mixer", a_mixer_with_a_state, ema),
}
words = pytest.mark.parametrize("word", PARTS)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """The parts, in their dictionaries for the length of one test."""
    before = {slot: dict(words) for slot, words in SLOTS.items()}
    for word, (slot, add, formula) in PARTS.items():
        add()
        monkeypatch.setitem(references.FORMULAS[slot], word, formula)
    yield
    for slot, words in before.items():
        SLOTS[slot].clear()
        SLOTS[slot].update(words)


GATES = [
    gates.test_bites,
    gates.test_causality,
    gates.test_cache,
    gates.test_ragged_batch_is_one_at_a_time,
    gates.test_rewinding_forgets,
    gates.test_gradient_reaches_every_parameter_and_the_first_loss_is_right,
    gates.test_every_parameter_has_exactly_one_initialiser,
]


@pytest.mark.parametrize("word", [*PARTS, "attention,contributor_mixer"])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_it_passes(word, gate):
    slot = PARTS[word.split(",")[-1]][0]
    position = dict(position="sinusoidal") if slot == "mixer" else {}
    gate("gpt2", {slot: word} | position)


@words
def test_it_is_its_formula(word):
    gates.test_a_word_is_its_formula(PARTS[word][0], word)


@words
def test_its_costs_are_what_is_counted(word):
    change = {"arch": "gpt2", PARTS[word][0]: word}
    cost_gates.test_costs_are_what_is_counted(change)
    cost_gates.test_matching(change)


@words
def test_the_tools_know_it(word, capsys):
    slot = PARTS[word][0]
    choices = (
        help_text("", [VariantConfig], everything=True).partition(f"--{slot}=")[2].partition(")")[0]
    )
    assert word in re.split(r"[\s(|]+", choices)
    arms = list_arms(AblateConfig(axis=slot), {"model": "gpt2"})
    assert word in [arm.name for arm in arms]
    assert f" {word}" in costs.table() and costs.paper(slot, word)
    costs.main(["--model=gpt2"])
    assert f"\n  {word} " in capsys.readouterr().out
