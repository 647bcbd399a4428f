"""
Time a training step of our models and of other libraries' models that have the same size:

    python bench/speed.py train --nanogpt=../nanoGPT     # 0.8 M parameters (--shape=M: 10.6 M)
    python bench/speed.py train --shape=124m --device=cuda --dtype=bfloat16 --nanogpt=../nanoGPT

A step is forward, backward, clipping at 1.0 and fused AdamW, always on the same batch. Every
model has dropout 0 and otherwise its own defaults (so transformers' GPT-2 has biases, and the
others have none). The sides take steps in turn, eager and compiled. MFU: the model's FLOPs per
second over the device's peak (training/flops.py). Shape A is that of the runs of config/answer:
our models alone, with Muon.
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
from bench.timing.results import Rounds, ratio, times_in_turn
from common.configurator import PositiveInt
from common.runtime import Runtime, keep_freed_memory, multiplies_bfloat16
from parts.architectures import configure, make
from parts.costs import training_flops_per_token
from training.flops import peak_flops
from training.optim import make_optimizers
from training.settings import TrainConfig

FIELDS = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size", "multiple_of")
SHAPES = {
    "S": (4, 4, 128, 64, 12, 65, 8),
    "A": (4, 4, 128, 128, 12, 65, 8),
    "M": (6, 6, 384, 256, 8, 65, 8),
    "124m": (12, 12, 768, 1024, 12, 50304, 256),
}
# {our model: the models to compare it with}
PEERS = {
    "our GPT-2": ("nanoGPT", "transformers GPT-2"),
    "our LLaMA": ("nanoGPT", "transformers LLaMA"),
}


@dataclass
class SpeedConfig:
    shape: Literal["S", "A", "M", "124m"] | None = None  # None: S, then A
    nanogpt: str | None = None  # where nanoGPT is checked out
    compile: bool | Literal["both"] = "both"
    steps: Rounds = 40  # rounds that are timed, after three that are not
    threads: PositiveInt = 1
    batch_size: PositiveInt | None = None  # None: the shape's
    device: str = "auto"
    # bfloat16: by autocast. None: both where the device has it, of shape A bfloat16 alone
    dtype: Literal["float32", "bfloat16", "both"] | None = None


def shape_of(name):
    return SimpleNamespace(**dict(zip(FIELDS, SHAPES[name], strict=True)))


def fast_dtypes(device):
    """The number formats whose matrix products are fast on a device, the faster one last."""
    has_it = device.startswith("cuda") or (device == "cpu" and multiplies_bfloat16())
    return ["float32", "bfloat16"] if has_it else ["float32"]


def ours(name, c):
    """Our readable model of a shape, and its loss function."""
    bias = {"bias": False} if name == "gpt2" else {}
    tied = {"tie_embeddings": True} if c.vocab_size > peers.TIED_FROM else {}
    model = make(configure({"model": name} | vars(c) | bias | tied))
    return model, lambda x, y: model(x, y)[1]


class Side:
    """A model that is ready to take training steps, eager or compiled.

    `make()` returns (model, its loss function); `c` has vocab_size, batch_size and block_size. Ours
    computes attention on a CPU as train.py does, a peer as it does by itself."""

    def __init__(self, make, c, runtime, ours=True, optimizer="adamw"):
        torch.manual_seed(0)
        self.model, self.loss = make()
        self.model.to(runtime.device).train()
        self.optimizers = make_optimizers(self.model, TrainConfig(optimizer=optimizer), runtime)
        shape = (2, c.batch_size, c.block_size)
        self.x, self.y = torch.randint(c.vocab_size, shape, device=runtime.device)  # (B, T) each
        self.device, self.ours = runtime.device, ours

    def step(self, loss, dtype="float32"):
        """Take one training step with a loss function, self.loss or its compiled form. dtype: of
        its matrix products. Returns its seconds."""
        began = time.perf_counter()
        kind = self.device.split(":")[0]
        if self.ours:
            context = Runtime(self.device, dtype, 0, 1, []).autocast()
        else:
            context = torch.autocast(kind, getattr(torch, dtype), enabled=dtype != "float32")
        with context:
            value = loss(self.x, self.y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        value.item()  # waits for a GPU, too
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def gpu_bytes(self, step):
        """The most bytes that a step holds: weights, moments, and what it allocates besides."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        moments = [tensor for state in states for tensor in state.values()]
        held = sum(t.nbytes for t in [*self.model.parameters(), *moments])
        return torch.cuda.max_memory_allocated() - before + held


def make_sides(config, c, runtime, optimizer="adamw"):
    """{name: Side} of those whose library is installed; of ours alone if all train with Muon."""
    makers = {"our GPT-2": partial(ours, "gpt2"), "our LLaMA": partial(ours, "llama")}
    if optimizer == "adamw":
        if config.nanogpt:
            makers["nanoGPT"] = partial(peers.nanogpt, config.nanogpt)
        makers["transformers GPT-2"] = peers.transformers_gpt2
        makers["transformers LLaMA"] = peers.transformers_llama
    sides = {}
    for name, maker in makers.items():
        try:
            is_ours = name.startswith("our")
            sides[name] = Side(partial(maker, c), c, runtime, is_ours, optimizer)
        except ImportError as error:
            print(f"without {name}: {error}", flush=True)
    return sides


def race(sides, config, dtypes):
    """({(name, form): seconds of each round}, {(name, form): bytes, on a GPU}). A form is "eager
    float32", "compiled bfloat16", and so on."""
    modes = {"both": ("eager", "compiled"), True: ("compiled",), False: ("eager",)}[config.compile]
    steps = {}
    for (name, side), mode, dtype in itertools.product(sides.items(), modes, dtypes):
        loss = torch.compile(side.loss, dynamic=False) if mode == "compiled" else side.loss
        steps[name, f"{mode} {dtype}"] = partial(side.step, loss, dtype)
    for (name, form), step in steps.items():
        first, _, third = (step() for _ in range(3))
        print(f"{name}, {form}: first step {first:.1f} s, third {1000 * third:.1f} ms", flush=True)

    times = times_in_turn(steps, config.steps)
    if "cuda" not in next(iter(sides.values())).device:
        return times, {}
    return times, {arm: sides[arm[0]].gpu_bytes(step) for arm, step in steps.items()}


def rows_of(times, memory, sides, c, peak):
    """The row of each side: the milliseconds of its forms; of the fastest of them its tokens/s, on
    a GPU MFU in bfloat16 and peak memory, and how many times faster it is than others' fastest."""
    tokens, rows = c.batch_size * c.block_size, []
    medians = {arm: float(np.median(seconds)) for arm, seconds in times.items()}
    best = {name: min((arm for arm in times if arm[0] == name), key=medians.get) for name in sides}
    for name, side in sides.items():
        size, seconds = sum(p.numel() for p in side.model.parameters()), medians[best[name]]
        row = {"what": name, "M parameters": size / 1e6}
        row |= {f"{form}, ms": 1000 * medians[arm, form] for arm, form in times if arm == name}
        row["tokens/s"] = tokens / seconds
        if peak and best[name][1].endswith("bfloat16"):
            model = "llama" if "LLaMA" in name else "gpt2"
            corner = configure({"model": model, "arch": model} | vars(c))  # every slot named
            row["MFU"] = training_flops_per_token(corner, c.block_size) * tokens / seconds / peak
        if memory:
            row["GB"] = memory[best[name]] / 1e9
        for peer in [peer for peer in PEERS.get(name, ()) if peer in sides]:
            row[f"times {peer.split()[0]}"] = ratio(times[best[peer]] / times[best[name]])
        rows.append(row)
    return rows


def measure_shape(name, config, device):
    c, fast = shape_of(name), fast_dtypes(device)
    c.batch_size = config.batch_size or c.batch_size
    dtypes = {None: fast[-1:] if name == "A" else fast, "both": ["float32", "bfloat16"]}
    dtypes = dtypes.get(config.dtype, [config.dtype])
    runtime = Runtime(device, dtypes[-1], 0, 1, [])
    if name == "A":
        keep_freed_memory()  # as train.py does; the peers of the other shapes do not
    sides = make_sides(config, c, runtime, "muon" if name == "A" else "adamw")
    times, memory = race(sides, config, dtypes)
    about = (
        f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, context {c.block_size}, "
        f"batch {c.batch_size}, vocabulary {c.vocab_size}; {config.steps} rounds."
    )
    rows = rows_of(times, memory, sides, c, peak_flops(runtime))
    return {"name": name, "about": about, "rows": rows}


def measure(config, device):
    peers.check_nanogpt(config.nanogpt)
    # On a GPU, TF32 for operations that stay in float32; no effect on a CPU.
    torch.set_float32_matmul_precision("high")
    for name in [config.shape] if config.shape else ["S", "A"]:
        yield measure_shape(name, config, device)
