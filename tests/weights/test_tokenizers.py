"""Tokenizers in other formats: Hugging Face's tokenizer.json, read by its own library."""

import json
import random
import re

import pytest
import regex as unicode_re
from tokenizers import Tokenizer, pre_tokenizers

from helpers.bpe import WORDS, bpe
from helpers.formats import refused, small_model
from tokens.tokenizer import GPT4, ByteTokenizer, CharTokenizer, tokenizer_from_json, train_bpe
from weights import hf, tokenizers
from weights.export import to_hf, write_folder

transformers = pytest.importorskip("transformers")

BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
TEXTS = ["the king of Rome, 1999!", "  two   spaces\n\n \nlines \n", "don't I'LL we've", ""]
TEXTS += ["Zoë 你好 🙂\t\r\n", " 1 22  333", "a\nb", "x \n", "<|endoftext|>"]
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("".join(sorted({*"".join(TEXTS), "\\", "\0", "\x7f"}))),
    "bpe": bpe(),
    "smollm": bpe(tokenizers.SMOLLM, {"<|pad|>": 0, "<|endoftext|>": 1}),
    "trained": train_bpe(iter(TEXTS + WORDS), 320, documents=True),
    "no merges": bpe(GPT4, merges=0),
}


def random_texts(count, pieces, length):
    rng = random.Random(0)
    return ["".join(rng.choice(pieces) for _ in range(length)) for _ in range(count)]


def saved(folder, made, tokenizer):
    config, tensors = to_hf("llama", vars(made.config), made.state_dict())
    write_folder(folder, config, tensors, tokenizer)
    return folder


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_hugging_face_gives_the_same_ids_and_text(kind, tmp_path):
    """For every text; the byte-level ones come back as they were."""
    tokenizer = TOKENIZERS[kind]
    folder = saved(tmp_path / "hf", small_model("llama", tokenizer.vocab_size), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == tokenizer.vocab_size
    special = "<|endoftext|>" in theirs.get_vocab()
    pieces = ["ab", "king", " ", "  ", "\n", "1", "é", "'s", "!", "\t"]
    for text in TEXTS + random_texts(30, pieces, 40):
        if set(text) - set(getattr(tokenizer, "chars", text)) or special and "<|" in text:
            continue
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == text
    if tokenizer.to_json()["kind"] == "bpe":
        back = hf.load_tokenizer(str(folder)).to_json()
        assert back == tokenizer.to_json() | {"name": "imported"}
        content = json.loads((folder / "tokenizer.json").read_text())
        del content["model"]["type"]  # GPT-2's own does not say it
        assert tokenizers.from_tokenizer_json(content, "x").items() <= back.items()
        assert theirs.eos_token_id == tokenizer.start == tokenizer.vocab_size - 1


@pytest.mark.parametrize("pattern", [BLOOM, r"\p{N}", GPT4], ids=["BLOOM", "digits", "GPT-4"])
def test_what_a_pattern_leaves_out_is_not_lost(pattern):
    """Their library keeps what stands between the pieces, tiktoken would drop it."""
    content = tokenizers.to_tokenizer_json(bpe(pattern).to_json())
    theirs = Tokenizer.from_str(json.dumps(content))
    data = tokenizers.from_tokenizer_json(content, "x")
    own = tokenizer_from_json(data)
    for text in TEXTS[:-1] + ["Hello, world. Yes!\nNew line...\n", "in 1999, yes"]:
        assert own.encode(text).tolist() == theirs.encode(text).ids
        assert own.decode(own.encode(text)) == text
    assert tokenizers.from_tokenizer_json(tokenizers.to_tokenizer_json(data), "x") == data


def test_a_run_of_spaces_before_a_digit():
    """SmolLM's pattern is that of its tokenizer.json, each digit split off first."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference = pre_tokenizers.Sequence([digits, byte_level])
    for text in TEXTS + random_texts(300, ["a", " ", "  ", "\n", "7", "é", "'s", "!", "½"], 12):
        expected = [piece for piece, _ in reference.pre_tokenize_str(text)]
        pieces = unicode_re.findall(tokenizers.SMOLLM, text)
        assert [tokenizers.spelled(piece.encode()) for piece in pieces] == expected, repr(text)


def test_weights_on_the_tokens_of_another_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizers.to_tokenizer_json(bpe().to_json())))
    assert hf.same_tokens(str(tmp_path), bpe()) is True
    for other in (bpe(special={"<|end|>": 0}, merges=60), bpe(merges=5), CharTokenizer("abc")):
        assert hf.same_tokens(str(tmp_path), other) is False
    path.write_text("{}")
    assert hf.same_tokens(str(tmp_path), bpe()) is None


NOT_BPE = "cannot read this as byte-level BPE"
SENTENCEPIECE = {"model": {"type": "BPE", "byte_fallback": True}}


def steps(change):
    """Replace the steps before the merges, a Split and ByteLevel, by change(both)."""

    def damage(content):
        before = content["pre_tokenizer"]
        before["pretokenizers"] = change(*before["pretokenizers"])

    return damage


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda c: c["model"]["vocab"].update(king=999), "gaps or duplicates"),
        (lambda c: c["model"]["vocab"].update({"!": 1}), "gaps or duplicates"),
        (lambda c: c["model"]["merges"].reverse(), "not in the order of its ids"),
        (lambda c: c["model"].update(merges=[[1, 2]]), NOT_BPE),
        (lambda c: c.update(pre_tokenizer=None), NOT_BPE),
        (lambda c: c.update(added_tokens=5), NOT_BPE),
        (lambda c: c.update(normalizer={"type": "NFC"}), NOT_BPE),
        (lambda c: c.update(SENTENCEPIECE, normalizer={"type": "NFC"}), "changes the text: NFC"),
        (steps(lambda split, level: [split, split, level]), NOT_BPE),
        (steps(lambda split, level: [split | {"behavior": "Removed"}, level]), NOT_BPE),
        (steps(lambda split, level: [split | {"pattern": {"String": " "}}, level]), NOT_BPE),
    ],
)
def test_a_tokenizer_that_is_not_ours(damage, words, tmp_path):
    content = tokenizers.to_tokenizer_json(bpe().to_json())
    damage(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    message = refused(hf.load_tokenizer, str(tmp_path))
    assert re.search(words, message) and "tokenizer.json" in message


def test_more_tokens_than_the_model_has(tmp_path):
    tokenizer = bpe()
    folder = saved(tmp_path / "hf", small_model("llama", tokenizer.vocab_size - 1), tokenizer)
    message = refused(hf.open_pretrained, str(folder))
    counts = f"{tokenizer.vocab_size} tokens, the model {tokenizer.vocab_size - 1}"
    assert counts in message and str(folder) in message
