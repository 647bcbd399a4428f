"""
Prompt/answer pairs, for supervised fine-tuning, and preferences, for learning from comparisons: the
batches of token files with a mask. As tokens a pair is

    prompt   the same tokens as for --start in sample.py, with bos if the model wants one     mask 0
    answer   encoded separately, so that the prompt has the same tokens as in sampling        mask 1
    end      the end token: <|endoftext|>, </s>, or a newline for characters and bytes        mask 1

Only tokens with mask 1 are learned, since the loss of a prompt teaches nothing about answering
(Ouyang et al. 2022, arXiv:2203.02155; Zhou et al. 2023, arXiv:2305.11206). A pair begins where the
mask returns to 0. Mask 2, which tasks.py writes, is for what is given after the first answer, such
as the next question: it is not learned, and begins no pair.

A preference is two answers to a prompt, of which one was chosen. Its tokens are those of two pairs,
the chosen answer first, and the splits in meta.json hold their number, `preferences`.
"""

import functools

import numpy as np

from tokens.batches import RELEASE, check_length, release, visits
from tokens.token_files import PIECE


def joints(mask):
    """(where pairs begin, and the end; where answers begin) of a mask, which is read in parts, so
    that memory grows with the pairs alone."""
    bounds, answers, before = [], [], np.int8(1)
    for at in range(0, len(mask), PIECE):
        part = (mask[at : at + PIECE] > 0).astype(np.int8)
        change = np.diff(part, prepend=before)  # -1 where a pair begins, 1 where an answer does
        bounds.append(at + np.flatnonzero(change == -1))
        answers.append(at + np.flatnonzero(change == 1))
        before = part[-1]
        release(mask)
    return np.concatenate([*bounds, [len(mask)]]), np.concatenate(answers)


class Pairs:
    """The pairs of a split, each in a row of its own: its first tokens, up to block_size targets,
    then padding.

    Several pairs in a row would waste less, but an answer would then attend to other pairs, which
    are absent when the model is used. A block_size near the longest pair keeps the padding small.
    Pairs whose answer begins past block_size have no target and are left out."""

    measures = ("accuracy", "exact")  # shares of right tokens, and of rows without a wrong one
    group = 1  # rows that belong together

    def __init__(self, tokens, mask, block_size):
        bounds, answers = joints(mask)
        starts, ends = bounds[:-1], bounds[1:]

        fits = answers - starts <= block_size  # the first token of the answer is a target
        self.starts, self.answers, self.ends = starts[fits], answers[fits], ends[fits]  # (P,) each
        self.left_out = int((~fits).sum())
        self.cut = int((self.ends - self.starts > block_size + 1).sum())  # pairs that end past it
        self.tokens, self.mask, self.block_size = tokens, mask, block_size

    def __len__(self):
        return len(self.tokens)

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
        where x is 0. Raises Failure if the token file has become shorter."""
        check_length(self.tokens)
        check_length(self.mask)
        at = self.starts[pairs][:, None] + np.arange(self.block_size + 1)  # (count, block_size + 1)
        inside = at < self.ends[pairs][:, None]
        at = np.minimum(at, len(self.tokens) - 1)
        tokens = np.where(inside, self.tokens[at], 0).astype(np.int64)
        targets = np.where(inside & (self.mask[at] == 1), tokens, -1)
        return tokens[:, :-1], targets[:, 1:]

    def eval_pairs(self, limit=None):
        """The numbers of the pairs of an evaluation: all, or as many as begin within the first
        `limit` tokens, at least one, spread evenly over the split; of a preference both."""
        count = max(1, int((self.starts < limit).sum())) if limit else len(self.starts)
        count = -(-count // self.group)
        groups = np.arange(count) * (len(self.starts) // self.group) // count
        return (self.group * groups[:, None] + np.arange(self.group)).ravel()

    def eval_batches(self, batch_size, limit=None):
        """Yield what `rows` gives of eval_pairs, in batches of batch_size, so that each token of an
        answer that is within block_size is a target exactly once. Rows after the last pair are
        x = 0, y = -1."""
        chosen = self.eval_pairs(limit)
        for first in range(0, len(chosen), batch_size):
            parts = self.rows(chosen[first : first + batch_size])
            missing = batch_size - len(parts[0])
            yield tuple(
                np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1), constant_values=fill)
                for part, fill in zip(parts, (0, -1, 0), strict=False)
            )

    def scored(self, limit=None):
        """(number of targets, ids of the answers without their end tokens) of what eval_batches
        yields."""
        chosen = self.eval_pairs(limit)
        starts, answers, ends = self.starts[chosen], self.answers[chosen], self.ends[chosen]
        lasts, targets, ids = np.minimum(ends, starts + self.block_size + 1), 0, []
        for first, last, end in zip(answers, lasts, ends, strict=True):
            learned = self.mask[first:last] == 1
            targets += int(learned.sum())
            ids.append(self.tokens[first:last][learned & (np.arange(first, last) < end - 1)])
        return targets, np.concatenate(ids)


class Preferences(Pairs):
    """The preferences of a split: rows 2i and 2i + 1 are the pairs of one, chosen and rejected.

    `reference` (rows,) float32 holds the log-probability in nats of each answer by the reference
    model, as far as block_size; it is set when a run starts (training/preferences.py). From then on
    `rows` and what it serves give (x, y, reference)."""

    measures = ("reward_accuracy", "reward_margin")
    group = 2

    def __init__(self, tokens, mask, block_size):
        super().__init__(tokens, mask, block_size)
        prompts = self.answers - self.starts
        if len(prompts) % 2 or (prompts[::2] != prompts[1::2]).any():
            raise ValueError("the pairs are not two for each prompt")
        self.reference = None

    def rows(self, pairs):
        known = () if self.reference is None else (self.reference[pairs],)
        return *super().rows(pairs), *known


class PairBatches:
    """The pairs, or preferences, in one endless global order, as batches.Batches orders windows. A
    preference is two samples, the first of an even number."""

    def __init__(self, pairs, seed):
        self.pairs, self.seed, self.windows_per_epoch = pairs, seed, len(pairs.starts)
        self.masked = pairs.group == 1  # preferences count the same, however long their answers
        self.unreleased = 0  # pairs read
        self.groups = len(pairs.starts) // pairs.group  # an epoch
        self.order = functools.lru_cache(2)(self.shuffled)

    def shuffled(self, epoch):
        """(groups,) the numbers of the pairs, or preferences, in the order of an epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.groups)

    def get(self, first, count):
        """Samples first .. first + count - 1, as Pairs.rows gives them. Every row has a target."""
        self.unreleased += count
        if self.unreleased >= RELEASE:
            release(self.pairs.tokens, self.pairs.mask)
            self.unreleased = 0
        group = self.pairs.group
        chosen = visits(self.order, self.groups, first // group, count // group)
        return self.pairs.rows((group * chosen[:, None] + np.arange(group)).ravel())
