"""
The data of a run: one set, or several that are mixed. Each set is a Source with a weight, its share of the samples:

    given     data_weights, in the order of the sets
    by rule   w_i = f_i^alpha / sum_j f_j^alpha over their numbers of training tokens f, alpha = data_alpha: 1 is in
              proportion, 0 the same of each, and between them small sets come up more often than their size would
              have it (Lample & Conneau 2019, arXiv:1901.07291, section 3.1)

A sample is a window of block_size tokens, or a prompt/answer pair; the two may be mixed. As every target that counts
weighs the same in the loss, a set of pairs then has a smaller part in the gradient than in the samples.
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
from tokens.pairs import PairBatches, Pairs
from tokens.token_files import fingerprint, load_mask, load_split

BLOCK = 10_000  # samples in which every source has exactly its share


@dataclass
class Source:
    """A data set of a run."""

    name: str
    meta: dict  # its meta.json
    weight: float  # its share of the samples; all sum to 1
    splits: dict  # {"train", "val": Text or Pairs}
    batches: Batches | PairBatches
    bits_per_byte: float  # of the validation tokens scored: this times nats per token; of pairs the answers' bytes count


def weights(given, alpha, counts):
    """The shares, which sum to 1, of sets with `counts` training tokens: by the text `given`, or by the rule where it is None."""
    parts = (
        np.array(given.split(","), dtype=float)
        if given is not None
        else (np.array(counts, dtype=float) / (max(counts) if alpha > 1 else 1)) ** alpha
    )
    return (parts / parts.sum()).tolist()


def shares(weights):
    """(S,) samples of each source in a block, BLOCK in all: the weights by largest remainder."""
    exact = np.array(weights) * BLOCK
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts


def bits_per_byte(split, tokenizer, limit):
    """What turns nats per token scored into bits per byte, of the first `limit` tokens of a split (0: all)."""
    targets, ids = split.scored(limit)
    return targets / len(tokenizer.decode_bytes(ids)) / math.log(2)


def mixed_fingerprint(metas):
    """The fingerprint of several sets in their order; of one, corpus.fingerprint itself."""
    told = [fingerprint(meta) for meta in metas]
    return told[0] if len(told) == 1 else hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def open_sources(config, metas, tokenizer, block_size):
    """The list of Sources of a TrainConfig, given {name: meta.json}; UserError for files that are not whole or too short,
    and for a weight so small that a block would have no sample of its set."""
    seed = config.seed if config.data_seed is None else config.data_seed
    parts = weights(
        config.data_weights,
        config.data_alpha,
        [meta["splits"]["train"]["tokens"] for meta in metas.values()],
    )
    sources = []
    for i, ((name, meta), weight) in enumerate(zip(metas.items(), parts)):
        if not weight * BLOCK >= 1:
            raise UserError(
                f"{name} would be {weight:.2g} of the samples, less than one in {BLOCK:,}",
                "data_weights, data_alpha",
                "give it more, or leave it out of dataset",
            )
        folder, splits = Path(config.data_dir) / name, {}
        for split in ("train", "val"):
            mask = load_mask(folder, split)
            tokens = load_split(folder, split, block_size if mask is None else 0)
            splits[split] = (
                Text(tokens, block_size) if mask is None else Pairs(tokens, mask, block_size)
            )
            if mask is not None and not len(splits[split].starts):
                raise UserError(
                    f"all answers of the {split} split begin beyond block_size={block_size:,}",
                    folder,
                    "choose a larger block_size, or shorter prompts",
                )
        own = (
            seed if i == 0 else int(np.random.SeedSequence([seed, i]).generate_state(1)[0])
        )  # sets of one length in orders of their own
        sources.append(
            Source(
                name,
                meta,
                weight,
                splits,
                splits["train"].batches(own),
                bits_per_byte(splits["val"], tokenizer, config.eval_tokens),
            )
        )
    return sources


def open_batches(config, sources):
    """The training samples of a run: those of its one source, or of the mixture."""
    return (
        sources[0].batches
        if len(sources) == 1
        else Mixture(sources, config.seed if config.data_seed is None else config.data_seed)
    )


class Mixture:
    """The samples of several sources in one endless global order, a pure function of (sources, weights, seed).

    A block of BLOCK samples has exactly its share of each source, shuffled anew; the samples of a source are taken one
    after the other in its own order, so without replacement until all were seen. Which they are follows from the
    position alone: the shares of the blocks before, and a count within the block. Nothing has to be stored."""

    def __init__(self, sources, seed):
        self.sources, self.seed = sources, seed
        self.shares = shares([source.weight for source in sources])
        self.masked = any(source.batches.masked for source in sources)
        self.order = functools.lru_cache(2)(self.shuffled)

    def shuffled(self, block):
        """(BLOCK,) the source of each sample of a block. The 1 keeps this stream apart from those of the epochs."""
        return np.random.default_rng([self.seed, block, 1]).permutation(
            np.repeat(np.arange(len(self.sources)), self.shares)
        )

    def counts(self, n):
        """(S,) how many of the first n samples are from each source."""
        block, k = divmod(n, BLOCK)
        return block * self.shares + np.bincount(self.order(block)[:k], minlength=len(self.sources))

    def drawn(self, first, count):
        """{name: how many} of the samples first .. first + count - 1."""
        return {
            source.name: int(n)
            for source, n in zip(self.sources, self.counts(first + count) - self.counts(first))
        }

    def get(self, first, count):
        """Samples first .. first + count - 1: x and its successors y, both (count, block_size) int64."""
        who, before = visits(self.order, BLOCK, first, count), self.counts(first)
        rows = [[], []]
        for i in np.unique(who):
            for found, part in zip(
                rows, self.sources[i].batches.get(int(before[i]), int((who == i).sum()))
            ):
                found.append(part)
        place = np.argsort(
            np.argsort(who, kind="stable")
        )  # where each sample is among those sorted by source
        return tuple(np.concatenate(parts)[place] for parts in rows)
