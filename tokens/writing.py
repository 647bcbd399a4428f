"""
From a Corpus to the token files of its splits.

    test    1 % of the tokens, at least 50,000 if that is at most 5 %: cut off first, read by no run
    val     10 % of the rest
    train   all else

A single text is split by position: train, val, test, in nanoGPT's order. Documents are split by a
hash of their content, a number in [0, 1): test below a bound that falls from 0.05 to 0.01 as the
corpus grows, val in [0.05, 0.15), train the rest. So a document stays in val, or out of it, however
many others are added, and copies of a document are in one split. With few documents the shares are
made by size (see `few_documents`).

After each document comes <|endoftext|>, or a blank line if the vocabulary has no such token
(characters, bytes).
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from tqdm import tqdm

from common.errors import UserError
from tokens.token_files import TokenFile
from tokens.tokenizer import BPETokenizer, encode_batches

BAR = dict(disable=None, leave=False, unit_scale=True)  # on terminals only, removed at the end
TEST_SHARE, TEST_TOKENS = 0.01, 50_000
MOST = 0.05  # of the tokens for test
VAL = (0.05, 0.15)  # the hashes of the documents of val
FEW = 100_000  # documents whose sizes are kept in memory, to split them by size
SAMPLE = 100_000  # characters that are encoded to estimate how many tokens the text has


# ---------------------------------------------------------------- texts


@dataclass
class Corpus:
    """One long text, or many documents.

    `pieces()` starts a new pass over the text. With `documents`, each piece is a whole document:
    an end-of-text token follows it, and a hash of its content decides on its split. Otherwise the
    pieces are consecutive parts of one text, which is split by position."""

    source: str  # where the text comes from, for meta.json
    pieces: Callable[[], Iterator[str]]
    documents: bool = False
    size: int | None = None  # about how many bytes, for a progress bar
    skipped: dict = field(default_factory=dict)  # {file: why it is left out}, complete after a pass


# ---------------------------------------------------------------- the first pass


@dataclass
class Survey:
    """What the first pass over a corpus finds."""

    characters: int = 0
    bytes: int = 0
    documents: int = 0
    chars: set = field(default_factory=set)
    sizes: dict = field(default_factory=dict)  # {hash of a document: bytes} of at most FEW + 1
    sample: str = ""  # the beginning of the text
    sha256: str = ""


def survey(corpus):
    """The Survey of a corpus. Raises UserError if there is nothing in it to learn."""
    found, sha256 = Survey(), hashlib.sha256()
    bar = tqdm(total=corpus.size, desc="reading", unit="B", **BAR)
    for text in corpus.pieces():
        data = text.encode()
        sha256.update(data)
        found.characters += len(text)
        found.bytes += len(data)
        found.documents += 1
        found.chars.update(text)
        if corpus.documents and len(found.sizes) <= FEW:
            at = hash_of(data)
            found.sizes[at] = found.sizes.get(at, 0) + len(data)
        if len(found.sample) < SAMPLE:
            found.sample += text[:SAMPLE]
        bar.update(len(data))
    bar.close()

    if found.documents > 1 and len(found.sizes) == 1:
        what = f"all {found.documents:,} documents are the same"
        raise UserError(what, corpus.source, "give two different ones or more")
    if found.chars and not "".join(found.chars).strip():
        raise UserError("the text is blank", corpus.source, "choose another")
    if len(found.chars) < 2:
        what = "the text has only one character" if found.characters else "the text is empty"
        raise UserError(what, corpus.source, "choose a longer text")
    found.sha256 = sha256.hexdigest()
    return found


def hash_of(data):
    """A number in [0, 1) that depends on the bytes of a document alone."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8]) / 2**64


def estimated_tokens(tokenizer, sample, characters):
    """About how many tokens a text of so many characters has, by a sample of it."""
    return characters * len(tokenizer.encode(sample[:SAMPLE])) / len(sample[:SAMPLE])


def share_of_test(tokens):
    """The share of a text of so many tokens that the test split takes."""
    return min(max(TEST_SHARE, TEST_TOKENS / max(tokens, 1)), MOST)


# ---------------------------------------------------------------- splits


def by_position(corpus, found, share):
    """Yield (split, text) of a single text: train, val, test in this order."""
    test = min(math.ceil(share * found.characters), int(MOST * found.characters))
    train = int(0.9 * (found.characters - test))
    ends = {"train": train, "val": found.characters - test, "test": math.inf}

    at = 0
    for text in corpus.pieces():
        start = at
        at += len(text)
        for split, end in ends.items():
            if start < min(at, end):
                cut = min(at, end)
                yield split, text[start - at + len(text) : cut - at + len(text)]
                start = cut


def by_hash(corpus, found, share):
    """Yield (split, text) of documents."""
    few = len(found.sizes) <= FEW
    splits, tail = few_documents(found.sizes, share) if few else ({}, {})
    for text in corpus.pieces():
        at = hash_of(text.encode())
        split = splits.get(at) or split_of(at, share)
        cut = len(text) - int(tail.get(at, 0) * len(text))
        if cut < len(text):
            yield "test", text[cut:]
        yield split, text[:cut]


def split_of(at, share):
    """The split of the document with the hash `at`."""
    if at < share:
        return "test"
    return "val" if VAL[0] <= at < VAL[1] else "train"


def few_documents(sizes, share):
    """({hash: split} of few documents, {hash: share of this document that test takes}).

    Val has the documents in its range, and those that follow until it holds 5 % of the bytes, but
    at most half of all. Test has the documents with the lowest hashes, until it holds `share` of
    the bytes. It never holds more than 5 %: if no document is so small, it takes the end of the
    largest one of train."""
    splits, total = dict.fromkeys(sizes, "train"), sum(sizes.values())

    def fill(split, start, width, least, most):
        held = 0
        free = [at for at in sizes if splits[at] == "train"]
        for at in sorted(free, key=lambda at: (at - start) % 1):
            if (at - start) % 1 >= width and held >= least * total:
                break
            if held + sizes[at] <= most * total:
                splits[at] = split
                held += sizes[at]

    fill("val", VAL[0], VAL[1] - VAL[0], least=0.05, most=0.5)
    fill("test", 0, 0, least=share, most=MOST)
    if "test" in splits.values():
        return splits, {}
    largest = max((at for at in sizes if splits[at] == "train"), key=sizes.get)
    return splits, {largest: min(share * total / sizes[largest], 0.5)}


def nanogpt_splits(corpus):
    """{"train", "val": Corpus} of a single text: its first 90 %, and the rest, as in nanoGPT."""
    cut = int(0.9 * sum(map(len, corpus.pieces())))

    def part(split):
        at = 0
        for text in corpus.pieces():
            middle = min(max(cut - at, 0), len(text))
            at += len(text)
            yield text[:middle] if split == "train" else text[middle:]

    return {
        "train": replace(corpus, pieces=lambda: part("train")),
        "val": replace(corpus, pieces=lambda: part("val")),
    }


# ---------------------------------------------------------------- texts to tokens


def end_of_text(tokenizer):
    """The id of <|endoftext|>, None if the vocabulary has no such token."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.encoding._special_tokens.get("<|endoftext|>")
    return None


def separated(text):
    """A document with a blank line at its end."""
    newlines = len(text) - len(text.rstrip("\n"))
    return text + "\n\n"[newlines:]


def encoded(parts, tokenizer, documents):
    """Yield (split, ids, bytes of their text) of (split, text) parts: of each document, or of
    consecutive pieces of a running text. <|endoftext|> follows each document if there is one."""
    if not documents:
        for split, group in groupby(parts, key=lambda part: part[0]):
            texts = (text for _, text in group)
            for ids, n_bytes in encode_batches(tokenizer, texts, documents=False):
                yield split, ids, n_bytes
        return

    end, waiting = end_of_text(tokenizer), deque()

    def texts():
        for split, text in parts:
            if text:
                waiting.append(split)
                yield separated(text) if end is None else text

    for ids, n_bytes in encode_batches(tokenizer, texts(), documents=True):
        yield waiting.popleft(), ids if end is None else np.append(ids, end), n_bytes


def write_parts(parts, tokenizer, folder, documents, size):
    """Write the token files of (split, text) parts: of a running text, or of documents. `size` is
    about how many bytes there are. Returns {split: entry in meta.json}."""
    files, counts = {}, dict.fromkeys(("train", "val", "test"), 0)
    bar = tqdm(total=size, desc="writing tokens", unit="B", **BAR)
    for split, ids, n_bytes in encoded(parts, tokenizer, documents):
        if split not in files:
            files[split] = TokenFile(folder / f"{split}.bin", tokenizer.vocab_size)
        files[split].add(ids, n_bytes)
        counts[split] += 1
        bar.update(n_bytes)
    bar.close()

    entries = {split: files[split].close() for split in counts if split in files}
    if documents:
        entries = {split: entry | {"documents": counts[split]} for split, entry in entries.items()}
    return entries


# ---------------------------------------------------------------- a whole dataset


def write_corpus(corpus, make_tokenizer, folder):
    """Write the token files of a Corpus, which is split here, or of {"train", "val"[, "test"]:
    Corpus}, whose splits are given.

    make_tokenizer(chars, texts, documents) returns the tokenizer; chars() is the set of the text's
    characters, texts() a pass over text that is in train however large the test split becomes:
    documents, or pieces of one text. Returns (tokenizer, {split: entry in
    meta.json}, sha256 of the text; that of a given test split does not count, so that a test split
    can be added to a known text). Raises UserError if there is too little text."""
    if isinstance(corpus, dict):
        return write_given(corpus, make_tokenizer, folder)

    found = survey(corpus)
    documents = corpus.documents and len(found.sizes) > 1  # one document is a single text
    split = by_hash if documents else by_position
    if documents:
        found.chars.add("\n")  # for the blank line between documents

    def learned():
        total = 0.9 * (1 - MOST) * found.characters
        with tqdm(total=total, desc="reading train", unit=" characters", **BAR) as bar:
            for name, text in split(corpus, found, MOST):
                if name == "train":
                    yield text
                    bar.update(len(text))

    tokenizer = make_tokenizer(lambda: found.chars, learned, documents)
    share = share_of_test(estimated_tokens(tokenizer, found.sample, found.characters))
    parts = split(corpus, found, share)
    entries = write_parts(parts, tokenizer, folder, documents, found.bytes)
    check_splits(entries, corpus.source)
    return tokenizer, entries, found.sha256


def write_given(splits, make_tokenizer, folder):
    """write_corpus for splits that are given."""
    sha256 = hashlib.sha256()

    def chars():
        found = {"\n"} if splits["train"].documents else set()
        for corpus in splits.values():
            found.update(*corpus.pieces())
        return found

    def parts():
        for split, corpus in splits.items():
            for text in corpus.pieces():
                if split != "test":
                    sha256.update(text.encode())
                yield split, text

    documents = splits["train"].documents
    tokenizer = make_tokenizer(chars, splits["train"].pieces, documents)
    sizes = [corpus.size for corpus in splits.values()]
    size = None if None in sizes else sum(sizes)
    entries = write_parts(parts(), tokenizer, folder, documents, size)
    check_splits(entries, splits["train"].source)
    return tokenizer, entries, sha256.hexdigest()


def check_splits(entries, source):
    """Raise UserError unless there are tokens to train on and to validate on."""
    for split in ("train", "val"):
        if not entries.get(split, {}).get("tokens"):
            raise UserError(f"there is no text for the {split} split", source, "give more text")
