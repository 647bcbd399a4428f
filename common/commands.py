"""
The commands that are printed. They run when they are pasted: each one begins with the interpreter
that the user typed, and names its script from the current directory.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 80  # columns of a terminal
# In a message: `python SCRIPT.py`, `python -m MODULE`, `pip install PACKAGE`.
PYTHON = re.compile(r"(?<![\w./-])python (-m\b|['/]\S*|\w[\w/]*\.py\b)")
PIP = re.compile(r"(?<![\w./-])(?<!-m )pip install\b")


def python():
    """The interpreter of this process as it was typed, such as python or .venv/bin/python."""
    return shlex.quote(sys.orig_argv[0])


def torchrun():
    """The program that starts several ranks with this interpreter."""
    if shutil.which("torchrun") == str(Path(sys.executable).with_name("torchrun")):
        return "torchrun"
    return f"{python()} -m torch.distributed.run"


def script(name):
    """A script of this repo, as it is called from the current directory."""
    return name if Path.cwd() == ROOT else str(ROOT / name)


def with_path(launcher):
    """The launcher of a module of this repo, as it is called from the current directory."""
    return launcher if Path.cwd() == ROOT else f"PYTHONPATH={shlex.quote(str(ROOT))} {launcher}"


def quoted(word):
    """A word quoted for a shell. Characters that a terminal would obey become escapes."""
    if word.isprintable():
        return shlex.quote(word)
    letters = []
    for c in word.replace("\\", r"\\").replace("'", r"\'"):
        letters.append(c if c.isprintable() else f"\\U{ord(c):08x}")
    return f"$'{''.join(letters)}'"


def command(program, *arguments, launcher=None):
    """The shell command that runs a script of this repo, or a module such as extras.mix. It is
    broken into lines of at most 80 columns, with a backslash at the end of each but the last. A
    longer word stays whole. launcher: what to type in place of the interpreter."""
    launcher = launcher or python()
    if program.endswith(".py"):
        lines = [f"{launcher} {quoted(script(program))}"]
    else:
        lines = [f"{with_path(launcher)} -m {program}"]
    for word in map(quoted, arguments):
        if len(f"{lines[-1]} {word}") <= WIDTH - len(" \\"):
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return " \\\n".join(lines)


def in_lines(text):
    """A command `python ...`, written as by `command`."""
    words = [word for word in shlex.split(text)[1:] if word != "-m"]
    return command(*words)


def runnable(text):
    """A text whose commands `python ...` and `pip install ...` run when they are pasted."""

    def with_interpreter(match):
        name = match[1]
        if name == "-m":
            return f"{with_path(python())} -m"
        if name.endswith(".py") and name[0] not in "'/":
            name = shlex.quote(script(name))
        return f"{python()} {name}"

    text = PYTHON.sub(with_interpreter, text)
    return PIP.sub(lambda match: f"{python()} -m {match[0]}", text)
