"""Adding a part is one class, one word in parts/slots.py, and its formula: seven
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
from parts import attn_extra, block, catalogue, norm, residual, slots
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
    """{word: (slot, class, formula)} of the four examples of docs/add_a_part.md."""
    activation, mish, *others, shifted, mixer_line, mixer_formula = PRINTED[:11]
    scale_norm, norm_line, norm_formula, head_scale, extra_line, extra_formula = others
    shelf = with_class(shifted, SimpleNamespace())
    shelf.norm = with_class(scale_norm, norm)
    shelf.attn_extra = with_class(head_scale, attn_extra)
    classes = entry(activation, slots) | entry(norm_line, shelf)
    classes |= entry(extra_line, shelf) | entry(mixer_line, shelf)
    formula_of = entry(mish, references) | entry(norm_formula, references)
    formula_of |= entry(extra_formula, mixer_references)
    formula_of["shifted"] = with_class(mixer_formula, mixer_references).shifted
    slot_of = dict(mish="mlp", scalenorm="norm", head_scale="attn_extra", shifted="mixer")
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
        h[:, t] = sum((1 - a) * a ** (t - s) * v[:, s] for s in range(t + 1))
    return mixer.wo(h)


class Gated(block.Parallel):
    """x + mixer(norm(x)) + (a + b) mlp(w norm(x)), where a and b start at 0."""

    muon = ("w",)
    shape = (1,)  # of a
    start = 1.0  # of w

    def __init__(self, make):
        super().__init__(make)
        self.w = nn.Parameter(torch.empty(2, make.config.n_embd))  # w is the sum of its rows
        self.gate = nn.Parameter(torch.empty(self.shape))  # a
        self.more = nn.ParameterList([torch.empty(1)])  # b

    def reset(self):
        nn.init.constant_(self.w, self.start)
        nn.init.zeros_(self.gate)
        nn.init.zeros_(self.more[0])

    def forward(self, x, where, cache=None):
        h, x = self.residual.read(x, 0, where)
        h = self.norm1(h)
        gate = self.gate + self.more[0]
        return self.residual.add(x, self.attn(h, where, cache), gate * self.mlp(self.w.sum(0) * h))


def gated(block, x, mix, mlp, norm1):
    return x + mix(norm1(x)) + (block.gate + block.more[0]) * mlp(sum(block.w) * norm1(x))


hooks = dict(  # the stream is a list of what sublayers wrote; each reads the mean
    spread=lambda self, x: [x],
    read=lambda self, x, number, where: (sum(x) / len(x), x),
    add=lambda self, x, *outputs: [*x, *outputs],
    gathered=lambda self, x: sum(x),
)
DepthMean = type("DepthMean", (residual.Plain,), dict(paper="unpublished") | hooks)


class Counting(norm.BareRMSNorm):
    def forward(self, x):
        self.seen = getattr(self, "seen", torch.zeros(())) + self.training  # no buffer
        return (1 + self.seen) * super().forward(x)


PARTS = printed_parts() | {  # word: (its slot, its class, its formula)
    "contributor_mixer": ("mixer", Ema, ema),
    "gated": ("block", Gated, gated),
    "depth_mean": ("residual", DepthMean, lambda _, x, *more: [*x, more[-1](sum(x) / len(x))]),
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


@pytest.mark.parametrize(
    "slot, part, words",
    [
        ("norm", Counting, "keep its state in register_buffer"),
        (
            "block",
            type("", (Gated,), dict(muon=("w", "gate"))),
            "`muon` names .*0.gate.*no matric",
        ),
        ("block", type("", (Gated,), dict(shape=(1, 1))), r"shrinks .*gate, \(1, 1\)"),
        ("block", type("", (Gated,), dict(start=0)), "gradient of .*0.gate', .* each of 12 st"),
    ],
)
def test_what_would_not_train_or_not_be_saved_is_seen(slot, part, words, monkeypatch):
    monkeypatch.setitem(SLOTS[slot], "gated", part)
    with pytest.raises(AssertionError, match=words):
        gates.check("llama", {slot: "gated"})


def test_what_derives_from_attention_has_its_keys(monkeypatch):
    for keys in (dict(kv_shared_by=2, conv=3), dict(attn_extra="value_residual"), dict(bias="qkv")):
        gates.check("gpt2", dict(mixer="shifted,attention") | keys)
        torch.no_grad()(test_formulas.check_mixer)("shifted", dict(mixer="shifted") | keys)
    monkeypatch.setattr(PARTS["shifted"][1], "reads", ())  # it shares nothing
    gates.make(gates.config("gpt2", dict(mixer="shifted,attention", kv_shared_by=2, n_layer=4)))


@words
def test_it_is_its_formula(word):
    test_formulas.test_a_word_is_its_formula(PARTS[word][0], word)


@words
def test_its_costs_are_what_is_counted(word):
    change = {"arch": "gpt2", PARTS[word][0]: word}
    cost_gates.test_costs_are_what_is_counted(change)
    cost_gates.test_matching(change)


def test_the_tools_know_them(capsys):
    catalogue.main(["--model=gpt2"])
    printed = capsys.readouterr().out
    options = help_text("", [VariantConfig], everything=True)
    for word, (slot, *_) in PARTS.items():
        choices = options.partition(f"--{slot}=")[2].partition(")")[0]
        assert word in re.split(r"[\s(|]+", choices)
        arms = list_arms(AblateConfig(axis=slot), {"model": "gpt2"})
        assert word in [arm.name.removeprefix(f"{slot}=") for arm in arms]
        assert f" {word}" in catalogue.table()
        cost_gates.test_a_word_names_its_source(slot, word)
        assert f"\n  {word} " in printed
