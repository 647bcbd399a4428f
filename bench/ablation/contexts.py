"""The losses of a trained model with more context than in training, or with less."""

import numpy as np
import torch
from scipy import stats

from common.errors import one_line

CONTEXTS = (1, 2, 4, 8)  # times the training context


@torch.no_grad()
def extrapolation(model, tokens, runtime, times=CONTEXTS, most=1 << 18):
    """{"1": entry, "2": ...} of the losses with so many times the training context T before the
    targets, as `interval` gives them, or {"why"} where the model or the text does not allow it. The
    targets are the same for all: T/4 tokens at the end of each of several windows, which are spread
    over tokens (N,). An entry's "window" is the loss with the last T tokens alone in sight, which
    slide with the targets in strides of T/16. `most` bounds the tokens read for each context."""
    T = model.config.block_size
    longest = max((n for n in times if n * T < len(tokens)), default=1)
    count = max(4, min(64, most // (longest * T)))
    ends = np.linspace(longest * T, len(tokens) - 1, count).astype(int)  # of the last targets
    ends, targets, stride = np.unique(ends), max(1, T // 4), max(1, T // 16)

    sizes = {before: min(stride, targets - before) for before in range(0, targets, stride)}
    strides = [
        losses_at_ends(model, tokens, ends - before, T, size, runtime)
        for before, size in sizes.items()
    ]
    window = interval(np.average(strides, 0, list(sizes.values())))
    entries = {}
    for n in times:
        entry = {"why": f"the validation text has {len(tokens):,} tokens"}
        if n <= longest:
            context = max(targets, int(n * T))
            try:
                entry = interval(losses_at_ends(model, tokens, ends, context, targets, runtime))
            except ValueError as error:  # learned positions end at block_size
                entry = {"why": one_line(error)}
        entries[f"{n:g}"] = entry | {"window": window}
    return entries


def interval(losses):
    """{"loss", "low", "high"}: the mean loss of some windows [n] in nats per token, and its 95 % t
    interval."""
    mean, n = float(losses.mean()), len(losses)
    if n < 2:
        return {"loss": mean, "low": None, "high": None}
    half = float(losses.std(ddof=1) / n**0.5 * stats.t.ppf(0.975, n - 1))
    return {"loss": mean, "low": mean - half, "high": mean + half}


def losses_at_ends(model, tokens, ends, context, targets, runtime):
    """(n,) the loss of the last `targets` tokens of each window of `context` tokens with these
    ends."""
    losses = []
    for end in ends:
        window = np.asarray(tokens[end - context : end + 1]).astype(np.int64)  # (context + 1,)
        window = torch.from_numpy(window).to(runtime.device)[None]
        x, y = window[:, :-1], window[:, 1:].clone()
        y[:, :-targets] = -1
        with runtime.autocast():
            losses.append(model(x, y)[1].item())
    return np.array(losses)
