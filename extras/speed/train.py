"""
Time a training step of our models and of other libraries' models that have the same size:

    python -m extras.speed train --nanogpt=../nanoGPT  # 0.8 M parameters (--shape=M: 10.6 M)
    python -m extras.speed train --shape=124m --device=cuda --dtype=bfloat16 --nanogpt=../nanoGPT

A step is forward, backward, clipping at 1.0 and fused AdamW, always on the same batch. Every
model has dropout 0 and otherwise its own defaults (so transformers' GPT-2 has biases, and the
others have none). The sides take steps in turn, eager and compiled. MFU: the model's FLOPs per
second over the device's peak (training/description.py). Shape A has the sizes of the runs of
config/answer: our models alone, with Muon.
"""

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from bench.ablation.step_times import ratio
from common.configurator import PathName, PositiveInt
from common.runtime import Runtime, keep_freed_memory, multiplies_bfloat16
from extras.speed import peers
from extras.speed.results import Rounds, finished, peak_bytes, times_in_turn
from parts.architectures import configure, make
from parts.costs import training_flops_per_token
from training.description import peak_flops
from training.net import compiled
from training.optim import make_optimizers
from training.settings import TrainConfig


@dataclass
class Shape:
    """The sizes of a model and of its batch."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int
    vocab_size: int = 65
    multiple_of: int = 8

    def model_keys(self):
        """The keys of a model of ours."""
        return {key: value for key, value in asdict(self).items() if key != "batch_size"}


SHAPES = {
    "S": Shape(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12),
    "A": Shape(n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=12),
    "M": Shape(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8),
    "124m": Shape(
        n_layer=12,
        n_head=12,
        n_embd=768,
        block_size=1024,
        batch_size=12,
        vocab_size=50304,
        multiple_of=256,
    ),
}
# {our model: the models to compare it with}
PEERS = {
    "our GPT-2": ("nanoGPT", "transformers GPT-2"),
    "our LLaMA": ("nanoGPT", "transformers LLaMA"),
}


@dataclass
class SpeedConfig:
    shape: Literal["S", "A", "M", "124m"] | None = None  # None: S, then A
    only: Literal["", "our", "GPT", "LLaMA"] = ""  # time the models with this in their names
    nanogpt: PathName | None = None  # where nanoGPT is checked out
    compile: bool | Literal["both"] = "both"
    steps: Rounds = 40  # rounds that are timed, after three that are not
    threads: PositiveInt = 1
    batch_size: PositiveInt | None = None  # None: the shape's
    device: str = "auto"
    #: bfloat16: by autocast. None: both where the device has it, of shape A bfloat16 alone
    dtype: Literal["float32", "bfloat16", "both"] | None = None


def fast_dtypes(device):
    """The number formats whose matrix products are fast on a device, the faster one last."""
    has_bfloat16 = device.startswith("cuda") or (device == "cpu" and multiplies_bfloat16())
    return ["float32", "bfloat16"] if has_bfloat16 else ["float32"]


def ours(word, shape):
    """Our readable model of a shape, and its loss function."""
    keys = shape.model_keys() | {"model": word}
    if word == "gpt2":
        keys["bias"] = False
    if shape.vocab_size > peers.TIED_FROM:
        keys["tie_embeddings"] = True
    model = make(configure(keys))
    return model, lambda x, y: model(x, y)[1]


class Side:
    """A model that is ready to take training steps, eager or compiled.

    `make()` returns (model, its loss function). Our model computes attention on a CPU as train.py
    does, a peer as it does by itself."""

    def __init__(self, make, shape, runtime, ours=True, optimizer="adamw"):
        torch.manual_seed(0)
        self.model, self.loss = make()
        self.model.to(runtime.device).train()
        self.optimizers = make_optimizers(self.model, TrainConfig(optimizer=optimizer), runtime)
        size = (2, shape.batch_size, shape.block_size)
        tokens = torch.randint(shape.vocab_size, size, device=runtime.device)
        self.x, self.y = tokens  # (B, T) each
        self.device = runtime.device
        self.ours = ours

    def compiled(self):
        """The loss function, compiled: ours as train.py does."""
        if not self.ours:
            return torch.compile(self.loss, dynamic=False)
        return compiled(self.loss, self.model, Runtime(self.device, "", 0, 1, compile=True))

    def step(self, loss, dtype="float32"):
        """Take one training step with a loss function: self.loss or its compiled form. dtype: the
        number format of the matrix products. Returns the step's seconds."""
        began = time.perf_counter()
        if self.ours:
            context = Runtime(self.device, dtype, 0, 1).autocast()
        else:
            kind = self.device.split(":")[0]
            context = torch.autocast(kind, getattr(torch, dtype), enabled=dtype != "float32")
        with context:
            value = loss(self.x, self.y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        return finished(self.device) - began

    def gpu_bytes(self, step):
        """The most bytes that a step holds: weights, moments, and what it allocates besides."""
        allocated = peak_bytes(step)
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        moments = [tensor for state in states for tensor in state.values()]
        held = sum(t.nbytes for t in [*self.model.parameters(), *moments])
        return allocated + held


def make_sides(config, shape, runtime, optimizer="adamw"):
    """{name: Side} of those that are asked for and whose library is installed; of ours alone if all
    train with Muon."""
    makers = {"our GPT-2": partial(ours, "gpt2"), "our LLaMA": partial(ours, "llama")}
    if optimizer == "adamw":
        if config.nanogpt:
            makers["nanoGPT"] = partial(peers.nanogpt, config.nanogpt)
        makers["transformers GPT-2"] = peers.transformers_gpt2
        makers["transformers LLaMA"] = peers.transformers_llama
    sides = {}
    for name, maker in makers.items():
        if config.only not in name:
            continue
        is_ours = name.startswith("our")
        try:
            sides[name] = Side(partial(maker, shape), shape, runtime, is_ours, optimizer)
        except ImportError as error:
            print(f"without {name}: {error}", flush=True)
    return sides


def compare(sides, config, dtypes):
    """({(name, form): seconds of each round}, {(name, form): bytes, on a GPU}). A form is "eager
    float32", "compiled bfloat16", and so on."""
    steps = {}
    for name, side in sides.items():
        losses = {}
        if config.compile is not True:
            losses["eager"] = torch.compiler.set_stance("force_eager")(side.loss)
        if config.compile is not False:
            losses["compiled"] = side.compiled()
        for mode, loss in losses.items():
            for dtype in dtypes:
                steps[name, f"{mode} {dtype}"] = partial(side.step, loss, dtype)
    for (name, form), step in steps.items():
        first, _, third = [step(), step(), step()]
        print(f"{name}, {form}: first step {first:.1f} s, third {1000 * third:.1f} ms", flush=True)

    times = times_in_turn(steps, config.steps)
    memory = {}
    for (name, form), step in steps.items():
        if sides[name].device.startswith("cuda"):
            memory[name, form] = sides[name].gpu_bytes(step)
    return times, memory


def fastest_form(name, times):
    """The (name, form) of a side whose median is the lowest."""
    return min((arm for arm in times if arm[0] == name), key=lambda arm: np.median(times[arm]))


def row_of(name, times, memory, sides, shape, peak):
    """The row of a side: the milliseconds of its forms; of the fastest of them its tokens/s, on a
    GPU MFU in bfloat16 and peak memory, and how many times faster it is than others' fastest."""
    best = fastest_form(name, times)
    size = sum(p.numel() for p in sides[name].model.parameters())
    row = {"what": name, "M parameters": size / 1e6}
    for arm, seconds in times.items():
        if arm[0] == name:
            row[f"{arm[1]}, ms"] = 1000 * float(np.median(seconds))
    speed = shape.batch_size * shape.block_size / float(np.median(times[best]))
    row["tokens/s"] = speed
    if peak and best[1].endswith("bfloat16"):
        word = "llama" if "LLaMA" in name else "gpt2"
        config = configure(shape.model_keys() | {"model": word}, as_variant=True)
        row["MFU"] = training_flops_per_token(config, shape.block_size) * speed / peak
    if memory:
        row["GB"] = memory[best] / 1e9
    for peer in PEERS.get(name, ()):
        if peer in sides:
            library = peer.split()[0]
            row[f"times {library}"] = ratio(times[fastest_form(peer, times)] / times[best])
    return row


def dtypes_of(config, name, device):
    """The number formats in which a shape is timed."""
    if config.dtype == "both":
        return ["float32", "bfloat16"]
    if config.dtype:
        return [config.dtype]
    fast = fast_dtypes(device)
    return fast[-1:] if name == "A" else fast


def measure_shape(name, config, device):
    shape = SHAPES[name]
    if config.batch_size:
        shape = replace(shape, batch_size=config.batch_size)
    dtypes = dtypes_of(config, name, device)
    runtime = Runtime(device, dtypes[-1], 0, 1)
    optimizer = "adamw"
    if name == "A":
        optimizer = "muon"
        keep_freed_memory()  # as train.py does; the peers of the other shapes do not
    sides = make_sides(config, shape, runtime, optimizer)
    times, memory = compare(sides, config, dtypes)
    about = (
        f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide, "
        f"context {shape.block_size}, batch {shape.batch_size}, vocabulary {shape.vocab_size}; "
        f"{config.steps} rounds."
    )
    peak = peak_flops(runtime)
    rows = [row_of(side, times, memory, sides, shape, peak) for side in sides]
    if config.only:
        name = f"{name}, {config.only}"
    return {"name": name, "about": about, "rows": rows}


def measure(config, device):
    peers.check_nanogpt(config.nanogpt)
    # On a GPU, TF32 for operations that stay in float32; no effect on a CPU.
    torch.set_float32_matmul_precision("high")
    for name in [config.shape] if config.shape else ["S", "A"]:
        yield measure_shape(name, config, device)
