"""What the tests of the data share: an empty folder to work in."""

import pytest

from helpers.texts import no_network, tiny_bpe
from tokens import downloads


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder, no source of text but what a test opens, a tiny tokenizer for GPT-2's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORPUS_DIR", raising=False)
    monkeypatch.setattr(downloads, "download", no_network)
    monkeypatch.setattr(downloads, "gpt2_tokenizer", tiny_bpe)
