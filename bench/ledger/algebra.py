"""
Claims that counting decides: parameters, FLOPs, bytes, pairs, and the arithmetic of tests. Models
are configurations of ours, of which nothing is computed (parts/costs.py).

A model is named `architecture@size`, such as llama@10m; `key=value` changes it.
"""

import ast
import itertools

import torch
from statsmodels.stats.power import TTestPower

from parts import costs
from parts.architectures import configure
from parts.cache import visible

SIZES = {
    "tiny": dict(n_layer=2, n_head=4, n_embd=64, block_size=32, vocab_size=65, multiple_of=8),
    "0.2m": dict(n_layer=4, n_head=4, n_embd=64, block_size=64, vocab_size=65, multiple_of=8),
    "10m": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65),
    "124m": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257),
    "7b": dict(n_layer=32, n_head=32, n_embd=4096, block_size=4096, vocab_size=32000),
    "13b": dict(n_layer=40, n_head=40, n_embd=5120, block_size=4096, vocab_size=32000),
    "70b": dict(n_layer=80, n_head=64, n_embd=8192, block_size=4096, vocab_size=32000)
    | dict(multiple_of=4096),
    "8b": dict(n_layer=32, n_head=32, n_embd=4096, block_size=8192, vocab_size=128256)
    | dict(multiple_of=1024),
}


def literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def changes_of(words):
    """{key: value} of words such as "mlp=swiglu"."""
    return {key: literal(value) for key, value in (word.split("=", 1) for word in words)}


def config_of(name, *changes):
    """The VariantConfig of `architecture@size` with `key=value` changes."""
    arch, _, size = name.partition("@")
    return configure({"model": "llama", "arch": arch} | SIZES[size] | changes_of(changes))


# ---------------------------------------------------------------- parameters


def parameters(name, *changes):
    """The number of parameters of a model."""
    return costs.parameters(config_of(name, *changes))


def active_parameters(name, *changes):
    """The number of parameters that one token uses."""
    return costs.active_parameters(config_of(name, *changes))


def part_parameters(part, name, *changes):
    """The parameters of one layer's qkv, kv, attention, mlp, norm or whole block, or of the model's
    positions."""
    model, blocks = costs.without_numbers(config_of(name, *changes))
    block = blocks[0][0]
    modules = {
        "qkv": [getattr(block.attn, key, None) for key in ("wq", "wk", "wv")],
        "kv": [getattr(block.attn, key, None) for key in ("wk", "wv")],
        "attention": [block.attn],
        "mlp": [block.mlp],
        "norm": [block.norm1],
        "position": [model.wpe],
        "block": [block],
    }[part]
    return costs.count(*modules)


def norm_share(name):
    """The share of all parameters that is in norms."""
    c = config_of(name)
    return costs.parameter_table(c)["norms"] / costs.parameters(c)


def mlp_width(name, *changes):
    """The number of features inside the MLP."""
    return costs.mlp_width(config_of(name, *changes))


# ---------------------------------------------------------------- operations and bytes


def flops(name, *changes):
    """The FLOPs of a token in a full context."""
    c = config_of(name, *changes)
    return costs.flops_per_token(c, c.block_size)


def cache_numbers(name, *changes):
    """Numbers cached per token and layer."""
    c = config_of(name, *changes)
    return costs.kv_bytes(c, 1, bytes=1) / c.n_layer


def cache_bytes(T, name, *changes):
    """The bytes of the cache after T tokens."""
    return costs.kv_bytes(config_of(name, *changes), int(T))


def score_bytes(heads, T, dtype):
    """The bytes of one sequence's scores, (heads, T, T)."""
    shape = int(heads), int(T), int(T)
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes


def pairs(T, window="0", group="0"):
    """The pairs of a query and a key that it sees, by the mask that our models use."""
    pos = torch.arange(int(T))[None]
    return int(visible(pos, pos, int(window), int(group)).sum())


def memory_per_operation(b, n, d, h):
    """Shazeer's ratio of memory accesses to operations of batched multi-head attention,
    (bnd + bhn² + d²) / (bnd²), over the one that the notes print, 1/d + 1/(hn)."""
    b, n, d, h = map(int, (b, n, d, h))
    exact = (b * n * d + b * h * n**2 + d**2) / (b * n * d**2)
    return exact / (1 / d + 1 / (h * n))


# ---------------------------------------------------------------- data and tests


def epochs(steps, batch, T, tokens):
    """How often `steps` steps read a training text of so many tokens."""
    return int(steps) * int(batch) * int(T) / int(tokens)


def sampling_share(alpha, *sizes):
    """The share of the first corpus with weights proportional to size^alpha."""
    weights = [float(size) ** float(alpha) for size in sizes]
    return weights[0] / sum(weights)


def sign_flip_floor(n):
    """The least two-sided p-value of a sign-flip test of n pairs, all of one sign: by counting."""
    sums = [sum(signs) for signs in itertools.product((-1, 1), repeat=int(n))]
    return sum(abs(total) >= int(n) for total in sums) / len(sums)


def detectable(n):
    """The effect, in standard deviations of a difference, that a paired t test of n pairs finds 80
    times in 100 at level 0.05."""
    return float(TTestPower().solve_power(nobs=int(n), alpha=0.05, power=0.8))
