"""
The answer: one page of many sweeps, from their rows alone.

    python bench/answer.py [OUT ...]      # default: the sweeps below bench/results/answer

Writes index.html, index.md and their figures into bench/results/answer. Trains nothing.
"""

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from common.errors import UserError, run
from common.files import ROOT

ANSWER = ROOT / "bench/results/answer"


def main(argv, out=ANSWER):
    """Write the page of the sweeps in the folders argv, or below `out`. Prints its path."""
    if argv in (["--help"], ["-h"]):
        print(__doc__.strip())
        return
    from bench.ablation import report

    folders = argv or sorted(path.parent for path in out.glob("*/sweep.json"))
    if not folders:
        raise UserError("no sweep here", out, "run python bench/ablate.py first")
    for section in report.sections(folders):
        print(report.write_report(section, inline=False))


if __name__ == "__main__":
    run(main)
