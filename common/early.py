"""What a script does before it imports torch, which takes seconds."""

import sys

from common.errors import UserError, end_at_once, fail, speaks, tell

# The functions import what they need, since until `end_at_once` Ctrl-C prints a traceback.

INSTALL = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt"
ABLATE = ("pandas", "rich", "scipy")  # what bench/ and some commands of extras/ need besides


def start(script):
    """Print that a script is starting, since the import of torch takes seconds without output."""
    end_at_once()
    need("torch", "numpy", "safetensors", "tqdm")
    wants_help = any(arg == "-h" or arg.startswith("--help") for arg in sys.argv)
    if sys.stderr and speaks() and (sys.stderr.isatty() or not wants_help):
        tell(f"{script} is starting: importing torch")


def need(*packages):
    """End the script with a message if this interpreter lacks one of these packages."""
    from importlib.util import find_spec

    if sys.version_info < (3, 11):  # noqa: UP036
        fix = "use Python 3.11 or later"
        sys.exit(fail(UserError("this Python is too old", f"in {sys.executable}", fix)))
    for package in packages:
        if find_spec(package) is None:
            fix = f"use .venv/bin/python, after `{INSTALL}`"
            error = UserError(f"{package} is not installed", f"in {sys.executable}", fix)
            sys.exit(fail(error))
