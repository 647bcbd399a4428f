"""
Tokenizers: a token is a character, a byte, or a piece of text that byte-pair encoding found.

They share one small interface: `vocab_size`, `start` (the id used for an empty prompt),
`encode(text)`, `decode(ids)`, `decode_bytes(ids)` and `to_json()`, which `tokenizer_from_json`
reverses.
"""

import base64

import numpy as np

from common.errors import UserError, one_line


class CharTokenizer:
    """A token is a character; ids follow the order of `chars`."""

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self.start = max(chars.find("\n"), 0)
        self.codes = np.frombuffer(chars.encode("utf-32-le"), "<u4")  # (V,) code points

        # The id of each code point, -1 for none; the last entry stands for all greater code points.
        self.ids = np.full(self.codes.max() + 2, -1)
        self.ids[self.codes] = np.arange(self.vocab_size)

    def encode(self, text):
        """(T,) ids of the T characters. Raises UserError for the first one outside the
        vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = self.ids[np.minimum(codes, len(self.ids) - 1)]

        if (ids < 0).any():
            at = int((ids < 0).argmax())
            known = f"{self.vocab_size} characters, such as {self.chars[-20:]!r}"
            if self.vocab_size <= 100:
                known = repr(self.chars)
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
    """A token is one of the 256 bytes of a utf-8 text, so that every text can be encoded."""

    vocab_size = 256
    start = ord("\n")

    def encode(self, text):
        # Python decodes bytes of a command line that are not utf-8 as surrogates.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int64)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids):
        return np.asarray(ids).astype(np.uint8).tobytes()

    def to_json(self):
        return {"kind": "byte"}


class BPETokenizer:
    """Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) by tiktoken. A text that spells a
    special token is encoded as ordinary text, so that no text can end a document."""

    def __init__(self, encoding):
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.start = encoding._special_tokens.get("<|endoftext|>", 0)

    def encode(self, text):
        """(T,) ids. Half a character, \\ud800 to \\udfff, is read as U+FFFD. Raises UserError if
        the vocabulary lacks one of the text's bytes, or tiktoken gives up on a run of spaces."""
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)
        except UnicodeEncodeError:
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError:
            what = "a run of about a million spaces is too long for tiktoken"
            raise UserError(what, "prompt or text", "shorten it") from None
        except BaseException as error:  # a panic of tiktoken's Rust code is not an Exception
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
        """`ranks` lists the tokens as base64 text. The index of a token is its id and its merge
        rank."""
        ranks = sorted(self.encoding._mergeable_ranks, key=self.encoding._mergeable_ranks.get)
        return {
            "kind": "bpe",
            "name": self.encoding.name,
            "pat_str": self.encoding._pat_str,
            "special_tokens": self.encoding._special_tokens,
            "ranks": [base64.b64encode(token).decode() for token in ranks],
        }


# ---------------------------------------------------------------- from JSON

FIX = "prepare the data again, or take another checkpoint"


def tokenizer_from_json(data, where="tokenizer.json", fix=FIX):
    """The tokenizer whose to_json() gave `data`. Raises UserError if the data are malformed in any
    way; `where` is the file that holds them, and `fix` the advice."""
    try:
        kind = read_key(data, "kind", str)
        if kind == "byte":
            return ByteTokenizer()
        if kind == "char":
            return CharTokenizer(read_chars(data))
        if kind == "bpe":
            return BPETokenizer(read_encoding(data))
        raise ValueError(f"kind is {kind[:40]!r}, not char, byte or bpe")
    except ImportError:
        raise UserError("this tokenizer needs tiktoken", where, "pip install tiktoken") from None
    except ValueError as error:
        raise UserError(f"the tokenizer is garbled: {one_line(error)}", where, fix) from None


def read_key(data, key, kind):
    """data[key], or a ValueError if it is not there or not of the type `kind`."""
    if not isinstance(data, dict):
        raise ValueError(f"a {type(data).__name__} where an object is needed")
    if not isinstance(data.get(key), kind):
        raise ValueError(f"{key} is missing, or is not a {kind.__name__}")
    return data[key]


def read_chars(data):
    """The characters of a CharTokenizer's to_json()."""
    chars = read_key(data, "chars", str)
    if not chars or len(set(chars)) < len(chars):
        raise ValueError("chars is empty, or holds a character twice")
    return chars


def read_encoding(data):
    """The tiktoken.Encoding of a BPETokenizer's to_json(). Its ids have neither gaps nor doubles,
    so that each id below vocab_size can be decoded."""
    import tiktoken

    name, pattern = read_key(data, "name", str), read_key(data, "pat_str", str)
    ranks, special = read_key(data, "ranks", list), read_key(data, "special_tokens", dict)

    if not all(isinstance(token, str) for token in ranks):
        raise ValueError("ranks contains something other than base64 text")
    tokens = [base64.b64decode(token, validate=True) for token in ranks]
    if b"" in tokens or len(set(tokens)) < len(tokens):
        raise ValueError("ranks holds an empty token, or one twice")

    ids = list(special.values())
    following = list(range(len(tokens), len(tokens) + len(ids)))
    if any(type(i) is not int for i in ids) or sorted(ids) != following:
        raise ValueError(f"the ids in special_tokens are not {len(tokens)} and those that follow")

    mergeable = {token: rank for rank, token in enumerate(tokens)}
    try:
        return tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=mergeable, special_tokens=special
        )
    except Exception as error:  # of several kinds, such as an invalid regular expression
        raise ValueError(f"{type(error).__name__} {error}") from None
