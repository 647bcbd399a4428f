"""
Writing a split of a data set: text or ids in, a token file as corpus.py reads it out, without holding the text.
"""
import hashlib

import numpy as np

from tokens.tokenizer import BPETokenizer


def safe_cut(text):
    """The last place where BPE gives the same tokens for the two sides as for the whole: before white space that
    follows a letter or digit, or between a line's end and a letter. No piece of GPT-2's pattern, or of those after it,
    reaches across, and none is told apart by what comes after. 0 if there is none."""
    for at in range(len(text) - 1, 1, -1):
        before, last, first = text[at - 2 : at + 1]
        if first.isspace() and last.isalnum() or first.isalpha() and last == "\n" and not before.isspace():
            return at
    return 0


class TokenFile:
    """A split being written: text or ids go in, and are counted and hashed on the way."""

    def __init__(self, path, tokenizer):
        self.file, self.tokenizer, self.rest = open(path, "wb"), tokenizer, ""
        self.dtype = "uint16" if tokenizer.vocab_size <= 65535 else "uint32"
        self.tokens, self.bytes, self.sha256 = 0, 0, hashlib.sha256()

    def add_text(self, text, last=False):
        text = self.rest + text
        cut = safe_cut(text) if isinstance(self.tokenizer, BPETokenizer) and not last else len(text)
        self.rest, text = text[cut:], text[:cut]
        self.add(self.tokenizer.encode(text), len(text.encode()))

    def add(self, ids, n_bytes):
        data = np.asarray(ids).astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()
        self.file.write(data)
        self.sha256.update(data)
        self.tokens, self.bytes = self.tokens + len(ids), self.bytes + n_bytes

    def close(self):
        """What meta.json says of the split."""
        self.add_text("", last=True)
        self.file.close()
        return {"tokens": self.tokens, "bytes": self.bytes, "sha256": self.sha256.hexdigest()}
