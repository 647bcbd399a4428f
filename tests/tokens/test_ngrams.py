"""The losses of n-gram models: against plain counting, where they are stored, who prints them."""

import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import train
from helpers.runs import arguments
from helpers.texts import tiny_bpe
from prepare import prepare
from tokens import ngrams
from tokens.token_files import fingerprint, load_meta
from training import run_folder

LETTERS = np.random.default_rng(0).choice(7, 400, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05])
STORED = {
    "tokens": [100, 400],
    "losses": [[3.0, 2.6, 2.4, 2.5, 2.7, 2.9], [3, 2.4, 2, 1.7, 1.6, 2]],
}


def plain_losses(train, val, vocab_size, amount):
    """(6,) by the formula as it stands in tokens/ngrams.py, gram by gram."""
    text, counts = train[:amount].tolist(), defaultdict(Counter)
    for n in range(1, 7):
        for end in range(n, len(text) + 1):
            *context, token = text[end - n : end]
            counts[tuple(context)][token] += 1

    def probability(token, context, n):
        if n == 0:
            return 1 / vocab_size
        after = counts[tuple(context)]
        below = probability(token, context[1:], n - 1)
        if not after:
            return below
        return (after[token] + len(after) * below) / (after.total() + len(after))

    val = val.tolist()
    rows = [
        [probability(val[i], val[i - n + 1 : i], n) for n in range(1, 7)]
        for i in range(5, len(val))
    ]
    return -np.log(rows).mean(0)


@pytest.mark.parametrize("vocab_size", [8, 50_257])
@pytest.mark.parametrize("end", [16, 400])
def test_losses_are_those_of_plain_counting(vocab_size, end):
    """With tokens and contexts in val that train has not, and amounts shorter than a gram."""
    tokens, amounts = LETTERS[:end], [4, end // 2, end]
    val = np.concatenate([LETTERS[50:90], [7, 7], LETTERS[:20]])
    losses = ngrams.losses_of(tokens, val, vocab_size, amounts)
    expected = [plain_losses(tokens, val, vocab_size, amount) for amount in amounts]
    assert np.abs(losses - expected).max() < 1e-8


def test_amounts_are_spaced_and_bounded(monkeypatch):
    monkeypatch.setattr(ngrams, "FEWEST", 50)
    monkeypatch.setattr(ngrams, "COUNTED", 301)
    monkeypatch.setattr(ngrams, "SCORED", 60)
    stored = ngrams.measure(LETTERS.astype(np.uint16), LETTERS[100:], 7)
    assert stored["tokens"] == [53, 75, 106, 150, 212, 301]
    expected = [plain_losses(LETTERS, LETTERS[100:160], 7, n) for n in stored["tokens"]]
    assert np.abs(np.subtract(stored["losses"], expected)).max() < 1e-5
    assert ngrams.measure(LETTERS[:20], LETTERS[:5], 7) is None
    assert ngrams.measure(LETTERS[:20], LETTERS[:6], 7)["tokens"] == [20]


def test_a_window_cuts_the_context():
    """Its first token is the context of a bigram, its second completes that of a trigram."""
    losses = STORED["losses"][1]
    for block_size in (1, 2, 4, 100):
        orders = [min(5, j + 1) for j in range(1, block_size + 1)]
        expected = np.mean([losses[order - 1] for order in orders])
        found = ngrams.losses_at(STORED, 400, block_size)
        assert found[4] == pytest.approx(expected) and found[0] == 3.0
    assert ngrams.yardsticks(STORED, 400, 1)["best"] == [2, pytest.approx(2.4)]
    assert ngrams.yardsticks(STORED, 400, 10**5)["best"] == [5, pytest.approx(1.6, abs=1e-4)]


def test_losses_lie_between_those_of_the_stored_amounts():
    at = lambda tokens: ngrams.yardsticks(STORED, tokens, 10**6)["trigrams"]
    assert [at(n) for n in (0, 100, 200, 400, 10**9)] == pytest.approx([2.4, 2.4, 2.2, 2, 2], 1e-5)
    counted = [ngrams.yardsticks(STORED, n, 8)["tokens"] for n in (0, 200, 10**9)]
    assert counted == [100, 200, 400]
    assert ngrams.yardsticks(STORED, 1, 10**6)["best"] == [3, at(1)]


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2"])
def test_a_dataset_holds_them_and_a_run_prints_them(kind, tmp_path, capsys, monkeypatch):
    """Those that were prepared before hold none, have the same fingerprint, and train the same."""
    monkeypatch.setattr("tokens.downloads.gpt2_tokenizer", tiny_bpe)
    words = ["the king ", "of rome, ", "the queen ", "of france\n"]
    text = "".join(np.random.default_rng(0).choice(words, 320))
    (tmp_path / "words.txt").write_text(text)
    meta = prepare("words", str(tmp_path / "words.txt"), kind, str(tmp_path))
    best = min(meta["ngrams"]["losses"][-1])
    said = f"-grams of this text: {best:.2f} nats a token"
    val = meta["splits"]["val"]
    per_byte = val["tokens"] / val["bytes"] / math.log(2)  # tiny_bpe has fewer tokens than bytes
    bits = f", {best * per_byte:.2f} bits per byte"
    assert said + bits * (kind != "char") + "\n" in capsys.readouterr().out

    drawn, draw = [], run_folder.draw
    monkeypatch.setattr(run_folder, "draw", lambda *args: drawn.append(args[2]) or draw(*args))
    sizes = ["--max_iters=3", "--eval_interval=3"]
    train.main(arguments(tmp_path, tmp_path / "run", *sizes))
    (name, loss), *_ = drawn[-1].items()
    printed = capsys.readouterr().out
    bits = loss * per_byte
    assert f"{name} of the same text: {loss:.4f}, {bits:.4f} bits per byte\n" in printed
    (counted,) = meta["ngrams"]["tokens"]
    assert f"trigrams of {counted:,} tokens" in drawn[-1] and f"of {counted:,} tokens" in name

    path = Path(tmp_path, "words", "meta.json")
    old = {key: value for key, value in meta.items() if key != "ngrams"}
    path.write_text(json.dumps(old))
    assert fingerprint(load_meta(path.parent)) == fingerprint(meta)
    train.main(arguments(tmp_path, tmp_path / "old", *sizes))
    assert drawn[-1] == {} and "of the same text" not in capsys.readouterr().out
