"""
Time causal attention, forward and backward, by its formula and by the kernels that make no (T, T)
matrix:

    python bench/speed.py flash  # FlashAttention (Dao 2023, arXiv:2307.08691) beside the formula
    python bench/speed.py flex   # FlexAttention (Dong et al. 2024, arXiv:2412.05496) with a window,
                                 # groups or ALiBi beside scaled_dot_product_attention with a mask

Both sides take the same q, k and v in turn. FlexAttention's block mask and the other mask are made
before, as a model makes them once for all layers.
"""

import itertools
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.timing.results import row, times_in_turn
from common.configurator import PositiveInt
from parts.position import alibi_slopes

LENGTHS = (512, 1024, 2048, 4096, 8192)
KINDS = ("window", "block_local", "alibi")  # of FlexAttention
WARM_UP = 3  # rounds that are not timed; the first compiles


@dataclass
class SpeedConfig:
    lengths: list | None = None  # tokens of context; None: [512, 1024, 2048, 4096, 8192]
    tokens: PositiveInt = 16384  # in all sequences; at least one sequence
    n_head: PositiveInt = 12
    head_size: PositiveInt = 64
    window: PositiveInt = 256  # tokens; of a group, too
    steps: int = 20  # rounds that are timed, after three that are not
    compile: bool = True  # FlexAttention, without which it is slow
    backward: bool = True  # FlexAttention has none on a CPU
    threads: PositiveInt = 1
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


def formula(q, k, v):
    """softmax(q kᵀ / sqrt(D)) v over the past, as it is written; all (B, H, T, D)."""
    T = q.size(2)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))  # (B, H, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def flash(q, k, v):
    only = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext()
    with only:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex_sides(kind, T, config, device):
    """(FlexAttention, scaled_dot_product_attention with a mask) of a kind of attention."""
    n, compiled = config.window, flex_attention
    slopes = torch.tensor(alibi_slopes(config.n_head), device=device)

    def seen(b, h, i, j):
        near = {"window": j > i - n, "block_local": j // n == i // n, "alibi": j >= 0}[kind]
        return (j <= i) & near

    def biased(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    if config.compile:
        compiled = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(seen, None, None, T, T, device=device)
    more = {"block_mask": blocks} | ({"score_mod": biased} if kind == "alibi" else {})

    i, j = torch.arange(T, device=device)[:, None], torch.arange(T, device=device)
    mask = seen(0, 0, i, j)  # (T, T)
    if kind == "alibi":
        bias = (slopes[:, None, None] * (j - i)).to(getattr(torch, config.dtype))  # (H, T, T)
        mask = bias.masked_fill(~mask, -torch.inf)[None]
    return (
        lambda q, k, v: compiled(q, k, v, **more),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    )


def compare(name, sides, T, config, device):
    """The row of two sides, the kernel first: milliseconds, and the memory that each takes."""
    shape = (max(1, config.tokens // T), config.n_head, T, config.head_size)
    options = {"device": device, "dtype": getattr(torch, config.dtype)}
    q, k, v, given = torch.randn(4, *shape, **options).unbind(0)  # (B, H, T, D) each
    inputs = [part.clone().requires_grad_(config.backward) for part in (q, k, v)]
    taken, failed, cuda = {}, set(), device.startswith("cuda")  # taken: bytes

    def step(side):
        if side in failed:
            return math.nan
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        try:
            out = side(*inputs)
            if config.backward:
                torch.autograd.grad(out, inputs, given)
        except torch.OutOfMemoryError:
            failed.add(side)
        if cuda:
            torch.cuda.synchronize()
            taken[side] = torch.cuda.max_memory_allocated() - before
        return time.perf_counter() - began

    times = times_in_turn({side: partial(step, side) for side in sides}, config.steps, WARM_UP)

    def text(side):
        if side in failed:
            return "out of memory"
        memory = f", {taken[side] / 1e9:.2f} GB" if cuda else ""
        return f"{1000 * np.median(times[side]):.2f} ms{memory}"

    kernel, plain = sides
    ratios = None if failed else times[plain] / times[kernel]
    return row(name, f"{text(kernel)} / {text(plain)}", ratios)


def measure(what, config, device):
    rows, lengths = [], config.lengths or LENGTHS
    if what == "flash":
        rows = [compare(f"T = {T}", (flash, formula), T, config, device) for T in lengths]
    else:
        for kind, T in itertools.product(KINDS, lengths):
            sides = flex_sides(kind, T, config, device)
            rows.append(compare(f"{kind}, T = {T}", sides, T, config, device))
            torch.compiler.reset()
    return {
        "name": what,
        "about": f"Forward{' and backward' if config.backward else ''}, {config.n_head} heads of "
        f"{config.head_size}, {config.tokens:,} tokens, windows and groups of {config.window}; "
        f"{config.steps} rounds. {'Flash / formula' if what == 'flash' else 'Flex / mask'}.",
        "unit": "speed; above 1 the kernel is faster",
        "rows": rows,
    }
