"""How a script begins and ends, seen from outside: what it imports, its streams, its status."""

import errno
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

import prepare
import sample
import train
from common import errors
from common.commands import ROOT, command
from common.errors import Failure, UserError
from common.runtime import find_ranks
from helpers.checkpoints import edit_json
from helpers.runs import arguments
from helpers.texts import message

OUT_OF_MEMORY = "out of memory (memory): use a smaller "
LEFTOVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CLEAN = {key: value for key, value in os.environ.items() if key not in LEFTOVER}
CLEAN |= {"OMP_NUM_THREADS": "1"}
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from common.errors import run

def main(argv):
    print("text " * int(argv[0]))

run(main)
"""
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=CLEAN)


def python(*argv):
    return subprocess.run([sys.executable, *argv], timeout=120, **PIPES)


HEAVY = {"torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "sympy"}
HEAVY |= {"torch._inductor", "datasets", "matplotlib", "transformers", "wandb", "rich", "scipy"}
HEAVY |= {"tiktoken", "huggingface_hub"}
WRAPPER = """
import runpy, sys
{first}
before = set(sys.modules)
statuses = []
for words in {commands!r}:
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        statuses.append(ended.code)
print("statuses:", *statuses, file=sys.stderr)
print("modules:", *set(sys.modules) - before, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "first, commands, statuses",
    [
        ("import numpy", [["prepare.py", "--input=nowhere"]], "2"),
        # The second up to where it needs a model; what one imports, the other finds.
        ("import torch", [["train.py", "--help"], ["sample.py", "--out_dir=nowhere"]], "0 2"),
    ],
)
def test_a_script_imports_little_besides_torch(first, commands, statuses):
    """Modules are counted, beside those of what every such command needs, since the seconds depend
    on the machine."""
    done = python("-c", WRAPPER.format(first=first, commands=commands))
    said, imported = done.stderr.rsplit("modules:", 1)
    imported = set(imported.split())
    assert said.endswith(f"statuses: {statuses}\n") and "torch" not in imported
    assert not imported & HEAVY
    assert len(imported) < 150  # most of them are ours, or small ones of Python's


@pytest.mark.parametrize("name", ["train.py", "sample.py"])
def test_a_first_line_comes_before_torch(name):
    """It is on stderr, and there is a Ctrl-C that leaves no traceback while torch is imported."""
    options = ["-X", "importtime", name, "--out_dir=nowhere", "cannot-be-read"]
    not_ignored = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen([sys.executable, *options], preexec_fn=not_ignored, **PIPES)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line == f"{name} is starting: importing torch\n":
            break
    imported = [line.split("|")[-1].strip() for line in lines]
    assert "torch" not in imported
    assert not {"dataclasses", "textwrap", "json"} & set(imported[: imported.index("common.early")])
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest, _ = process.stderr.read(), process.wait(timeout=60)
    said = [line for line in rest.splitlines() if not line.startswith("import time:")]
    assert process.returncode == -signal.SIGINT and not said and process.stdout.read() == ""


def test_ctrl_c_is_said_in_one_word(capsys):
    with pytest.raises(SystemExit) as ended:
        errors.run(Mock(side_effect=KeyboardInterrupt))
    assert ended.value.code == 130 and capsys.readouterr().err == "stopped\n"


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch):
    """As in the background of a script, where Ctrl-C is for others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    errors.end_at_once()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


FORK = """
import os, signal, sys
from common.errors import StopSignals
with StopSignals():
    child = os.fork() or signal.raise_signal(signal.SIGTERM)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_worker_that_a_library_forks_ends_without_a_traceback():
    done = python("-c", FORK)
    assert done.returncode == 128 + signal.SIGTERM and not done.stderr


@pytest.mark.parametrize(
    "words, redirection, status, says",
    [
        (1, ">&-", 2, "error: standard output is closed (stdout): "),
        (9000, ">/dev/full", 1, "error: No space left on device (output): free the disk"),
        (1, "", 0, ""),
        (1, ">/dev/null 2>&-", 0, ""),
        ("x", "2>&-", 1, ""),  # its error does not go to stdout
        ("x", "2>/dev/full", 1, ""),
        (90_000, "| head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_streams_that_take_nothing(tmp_path, words, redirection, status, says):
    if "/dev/full" in redirection and not os.path.exists("/dev/full"):
        pytest.skip("a Mac has no /dev/full")
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT)))
    command = f"{sys.executable} {tmp_path / 'script.py'} {words} {redirection}"
    done = subprocess.run(["bash", "-c", command], timeout=120, **PIPES)
    assert done.returncode == status and done.stderr.startswith(says)
    assert done.stderr.count("\n") == bool(says) and (words == 1 or not done.stdout)


WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
PARTS = [{"WORLD_SIZE": "2", "RANK": "1"}, {"RANK": "0"}, {"MASTER_PORT": "29500"}]


@pytest.mark.parametrize(
    "environment",
    [
        *PARTS,
        WHOLE | {"RANK": "1", "MASTER_PORT": "x"},
        WHOLE | {"RANK": "3"},
        WHOLE | {"RANK": "x"},
    ],
)
def test_leftovers_of_torchrun(monkeypatch, environment):
    for key in LEFTOVER:
        monkeypatch.delenv(key, raising=False)
    assert find_ranks() == (0, 1)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert re.search("contradict each other .*=.*unset", message(find_ranks))
    assert errors.speaks()  # somebody has to say it


class NoText(Exception):
    """As a config file may raise one."""

    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    "error, status, message",
    [
        (UserError("what", "where", "fix"), 2, "what (where): fix"),
        (Failure("what", "where", "two\nlines"), 1, "what (where): two lines"),
        (ModuleNotFoundError("no", name="x"), 2, "x is not installed (package): pip install x"),
        (ValueError("no"), 1, "no (ValueError): run again with --debug to see where"),
        (NoText(), 1, "an error without a text (NoText): run again with --debug to see where"),
        (OSError(5, "I/O"), 1, "I/O (output): free the disk, or write elsewhere"),
        (UserError("no \x1b[2Jweight", "a\x9bb", "\x07\r"), 2, r"no \x1b[2Jweight (a\x9bb): \x07"),
        (MemoryError(), 1, OUT_OF_MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] you tried to"), 1, OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, OUT_OF_MEMORY),
    ],
)
def test_an_error_is_one_line_without_escape_sequences(error, status, message):
    found, text = errors.explained(error)
    assert found == status and text.startswith(message)
    assert text == message or message == OUT_OF_MEMORY


@pytest.mark.parametrize(
    "text, shown, in_a_figure",
    [
        ("run-1 中\u3000文 é [b]", None, None),
        ("\x1b[2J\x9b1m\r", r"\x1b[2J\x9b1m\r", r"\x1b[2J\x9b1m\r"),
        ("a\u202eb\ud800", r"a\u202eb\ud800", r"a\u202eb\ud800"),
        ("$x_1$", None, r"\$x_1\$"),
    ],
)
def test_what_others_wrote_is_shown_as_text(text, shown, in_a_figure):
    assert errors.printable(text) == (shown or text)
    assert errors.printable(text, figure=True) == (in_a_figure or text)
    assert errors.printable("a\n\tb\n", keep="\n\t") == "a\n\tb\n"


def test_a_command_with_an_escape_sequence_can_be_pasted():
    word = "--out_dir=it's\x1b[2J\\n"
    text = command("x", word, launcher="printf %s")
    assert "\x1b" not in text
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert done.stdout.endswith(word)


def test_names_from_others_do_not_reach_the_terminal_as_escape_sequences(
    data_dir, tmp_path, capsys
):
    """Of a dataset's folder, its source, the files it is made of, and a run's folder."""
    bad = "\x1b[2Jname"
    shutil.copytree(data_dir / "words", tmp_path / "words")
    edit_json("meta", lambda meta: meta | {"source": bad})(tmp_path / "words")
    shutil.copytree(tmp_path / "words", tmp_path / bad)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the king of rome\n" * 40)
    (tmp_path / "texts" / f"{bad}.png").write_bytes(b"\x89PNG")
    where = [f"--data_dir={tmp_path}"]
    prepare.main(["--list", *where])
    prepare.main(["new", f"--input={tmp_path / 'texts'}", "--tokenizer=char", *where])
    run = [*arguments(tmp_path, tmp_path / "run"), "--max_iters=2", "--eval_interval=2"]
    (tmp_path / "c.py").write_text(f"dataset = {bad!r}")
    train.main([arg for arg in run if "--dataset" not in arg] + [str(tmp_path / "c.py")])
    (tmp_path / "run").rename(tmp_path / f"{bad}-run")
    sample.main([f"--out_dir={tmp_path / bad}-run", "--num_samples=0", "--device=cpu"])
    printed = "".join(capsys.readouterr())
    assert "\x1b" not in printed and printed.count(r"\x1b[2Jname") >= 5
