"""The checkpoint of FORMAT 1 as a run folder, and the data that it was trained on."""

import pytest

from helpers.checkpoints import copy_run, prepare_words


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return prepare_words(tmp_path_factory.mktemp("data"))


@pytest.fixture
def out(tmp_path):
    return copy_run(tmp_path / "run")
