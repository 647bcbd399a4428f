"""
How a model reads a text that grows: each token once, within a context of limited length.
Shapes: B rows, T tokens, V vocabulary.
"""

import torch

from parts.cache import KVCache
from sampling.prompts import note


class Reader:
    """A model that reads the rows of idx (B, T) as they grow. Until the context is full, it reads
    each token once.

    context: the largest number of tokens the model looks back on (None: its block_size, since few
    models write well beyond the length they were trained at). When the context is full, the model
    reads its last half again, which spreads the cost over many tokens. vocab_size: the number of
    real tokens, if the model's vocabulary is padded. pad: the number of padding tokens before each
    row. spare: how many tokens `rewind` may drop."""

    def __init__(self, model, context=None, vocab_size=None, pad=None, spare=0):
        self.model = model
        self.vocab_size = vocab_size
        self.spare = spare
        self.context = context or model.config.block_size
        self.pad = pad or [0]  # without padding, one entry serves all rows
        self.cache = None
        self.starts = None  # of each row, the first token in the cache
        self.known = 0  # tokens of idx that were read, or left out for good

    def start(self, length):
        """The index of the first token to read of `length`: 0 while all fit, then half contexts."""
        half = max(1, self.context // 2)
        beyond = max(0, length - self.context)  # tokens that have no room
        return half * ((beyond + half - 1) // half)  # the halves to leave out, rounded up

    def room(self, length):
        """How many more tokens can be read before the start moves."""
        return self.start(length) + self.context - length

    def read(self, idx, last=1):
        """The logits (B, last, V) after each of the last tokens of idx (B, T). The model reads the
        tokens that are new or, if the start of a row has moved, all rows again from their starts,
        into a new cache."""
        T = idx.size(1)
        starts = [self.start(T - pad) for pad in self.pad]
        if self.cache is None or starts != self.starts:
            counts = [T - pad - start for pad, start in zip(self.pad, starts, strict=True)]
            longest = max(counts)
            hidden = [longest - count for count in counts]  # tokens of each row to mask
            self.cache = KVCache(torch.tensor(hidden) if any(hidden) else None, self.spare)
            self.starts = starts
            self.known = T - longest

        new = idx[:, self.known :]
        self.known = T
        logits, _ = self.model(new, cache=self.cache, last_only=last == 1)
        return logits[:, -last:, : self.vocab_size]

    def rewind(self, length):
        """Forget the tokens of idx after the first `length`."""
        drop = max(0, self.known - length)
        self.known = min(self.known, length)
        if drop and self.cache.length > drop:
            self.cache.rewind(self.cache.length - drop)
        elif drop:
            self.cache = None


def ragged(rows, device="cpu"):
    """(idx (B, T), pad): rows of token ids (T_r,) of different lengths as one batch. pad is the
    number of padding tokens of each row, or None. The padding precedes the row and repeats its
    first token, so that the repetition penalty affects no other tokens."""
    longest = max(len(row) for row in rows)
    pad = [longest - len(row) for row in rows]
    padded = [[row[0]] * n + list(row) for n, row in zip(pad, rows, strict=True)]
    idx = torch.tensor([[int(token) for token in row] for row in padded], device=device)
    return idx, pad if any(pad) else None


def most_positions(model):
    """How many tokens a model has positions for; None for any number."""
    model = getattr(model, "model", model)  # without the Fast one around it
    positions = getattr(model, "wpe", None)  # model.py's table, a Position of parts/, or None
    return getattr(positions, "num_embeddings", getattr(positions, "limit", None))


def note_context(model, tokenizer, prompts, config):
    """Note what the model sees of a text that outgrows the context. Returns whether one does."""
    context = config.context or model.config.block_size
    longest = max(len(tokenizer.prompt(prompt)) for prompt in prompts) + config.max_new_tokens
    if not config.num_samples or longest <= context:
        return False
    reason = "raise it with --context=N"
    if context == most_positions(model):
        reason = f"it has positions for {context} only"
    least = context + 1 - max(1, context // 2)  # the Reader drops half a context at a time
    seen = f"beyond {context} tokens the model sees only the last {least} to {context}"
    note(f"the text may outgrow the context: {seen} ({reason})")
    return True
