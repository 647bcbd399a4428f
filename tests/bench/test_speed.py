"""bench/speed.py: every measurement runs in a tiny form, is stored with its facts, and is on the
page; bench/gpu.sh goes on where it stopped. No times are asserted."""

import json
import os
import shlex
import stat
import subprocess

import pytest
import speed
import torch

from bench.timing import attention, page, results
from bench.timing import train as train_step
from common.files import ROOT


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
        assert f"| {row['what']} | {row['value']} |" in text
        if row["ratio"]:
            assert row["low"] <= row["ratio"] <= row["high"]
    return {row["what"]: row for row in line["rows"]}


def test_optimizers_are_timed_at_both_shapes(measured, monkeypatch):
    for shape in "SM":
        monkeypatch.setitem(train_step.SHAPES, shape, (2, 2, 64, 16, 3, 65, 8))
    rows = checked(*measured("optimizer", "--device=cpu", "--steps=3"))
    assert len(rows) == 4 and all(row["ratio"] > 0 for row in rows.values())


def test_each_ratio_of_training_steps_has_its_direction(measured, monkeypatch):
    """Seconds made up: ours takes half of theirs, compiled, and 48 tokens in 0.1 s."""
    monkeypatch.setitem(train_step.SHAPES, "S", (2, 2, 64, 16, 3, 65, 8))
    made = {"our": (0.4, 0.1), "transformers": (0.3, 0.2)}

    def race(sides, config):
        times = {}
        for name in sides:
            eager, compiled = made[name.split()[0]]
            times[name, "eager"] = torch.full((5,), eager, dtype=torch.float64).numpy()
            times[name, "compiled"] = torch.full((5,), compiled, dtype=torch.float64).numpy()
        return times, dict.fromkeys(times, 3000000000.0)

    monkeypatch.setattr(train_step, "race", race)
    monkeypatch.setattr(train_step, "peak_flops", lambda runtime: 1e9)
    pytest.importorskip("transformers")
    rows = checked(*measured("train", "--device=cpu"))
    ratio = rows["our LLaMA / transformers LLaMA"]
    assert ratio["ratio"] == 2 and ratio["value"] == "compiled / compiled"
    ours = next(row for what, row in rows.items() if what.startswith("our GPT-2, "))
    c = train_step.costs_config("gpt2", train_step.shape_of("S"))
    share = train_step.training_flops_per_token(c, 16) * 48 / 0.4 / 1e9
    assert ours["value"] == f"400.0 ms, 120 tokens/s, MFU {share:.1%}, 3.0 GB"


def test_the_sides_of_flash_compute_the_same(measured):
    q, k, v = torch.randn(3, 2, 2, 32, 16).unbind(0)
    torch.testing.assert_close(attention.flash(q, k, v), attention.formula(q, k, v))
    sizes = ["--lengths=[16,32]", "--tokens=32", "--n_head=2", "--head_size=16", "--steps=2"]
    assert checked(*measured("flash", "--device=cpu", *sizes)).keys() == {"T = 16", "T = 32"}


# ---------------------------------------------------------------- the page


def test_the_page_says_what_needs_a_gpu(tmp_path, monkeypatch):
    """Not measured, until it is; the newest measurement counts; one on a CPU is none on a GPU."""
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    empty = page.page()
    assert all(
        f"Not measured: `bash bench/gpu.sh {step}`" in empty for step in page.ON_GPU.values()
    )
    monkeypatch.setattr(
        results, "versions", lambda: {"hardware": "a chip", "torch": "2", "git_commit": "c"}
    )
    config = attention.SpeedConfig()
    for device, ratio in (("cpu", 3.0), ("cuda", 5.0), ("cuda", 7.0)):
        rows = [results.row("T = 512", "1 ms / 7 ms", [ratio, ratio])]
        line = {"name": "flash", "about": "Attention.", "unit": "speed", "rows": rows}
        results.record(line, device, config, ["flash", "--nanogpt=/home/me"])
    text = page.page()
    on_gpu, on_cpu = text.split("# On a CPU")
    assert "| T = 512 | 1 ms / 7 ms | 7.000 | 7.000 to 7.000 |" in on_gpu and "5.000" not in text
    assert "gpu.sh flash" not in text and "gpu.sh train" in on_gpu and "3.000 to 3.000" in on_cpu
    assert "1 thread" not in on_gpu and "`python bench/speed.py flash --nanogpt=PATH`" in on_gpu


def test_the_page_in_the_repo_is_the_one_of_its_rows(monkeypatch):
    monkeypatch.delenv("BENCH_RESULTS", raising=False)
    stored = (ROOT / "bench/results/speed.md").read_text(encoding="utf-8")
    assert stored == page.page(), "run: python bench/speed.py page"


# ---------------------------------------------------------------- bench/gpu.sh


def gpu_sh(tmp_path, *argv, **more):
    """Run bench/gpu.sh with a stand-in for python, which writes down its arguments and fails if
    they contain $FAIL. Returns (the finished process, the commands)."""
    stub = tmp_path / "python"
    stub.write_text(
        '#!/usr/bin/env bash\nprintf "%q " "$@" >>"$LOG"; echo >>"$LOG"\n'
        '[ -z "${FAIL:-}" ] || [[ "$*" != *"$FAIL"* ]]\n'
    )
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "log"
    log.write_text("")
    names = {"PYTHON": stub, "OUT": tmp_path / "out", "DATA": tmp_path / "data", "LOG": log}
    environment = os.environ | {name: str(path) for name, path in names.items()} | more
    command = ["bash", str(ROOT / "bench/gpu.sh"), *argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done, [shlex.split(line) for line in log.read_text().splitlines()]


def test_gpu_sh_lists_its_steps_and_needs_a_gpu(tmp_path):
    done, commands = gpu_sh(tmp_path, "--dry_run")
    assert done.returncode == 0 and "steps: data train flash" in done.stdout and not commands
    done, _ = gpu_sh(tmp_path, FAIL="cuda.is_available")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    done, commands = gpu_sh(tmp_path, "nonsense")
    assert done.returncode == 2 and "no step nonsense: choose from data" in done.stderr


def test_gpu_sh_goes_on_where_it_stopped(tmp_path):
    done, commands = gpu_sh(tmp_path, FAIL="speed.py flash", TINY="1")
    assert done.returncode == 1 and "not done: flash;" in done.stderr
    assert ["bench/speed.py", "page"] in commands and len(commands) > 8
    done, commands = gpu_sh(tmp_path, TINY="1")
    assert done.returncode == 0
    assert [command[1] for command in commands] == ["flash", "page"]
    done, commands = gpu_sh(tmp_path, "memory", TINY="1")  # one step, again
    assert done.returncode == 0
    assert [command[1] for command in commands] == ["config/gpt2_124m.py", "config/llama_124m.py"]
