"""
Tokenizers: a token is a character, a byte, or a piece of text that byte-pair encoding found.

They share the interface of `Tokenizer`; `tokenizer_from_json` reverses `to_json()`.
`encode_batches` encodes long texts on all cores. pretrained.py has those of pretrained models.
"""

import base64
import codecs
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from common.errors import UserError, one_line

END = "<|endoftext|>"


class Tokenizer:
    """What all tokenizers have. Each adds vocab_size, encode(text) -> (T,) ids, decode_bytes(ids)
    and to_json(). A special token, such as <|endoftext|>, that a text spells is ordinary text; in a
    prompt it counts."""

    start = 0  # the id that stands for an empty prompt
    bos = None  # the id before each document and prompt, if the model wants one
    end = 0  # the id after an answer
    stops = ()  # ids that end a text, first `end`; without any, a blank line ends a document
    special = {}  # {id: text} of the special tokens

    def mark(self, bos, stops):
        """Set what the ids of special tokens mean."""
        self.bos = bos
        self.stops = tuple(stops)
        self.end = self.stops[0] if self.stops else 0
        self.start = self.end if bos is None else bos

    @property
    def marks(self):
        """The ids that stand around documents and prompts."""
        return [*self.stops] if self.bos is None else [self.bos, *self.stops]

    def prompt(self, text):
        """The ids, at least one, of a text that the model is to continue."""
        ids = self.encode_prompt(text).tolist()
        if self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        return ids or [self.start]

    def encode_prompt(self, text):
        """(T,) ids of a text in which special tokens count."""
        return self.encode(text)

    def encode_rest(self, text):
        """(T,) ids of a text that follows another."""
        return self.encode(text)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self, before=()):
        """The decoder of tokens that are drawn one after another, and follow the ids `before`."""
        return ByteStream(self, before)

    def cut(self, text):
        """The last place where a text can be cut without changing its tokens, 0 if none."""
        return len(text)

    def changes(self):
        """In words, what `decode` does not give back as it was."""
        return []


class ByteStream:
    """The text of tokens, one after another. A character that spans several belongs to the last."""

    def __init__(self, tokenizer, before):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in before:
            self.step(token)

    def step(self, token):
        """The text that is complete with a token."""
        return self.decoder.decode(self.tokenizer.decode_bytes([token]))

    def end(self):
        """The text of the bytes that are left."""
        return self.decoder.decode(b"", final=True)


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
        """(T,) ids of the T characters. Raises UserError for one outside the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = self.ids[np.minimum(codes, len(self.ids) - 1)]
        if (ids < 0).any():
            at = int((ids < 0).argmax())
            what = f"{text[at]!r} is not in the vocabulary"
            where = f"in {text[max(0, at - 20) : at + 20]!r}"  # which may be a piece of a file
            fix = "leave it out"
            if text[at] == "\n":
                fix += " of a single text; documents need it, since a blank line ends each"
            known = f"{self.vocab_size} characters, {self.chars[-100:]!r}"
            raise UserError(what, where, f"{fix}; the vocabulary is {known}")
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


class BPETokenizer(Tokenizer):
    """Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) by tiktoken. By default
    <|endoftext|> ends a text."""

    def __init__(self, encoding, bos=None, stops=None):
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.special = {i: token for token, i in encoding._special_tokens.items()}
        if stops is None:
            stops = [i for i, token in self.special.items() if token == END]
        self.mark(bos, stops)

    def cut(self, text):
        return safe_cut(text)

    def encode(self, text, allowed_special=frozenset()):
        """(T,) ids. Half a character, \\ud800 to \\udfff, is read as U+FFFD. Raises UserError if
        the vocabulary lacks one of the text's bytes, or tiktoken gives up on a run of spaces."""
        allowed = {"allowed_special": allowed_special, "disallowed_special": ()}
        try:
            return self.encoding.encode_to_numpy(text, **allowed).astype(np.int64)
        except UnicodeEncodeError:
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self.encode(whole, allowed_special)
        except BaseException as error:  # a panic of tiktoken's Rust code is not an Exception
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            what = "tiktoken cannot encode this: a byte has no token, or a million spaces follow"
            raise UserError(what, "prompt or text", "shorten it, or leave such bytes out") from None

    def encode_prompt(self, text):
        return self.encode(text, allowed_special="all")

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes(np.asarray(ids).tolist())

    def to_json(self):
        """`ranks` lists the tokens as base64 text. A token's index is its id and merge rank."""
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
    """The tokenizer whose to_json() gave `data`. Raises UserError if the data are malformed."""
    try:
        kind = data["kind"]
        if kind == "char":
            if not data["chars"] or len(set(data["chars"])) < len(data["chars"]):
                raise ValueError("chars is empty, or holds a character twice")
            return CharTokenizer(data["chars"])
        if kind == "byte":
            return ByteTokenizer()
        marks = {key: data[key] for key in ("bos", "stops", "chat") if key in data}
        if kind == "bpe":
            tokenizer = BPETokenizer(encoding_from_json(data), **marks)
        elif kind in ("model", "sentencepiece"):
            from tokens.pretrained import ModelTokenizer  # here, since pretrained imports this file

            if kind == "sentencepiece":  # runs of before 2026-12, where <|endoftext|> was implied
                added = data["tokenizer"]["added_tokens"]
                ends = [token["id"] for token in added if token["content"] == END]
                marks.setdefault("stops", ends)
            tokenizer = ModelTokenizer(data["tokenizer"], **marks)
        else:
            raise ValueError(f"its kind is not known: {str(kind)[:40]!r}")
        if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in tokenizer.marks):
            raise ValueError("bos and stops are not ids")
        return tokenizer
    except ImportError as error:
        fix = f"pip install {error.name}"
        raise UserError(f"this tokenizer needs {error.name}", where, fix) from None
    except Exception as error:  # a key is missing or of another kind, a pattern is no pattern, ...
        what = f"the tokenizer is garbled: {type(error).__name__} {one_line(error)}"
        raise UserError(what, where, fix) from None


def refuse_old_form(data, where, fix):
    """Raise UserError for a stored tokenizer of a pretrained model in a form of older versions,
    whose runs are sampled from, but not trained on."""
    if data.get("kind") == "sentencepiece" or data.get("name") == "imported":
        raise UserError("a pretrained model's tokenizer is now stored whole", where, fix)


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

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

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
        what = f"the vocabulary needs the 256 bytes and {END}"
        raise UserError(what, where, f"choose 257 to {LARGEST:,}")
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


def encode_batches(tokenizer, texts, documents, in_pairs=False):
    """Yield (ids, number of utf-8 bytes) of `texts`, an iterator of str, in their order. documents:
    each text is a document, and gets no end-of-text token. Otherwise the texts are parts of one
    text, which is cut anew where no cut changes its ids. in_pairs: the documents are a prompt, its
    answer, the next prompt, ...; a prompt is encoded by `Tokenizer.prompt`.

    Threads encode: the libraries need no lock of Python's. At most two pieces per core are in
    memory. Raises what the tokenizer's `encode` raises."""
    encode_first = tokenizer.prompt if in_pairs else tokenizer.encode

    def encode(batch):
        """[(ids, number of bytes)] of a batch, [(text, whether another text precedes it)]."""
        results = []
        for text, is_rest in batch:
            ids = tokenizer.encode_rest(text) if is_rest else encode_first(text)
            results.append((ids, len(text.encode())))
        return results

    if documents:  # each stands alone, but an answer follows its prompt
        batches = groups((text, in_pairs and n % 2 == 1) for n, text in enumerate(texts))
    else:
        batches = ([(text, n > 0)] for n, text in enumerate(pieces(texts, tokenizer.cut)))
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        while waiting := [*islice(batches, 2 * cores)]:
            for results in pool.map(encode, waiting):
                yield from results


def groups(texts):
    """Yield lists of consecutive (text, ...), each but the last of PIECE characters or more."""
    group = []
    length = 0
    for item in texts:
        group.append(item)
        length += len(item[0])
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
