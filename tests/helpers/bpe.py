"""Small byte-pair tokenizers."""

from itertools import pairwise

import tiktoken

from tokens.tokenizer import GPT2, BPETokenizer

WORDS = ["the", "king", "of", "rome", "shall", "speak", "no", "more", "Zoë", "1999", "don't"]


def bpe(pattern=GPT2, special=None, merges=60):
    """A small byte-level BPE, each merge the pair that is most frequent in some words."""
    special = special or {"<|endoftext|>": 0}
    pieces = [
        [bytes([byte]) for byte in word.encode()]
        for word in [*WORDS, *(" " + word for word in WORDS), "  ", "   \n"]
    ]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 256 + merges:
        pairs = [pair for piece in pieces for pair in pairwise(piece)]
        if not pairs:
            break
        best = max(sorted(set(pairs)), key=pairs.count)
        ranks[best[0] + best[1]] = len(ranks)
        for piece in pieces:
            i = 0
            while i < len(piece) - 1:
                if (piece[i], piece[i + 1]) == best:
                    piece[i : i + 2] = [best[0] + best[1]]
                i += 1
    return BPETokenizer(
        tiktoken.Encoding(
            "small",
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={token: len(ranks) + i for token, i in special.items()},
        )
    )
