"""bench/speed.py: measurements are stored with their facts; bench/gpu.sh. No time is checked."""

import json
import os
import shlex
import stat
import subprocess

import numpy as np
import pytest
import speed
import torch

from bench.timing import page, results
from bench.timing import train as train_step
from common.configurator import build, load
from common.files import ROOT
from parts.architectures import configure
from training.optim import AdamW, Muon
from training.settings import read_config


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A function that runs bench/speed.py and returns its line of speed.jsonl and the page."""
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path / "results"))
    threads = torch.get_num_threads()

    def measure(*argv):
        speed.main(list(argv))
        folder = tmp_path / "results"
        line = json.loads((folder / "speed.jsonl").read_text().splitlines()[-1])
        return line, (folder / "speed.md").read_text()

    yield measure
    torch.set_num_threads(threads)


def checked(line, text):
    """{what: row} of a measurement. Its facts and rows are on the page, each ratio in its
    interval."""
    assert line["command"] in text and str(line["commit"]) in text and line["hardware"] in text
    for row in line["rows"]:
        assert f"\n| {row['what']} |" in text
        for value in row.values():
            if isinstance(value, dict):
                assert 0 < value["low"] <= value["ratio"] <= value["high"]
    return {row["what"]: row for row in line["rows"]}


def test_optimizers_are_timed_at_both_shapes(measured, monkeypatch):
    for shape in "SM":
        monkeypatch.setitem(train_step.SHAPES, shape, (2, 2, 64, 16, 3, 65, 8))
    line, text = measured("optimizer", "--device=cpu", "--steps=3")
    (row,) = line["rows"]
    assert row["step with Muon / with AdamW"]["ratio"] > 0 and row["Muon, ms"] > row["AdamW, ms"]
    assert "**S, 1 thread on" in text and "**M, 1 thread on" in text


def test_each_ratio_of_training_steps_has_its_direction(measured, monkeypatch):
    """Seconds made up: ours takes half of theirs, compiled, and 48 tokens in 0.1 s."""
    monkeypatch.setitem(train_step.SHAPES, "S", (2, 2, 64, 16, 3, 65, 8))
    made = {"our": (0.4, 0.1), "transformers": (0.3, 0.2)}

    def race(sides, config, dtypes):
        times = {}
        for name in sides:
            eager, compiled = made[name.split()[0]]
            times[name, "eager bfloat16"] = np.full(5, eager)
            times[name, "compiled bfloat16"] = np.full(5, compiled)
        return times, dict.fromkeys(times, 3000000000.0)

    monkeypatch.setattr(train_step, "race", race)
    monkeypatch.setattr(train_step, "peak_flops", lambda runtime: 1e9)
    pytest.importorskip("transformers")
    line, text = measured("train", "--device=cpu", "--shape=S")
    row = checked(line, text)["our GPT-2"]
    assert row["times transformers"]["ratio"] == 2 and row["compiled bfloat16, ms"] == 100
    c = configure({"model": "gpt2", "arch": "gpt2"} | vars(train_step.shape_of("S")))
    share = train_step.training_flops_per_token(c, 16) * 48 / 0.1 / 1e9
    cells = f"| 480 | 2.00 (2.00 to 2.00) | {share:.1%} | 3.00 | 400 | 100 |"
    assert f"| our GPT-2 | {row['M parameters']:.2f} {cells}" in text


def test_the_shape_of_the_answer_is_timed_with_muon(measured, monkeypatch):
    """Our models alone, after the shape S."""
    for shape in "SA":
        monkeypatch.setitem(train_step.SHAPES, shape, (2, 2, 64, 16, 3, 65, 8))
    made, side = [], train_step.Side
    monkeypatch.setattr(train_step, "Side", lambda *words: made.append(side(*words)) or made[-1])
    line, text = measured("train", "--device=cpu", "--steps=2", "--compile=False")
    assert checked(line, text).keys() == {"our GPT-2", "our LLaMA"}
    assert "**A, 1 thread on" in text and "**S, 1 thread on" in text
    assert [type(each.optimizers[0]) for each in (made[0], made[-1])] == [AdamW, Muon]


# ---------------------------------------------------------------- the page


def test_the_page_has_the_newest_measurement_of_each_machine(tmp_path, monkeypatch):
    """Not measured on a GPU, until it is; a measurement on a CPU is none on a GPU."""
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    assert page.page().count("not measured (`") == 4
    facts = {"hardware": "a chip", "torch": "2", "git_commit": "c"}
    monkeypatch.setattr(results, "versions", lambda: facts)
    monkeypatch.setattr(results, "cpu_name", lambda: "a CPU")
    for device, median in (("cpu", 3.0), ("cuda", 5.0), ("cuda:0", 7.0)):
        rows = [{"what": "T = 512", "kernel, ms": None, "ratio": results.ratio([median, median])}]
        measured = {"name": "", "about": "Attention.", "rows": rows}
        command = results.command_text("speed.py", ["train", "--nanogpt=/home/me"])
        results.record("train", measured, device, command, threads=1)
    text = page.page()
    assert "|  | kernel, ms | ratio |" in text and "5.00" not in text
    assert "**a chip** | | |\n| T = 512 | not measured | 7.00 (7.00 to 7.00) |" in text
    assert "**1 thread on a CPU** | | |\n| T = 512 | not measured | 3.00 (3.00 to 3.00) |" in text
    assert "gpu.sh train" not in text and "not measured (`" in text
    assert "`python bench/speed.py train --nanogpt=PATH`" in text


def test_the_page_in_the_repo_is_the_one_of_its_rows(monkeypatch):
    monkeypatch.delenv("BENCH_RESULTS", raising=False)
    stored = (ROOT / "bench/results/speed.md").read_text(encoding="utf-8")
    assert stored == page.page(), "run: python bench/speed.py page"


# ---------------------------------------------------------------- bench/gpu.sh


def test_each_command_of_gpu_sh_is_accepted(tmp_path):
    """In its tiny form, whose results are not the repo's. A stand-in for python writes down its
    arguments."""
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(
        '#!/usr/bin/env bash\nprintf "%q " "$@" >>"$LOG"; echo >>"$LOG"\n'
        'echo "$BENCH_RESULTS" >"$LOG.results"\n'
    )
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    names = {"PYTHON": stub, "OUT": tmp_path / "out", "DATA": tmp_path / "data", "LOG": log}
    environment = os.environ | {name: str(path) for name, path in names.items()} | {"TINY": "1"}
    command = ["bash", str(ROOT / "bench/gpu.sh")]
    subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    commands = [shlex.split(line) for line in log.read_text().splitlines()]
    assert (tmp_path / "log.results").read_text() == f"{tmp_path / 'out' / 'results'}\n"
    trained = [words[words.index("train.py") + 1 :] for words in commands if "train.py" in words]
    assert len(trained) == 6 and all(read_config(argv, "") for argv in trained)
    timed = [words[1:] for words in commands if words[0] == "bench/speed.py"]
    assert [argv[0] for argv in timed] == ["train", "page"]
    build(train_step.SpeedConfig, load(timed[0], [train_step.SpeedConfig], "")[0])
