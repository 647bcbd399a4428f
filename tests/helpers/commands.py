"""Commands of README.md and docs/: those of one extra are tested where the extra is."""

import re
import shlex

from common.files import ROOT


def documented(module):
    """The argument lists of `python -m MODULE` in README.md and docs/."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                if line.startswith(f"python -m {module} "):
                    found.append(shlex.split(line, comments=True)[3:])
    assert found, f"no page shows {module}"
    return found
