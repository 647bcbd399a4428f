"""
How long a training step takes, beside other libraries' models of the same size doing the same work:

    python bench/speed.py train --nanogpt=../nanoGPT             # 0.8 M parameters (--shape=M: 10.6 M), one thread
    python bench/speed.py train --shape=124m --device=cuda --dtype=bfloat16 --nanogpt=../nanoGPT

A step is forward, backward, clipping at 1.0 and fused AdamW, on a batch that stays the same; every model has dropout 0
and its own defaults besides (so transformers' GPT-2 has biases, which the others here do not). The sides take steps in
turn, eager and compiled, so that a busy machine slows all alike. A ratio is the median over the rounds, with its 95 %
bootstrap interval. Writes bench/results/speed_train_<shape>.md.
"""

import contextlib
import importlib.util
import io
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from common.configurator import build, load
from common.errors import UserError
from common.files import ROOT
from common.runtime import find_device, versions
from parts.architectures import choose
from parts.costs import training_flops_per_token
from training.optim import parameter_groups

SHAPES = {  # layers, heads, width, context, batch, vocabulary, rounding of LLaMA's MLP
    "S": (4, 4, 128, 64, 12, 65, 8),
    "M": (6, 6, 384, 256, 8, 65, 8),
    "124m": (12, 12, 768, 1024, 12, 50304, 256),
}
FIELDS = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size", "multiple_of")
# Dense bf16 peak, TFLOP/s, from the makers' data sheets; the first name that the GPU's own contains.
PEAKS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "4090": 165,
    "3090": 71,
}


@dataclass
class TrainSpeedConfig:
    shape: Literal["S", "M", "124m"] = "S"
    nanogpt: str | None = None  # where nanoGPT is checked out
    litgpt: str | None = (
        None  # a folder that litgpt was installed into (pip install --target), where it cannot be imported
    )
    compile: bool | Literal["both"] = "both"
    steps: int = 40  # rounds that are timed, after three that are not
    threads: int = 1
    batch_size: int | None = None  # None: the shape's
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: by autocast
    peak: float | None = (
        None  # of the chip, dense, TFLOP/s, for the MFU; None: from a table of GPUs
    )


def ours(name, c):
    tied = {"tie_embeddings": True} if c.vocab_size > 50000 else {}  # as config/llama_124m.py
    config_class, model_class, values = choose(
        {"model": name, "bias": False, **vars(c), **tied}
        if name == "gpt2"
        else {"model": name, **vars(c), **tied}
    )
    model = model_class(build(config_class, values))
    return model, lambda x, y: model(x, y)[1]


def nanogpt(path, c):
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where torch.compile looks for it
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()):
        model = module.GPT(
            module.GPTConfig(
                c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, dropout=0.0, bias=False
            )
        )
    return model, lambda x, y: model(x, y)[1]


def cross_entropy(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def transformers_gpt2(c):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.block_size,
            n_embd=c.n_embd,
            n_layer=c.n_layer,
            n_head=c.n_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    return model, lambda x, y: cross_entropy(model(x).logits, y)


def swiglu_width(c):
    return c.multiple_of * -(-int(8 * c.n_embd / 3) // c.multiple_of)


def transformers_llama(c):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.n_embd,
            intermediate_size=swiglu_width(c),
            num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head,
            max_position_embeddings=c.block_size,
            use_cache=False,
            attn_implementation="sdpa",
            tie_word_embeddings=c.vocab_size > 50000,
        )
    )
    return model, lambda x, y: cross_entropy(model(x).logits, y)


def litgpt_llama(path, c):
    if path and str(path) not in sys.path:
        sys.path.append(str(path))
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(
        Config(
            block_size=c.block_size,
            padded_vocab_size=c.vocab_size,
            n_layer=c.n_layer,
            n_head=c.n_head,
            n_embd=c.n_embd,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=swiglu_width(c),
        )
    )
    if c.vocab_size > 50000:
        model.lm_head.weight = model.transformer.wte.weight
    return model, lambda x, y: cross_entropy(model(x), y)


class Side:
    """A model with its optimizer, ready to take training steps, eager or compiled."""

    def __init__(self, make, config, c, device):
        torch.manual_seed(0)
        self.model, self.loss = make(c)
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, 0.1), lr=1e-4, fused=True)
        self.x, self.y = torch.randint(c.vocab_size, (2, c.batch_size, c.block_size), device=device)
        self.device, self.dtype = device, getattr(torch, config.dtype)
        self.peak_bytes = {}

    def step(self, loss):
        """Take one training step; returns its seconds."""
        began = time.perf_counter()
        with torch.autocast(
            self.device.split(":")[0], self.dtype, enabled=self.dtype != torch.float32
        ):
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
        """The most that a step holds: its own weights and moments, and what it allocates besides."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step(loss)
        own = [
            *self.model.parameters(),
            *(t for state in self.optimizer.state.values() for t in state.values()),
        ]
        return torch.cuda.max_memory_allocated() - before + sum(t.nbytes for t in own)


def interval(numbers):
    """(median, low, high): the 95 % bootstrap interval of the median."""
    from scipy.stats import bootstrap

    found = bootstrap(
        (numbers,), np.median, confidence_level=0.95, method="percentile", rng=0
    ).confidence_interval
    return float(np.median(numbers)), float(found.low), float(found.high)


def make_sides(config, c, device):
    """{name: Side} of those whose library is there."""
    makers = {"our GPT-2": lambda c: ours("gpt2", c), "our LLaMA": lambda c: ours("llama", c)}
    if config.nanogpt:
        makers["nanoGPT"] = lambda c: nanogpt(config.nanogpt, c)
    makers |= {
        "transformers GPT-2": transformers_gpt2,
        "transformers LLaMA": transformers_llama,
        "litgpt LLaMA": lambda c: litgpt_llama(config.litgpt, c),
    }
    sides = {}
    for name, make in makers.items():
        try:
            sides[name] = Side(make, config, c, device)
        except ImportError as error:
            print(f"without {name}: {error}", flush=True)
    return sides


def race(sides, config):
    """({(name, mode): seconds of each round}, {(name, mode): bytes})."""
    modes = (
        ["eager", "compiled"]
        if config.compile == "both"
        else ["compiled"]
        if config.compile
        else ["eager"]
    )
    arms = {
        (name, mode): side.loss if mode == "eager" else torch.compile(side.loss, dynamic=False)
        for name, side in sides.items()
        for mode in modes
    }
    for (name, mode), loss in arms.items():
        began = time.perf_counter()
        seconds = [sides[name].step(loss) for _ in range(3)]
        print(
            f"{name}, {mode}: first step {seconds[0]:.1f} s, third {seconds[2] * 1000:.1f} ms; {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    times = {arm: [] for arm in arms}
    for i in range(config.steps):
        order = (
            list(arms)[i % len(arms) :] + list(arms)[: i % len(arms)]
        )  # nobody always follows the same one first
        for arm in order if i % 2 else reversed(order):
            times[arm].append(sides[arm[0]].step(arms[arm]))
    memory = (
        {arm: sides[arm[0]].gpu_bytes(loss) for arm, loss in arms.items()}
        if "cuda" in next(iter(sides.values())).device
        else {}
    )
    return {arm: np.array(seconds) for arm, seconds in times.items()}, memory


def train(config, argv):
    c = SimpleNamespace(**dict(zip(FIELDS, SHAPES[config.shape])))
    c.batch_size = config.batch_size or c.batch_size
    device, facts, tokens = find_device(config.device), versions(), c.batch_size * c.block_size
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(
        "high"
    )  # TF32 on a GPU for what stays in float32; nothing on a CPU
    peak = (
        config.peak
        or next((peak for name, peak in PEAKS.items() if name in facts["hardware"]), None)
        if config.peak or device.startswith("cuda")
        else None
    )
    sides = make_sides(config, c, device)
    times, memory = race(sides, config)
    best = {
        name: min((arm for arm in times if arm[0] == name), key=lambda arm: np.median(times[arm]))
        for name in sides
    }
    where = (
        device
        if device.startswith("cuda")
        else f"{device}, {config.threads} thread{'s' * (config.threads > 1)}"
    )
    command = " ".join(
        f"{arg.partition('=')[0]}=PATH" if arg.startswith(("--nanogpt", "--litgpt")) else arg
        for arg in argv
    )
    lines = [
        f"# Time of a training step beside other libraries, shape {config.shape}",
        "",
        f"{facts['hardware']}, {where}, torch {facts['torch']}, {config.dtype}; commit {facts['git_commit']}.",
        f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, context {c.block_size}, batch {c.batch_size}, vocabulary {c.vocab_size}; medians of {config.steps} rounds. "
        f"`python bench/speed.py {command}`",
        "",
        "| | parameters | mode | ms a step | tokens/s |"
        + " MFU | peak memory, GB |" * bool(memory),
        "|---|---|---|---|---|" + "---|---|" * bool(memory),
    ]
    for (name, mode), seconds in times.items():
        median = statistics.median(seconds)
        size = sum(p.numel() for p in sides[name].model.parameters())
        lines.append(
            f"| {name} | {size / 1e6:.2f} M | {mode} | {median * 1000:.1f} | {tokens / median:,.0f} |"
        )
        if memory:
            flops = training_flops_per_token(
                costs_config("llama" if "LLaMA" in name else "gpt2", c), c.block_size
            )
            lines[-1] += f" {flops * tokens / median / peak / 1e10:.1f} % |" if peak else " |"
            lines[-1] += f" {memory[name, mode] / 1e9:.1f} |"
    lines += [
        "",
        "Each in its better mode, tokens/s of the first over those of the second:",
        "",
        "| | ratio | 95 % interval |",
        "|---|---|---|",
    ]
    for mine, others in (
        ("our GPT-2", ("nanoGPT", "transformers GPT-2")),
        ("our LLaMA", ("transformers LLaMA", "litgpt LLaMA", "nanoGPT")),
    ):
        for other in others:
            if other in sides:
                ratio, low, high = interval(times[best[other]] / times[best[mine]])
                lines.append(
                    f"| {mine} ({best[mine][1]}) / {other} ({best[other][1]}) | {ratio:.3f} | {low:.3f} to {high:.3f} |"
                )
    if memory:
        lines += [
            "",
            f"MFU: 6 FLOPs per weight of a matrix and token, and 12 L T C for attention, over {peak} TFLOP/s, dense bf16."
            if peak
            else "No peak is known for this chip: give --peak=TFLOP/s.",
        ]
    write(
        lines,
        f"speed_train_{config.shape}"
        + f"_{config.threads}threads" * (config.threads > 1)
        + "_cuda" * bool(memory),
    )


def costs_config(name, c):
    """The configuration of a corner as costs.py wants it: every slot named."""
    config_class, _, values = choose({"model": name, "arch": name, **vars(c)})
    return build(config_class, values)


def write(lines, name):
    print("\n".join(lines))
    (ROOT / "bench" / "results").mkdir(exist_ok=True)
    (ROOT / "bench" / "results" / f"{name}.md").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )


def main(argv):
    values, words = load(argv, [TrainSpeedConfig], __doc__)
    if words != ["train"]:
        raise UserError(
            "one thing at a time, please", "command line", "python bench/speed.py train"
        )
    config = build(TrainSpeedConfig, values)
    if config.steps < 2:
        raise UserError("too few steps to compare", f"steps={config.steps}", "give 2 or more")
    if config.nanogpt and not Path(config.nanogpt, "model.py").exists():
        raise UserError(
            "no nanoGPT here", f"nanogpt={config.nanogpt}", "check it out, or leave the key out"
        )
    train(config, argv)
