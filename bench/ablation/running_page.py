"""The report of a sweep while it runs: report.html and report.md, written again by a process of
their own, so that the sweep neither waits for them nor ends with it."""

import contextlib
import os
import subprocess
import sys
import time
from functools import partial

from common.files import ROOT

EVERY = 60  # seconds between two pages, and before the first


class RunningPage:
    """Writes the page of the sweep in a folder, as long as the context lasts."""

    def __init__(self, out):
        script = str(ROOT / "bench/report.py")
        self.command = [sys.executable, script, "--running", str(out)]
        self.process, self.began = None, time.monotonic()

    def renew(self):
        """Write the page again, unless that happened just now."""
        busy = self.process is not None and self.process.poll() is None
        if busy or time.monotonic() - self.began < EVERY:
            return
        self.began = time.monotonic()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, preexec_fn=partial(os.nice, 10), **quiet
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Stop writing, so that no page of a running sweep replaces the final report."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
