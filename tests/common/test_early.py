"""What a script says before it imports torch."""

import os
import subprocess
import sys

import pytest

from common import early
from common.commands import ROOT


def test_an_old_python_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit):
        early.need()
    assert "use Python 3.11 or later" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script, packages",
    [
        ("train.py", ["torch", "numpy", "safetensors", "tqdm"]),
        ("prepare.py", ["numpy", "tqdm"]),
        ("bench/report.py", early.ABLATE),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_interpreter(script, packages, tmp_path):
    """-S: without the folder of packages."""
    words = [sys.executable, "-S", script, "shakespeare_char"]
    with_some = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
    for package in packages:
        done = subprocess.run(words, **with_some, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"{package} is not installed (in {sys.executable})" in done.stderr
        (tmp_path / f"{package}.py").touch()
