"""
Time causal attention, forward and backward, by its formula and by FlashAttention (Dao 2023,
arXiv:2307.08691), which makes no (T, T) matrix:

    python bench/speed.py flash

Both sides take the same q, k and v in turn.
"""

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

from bench.timing.results import ratio, times_in_turn
from common.configurator import PositiveInt

LENGTHS = (512, 1024, 2048, 4096, 8192)
WARM_UP = 3  # rounds that are not timed; the first compiles


@dataclass
class SpeedConfig:
    lengths: list | None = None  # tokens of context; None: [512, 1024, 2048, 4096, 8192]
    tokens: PositiveInt = 16384  # in all sequences; at least one sequence
    n_head: PositiveInt = 12
    head_size: PositiveInt = 64
    steps: int = 20  # rounds that are timed, after three that are not
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


def compare(T, config, device):
    """The row of a length: milliseconds, and the memory that each side takes."""
    shape = (max(1, config.tokens // T), config.n_head, T, config.head_size)
    options = {"device": device, "dtype": getattr(torch, config.dtype)}
    q, k, v, given = torch.randn(4, *shape, **options).unbind(0)  # (B, H, T, D) each
    inputs = [part.clone().requires_grad_() for part in (q, k, v)]
    taken, failed, cuda = {}, set(), device.startswith("cuda")  # taken: bytes

    def step(side):
        if side in failed:
            return math.nan
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        try:
            torch.autograd.grad(side(*inputs), inputs, given)
        except torch.OutOfMemoryError:
            failed.add(side)
        if cuda:
            torch.cuda.synchronize()
            taken[side] = torch.cuda.max_memory_allocated() - before
        return time.perf_counter() - began

    sides = {side: partial(step, side) for side in (flash, formula)}
    times = times_in_turn(sides, config.steps, WARM_UP)

    found = {"what": f"T = {T}"}
    for name, side in (("kernel", flash), ("formula", formula)):
        median = 1000 * float(np.median(times[side]))
        found[f"{name}, ms"] = "out of memory" if side in failed else median
        if cuda and side not in failed:
            found[f"{name}, GB"] = taken[side] / 1e9
    if not failed:
        found["formula / kernel"] = ratio(times[formula] / times[flash])
    return found


def measure(config, device):
    about = (
        f"{config.n_head} heads of {config.head_size}, {config.tokens:,} tokens, {config.dtype}; "
        f"{config.steps} rounds."
    )
    rows = [compare(T, config, device) for T in config.lengths or LENGTHS]
    yield {"name": "", "about": about, "rows": rows}
