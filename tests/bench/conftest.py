"""What the tests of sweeps share: a stand-in for train.py, a driver that uses it."""

from pathlib import Path

import pytest

import ablate
from bench.ablation import costs, launch, report
from bench.ablation.sweep import Sweep
from helpers.ablation import STUB, arguments


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    path = tmp_path_factory.mktemp("stub") / "train.py"
    path.write_text(STUB)
    return str(path)


@pytest.fixture
def out(tmp_path):
    """The folder of the sweep, which is not there yet."""
    return tmp_path / "out"


@pytest.fixture
def quick(monkeypatch):
    """A report that these tests do not read, and short measurements."""

    def write(outs):
        (Path(outs[0]) / "report.md").write_text("report")
        return Path(outs[0]) / "report.md"

    def not_measured(job, *_):
        return {"extrapolation": {}, "sample": None}

    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(report, "terminal", lambda outs: "the table")
    monkeypatch.setattr(costs, "ROUNDS", 1)
    monkeypatch.setattr(costs, "why_disturbed", lambda *args: "")
    monkeypatch.setattr(costs, "wait_until_quiet", lambda *args: True)
    monkeypatch.setattr(launch, "measure_trained", not_measured)
    monkeypatch.setattr(launch, "POLL", 0.02)


@pytest.fixture
def planned(data_dir, out):
    """planned(*options): a small sweep that is ready to run in `out`."""
    return lambda *options: Sweep(arguments(data_dir, out, *options), "")


@pytest.fixture
def drive(data_dir, out, quick, stub):
    """drive(*options): the exit status of a small sweep in `out`, whose runs are the stand-in's."""
    return lambda *options, trainer=stub: ablate.main(arguments(data_dir, out, *options), trainer)
