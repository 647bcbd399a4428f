"""The order of the training samples, and the batches of an evaluation."""

import numpy as np

from tokens.token_files import check_length


def visits(order, size, first, count):
    """Entries first .. first + count - 1 of order(0), order(1), ... one after the other, each of
    `size` entries."""
    pieces = []
    while count > 0:
        epoch, at = divmod(first, size)
        pieces.append(order(epoch)[at : at + count])
        first, count = first + len(pieces[-1]), count - len(pieces[-1])
    return np.concatenate(pieces)


class Batches:
    """The training samples in one endless global order, a pure function of (tokens, block_size,
    seed).

    Each epoch cuts the N tokens into (N - block_size) // block_size windows, from a new random
    offset, so that a token is not always at the same position in its window, and visits each window
    once in a new random order. Steps, micro-batches and ranks take slices of this order. Resuming
    needs only the step."""

    masked = False  # the loss of every target counts

    def __init__(self, tokens, block_size, seed):
        if len(tokens) <= block_size:
            raise ValueError(f"{len(tokens)} tokens are too few for block_size={block_size}")
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        # All windows of block_size + 1 tokens, as a view: (N - block_size, block_size + 1)
        self.windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), block_size + 1)
        self.windows_per_epoch = max(1, (len(tokens) - block_size) // block_size)
        self.epochs = {}  # {epoch: its window starts} of the last two epochs in use

    def starts(self, epoch):
        """(windows_per_epoch,) the starts of an epoch's windows, in the order of the visits."""
        if epoch not in self.epochs:
            random = np.random.default_rng([self.seed, epoch])
            covered = (self.windows_per_epoch - 1) * self.block_size
            offset = random.integers(len(self.windows) - covered)
            starts = offset + self.block_size * random.permutation(self.windows_per_epoch)
            self.epochs = dict([*self.epochs.items()][-1:]) | {epoch: starts}
        return self.epochs[epoch]

    def get(self, first, count):
        """Samples first .. first + count - 1: x and its successors y, both (count, block_size)
        int64. Raises Failure if the token file has become shorter."""
        check_length(self.tokens)
        starts = visits(self.starts, self.windows_per_epoch, first, count)
        windows = self.windows[starts]  # (count, block_size + 1)
        return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)


class Text:
    """A split of running text: N token ids, read in windows of block_size."""

    def __init__(self, tokens, block_size):
        self.tokens, self.block_size = tokens, block_size

    def __len__(self):
        return len(self.tokens)

    @property
    def learned(self):
        """The ids whose loss counts if they are targets: all."""
        return self.tokens

    def batches(self, seed):
        """The samples of the split in their endless order."""
        return Batches(self.tokens, self.block_size, seed)

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y), (batch_size, block_size) int64, such that each of the first `limit` tokens
        (None or 0: all), except the very first, is a target exactly once. Windows do not overlap.
        All batches have the same shape, so that a compiled model sees only one: past the end x is 0
        and y is -1. Raises Failure as Batches.get does."""
        shape = batch_size, self.block_size
        size = batch_size * self.block_size
        targets = min(limit or len(self.tokens), len(self.tokens)) - 1

        for start in range(0, targets, size):
            check_length(self.tokens)
            part = np.asarray(self.tokens[start : min(start + size, targets) + 1]).astype(np.int64)
            x, y = np.zeros(size, np.int64), np.full(size, -1)
            x[: len(part) - 1], y[: len(part) - 1] = part[:-1], part[1:]
            yield x.reshape(shape), y.reshape(shape)

    def scored(self, limit=None):
        """(number of targets, their ids) of what eval_batches yields."""
        targets = self.tokens[1 : limit or None]
        return len(targets), targets
