"""Adding a part is one class, one word in parts/slots.py, and its formula: five
parts, each added from outside as a contributor would, pass every gate, and --help, costs, catalogue
and ablation know them."""

import math
import re

import formulas
import gates
import mixer_references
import pytest
import references
import test_costs as cost_gates
import test_formulas
import torch
import torch.nn as nn
from torch.nn import functional as F

from bench.ablation.designs import enumerate_arms
from bench.ablation.settings import AblateConfig
from common.configurator import help_text
from parts import costs
from parts.attn_extra import Extra
from parts.cache import Recurrent
from parts.mlp import GatedMLP, PlainMLP
from parts.norm import Norm
from parts.part import Mixer, linear
from parts.slots import ATTN_EXTRA, MIXER, MLP, NORM, SLOTS
from parts.variant import VariantConfig


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


def a_word_of_attn_extra():
    class HeadScale(Extra):
        """The head's output is multiplied by a learned number, at first 1."""

        paper = "Shleifer et al. 2021, arXiv:2110.09456"

        def __init__(self, attention, config, layer):
            attention.head_scale = nn.Parameter(torch.empty(attention.n_head))

        def reset(self, attention):
            nn.init.ones_(attention.head_scale)

        def output(self, attention, x, y, own):
            return y * attention.head_scale[:, None, None]

    ATTN_EXTRA["contributor_extra"] = HeadScale


# and in references.py or mixer_references.py:


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


headscale = mixer_references.adding(output=lambda mixer, y, x, own, h: mixer.head_scale[h] * y)
PARTS = {  # word: (its slot, what adds it, its formula)
    "contributor_activation": ("mlp", an_activation, references.plain(mish)),
    "contributor_gated": ("mlp", a_gated_mlp, references.gated(math.sin)),
    "contributor_norm": ("norm", a_norm, scalenorm),
    "contributor_mixer": ("mixer", a_mixer_with_a_state, ema),
    "contributor_extra": ("attn_extra", a_word_of_attn_extra, headscale),
}
words = pytest.mark.parametrize("word", PARTS)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """The parts, in their dictionaries for the length of one test."""
    before = {slot: dict(words) for slot, words in SLOTS.items()}
    for word, (slot, add, formula) in PARTS.items():
        add()
        monkeypatch.setitem(formulas.FORMULAS[slot], word, formula)
    yield
    for slot, words in before.items():
        SLOTS[slot].clear()
        SLOTS[slot].update(words)


@pytest.mark.parametrize("word", [*PARTS, "attention,contributor_mixer"])
def test_it_passes_the_gates(word):
    slot = PARTS[word.split(",")[-1]][0]
    position = dict(position="sinusoidal") if slot == "mixer" else {}
    gates.check("gpt2", {slot: word} | position)


@words
def test_it_is_its_formula(word):
    test_formulas.test_a_word_is_its_formula(PARTS[word][0], word)


@words
def test_its_costs_are_what_is_counted(word):
    change = {"arch": "gpt2", PARTS[word][0]: word}
    cost_gates.test_costs_are_what_is_counted(change)
    cost_gates.test_matching(change)


def test_the_tools_know_them(capsys):
    costs.main(["--model=gpt2"])
    catalogue = capsys.readouterr().out
    options = help_text("", [VariantConfig], everything=True)
    for word, (slot, *_) in PARTS.items():
        choices = options.partition(f"--{slot}=")[2].partition(")")[0]
        assert word in re.split(r"[\s(|]+", choices)
        arms = enumerate_arms(AblateConfig(axis=slot), {"model": "gpt2"})
        assert word in [arm.name.removeprefix(f"{slot}=") for arm in arms]
        assert f" {word}" in costs.table() and costs.paper(slot, word)
        assert f"\n  {word} " in catalogue
