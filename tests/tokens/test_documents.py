"""What people bring: files, folders and tables in; documents and three splits out."""

import csv
import errno
import gzip
import json
import os
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import prepare
from common.errors import Failure
from helpers.texts import message, tiny_bpe
from tokens import token_files, writing
from tokens.documents import find_files, open_input
from tokens.token_files import TokenFile, load_meta, load_split, load_tokenizer

pytestmark = pytest.mark.usefixtures("elsewhere")
TEXTS = [f"Document {i}\nover the {'hills and far ' * (i % 7)}away, Zoë.\n" for i in range(400)]
ROWS = [{"id": i, "text": text, "body": f"body {i}"} for i, text in enumerate(TEXTS)]


def write(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    Path(path).write_bytes(data)
    return str(path)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts_in(spec, field=None):
    return list(open_input(spec, field).pieces())


def prepared(**options):
    """meta.json and {split: its documents} of the dataset `x`, prepared in tiny_bpe's tokens."""
    meta = prepare.prepare("x", tokenizer="gpt2", **options)
    return meta, {split: documents_of(split) for split in meta["splits"]}


def documents_of(split):
    """The documents of a split of `x`, at each of whose ends there is one <|endoftext|>."""
    tokenizer = load_tokenizer("data/x", load_meta("data/x"))
    ids = np.asarray(load_split("data/x", split, 0))
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.start) + 1)
    assert parts[-1].size == 0
    return [tokenizer.decode(part[:-1]) for part in parts[:-1]]


# ---------------------------------------------------------------- files


@pytest.fixture
def tree():
    write("a,b[1].txt", "a name with a comma and brackets\n")
    for name in ("src/b.py", "src/a.py", "src/sub/c.md", "src/.git/d", "src/.hidden", "notes.txt"):
        write(name, f"text of {name}\n")


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("notes.txt", ["notes.txt"]),
        ("src", ["src/a.py", "src/b.py", "src/sub/c.md"]),
        ("src/*.py", ["src/a.py", "src/b.py"]),
        ("src/**/*.md", ["src/sub/c.md"]),
        ("src/b.py,src", ["src/b.py", "src/a.py", "src/sub/c.md"]),
        ("s*", ["src/a.py", "src/b.py", "src/sub/c.md"]),
        ("a,b[1].txt", ["a,b[1].txt"]),
    ],
)
def test_which_files_are_read(tree, spec, expected):
    assert [str(path) for path in find_files(spec)] == expected


def test_a_prepared_dataset_inside_the_folder_is_not_read(tree):
    prepare.prepare("x", input="notes.txt")
    write("data/mine.txt", "mine")
    assert [str(path) for path in find_files("data,notes.txt")] == ["data/mine.txt", "notes.txt"]


def test_a_pattern_without_a_file_is_named_and_a_pipe_is_not_waited_for():
    write("src/a.txt", "a text")
    assert "no file matches (--input=src/*.md)" in message(find_files, "src/a.txt,src/*.md,src")
    os.mkfifo("pipe"), os.mkfifo("src/pipe")
    assert "no file here (--input=pipe)" in message(find_files, "pipe")
    assert [*find_files("src,*")] == [Path("src/a.txt")]


# ---------------------------------------------------------------- formats


def write_table(kind):
    """A file of ROWS."""
    name = f"rows.{kind}"
    if kind.startswith("jsonl"):
        data = jsonl(ROWS).encode()
        if kind.endswith("zst"):
            pa = pytest.importorskip("pyarrow")
            half = data.index(b"\n", len(data) // 2) - 5  # two frames, as a parallel packer writes
            parts = [data[:half], data[half:]]
            data = b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in parts)
        return write(name, data)
    if kind == "json":
        return write(name, json.dumps(ROWS, indent=1))
    if kind == "parquet":
        pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), name)
        return name
    with open(name, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
        table.writerows([ROWS[0], *(row.values() for row in ROWS)])
    return name


@pytest.mark.parametrize("kind", ["json", "jsonl", "jsonl.zst", "csv", "tsv", "parquet"])
def test_a_table_gives_a_document_for_each_row(kind):
    name = write_table(kind)
    assert texts_in(name) == TEXTS
    assert texts_in(name, "body") == [f"body {i}" for i in range(400)]
    text = message(open_input, name, "nody")
    assert "there is no field nody among: id, text, body" in text and name in text
    assert "--field=NAME" in text


def test_csv_stays_as_it_is_written():
    write("a.csv", 'id,text\n1,1.10\n2,NA\n3,\n4,"a ""b"",\nc"\n5,007\n')
    corpus = open_input("a.csv")
    assert list(corpus.pieces()) == ["1.10", "NA", 'a "b",\nc', "007"]
    assert corpus.skipped == {"a.csv": "1 of its rows, which have no text"}


def test_packed_text_is_one_text_with_its_newlines():
    write("a.txt.gz", gzip.compress(b"one\r\ntwo\n\n", mtime=0))
    assert texts_in("a.txt.gz") == ["one\ntwo\n\n", ""] and not open_input("a.txt.gz").documents


def test_text_needs_no_package(tree, monkeypatch):
    for package in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)
    write("rows.jsonl", jsonl(ROWS))
    assert len(texts_in("src,rows.jsonl")) == 403
    for name in ("a.parquet", "a.jsonl.zst"):
        write(name, "text\nabc\n")
        assert "pip install pyarrow" in message(open_input, name)


def test_what_the_rows_hold_decides():
    write("a.jsonl", jsonl([{"text": "a", "prompt": "b", "answer": "c"}]))
    assert texts_in("a.jsonl") == ["a"]
    write("a.json", '{"text": "one object is a text"}')
    assert not open_input("a.json").documents


# ---------------------------------------------------------------- bad input


# Without the time of its making, so that the names of the tests are always the same.
CUT = gzip.compress(random.Random(0).randbytes(999), mtime=0)[:500]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.txt", "wide".encode("utf-16"), "the text is UTF-16 or UTF-32, not utf-8 (a.txt)"),
        ("a.txt", "wide text".encode("utf-16-be"), "the file is binary, or UTF-16"),
        ("a.txt", "ä".encode() * 9 + b"\xc3", "the text is not utf-8: byte 18 (a.txt)"),
        ("a.jsonl", "\n\n", "the table is empty (a.jsonl)"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "as jsonl: a list, not an object (a.jsonl:2)"),
        ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', "text is missing or not a text (a.jsonl:2)"),
        ("a.jsonl", '{"text": null}\n{"text": ""}\n{"id": 1}\n', "the text is empty"),
        ("a.txt", " \n\n", "blank, or one character alone (a.txt)"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', "too few rows"),
        ("a.json", '[\n{"text": "a"},\n{"text":', "Expecting value (a.json)"),
        ("a.csv", 'text\n"never closed\n' * 3, "cannot be read as csv"),
        ("a.parquet", b"PAR1 no parquet", "cannot be read as parquet"),
        ("a.jsonl.zst", b"no zstd", "(a.jsonl.zst)"),
        ("a.txt.gz", CUT, "the file is damaged: Compressed file"),
    ],
)
def test_bad_file(name, content, words):
    write(name, content)
    assert words in message(lambda: prepare.prepare("x", input=name))
    assert os.listdir("data") == []


def test_text_pairs_and_preferences_are_three_datasets(tree):
    write("src/chat.jsonl", jsonl([{"prompt": "a", "answer": "b"}]))
    text = message(open_input, "src")
    assert "src/chat.jsonl holds pairs" in text and "src/sub/c.md holds text" in text
    write("tastes.jsonl", jsonl([{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    text = message(open_input, "tastes.jsonl,src/chat.jsonl")
    assert "tastes.jsonl holds preferences" in text and "src/chat.jsonl holds pairs" in text


def test_what_a_folder_holds_besides_text_is_left_out_by_name(tree, capsys):
    write("src/logo.png", b"\x89PNG\0\1")
    write("src/old.txt", "caf\xe9".encode("latin-1"))
    write("src/wide.txt", "wide".encode("utf-16"))
    write("src/empty.py", "\n")
    write("src/other.jsonl", '{"id": 1}\n')
    parts = sum(prepared(input="src")[1].values(), [])
    in_test = "d\n"  # the end of the longest document
    names = ("a.py\n", "b.py\n", "sub/c.m")
    assert sorted(parts) == [in_test, *(f"text of src/{name}" for name in names)]
    out = capsys.readouterr().out
    for name, why in {
        "logo.png": "the file is binary",
        "old.txt": "the text is not utf-8: byte 3",
        "wide.txt": "the text is UTF-16 or UTF-32",
        "empty.py": "the file is empty",
        "other.jsonl": "there is no field text among: id",
    }.items():
        assert f"left out src/{name}: {why}" in out


def test_a_full_disk_is_one_line_and_the_old_dataset_is_intact(monkeypatch):
    write("rows.jsonl", jsonl(ROWS))
    prepare.prepare("x", input="rows.jsonl")
    before = {path.name: path.read_bytes() for path in Path("data/x").iterdir()}
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(TokenFile, "add", lambda *args: (_ for _ in ()).throw(full))
    with pytest.raises(Failure, match=r"cannot write: No space left.*\(data/x\): free the disk"):
        prepare.prepare("x", input="rows.jsonl", tokenizer="byte")
    assert {path.name: path.read_bytes() for path in Path("data/x").iterdir()} == before
    assert os.listdir("data") == ["x"]


# ---------------------------------------------------------------- splits


def test_documents_end_with_end_of_text_and_each_is_in_one_split():
    """Also its copies."""
    write("rows.jsonl", jsonl(ROWS * 3))
    meta, splits = prepared(input="rows.jsonl")
    assert sorted(sum(splits.values(), [])) == sorted(TEXTS * 3)
    assert sum(len(set(split)) for split in splits.values()) == 400
    assert all(len(splits[split]) == meta["splits"][split]["documents"] for split in splits)
    for split, texts in splits.items():
        size = sum(len(text.encode()) for text in texts)
        assert meta["splits"][split]["bytes"] == size


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_without_end_of_text_a_blank_line_separates(kind):
    ends = ["", "\n", "\n\n", "\n\n\n"] * 10
    for i, end in enumerate(ends):
        write(f"src/{i}.txt", f"document {i}.{end}")
    meta = prepare.prepare("x", input="src", tokenizer=kind)
    tokenizer = load_tokenizer("data/x", meta)
    splits = [tokenizer.decode(load_split("data/x", split, 0)) for split in meta["splits"]]
    for i, end in enumerate(ends):
        expected = f"document {i}.{max(end, chr(10) * 2)}"
        assert sum(len(re.findall(f"{expected}(?!\n)", split)) for split in splits) == 1


def test_a_document_stays_in_val_or_out_of_it_when_others_are_added():
    write("rows.jsonl", jsonl(ROWS))
    first = prepared(input="rows.jsonl")[1]
    write("rows.jsonl", jsonl([{"text": f"new {i} " * 9} for i in range(3000)] + ROWS[::-1]))
    second = prepared(input="rows.jsonl")[1]
    assert set(first["val"]) == set(second["val"]) & set(TEXTS) and len(first["val"]) > 20
    assert set(first["train"]) <= set(second["train"])
    assert set(second["test"]) & set(TEXTS) <= set(first["test"])


@pytest.mark.parametrize("n", [999_980, 1_200_000, 6_000_000])
def test_a_single_text_has_50_000_test_tokens_or_1_percent_never_5(n):
    write("a.txt", "ab" * (n // 2))
    splits = prepare.prepare("x", input="a.txt")["splits"]
    test = {999_980: 49_999, 1_200_000: 50_000, 6_000_000: 60_000}[n]
    train = (n - test) * 9 // 10
    tokens = {split: entry["tokens"] for split, entry in splits.items()}
    assert tokens == {"train": train, "val": n - test - train, "test": test}


def test_shares_of_documents_by_size(monkeypatch):
    """Whatever the sizes; the shares of many documents come from the hash alone."""
    rng = np.random.default_rng(0)
    seen = set()
    for n in [2, 3, 4, 5, 10, 30, 100, 1000] * 5:
        sizes = {rng.random(): int(99 * rng.pareto(1)) + 1 for _ in range(n)}
        splits, tail = writing.few_documents(sizes, 0.02)
        held = dict.fromkeys(("train", "val", "test"), 0)
        for at, split in splits.items():
            held[split] += sizes[at]
        size = sum(held.values())
        assert 0 < held["val"] <= 0.5 * size and held["train"] > 0
        assert held["test"] <= 0.05 * size
        assert (held["test"] == 0) == bool(tail)
        for at, share in tail.items():
            assert splits[at] == "train" and 0 < share * sizes[at] <= 0.0201 * size
        seen.add(bool(tail))
    assert seen == {True, False}
    assert [writing.split_of(at, 0.01) for at in (0.009, 0.01, 0.05, 0.149, 0.15, 0.99)] == [
        *("test", "train", "val", "val", "train", "train")
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_few_documents_have_all_splits(n):
    """One document is split by position; of two or more, val has whole ones, and test the end of
    the largest one if none is small."""
    texts = [f"{i} {'some words of the king ' * 40}\n" for i in range(n)]
    write("rows.jsonl", jsonl([{"text": text} for text in texts]))
    meta = prepare.prepare("x", "rows.jsonl", "gpt2")
    assert len(meta["splits"]) == 3
    tokens = {split: entry["tokens"] for split, entry in meta["splits"].items()}
    assert all(tokens.values()) and tokens["test"] <= 0.05 * sum(tokens.values()) + 1
    if n > 1:
        parts = {split: documents_of(split) for split in tokens}
        assert set(parts["val"]) < set(texts)
        assert any(text.endswith(parts["test"][0]) for text in texts)
        assert sorted([*parts["val"], *parts["train"][:-1]]) != sorted(texts)


def test_a_bpe_learns_only_from_what_is_in_train(monkeypatch):
    write("rows.jsonl", jsonl(ROWS))
    learned = []

    def train_bpe(texts, vocab_size, documents, fewer):
        learned.extend(texts)
        assert vocab_size == 300 and documents
        return tiny_bpe()

    monkeypatch.setattr(prepare, "train_bpe", train_bpe)
    meta = prepare.prepare("x", input="rows.jsonl", tokenizer="bpe", vocab_size=300)
    assert meta["tokenizer"] == "bpe" and set(learned) <= set(documents_of("train"))
    assert len(learned) > 300


def test_the_users_test_bin_is_kept_and_ours_is_replaced():
    write("a.txt", "the king of rome\n" * 3)
    prepare.prepare("x", input="a.txt", tokenizer="byte")
    assert "test" in load_meta("data/x")["splits"]
    write("a.txt", "king")
    prepare.prepare("x", input="a.txt", tokenizer="byte")
    assert sorted(os.listdir("data/x")) == sorted(token_files.FILES[:4])  # ours is gone
    write("data/x/test.bin", "mine")
    prepare.prepare("x", input="a.txt", tokenizer="byte")
    assert Path("data/x/test.bin").read_text() == "mine"
