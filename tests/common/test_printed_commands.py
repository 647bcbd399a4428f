"""The commands that are printed: they begin with the interpreter that was typed."""

import os
import re
import sys
from types import SimpleNamespace

import pytest

import prepare
from bench import ablate
from common import commands, configurator, errors
from common.commands import ROOT
from training import terminal

PYTHON = ".venv/bin/python"


@pytest.fixture(autouse=True)
def typed(monkeypatch):
    """As after README's first command."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "orig_argv", [PYTHON, "train.py"])


@pytest.mark.parametrize(
    "text, pasted",
    [
        ("run `python prepare.py x`", f"run `{PYTHON} prepare.py x`"),
        ("python -m extras.mix --a", f"{PYTHON} -m extras.mix --a"),
        ("python /a/train.py", f"{PYTHON} /a/train.py"),
        ("pip install ray", f"{PYTHON} -m pip install ray"),
        ("python -m pip install ray", f"{PYTHON} -m pip install ray"),
        (f"{PYTHON} train.py", f"{PYTHON} train.py"),
        (".venv/bin/pip install -r a", ".venv/bin/pip install -r a"),
        ("python files, not -m", "python files, not -m"),
    ],
)
def test_a_message_names_the_interpreter_that_was_typed(text, pasted):
    assert commands.runnable(text) == errors.folded(text) == pasted


def test_a_script_is_named_from_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["/my env/python"])
    assert commands.runnable("python train.py a") == f"'/my env/python' {ROOT}/train.py a"
    module = f"PYTHONPATH={ROOT} '/my env/python' -m extras.mix"
    assert commands.runnable("python -m extras.mix") == commands.command("extras.mix") == module
    assert commands.command("train.py", "a b") == f"'/my env/python' {ROOT}/train.py 'a b'"


def test_every_kind_of_command_names_it(capsys, tmp_path):
    """After a run, one that was stopped, a dataset, a list, an error, in a dry run, in --help."""
    run = SimpleNamespace(
        program="extras.mix",
        step=3,
        config=SimpleNamespace(out_dir="out"),
        runtime=SimpleNamespace(world_size=1),
    )
    terminal.print_how_to_continue(run, broken=None)
    ended = SimpleNamespace(out_dir="my run", model="gpt2")
    given = configurator.Given(files=["config/gpt2_shakespeare.py"])
    terminal.print_next_commands("my run/ckpt/000050", ended, given, "train.py")
    meta = {"name": "book", "splits": dict.fromkeys(("train", "val"), {"tokens": 9000})}
    prepare.print_training(meta, "data")
    prepare.print_list(tmp_path)
    job = SimpleNamespace(arm="a", key="a", arguments=lambda: ["--seed=1"])
    ablate.report_jobs, kept = lambda sweep, most: [job], ablate.report_jobs
    ablate.print_commands(SimpleNamespace(rows={}), [job])
    ablate.report_jobs = kept
    print(configurator.help_text("python train.py CONFIG", []))
    errors.fail(errors.UserError("no dataset", "x", "run `python prepare.py x`"))
    said = "".join(capsys.readouterr())
    for command in (
        "-m extras.mix --init_from=resume --out_dir=out",
        "sample.py '--out_dir=my run'",
        "train.py config/llama_shakespeare.py\n",
        "train.py config/llama_shakespeare.py --dataset=book",
        "prepare.py NAME",
        "train.py --seed=1",
        "train.py CONFIG",
        "prepare.py x",
    ):
        assert f"{PYTHON} {command}" in said
    assert said.count("python ") == said.count(f"{PYTHON} ")


@pytest.mark.parametrize("on_path", [True, False])
def test_several_ranks_continue_with_the_torchrun_of_this_interpreter(
    tmp_path, monkeypatch, on_path
):
    (tmp_path / "torchrun").write_text("")
    (tmp_path / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if on_path:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = "torchrun" if on_path else f"{PYTHON} -m torch.distributed.run"
    text = terminal.launcher(SimpleNamespace(world_size=2))
    assert text == f"{program} --standalone --nproc_per_node=2"
    text = terminal.launcher(SimpleNamespace(world_size=4))  # on two machines
    assert re.search("--nnodes=2 .*--rdzv_endpoint=HOST:PORT --nproc_per_node=2$", text)
