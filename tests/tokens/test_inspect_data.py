"""prepare.py --list and --inspect. Run: python -m pytest tests/tokens/test_inspect_data.py"""

import numpy as np
import pytest

import prepare
from helpers.texts import message
from tokens import inspect_data
from tokens.tokenizer import ByteTokenizer


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A dataset of 3,960 characters whose words are all different, but for its last 100."""
    monkeypatch.chdir(tmp_path)
    text = "".join(f"word {i:04}\n" for i in range(396))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    prepare.prepare("book", input="book.txt", tokenizer="byte")
    return tmp_path


def test_list(book, capsys):
    prepare.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line.split()[0]: line for line in lines if line.strip()}
    for name in ("shakespeare_char", "plays", "python_source", "fineweb-edu", "enwik8"):
        assert "not prepared" in rows[name]
    assert "byte 256" in rows["book"] and "3.4k/377/198" in rows["book"]

    (book / "data" / "book" / "meta.json").write_text("{}")
    prepare.main(["--list"])
    assert "damaged" in capsys.readouterr().out


def test_inspect(book, capsys):
    prepare.main(["book", "--inspect"])
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert r"'word 0000\nword 0001\n" in out and "256 tokens (byte), book.txt" in out
    assert "3,385" in out and "1.000" in out  # tokens of train; bytes per token
    share = 338 / 3385  # the line ends
    assert r"'\n'" in out and f"{share:.2%}" in out
    assert "val in train: 0.000% of 328 places" in out
    assert "test in val: 0.000% of 149 places" in out


def test_inspect_what_is_not_there(book):
    assert "no dataset here" in message(prepare.main, ["--inspect", "film"])
    assert "one dataset" in message(prepare.main, ["--inspect"])


def rows_of(tokens, length=50):
    return [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]


@pytest.mark.parametrize("block", [64, 1000, 1 << 17])
def test_overlap_is_that_of_the_rows_themselves(block, monkeypatch):
    for name, value in (("BLOCK", block), ("SOUGHT", 10**6), ("SEARCHED", 10**6)):
        monkeypatch.setattr(inspect_data, name, value)
    random = np.random.default_rng(0)
    searched = random.integers(0, 300, 5000).astype(np.uint16)
    sought = random.integers(0, 300, 1200).astype(np.uint16)
    sought[100:300] = searched[40:240]  # 151 rows
    sought[700:749] = searched[:49]  # one token too short
    sought[800:850] = searched[-50:]  # the last row
    known = set(rows_of(searched))
    expected = sum(row in known for row in rows_of(sought))
    assert expected == 152
    share, count, whole = inspect_data.overlap(sought, searched, 300)
    assert whole and count == 1151 and share == expected / count


def test_overlap_of_long_splits_is_sampled(monkeypatch, capsys):
    for name, value in (("BLOCK", 100), ("SOUGHT", 300), ("SEARCHED", 1000)):
        monkeypatch.setattr(inspect_data, name, value)
    tokens = np.random.default_rng(0).integers(0, 9, 100_000).astype(np.uint16)
    share, count, whole = inspect_data.overlap(tokens, tokens, 9)
    assert not whole and count < 500 and share > 0.5  # the first block is in both samples
    inspect_data.print_overlaps({"train": tokens, "val": tokens[:500]}, 9)
    assert "at least" in capsys.readouterr().out


def test_short_splits_have_no_rows():
    few = np.arange(49)
    assert inspect_data.overlap(few, np.arange(100), 100) == (0.0, 0, True)
    assert inspect_data.overlap(np.arange(100), few, 100) == (0.0, 51, True)


def test_the_most_frequent_tokens_go_down_the_columns():
    counts = np.bincount(np.frombuffer(b"aaaabbbccd", np.uint8), minlength=256)
    rows = inspect_data.frequent_rows(counts, 10, ByteTokenizer(), lines=2, columns=2)
    assert rows == [["'a'", "40.00%", "'c'", "20.00%"], ["'b'", "30.00%", "'d'", "10.00%"]]
