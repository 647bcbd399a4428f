"""
Measure what is gained by sharing keys and values: the time of one more token and the size of the
cache, with as many key heads as query heads (MHA), fewer (GQA) and one (MQA), at the same width:

    python bench/speed.py gqa

The three take turns.
"""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.timing.results import row, times_in_turn
from common.configurator import PositiveInt
from model_llama import Llama, LlamaConfig
from parts.cache import KVCache
from sampling.fast import prepare

CONTEXTS = (256, 1024, 2048, 8192)
BATCHES = (1, 8, 64)
WARM_UP = 1  # rounds that are not timed
MOST = 2**30  # bytes of the largest cache that is tried on a CPU


@dataclass
class SpeedConfig:
    n_layer: PositiveInt = 6
    n_head: PositiveInt = 6
    n_embd: PositiveInt = 384
    vocab_size: PositiveInt = 65
    steps: PositiveInt = 7  # tokens that are timed
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

    def milliseconds(kind):
        began = time.perf_counter()
        models[kind](token, cache=caches[kind], last_only=True)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
        caches[kind].rewind(context)
        return 1000 * taken

    return times_in_turn({kind: partial(milliseconds, kind) for kind in models}, rounds, WARM_UP)


def rows_of(context, B, ms, token_bytes):
    """The rows of GQA and MQA beside MHA: times, tokens/s of all rows, megabytes of the caches."""
    found, texts = [], {}
    for kind, times in ms.items():
        median, size = np.median(times), token_bytes[kind] * context * B / 1e6
        texts[kind] = f"{median:.2f} ms, {1000 * B / median:.0f} tokens/s, {size:.0f} MB"
    for kind in ("GQA", "MQA"):
        what = f"context {context}, batch {B}: {kind} / MHA"
        found.append(row(what, f"{texts[kind]} / {texts['MHA']}", ms[kind] / ms["MHA"]))
    return found


@torch.inference_mode()
def measure(what, config, device):
    H, rows, models, token_bytes = config.n_head, [], {}, {}
    divisors = [k for k in range(2, H + 1) if H % k == 0]
    shared = min(divisors, key=lambda k: abs(k - H / 4), default=1)
    key_heads = {"MHA": H, "GQA": shared, "MQA": 1}
    for kind, heads in key_heads.items():
        sizes = {key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
        c = LlamaConfig(**sizes, n_kv_head=heads, block_size=16384)
        models[kind], _ = prepare(Llama(c).to(device), compile=False)
        token_bytes[kind] = 2 * 4 * c.n_layer * heads * c.n_embd // H  # a key and a value, fp32
    for context in CONTEXTS:
        for B in BATCHES:
            size = token_bytes["MHA"] * context * B
            if size > MOST and not device.startswith("cuda"):
                left_out = f"{size / 1e6:.0f} MB: left out on this device"
                rows.append(row(f"context {context}, batch {B}", left_out))
                continue
            ms = next_token_ms(models, B, context, config.steps, device)
            rows += rows_of(context, B, ms, token_bytes)
    heads = ", ".join(f"{kind} {heads}" for kind, heads in key_heads.items())
    each = ", ".join(f"{kind} {size:,}" for kind, size in token_bytes.items())
    return {
        "name": "gqa",
        "about": f"One more token of every row: a random LLaMA, {config.n_layer} layers, "
        f"{config.n_embd} wide, {H} heads, eager; heads of keys: {heads}; bytes of cache per "
        f"token: {each}.",
        "unit": "time",
        "rows": rows,
    }
