"""The order of more windows than are worth storing, and memory over a billion tokens. The order of
smaller splits is tested in test_corpus.py.

Run: python -m pytest tests/tokens/test_batches.py"""

import os
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

import train
from common.files import ROOT
from common.runtime import set_up
from helpers.texts import tiny_bpe
from tokens import batches, mixture, pairs
from tokens.batches import STORED, Batches, Shuffled, Text, shuffled
from training.settings import read_config
from training.start import make_run


def order(n, seed=0, first=0, step=1):
    return Shuffled(np.random.default_rng(seed), n, first, step)[:]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 1000, 4095, 4096, 4097, 100_003])
def test_a_computed_order_has_each_number_once(n):
    for seed in range(5):
        assert (np.sort(order(n, seed)) == np.arange(n)).all()


def test_computed_orders_are_random():
    """As far as a shuffle is: no place prefers a number, and neighbours are not alike."""
    n, draws = 10, 5000
    places = np.array([order(n, [seed, 1]) for seed in range(draws)])  # (draws, n)
    counts = np.array([np.bincount(column, minlength=n) for column in places.T])
    chi2 = ((counts - draws / n) ** 2 / (draws / n)).sum()  # mean (n - 1)^2 = 81, deviation 13
    assert 40 < chi2 < 140
    pairs = np.bincount(places[:, 0] * n + places[:, 1], minlength=n * n)
    pairs = np.delete(pairs, np.arange(0, n * n, n + 1))  # 90 pairs; mean 89, deviation 13
    assert 45 < ((pairs - draws / 90) ** 2 / (draws / 90)).sum() < 150

    large = order(1_000_003).astype(float)
    for lag in (1, 2, 12, 1000):
        assert abs(np.corrcoef(large[lag:], large[:-lag])[0, 1]) < 0.005  # deviation 0.001
    assert abs(np.corrcoef(large, np.arange(len(large)))[0, 1]) < 0.005
    steps = np.diff(large)
    assert abs((steps > 0).mean() - 0.5) < 0.003


def test_slices_of_a_computed_order():
    whole, lazy = order(5000, 3, 7, 8), Shuffled(np.random.default_rng(3), 5000, 7, 8)
    assert sorted(whole) == [*range(7, 7 + 8 * 5000, 8)]
    for first, last in [(0, 1), (17, 40), (4990, 6000), (5000, 6000)]:
        assert (lazy[first:last] == whole[first:last]).all()


def test_computed_order_is_pinned():
    """A resumed run relies on it."""
    assert order(3_000_000, [7, 2])[:6].tolist() == [
        2843193,
        887157,
        2591592,
        604625,
        396634,
        2063156,
    ]


def test_only_long_orders_are_computed():
    random = np.random.default_rng(5)
    expected = 3 + 2 * np.random.default_rng(5).permutation(STORED)
    assert (shuffled(random, STORED, 3, 2) == expected).all()
    assert isinstance(shuffled(random, STORED + 1), Shuffled)


def test_batches_by_a_computed_order(monkeypatch):
    """An epoch still visits each window once, from offsets of its own, and slices fit together."""
    tokens = np.arange(1003)
    stored = Batches(tokens, 8, 1)
    stored.get(0, 1)
    monkeypatch.setattr(batches, "STORED", 0)
    computed = Batches(tokens, 8, 1)
    size = computed.windows_per_epoch
    straight = computed.get(0, 3 * size)[0][:, 0]
    assert isinstance(computed.epochs[2], Shuffled)
    for epoch in range(3):
        starts = np.sort(straight[epoch * size : (epoch + 1) * size])
        assert (np.diff(starts) == 8).all()
        if epoch == 0:
            assert starts[0] == stored.epochs[0].min(), "the offset is the same"
    assert (straight[:size] != straight[size : 2 * size]).any()
    for first, count in [(300, 20), (0, 3), (size - 1, 2), (5, 2 * size)]:
        found = computed.get(first, count)[0][:, 0]
        assert (found == straight[first : first + count]).all()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_pairs_are_found_in_a_mask_that_is_read_in_parts(piece, monkeypatch):
    monkeypatch.setattr(pairs, "PIECE", piece)
    mask = np.uint8([0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1])
    bounds, answers = pairs.joints(mask)
    assert bounds.tolist() == [0, 2, 7, 9, 13] and answers.tolist() == [1, 4, 8, 12]


def test_pairs_by_a_computed_order(monkeypatch):
    mask = np.tile(np.uint8([0, 1, 1]), 50)
    split = pairs.Pairs(np.arange(150), mask, 4)
    stored = split.batches(1).get(0, 50)[0][:, 0]
    assert (stored == 3 * np.random.default_rng([1, 0]).permutation(50)).all(), "as it was"
    monkeypatch.setattr(batches, "STORED", 0)
    computed = split.batches(1).get(0, 50)[0][:, 0]
    assert sorted(computed) == sorted(stored) and (computed != stored).any()


CHILD = """
import os, sys; sys.path.insert(0, sys.argv[1])
import numpy as np
from tokens.batches import Text
tokens = np.memmap(sys.argv[2], "<u2", "r")
peak = lambda: int(next(l for l in open("/proc/self/status") if "VmHWM" in l).split()[1]) >> 10
before, text = peak(), Text(tokens, 64)
samples = text.batches(1)
last = samples.windows_per_epoch
for i in range(2000):  # in the first three epochs, in turn
    x, y = samples.get(i % 3 * last + 10_007 * i % last, 12)
    assert x.shape == (12, 64) and not x.any()
for i, (x, y) in enumerate(text.eval_batches(12, int(sys.argv[3]))):
    assert not x.any()
print(before, peak())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_tokens(tmp_path):
    """A billion tokens in a sparse file, which takes no room."""
    path = tmp_path / "train.bin"
    path.touch()
    os.truncate(path, 2 * 10**9)
    command = [sys.executable, "-c", CHILD, str(ROOT), str(path), "30000000"]
    before, peak = map(int, subprocess.check_output(command, timeout=300).split())
    assert peak < before + 100  # MB; an epoch's order would be 125, the pages read 1,500


@pytest.mark.slow
def test_loading_beside_training(data_dir, tmp_path):
    """The loader alone delivers at least 20 times the tokens of a training step of 0.8 M
    parameters, also from a billion tokens. They take turns, so a busy machine slows all."""
    path = tmp_path / "train.bin"
    path.touch()
    os.truncate(path, 2 * 10**9)
    config = str(ROOT / "config" / "llama_shakespeare.py")
    data = ["--dataset=words", f"--data_dir={data_dir}", "--device=cpu", "--compile=False"]
    settings = read_config([config, *data, "--dry_run"], "")
    runtime = set_up("cpu", "float32")
    run = make_run(settings, *train.find_data(settings.config, runtime), runtime)
    large = Text(np.memmap(path, "<u2", "r"), run.learner.model.config.block_size).batches(1)

    ratios = {"small": [], "large": []}
    for step in range(20):
        began = time.perf_counter()
        train.train_step(run)
        trained = time.perf_counter() - began
        for name, samples in (("small", run.data.batches), ("large", large)):
            began = time.perf_counter()
            for i in range(20):
                samples.get((20 * step + i) * 12, 12)
            ratios[name].append(trained / (time.perf_counter() - began) * 20)
    for name in ratios:
        found = statistics.quantiles(ratios[name][3:], n=20)
        print(f"{name}: {found[9]:.0f} times the training rate ({found[0]:.0f} to {found[-1]:.0f})")
        assert found[9] > 20
    assert run.learner.model.config.n_embd == 128


def test_bits_per_byte_in_parts(monkeypatch):
    """The bytes of the tokens are counted a part at a time."""
    tokenizer = tiny_bpe()
    split = Text(np.array([257, 101, 258, 32, 195, 169] * 20, np.uint16), 8)
    whole = mixture.bits_per_byte(split, tokenizer, 0)
    assert whole == pytest.approx(119 / len(tokenizer.decode_bytes(split.tokens[1:])) / np.log(2))
    monkeypatch.setattr(mixture, "PIECE", 7)
    assert mixture.bits_per_byte(split, tokenizer, 0) == whole
