"""parts/costs.py against counting: parameters, torch's FLOP counter, the cache's own size; the
matching; parts/catalogue.py; and that the slots cost nothing."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.commands import ROOT
from helpers.variants import ARMS, arm_of, name
from parts import architectures, catalogue, costs
from parts.architectures import ARCH, CORNERS
from parts.cache import KVCache
from parts.slots import SLOTS
from parts.variant import Variant

PAGE = (ROOT / "docs/parts.md").read_text(encoding="utf-8")
PASTE = "paste what `python -m parts.catalogue --table` prints into docs/parts.md"
SHAKESPEARE = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65)
SMALL = dict(n_layer=2, n_head=4, n_embd=64, block_size=32, vocab_size=99, multiple_of=16)
every = pytest.mark.parametrize(
    "change",
    [dict(arch=word) for word in ARCH]
    + [dict(arch="llama") | arm for arm in ARMS]
    + [pytest.param(dict(arch="gpt2") | arm, marks=[pytest.mark.slow]) for arm in ARMS],
    ids=name,
)


def configure(**values):
    """The VariantConfig of an arch and changes to it, with what a mixer needs beside it."""
    values = {"arch": "llama"} | values
    if values.get("mixer") in SLOTS["mixer"]:
        values = arm_of("mixer", values["mixer"]) | values
    return architectures.configure(values)


def flops(model, T):
    """FLOPs per token that torch counts. The counter does not know the fused attention of a CPU,
    which is therefore computed as two matrix products."""
    idx = torch.zeros(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(idx)
    return counter.get_total_flops() / T


@every
def test_costs_are_what_is_counted(change):
    """FLOPs; the bytes of a cache, in which 32 tokens at once make room for 64
    (cache.py doubles), and a ring just for its window."""
    c = configure(**SMALL | change)
    model = Variant(c).eval()
    assert costs.flops_per_token(c, 20) == flops(model, 20), "flops(T) of the part is wrong"
    cache = KVCache()
    with torch.no_grad():
        model(torch.zeros(1, 32, dtype=torch.long), cache=cache)
    assert cache.size() == costs.kv_bytes(c, 64), "held(T) of the mixer is wrong"


def test_backward_costs_twice_the_forward():
    """Each matrix product is run backward for both factors. Tested on a model whose attention torch
    counts on a CPU."""
    c = configure(**SMALL | dict(attn_softcap=5.0))
    x = torch.zeros(1, 20, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        Variant(c)(x, x)[1].backward()
    assert counter.get_total_flops() == 20 * costs.training_flops_per_token(c, 20)


@every
def test_matching(change):
    """At width 384 and at a tiny one the costs come within half a percent of the base's."""
    wide = SHAKESPEARE | dict(n_layer=2)
    for what, sizes in (("params", wide), ("flops", wide), ("params", SMALL)):
        base, c = configure(**sizes | dict(arch="gpt2")), configure(**sizes | change)
        try:
            width, residual = costs.match(c, base, what)
        except ValueError as refused:
            too_coarse = "moe" in c.mlp and sizes is SMALL
            assert c.low_rank or too_coarse or c.mlp == "none"
            assert "no MLP width" in str(refused)
            continue

        def cost(c, T=base.block_size, what=what):
            return costs.active_parameters(c) if what == "params" else costs.flops_per_token(c, T)

        assert residual == pytest.approx(100 * (cost(replace(c, mlp_width=width)) / cost(base) - 1))
        assert abs(residual) <= 0.5
        assert width % 8 == 0 or sizes is SMALL or "moe" in c.mlp  # several are as wide


def output(capsys, *argv):
    catalogue.main(list(argv))
    return capsys.readouterr().out


# test_contributor.py prints GPT-2's, too.
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=[pytest.mark.slow])])
def test_catalogue_prints_every_word(capsys, model):
    text = output(capsys, f"--model={model}")
    sections = dict(re.findall(r"^(\w+)\n((?:  .*\n)+)", text, re.MULTILINE))
    for slot, words in catalogue.choices().items():
        lines = sections[slot].splitlines()
        assert [line.split()[0] for line in lines] == list(words)
        for line, word in zip(lines, words, strict=True):
            assert catalogue.paper(slot, word) in line
    changed_twice = r"^  loss   .* M active; with mlp=moe; Switch, arXiv:2101.03961$"
    assert re.search(changed_twice, text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120
    for word in ARCH:
        c = configure(arch=word, **SHAKESPEARE)
        row = rf"^  {word} +{costs.parameters(c):,} .* {costs.kv_bytes(c, 256) / 256:,.0f}  "
        assert re.search(row, text, re.MULTILINE)


# One test for each word, so that `-k WORD` runs it.
each_word = pytest.mark.parametrize(
    "slot, word", [(slot, word) for slot, words in SLOTS.items() for word in words]
)


@each_word
def test_a_word_names_its_source(slot, word):
    named = re.search(r"arXiv:|(19|20)\d\d|GPT-2|^unpublished$", catalogue.paper(slot, word))
    no_part = word == "none" and slot != "position"  # to leave positions out was an idea, too
    write = "write its year or arXiv number, or 'unpublished'"
    assert named or no_part, f"{slot}={word} names no paper: {write}"


@each_word
def test_the_table_in_the_docs_has_the_word(slot, word):
    row = PAGE.partition(f"\n| `{slot}` |")[2].partition("\n")[0]
    words = row.split("`")[1].split()
    assert word in words, f"the table in docs/parts.md lacks {slot}={word}: {PASTE}"


def test_the_docs_have_the_table(capsys):
    assert output(capsys, "--table") in PAGE, PASTE


@pytest.mark.parametrize("word", ARCH)
def test_diff_adds_up(capsys, word):
    """The steps between two architectures lead from the one's costs to the other's."""
    *steps, a, b = [
        [float(number.replace(",", "")) for number in line.split()[-3:]]
        for line in output(capsys, f"--diff=llama,{word}").splitlines()[1:]
    ]
    for column in range(3):
        assert a[column] + sum(step[column] for step in steps) == b[column]
    assert a == list(catalogue.summary(configure(arch="llama", **SHAKESPEARE)))
    assert b == list(catalogue.summary(configure(arch=word, **SHAKESPEARE)))


def operators(run):
    """How often each operator runs the second time: the very first backward does more."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return Counter(event.name for event in profile.events() if event.name.startswith("aten::"))


def trains(model, x):
    model.zero_grad(set_to_none=True)
    model(x, x)[1].backward()


@torch.no_grad()
def writes(model, x):
    cache = KVCache()
    model(x[:, :-1], cache=cache), model(x[:, -1:], cache=cache)


@pytest.mark.parametrize("word", CORNERS)
@pytest.mark.parametrize("sizes", [{}, dict(dropout=0.1)], ids=["plain", "dropout"])
@pytest.mark.parametrize("task", [trains, writes])
def test_the_slots_cost_nothing(word, sizes, task):
    """Variant filled as a corner runs exactly the corner's operators, each as often."""
    sizes, x = SMALL | sizes, torch.zeros(2, 32, dtype=torch.long)
    corner = architectures.make(architectures.configure(sizes | {"model": word}))
    variant = Variant(configure(arch=word, **sizes))
    wanted, got = operators(lambda: task(corner, x)), operators(lambda: task(variant, x))
    assert wanted["aten::mm"] + wanted["aten::addmm"] > 10
    assert got == wanted
