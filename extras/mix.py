"""
Train on a mixture of several datasets:

    python -m extras.mix config/llama_shakespeare.py --dataset=a,b --data_alpha=0.3
    python -m extras.mix config/llama_shakespeare.py --dataset=a,b --data_weights=0.7,0.3
    python -m extras.mix --init_from=resume --out_dir=out

All else is train.py's. Each dataset has a share w_i of the samples:

    given     data_weights, in the order of the datasets
    by rule   w_i = f_i^alpha / sum_j f_j^alpha of their numbers of training tokens f, with
              alpha = data_alpha: 1 is in proportion, 0 the same for each, and in between small
              datasets are drawn more often than in proportion (Lample & Conneau 2019,
              arXiv:1901.07291, section 3.1)

A sample is a window of block_size tokens or a prompt/answer pair; the two may be mixed. Every
target that counts has the same weight in the loss. A pair has fewer targets than a window, so the
share of pairs in the gradient is smaller than in the samples. The log holds the loss of each
dataset, and the mean by their shares.
"""

import functools
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.mix")

import numpy as np

import train
from common import errors
from common.configurator import NonNegativeFloat
from common.errors import UserError
from tokens.batches import visits
from tokens.data import Dataset
from training import evaluation, ranks
from training.settings import read_config

BLOCK = 10_000  # samples in which every dataset has exactly its share
# Columns of a log row that all datasets have. The others are measures, such as val_exact.
LOSSES = (
    "train_loss",
    "val_loss",
    "bits_per_byte",
    "whole_val_loss",
    "val_loss_tune",
    "val_loss_report",
)


@dataclass
class MixConfig:
    # the mixture
    data_weights: str | None = None  # shares of the samples, such as 0.7,0.3; None: by data_alpha
    data_alpha: NonNegativeFloat = 1.0  # shares as (training tokens)^alpha: 0 = equal shares

    def __post_init__(self):
        if self.data_weights is not None and self.data_alpha != 1:
            what = "data_weights and data_alpha both set the shares"
            raise ValueError(f"{what}: give --data_weights=None or --data_alpha=1")


def main(argv):
    """Train on a mixture, as argv says. Returns train.py's Result."""
    return train.train_or_evaluate(read(argv), make_run)


def read(argv):
    """The Settings of a command line."""
    return read_config(argv, __doc__, own=MixConfig, program="extras.mix")


def make_run(settings, runtime):
    """The Run of some Settings, whose data are a Mixture."""
    if settings.config.split != "val":
        fix = "leave it out, or score one dataset: train.py --init_from=RUN --eval_only"
        raise UserError("a mixture scores its validation splits", "split", fix)
    shares = MixConfig(**settings.own)
    open_data = functools.partial(open_mixture, shares=shares)
    return train.make_run(settings, runtime, open_data=open_data, scoring=score)


# ---------------------------------------------------------------- the datasets


def open_mixture(config, runtime, shares):
    """The Mixture of a TrainConfig and a MixConfig."""
    names = [name.strip() for name in config.dataset.split(",")]
    if not all(names) or len(set(names)) < len(names):
        what = "a dataset is empty or repeated"
        raise UserError(what, f"dataset={config.dataset}", "write --dataset=a,b,c")
    given = read_weights(shares.data_weights, names)
    folders = [Path(config.data_dir) / name for name in names]
    ranks.main_first(lambda: [train.prepare_missing(folder) for folder in folders], runtime)
    sources = [Dataset(config.data_dir, name) for name in names]
    for source in sources:
        if "preferences" in source.meta["splits"]["train"]:
            fix = "leave it out; python -m extras.preferences trains on it alone"
            raise UserError(f"{source.name} holds preferences", f"dataset={config.dataset}", fix)
    for other in sources[1:]:
        if other.tokenizer.to_json() != sources[0].tokenizer.to_json():
            what = f"{names[0]} and {other.name} have different tokenizers"
            fix = "prepare both with the same one; tokenizers of char depend on the text"
            raise UserError(what, f"dataset={config.dataset}", fix)

    if given is None:
        tokens = [source.meta["splits"]["train"]["tokens"] for source in sources]
        given = powers(tokens, shares.data_alpha)
    return Mixture(sources, (given / given.sum()).tolist())


def read_weights(text, names):
    """The numbers of data_weights, one for each dataset; None if there are none."""
    if text is None:
        return None
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(names) or not all(0 < weight < math.inf for weight in weights):
        what = f"this is not a number above 0 for each of {', '.join(names)}"
        raise UserError(what, f"data_weights={text}", "write --data_weights=0.7,0.3")
    return np.array(weights)


def powers(tokens, alpha):
    """The numbers of tokens to the power of alpha."""
    largest = max(tokens) if alpha > 1 else 1  # so that no power overflows
    return (np.array(tokens, dtype=float) / largest) ** alpha


class Mixture:
    """The data of a run: several Datasets, the sources, with weights that sum to 1. In all else it
    is as a Dataset; where a run needs one split, it is the split of the first source."""

    def __init__(self, sources, weights):
        self.sources = sources
        self.weights = weights
        for source, weight in zip(sources, weights, strict=True):
            if not weight * BLOCK >= 1:
                what = f"{source.name} would be {weight:.2g} of the samples"
                fix = f"give it at least one in {BLOCK:,}, or leave it out"
                raise UserError(what, "data_weights, data_alpha", fix)
        self.name = ",".join(source.name for source in sources)
        self.meta = {}
        self.tokenizer = sources[0].tokenizer
        self.vocab_size = sources[0].vocab_size
        self.fingerprint = sources[0].fingerprint
        if len(sources) > 1:
            prints = json.dumps([source.fingerprint for source in sources])
            self.fingerprint = hashlib.sha256(prints.encode()).hexdigest()[:16]

    def open(self, block_size, seed, eval_tokens=0):
        """Open the splits of all sources."""
        for i, source in enumerate(self.sources):
            own_seed = seed
            if i > 0:  # so that datasets of the same length have different orders
                own_seed = int(np.random.SeedSequence([seed, i]).generate_state(1)[0])
            source.open(block_size, own_seed, eval_tokens)
        self.splits = self.sources[0].splits
        orders = [source.batches for source in self.sources]
        self.batches = MixedBatches(orders, shares_of_block(self.weights), seed)

    def description(self):
        """The sizes of the datasets and their shares, as lines of text."""
        lines = []
        for source, weight in zip(self.sources, self.weights, strict=True):
            lines += source.description()
            lines.append(f"  {weight:.2%} of the samples")
        return lines

    def times_read(self, samples):
        """How often they go through the training split that is read most often."""
        parts = zip(self.sources, self.weights, strict=True)
        return max(source.times_read(samples * weight) for source, weight in parts)

    def epochs(self, samples):
        """How often a number of samples go through each training split, as text."""
        parts = zip(self.sources, self.weights, strict=True)
        texts = [f"{source.epochs(samples * weight)} of {source.name}" for source, weight in parts]
        return ", ".join(texts)


# ---------------------------------------------------------------- the order of the samples


def shares_of_block(weights):
    """(S,) samples of each source in a block, BLOCK in all: the weights rounded by largest
    remainder."""
    exact = np.array(weights) * BLOCK
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts


class MixedBatches:
    """The samples of several sources in one endless global order, a pure function of (orders,
    shares, seed).

    Each block of BLOCK samples contains every source in exactly its share (S,), in a new random
    order. The samples of a source follow its own order, and its position is the shares of the
    earlier blocks plus a count within the block. Resuming needs only the step."""

    def __init__(self, orders, shares, seed):
        self.orders = orders
        self.shares = shares
        self.seed = seed
        self.masked = any(order.masked for order in orders)
        self.windows_per_epoch = max(order.windows_per_epoch for order in orders)
        self.sources_of = functools.lru_cache(2)(self.shuffled_block)

    def shuffled_block(self, block):
        """(BLOCK,) the source of each sample of a block. The 1 gives it other random numbers
        than the epochs have."""
        random = np.random.default_rng([self.seed, block, 1])
        return random.permutation(np.repeat(np.arange(len(self.orders)), self.shares))

    def counts(self, n):
        """(S,) the number of samples from each source among the first n."""
        block, k = divmod(n, BLOCK)
        within = np.bincount(self.sources_of(block)[:k], minlength=len(self.orders))
        return block * self.shares + within

    def get(self, first, count):
        """Samples first .. first + count - 1: x and its successors y, both (count, block_size)
        int64."""
        origin = visits(self.sources_of, BLOCK, first, count)  # (count,) the source of each sample
        before = self.counts(first)
        parts = [
            self.orders[i].get(int(before[i]), int((origin == i).sum())) for i in np.unique(origin)
        ]
        # The place of each sample among the samples sorted by source.
        place = np.argsort(np.argsort(origin, kind="stable"))
        return tuple(np.concatenate(part)[place] for part in zip(*parts, strict=True))


# ---------------------------------------------------------------- the evaluation


def score(run, stop=None):
    """The log row of an evaluation of all datasets, None if a stop signal arrives midway."""
    found = []
    for source in run.data.sources:
        sums = train.score_splits(run, source, stop)
        if sums is None:
            return None
        found.append(sums)
    row = {"step": run.step} | mixed_row(run.data.sources, run.data.weights, found)
    return row | {"seconds": run.state["seconds"]}


def mixed_row(sources, weights, found):
    """The columns of a log row: means by weight of the columns of each dataset, and its own loss
    and bits per byte. found: what train.score_splits gives for each."""
    rows = [
        evaluation.evaluation_row(source, sums) for source, sums in zip(sources, found, strict=True)
    ]
    row = mean_row(rows, weights)
    names = [source.name for source in sources]
    if len(sources) > 1:
        row["val_losses"] = dict(zip(names, [own["val_loss"] for own in rows], strict=True))
        bits = [own["bits_per_byte"] for own in rows]
        row["val_bits_per_byte"] = dict(zip(names, bits, strict=True))
    if "val_loss_tune" in row:
        sums_of_val = [sums.get("whole", sums["val"]) for sums in found]
        row["val_blocks"] = blocks_of(sums_of_val, weights)
    return row


def mean_row(rows, weights):
    """{key: mean by weight} of the columns of several rows. A measure is a mean over the datasets
    that have it. Without both halves of each dataset there are no columns about halves."""
    row = {}
    keys = dict.fromkeys(key for own in rows for key in own if key != "val_blocks")
    halved = all("val_loss_tune" in own for own in rows)
    for key in keys:
        if key.startswith(("report_", "val_loss_")) and not halved:
            continue
        parts = [(own[key], w) for own, w in zip(rows, weights, strict=True) if key in own]
        row[key] = sum(weight * value for value, weight in parts)
        if key not in LOSSES:
            row[key] /= sum(weight for _, weight in parts)
    return row


def blocks_of(all_sums, weights):
    """The mean losses by weight of consecutive blocks of the second halves, as many as the dataset
    with the fewest batches has, at most EVAL_BLOCKS."""
    seconds = [evaluation.split_in_half(sums)[1] for sums in all_sums]
    count = min(evaluation.EVAL_BLOCKS, *(len(sums) for sums in seconds))
    losses = []
    for block in zip(*(sums.tensor_split(count) for sums in seconds), strict=True):
        parts = zip(block, weights, strict=True)
        losses.append(round(sum(w * evaluation.mean_loss(sums) for sums, w in parts), 6))
    return losses


if __name__ == "__main__":
    errors.run(lambda argv: main(argv).status)
