"""What the tests of sweeps share: a stand-in for train.py, short measurements."""

from pathlib import Path

import pytest

from bench.ablation import costs, launch, report
from helpers.ablation import STUB


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    path = tmp_path_factory.mktemp("stub") / "train.py"
    path.write_text(STUB)
    return str(path)


@pytest.fixture
def quick(monkeypatch):
    """A report that these tests do not read, and short measurements."""

    def write(outs):
        (Path(outs[0]) / "report.md").write_text("report")
        return Path(outs[0]) / "report.html"

    def not_measured(job, *_):
        return {"extrapolation": {}, "sample": None}

    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(report, "terminal", lambda outs: "the table")
    monkeypatch.setattr(costs, "ROUNDS", 1)
    monkeypatch.setattr(costs, "why_disturbed", lambda *args: "")
    monkeypatch.setattr(costs, "wait_until_quiet", lambda *args: True)
    monkeypatch.setattr(launch, "measure_trained", not_measured)
    monkeypatch.setattr(launch, "POLL", 0.02)
