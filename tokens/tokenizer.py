"""
Tokenizers. They share one small interface: `vocab_size`, `start` (the id to begin from when the prompt is empty),
`encode(text)`, `decode(ids)`, `decode_bytes(ids)`, `to_json()`; tokenizer_from_json is the way back.
"""

import base64

import numpy as np

from common.errors import UserError


class CharTokenizer:
    """A token is a character; ids follow the order of `chars`."""

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self.start = max(chars.find("\n"), 0)
        self.codes = np.frombuffer(chars.encode("utf-32-le"), "<u4")  # (V,) code points
        self.ids = np.full(
            self.codes.max() + 2, -1
        )  # id of a code point; the last entry answers for all above
        self.ids[self.codes] = np.arange(self.vocab_size)

    def encode(self, text):
        """(T,) ids of the T characters; UserError at the first that is not in the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = self.ids[np.minimum(codes, len(self.ids) - 1)]
        if (ids < 0).any():
            at = int((ids < 0).argmax())
            known = (
                repr(self.chars)
                if self.vocab_size <= 100
                else f"{self.vocab_size} characters, such as {self.chars[-20:]!r}"
            )
            raise UserError(
                f"{text[at]!r} is not in the vocabulary",
                f"character {at + 1} of the text",
                f"leave it out; the vocabulary is {known}",
            )
        return ids

    def decode(self, ids):
        return self.codes[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")

    def decode_bytes(self, ids):
        return self.decode(ids).encode()

    def to_json(self):
        return {"kind": "char", "chars": self.chars}


class ByteTokenizer:
    """A token is a byte of the utf-8 text: 256 of them, and no text that it cannot take."""

    vocab_size = 256
    start = ord("\n")

    def encode(self, text):
        # surrogateescape gives back the bytes of a command line that were not utf-8
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int64)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids):
        return np.asarray(ids).astype(np.uint8).tobytes()

    def to_json(self):
        return {"kind": "byte"}


class BPETokenizer:
    """Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) as tiktoken runs it. Special tokens
    are never read out of a text, so that a text cannot end a document."""

    def __init__(self, encoding):
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.start = encoding._special_tokens.get("<|endoftext|>", 0)

    def encode(self, text):
        try:
            return np.array(self.encoding.encode_ordinary(text), dtype=np.int64)
        except (
            BaseException
        ) as error:  # tiktoken's Rust panics where the vocabulary lacks one of the 256 bytes
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(
                "the tokenizer has no token for a byte of the text",
                "prompt or text",
                "leave rare and control characters out",
            ) from None

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes(np.asarray(ids).tolist())

    def to_json(self):
        """The ranks, which are the ids and the order of the merges, are base64 strings in rank order."""
        ranks = sorted(self.encoding._mergeable_ranks, key=self.encoding._mergeable_ranks.get)
        return {
            "kind": "bpe",
            "name": self.encoding.name,
            "pat_str": self.encoding._pat_str,
            "special_tokens": self.encoding._special_tokens,
            "ranks": [base64.b64encode(token).decode() for token in ranks],
        }


def tokenizer_from_json(data):
    """The tokenizer whose to_json() gave `data`; UserError if it is no such thing."""
    try:
        if data["kind"] == "byte":
            return ByteTokenizer()
        if data["kind"] == "char" and len(set(data["chars"])) == len(data["chars"]):
            return CharTokenizer(data["chars"])
        if data["kind"] == "bpe":
            import tiktoken

            ranks = {
                base64.b64decode(token, validate=True): rank
                for rank, token in enumerate(data["ranks"])
            }
            return BPETokenizer(
                tiktoken.Encoding(
                    data["name"],
                    pat_str=data["pat_str"],
                    mergeable_ranks=ranks,
                    special_tokens=data["special_tokens"],
                )
            )
        raise ValueError(f"kind {data['kind']!r}")
    except ImportError:
        raise UserError(
            "this tokenizer needs tiktoken", "tokenizer.json", "pip install tiktoken"
        ) from None
    except Exception as error:  # whatever garbled data leads to
        raise UserError(
            f"the tokenizer is garbled: {type(error).__name__} {error}",
            "tokenizer.json",
            "prepare the data again, or take another checkpoint",
        ) from None
