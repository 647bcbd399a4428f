"""Tokenizers and texts that need no network."""

import base64
import signal
from pathlib import Path

import pytest

from common.errors import UserError
from tokens import downloads
from tokens.token_files import load_meta, load_split, load_tokenizer
from tokens.tokenizer import GPT2, tokenizer_from_json


def tiny_bpe():
    """A real BPE tokenizer of 256 bytes, four merges and <|endoftext|>, needing no download."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b" th", b"  ", b"\n\n"]
    return tokenizer_from_json(
        dict(
            kind="bpe",
            name="tiny",
            pat_str=GPT2,
            special_tokens={"<|endoftext|>": 260},
            ranks=[base64.b64encode(t).decode() for t in tokens],
        )
    )


def message(function, *args):
    """The UserError of a call, which must be one line and come within a minute."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
    signal.alarm(60)
    try:
        with pytest.raises(UserError) as caught:
            function(*args)
    finally:
        signal.alarm(0)
    assert "\n" not in str(caught.value) and caught.value.status == 2
    return str(caught.value)


def no_network(url, sha256):
    raise OSError("example.org cannot be reached")


def gpt2_or_skip():
    try:
        return downloads.gpt2_tokenizer()
    except UserError as error:
        pytest.skip(str(error))


def decoded(name):
    """The texts of the splits of a dataset in data/."""
    folder = Path("data", name)
    tokenizer, splits = load_tokenizer(folder, load_meta(folder)), load_meta(folder)["splits"]
    return [tokenizer.decode(load_split(folder, split, 0)) for split in splits]
