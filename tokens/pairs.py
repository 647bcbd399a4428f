"""
Prompt/answer pairs, for supervised fine-tuning: the batches of token files with a mask. As tokens a
pair is

    prompt   the same tokens as for --start in sample.py, with bos if the model wants one     mask 0
    answer   encoded separately, so that the prompt has the same tokens as in sampling        mask 1
    end      the end token: <|endoftext|>, </s>, or a newline for characters and bytes        mask 1

Only tokens with mask 1 are learned, since the loss of a prompt teaches nothing about answering
(Ouyang et al. 2022, arXiv:2203.02155; Zhou et al. 2023, arXiv:2305.11206). A pair begins where the
mask returns to 0. Mask 2, which extras/tasks.py writes, is for what is given after the first
answer, such as the next question: it is not learned, and begins no pair.
"""

import functools

import numpy as np

from tokens.batches import RELEASE, Split, check_length, release, visits
from tokens.token_files import PIECE


def joints(mask):
    """(where pairs begin, and the end; where answers begin) of a mask, which is read in parts, so
    that memory grows with the pairs alone."""
    bounds = []
    answers = []
    before = np.int8(1)
    for at in range(0, len(mask), PIECE):
        part = (mask[at : at + PIECE] > 0).astype(np.int8)
        change = np.diff(part, prepend=before)  # -1 where a pair begins, 1 where an answer does
        bounds.append(at + np.flatnonzero(change == -1))
        answers.append(at + np.flatnonzero(change == 1))
        before = part[-1]
        release(mask)
    return np.concatenate([*bounds, [len(mask)]]), np.concatenate(answers)


class Pairs(Split):
    """The pairs of a split, each in a row of its own: its first tokens, up to block_size targets,
    then padding.

    Several pairs in a row would waste less, but an answer would then attend to other pairs, which
    are absent when the model is used. A block_size near the longest pair keeps the padding small.
    Pairs whose answer begins past block_size have no target and are left out."""

    measures = ("accuracy", "exact")  # shares of right tokens, and of rows without a wrong one
    unit = "pairs"  # what an example is called
    masked = True  # they have different numbers of targets

    def __init__(self, tokens, mask, block_size):
        self.tokens = tokens
        self.mask = mask
        self.block_size = block_size
        bounds, answers = joints(mask)
        starts = bounds[:-1]
        fits = answers - starts <= block_size  # the first token of the answer is a target
        self.starts = starts[fits]  # (P,)
        self.answers = answers[fits]  # (P,)
        self.ends = bounds[1:][fits]  # (P,)
        self.left_out = int((~fits).sum())
        self.cut = int((self.ends - self.starts > block_size + 1).sum())  # pairs that end past it

    @property
    def learned(self):
        """The ids whose loss counts if they are targets: the answers. Prompts are excluded, since
        many begin alike."""
        return self.tokens[self.mask == 1]

    def batches(self, seed):
        """The samples of the split in their endless order."""
        return PairBatches(self, seed)

    def rows(self, pairs):
        """x and its successors y, both (count, block_size) int64, of the pairs with these numbers,
        (count,). y is -1 in the prompt, where the loss does not count, and past the pair's end,
        where x is 0. Raises Failure as batches.Batches.get does."""
        check_length(self.tokens)
        check_length(self.mask)
        at = self.starts[pairs][:, None] + np.arange(self.block_size + 1)  # (count, block_size + 1)
        inside = at < self.ends[pairs][:, None]
        at = np.minimum(at, len(self.tokens) - 1)
        tokens = np.where(inside, self.tokens[at], 0).astype(np.int64)
        targets = np.where(inside & (self.mask[at] == 1), tokens, -1)
        return tokens[:, :-1], targets[:, 1:]

    def pairs_of(self, examples):
        """The numbers of the pairs of some examples: of each all, one after the other."""
        each = self.answers_each
        return (each * examples[:, None] + np.arange(each)).ravel()

    def eval_pairs(self, limit):
        """The numbers of the pairs of an evaluation: of all examples, or of as many as begin within
        the first `limit` tokens, at least one, spread evenly over the split."""
        pairs = len(self.starts)
        begun = max(1, int((self.starts < limit).sum())) if limit else pairs
        examples = pairs // self.answers_each
        count = (begun + self.answers_each - 1) // self.answers_each  # rounded up
        return self.pairs_of(np.arange(count) * examples // count)

    def eval_rows(self, limit=None):
        """The number of rows of an evaluation."""
        return len(self.eval_pairs(limit))

    def eval_batches(self, batch_size, limit=None):
        """Yield what `rows` gives of eval_pairs, batch_size rows each, so that each token of an
        answer that is within block_size is a target exactly once. The rows after the last pair
        are filled up: y is -1, and all else is 0."""
        chosen = self.eval_pairs(limit)
        for first in range(0, len(chosen), batch_size):
            x, y, *others = self.rows(chosen[first : first + batch_size])
            missing = [(0, batch_size - len(x)), (0, 0)]
            others = [np.pad(array, missing[:1]) for array in others]
            yield np.pad(x, missing), np.pad(y, missing, constant_values=-1), *others

    def scored(self, limit=None):
        """(number of targets, ids of the answers without their end tokens) of what eval_batches
        yields."""
        chosen = self.eval_pairs(limit)
        ends = self.ends[chosen]
        lasts = np.minimum(ends, self.starts[chosen] + self.block_size + 1)
        targets = 0
        ids = []
        for first, last, end in zip(self.answers[chosen], lasts, ends, strict=True):
            learned = self.mask[first:last] == 1
            targets += int(learned.sum())
            ids.append(self.tokens[first:last][learned & (np.arange(first, last) < end - 1)])
        return targets, np.concatenate(ids)


class PairBatches:
    """The pairs in one endless global order, as batches.Batches orders windows. The pairs of an
    example stay together: with two, the first has an even number."""

    def __init__(self, pairs, seed):
        self.pairs = pairs
        self.seed = seed
        self.masked = pairs.masked
        self.windows_per_epoch = len(pairs.starts)
        self.examples = len(pairs.starts) // pairs.answers_each
        self.unreleased = 0  # pairs read
        self.order = functools.lru_cache(2)(self.epoch_order)

    def epoch_order(self, epoch):
        """The numbers of the examples in the order of an epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.examples)

    def get(self, first, count):
        """Samples first .. first + count - 1, as Pairs.rows gives them. Every row has a target."""
        each = self.pairs.answers_each
        chosen = visits(self.order, self.examples, first // each, count // each)
        self.unreleased += count
        if self.unreleased >= RELEASE:
            release(self.pairs.tokens, self.pairs.mask)
            self.unreleased = 0
        return self.pairs.rows(self.pairs.pairs_of(chosen))
