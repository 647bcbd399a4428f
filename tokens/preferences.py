"""
Preferences, for learning from comparisons: two answers to a prompt, of which one was chosen. A row
is {"prompt": "...", "chosen": "...", "rejected": "..."}; its token files are those of two pairs
(pairs.py), the chosen answer first. The splits in meta.json then hold their number, `preferences`.
"""

import numpy as np

from common.errors import UserError
from tokens.batches import shuffled, visits
from tokens.pairs import PairBatches, Pairs, text_of

FORM = 'a line is {"prompt": "...", "chosen": "...", "rejected": "..."}'


def preference(row, where):
    """[(prompt, chosen), (prompt, rejected)] of a row. Raises UserError if it is no preference."""
    prompt, *answers = (text_of(row, key, where, FORM) for key in ("prompt", "chosen", "rejected"))
    for answer in answers:
        if not answer.strip():
            raise UserError("an answer is empty", where, "leave the preference out")
    if answers[0] == answers[1]:
        raise UserError("both answers are the same", where, "leave the preference out")
    return [(prompt, answer) for answer in answers]


class Preferences(Pairs):
    """The preferences of a split: rows 2i and 2i + 1 are the pairs of one, chosen and rejected.

    `reference` (rows,) float32 holds the log-probability in nats of each answer by the reference
    model, as far as block_size; it is set when a run starts (training/preferences.py)."""

    measures = ("reward_accuracy", "reward_margin")

    def __init__(self, tokens, mask, block_size):
        super().__init__(tokens, mask, block_size)
        prompts = self.answers - self.starts
        if len(prompts) % 2 or (prompts[::2] != prompts[1::2]).any():
            raise ValueError("the pairs are not two for each prompt")
        self.reference = None

    def batches(self, seed):
        return PreferenceBatches(self, seed)

    def within(self, limit):
        """The number of rows of the preferences that begin within the first `limit` tokens."""
        rows = super().within(limit)
        return rows + rows % 2

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y, reference) as `Pairs` yields x and y, with an even batch_size; reference
        (batch_size,) is 0 in rows after the last pair."""
        for number, (x, y) in enumerate(super().eval_batches(batch_size, limit)):
            known = self.reference[number * batch_size : (number + 1) * batch_size]
            yield x, y, np.pad(known, (0, batch_size - len(known)))


class PreferenceBatches(PairBatches):
    """The preferences in one endless global order, a pure function of (preferences, seed). A sample
    is a row, so a preference is two samples, the first of an even number."""

    masked = False  # each preference counts the same, however long its answers are

    def shuffled(self, epoch):
        random = np.random.default_rng([self.seed, epoch])
        return shuffled(random, self.windows_per_epoch // 2)

    def get(self, first, count):
        """Samples first .. first + count - 1, both even: x, y (count, block_size), as Pairs.rows
        gives them, and the reference (count,)."""
        chosen = visits(self.order, self.windows_per_epoch // 2, first // 2, count // 2)
        rows = (2 * chosen[:, None] + [0, 1]).ravel()
        return *self.pairs.rows(rows), self.pairs.reference[rows]
