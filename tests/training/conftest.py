"""Runs in tmp_path, whose options are written in one string."""

import pytest
import torch

import train
from helpers.runs import arguments


@pytest.fixture
def start(data_dir, tmp_path):
    """start(name, options): train a run in tmp_path / name. Returns the exit status."""

    def start(name, options=""):
        return train.main(arguments(data_dir, tmp_path / name, *options.split())).status

    return start


@pytest.fixture
def resume(tmp_path):
    """resume(name, options): continue such a run. Returns the exit status."""

    def resume(name, options=""):
        torch.manual_seed(99)  # as in a new process, which does not go on with the numbers of this
        argv = ["--init_from=resume", f"--out_dir={tmp_path / name}", *options.split()]
        return train.main(argv).status

    return resume
