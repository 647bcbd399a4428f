"""
Time causal attention alone, forward and backward: its formula beside torch's fused kernels.

    python -m extras.speed attention --device=cuda

The formula keeps a matrix of all pairs of tokens for the backward pass; a fused kernel computes it
in pieces, twice, and keeps none (FlashAttention, Dao et al. 2022, arXiv:2205.14135). All sides read
the same queries, keys and values, in bfloat16 where the device has it.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.ablation.step_times import ratio
from common.configurator import PositiveInt
from common.errors import is_out_of_memory, one_line
from extras.speed.results import Rounds, finished, peak_bytes, times_in_turn
from extras.speed.train import fast_dtypes

H = 12  # heads
D = 64  # the size of a head
WARM_UP = 3  # rounds that are not timed


@dataclass
class SpeedConfig:
    tokens: PositiveInt = 32768  # in a batch, whatever the length of its texts
    shortest: PositiveInt = 512  # tokens of a text; then twice as many, and so on
    longest: PositiveInt = 8192
    steps: Rounds = 20  # rounds that are timed, after three that are not
    threads: PositiveInt = 1
    device: str = "auto"


def formula(q, k, v):
    """softmax(q k^T / sqrt(D)) v of q, k, v (B, H, T, D), where no query sees a later key."""
    T = q.size(2)
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(2, 3) / math.sqrt(D)  # (B, H, T, T)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def fused(kernel, q, k, v):
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


FORMULA = "the formula"
SIDES = {
    FORMULA: formula,
    "torch's choice": partial(F.scaled_dot_product_attention, is_causal=True),
    "FlashAttention": partial(fused, SDPBackend.FLASH_ATTENTION),
    "memory-efficient": partial(fused, SDPBackend.EFFICIENT_ATTENTION),
    "cuDNN": partial(fused, SDPBackend.CUDNN_ATTENTION),
}


def seconds(attend, qkv, gradient, device):
    """(2,): the seconds of a forward pass and of its backward pass."""
    began = finished(device)
    y = attend(*qkv)
    middle = finished(device)
    torch.autograd.grad(y, qkv, gradient)
    return np.array([middle - began, finished(device) - middle])


def rows_of(T, config, device):
    """The rows of all sides for texts of T tokens. That a side runs out of memory, or that the
    device lacks its kernel, is a result too."""
    torch.manual_seed(0)
    size = (4, max(1, config.tokens // T), H, T, D)
    dtype = getattr(torch, fast_dtypes(device)[-1])
    *qkv, gradient = torch.randn(size, device=device, dtype=dtype)  # (B, H, T, D) each
    for tensor in qkv:
        tensor.requires_grad_()
    rows = {name: {"what": f"{T:,} tokens, {name}"} for name in SIDES}
    sides = {}
    for name, attend in SIDES.items():
        passes = partial(seconds, attend, qkv, gradient, device)
        try:
            passes()
            if device.startswith("cuda"):
                rows[name]["GB"] = peak_bytes(passes) / 1e9
            sides[name] = passes
        except RuntimeError as error:
            why = "out of memory" if is_out_of_memory(error) else one_line(error, 60)
            rows[name]["forward, ms"] = why

    times = times_in_turn(sides, config.steps, WARM_UP)  # {name: (rounds, 2)}
    for name in times:
        forward, backward = 1000 * np.median(times[name], axis=0)
        rows[name] |= {"forward, ms": float(forward), "backward, ms": float(backward)}
        if name != FORMULA and FORMULA in times:
            rows[name]["times the formula"] = ratio(times[FORMULA].sum(1) / times[name].sum(1))
    return list(rows.values())


def measure(config, device):
    rows = []
    length = config.shortest
    while length <= config.longest:
        rows += rows_of(length, config, device)
        length *= 2
    dtype = fast_dtypes(device)[-1]
    about = f"{H} heads of {D}, {config.tokens:,} tokens, {dtype}; {config.steps} rounds."
    yield {"name": "", "about": about, "rows": rows}
