"""
The page of the answer: what each part of a modern Transformer is worth, from rows alone.

    python bench/answer.py [OUT]      # default: the sweeps below bench/results/answer

Writes index.html, index.md, worths.csv, figures and the report of each sweep into that folder.
config/answer/page.py names the arms of each part, and the claims that others published.
"""

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from common import early

if __name__ == "__main__":
    early.need(*early.ABLATE)

import runpy
from pathlib import Path

from common.commands import ROOT
from common.configurator import print_help
from common.errors import UserError, run

ANSWER = ROOT / "bench/results/answer"
CONFIG = ROOT / "config/answer/page.py"


def main(argv):
    """Write the page of the sweeps in or below a folder. Prints its path."""
    print_help(argv, __doc__, [])
    from bench.ablation import page

    out = Path(argv[0]) if argv else ANSWER
    folders = sorted(path.parent for path in out.rglob("sweep.json"))
    if not folders or len(argv) > 1:
        fix = "name one folder that holds sweeps, or none for bench/results/answer"
        raise UserError("no sweep in this folder", " ".join(argv) or out, fix)
    print(page.write(runpy.run_path(str(CONFIG)), folders, out))


if __name__ == "__main__":
    run(main)
