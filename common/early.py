"""
What a script does before it imports torch, which takes seconds. The names of its keys are read from
the source of the dataclasses that declare them; their values are checked later.
"""

import sys

from common.errors import UserError, end_at_once, fail, speaks, tell

# The functions import what they need, since until `end_at_once` Ctrl-C prints a traceback.

FORMER = ("RENAMED", "MOVED")  # tables of keys that are answered later, by what to use instead
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt"
ABLATE = ("pandas", "rich", "scipy")  # what bench/ and some commands of extras/ need besides


def start(script, *sources):
    """Check the keys of a script that imports torch, and print that it is starting, since the
    import takes seconds without any output. sources: the files of this repo that declare its
    keys."""
    end_at_once()
    check_keys(*sources)
    need("torch", "numpy", "safetensors", "tqdm")
    wants_help = any(arg == "-h" or arg.startswith("--help") for arg in sys.argv)
    if sys.stderr and speaks() and (sys.stderr.isatty() or not wants_help):
        tell(f"{script} is starting: importing torch")


def need(*packages):
    """End the script with a message if this interpreter lacks one of these packages."""
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            fix = f"use .venv/bin/python, after `{INSTALL}`"
            error = UserError(f"{package} is not installed", f"in {sys.executable}", fix)
            sys.exit(fail(error))


def check_keys(*sources):
    """End the script with a message if no dataclass in these files has a key that was typed."""
    from common.configurator import find

    known = []
    former = ["config", "help", "debug"]
    for source in sources:
        fields, old = keys_in(source)
        known += fields
        former += old
    try:
        for arg in sys.argv[1:]:
            key = arg.removeprefix("--").partition("=")[0]
            if arg.startswith("--") and key not in former:
                find(key, dict.fromkeys(known), {}, arg)
    except UserError as error:
        sys.exit(fail(error))


def keys_in(source):
    """(the fields of the dataclasses in a file of this repo, the keys of its FORMER tables)."""
    import ast

    from common.commands import ROOT

    fields = []
    former = []
    for node in ast.parse((ROOT / source).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            annotated = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            fields += [line.target.id for line in annotated]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in FORMER:
            former += ast.literal_eval(node.value)
    return fields, former
