"""The commands of the extras: each shows its help, stands on docs/extras.md, and is accepted as the
docs write it. A command whose extra has been deleted is skipped."""

import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import stat
import subprocess
import sys

import pytest

import extras
from bench.ablation.settings import read as read_sweep
from common.commands import ROOT
from helpers.texts import message
from training.settings import read_config

PAGES = [ROOT / "README.md", ROOT / "bench/README.md"]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "CHANGELOG"]
PAGES += (ROOT / "config").glob("*recall.py")
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = sorted(
    {
        command
        for text in TEXTS.values()
        for command in re.findall(r"python -m extras\.[^`\n#]*", text.replace("\\\n", ""))
    }
)
NAMES = sorted(module.name for module in pkgutil.iter_modules(extras.__path__))
STANDS_FOR = {"CONFIG": "config/llama_shakespeare.py", "a,b": "plays,sonnets", "NAME": "copy"}


def module_of(name):
    """The module that `python -m extras.NAME` runs, or None if there is none."""
    found = importlib.util.find_spec(f"extras.{name}")
    if found and found.submodule_search_locations:
        found = importlib.util.find_spec(f"extras.{name}.__main__")
    return found and importlib.import_module(found.name)


def accept(words):
    """Read `extras.NAME`, arguments..., up to the point where the command would begin to work."""
    module = module_of(words[0].removeprefix("extras."))
    if module is None:
        return False
    argv = [STANDS_FOR.get(word, word) for word in words[1:]]
    if hasattr(module, "read"):
        module.read(argv)
    elif words[0] == "extras.cluster":
        read_sweep(module.split_keys(argv)[1], "")
    return True


@pytest.mark.parametrize("name", NAMES)
def test_each_extra_is_a_command_with_help_and_a_line_on_the_page(name, capsys):
    module = module_of(name)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    help_text = capsys.readouterr().out
    assert not ended.value.code and f"python -m extras.{name}" in help_text
    assert f"`python -m extras.{name}" in TEXTS[ROOT / "docs/extras.md"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.replace("[", "").replace("]", ""))
    if not accept(words[2:]):
        pytest.skip(f"{words[2]} is not here")


@pytest.mark.parametrize(
    "words",
    [
        "score RUN --start=a",
        "attention_map RUN --show_probs",
        "serve RUN --num_samples=3",
        "knn write RUN --compile=True",
        "speculative RUN --init_from=RUN",
        "compare_texts RUN RUN --out_dir=RUN",
    ],
)
def test_a_key_that_changes_nothing_is_named(words):
    name, *argv = words.split()
    module = module_of(name)
    if module is None:
        pytest.skip(f"{name} is not here")
    key = argv[-1].removeprefix("--").partition("=")[0]
    assert message(module.read, argv).startswith(f"{key} changes nothing here")


def test_each_command_of_gpu_sh_is_accepted(tmp_path):
    """In its tiny form, whose results are not the repo's. A stand-in for python writes down its
    arguments."""
    stub = tmp_path / "python"
    log = tmp_path / "log"
    stub.write_text(
        '#!/usr/bin/env bash\nprintf "%q " "$@" >>"$LOG"; echo >>"$LOG"\n'
        'echo "$BENCH_RESULTS" >"$LOG.results"\n'
    )
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    names = {"PYTHON": stub, "GPU_OUT": tmp_path / "out", "DATA": tmp_path / "data", "LOG": log}
    environment = os.environ | {name: str(path) for name, path in names.items()} | {"TINY": "1"}
    command = ["bash", str(ROOT / "bench/gpu.sh")]
    subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    assert (tmp_path / "log.results").read_text() == f"{tmp_path / 'out' / 'results'}\n"

    commands = [shlex.split(line) for line in log.read_text().splitlines()]
    others = [words[1:] for words in commands if words[1].startswith("extras.")]
    names = ["speed"] * 7 + ["dry_run"] * 2
    assert [words[0].removeprefix("extras.") for words in others] == names
    for words in others:
        accept(words)
    runs = [
        dict(word.removeprefix("--").split("=", 1) for word in words[2:])
        for words in others
        if words[1] == "race"
    ]
    assert [keys["alone"] for keys in runs] == ["gpt2_shakespeare", "llama_shakespeare"]
    for keys in runs:
        assert read_config([f"config/{keys['alone']}.py", *keys["words"].split()], "")


@pytest.mark.slow
def test_gpu_sh_tries_each_step_on_a_cpu(tmp_path):
    names = {"GPU_OUT": tmp_path / "out", "DATA": tmp_path / "data", "PYTHON": sys.executable}
    environment = os.environ | {name: str(path) for name, path in names.items()} | {"TINY": "1"}
    command = ["bash", str(ROOT / "bench/gpu.sh")]
    listed = subprocess.run([*command, "--dry_run"], capture_output=True, text=True, check=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-1000:]

    out = tmp_path / "out"
    steps = [line.split()[0] for line in listed.stdout.splitlines()]
    assert all((out / f"{step}.done").exists() for step in steps)
    rows = [json.loads(line) for line in (out / "results/speed.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["train"] * 3 + ["race"] * 2 + ["decode", "attention"]
    page = (out / "results/speed.md").read_text()
    assert all(f"`{row['command']}`" in page for row in rows)
