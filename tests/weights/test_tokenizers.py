"""Tokenizers in other formats: Hugging Face's tokenizer.json, read by its own library."""

import json
import random

import pytest

from helpers.bpe import WORDS, bpe
from helpers.formats import small_model
from helpers.texts import message
from tokens.tokenizer import GPT4, ByteTokenizer, CharTokenizer, train_bpe
from weights import hf, tokenizers
from weights.export import to_hf, write_folder

transformers = pytest.importorskip("transformers")

TEXTS = ["the king of Rome, 1999!", "  two   spaces\n\n \nlines \n", "don't I'LL we've", ""]
TEXTS += ["Zoë 你好 🙂\t\r\n", " 1 22  333", "a\nb", "x \n", "<|endoftext|>"]
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("".join(sorted({*"".join(TEXTS), "\\", "\0", "\x7f"}))),
    "bpe": bpe(),
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
    back = hf.load_tokenizer(str(folder))
    if tokenizer.to_json()["kind"] == "bpe":
        assert theirs.eos_token_id == tokenizer.start == tokenizer.vocab_size - 1
        assert (back.stops, back.bos) == (tokenizer.stops, None)
        content = json.loads((folder / "tokenizer.json").read_text())
        del content["model"]["type"]  # GPT-2's own does not say it
        (folder / "tokenizer.json").write_text(json.dumps(content))
        back = hf.load_tokenizer(str(folder))
    assert back.encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).tolist()


def test_weights_on_the_tokens_of_another_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizers.to_tokenizer_json(bpe().to_json())))
    assert hf.agrees_with(str(tmp_path), bpe()) is True
    for other in (bpe(special={"<|end|>": 0}, merges=60), bpe(merges=5), CharTokenizer("abc")):
        assert hf.agrees_with(str(tmp_path), other) is False
    path.write_text("{}")
    assert hf.agrees_with(str(tmp_path), bpe()) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c["model"].update(merges=[[1, 2]]),
        lambda c: c.update(added_tokens=5),
        lambda c: c.update(model=None),
        lambda c: c.update(normalizer={"type": "?"}),
    ],
)
def test_a_garbled_tokenizer_json(damage, tmp_path):
    content = tokenizers.to_tokenizer_json(bpe().to_json())
    damage(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    said = message(hf.load_tokenizer, str(tmp_path))
    assert "garbled" in said and "tokenizer.json" in said


def test_more_tokens_than_the_model_has(tmp_path):
    tokenizer = bpe()
    folder = saved(tmp_path / "hf", small_model("llama", tokenizer.vocab_size - 1), tokenizer)
    said = message(hf.open_pretrained, str(folder))
    counts = f"{tokenizer.vocab_size} tokens, the model {tokenizer.vocab_size - 1}"
    assert counts in said and str(folder) in said
