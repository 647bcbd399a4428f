"""The commands of the docs that run an extra are accepted."""

import importlib
from pathlib import Path

import pytest
from test_docs import COMMANDS, script_of

from common.files import ROOT

RUNS = [command for command in COMMANDS if script_of(command)[0].startswith("extras/")]
PRESENT = [command for command in RUNS if (ROOT / script_of(command)[0]).is_file()]


@pytest.mark.parametrize("command", PRESENT)
def test_command_is_accepted(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, argv = script_of(command)
    module = importlib.import_module(".".join(Path(name).with_suffix("").parts))
    if hasattr(module, "read"):
        module.read(argv)
