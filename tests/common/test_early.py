"""What a script says before it imports torch."""

import os
import subprocess
import sys

import pytest

from bench.ablation import settings as of_sweeps
from common import early
from common.configurator import keys
from common.files import ROOT
from parts.variant import VariantConfig
from prepare import PrepareConfig
from sampling import settings as of_samples
from training import settings as of_runs

MODEL = "parts/variant.py"
RUN = "training/settings.py"
SWEEP = "bench/ablation/settings.py"
SAMPLE = "sampling/settings.py"


@pytest.mark.parametrize(
    "sources, classes, former",
    [
        ([RUN, MODEL], [of_runs.TrainConfig, of_runs.NanoGPT, VariantConfig], of_runs.RENAMED),
        ([RUN, MODEL], [of_runs.TrainConfig, of_runs.NanoGPT, VariantConfig], of_runs.MOVED),
        ([SWEEP], [of_sweeps.AblateConfig], of_sweeps.MOVED),
        ([SAMPLE], [of_samples.SampleConfig], of_samples.MOVED),
        (["prepare.py"], [PrepareConfig], {"seed"}),
    ],
    ids=str,
)
def test_the_names_of_the_keys_are_read_from_the_source(sources, classes, former, monkeypatch):
    found = [early.keys_in(source) for source in sources]
    names = {name for fields, _ in found for name in fields}
    assert names == {*keys(*classes)}
    monkeypatch.setattr(
        sys, "argv", ["x", "--help=all", "--debug", *(f"--{key}" for key in former)]
    )
    early.check_keys(*sources)  # a former key is answered later, by its successor
    monkeypatch.setattr(sys, "argv", ["x", "word", "--no_such_key=1"])
    with pytest.raises(SystemExit) as ended:
        early.check_keys(*sources)
    assert ended.value.code == 2


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
