"""
Time the mixers that remember a state of fixed size beside attention, in LLaMAs that differ in
their mixer alone:

    python bench/speed.py mixers

- a training step at each context, with as many tokens in a step
- one more token after a prompt, and the bytes that the model remembers by then

The mixers take turns.
"""

import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from bench.timing.results import row, times_in_turn
from bench.timing.side import Side, our_model
from common.configurator import PositiveInt
from parts.architectures import configure
from parts.cache import KVCache
from parts.catalogue import needed

WORDS = ("attention", "gated_delta", "mamba2")
WARM_UP = 1  # rounds that are not timed
PIECE = 1024  # tokens of a prompt that are read at once


@dataclass
class SpeedConfig:
    contexts: list | None = None  # of training steps, in tokens; None: [1024, 8192]
    prompts: list | None = None  # tokens before the one that is timed; None: [1024, ..., 65536]
    n_layer: PositiveInt = 2
    n_head: PositiveInt = 4
    n_embd: PositiveInt = 256
    tokens: PositiveInt = 8192  # in a step; at least one sequence
    vocab_size: PositiveInt = 65
    steps: int = 5  # rounds that are timed
    threads: PositiveInt = 1
    device: str = "auto"


def values_of(word, config, block_size):
    """The keys of the model with this mixer, without positions where it has no place for them."""
    sizes = {key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    base = sizes | {"arch": "llama", "block_size": block_size}
    return base | {"mixer": word} | needed("mixer", word, configure(base))


def step_rows(T, config, device):
    """The rows of a training step at context T."""
    batch = max(1, config.tokens // T)
    shape = SimpleNamespace(vocab_size=config.vocab_size, batch_size=batch, block_size=T)
    steps = {}
    for word in WORDS:
        side = Side(partial(our_model, values_of(word, config, T)), shape, device)
        steps[word] = partial(side.step, side.loss)
    times = times_in_turn(steps, config.steps, WARM_UP)
    return rows_of(f"step, context {T}, batch {batch}", times, dict.fromkeys(WORDS, ""))


def token_rows(T, config, device):
    """The rows of one more token after T."""
    models, caches = {}, {}
    block_size = T + WARM_UP + config.steps + 1
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    for word in WORDS:
        torch.manual_seed(0)
        models[word], caches[word] = our_model(values_of(word, config, block_size))[0], KVCache()
        models[word].to(device).eval()
        prompt = torch.randint(config.vocab_size, (1, T), device=device)
        for piece in prompt.split(PIECE, dim=1):
            models[word](piece, cache=caches[word], last_only=True)

    def next_token(word):
        began = time.perf_counter()
        models[word](token, cache=caches[word], last_only=True)[0].sum().item()
        return time.perf_counter() - began

    steps = {word: partial(next_token, word) for word in WORDS}
    times = times_in_turn(steps, config.steps, WARM_UP)
    held = {word: f", {cache.size() / 1e3:,.0f} kB" for word, cache in caches.items()}
    return rows_of(f"token after {T}", times, held)


def rows_of(what, times, notes):
    """A row for each mixer with a state beside attention; times {word: seconds of each round}."""
    texts = {word: f"{1000 * np.median(times[word]):.1f} ms{notes[word]}" for word in WORDS}
    return [
        row(
            f"{what}: {word} / attention",
            f"{texts[word]} / {texts['attention']}",
            times[word] / times["attention"],
        )
        for word in WORDS[1:]
    ]


def measure(what, config, device):
    rows = []
    for T in config.contexts or (1024, 8192):
        rows += step_rows(T, config, device)
    with torch.inference_mode():
        for T in config.prompts or (1024, 4096, 16384, 65536):
            rows += token_rows(T, config, device)
    return {
        "name": "mixers",
        "about": f"LLaMAs of {config.n_layer} layers, {config.n_embd} wide, {config.n_head} heads, "
        f"eager; {config.tokens:,} tokens in a step; {config.steps} rounds.",
        "unit": "time, over that of attention",
        "rows": rows,
    }
