"""The files of a dataset: complete, or one line that says what is wrong."""

import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from common.errors import Failure
from helpers.texts import message
from tokens import token_files
from tokens.batches import Text
from tokens.pairs import Pairs
from tokens.token_files import fingerprint, load_mask, load_meta, load_split, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A whole dataset of 100 and 50 tokens below 7."""
    folder, splits = tmp_path / "data" / "mybook", {}
    folder.mkdir(parents=True)
    for split, count in (("train", 100), ("val", 50)):
        data = (np.arange(count) % 7).astype("<u2").tobytes()
        (folder / f"{split}.bin").write_bytes(data)
        splits[split] = dict(tokens=count, bytes=count, sha256=hashlib.sha256(data).hexdigest())
    meta = dict(tokenizer="char", vocab_size=7, dtype="uint16", source_sha256="5", splits=splits)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def change(folder, **entries):
    meta = json.loads((folder / "meta.json").read_text()) | entries
    meta = {key: value for key, value in meta.items() if value is not None}
    (folder / "meta.json").write_text(json.dumps(meta))


def change_split(folder, split, **entries):
    splits = load_meta(folder)["splits"]
    change(folder, splits=splits | {split: splits.get(split, {}) | entries})


def test_load_split(folder):
    assert [token_files.dtype_name(size) for size in (65536, 65537)] == ["uint16", "uint32"]
    tokens = load_split(folder, "train", 99)
    assert isinstance(tokens, np.memmap) and len(tokens) == 100 and tokens[8] == 1
    with pytest.raises(ValueError):
        tokens[0] = 1  # read-only
    load_split(folder, "val", 49)
    text = message(load_split, folder, "val", 50)
    assert "50 tokens" in text and "block_size=50" in text and "smaller" in text
    assert re.search("no test split .* leave out --split", message(load_split, folder, "test", 8))


@pytest.mark.parametrize(
    "data, words",
    [
        (None, [" 0 bytes"]),
        (b"", [" 0 bytes"]),
        (b"\0" * 99, ["99 bytes", "uint16"]),
        (b"\0" * 120, ["120 bytes", "says 50"]),
        (bytes(62) + b"\7" + bytes(37), ["id 7 at position 31 ", "vocab_size=7"]),
        (bytes(100), ["not those that were prepared"]),
    ],
)
def test_a_broken_token_file(folder, data, words):
    (folder / "val.bin").unlink() if data is None else (folder / "val.bin").write_bytes(data)
    text = message(load_split, folder, "val", 8)
    assert "val.bin" in text and "prepare.py mybook" in text and all(word in text for word in words)
    assert len(load_split(folder, "train", 8)) == 100  # the other split is well


@pytest.mark.parametrize("at", [0, 150_000_000 - 1])
def test_long_files_are_checked_at_their_ends(folder, at, monkeypatch):
    monkeypatch.setattr(token_files, "FULL_SCAN", 10_000_000)
    with open(folder / "val.bin", "wb") as file:  # a sparse file: no room is taken
        file.truncate(2 * 150_000_000)
        file.seek(2 * at)
        file.write(b"\7\0")
    change_split(folder, "val", tokens=150_000_000)
    assert f"position {at:,} " in message(load_split, folder, "val", 8)


def test_a_token_file_that_shrinks_while_it_is_read(folder):
    """A Failure that names the file: reading on would end the process by SIGBUS."""
    tokens = load_split(folder, "train", 8)
    mask = np.tile(np.uint8([0, 1]), 50)
    readers = []
    for split in (Text(tokens, 8), Pairs(tokens, mask, 8)):
        readers.append(partial(split.batches(1).get, 0, 1))
        readers.append(partial(next, split.eval_batches(2)))
    for read in readers:
        read()
    os.truncate(folder / "train.bin", 20)
    for read in readers:
        with pytest.raises(Failure, match="200 to 20 bytes.*train.bin.*--init_from=resume"):
            read()


def test_a_missing_dataset_names_the_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = message(load_split, Path("data/shakespeare_char"), "train", 8)
    assert "data/shakespeare_char" in words and "python prepare.py shakespeare_char`" in words
    words = message(load_split, Path("data/mybook"), "train", 8)
    assert "python prepare.py mybook --input=TEXTFILE`" in words
    words = message(load_meta, Path("data/task:recall"))
    assert "`python -m extras.tasks recall`" in words
    assert "'--data_dir=my data'" in message(load_meta, Path("my data/mybook"))
    assert "mean shakespeare_char?" in message(load_meta, Path("data/shakespeare-char"))
    Path("book.txt").touch()
    check_name = token_files.check_name
    assert "--input=book.txt`, and give --dataset=NAME" in message(check_name, "data", "book.txt")
    assert "give --data_dir=data --dataset=x" in message(check_name, "data", "data/x")
    Path("data").mkdir()
    for impossible in ("x" * 300, "a\0b"):
        assert "no dataset here" in message(load_meta, Path("data", impossible))
        assert not token_files.is_prepared(Path(impossible, "shakespeare_char"))


@pytest.mark.parametrize("text", ["", "[]", "{}", "\udcff", None])
@pytest.mark.parametrize("name", ["tokenizer.json", "meta.json"])
def test_a_file_that_is_not_what_was_written(folder, name, text):
    """None: the name is that of a folder."""
    meta = load_meta(folder)
    (folder / name).unlink(missing_ok=True)
    if text is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_text(text, errors="surrogateescape")
    load = load_meta if name == "meta.json" else lambda folder: load_tokenizer(folder, meta)
    words = message(load, folder)
    assert re.search("garbled|not JSON|not a dict|cannot read|no meta.json", words)
    assert str(folder) in words and "prepare.py mybook" in words


ENTRY = dict(tokens=100, bytes=100, sha256="5")


@pytest.mark.parametrize(
    "entries, key",
    [
        *((dict(vocab_size=value), "vocab_size") for value in (None, 0, True)),
        *((dict(dtype=value), "dtype") for value in ("float64", [])),
        (dict(tokenizer={}), "tokenizer"),
        *((dict(splits=value), "splits") for value in ({}, 5, {"train": ENTRY, "val": None})),
        (dict(splits={"train": ENTRY, "val": ENTRY | {"bytes": -1}}), "splits.val.bytes"),
        (dict(splits={"train": ENTRY, "val": ENTRY | {"documents": "5"}}), "splits.val.documents"),
        (dict(splits={"train": ENTRY | {"mask_sha256": 5}, "val": ENTRY}), "train.mask_sha256"),
        (dict(splits={"train": ENTRY, "val": ENTRY, "test": 3}), "splits.test"),
        (dict(source_sha256=None), "source_sha256"),
    ],
)
def test_meta_that_makes_no_sense(folder, entries, key):
    change(folder, **entries)
    text = message(load_meta, folder)
    assert "garbled" in text and key in text and "meta.json)" in text and len(text) < 400


def test_meta_pkl_is_never_read(folder):
    (folder / "meta.json").unlink()
    touch = f"(S'touch {folder / 'executed'}'\ntR."
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n" + touch.encode())
    assert "no meta.json" in message(load_meta, folder)
    assert not (folder / "executed").exists()


def test_the_fingerprint_is_of_tokens_masks_and_their_meaning(folder):
    before = fingerprint(load_meta(folder))
    change(folder, name="other", source="elsewhere")
    change_split(folder, "test", **ENTRY)
    assert fingerprint(load_meta(folder)) == before and len(before) == 16
    prints = {before}
    for entries in (dict(vocab_size=8), dict(source_sha256="6"), dict(tokenizer="byte")):
        prints.add(fingerprint(load_meta(folder) | entries))
    for sha256 in ("3", "4"):
        change_split(folder, "train", mask_sha256=sha256)
        prints.add(fingerprint(load_meta(folder)))
    assert len(prints) == 6


def test_a_changed_or_missing_mask_is_noticed(folder, monkeypatch):
    mask = bytes([0, 1] * 50)
    change_split(folder, "train", mask_sha256=hashlib.sha256(mask).hexdigest())
    assert "prepare.py mybook" in message(load_mask, folder, "train")
    (folder / "train.mask.bin").write_bytes(mask)
    assert load_mask(folder, "train").tolist() == [0, 1] * 50
    (folder / "train.mask.bin").write_bytes(mask[:-1])
    assert "mask is missing, or not the one" in message(load_mask, folder, "train")
    monkeypatch.setattr(token_files.files, "sha256_of", Mock(side_effect=PermissionError(13, "no")))
    assert "cannot read: no" in message(load_mask, folder, "train")
