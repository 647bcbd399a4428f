"""The faults from outside, in short: what bench/faults.py does to small runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def faults(root, *more):
    return subprocess.run(
        [sys.executable, "bench/faults.py", "--short", *more],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_faults_from_outside():
    """The short form of `python bench/faults.py`."""
    done = faults(ROOT)
    assert done.returncode == 0 and re.search(
        r"^\d\d passed, 0 failed$", done.stdout, re.MULTILINE
    ), done.stdout + done.stderr


@pytest.mark.slow
def test_the_faults_notice_a_checkpoint_that_is_not_compared(tmp_path):
    """A copy of the repo that trusts every checksum: the lab sees that a flipped bit is loaded."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py"), *ROOT.glob("bench/*/*.py")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    path = tmp_path / "weights" / "checkpoint.py"
    text = path.read_text()
    assert text.count("if actual != expected:") == 1
    path.write_text(text.replace("if actual != expected:", "if False:"))
    done = faults(tmp_path, "--only=damage")
    assert (
        done.returncode == 1
        and "FAILED a flipped bit in the latest checkpoint: exit 0, not 2" in done.stdout
    ), done.stdout + done.stderr
    assert "3 passed, 1 failed" in done.stdout
