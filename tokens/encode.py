"""Texts to token ids: on all cores, in order, and in bounded memory."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from tokens.tokenizer import BPETokenizer

PIECE = 1 << 18  # characters that a thread encodes at a time


def encode_batches(tokenizer, texts, documents):
    """Yield (ids, number of utf-8 bytes) in the order of `texts`, an iterator of str.

    With `documents`, each text is encoded by itself and each result is one document, without an
    end-of-text token. Otherwise the texts are consecutive pieces of one text, however it was cut;
    the ids of all results together are those of the whole text.

    Threads encode while the next texts are read: tiktoken needs no lock of Python's. At most two
    pieces per core wait to be encoded or fetched. Raises what the tokenizer's `encode` raises."""

    def encode(batch):
        return [
            (tokenizer.encode(text), len(text.encode("utf-8", "surrogatepass"))) for text in batch
        ]

    if documents:
        batches = groups(texts)
    else:
        cut = safe_cut if isinstance(tokenizer, BPETokenizer) else len
        batches = ([piece] for piece in pieces(texts, cut))
    for results in in_order(encode, batches):
        yield from results


def in_order(function, items):
    """Yield function(item) of each item, in order, computed by one thread per core."""
    cores, pending = os.cpu_count() or 1, deque()
    with ThreadPoolExecutor(cores) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * cores:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # after an error, or if the caller wants no more
            for future in pending:
                future.cancel()


def groups(texts):
    """Yield lists of consecutive texts, each list of PIECE characters or more except the last."""
    group, length = [], 0
    for text in texts:
        group.append(text)
        length += len(text)
        if length >= PIECE:
            yield group
            group, length = [], 0
    if group:
        yield group


def pieces(texts, cut):
    """Yield one text, which comes as its consecutive pieces `texts`, in pieces of about PIECE
    characters that end where `cut` allows it. A stretch that cannot be cut is held in memory."""
    held, length, wanted = [], 0, PIECE
    for text in texts:
        for start in range(0, len(text), PIECE):
            held.append(text[start : start + PIECE])
            length += len(held[-1])
            if length < wanted:
                continue
            whole = "".join(held)
            end = cut(whole)
            if end:
                yield whole[:end]
            held, length = [whole[end:]], len(whole) - end
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
