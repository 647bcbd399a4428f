"""Documents and texts in, three splits out."""

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

import prepare
from common.errors import Failure
from helpers.tables import ROWS, TEXTS, jsonl, write
from helpers.texts import tiny_bpe
from tokens import token_files, writing
from tokens.token_files import TokenFile, load_meta, load_split, load_tokenizer

pytestmark = pytest.mark.usefixtures("elsewhere")


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


@pytest.mark.parametrize("n, test", [(9_980, 499), (12_000, 500), (60_000, 600)])
def test_a_single_text_has_50_000_test_tokens_or_1_percent_never_5(n, test, monkeypatch):
    """Here 500."""
    assert writing.TEST_TOKENS == 50_000
    monkeypatch.setattr(writing, "TEST_TOKENS", 500)
    write("a.txt", "ab" * (n // 2))
    splits = prepare.prepare("x", input="a.txt")["splits"]
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
            assert splits[at] == "train"
            assert share * sizes[at] == pytest.approx(min(0.02 * size, 0.5 * sizes[at]))
        seen.add(bool(tail))
    assert seen == {True, False}
    expected = {0.009: "test", 0.01: "train", 0.05: "val", 0.149: "val", 0.15: "train"}
    assert {at: writing.split_of(at, 0.01) for at in expected} == expected
    sizes = {0.1: 5, 0.2: 5, 0.3: 90}
    assert writing.documents_from(sizes, 0, 0, least=5, most=50) == {0.1}  # it has just enough
    facts = writing.Survey(characters=2_000_000, sample="the king of rome " * 99)
    tokens = 2_000_000 * len(tiny_bpe().encode(facts.sample)) / len(facts.sample)
    assert writing.share_of_test(tiny_bpe(), facts) == pytest.approx(50_000 / tokens)


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
        (cut,) = {*texts} - {*parts["val"], *parts["train"]}
        assert cut.removesuffix(parts["test"][0]) in parts["train"]


def test_a_bpe_learns_only_from_what_is_in_train(monkeypatch):
    write("rows.jsonl", jsonl(ROWS))
    learned = []

    def train_bpe(texts, vocab_size, documents):
        learned.extend(texts)
        assert vocab_size == 300 and documents
        return tiny_bpe()

    monkeypatch.setattr(prepare, "train_bpe", train_bpe)
    meta = prepare.prepare("x", input="rows.jsonl", tokenizer="bpe", vocab_size=300)
    assert meta["tokenizer"] == "bpe" and set(learned) <= set(documents_of("train"))
    assert len(learned) > 300
    learned.clear()
    write("pairs.jsonl", jsonl([{"prompt": f"{i}?", "answer": f" {i}."} for i in range(100)]))
    prepare.prepare("pairs", input="pairs.jsonl", tokenizer="bpe", vocab_size=300)
    assert learned == [f"{i}? {i}." for i in range(50)]


def test_the_users_files_are_kept_and_ours_are_replaced():
    write("a.txt", "the king of rome\n" * 3)
    prepare.prepare("x", input="a.txt", tokenizer="byte")
    assert "test" in load_meta("data/x")["splits"]
    write("a.txt", "king")
    prepare.prepare("x", input="a.txt", tokenizer="byte")
    assert sorted(os.listdir("data/x")) == sorted(token_files.FILES[:4])  # ours is gone
    write("data/x/test.bin", "mine")
    prepare.prepare("x", input="a.txt", tokenizer="byte")
    assert Path("data/x/test.bin").read_text() == "mine"
    Path("data/x/meta.json").rename("data/x/meta.pkl")  # as another program has it
    prepare.prepare("x", input="a.txt", tokenizer="byte")
    kept = ["meta.pkl", "test.bin", *(f"{name}.old" for name in token_files.FILES[:3])]
    assert sorted(os.listdir("data/x")) == sorted([*token_files.FILES[:4], *kept])


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
