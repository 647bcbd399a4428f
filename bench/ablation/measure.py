"""Measure a trained model: a sample, the losses with the training context and longer ones, and the
loss on the test split."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from scipy import stats

import sample
import train
from common.errors import Failure, one_line
from common.runtime import seed_for, set_up
from tokens.data import open_split
from tokens.token_files import load_meta, load_split
from training.evaluation import mean_loss
from training.net import Loss
from weights import checkpoint

CONTEXTS = (1, 2, 4, 8)  # times the training context
LENGTHENED = 4  # runs of an arm that are measured with other contexts, which takes some seconds
SAMPLED = 200  # tokens of the sample


@torch.no_grad()
def extrapolation(model, tokens, runtime, times=CONTEXTS, most=1 << 18):
    """{"1": entry, "2": ...} of the losses at the end of 1, 2, ... times the training context T,
    as `interval` gives them, or {"why"} where the model or the text does not allow it. The targets
    are the same for all. An entry's "window" is the loss with the last T tokens alone in sight.
    `most` bounds the tokens read for each context."""
    T = model.config.block_size
    ends, targets, longest = where_to_score(len(tokens), T, times, most)
    window = interval(sliding_losses(model, tokens, ends, targets, runtime))
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


def where_to_score(length, T, times, most):
    """(ends, targets, longest): the last `targets` tokens before each of the ends are scored, with
    up to `longest` times T tokens before an end in sight.

        |<------------- longest * T ------------->|
        |..............................[ targets ]|
                                                  end

    The ends are spread over a text of this length. The targets are T/4 tokens, fewer of a short
    text."""
    longest = max((n for n in times if n * T < length), default=1)
    count = max(4, min(64, most // (longest * T)))
    targets = max(1, min(T // 4, length - 1 - T))
    first = min(max(longest * T, T + targets), length - 1)
    ends = np.unique(np.linspace(first, length - 1, count).astype(int))
    return ends, targets, longest


def sliding_losses(model, tokens, ends, targets, runtime):
    """(n,) the loss of the targets before each end with the last T tokens alone in sight, which
    slide with the targets in strides of T/16."""
    T = model.config.block_size
    stride = max(1, T // 16)
    losses = []  # (n,) of each stride
    sizes = []  # its targets
    for before in range(0, targets, stride):
        size = min(stride, targets - before)
        losses.append(losses_at_ends(model, tokens, ends - before, T, size, runtime))
        sizes.append(size)
    return np.average(losses, axis=0, weights=sizes)


def interval(losses):
    """{"loss", "low", "high"}: the mean loss of some windows [n] in nats per token, and its 95 % t
    interval."""
    low = None
    high = None
    if len(losses) > 1:
        low, high = map(float, stats.ttest_1samp(losses, 0).confidence_interval())
    return {"loss": float(losses.mean()), "low": low, "high": high}


def losses_at_ends(model, tokens, ends, context, targets, runtime):
    """(n,) the loss of the last `targets` tokens of each window of `context` tokens with these
    ends."""
    losses = []
    for end in ends:
        window = np.asarray(tokens[end - context : end + 1]).astype(np.int64)  # (context + 1,)
        window = torch.from_numpy(window).to(runtime.device)[None]
        x = window[:, :-1]
        y = window[:, 1:].clone()
        y[:, :-targets] = -1
        with runtime.autocast():
            losses.append(model(x, y)[1].item())
    return np.array(losses)


@torch.no_grad()
def measure_trained(job, device):
    """{"extrapolation", "sample", "test_loss"} of a run's trained model, on a device (None: the
    run's). Empty for a run that is not reported, or that has no checkpoint. Raises Failure if the
    model was trained on other data than the sweep's."""
    measured = {"extrapolation": {}, "sample": None, "test_loss": None}
    if job.purpose != "report" or not checkpoint.steps(job.out_dir):
        return measured
    runtime = set_up(device or job.values["device"], job.values.get("dtype", "auto"))
    model, tokenizer, _, state = checkpoint.open_run(job.out_dir, "latest", runtime.device)
    if state["data"] != job.data:
        name = job.values["dataset"]
        raise Failure("the dataset changed while the sweep ran", name, "start the sweep again")

    # A sample with a fixed seed.
    ids = tokenizer.prompt(job.prompt)
    idx = torch.tensor(np.asarray(ids), dtype=torch.long, device=runtime.device)[None]  # (1, T)
    with runtime.autocast():
        more = {"seeds": [seed_for(0)], "vocab_size": tokenizer.vocab_size}
        more |= {"temperature": 0.8, "top_k": 200}
        tokens = [token.item() for token in sample.generate(model, idx, SAMPLED, **more)]
    text = tokenizer.decode_bytes(tokens).decode("utf-8", "replace")
    measured["sample"] = job.prompt + text

    # The loss with other contexts, and on the test split, which chose no learning rate.
    if job.kind != "text":  # one text alone can be read in a longer context
        return measured
    folder = Path(job.values.get("data_dir", "data")) / job.values["dataset"]
    block_size = model.config.block_size
    if job.number < LENGTHENED:
        val_tokens = load_split(folder, "val", block_size)
        measured["extrapolation"] = extrapolation(model, val_tokens, runtime)
    if "test" in load_meta(folder)["splits"]:
        config = SimpleNamespace(batch_size=job.values["batch_size"])
        run = SimpleNamespace(model=model, net=Loss(model), runtime=runtime, config=config)
        run.progress = lambda *counted: None
        test_split = open_split(folder, "test", block_size)
        measured["test_loss"] = mean_loss(train.evaluate(run, test_split, 0))
    return measured
