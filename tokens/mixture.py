"""
The data of a run: one dataset, or a mixture of several. Each is a Source with a weight, its share
of the samples:

    given     data_weights, in the order of the datasets
    by rule   w_i = f_i^alpha / sum_j f_j^alpha of their numbers of training tokens f, with
              alpha = data_alpha: 1 is in proportion, 0 the same for each, and in between small
              datasets are drawn more often than in proportion (Lample & Conneau 2019,
              arXiv:1901.07291, section 3.1)

A sample is a window of block_size tokens or a prompt/answer pair; the two may be mixed. Every
target that counts has the same weight in the loss. A pair has fewer targets than a window, so the
share of pairs in the gradient is smaller than in the samples.
"""

import functools
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError
from tokens.batches import Batches, Text, visits
from tokens.pairs import PairBatches, Pairs, Preferences
from tokens.token_files import PIECE, fingerprint, load_mask, load_meta, load_split

BLOCK = 10_000  # samples in which every source has exactly its share


@dataclass
class Source:
    """A dataset of a run."""

    name: str
    meta: dict  # its meta.json
    weight: float  # its share of the samples; all sum to 1
    splits: dict  # {"train", "val": Text or Pairs}
    batches: Batches | PairBatches
    bits_per_byte: float  # of the validation tokens: times nats per token, it is bits per byte


def weights(given, alpha, counts):
    """The shares, which sum to 1, of datasets with `counts` training tokens: by the text `given`,
    or by the rule if it is None."""
    if given is not None:
        parts = np.array(given.split(","), dtype=float)
    else:
        largest = max(counts) if alpha > 1 else 1  # so that no power overflows
        parts = (np.array(counts, dtype=float) / largest) ** alpha
    return (parts / parts.sum()).tolist()


def shares(weights):
    """(S,) samples of each source in a block, BLOCK in all: the weights rounded by largest
    remainder."""
    exact = np.array(weights) * BLOCK
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts


def bits_per_byte(split, tokenizer, limit):
    """The factor from nats per scored token to bits per byte, over the `limit` tokens of a
    split that an evaluation scores (0: all). For pairs, only the bytes of the answers count."""
    targets, ids = split.scored(limit)
    parts = (ids[start : start + PIECE] for start in range(0, len(ids), PIECE))
    return targets / sum(len(tokenizer.decode_bytes(part)) for part in parts) / math.log(2)


def mixed_fingerprint(metas):
    """The fingerprint of several datasets in their order; that of one is token_files.fingerprint
    itself."""
    prints = [fingerprint(meta) for meta in metas]
    if len(prints) == 1:
        return prints[0]
    return hashlib.sha256(json.dumps(prints).encode()).hexdigest()[:16]


def common_tokenizer(tokenizers, config):
    """The tokenizer of all datasets, given {name: tokenizer}. Raises UserError if they differ."""
    first, *others = tokenizers
    for other in others:
        if tokenizers[other].to_json() != tokenizers[first].to_json():
            what = f"{first} and {other} have different tokenizers"
            fix = "prepare both with the same one; those of char depend on the text"
            raise UserError(what, f"dataset={config.dataset}", fix)
    return tokenizers[first]


def data_seed(config):
    """The seed of the order of the samples."""
    return config.seed if config.data_seed is None else config.data_seed


def open_sources(config, metas, tokenizer, block_size):
    """The list of Sources of a TrainConfig, given {name: meta.json}. Raises UserError for files
    that are incomplete or too short, and for a weight so small that a block would contain no sample
    of its dataset."""
    counts = [meta["splits"]["train"]["tokens"] for meta in metas.values()]
    parts = weights(config.data_weights, config.data_alpha, counts)
    sources, seed = [], data_seed(config)
    for i, ((name, meta), weight) in enumerate(zip(metas.items(), parts, strict=True)):
        if not weight * BLOCK >= 1:
            what = f"{name} would be {weight:.2g} of the samples, less than one in {BLOCK:,}"
            raise UserError(what, "data_weights, data_alpha", "give it more, or leave it out")
        folder = Path(config.data_dir) / name
        splits = {split: open_split(folder, split, block_size) for split in ("train", "val")}
        if i > 0:  # so that datasets of the same length have different orders
            seed = int(np.random.SeedSequence([data_seed(config), i]).generate_state(1)[0])
        bits = bits_per_byte(splits["val"], tokenizer, config.eval_tokens)
        sources.append(Source(name, meta, weight, splits, splits["train"].batches(seed), bits))
    return sources


def open_split(folder, split, block_size):
    """The Text, Pairs or Preferences of a split. Raises UserError if it holds nothing to learn
    within block_size."""
    mask = load_mask(folder, split)
    if mask is None:
        return Text(load_split(folder, split, block_size), block_size)
    kind = Preferences if "preferences" in load_meta(folder)["splits"][split] else Pairs
    try:
        pairs = kind(load_split(folder, split, 0), mask, block_size)
    except ValueError as error:
        raise UserError(str(error), folder, "prepare them again") from None
    if not len(pairs.starts):
        what = f"all answers of the {split} split begin beyond block_size={block_size:,}"
        raise UserError(what, folder, "choose a larger block_size, or shorter prompts")
    return pairs


class Mixture:
    """The samples of several sources in one endless global order, a pure function of (sources,
    weights, seed).

    Each block of BLOCK samples contains every source in exactly its share, in a new random order.
    The samples of a source follow its own order, and its position is the shares of the earlier
    blocks plus a count within the block. Resuming needs only the step."""

    def __init__(self, sources, seed):
        self.sources, self.seed = sources, seed
        self.shares = shares([source.weight for source in sources])
        self.masked = any(source.batches.masked for source in sources)
        self.order = functools.lru_cache(2)(self.shuffled)

    def shuffled(self, block):
        """(BLOCK,) the source of each sample of a block. The 1 makes the random numbers differ
        from those of the epochs."""
        random = np.random.default_rng([self.seed, block, 1])
        return random.permutation(np.repeat(np.arange(len(self.sources)), self.shares))

    def counts(self, n):
        """(S,) how many of the first n samples are from each source."""
        block, k = divmod(n, BLOCK)
        return block * self.shares + np.bincount(self.order(block)[:k], minlength=len(self.sources))

    def drawn(self, first, count):
        """{name: how many} of the samples first .. first + count - 1."""
        counts = self.counts(first + count) - self.counts(first)
        names = [source.name for source in self.sources]
        return dict(zip(names, counts.tolist(), strict=True))

    def get(self, first, count):
        """Samples first .. first + count - 1: x and its successors y, both (count, block_size)
        int64."""
        origin = visits(self.order, BLOCK, first, count)  # (count,) the source of each sample
        before = self.counts(first)
        parts = [
            self.sources[i].batches.get(int(before[i]), int((origin == i).sum()))
            for i in np.unique(origin)
        ]
        # The place of each sample among the samples sorted by source.
        place = np.argsort(np.argsort(origin, kind="stable"))
        return tuple(np.concatenate(part)[place] for part in zip(*parts, strict=True))
