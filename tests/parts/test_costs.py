"""
What parts/costs.py says against counting: parameters, torch's FLOP counter, the cache's own size,
what autograd really saves; the matching; the catalogue; and that the slots cost nothing.

    python -m pytest tests/parts/test_costs.py
"""

import itertools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.configurator import keys
from common.errors import UserError
from model import GPT, GPTConfig
from model_llama import Llama, LlamaConfig
from parts import architectures, catalogue, costs
from parts.architectures import ARCH
from parts.cache import KVCache
from parts.mixer import MIXER
from parts.variant import SLOTS, Variant, VariantConfig

ROOT = Path(__file__).resolve().parent.parent.parent
SHAKESPEARE = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65)
ODD = dict(n_layer=7, n_head=5, n_embd=70, block_size=33, vocab_size=999, multiple_of=7)
SMALL = dict(n_layer=2, n_head=4, n_embd=64, block_size=32, vocab_size=99, multiple_of=16)
# Every word of every slot, and one or two values of every number that changes what is computed.
ONE = [{slot: word} for slot, words in catalogue.choices().items() for word in words] + [
    dict(n_kv_head=1),
    dict(window=8),
    dict(window=8, full_every=2),
    dict(block_local=8),
    dict(attn_softcap=5.0),
    dict(logit_softcap=5.0),
    dict(low_rank=3),
    dict(embed_norm=True),
    dict(tie_embeddings=True),
    dict(tie_embeddings=False),
    dict(mlp_width=50),
    dict(attn_sink=True),
    dict(nope_every=2),
    dict(value_residual=True),
    dict(value_embed=True),
    dict(xsa=True),
    dict(conv=3),
    dict(conv=4, window=8, n_kv_head=2),
    dict(residual="hyper", streams=3, block="parallel"),
    dict(mlp="moe", n_experts=3, top_k=3, moe_balance="bias"),
    dict(mlp="moe", shared_experts=2),
    dict(mixer="mla", latent_rank=40, rope_head_dim=6),
    dict(mixer="differential", n_kv_head=2),
    dict(mixer="gated_delta,attention", position="none"),
    dict(mixer="gated_delta", state_size=7, expand=2, conv=2),
    dict(mixer="mamba2", state_size=9, expand=2, conv=2),
]
every = pytest.mark.parametrize(
    "change",
    [dict(arch=word) for word in ARCH]
    + [dict(arch=base) | change for base in ("gpt2", "llama") for change in ONE],
    ids=lambda change: ",".join(f"{key}={value}" for key, value in change.items()),
)


def configure(**values):
    """The VariantConfig of an arch and changes to it; the test is skipped where it refuses them."""
    values = {"arch": "llama"} | values
    needs = dict(position="rope") if values.get("rope_scaling", "none") != "none" else {}
    if "q and k" not in MIXER[values.get("mixer", "attention").split(",")[0]].acted_on:
        needs = dict(position="none")
    try:
        return architectures.configure(values | needs)
    except UserError as refused:
        pytest.skip(str(refused))


def on_meta(config, model_class=Variant):
    with torch.device("meta"), costs.NoInitialValues():
        return model_class(config).eval()


def counted(module):
    return sum(p.numel() for p in module.parameters())


# ---------------------------------------------------------------- parameters


PARTS = {
    "wte": "embedding",
    "wpe": "position",
    "attn": "attention",
    "mlp": "mlp",
    "lm_head": "head",
}  # the rest are norms


@every
@pytest.mark.parametrize("sizes", [SMALL, ODD], ids=["small", "odd"])
def test_parameters(change, sizes):
    c = configure(**sizes | change)
    parts = Counter()
    for name, p in on_meta(c).named_parameters():
        words = name.split(".")
        parts[PARTS.get(words[2] if words[0] == "blocks" else words[0], "norms")] += p.numel()
    assert costs.parameter_table(c) == {part: parts[part] for part in costs.parameter_table(c)}
    assert costs.parameters(c) == parts.total()


@pytest.mark.slow
def test_parameters_of_every_pair():
    tiny, seen = dict(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=11, multiple_of=4), 0
    pairs = [
        (x, y)
        for x, y in itertools.combinations(ONE + [dict(relative_clip=3), dict(n_kv_head=2)], 2)
        if not x.keys() & y.keys()
    ]
    for x, y in pairs:
        try:
            c = architectures.configure(dict(arch="llama") | tiny | x | y)
        except UserError:  # rope_scaling without rope, bias=norm without a bias, window with groups
            continue
        seen += 1
        assert costs.parameters(c) == counted(on_meta(c)), (x, y)
    assert seen > 400


@pytest.mark.parametrize(
    "word, model_class, config", [("gpt2", GPT, GPTConfig), ("llama", Llama, LlamaConfig)]
)
def test_the_corners_own_models(word, model_class, config):
    c = configure(arch=word, **SHAKESPEARE)
    model = on_meta(config(**SHAKESPEARE), model_class)
    assert costs.parameters(c) == counted(model)
    assert costs.flops_per_token(c, 5) == flops(model, 5)


def test_published_counts():
    tied = dict(arch="llama", tie_embeddings=True) | SHAKESPEARE  # D45 in the claims
    assert costs.parameters(configure(arch="gpt2")) == 124_439_808
    assert costs.parameters(configure(arch="gpt2", **SHAKESPEARE)) == 10_770_816
    assert costs.parameters(configure(arch="gpt2", bias=False, **SHAKESPEARE)) == 10_745_088
    assert [costs.parameters(configure(n_kv_head=heads, **tied)) for heads in (6, 2, 3, 1)] == [
        10_646_784,
        9_467_136,
        9_762_048,
        9_172_224,
    ]
    llama7b = configure(n_layer=32, n_head=32, n_embd=4096, vocab_size=32000, block_size=2048)
    assert costs.parameters(llama7b) == 6_738_415_616


def test_widths_of_llama():
    """The 2/3 is fixed, ffn_dim_multiplier comes after it."""
    for C, multiplier, multiple, width in [
        (4096, None, 256, 11008),
        (8192, 1.3, 4096, 28672),
        (4096, 1.3, 1024, 14336),
    ]:
        assert (
            costs.mlp_width(
                configure(n_head=32, n_embd=C, ffn_dim_multiplier=multiplier, multiple_of=multiple)
            )
            == width
        )
    # Three matrices of two thirds are as many numbers as two.
    assert costs.mlp_width(configure(n_embd=768, multiple_of=1)) * 3 == 4 * 768 * 2
    assert costs.parameters(configure(mlp="gelu", mlp_width=3072)) == costs.parameters(
        configure(mlp="swiglu", mlp_width=2048)
    )


def test_grouped_heads():
    """GQA and MQA: what they save, and that scores and sums cost what they did."""

    def attention(H, K, C, **more):
        return costs.parameter_table(configure(n_layer=1, n_head=H, n_kv_head=K, n_embd=C, **more))[
            "attention"
        ]

    assert (attention(8, 2, 512), attention(8, 8, 512)) == (655_360, 1_048_576)
    assert (attention(8, 2, 512) - 512 * 512, attention(8, 8, 512) - 512 * 512) == (
        393_216,
        786_432,
    )  # without wo
    whole, one, four = (attention(12, K, 768) for K in (12, 1, 4))
    wo, block, total = 768 * 768, 12 * 768 * 768, 124_439_808
    saved = {
        "qkv": (whole - one) / (whole - wo),
        "attention": (whole - one) / whole,
        "kv": (whole - one) / (2 * wo),
        "block": (whole - one) / block,
    }
    assert {part: round(100 * share, 1) for part, share in saved.items()} == {
        "qkv": 61.1,
        "attention": 45.8,
        "kv": 91.7,
        "block": 15.3,
    }
    gpt2 = [costs.parameters(configure(arch="gpt2", n_kv_head=K)) for K in (12, 1, 4)]
    assert [round(100 * (1 - count / total), 1) for count in gpt2] == [0.0, 10.4, 7.6]
    assert (
        round(100 * (whole - four) / whole, 1) == 33.3
        and round(100 * (whole - four) / block, 1) == 11.1
    )
    caches = [costs.kv_bytes_per_token(configure(n_kv_head=K)) for K in (12, 4, 3, 1)]
    assert [round(100 * held / caches[0], 1) for held in caches] == [100.0, 33.3, 25.0, 8.3]
    for c in (configure(n_layer=1, n_head=8, n_kv_head=K, n_embd=512) for K in (8, 2)):
        assert 100 * (costs.flops_per_token(c, 100) - costs.flops_per_token(c, 0)) == 2 * (
            2 * 8 * 100 * 100 * 64
        )


# ---------------------------------------------------------------- FLOPs


def flops(model, T):
    """FLOPs per token that torch counts, on the meta device: there the fused attention, which the
    counter does not know on a CPU, becomes two matrix products. Experts are counted on the CPU,
    because on the meta device no token chooses any."""
    if "moe" in getattr(model.config, "mlp", ""):
        model = Variant(model.config).eval()
    idx = torch.zeros(1, T, dtype=torch.long, device=model.wte.weight.device)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(idx)
    return counter.get_total_flops() / T


@every
def test_flops(change):
    c = configure(**SMALL | change)
    assert costs.flops_per_token(c, 20) == flops(on_meta(c), 20), "correct flops(T) of the part"


def test_backward_costs_twice_the_forward():
    """Each matrix product is run backward for both factors. Tested on a model whose attention torch
    counts on a CPU."""
    c = configure(**SMALL | dict(attn_softcap=5.0))
    x = torch.zeros(1, 20, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        Variant(c)(x, x)[1].backward()
    assert counter.get_total_flops() == 20 * costs.training_flops_per_token(c, 20)


# ---------------------------------------------------------------- memory


@every
def test_kv_bytes_are_the_caches(change):
    """32 tokens at once make room for 64 (cache.py doubles), a ring just for its window."""
    c = configure(**SMALL | dict(n_layer=3) | change)
    cache = KVCache()
    with torch.no_grad():
        Variant(c).eval()(torch.zeros(1, 32, dtype=torch.long), cache=cache)
    assert cache.size() == costs.kv_bytes(c, 64), "correct held(T) of the mixer"


def test_kv_bytes_per_token():
    assert costs.kv_bytes_per_token(configure(**SHAKESPEARE)) == 2 * 384 * 6 * 4
    assert costs.kv_bytes_per_token(configure(**SHAKESPEARE), bytes=2) == 2 * 384 * 6 * 2
    windowed = configure(
        window=64, full_every=3, **SHAKESPEARE
    )  # 2 layers of 6 see all 256, 4 a quarter
    assert (
        costs.kv_bytes(windowed, 256)
        == 2 * 384 * 4 * (2 * 256 + 4 * 64)
        == 256 * costs.kv_bytes_per_token(windowed)
    )
    assert costs.kv_bytes(windowed, 10) == costs.kv_bytes(configure(**SHAKESPEARE), 10)


# ---------------------------------------------------------------- matching


@every
@pytest.mark.parametrize("what", ["params", "flops"])
def test_matching(change, what):
    """At width 384 and at a tiny one the costs come within half a percent of the base's."""
    for sizes in (SHAKESPEARE, SMALL):
        base = configure(**sizes | dict(arch="gpt2"))
        c = configure(**sizes | change)
        try:
            width, residual = costs.match(c, base, what)
        except ValueError as refused:
            too_coarse = "moe" in c.mlp and sizes is SMALL
            assert c.low_rank or too_coarse or c.mlp == "none"
            assert "no MLP width" in str(refused)
            continue
        before, after = (
            costs.active_parameters(x)
            if what == "params"
            else costs.flops_per_token(x, base.block_size)
            for x in (base, replace(c, mlp_width=width))
        )
        assert residual == pytest.approx(100 * (after / before - 1))
        assert abs(residual) <= 0.5
        assert width % 8 == 0 or sizes is SMALL or "moe" in c.mlp  # several are as wide


def test_matching_by_hand():
    gelu, swiglu = (
        configure(arch="gpt2", **SHAKESPEARE),
        configure(arch="gpt2", mlp="swiglu", bias="none", **SHAKESPEARE),
    )
    assert costs.match(replace(gelu, bias="none"), swiglu) == (1536, 0.0)  # 4C
    assert costs.match(swiglu, replace(gelu, bias="none")) == (1024, 0.0)  # 8C/3
    assert costs.match(swiglu, gelu, "none") == (
        1024,
        pytest.approx(100 * (10_745_088 / 10_770_816 - 1)),
    )
    one = costs.match(configure(n_kv_head=1, **SHAKESPEARE), configure(**SHAKESPEARE))
    assert (
        one[0] > 1024 * 1.15 and abs(one[1]) < 0.5
    )  # what MQA saved goes to the MLP, as in LLaMA 2 (1.3)


def test_what_cannot_be_matched():
    base = configure(**SHAKESPEARE)
    with pytest.raises(ValueError, match="no MLP width matches the base in params"):
        costs.match(configure(low_rank=4, **SHAKESPEARE), base)
    with pytest.raises(ValueError, match="no MLP width"):  # attention alone is dearer than the base
        costs.match(configure(arch="llama", **SHAKESPEARE), replace(base, n_layer=1))


# ---------------------------------------------------------------- the catalogue


def output(capsys, *argv):
    catalogue.main(list(argv))
    return capsys.readouterr().out


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_catalogue_prints_every_word(capsys, model):
    text = output(capsys, f"--model={model}")
    sections = dict(re.findall(r"^(\w+)\n((?:  .*\n)+)", text, re.MULTILINE))
    for slot, words in SLOTS.items():
        lines = [line.split() for line in sections[slot].splitlines()]
        assert [words[0] for words in lines] == list(words)
        assert all(
            re.search(r"arXiv:|20\d\d|GPT-2", " ".join(line))
            for line in lines
            if line[0] != "none" or slot == "position"
        )
    assert max(map(len, text.splitlines())) <= 100
    for word in ARCH:
        count = costs.parameters(configure(arch=word, **SHAKESPEARE))
        assert re.search(rf"^  {word} +{count:,} ", text, re.MULTILINE)
    # Every key of the configuration is a size, belongs to a part, or is in the catalogue.
    sizes = {
        "block_size",
        "vocab_size",
        "n_layer",
        "n_head",
        "n_embd",
        "dropout",
        "mlp_width",
        "full_every",
    }
    assert set(keys(VariantConfig)) == sizes | set(architectures.owners()) | set(sections)


def test_diff_names_what_differs(capsys):
    lines = [line.split() for line in output(capsys, "--diff=gpt2,llama").splitlines()]
    assert [(line[0], line[1], line[3]) for line in lines[1:-2]] == [
        ("tie_embeddings", "True", "False"),
        ("bias", "all", "none"),
        ("position", "learned", "rope"),
        ("norm", "layernorm", "rmsnorm"),
        ("mlp", "gelu", "swiglu"),
    ]


WORDS = list(ARCH)
PAIRS = [*zip(WORDS, WORDS[1:] + WORDS[:1], strict=True)]  # each with the next
PAIRS += [pair for word in WORDS[2:] for pair in (("llama", word), (word, "llama"))]


@pytest.mark.parametrize("pair", PAIRS, ids=",".join)
def test_diff_adds_up(capsys, pair):
    """The steps between any two architectures lead from the one's costs to the other's."""
    *steps, a, b = [
        [float(word.replace(",", "")) for word in line.split()[-3:]]
        for line in output(capsys, f"--diff={','.join(pair)}").splitlines()[1:]
    ]
    for column in range(3):
        assert a[column] + sum(step[column] for step in steps) == b[column]
    for word, row in zip(pair, (a, b), strict=True):
        c = configure(arch=word, **SHAKESPEARE)
        assert row == [
            costs.parameters(c),
            costs.flops_per_token(c, 256),
            costs.kv_bytes_per_token(c),
        ]


MISTAKES = [
    ("--diff=gpt2", "two named architectures"),
    ("--diff=gpt2,gpt5", "choose from gpt2"),
    ("--n_head=0", "n_head=0"),
    ("--n_head=5", "not divisible"),
    ("gpt2", "--key=value"),
]


@pytest.mark.parametrize("arg, message", MISTAKES)
def test_catalogue_reports_mistakes(arg, message):
    with pytest.raises(UserError, match=message):
        catalogue.main([arg])


def test_catalogue_is_a_script():
    done = subprocess.run(
        [sys.executable, "-m", "parts.catalogue", "--diff=gpt2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: two named")
        and done.stderr.count("\n") == 1
    )


# ---------------------------------------------------------------- the slots cost nothing


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


@pytest.mark.parametrize(
    "word, model_class, config", [("gpt2", GPT, GPTConfig), ("llama", Llama, LlamaConfig)]
)
@pytest.mark.parametrize("sizes", [{}, dict(dropout=0.1)], ids=["plain", "dropout"])
@pytest.mark.parametrize("task", [trains, writes])
def test_the_slots_cost_nothing(word, model_class, config, sizes, task):
    """Variant filled as a corner runs exactly the corner's operators, each as often."""
    sizes, x = SMALL | sizes, torch.zeros(2, 32, dtype=torch.long)
    corner = model_class(
        config(**{key: value for key, value in sizes.items() if key in keys(config)})
    )
    variant = Variant(configure(arch=word, **sizes))
    wanted, got = operators(lambda: task(corner, x)), operators(lambda: task(variant, x))
    assert wanted["aten::mm"] + wanted["aten::addmm"] > 10
    assert got == wanted
