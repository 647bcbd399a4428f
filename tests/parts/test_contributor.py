"""Adding a part is one class, one word in parts/slots.py, and its formula: four
parts, each added from outside as a contributor would, pass every gate, and --help, costs, catalogue
and ablation know them."""

import re
from types import SimpleNamespace

import formulas
import mixer_references
import pytest
import references
import test_costs as cost_gates
import test_formulas
import torch
import torch.nn as nn

from bench.ablation.arms import list_arms
from bench.ablation.settings import AblateConfig
from common.commands import ROOT
from common.configurator import help_text
from helpers import gates
from parts import attn_extra, costs, norm, slots
from parts.cache import Recurrent
from parts.part import Mixer, linear
from parts.slots import SLOTS
from parts.variant import VariantConfig

PRINTED = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/add_a_part.md").read_text(encoding="utf-8"), re.DOTALL
)


def entry(line, scope):
    """{word: value} of a printed line of a dictionary."""
    return eval("{" + line + "}", dict(vars(scope)))


def with_class(block, module):
    """A copy of a module with the class that is printed."""
    scope = dict(vars(module))
    exec(block, scope)
    return SimpleNamespace(**scope)


def printed_parts():
    """{word: (slot, class, formula)} of the three examples of docs/add_a_part.md."""
    activation, mish, *others = PRINTED[:8]
    scale_norm, norm_line, norm_formula, head_scale, extra_line, extra_formula = others
    shelf = SimpleNamespace(
        norm=with_class(scale_norm, norm), attn_extra=with_class(head_scale, attn_extra)
    )
    classes = entry(activation, slots) | entry(norm_line, shelf) | entry(extra_line, shelf)
    formula_of = entry(mish, references) | entry(norm_formula, references)
    formula_of |= entry(extra_formula, mixer_references)
    slot_of = dict(mish="mlp", scalenorm="norm", head_scale="attn_extra")
    return {word: (slot_of[word], classes[word], formula_of[word]) for word in slot_of}


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


def ema(mixer, x, where):
    v, a = mixer.wv(x), 1 / (1 + (-mixer.decay).exp())
    h = torch.zeros_like(v)
    for t in range(x.size(1)):
        for s in range(t + 1):
            h[:, t] += (1 - a) * a ** (t - s) * v[:, s]
    return mixer.wo(h)


PARTS = printed_parts() | {  # word: (its slot, its class, its formula)
    "contributor_mixer": ("mixer", Ema, ema),
}
words = pytest.mark.parametrize("word", PARTS)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """The parts, in their dictionaries for the length of one test."""
    for word, (slot, part, formula) in PARTS.items():
        monkeypatch.setitem(SLOTS[slot], word, part)
        monkeypatch.setitem(formulas.FORMULAS[slot], word, formula)


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
        arms = list_arms(AblateConfig(axis=slot), {"model": "gpt2"})
        assert word in [arm.name.removeprefix(f"{slot}=") for arm in arms]
        assert f" {word}" in costs.table()
        cost_gates.test_a_word_names_its_source(slot, word)
        assert f"\n  {word} " in catalogue
