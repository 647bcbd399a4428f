"""Small byte-pair tokenizers."""

import tiktoken

from tokens.tokenizer import GPT2, BPETokenizer

WORDS = ["the", "king", "of", "rome", "shall", "speak", "no", "more", "Zoë", "1999", "don't"]


def bpe(pattern=GPT2, special=None, merges=60):
    """A small byte-level BPE, whose tokens are bytes and beginnings of words."""
    special = special or {"<|endoftext|>": 0}
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in [*(" " + word for word in WORDS), *WORDS, "  ", "   \n"]:
        for end in range(2, len(word.encode()) + 1):
            if len(ranks) < 256 + merges:
                ranks.setdefault(word.encode()[:end], len(ranks))
    return BPETokenizer(
        tiktoken.Encoding(
            "small",
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={token: len(ranks) + i for token, i in special.items()},
        )
    )
