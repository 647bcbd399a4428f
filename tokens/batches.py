"""
The order of the training samples, the loader, and the batches of an evaluation. A sample is a
window of block_size tokens x, and the token that follows each of them, y.
"""

import functools
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from common.errors import Failure

RELEASE = 1 << 10  # reads, of a training window or an evaluation's batch, until pages are released


def release(*arrays):
    """Let go of the pages of token files that were read, or the resident memory of a run grows to
    the size of the files."""
    for array in arrays:
        if isinstance(array, np.memmap):
            array.base.madvise(mmap.MADV_DONTNEED)


def check_length(tokens):
    """Raise Failure if the open file behind the token ids of `load_split` has become shorter:
    reading ids that are no longer in it would end the process by SIGBUS, without a message. A
    dataset that is prepared again is another file."""
    if isinstance(tokens, np.memmap) and (size := tokens.base.size()) < tokens.nbytes:
        what = f"the token file shrank from {tokens.nbytes:,} to {size:,} bytes while it was read"
        fix = "prepare the data again, then resume with --init_from=resume"
        raise Failure(what, tokens.filename, fix)


def visits(order, size, first, count):
    """(count,) entries first .. first + count - 1 of order(0), order(1), ... laid end to end, where
    order(epoch) has `size` entries."""
    pieces = []
    while count > 0:
        epoch, at = divmod(first, size)
        piece = order(epoch)[at : at + count]
        pieces.append(piece)
        first += len(piece)
        count -= len(piece)
    return np.concatenate(pieces)


class Split:
    """What Text and Pairs share: `tokens`, the ids of a split, and what an evaluation counts."""

    answers_each = 1  # rows of one example; a preference has two

    def __len__(self):
        return len(self.tokens)

    def counts(self, y):
        """(number of targets, number of rows that have one) of a batch's y (rows, T), -1 where none
        is."""
        is_target = y >= 0
        return int(is_target.sum()), int(is_target.any(1).sum())


# ---------------------------------------------------------------- running text


class Batches:
    """The training samples in one endless global order, a pure function of (tokens, block_size,
    seed).

    Each epoch cuts the N tokens into (N - block_size) // block_size windows, from a new random
    offset, so that a token is not always at the same position in its window, and visits each window
    once in a new random order. Steps, micro-batches and ranks take slices of this order. Resuming
    needs only the step. The order takes 8 bytes of memory for each window."""

    masked = False  # the loss of every target counts

    def __init__(self, tokens, block_size, seed):
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        # All windows of block_size + 1 tokens, as a view: (N - block_size, block_size + 1)
        self.windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), block_size + 1)
        self.windows_per_epoch = max(1, (len(tokens) - block_size) // block_size)
        self.unreleased = 0  # windows read
        self.starts = functools.lru_cache(2)(self.epoch_starts)

    def epoch_starts(self, epoch):
        """(windows_per_epoch,) the starts of an epoch's windows, in the order of the visits."""
        random = np.random.default_rng([self.seed, epoch])
        covered = (self.windows_per_epoch - 1) * self.block_size
        offset = int(random.integers(len(self.windows) - covered))
        starts = random.permutation(self.windows_per_epoch)
        starts *= self.block_size
        starts += offset
        return starts

    def get(self, first, count):
        """Samples first .. first + count - 1: x and its successors y, both (count, block_size)
        int64. Raises Failure if the token file has become shorter."""
        check_length(self.tokens)
        starts = visits(self.starts, self.windows_per_epoch, first, count)
        windows = self.windows[starts]  # (count, block_size + 1)
        self.unreleased += count
        if self.unreleased >= RELEASE:
            release(self.tokens)
            self.unreleased = 0
        return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)


class Text(Split):
    """A split of running text: N token ids, read in windows of block_size."""

    measures = ()  # of an evaluation, beside the loss

    def __init__(self, tokens, block_size):
        self.tokens = tokens
        self.block_size = block_size
        self.learned = tokens  # the ids whose loss counts: here all

    def batches(self, seed):
        """The samples of the split in their endless order."""
        return Batches(self.tokens, self.block_size, seed)

    def eval_windows(self, limit):
        """(starts, number of targets) of the windows of an evaluation: as many as `limit` tokens
        fill (None or 0: all), evenly spread, since Shakespeare's first 8,192 characters of
        validation cost 0.11 nats less than the whole."""
        n_tokens = len(self.tokens)
        targets = min(limit or n_tokens, n_tokens) - 1  # the first token is no target
        count = (targets + self.block_size - 1) // self.block_size  # rounded up
        all_windows = (n_tokens - 1 + self.block_size - 1) // self.block_size  # of the whole split
        chosen = np.arange(count) * all_windows // max(1, count)
        return chosen * self.block_size, targets

    def eval_rows(self, limit=None):
        """The number of rows of an evaluation."""
        return len(self.eval_windows(limit)[0])

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y), (batch_size, block_size) int64, of the windows of eval_windows, which do
        not overlap: of the whole split each token, except the very first, is a target exactly once.
        All batches have the same shape, so that a compiled model sees only one: past the end x is 0
        and y is -1. Raises Failure as Batches.get does."""
        starts, targets = self.eval_windows(limit)
        size = batch_size * self.block_size  # targets of a full batch
        tokens = np.asarray(self.tokens)
        for first in range(0, len(starts), batch_size):
            if first // batch_size % RELEASE == 0:
                release(self.tokens)
            check_length(self.tokens)
            positions = starts[first : first + batch_size, None] + np.arange(self.block_size + 1)
            # The last window may reach past the end, where its last token is repeated and not used.
            ids = tokens[np.minimum(positions, len(tokens) - 1)]  # (windows, block_size + 1)
            n_targets = min(size, targets - first * self.block_size)  # fewer in the last batch
            x = np.zeros(size, np.int64)
            x[:n_targets] = ids[:, :-1].flat[:n_targets]
            y = np.full(size, -1)
            y[:n_targets] = ids[:, 1:].flat[:n_targets]
            yield x.reshape(batch_size, -1), y.reshape(batch_size, -1)

    def scored(self, limit=None):
        """(number of targets, their ids) of what eval_batches yields."""
        if not limit:
            return len(self.tokens) - 1, self.tokens[1:]
        ids = np.concatenate([y[y >= 0] for _, y in self.eval_batches(1, limit)])
        return len(ids), ids


# ---------------------------------------------------------------- the loader


class MicroBatch(NamedTuple):
    number: int  # in the global batch
    inputs: list  # x and y, (batch_size, block_size) int64, and what else a loss takes
    n_targets: int


class Loader:
    """The micro-batches of this rank, of any step. Those of the next step are read in a thread
    while the device computes.

    samples: the order of the samples, such as Batches. A step has `count` micro-batches of `size`
    samples, which the ranks divide among them."""

    def __init__(self, samples, size, count, runtime):
        self.samples = samples
        self.size = size
        self.count = count
        self.runtime = runtime
        self.thread = ThreadPoolExecutor(1, "loader")
        self.ahead = {}  # {the next step: future of its micro-batches}

    def get(self, step):
        """[MicroBatch, ...] of this rank. Raises Failure as Batches.get does."""
        future = self.ahead.get(step) or self.thread.submit(self.read, step)
        micro_batches = future.result()
        self.ahead = {step + 1: self.thread.submit(self.read, step + 1)}
        return micro_batches

    def read(self, step):
        """[MicroBatch, ...] of this rank, read now."""
        if self.runtime.device.startswith("cuda"):
            torch.cuda.set_device(self.runtime.device)  # each thread has its own
        micro_batches = []
        for number in range(self.runtime.rank, self.count, self.runtime.world_size):
            first = (step * self.count + number) * self.size
            arrays = self.samples.get(first, self.size)
            y = arrays[1]
            n_targets = int((y >= 0).sum()) if self.samples.masked else y.size
            inputs = [to_device(array, self.runtime.device) for array in arrays]
            micro_batches.append(MicroBatch(number, inputs, n_targets))
        return micro_batches


def to_device(array, device):
    """A numpy array as a tensor on the device. A copy to a GPU is queued from pinned memory, so
    that nothing waits for it: torch keeps this memory until it is copied."""
    tensor = torch.from_numpy(array)
    if device.startswith("cuda"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
