"""Encoding on all cores: the ids of one text however it is cut, order, memory, speed.

Run: python -m pytest tests/tokens/test_encode.py"""

import itertools
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.files import ROOT
from helpers.bpe import bpe
from tokens import tokenizer as encode
from tokens.tokenizer import (
    GPT4,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encode_batches,
    safe_cut,
    train_bpe,
)
from weights.tokenizers import GPT2, PATTERNS, SMOLLM

TEXT = (
    "First Citizen:\nDon't 1234567 times!\n\nZwölf Boxkämpfer;\r\n  x = 12 \n\t你好。\n再见 🙂\n"
    * 40
)


def joined(tokenizer, texts, documents=False):
    return np.concatenate([[], *(ids for ids, _ in encode_batches(tokenizer, texts, documents))])


def with_joints(pattern):
    """A small BPE with tokens for what some patterns keep in one piece."""
    ranks = {**bpe(pattern).encoding._mergeable_ranks}
    for piece in ("!\n", "。\n", "\n\n", " \n", "\r\n", "123", "12", "11", "  ", "'s", "\n "):
        for end in range(2, len(piece.encode()) + 1):
            ranks.setdefault(piece.encode()[:end], len(ranks))
    made = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return BPETokenizer(made)


TOKENIZERS = {name: with_joints(pattern) for name, pattern in PATTERNS.items()}
TOKENIZERS |= {"byte": ByteTokenizer(), "char": CharTokenizer("".join(sorted({*TEXT})))}


@pytest.mark.parametrize("piece", [1, 50, 1 << 18])
@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_one_text_in_pieces(kind, size, piece, monkeypatch):
    """Its ids and bytes are those of the whole, whatever is read or encoded at a time."""
    monkeypatch.setattr(encode, "PIECE", piece)
    tokenizer = TOKENIZERS[kind]
    texts = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    found = [*encode_batches(tokenizer, iter(texts), documents=False)]
    assert np.concatenate([ids for ids, _ in found]).tolist() == tokenizer.encode(TEXT).tolist()
    assert sum(count for _, count in found) == len(TEXT.encode())
    assert len(found) == 1 or piece < 1000


PIECES = [*"aB1½你🙂'!. \t\n\r_", "'s", "'LL", "  ", "\r\n", "12", "345", "\u2003", "\x1c", "\x85"]
WRITTEN = st.lists(st.sampled_from(PIECES)).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"])
)


@given(WRITTEN, st.sampled_from([GPT2, SMOLLM, GPT4]))
@example("ab 12\n\n x!\nA", GPT4)
@settings(deadline=None, database=None, max_examples=1000)
def test_a_safe_cut_changes_no_piece(text, pattern):
    """What stands before the cut is split without a look at what follows, and the other way."""
    tokenizer = TOKENIZERS[next(name for name in PATTERNS if PATTERNS[name] == pattern)]
    cut = safe_cut(text)
    parts = [*tokenizer.encode(text[:cut]), *tokenizer.encode(text[cut:])]
    assert parts == tokenizer.encode(text).tolist()


def test_places_of_safe_cuts():
    for text, expected in {
        "": "",
        "ab": "",
        "ab cd": "ab",
        "12 34": "12",
        "one two three!": "one two",
        "one! two": "",
        "no.\nYes": "no.\n",
        "no.\n\nYes": "",
        "to\n b": "to",
    }.items():
        assert text[: safe_cut(text)] == expected, text


def test_a_stretch_that_cannot_be_cut_takes_linear_time(monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 64)
    searched = []
    monkeypatch.setattr(encode, "safe_cut", lambda text: searched.append(len(text)) or 0)
    assert len(joined(TOKENIZERS["dbrx"], iter("!" * 10_000))) == 10_000
    assert sum(searched) < 4 * 10_000


# ---------------------------------------------------------------- documents


def test_documents_are_encoded_one_by_one():
    documents = ["ab", "", "c d", "<|endoftext|>", *TEXT.splitlines(keepends=True)] * 3
    tokenizer = train_bpe(iter([TEXT]), 300)
    found = [*encode_batches(tokenizer, iter(documents), documents=True)]
    assert [tokenizer.decode(ids) for ids, _ in found] == documents
    assert [count for _, count in found] == [len(text.encode()) for text in documents]
    assert tokenizer.start not in np.concatenate([ids for ids, _ in found])
    assert [*encode_batches(tokenizer, iter([]), documents=True)] == []


def test_order_is_kept(monkeypatch):
    """Also if the first texts take longest."""
    monkeypatch.setattr(encode, "PIECE", 1)

    class Slow:
        def encode(self, text):
            time.sleep(max(0, 20 - int(text)) / 1000)
            return np.array([int(text)])

    texts = [str(n) for n in range(100)]
    assert joined(Slow(), iter(texts), documents=True).tolist() == [*range(100)]


def test_threads_encode_at_the_same_time(monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 1)
    monkeypatch.setattr(encode.os, "cpu_count", lambda: 3)
    together = threading.Barrier(3, timeout=10)  # breaks unless three threads meet

    class Meeting:
        def encode(self, text):
            together.wait()
            return np.zeros(1)

    assert len(joined(Meeting(), iter("abcdef"), documents=True)) == 6


@pytest.mark.parametrize("documents", [True, False])
def test_few_texts_are_read_ahead(documents, monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 10)
    monkeypatch.setattr(encode.os, "cpu_count", lambda: 2)
    numbers = itertools.count()
    endless = (f"some words {n}\n" for n in numbers)
    results = encode_batches(TOKENIZERS["dbrx"], endless, documents)
    for _ in range(50):
        next(results)
    assert next(numbers) < 50 + 10
    results.close()  # ends the threads though the texts have no end
    assert not [t for t in threading.enumerate() if "ThreadPoolExecutor" in t.name]


@pytest.mark.parametrize("documents", [True, False])
def test_a_text_that_cannot_be_encoded(documents):
    texts = iter(["abc", "ab\N{SNOWMAN}"])
    with pytest.raises(UserError, match="not in the vocabulary"):
        [*encode_batches(CharTokenizer("abc"), texts, documents)]


# ---------------------------------------------------------------- speed and memory

CHILD = """
import sys; sys.path.insert(0, sys.argv[1])
from tokens.tokenizer import train_bpe
from tokens.tokenizer import encode_batches
paths = sys.argv[3:]
text = "".join(open(path, encoding="utf-8").read() for path in paths)
tokenizer = train_bpe(iter([text]), 2000)
chunk, count = (text * (1 + (1 << 20) // len(text)))[: 1 << 20], 0
peak = lambda: int(next(l for l in open("/proc/self/status") if "VmHWM" in l).split()[1]) >> 10
before = peak()
for ids, n in encode_batches(tokenizer, (chunk for _ in range(int(sys.argv[2]))), False):
    count += n
print(before, peak(), count)
"""


def peak_memory(megabytes):
    """(MB before, at most) of a process that encodes so much text."""
    sources = sorted(map(str, (ROOT / "tokens").glob("*.py")))
    command = [sys.executable, "-c", CHILD, str(ROOT), str(megabytes), *sources]
    before, peak, count = map(int, subprocess.check_output(command, timeout=600).split())
    assert count >= megabytes << 20
    return before, peak


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("megabytes", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_text(megabytes):
    before, peak = peak_memory(megabytes)
    assert peak < before + 15 * (encode.os.cpu_count() or 1)


@pytest.mark.slow
def test_speed_beside_tiktoken():
    """At least 0.8 of tiktoken's own threads, which keep every list of ids in memory."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in paths) * 8
    tokenizer, cores = train_bpe(iter([text]), 4000), encode.os.cpu_count()
    pieces, ratios = [*encode.pieces(iter([text]), safe_cut)], []
    for _ in range(15):
        began = time.perf_counter()
        tokenizer.encoding.encode_ordinary_batch(pieces, num_threads=cores)
        between = time.perf_counter()
        for ids, _ in encode_batches(tokenizer, iter([text]), documents=False):
            ids.astype("<u2").tobytes()
        ratios.append((between - began) / (time.perf_counter() - between))
    assert statistics.median(ratios) > 0.8, ratios
