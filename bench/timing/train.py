"""
Time a training step of our models and of other libraries' models that have the same size:

    python bench/speed.py train --nanogpt=../nanoGPT     # 0.8 M parameters (--shape=M: 10.6 M)
    python bench/speed.py train --shape=124m --device=cuda --dtype=bfloat16 --nanogpt=../nanoGPT

A step is forward, backward, clipping at 1.0 and fused AdamW, always on the same batch. Every
model has dropout 0 and otherwise its own defaults (so transformers' GPT-2 has biases, and the
others have none). The sides take steps in turn, eager and compiled. MFU: the model's FLOPs per
second over the device's peak (training/report.py).
"""

import itertools
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

from bench.timing import peers
from bench.timing.results import row, times_in_turn
from common.configurator import PositiveInt
from common.runtime import Runtime
from parts.architectures import configure, make
from parts.costs import training_flops_per_token
from training.optim import parameter_groups
from training.report import peak_flops

FIELDS = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size", "multiple_of")
SHAPES = {
    "S": (4, 4, 128, 64, 12, 65, 8),
    "M": (6, 6, 384, 256, 8, 65, 8),
    "124m": (12, 12, 768, 1024, 12, 50304, 256),
}
# {our model: the models to compare it with}
RATIOS = {
    "our GPT-2": ("nanoGPT", "transformers GPT-2"),
    "our LLaMA": ("transformers LLaMA", "nanoGPT"),
}


@dataclass
class SpeedConfig:
    shape: Literal["S", "M", "124m"] = "S"
    nanogpt: str | None = None  # where nanoGPT is checked out
    compile: bool | Literal["both"] = "both"
    steps: int = 40  # rounds that are timed, after three that are not
    threads: PositiveInt = 1
    batch_size: PositiveInt | None = None  # None: the shape's
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "both"] = "float32"  # bfloat16: by autocast


def shape_of(name):
    return SimpleNamespace(**dict(zip(FIELDS, SHAPES[name], strict=True)))


def ours(name, c):
    """Our readable model of a shape, and its loss function."""
    bias = {"bias": False} if name == "gpt2" else {}
    tied = {"tie_embeddings": True} if c.vocab_size > peers.TIED_FROM else {}
    model = make(configure({"model": name} | vars(c) | bias | tied))
    return model, lambda x, y: model(x, y)[1]


def costs_config(name, c):
    """The configuration of a corner as costs.py wants it: every slot named."""
    return configure({"model": name, "arch": name, **vars(c)})


class Side:
    """A model that is ready to take training steps, eager or compiled.

    `make()` returns (model, its loss function); `c` has vocab_size, batch_size and block_size. Ours
    computes attention on a CPU as train.py does, a peer as it does by itself."""

    def __init__(self, make, c, device, dtype="float32", ours=True):
        torch.manual_seed(0)
        self.model, self.loss = make()
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, 0.1), lr=1e-4, fused=True)
        shape = (2, c.batch_size, c.block_size)
        self.x, self.y = torch.randint(c.vocab_size, shape, device=device)  # (B, T) each
        self.device, self.dtype = device, dtype
        self.ours = ours

    def step(self, loss, dtype=None):
        """Take one training step with a loss function, self.loss or its compiled form. dtype: of
        its matrix products, None: the side's. Returns its seconds."""
        began = time.perf_counter()
        kind, dtype = self.device.split(":")[0], dtype or self.dtype
        if self.ours:
            context = Runtime(self.device, dtype, 0, 1, []).autocast()
        else:
            context = torch.autocast(kind, getattr(torch, dtype), enabled=dtype != "float32")
        with context:
            value = loss(self.x, self.y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value.item()  # waits for a GPU, too
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def gpu_bytes(self, loss):
        """The most bytes that a step holds: weights, moments, and what it allocates besides."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step(loss)
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        held = sum(t.nbytes for t in [*self.model.parameters(), *moments])
        return torch.cuda.max_memory_allocated() - before + held


def make_sides(config, c, device):
    """{name: Side} of those whose library is installed."""
    makers = {
        "our GPT-2": partial(ours, "gpt2"),
        "our LLaMA": partial(ours, "llama"),
        "nanoGPT": partial(peers.nanogpt, config.nanogpt),
        "transformers GPT-2": peers.transformers_gpt2,
        "transformers LLaMA": peers.transformers_llama,
    }
    if not config.nanogpt:
        del makers["nanoGPT"]
    sides = {}
    for name, maker in makers.items():
        try:
            dtype = "float32" if config.dtype == "both" else config.dtype
            sides[name] = Side(partial(maker, c), c, device, dtype, name.startswith("our"))
        except ImportError as error:
            print(f"without {name}: {error}", flush=True)
    return sides


def race(sides, config):
    """({(name, mode): seconds of each round}, {(name, mode): bytes, on a GPU}). A mode is eager or
    compiled, followed by the dtype if both are timed."""
    modes = {"both": ("eager", "compiled"), True: ("compiled",), False: ("eager",)}[config.compile]
    dtypes = ["float32", "bfloat16"] if config.dtype == "both" else [config.dtype]
    losses, steps = {}, {}
    for (name, side), mode, dtype in itertools.product(sides.items(), modes, dtypes):
        arm = name, f"{mode} {dtype}" if len(dtypes) > 1 else mode
        losses[arm] = torch.compile(side.loss, dynamic=False) if mode == "compiled" else side.loss
        steps[arm] = partial(side.step, losses[arm], dtype)
    for (name, mode), step in steps.items():
        first, _, third = (step() for _ in range(3))
        print(f"{name}, {mode}: first step {first:.1f} s, third {1000 * third:.1f} ms", flush=True)

    times = times_in_turn(steps, config.steps)
    if "cuda" not in next(iter(sides.values())).device:
        return times, {}
    return times, {arm: sides[arm[0]].gpu_bytes(loss) for arm, loss in losses.items()}


def side_rows(times, memory, sides, c, peak):
    """The row of each side: its time, speed, MFU, and its peak memory where that was measured."""
    tokens, rows = c.batch_size * c.block_size, []
    for (name, mode), seconds in times.items():
        median = float(np.median(seconds))
        size = sum(p.numel() for p in sides[name].model.parameters()) / 1e6
        corner = costs_config("llama" if "LLaMA" in name else "gpt2", c)
        flops = training_flops_per_token(corner, c.block_size) * tokens / median
        value = f"{1000 * median:.1f} ms, {tokens / median:,.0f} tokens/s"
        value += f", MFU {flops / peak:.1%}" if peak else ""
        if memory:
            value += f", {memory[name, mode] / 1e9:.1f} GB"
        rows.append(row(f"{name}, {size:.2f} M parameters, {mode}", value))
    return rows


def ratio_rows(times):
    """The rows of ratios: each side in its better mode."""
    best, rows = {}, []  # best: {name: its better mode}
    for name, mode in sorted(times, key=lambda arm: np.median(times[arm])):
        best.setdefault(name, mode)
    for side, others in RATIOS.items():
        for other in others:
            if other in best:
                ratios = times[other, best[other]] / times[side, best[side]]
                rows.append(row(f"{side} / {other}", f"{best[side]} / {best[other]}", ratios))
    return rows


def measure(config, device):
    peers.check_nanogpt(config.nanogpt)
    c = shape_of(config.shape)
    c.batch_size = config.batch_size or c.batch_size
    # On a GPU, TF32 for operations that stay in float32; no effect on a CPU.
    torch.set_float32_matmul_precision("high")
    dtype = "bfloat16" if config.dtype == "both" else config.dtype
    peak = peak_flops(SimpleNamespace(device=device, dtype=dtype))
    sides = make_sides(config, c, device)
    times, memory = race(sides, config)
    return {
        "name": f"train {config.shape}",
        "about": f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, context {c.block_size}, "
        f"batch {c.batch_size}, vocabulary {c.vocab_size}; {config.steps} rounds. "
        + (f"MFU: of {peak / 1e12:.3g} TFLOP/s, the data sheet." if peak else ""),
        "unit": "tokens/s, each in its better mode",
        "rows": ratio_rows(times) + side_rows(times, memory, sides, c, peak),
    }
