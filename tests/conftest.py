"""What all tests share: the repo on the path, one thread (so that sums have one order), signals."""

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
    """Restore the signal handlers that train.main replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
