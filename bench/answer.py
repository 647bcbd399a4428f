"""
The page of the answer: what each part of a modern Transformer is worth, from rows alone.

    python bench/answer.py

Writes index.html, index.md, worths.csv, figures and the report of each sweep into
bench/results/answer, from the sweeps and the planned settings that are stored there.
config/answer/page.py names the arms of each part, and the claims that others published.
"""

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from common import early

if __name__ == "__main__":
    early.need(*early.ABLATE)

import runpy

from common.commands import ROOT
from common.configurator import print_help
from common.errors import UserError, run

ANSWER = ROOT / "bench/results/answer"
CONFIG = ROOT / "config/answer/page.py"


def main(argv):
    """Write the page of the stored sweeps. Prints its path."""
    print_help(argv, __doc__, [])
    if argv:
        raise UserError("this command takes no words", " ".join(argv), "leave them out")
    from bench.ablation import page

    folders = sorted(path.parent for path in ANSWER.rglob("sweep.json"))
    print(page.write(runpy.run_path(str(CONFIG)), folders, ANSWER))


if __name__ == "__main__":
    run(main)
