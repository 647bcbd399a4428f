"""The slot `embed`: the vectors that the first block reads of tokens.

Shapes: B batch, T tokens, C = n_embd, N = ngram_max, W the width of a table's rows.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.cache import State
from parts.part import Linear, Part

PRIME = 2**31 - 1  # so that a product of two hashes fits in 63 bits
MULTIPLIER = 742938285  # one of the best of this prime, by Fishman & Moore 1986


class Token(Part):
    """Each token has a vector of its own.

    A subclass overrides forward, and held if it keeps something in the cache.
    """

    paper = "Bengio et al. 2003, JMLR 3"

    def __init__(self, config):
        super().__init__()

    def forward(self, x, idx, cache=None):
        """The vectors (B, T, C) to use for the tokens' own x (B, T, C), of their ids idx (B, T).
        cache: a KVCache that has announced these tokens, or None."""
        return x


class NGram(Token):
    """Adds to a token's vector, for each n = 2 .. N, the row of a table that the last n tokens hash
    to. Other n-grams may hash to the same row.

    This is over-encoding with one table for each n. The paper reads an n-gram as a number in base
    V and takes it modulo the rows; that loses the older tokens where V and the rows share a
    divisor, as 256 bytes and 8,192 rows do. So we use another base, and a prime modulus first.
    Rows that are narrower than C are projected, with a matrix for each n.

    The tables start at 0, as in modded-nanogpt's bigram embedding (pull request 201), so that at
    first it computes what `token` does, and an n-gram that was never seen adds nothing. As in
    Engram (arXiv:2601.07372) they do not decay and Muon does not take them. Engram also multiplies
    their learning rate by 5, looks up each n-gram in several tables, multiplies what it finds by a
    gate of the hidden state, and convolves it: none of this is done here.
    """

    paper = "Huang et al. 2025, arXiv:2501.16975"
    reads = ("ngram_max", "ngram_rows", "ngram_width", "ngram_dropout")
    undecayed = ("tables",)

    def __init__(self, config):
        super().__init__(config)
        self.past = config.ngram_max - 1  # tokens before the last one, and the number of tables
        self.rows = config.ngram_rows
        self.width = config.ngram_width or config.n_embd
        # One below the other.
        self.tables = nn.Parameter(torch.empty(self.past * self.rows, self.width))
        self.up = None
        if self.width != config.n_embd:
            self.up = Linear(self.past * self.width, config.n_embd, bias=False)
        p = config.dropout if config.ngram_dropout is None else config.ngram_dropout
        self.dropout = nn.Dropout(p)

    def reset(self):
        nn.init.zeros_(self.tables)

    def forward(self, x, idx, cache=None):
        vectors = F.embedding(self.places(idx, cache), self.tables)  # (B, T, N - 1, W)
        kept = self.dropout(vectors.new_ones(*vectors.shape[:-1], 1))  # whole rows are dropped
        vectors = kept * vectors
        if self.up is None:
            return x + vectors.sum(2)
        return x + self.up(vectors.flatten(2))

    def places(self, idx, cache=None):
        """The place in `tables` of each n-gram that ends at a token of idx (B, T), (B, T, N - 1).

        The hash of tokens a_1 .. a_n is the sum of (a_i + 1) MULTIPLIER^(n - i) modulo PRIME, and
        its row that modulo the rows. Where there is no token, before the text or in padding,
        a_i + 1 is 0. All is exact in int64."""
        numbers = (idx + 1).int()  # the cache keeps 4 bytes of each
        numbers = self.with_past(numbers, cache).long()  # (B, N - 1 + T)
        T = idx.size(1)
        hashed = numbers[:, self.past :]  # of each token alone
        power = 1
        places = []
        for table in range(self.past):  # the first is of n = 2; each takes in one token more
            power = power * MULTIPLIER % PRIME
            start = self.past - (table + 1)
            earlier = numbers[:, start : start + T]  # (B, T), of the token table + 1 before each
            hashed = (hashed + power * earlier) % PRIME
            places.append(table * self.rows + hashed % self.rows)
        return torch.stack(places, dim=-1)

    def with_past(self, numbers, cache):
        """Numbers (B, T) of tokens after the N - 1 numbers before them, (B, N - 1 + T)."""
        if cache is None:
            return F.pad(numbers, (self.past, 0))
        state = cache.layer("embed", State)
        numbers = state.without_padding(numbers[..., None])
        return state.with_past(numbers, self.past, "tokens")[..., 0]

    def unused(self):
        """All rows but one of each table."""
        return self.past * (self.rows - 1) * self.width

    def held(self, T):
        return self.past
