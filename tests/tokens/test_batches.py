"""The order of the samples, evaluation, and memory over a billion tokens."""

import os
import subprocess
import sys

import numpy as np
import pytest

from common.commands import ROOT
from helpers.texts import tiny_bpe
from tokens import data, pairs
from tokens.batches import Batches, Text


@pytest.mark.parametrize("n", [9, 10, 15, 16, 17, 24, 25, 1000, 1003])
def test_an_epoch_visits_each_window_once(n, block_size=8):
    """Each is a stretch of the text, and y is x shifted by one."""
    samples = Batches(np.arange(n, dtype=np.uint16), block_size, 1)
    count = samples.windows_per_epoch
    assert count == max(1, (n - block_size) // block_size)
    for epoch in range(20):
        x, y = samples.get(epoch * count, count)
        assert x.shape == y.shape == (count, block_size) and x.dtype == y.dtype == np.int64
        assert (y == x + 1).all() and (x == x[:, :1] + np.arange(block_size)).all()
        starts = np.sort(x[:, 0])
        assert (np.diff(starts) == block_size).all()  # next to each other, none twice
        assert starts[0] >= 0 and starts[-1] + block_size <= n - 1  # the last target is there


def test_order_is_a_pure_function():
    tokens = np.arange(200)
    straight = Batches(tokens, 8, 1).get(0, 200)[0]  # eight epochs and a half
    wandering = Batches(tokens, 8, 1)
    # Back and forth, over the ends of epochs.
    for first, count in [(150, 20), (0, 3), (23, 2), (199, 1), (20, 100), (0, 200)]:
        assert (wandering.get(first, count)[0] == straight[first : first + count]).all()
        assert wandering.starts.cache_info().currsize <= 2


def test_order_is_pinned():
    """A resumed run relies on it."""
    random = np.random.default_rng([7, 2])  # of the seed and the epoch
    starts = random.integers(11) + 8 * random.permutation(24)  # of 203 tokens, in windows of 8
    assert (Batches(np.arange(203), 8, 7).get(2 * 24, 24)[0][:, 0] == starts).all()
    assert Batches(np.arange(200), 8, 1).get(0, 4)[0][:, 0].tolist() == [11, 171, 59, 139]


@pytest.mark.parametrize(
    "n, limit",
    [
        *((2, None), (8, 0), (9, None), (10, None), (65, None), (66, None)),
        *((100, None), (100, 0), (100, 33), (100, 1000), (100, 2), (100, 97), (100, 91)),
    ],
)
def test_evaluation_scores_each_token_once(n, limit, block_size=8, batch_size=4):
    tokens = np.arange(1000, 1000 + n).astype(np.uint16)
    batches = list(Text(tokens, block_size).eval_batches(batch_size, limit))
    scored = []
    for x, y in batches:
        assert x.shape == y.shape == (batch_size, block_size) and x.dtype == y.dtype == np.int64
        assert (y[y >= 0] == x[y >= 0] + 1).all()  # each is predicted from the one before it
        assert (x[y < 0] == 0).all() and (y[y < 0] == -1).all()
        scored += y[y >= 0].tolist()
    everything = tokens[1:].tolist()  # in order, none left out, none twice
    if limit == 33:  # four of thirteen windows, evenly spread
        everything = [t for first in (0, 24, 48, 72) for t in everything[first : first + 8]]
    assert scored == everything[: (limit or n) - 1]
    assert Text(tokens, block_size).scored(limit)[1].tolist() == scored
    assert len(batches) == -(-(min(limit or n, n) - 1) // (block_size * batch_size))


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_pairs_are_found_in_a_mask_that_is_read_in_parts(piece, monkeypatch):
    monkeypatch.setattr(pairs, "PIECE", piece)
    mask = np.uint8([0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1])
    bounds, answers = pairs.joints(mask)
    assert bounds.tolist() == [0, 2, 7, 9, 13] and answers.tolist() == [1, 4, 8, 12]


def test_order_of_pairs_is_pinned():
    mask = np.tile(np.uint8([0, 1, 1]), 50)
    split = pairs.Pairs(np.arange(150), mask, 4)
    stored = split.batches(1).get(0, 100)[0][:, 0]
    orders = [np.random.default_rng([1, epoch]).permutation(50) for epoch in (0, 1)]
    assert (stored == 3 * np.concatenate(orders)).all(), "as it was"


CHILD = """
import os, sys; sys.path.insert(0, sys.argv[1])
import numpy as np
from tokens.batches import Text
tokens = np.memmap(sys.argv[2], "<u2", "r")
peak = lambda: int(next(l for l in open("/proc/self/status") if "VmHWM" in l).split()[1]) >> 10
before, text = peak(), Text(tokens, 64)
samples = text.batches(1)
last = samples.windows_per_epoch
for i in range(2000):  # over the end of the first epoch
    x, y = samples.get(last // 2 + i * (last // 2000), 12)
    assert x.shape == (12, 64) and not x.any()
for i, (x, y) in enumerate(text.eval_batches(12, int(sys.argv[3]))):
    assert not x.any()
print(before, peak())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_tokens(tmp_path):
    """A billion tokens in a sparse file, which takes no room."""
    path = tmp_path / "train.bin"
    path.touch()
    os.truncate(path, 2 * 10**9)
    command = [sys.executable, "-c", CHILD, str(ROOT), str(path), "30000000"]
    before, peak = map(int, subprocess.check_output(command, timeout=300).split())
    assert peak < before + 400  # MB; two epochs' orders are 250, the pages read would be 1,500


def test_bits_per_byte_in_parts(monkeypatch):
    """The bytes of the tokens are counted a part at a time."""
    tokenizer = tiny_bpe()
    split = Text(np.array([257, 101, 258, 32, 195, 169] * 20, np.uint16), 8)
    entire = data.bits_per_byte(split, tokenizer, 0)
    assert entire == pytest.approx(119 / len(tokenizer.decode_bytes(split.tokens[1:])) / np.log(2))
    monkeypatch.setattr(data.token_files, "PIECE", 7)
    assert data.bits_per_byte(split, tokenizer, 0) == entire


@pytest.mark.parametrize("limit", [0, 40])
def test_the_tokens_around_a_document_are_no_bytes_of_text(limit):
    """Their losses count: where a document ends is a part of what is predicted."""
    tokenizer = tiny_bpe()
    tokenizer.bos, (tokenizer.end,) = 1, tokenizer.stops
    document = [tokenizer.bos, *tokenizer.encode("the king of rome "), tokenizer.end]
    split = Text(np.array(document * 9, np.uint16), 8)
    targets, ids = split.scored(limit)
    text = tokenizer.decode_bytes(ids).replace(b"<|endoftext|>", b"").replace(b"\x01", b"")
    factor = data.bits_per_byte(split, tokenizer, limit)
    assert factor == pytest.approx(targets / len(text) / np.log(2))
    assert limit or len(text) == 9 * len("the king of rome ")
    before_its_end = Text(split.tokens[len(document) - 2 :], 8)
    assert data.bits_per_byte(before_its_end, tokenizer, 2) == 1 / np.log(2)
