"""What all tests share: the repo's root on the path, one thread, so that sums have one order, and the signals' own handlers."""

import signal
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "bench"),
    str(ROOT / "tests"),
    *map(str, (ROOT / "tests").glob("[a-z]*/")),
]
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_signals():
    """train.main takes over the signals; give them back."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
        signal.signal(number, handler)
