"""
From texts, or prompt/answer pairs, to the token files of their splits.

    test    1 % of the tokens, or 50,000 if that is more, at most 5 %: cut off first, for the end
    val     about 10 % of the rest
    train   all else

A single text is split by position: train, val, test, in nanoGPT's order. Pairs are split by their
order. A document is split by a hash of its content, a number in [0, 1): test below a bound that
falls from 0.05 to 0.01 as the corpus grows, val in [0.05, 0.15), else train. Up to 100,000
documents are split by their sizes too (few_documents). Beyond that, no document enters or leaves
val because others are added.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice

import numpy as np
from tqdm import tqdm

from common.errors import UserError, folded
from common.files import warn_once
from tokens.token_files import TokenFile
from tokens.tokenizer import END, encode_batches

BAR = dict(disable=None, leave=False, unit_scale=True)  # on terminals only, removed at the end
TEST_SHARE = 0.01  # of the tokens
TEST_TOKENS = 50_000  # at least, within MOST
MOST = 0.05  # of the tokens for test
VAL = (0.05, 0.15)  # the range of the hashes of the documents in val
FEW = 100_000  # documents whose sizes are kept in memory, to split them by size
SAMPLE = 100_000  # characters that are encoded to estimate how many tokens the text has


@dataclass
class Corpus:
    """One long text, or many documents, on its way into token files.

    `pieces()` starts a new pass over the text. With `documents`, each piece is a whole document: an
    end-of-text token or a blank line follows it, and a hash of its content decides on its split.
    Otherwise the pieces are consecutive parts of one text, which is split by position."""

    source: str  # where the text comes from, for meta.json
    pieces: Callable[[], Iterator[str]]
    documents: bool = False
    size: int | None = None  # about how many bytes, for a progress bar
    skipped: dict = field(default_factory=dict)  # {file: why it is left out}, complete after a pass


@dataclass
class PairRows:
    """Pairs on their way into token files. `rows()` starts a new pass and yields (where it is,
    [(prompt, answer), ...]) for each row of a file. The pairs of a row, a conversation, go into one
    split."""

    source: str
    rows: Callable[[], Iterator[tuple[str, list]]]
    skipped: dict = field(default_factory=dict)  # {file: why it is left out}, complete after a pass
    preferences: bool = False  # the two pairs of a row are a chosen and a rejected answer
    size: int | None = None  # about how many bytes


# ---------------------------------------------------------------- the first pass


@dataclass
class Survey:
    """What the first pass over a Corpus or PairRows finds."""

    characters: int = 0
    bytes: int = 0
    rows: int = 0  # of pairs
    chars: set = field(default_factory=set)
    sizes: dict = field(default_factory=dict)  # {hash of a document: bytes} of at most FEW + 1
    sample: str = ""  # the beginning of the text
    sha256: str = ""


def survey(corpus):
    """The Survey of a Corpus. Raises UserError if there is nothing in it to learn."""
    facts = Survey()
    sha256 = hashlib.sha256()
    marks = 0  # of documents in one text
    seen = ""  # the piece, after the end of the one before: a mark may be cut in two
    bar = tqdm(total=corpus.size, desc="reading", unit="B", **BAR)
    for text in corpus.pieces():
        data = text.encode()
        sha256.update(data)
        facts.characters += len(text)
        facts.bytes += len(data)
        facts.chars.update(text)
        if corpus.documents and len(facts.sizes) <= FEW:
            place = hash_of(data)
            facts.sizes[place] = facts.sizes.get(place, 0) + len(data)
        if len(facts.sample) < SAMPLE:
            facts.sample += text[:SAMPLE]
        bar.update(len(data))
        if not corpus.documents:
            seen = seen[1 - len(END) :] + text
            marks += seen.count(END)
    bar.close()

    if marks:
        what = f"{END} stands {marks:,} times in this text, and is learned letter by letter"
        print(folded(f"  NOTE: {what}; docs/your_text.md makes documents of it"))
    if len(facts.chars) < 2 or not "".join(facts.chars).strip():
        what = "the text is empty, blank, or one character alone"
        raise UserError(what, corpus.source, "choose a longer text")
    facts.sha256 = sha256.hexdigest()
    return facts


def survey_pairs(pairs):
    """The Survey of PairRows. Raises UserError if there are not at least two rows."""
    facts = Survey(chars={"\n"})
    sha256 = hashlib.sha256()
    for _, row in tqdm(pairs.rows(), "reading", unit=" rows", **BAR):
        facts.rows += 1
        for prompt, answer in row:
            sha256.update(f"{prompt}\0{answer}\0".encode())
            facts.chars.update(prompt, answer)
            text = f"{prompt}\n{answer}"
            facts.characters += len(text)
            if len(facts.sample) < SAMPLE:
                facts.sample += text
    if facts.rows < 2:
        raise UserError(f"too few rows with an answer: {facts.rows}", pairs.source, "give 2")
    facts.sha256 = sha256.hexdigest()
    return facts


def hash_of(data):
    """A number in [0, 1) that depends on the bytes of a document alone."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8]) / 2**64


def share_of_test(tokenizer, facts):
    """The share of a text that the test split takes. The number of tokens is estimated from the
    beginning of the text."""
    sample = facts.sample[:SAMPLE]
    tokens = facts.characters * len(tokenizer.encode(sample)) / len(sample)
    return min(max(TEST_SHARE, TEST_TOKENS / max(tokens, 1)), MOST)


# ---------------------------------------------------------------- splits


def by_position(corpus, characters, share):
    """Yield (split, text) of a single text: train, val, test in this order."""
    test = min(math.ceil(share * characters), int(MOST * characters))
    train = int(0.9 * (characters - test))
    ends = {"train": train, "val": characters - test, "test": characters}

    at = 0
    for text in corpus.pieces():
        for split, end in ends.items():
            room = max(end - at, 0)  # of the split, in characters
            part = text[:room]
            text = text[room:]
            at += len(part)
            if part:
                yield split, part


def nanogpt_splits(corpus):
    """{"train", "val": Corpus} of a single text: its first 90 %, and the rest, as in nanoGPT.
    Raises UserError if there is nothing in it to learn."""
    characters = survey(corpus).characters

    def part(split):
        return (text for name, text in by_position(corpus, characters, 0) if name == split)

    return {split: replace(corpus, pieces=partial(part, split)) for split in ("train", "val")}


def by_hash(corpus, sizes, share):
    """Yield (split, text) of documents, given {hash: bytes} of the first of them."""
    splits = {}
    tail = {}
    if len(sizes) <= FEW:
        splits, tail = few_documents(sizes, share)
    for text in corpus.pieces():
        place = hash_of(text.encode())
        split = splits.get(place) or split_of(place, share)
        cut = len(text) - int(tail.get(place, 0) * len(text))
        if cut < len(text):
            yield "test", text[cut:]
        yield split, text[:cut]


def split_of(place, share):
    """The split of the document with the hash `place`."""
    if place < share:
        return "test"
    return "val" if VAL[0] <= place < VAL[1] else "train"


def few_documents(sizes, share):
    """({hash: split} of few documents, {hash: share of this document that test takes}).

    Val has the documents in its range, and those that follow until it holds 5 % of the bytes, but
    at most half of all. Test has the documents with the lowest hashes, until it holds `share` of
    the bytes, or, if none is as small as 5 %, the end of the largest one of train."""
    size = sum(sizes.values())
    val = documents_from(sizes, VAL[0], VAL[1] - VAL[0], least=0.05 * size, most=0.5 * size)
    left = {place: n_bytes for place, n_bytes in sizes.items() if place not in val}
    test = documents_from(left, 0, 0, least=share * size, most=MOST * size)
    train = {place: n_bytes for place, n_bytes in left.items() if place not in test}

    splits = dict.fromkeys(train, "train") | dict.fromkeys(val, "val")
    if test:
        return splits | dict.fromkeys(test, "test"), {}
    largest = max(train, key=train.get)
    return splits, {largest: min(share * size / train[largest], 0.5)}


def documents_from(sizes, start, width, least, most):
    """The hashes of the documents of a split, given {hash: bytes}: all in [start, start + width),
    then the next ones, until they have `least` bytes. After 1 comes 0. A document with which they
    would have more than `most` bytes is passed over."""
    chosen = set()
    held = 0
    for place in sorted(sizes, key=lambda place: (place - start) % 1):
        is_within = (place - start) % 1 < width
        if not is_within and held >= least:
            break
        if held + sizes[place] <= most:
            chosen.add(place)
            held += sizes[place]
    return chosen


# ---------------------------------------------------------------- texts to tokens


def encode_text(parts, tokenizer):
    """Yield (split, ids, bytes of their text) of (split, text) parts of a single text."""
    for split, group in groupby(parts, key=lambda part: part[0]):
        texts = (text for _, text in group)
        for ids, n_bytes in encode_batches(tokenizer, texts, documents=False):
            yield split, ids, n_bytes


def encode_documents(parts, tokenizer):
    """Yield (split, ids, bytes of its text) of (split, document) parts. A document stands between
    the tokenizer's bos and end, or, without an end, a blank line follows it."""
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    last = list(tokenizer.stops[:1])
    waiting = deque()  # the splits of the documents that are being encoded

    def texts():
        for split, text in parts:
            if not text:
                continue
            waiting.append(split)
            newlines = len(text) - len(text.rstrip("\n"))
            yield text if last else text + "\n\n"[newlines:]

    for ids, n_bytes in encode_batches(tokenizer, texts(), documents=True):
        ids = np.concatenate([first, ids, last]).astype(np.int64)
        yield waiting.popleft(), ids, n_bytes


def write_parts(parts, tokenizer, folder, documents, size, source):
    """Write the token files of (split, text) parts, of about `size` bytes. Returns {split: entry in
    meta.json}. Raises UserError unless there are tokens to train on and to validate on."""
    files = {}
    encode = encode_documents if documents else encode_text
    bar = tqdm(total=size, desc="writing tokens", unit="B", **BAR)
    for split, ids, n_bytes in encode(parts, tokenizer):
        if split not in files:
            files[split] = TokenFile(folder / f"{split}.bin", tokenizer.vocab_size)
        files[split].add(ids, n_bytes)
        bar.update(n_bytes)
    bar.close()

    entries = {split: files[split].close() for split in ("train", "val", "test") if split in files}
    for split in ("train", "val"):
        if not entries.get(split, {}).get("tokens"):
            raise UserError(f"there is no text for the {split} split", source, "give more text")
    if "test" in entries and not entries["test"]["tokens"]:  # only what the tokenizer drops
        del entries["test"]
        (folder / "test.bin").unlink()
    if documents:
        for split, entry in entries.items():
            entry["documents"] = files[split].pieces
    return entries


def write_corpus(corpus, make_tokenizer, folder):
    """Write the token files of a Corpus, or of {"train", "val"[, "test"]: Corpus}.

    make_tokenizer(chars, texts, documents) returns the tokenizer, which may learn from the text:
    chars() is the set of its characters, texts() a pass over what is certainly in train, in
    documents or in pieces of one text. Returns (tokenizer, {split: entry in meta.json}, sha256 of
    the text). Raises UserError if there is too little text."""
    if isinstance(corpus, dict):
        return write_given(corpus, make_tokenizer, folder)

    facts = survey(corpus)
    documents = corpus.documents and len(facts.sizes) > 1  # one, or copies of one, is one text
    if documents:
        facts.chars.add("\n")  # for the blank line between documents
        split = partial(by_hash, corpus, facts.sizes)
    else:
        split = partial(by_position, corpus, facts.characters)

    def texts():  # what is in train however large the test split becomes
        train = (text for name, text in split(MOST) if name == "train")
        return tqdm(train, "reading train", unit=" pieces", **BAR)

    tokenizer = make_tokenizer(lambda: facts.chars, texts, documents)
    parts = split(share_of_test(tokenizer, facts))
    entries = write_parts(parts, tokenizer, folder, documents, facts.bytes, corpus.source)
    return tokenizer, entries, facts.sha256


def write_given(splits, make_tokenizer, folder):
    """write_corpus for splits that are given. A test split does not count in the sha256, so that
    one can be added to a known text."""
    train = splits["train"]
    sha256 = hashlib.sha256()

    def chars():
        found = {"\n"} if train.documents else set()  # documents end with a blank line
        for corpus in splits.values():
            for text in corpus.pieces():
                found.update(text)
        return found

    def parts():
        for split, corpus in splits.items():
            for text in corpus.pieces():
                if split != "test":
                    sha256.update(text.encode())
                yield split, text

    tokenizer = make_tokenizer(chars, train.pieces, train.documents)
    entries = write_parts(parts(), tokenizer, folder, train.documents, train.size, train.source)
    return tokenizer, entries, sha256.hexdigest()


# ---------------------------------------------------------------- pairs to tokens


def write_pairs(pairs, make_tokenizer, folder):
    """Write the token files and masks of PairRows. The last rows are for the test split, the first
    90 % of the others are for training. Returns and raises the same as write_corpus."""
    facts = survey_pairs(pairs)

    def texts():  # of the rows that are in train however large the test split becomes
        for _, row in islice(pairs.rows(), facts.rows // 2):
            for prompt, answer in row:
                yield prompt + answer

    tokenizer = make_tokenizer(lambda: facts.chars, texts, True)
    if not tokenizer.stops and tokenizer.decode([tokenizer.end]) != "\n":
        fix = "use gpt2 or byte, or a run whose text has line ends"
        raise UserError("no token of this tokenizer ends an answer", "--tokenizer", fix)
    if getattr(tokenizer, "chat", None):
        warn_once("the rows lack the model's chat template: sample without --chat, too", "note")

    count = facts.rows
    test = min(math.ceil(share_of_test(tokenizer, facts) * count), int(MOST * count))
    train = max(1, int(0.9 * (count - test)))
    rows = iter(tqdm(pairs.rows(), "writing tokens", count, unit=" rows", **BAR))
    entries = {}
    for split, n in {"train": train, "val": count - test - train, "test": test}.items():
        if n == 0:
            continue
        entries[split] = write_rows(folder / f"{split}.bin", islice(rows, n), tokenizer)
        if pairs.preferences:
            entries[split]["preferences"] = n
    return tokenizer, entries, facts.sha256


def write_rows(path, rows, tokenizer):
    """Write the pairs of some rows. Returns the entry of the split in meta.json."""

    def texts():
        """A prompt, its answer, the next prompt, ..."""
        for where, pairs in rows:
            for prompt, answer in pairs:
                if not tokenizer.stops and "\n" in answer:
                    raise UserError("the answer has several lines", where, "use --tokenizer=gpt2")
                yield prompt
                yield answer

    file = TokenFile(path, tokenizer.vocab_size, masked=True)
    results = encode_batches(tokenizer, texts(), documents=True, in_pairs=True)
    for prompt, prompt_bytes in results:
        answer, answer_bytes = next(results)
        answer = [*answer, tokenizer.end]
        mask = b"\0" * len(prompt) + b"\1" * len(answer)
        file.add(prompt + answer, prompt_bytes + answer_bytes, mask)
    return file.close()
