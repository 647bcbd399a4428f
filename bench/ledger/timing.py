"""
Claims on time. Two sides take turns on the CPU, one thread each, and the ratio of each round
counts. The clock is that of the thread's own CPU time, and a machine on which other work runs is
refused, as that takes a share of the caches and of the memory's bandwidth. A GPU is not timed here:
its rows come from `bash bench/gpu.sh`, which stores them in bench/results/speed.jsonl.
"""

import json
import math
import time
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from bench.ablation.quiet import BUSY, OtherWork
from bench.ledger.algebra import config_of
from bench.ledger.micro import normal
from bench.ledger.micro_attention import formula
from bench.ledger.table import Measurement, NotMeasured, error_of
from bench.timing.gqa import filled_cache
from bench.timing.results import turns
from common.files import ROOT
from parts.architectures import make


def ratio(sides, rounds):
    """The Measurement of the time of the first of two functions over that of the second; the first
    round does not count. Raises NotMeasured while other work keeps the cores busy."""
    work, rounds = OtherWork(), int(rounds)
    time.sleep(0.5)
    share = work.share()
    if share > BUSY:
        raise NotMeasured(f"other work kept {share:.0%} of the cores busy: measure it again")

    times = np.zeros((rounds + 1, 2))
    for number, side in turns((0, 1), rounds + 1):
        began = time.thread_time()
        sides[side]()
        times[number, side] = time.thread_time() - began
    logs = np.log(times[1:, 0] / times[1:, 1])
    milliseconds = 1000 * np.median(times[1:], axis=0)
    note = "{:.3g} and {:.3g} ms of CPU time, {} rounds".format(*milliseconds, rounds)
    se = float(logs.std(ddof=1)) / math.sqrt(rounds)
    return Measurement(math.exp(logs.mean()), se, rounds - 1, rounds, note, log=True)


def passes(function, inputs, direction):
    """A function that runs another one forward, or (both) for the gradients of its inputs, too."""
    if direction == "forward":
        return lambda: function(*inputs)
    inputs = [x.clone().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(function(*inputs).sum(), inputs)


def norm_time(rows, width, direction, rounds="20"):
    """RMSNorm's time over LayerNorm's, forward or with backward, of inputs (rows, width)."""
    x, weight, bias = normal(int(rows), int(width)), *normal(2, int(width), seed=1)

    def layer(x, weight, bias):
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)

    def rms(x, weight):
        return F.rms_norm(x, weight.shape, weight, 1e-5)

    sides = (rms, (x, weight)), (layer, (x, weight, bias))
    return ratio([passes(*side, direction) for side in sides], rounds)


def attention_time(T, n_head, D, direction, rounds="3"):
    """The time of attention by its formula over that of torch's kernel, on the CPU."""
    inputs = normal(3, 1, int(n_head), int(T), int(D)).unbind(0)

    def kernel(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return ratio([passes(side, inputs, direction) for side in (formula, kernel)], rounds)


def step_time(name, other, *changes, rounds="8"):
    """The time of a training step's forward and backward pass of `other` with the changes over that
    of `name`: 2 sequences of 128 tokens."""
    models = [make(config_of(other, *changes)), make(config_of(name))]
    x, y = torch.randint(0, 65, (2, 2, 128), generator=torch.Generator().manual_seed(0))

    def step(model):
        model.zero_grad()
        model(x, y)[1].backward()

    return ratio([partial(step, model) for model in models], rounds)


@torch.inference_mode()
def token_time(name, other, batch, context, *changes, rounds="12"):
    """The time of one more token of `other` with the changes over that of `name`, after a context
    of random keys and values; eager."""
    batch, context = int(batch), int(context)
    models = [make(config_of(other, *changes)).eval(), make(config_of(name)).eval()]
    caches = [filled_cache(model, batch, context, "cpu") for model in models]
    token = torch.zeros(batch, 1, dtype=torch.long)

    def step(model, cache):
        model(token, cache=cache, last_only=True)
        cache.rewind(context)

    return ratio([partial(step, *pair) for pair in zip(models, caches, strict=True)], rounds)


def gpu_row(name, what):
    """A ratio that `bash bench/gpu.sh` stored, of bench/results/speed.jsonl."""
    path = ROOT / "bench" / "results" / "speed.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in reversed(lines):
        rows = {row["what"]: row for row in line["rows"]}
        if line["name"] == name and line["device"] == "cuda" and rows.get(what, {}).get("ratio"):
            row = rows[what]
            se = error_of(row["low"], row["high"])
            return Measurement(row["ratio"], se, note=line["hardware"], log=True)
    raise NotMeasured("it needs a GPU: bash bench/gpu.sh")
