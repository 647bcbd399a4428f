"""docs/is_my_change_real.md: its commands print what it says, and its logs are its tables."""

import re
import shlex
import subprocess

import pytest

from bench import verdict
from common.commands import ROOT

PAGE = ROOT / "docs/is_my_change_real.md"
EXAMPLES = re.findall(
    r"```sh\npython bench/verdict\.py ([^\n]*)\n```\n```text\n(.*?)```",
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.parametrize(("command", "answer"), EXAMPLES)
def test_the_page_prints_what_the_command_prints(command, answer, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    verdict.main(shlex.split(command))
    assert capsys.readouterr().out == answer


def test_the_page_turns_the_stored_logs_into_the_stored_tables(tmp_path):
    """Its shell lines make nanogpt.csv; loop.tsv holds its baselines, from seed 5 to seed 1."""
    assert len(EXAMPLES) == 3
    lines = re.findall(r"^(?:echo arm|grep -H).*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    examples = ROOT / "docs/examples/verdict"
    for log in (examples / "nanogpt").glob("*.log"):
        (tmp_path / log.name).write_bytes(log.read_bytes())
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, check=True)
    stored = (examples / "nanogpt.csv").read_text()
    assert (tmp_path / "nanogpt.csv").read_text() == stored

    last = dict(re.findall(r"^baseline,(\d),(.*)$", stored, re.MULTILINE))  # of each seed
    loop = re.findall(r"^a(\d)\t([\d.]+)", (examples / "loop.tsv").read_text(), re.MULTILINE)
    assert loop == sorted(last.items(), reverse=True)
