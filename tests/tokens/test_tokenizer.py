"""Tokenizers, training a BPE, and encoding on all cores."""

import itertools
import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.commands import ROOT
from common.errors import UserError
from helpers.bpe import bpe
from helpers.texts import message, tiny_bpe
from tokens import tokenizer as tokenizer_module
from tokens.tokenizer import (
    END,
    GPT2,
    GPT4,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encode_batches,
    learn,
    safe_cut,
    tokenizer_from_json,
    train_bpe,
)
from weights.tokenizers import merges, to_tokenizer_json

tokenizers = pytest.importorskip("tokenizers")

CHINESE = "他说：“你好。”\n再见！\n\n 好。 \n好。世界，123４５６！\n" * 3
EMOJI = "🙂🙂 👍🏽👩‍👩‍👧 ok🙂\n\n\t🏴‍☠️ e\u0301 ½Ⅷ٣ don't DON'T it'ſ  \r\n  1234567 \n  "
CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.py")))
CODE = CODE.replace(END, "END")  # which Hugging Face would not read as text
TEXT = CODE + CHINESE + EMOJI
TOKENIZER = train_bpe(iter([TEXT]), 1500)
EXPORTED = tokenizers.Tokenizer.from_str(json.dumps(to_tokenizer_json(TOKENIZER.to_json())))
PARTS = [*"aB1½你🙂'!. \t\n\r_", "'s", "'LL", "  ", "\r\n", "12", "345", "\u2003", "\x1c", "\x85"]

MANY = settings(deadline=None, database=None, max_examples=300)
TEXTS = st.text() | st.lists(st.sampled_from(PARTS)).map("".join)  # and what patterns cut at


# ---------------------------------------------------------------- the interface


FIXED = {"byte": ByteTokenizer(), "tiny": tiny_bpe(), "trained": TOKENIZER}
STORED = {
    kind: tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    for kind, tokenizer in FIXED.items()
}


@pytest.mark.parametrize("kind", ["char", *FIXED])
@given(TEXTS)
@MANY
def test_round_trips(kind, text):
    text += "First Citizen:\nZwölf Boxkämpfer, 你好, 🙂 don't  \n\n\tstop. "
    tokenizer = FIXED.get(kind) or CharTokenizer("".join(sorted(set(text))))
    stored = STORED.get(kind) or tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    ids = tokenizer.encode(text)
    assert ids.dtype.kind == "i" and ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode_bytes(ids.astype(np.uint16)) == text.encode()
    assert stored.vocab_size == tokenizer.vocab_size and (stored.encode(text) == ids).all()
    assert stored.to_json() == tokenizer.to_json()
    for key in ("start", "end", "stops"):
        assert getattr(stored, key) == getattr(tokenizer, key)
    assert tokenizer.encode("").size == 0 and tokenizer.decode([]) == ""


def test_ids_and_starts():
    assert CharTokenizer("\nab").encode("b\na").tolist() == [2, 0, 1]
    assert [CharTokenizer(chars).start for chars in ("\nab", "ab", "\tx\n")] == [0, 0, 2]
    assert ByteTokenizer().encode("é\n").tolist() == [0xC3, 0xA9, 10] and ByteTokenizer.start == 10
    tokenizer = tiny_bpe()
    assert tokenizer.encode(" the th").tolist() == [257, 101, 257]
    assert tokenizer.start == 260 and tokenizer.vocab_size == 261
    assert 260 not in tokenizer.encode(END), "a text cannot end a document"


# Beyond, far beyond, below the greatest known, twice 'a'; not even a character.
@pytest.mark.parametrize("letter", ["é", "🙂", "A", "Å", "\udc80"])
def test_an_unknown_character_is_shown_among_its_neighbours(letter):
    words = message(CharTokenizer("\nabc").encode, "ab" * 30 + letter + "c" * 30)
    assert "documents need it" in message(CharTokenizer("ab").encode, "ab\n\n")
    around = "ab" * 10 + letter + "c" * 19
    assert f"{letter!r} is not" in words and f"(in {around!r})" in words and r"'\nabc'" in words


CHARS, BPE = {"kind": "char", "chars": "\nab"}, tiny_bpe().to_json()


@pytest.mark.parametrize(
    "data",
    [
        *(None, [], {}, {"kind": []}, {"kind": "sentencepiece"}, {"kind": "char"}),
        *(CHARS | {"chars": value} for value in ("", "aa", 7, ["a", "b"], "a\ud800")),
        *(BPE | {"pat_str": value} for value in (5, "(")),
        *(BPE | {"ranks": value} for value in ({"YQ==": 0}, [], [5], ["?"], None)),
        BPE | {"ranks": BPE["ranks"][:5] + BPE["ranks"][:255]},  # some twice
        BPE | {"ranks": ["", *BPE["ranks"][:259]]},
        *(BPE | {"special_tokens": {END: i}} for i in ("260", 261, 10**12, 97, -1, True)),
        *(BPE | {"special_tokens": value} for value in ([END], {"a": 260, "b": 260})),
    ],
)
def test_a_garbled_tokenizer_is_one_line(data):
    text = message(tokenizer_from_json, data)
    assert "garbled" in text and "(tokenizer.json)" in text


@given(st.text(st.characters() | st.characters(categories=["Cs"])))
@MANY
def test_half_a_character_is_replaced(text):
    """As tiktoken does, so that no text of a JSON file or a command line stops it."""
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == expected


def test_a_run_of_spaces_that_tiktoken_gives_up_on():
    assert len(TOKENIZER.encode("x" + " " * 400_000)) > 1
    words = message(TOKENIZER.encode, "x" + " " * 1_500_000)
    assert "a million spaces" in words and "shorten" in words


# ---------------------------------------------------------------- training a BPE


def test_the_trained_vocabulary():
    ranks = TOKENIZER.encoding._mergeable_ranks
    assert sorted(ranks.values()) == list(range(1499)) and TOKENIZER.vocab_size == 1500
    assert all(bytes([byte]) in ranks for byte in range(256))
    assert TOKENIZER.start == 1499 and TOKENIZER.decode([1499]) == END
    assert 1499 not in TOKENIZER.encode(f"a{END}b")
    assert len(TOKENIZER.encode(TEXT)) < len(TEXT.encode()) / 3
    assert len(merges(ranks)) == 1499 - 256, "each token is one merge"


def test_ids_are_those_of_the_library():
    """Of the tokenizer as it was trained, and of the file that an export writes."""
    trained = learn(iter([TEXT]), 1499)
    other = (Path(json.__file__).parent / "decoder.py").read_text(encoding="utf-8")
    for text in (CODE, CHINESE, EMOJI, other):
        ids = TOKENIZER.encode(text).tolist()
        assert ids == trained.encode(text).ids == EXPORTED.encode(text).ids


@given(TEXTS)
@MANY
def test_ids_of_any_text(text):
    assert EXPORTED.encode(text).ids == TOKENIZER.encode(text).tolist()


@pytest.mark.parametrize("size", [1, 1000, 70_000])
def test_the_same_text_gives_the_same_tokens(size):
    """However it is cut."""
    cut = (TEXT[at : at + size] for at in range(0, len(TEXT), size))
    assert train_bpe(cut, 1500).to_json() == TOKENIZER.to_json()


def test_documents_do_not_run_into_each_other():
    tokens = train_bpe(iter(["ab"] * 9), 258, documents=True)
    assert tokens.decode([256]) == "ab"
    with pytest.raises(UserError, match="yields only 258 tokens"):
        train_bpe(iter(["ab"] * 9), 259, documents=True)
    assert train_bpe(iter(["ab"] * 9), 259).decode([257]) == "abab"


def test_the_pattern_is_gpt_4s():
    """As tiktoken has it now, except for white space at the end of a text."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    source = Path(public.__file__).read_text(encoding="utf-8")
    theirs = source.split("def cl100k_base")[1].split('r"""')[1].split('"""')[0]
    ranks = TOKENIZER.encoding._mergeable_ranks
    reference = tiktoken.Encoding("x", pat_str=theirs, mergeable_ranks=ranks, special_tokens={})
    rng = random.Random(0)
    for text in [CODE, *("".join(rng.choices(PARTS, k=20)) + "." for _ in range(2000))]:
        assert TOKENIZER.encode(text).tolist() == reference.encode_ordinary(text), repr(text)


# ---------------------------------------------------------------- encoding on all cores

LINES = "First Citizen:\nDon't 1234567 times!\n\nZwölf;\r\n  x = 12 \n\t你好。\n再见 🙂\n" * 40


def with_joints(pattern):
    """A small BPE with tokens for what some patterns keep in one piece."""
    ranks = {**bpe(pattern).encoding._mergeable_ranks}
    for piece in ("!\n", "。\n", "\n\n", " \n", "\r\n", "123", "12", "11", "  ", "'s", "\n "):
        for end in range(2, len(piece.encode()) + 1):
            ranks.setdefault(piece.encode()[:end], len(ranks))
    made = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return BPETokenizer(made)


PATTERNS = {"gpt-2": GPT2, "dbrx": GPT4}
TOKENIZERS = {name: with_joints(pattern) for name, pattern in PATTERNS.items()}
TOKENIZERS |= {"byte": ByteTokenizer(), "char": CharTokenizer("".join(sorted({*LINES})))}


@pytest.mark.parametrize("piece", [1, 50, 1 << 18])
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_one_text_in_pieces(kind, size, piece, monkeypatch):
    """Its ids and bytes are those of the whole, whatever is read or encoded at a time."""
    monkeypatch.setattr(tokenizer_module, "PIECE", piece)
    tokenizer = TOKENIZERS[kind]
    texts = [LINES[at : at + size] for at in range(0, len(LINES), size)]
    results = [*encode_batches(tokenizer, iter(texts), documents=False)]
    assert np.concatenate([ids for ids, _ in results]).tolist() == tokenizer.encode(LINES).tolist()
    assert sum(count for _, count in results) == len(LINES.encode())
    assert (len(results) == 1) == (piece > 1000)


@given(
    st.lists(st.sampled_from(PARTS)).map("".join)
    | st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([*PATTERNS]),
)
@example("ab 12\n\n x!\nA", "dbrx")
@settings(deadline=None, database=None, max_examples=1000)
def test_a_safe_cut_changes_no_piece(text, name):
    """What stands before the cut is split without a look at what follows, and the other way."""
    tokenizer = TOKENIZERS[name]
    cut = safe_cut(text)
    parts = [*tokenizer.encode(text[:cut]), *tokenizer.encode(text[cut:])]
    assert parts == tokenizer.encode(text).tolist()


def test_a_stretch_that_cannot_be_cut_takes_linear_time(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "PIECE", 64)
    searched = []
    monkeypatch.setattr(tokenizer_module, "safe_cut", lambda text: searched.append(len(text)) or 0)
    results = encode_batches(TOKENIZERS["dbrx"], iter("!" * 10_000), documents=False)
    assert sum(len(ids) for ids, _ in results) == 10_000
    assert 10_000 < sum(searched) < 4 * 10_000


def test_documents_are_encoded_one_by_one_in_order():
    documents = ["ab", "", "c d", END, *LINES.splitlines(keepends=True)] * 3
    results = [*encode_batches(TOKENIZER, iter(documents), documents=True)]
    assert [TOKENIZER.decode(ids) for ids, _ in results] == documents
    assert [count for _, count in results] == [len(text.encode()) for text in documents]
    assert TOKENIZER.start not in np.concatenate([ids for ids, _ in results])
    assert [*encode_batches(TOKENIZER, iter([]), documents=True)] == []


@pytest.mark.parametrize("documents", [True, False])
def test_few_texts_are_read_ahead_and_errors_are_raised(documents, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "PIECE", 10)
    monkeypatch.setattr(tokenizer_module.os, "cpu_count", lambda: 2)
    numbers = itertools.count()
    endless = (f"some words {n}\n" for n in numbers)
    results = encode_batches(TOKENIZERS["dbrx"], endless, documents)
    for _ in range(50):
        next(results)
    assert next(numbers) < 50 + 10
    results.close()  # ends the threads though the texts have no end
    assert not [t for t in threading.enumerate() if "ThreadPoolExecutor" in t.name]
    with pytest.raises(UserError, match="not in the vocabulary"):
        [*encode_batches(CharTokenizer("abc"), iter(["abc", "ab\N{SNOWMAN}"]), documents)]
