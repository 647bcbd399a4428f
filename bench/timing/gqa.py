"""
Measure what is gained by sharing keys and values: the time of one more token and the size of the
cache, with as many key heads as query heads (MHA), fewer (GQA) and one (MQA), at the same width:

    python bench/speed.py gqa

The three take turns. Writes bench/results/speed_gqa.md.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from bench.timing.results import (
    check_steps,
    command_text,
    facts_text,
    interval,
    ratio_text,
    threads_text,
    turns,
    write,
)
from common.configurator import PositiveInt, build, load
from common.errors import UserError
from common.runtime import find_device
from model_llama import Llama, LlamaConfig
from parts.cache import KVCache
from sampling.fast import prepare

CONTEXTS = (256, 1024, 2048, 8192)
BATCHES = (1, 8, 64)
MOST = 2**30  # bytes of the largest cache that is tried on a CPU


@dataclass
class GqaConfig:
    n_layer: PositiveInt = 6
    n_head: PositiveInt = 6
    n_embd: PositiveInt = 384
    vocab_size: PositiveInt = 65
    rounds: PositiveInt = 7  # tokens that are timed
    threads: PositiveInt = 1
    device: str = "auto"


def filled_cache(model, B, context, device):
    """A cache of `context` random tokens, with room for more."""
    c, cache = model.config, KVCache()
    cache.advance(torch.zeros(B, context, dtype=torch.long, device=device))
    shape = (B, c.n_kv_head, context + 64, c.n_embd // c.n_head)
    for i in range(c.n_layer):
        cache[i].k = torch.randn(shape, device=device)
        cache[i].v = torch.randn(shape, device=device)
    return cache


def next_token_ms(models, B, context, rounds, device):
    """{kind: ms of one more token in each round} after `context` tokens, for B rows."""
    caches = {kind: filled_cache(model, B, context, device) for kind, model in models.items()}
    token = torch.zeros(B, 1, dtype=torch.long, device=device)
    times = {kind: [] for kind in models}
    for _, kind in turns(models, rounds + 1):  # the first round is not counted
        began = time.perf_counter()
        models[kind](token, cache=caches[kind], last_only=True)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times[kind].append(time.perf_counter() - began)
        caches[kind].rewind(context)
    return {kind: 1000 * np.array(seconds[1:]) for kind, seconds in times.items()}


def row(context, B, ms, token_bytes):
    """A line of the table: times, speeds, ratios to MHA, and megabytes of the caches."""
    medians = [np.median(each) for each in ms.values()]
    times = " | ".join(f"{median:.2f}" for median in medians)
    speeds = " / ".join(f"{B / median * 1000:.0f}" for median in medians)
    ratios = " | ".join(ratio_text(*interval(ms[kind] / ms["MHA"])) for kind in ("GQA", "MQA"))
    sizes = " / ".join(f"{token_bytes[kind] * context * B / 1e6:.0f}" for kind in ms)
    return f"| {context} | {B} | {times} | {speeds} | {ratios} | {sizes} |"


@torch.inference_mode()
def report(config, argv):
    """Measure, and write the page."""
    device, H = find_device(config.device), config.n_head
    torch.set_num_threads(config.threads)
    divisors = [k for k in range(2, H + 1) if H % k == 0]
    shared = min(divisors, key=lambda k: abs(k - H / 4), default=1)
    key_heads = {"MHA": H, "GQA": shared, "MQA": 1}
    models, token_bytes = {}, {}
    for kind, heads in key_heads.items():
        sizes = {key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
        c = LlamaConfig(**sizes, n_kv_head=heads, block_size=16384)
        models[kind], _ = prepare(Llama(c).to(device), compile=False)
        token_bytes[kind] = 2 * 4 * c.n_layer * heads * c.n_embd // H  # a key and a value, fp32
    columns = " | ".join(f"{kind} ({heads}): ms" for kind, heads in key_heads.items())
    lines = [
        "# What sharing keys and values buys",
        "",
        f"{facts_text(f'{device}, {threads_text(config.threads)}')} {command_text(argv)}",
        "",
        f"A random LLaMA, {config.n_layer} layers, {config.n_embd} wide, {H} heads, fp32, eager; "
        f"ms for one more token of every row, the median of {config.rounds} in turn; a ratio is "
        "the median over the rounds, with its 95 % bootstrap interval.",
        "",
        f"| context | batch | {columns} | tokens/s | GQA / MHA | MQA / MHA | cache MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for context in CONTEXTS:
        for B in BATCHES:
            size = token_bytes["MHA"] * context * B
            if size > MOST and not device.startswith("cuda"):
                left_out = f" {size / 1e6:.0f}: left out on this device |"
                lines.append(f"| {context} | {B} | | | | | | |{left_out}")
            else:
                ms = next_token_ms(models, B, context, config.rounds, device)
                lines.append(row(context, B, ms, token_bytes))
            print(lines[-1], flush=True)
    sizes = ", ".join(f"{kind} {size:,}" for kind, size in token_bytes.items())
    lines += ["", f"Cache bytes per token: {sizes}."]
    write(lines, "speed_gqa")


def main(argv):
    values, words = load(argv, [GqaConfig], __doc__)
    if words != ["gqa"]:
        fix = "python bench/speed.py gqa, and --key=value"
        raise UserError("give exactly one measurement", "command line", fix)
    config = build(GqaConfig, values)
    check_steps(config.rounds, "rounds")
    report(config, argv)
