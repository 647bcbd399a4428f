"""
Token files, and the order of the batches.

A data set is a folder that prepare.py makes:

    train.bin val.bin   token ids, raw little-endian uint16 (uint32 if the vocabulary needs it)
    train.mask.bin val.mask.bin   of prompt/answer pairs (pairs.py) only: uint8, 1 where the loss of a token counts
    meta.json           vocab_size, dtype, tokens and bytes of each split, sha256 of the source
    tokenizer.json      the tokenizer in full: whoever has it needs no network and no cache
"""

import numpy as np

from tokens.token_files import check_length


def visits(order, size, first, count):
    """Entries first .. first + count - 1 of order(0), order(1), ... written one after the other, each of `size` entries."""
    found = []
    while count > 0:
        epoch, k = divmod(first, size)
        found.append(order(epoch)[k : k + count])
        first, count = first + len(found[-1]), count - len(found[-1])
    return np.concatenate(found)


class Batches:
    """The training samples in one endless global order, a pure function of (tokens, block_size, seed).

    An epoch cuts the N tokens into (N - block_size) // block_size windows from a fresh offset, so that
    a token's position in its window is no fixed property of the text, and visits each once in a fresh
    order. Steps, micro-batches and ranks take slices of the order: nothing has to be stored to resume."""

    def __init__(self, tokens, block_size, seed):
        if len(tokens) <= block_size:
            raise ValueError(f"{len(tokens)} tokens are too few for block_size={block_size}")
        # every window of block_size + 1 tokens, as a view: (N - block_size, block_size + 1)
        self.windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), block_size + 1)
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.masked = False  # whether the loss of some targets does not count
        self.windows_per_epoch = max(1, (len(tokens) - block_size) // block_size)
        self.epochs = {}  # the window starts of the last two epochs asked for

    def starts(self, epoch):
        """(windows_per_epoch,) where the windows of an epoch start, in the order of the visits."""
        if epoch not in self.epochs:
            random = np.random.default_rng([self.seed, epoch])
            offset = random.integers(
                len(self.windows) - (self.windows_per_epoch - 1) * self.block_size
            )
            starts = offset + self.block_size * random.permutation(self.windows_per_epoch)
            self.epochs = dict([*self.epochs.items()][-1:]) | {epoch: starts}
        return self.epochs[epoch]

    def get(self, first, count):
        """Samples first .. first + count - 1: x and its successors y, both (count, block_size) int64.
        Raises Failure if the token file has become shorter."""
        check_length(self.tokens)
        windows = self.windows[
            visits(self.starts, self.windows_per_epoch, first, count)
        ]  # (count, block_size + 1)
        return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)


class Text:
    """A split of running text: N token ids, read in windows of block_size."""

    def __init__(self, tokens, block_size):
        self.tokens, self.block_size = tokens, block_size

    def __len__(self):
        return len(self.tokens)

    @property
    def learned(self):
        """The ids whose loss counts, as targets."""
        return self.tokens

    def batches(self, seed):
        """The samples of the split in their endless order."""
        return Batches(self.tokens, self.block_size, seed)

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y), (batch_size, block_size) int64, such that each of the first `limit` tokens (None or
        0: all) after the very first is a target exactly once. Windows do not overlap; all batches have the
        same shape, so that a compiled model sees one: beyond the end x is 0 and y is -1."""
        last, size = (
            min(limit or len(self.tokens), len(self.tokens)) - 1,
            batch_size * self.block_size,
        )  # the number of targets
        for start in range(0, last, size):
            check_length(self.tokens)
            part = np.asarray(self.tokens[start : min(start + size, last) + 1]).astype(np.int64)
            x, y = np.zeros(size, np.int64), np.full(size, -1)
            x[: len(part) - 1], y[: len(part) - 1] = part[:-1], part[1:]
            yield x.reshape(batch_size, self.block_size), y.reshape(batch_size, self.block_size)

    def scored(self, limit=None):
        """(number of targets, their ids) of what eval_batches yields."""
        told = self.tokens[1 : limit or None]
        return len(told), told
