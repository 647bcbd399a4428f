"""What all tests share: the repo on the path, one thread (so that sums have one order), signals."""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
# An assert in these says both values when it fails, as in a test.
pytest.register_assert_rewrite("helpers", "formulas")
torch.set_num_threads(1)
sys.orig_argv[0] = "python"  # as if it were typed so
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores Ctrl-C
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup a terminal that closes


@pytest.fixture(autouse=True)
def own_state():
    """Forget earlier warnings, and restore the signal handlers that a StopRequest replaces and the
    step that helpers.runs.stop_after replaces."""
    import train
    from common import files

    files.warned.clear()
    train_step = train.train_step
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    train.train_step = train_step


@pytest.fixture(autouse=True, scope="session")
def short_end():
    """Runs draw an empty picture and write no sample: both take longer than their few steps. They
    begin in the root of the repo."""
    import sample
    from training import run_folder

    os.chdir(ROOT)  # not at the import, as pytest has still to find the paths of its arguments
    real = (run_folder.curves, sample.write_sample)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "curves", lambda *_: Figure((1, 1)))
        patch.setattr(sample, "write_sample", lambda *_: None)
        yield real


@pytest.fixture
def whole_end(short_end, monkeypatch):
    """Runs draw their picture and write their sample after all."""
    import sample
    from training import run_folder

    curves, write_sample = short_end
    monkeypatch.setattr(run_folder, "curves", curves)
    monkeypatch.setattr(sample, "write_sample", write_sample)


@pytest.fixture
def browser():
    """A Chromium without a window, where there is one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("there is no chromium here")
    with playwright.sync_playwright() as started:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=path, args=root)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A dataset of 6,000 characters: words of a small language, so that there is much to learn."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    words = ["the", "king", "of", "rome", "shall", "speak", "no", "more"]
    text = "".join(rng.choice(words) + rng.choice("    \n") for _ in range(1200))
    (folder / "words.txt").write_text(text, encoding="utf-8")
    from prepare import prepare

    prepare("words", input=str(folder / "words.txt"), tokenizer="char", data_dir=str(folder))
    return folder
