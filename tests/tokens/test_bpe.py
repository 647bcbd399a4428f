"""A trained byte-level BPE: the library's ids through tiktoken, for every text.

Run: python -m pytest tests/tokens/test_bpe.py"""

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.files import ROOT
from helpers.texts import message
from tokens.tokenizer import (
    END,
    GPT4,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encoding_of,
    learn,
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

MANY = settings(deadline=None, database=None, max_examples=300)
# Any text, and texts of what patterns cut at.
TEXTS = st.text() | st.lists(
    st.sampled_from(
        [*"aB1½你🙂'!. \t\n\r", "'s", "'LL", "  ", "\r\n", "12", "345", "\u2003", "\x1c"]
    )
).map("".join)


def test_vocabulary():
    ranks = TOKENIZER.encoding._mergeable_ranks
    assert sorted(ranks.values()) == list(range(1499)) and TOKENIZER.vocab_size == 1500
    assert all(bytes([byte]) in ranks for byte in range(256))
    assert TOKENIZER.start == 1499 and TOKENIZER.decode([1499]) == END
    assert 1499 not in TOKENIZER.encode(f"a{END}b"), "a text cannot end a document"
    assert len(TOKENIZER.encode(TEXT)) < len(TEXT.encode()) / 3
    assert len(merges(ranks)) == 1499 - 256, "each token is one merge"


def test_ids_are_those_of_the_library():
    """Of the tokenizer as it was trained, and of the file that an export writes."""
    trained = learn(iter([TEXT]), 1499)
    own = BPETokenizer(encoding_of(trained.get_vocab()))
    assert own.to_json() == TOKENIZER.to_json()
    other = (Path(json.__file__).parent / "decoder.py").read_text(encoding="utf-8")
    for text in (CODE, CHINESE, EMOJI, other):
        ids = TOKENIZER.encode(text).tolist()
        assert ids == trained.encode(text).ids == EXPORTED.encode(text).ids


@given(TEXTS)
@MANY
def test_ids_of_any_text(text):
    assert EXPORTED.encode(text).ids == TOKENIZER.encode(text).tolist()


@given(TEXTS)
@MANY
def test_round_trips(text):
    chars = [CharTokenizer("".join(sorted(set(text))))] if text else []
    for tokenizer in (TOKENIZER, ByteTokenizer(), *chars):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode()
        again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert again.encode(text).tolist() == ids.tolist()


@given(st.text(st.characters() | st.characters(categories=["Cs"])))
@MANY
def test_half_a_character_is_replaced(text):
    """As tiktoken does, so that no text of a JSON file or a command line stops it."""
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == expected


@given(st.binary())
@MANY
def test_any_ids_decode(data):
    ids = TOKENIZER.encode(data.decode("utf-8", "replace"))
    assert TOKENIZER.decode_bytes(ids) == data.decode("utf-8", "replace").encode()
    loose = [TOKENIZER.encoding._mergeable_ranks[bytes([byte])] for byte in data]
    assert TOKENIZER.decode_bytes(loose) == data


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


@pytest.mark.parametrize("size", [-5, 0, 256, 10**6 + 1, 10**15])
def test_sizes_that_are_refused(size):
    words = message(train_bpe, iter([TEXT]), size)
    assert f"vocab_size={size}" in words and "257 to 1,000,000" in words


def test_a_text_too_short():
    words = message(train_bpe, iter(["to be or not to be"]), 400)
    assert "too short" in words and "vocab_size=400" in words
    largest = int(words.split("choose ")[1].split()[0])
    assert train_bpe(iter(["to be or not to be"]), largest).vocab_size == largest
    assert "only 257 tokens" in message(train_bpe, iter([]), 258)
    nothing = train_bpe(iter([]), 257)
    assert nothing.vocab_size == 257 and nothing.decode(nothing.encode("né\n")) == "né\n"


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in message(train_bpe, iter([TEXT]), 300)


def test_a_run_of_spaces_that_tiktoken_gives_up_on():
    assert len(TOKENIZER.encode("x" + " " * 400_000)) > 1
    words = message(TOKENIZER.encode, "x" + " " * 1_500_000)
    assert "a million spaces" in words and "shorten" in words


def test_pattern_is_gpt_4s():
    """As tiktoken has it now, except for white space at the end of a text."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    source = Path(public.__file__).read_text(encoding="utf-8")
    theirs = source.split("def cl100k_base")[1].split('r"""')[1].split('"""')[0]
    import tiktoken

    ranks = TOKENIZER.encoding._mergeable_ranks
    reference = tiktoken.Encoding("x", pat_str=theirs, mergeable_ranks=ranks, special_tokens={})
    assert theirs != GPT4
    rng = random.Random(0)
    parts = [*"aB1½你🙂'!. \t\n\r", "'s", "'LL", "  ", "\r\n", "12", "345", "\u2003", "\x1c", "é"]
    for text in [CODE, *("".join(rng.choices(parts, k=20)) + "." for _ in range(2000))]:
        assert TOKENIZER.encode(text).tolist() == reference.encode_ordinary(text), repr(text)
