"""
Tokenizers: a token is a character, a byte, or a piece of text that byte-pair encoding found.

They share the interface of `Tokenizer`; `tokenizer_from_json` reverses `to_json()`.
`encode_batches` encodes long texts on all cores.
"""

import base64
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from common.errors import UserError, one_line

END = "<|endoftext|>"


class Tokenizer:
    """What all tokenizers have. Each adds vocab_size, encode(text) -> (T,) ids, decode_bytes(ids)
    and to_json()."""

    start = 0  # the id that stands for an empty prompt
    bos = None  # the id before each document and prompt, if the model wants one
    end = 0  # the id after an answer
    stops = ()  # ids that end a text, first `end`; without any, a blank line ends a document

    def prompt(self, text):
        """The ids, at least one, of a text that the model is to continue."""
        first = [] if self.bos is None else [self.bos]
        return first + self.encode(text).tolist() or [self.start]

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def cut(self, text):
        """The last place where a text can be cut without changing its tokens, 0 if none."""
        return len(text)


class CharTokenizer(Tokenizer):
    """A token is a character; ids follow the order of `chars`."""

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self.start = self.end = max(chars.find("\n"), 0)
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
            what = f"{text[at]!r} is not in the vocabulary"
            where = f"character {at + 1} of the text"
            known = f"{self.vocab_size} characters, {self.chars[-100:]!r}"
            raise UserError(what, where, f"leave it out; the vocabulary is {known}")
        return ids

    def decode(self, ids):
        return self.codes[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")

    def decode_bytes(self, ids):
        return self.decode(ids).encode()

    def to_json(self):
        return {"kind": "char", "chars": self.chars}


class ByteTokenizer(Tokenizer):
    """A token is one of the 256 bytes of a utf-8 text, so that every text can be encoded."""

    vocab_size = 256
    start = end = ord("\n")

    def encode(self, text):
        # Python decodes bytes of a command line that are not utf-8 as surrogates.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int64)

    def decode_bytes(self, ids):
        return np.asarray(ids).astype(np.uint8).tobytes()

    def to_json(self):
        return {"kind": "byte"}


class ModelTokenizer(Tokenizer):
    """A tokenizer with special tokens, by default <|endoftext|> alone. A text that spells one is
    encoded as ordinary text, so that no text can end a document."""

    def mark(self, special, bos=None, stops=None):
        """Set what ids of special tokens mean, given {token: id}."""
        own = [special[token] for token in special if token == END]
        self.stops = tuple(own if stops is None else stops)
        self.marks = {} if stops is None else {"bos": bos, "stops": [*stops]}
        self.bos = bos
        self.end = self.stops[0] if self.stops else 0
        self.start = self.end if bos is None else bos


class BPETokenizer(ModelTokenizer):
    """Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) by tiktoken."""

    def __init__(self, encoding, **marks):
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.mark(encoding._special_tokens, **marks)

    def cut(self, text):
        return safe_cut(text)

    def encode(self, text):
        """(T,) ids. Half a character, \\ud800 to \\udfff, is read as U+FFFD. Raises UserError if
        the vocabulary lacks one of the text's bytes, or tiktoken gives up on a run of spaces."""
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)
        except UnicodeEncodeError:
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except BaseException as error:  # a panic of tiktoken's Rust code is not an Exception
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            what = "tiktoken cannot encode this: a byte has no token, or a million spaces follow"
            raise UserError(what, "prompt or text", "shorten it, or leave such bytes out") from None

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
        } | self.marks


class SentencePieceTokenizer(ModelTokenizer):
    """SentencePiece's byte-pair encoding (Kudo & Richardson 2018, arXiv:1808.06226), as LLaMA 2 has
    it, by the `tokenizers` library, given its tokenizer.json. A blank is part of the word after it.
    Most put one before each text, so that decoded text begins with one though the text did not."""

    def __init__(self, content, **marks):
        from tokenizers import Tokenizer as Library

        self.content = content
        self.library = Library.from_str(json.dumps(content))
        self.library.encode_special_tokens = True  # as ordinary text
        tokens = self.library.encode("a", add_special_tokens=False).tokens
        self.prefix = " " if tokens[0].startswith("\u2581") else ""  # a blank before each text
        self.vocab_size = self.library.get_vocab_size()
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        pieces = [self.library.id_to_token(i) for i in range(self.vocab_size)]
        if None in pieces:
            raise ValueError("its ids have gaps")
        self.bytes = [piece.replace("\u2581", " ").encode() for piece in pieces]
        for i, piece in enumerate(pieces):
            if re.fullmatch("<0x[0-9A-F]{2}>", piece):
                self.bytes[i] = bytes([int(piece[3:5], 16)])
        self.mark(special, **marks)

    def cut(self, text):
        return max((match.start() for match in re.finditer(r"(?<=\w) ", text)), default=0)

    def encode(self, text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self.library.encode(text.removeprefix(self.prefix), add_special_tokens=False).ids
        return np.array(ids, dtype=np.int64)

    def decode_bytes(self, ids):
        return b"".join(self.bytes[i] for i in np.asarray(ids).tolist())

    def to_json(self):
        return {"kind": "sentencepiece", "tokenizer": self.content} | self.marks


# ---------------------------------------------------------------- from JSON

FIX = "prepare the data again, or take another checkpoint"


def tokenizer_from_json(data, where="tokenizer.json", fix=FIX):
    """The tokenizer whose to_json() gave `data`. Raises UserError if the data are malformed."""
    try:
        kind = data["kind"]
        if kind == "char":
            if not data["chars"] or len(set(data["chars"])) < len(data["chars"]):
                raise ValueError("chars is empty, or holds a character twice")
            return CharTokenizer(data["chars"])
        if kind == "byte":
            return ByteTokenizer()
        if kind not in ("bpe", "sentencepiece"):
            raise ValueError(f"its kind is not known: {str(kind)[:40]!r}")
        marks = {key: data[key] for key in ("bos", "stops") if key in data}
        if kind == "bpe":
            tokenizer = BPETokenizer(encoding_from_json(data), **marks)
        else:
            tokenizer = SentencePieceTokenizer(data["tokenizer"], **marks)
        ids = list(tokenizer.stops)
        if tokenizer.bos is not None:
            ids.append(tokenizer.bos)
        if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids):
            raise ValueError("bos and stops are not ids")
        return tokenizer
    except ImportError as error:
        fix = f"pip install {error.name}"
        raise UserError(f"this tokenizer needs {error.name}", where, fix) from None
    except Exception as error:  # a key is missing or of another kind, a pattern is no pattern, ...
        what = f"the tokenizer is garbled: {type(error).__name__} {one_line(error)}"
        raise UserError(what, where, fix) from None


def encoding_from_json(data):
    """The tiktoken.Encoding of a BPETokenizer's to_json(). Its ids have neither gaps nor doubles,
    so that each id below vocab_size can be decoded."""
    import tiktoken

    tokens = [base64.b64decode(token, validate=True) for token in data["ranks"]]
    if b"" in tokens or len(set(tokens)) < len(tokens):
        raise ValueError("ranks holds an empty token, or one twice")
    special = data["special_tokens"]
    following = [*range(len(tokens), len(tokens) + len(special))]
    if sorted(special.values()) != following or {*map(type, special.values())} - {int}:
        raise ValueError(f"the ids in special_tokens are not {len(tokens)} and those that follow")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        data["name"], pat_str=data["pat_str"], mergeable_ranks=ranks, special_tokens=special
    )


# ---------------------------------------------------------------- training a BPE

LARGEST = 1_000_000  # tokens; the library takes memory for all at once

# GPT-4's pattern (cl100k_base in tiktoken/model.py and tiktoken_ext/openai_public.py), as it was
# first published and as LLaMA 3 has it. tiktoken's own copy has since become faster to match, but
# cuts white space at the end of a text differently.
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# GPT-2's letters for the 256 bytes: a printable byte is its own letter, the others are code points
# from 256 on.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTED]
LETTERS = {byte: chr(byte) for byte in PRINTED}
LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def train_bpe(texts, vocab_size, documents=False, fewer=False):
    """A BPETokenizer of vocab_size tokens, or with `fewer` as many of them as the texts yield: the
    256 bytes, the merges of the pairs that are most frequent in `texts`, an iterator of str, and
    <|endoftext|>. `encode_batches` explains the texts.

    Memory grows with the number of different words. Raises UserError if vocab_size is too small or
    too large, or the text too short for so many tokens."""
    import tiktoken  # here, since it is rarely needed

    where = f"vocab_size={vocab_size}"
    if not 257 <= vocab_size <= LARGEST:
        raise UserError("there are 256 bytes and an end", where, f"choose 257 to {LARGEST:,}")
    vocab = learn(texts if documents else pieces(texts, safe_cut), vocab_size - 1).get_vocab()
    if len(vocab) < vocab_size - 1 and not fewer:
        what = f"the text is too short: it yields only {len(vocab) + 1:,} tokens"
        raise UserError(what, where, f"choose {len(vocab) + 1} or less, or a longer text")
    ranks = {bytes(BYTES[letter] for letter in token): rank for token, rank in vocab.items()}
    special = {END: len(ranks)}
    return BPETokenizer(
        tiktoken.Encoding("trained", pat_str=GPT4, mergeable_ranks=ranks, special_tokens=special)
    )


def learn(texts, size):
    """The library's own tokenizer of `size` tokens, or fewer if the texts yield no more."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    split = pre_tokenizers.Split(Regex(GPT4), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    options = dict(initial_alphabet=[*LETTERS.values()], show_progress=False, special_tokens=[])
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **options))
    return tokenizer


# ---------------------------------------------------------------- encoding on all cores

PIECE = 1 << 18  # characters that a thread encodes at a time


def encode_batches(tokenizer, texts, documents):
    """Yield (ids, number of utf-8 bytes) in the order of `texts`, an iterator of str: of each of
    the `documents`, without an end-of-text token, or of the pieces of one text, however it was cut,
    whose ids together are the ids of the text.

    Threads encode: tiktoken needs no lock of Python's. At most two pieces per core are in memory.
    Raises what the tokenizer's `encode` raises."""

    def encode(batch):
        return [(tokenizer.encode(text), len(text.encode())) for text in batch]

    parts = groups(texts) if documents else ([piece] for piece in pieces(texts, tokenizer.cut))
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        while waiting := [*islice(parts, 2 * cores)]:
            for results in pool.map(encode, waiting):
                yield from results


def groups(texts):
    """Yield lists of consecutive texts, each list of PIECE characters or more except the last."""
    group = []
    length = 0
    for text in texts:
        group.append(text)
        length += len(text)
        if length >= PIECE:
            yield group
            group = []
            length = 0
    yield group


def pieces(texts, cut):
    """Yield the text whose consecutive pieces are `texts` in pieces of about PIECE characters that
    end where `cut` allows it. A stretch that cannot be cut is held in memory."""
    held = []  # the stretch that is not yielded yet, in parts
    length = 0  # of it
    wanted = PIECE  # the length at which a cut is searched
    for text in texts:
        for start in range(0, len(text), PIECE):
            held.append(text[start : start + PIECE])
            length += len(held[-1])
            if length < wanted:
                continue
            stretch = "".join(held)
            end = cut(stretch)
            if end:
                yield stretch[:end]
            held = [stretch[end:]]
            length = len(held[0])
            wanted = PIECE if end else 2 * length  # so that a long stretch is not searched often
    if length:
        yield "".join(held)


def safe_cut(text):
    """The last place where a text can be cut without changing its BPE tokens, 0 if there is none.
    It lies before white space that follows a letter or digit, or between a line's end and a letter.
    No piece of GPT-2's or GPT-4's pattern, or of those derived from them, reaches across such a
    place, and none depends on what comes after it."""
    for at in range(len(text) - 1, 1, -1):
        before, last, first = text[at - 2 : at + 1]
        if first.isspace() and last.isalnum():
            return at
        if first.isalpha() and last == "\n" and not before.isspace():
            return at
    return 0
