"""
The answer: one page of all sweeps whose rows are in bench/results, with one correction over all
that it claims.

    python bench/answer.py

Reads the rows of every sweep below bench/results, and bench/results/claims.json if it is there.
Writes index.html, index.md, readme.md and their pictures into bench/results/answer, and the same
sentences into README.md. Trains nothing.
"""

import repo_root  # noqa: F401

from common.errors import UserError, run


def main(argv):
    if argv in (["--help"], ["-h"]):
        print(__doc__.strip())
        return
    if argv:
        fix = "type python bench/answer.py"
        raise UserError(f"it takes no words, and was given {argv[0]}", "command line", fix)
    from bench.ablation import answer_page

    print(answer_page.write())


if __name__ == "__main__":
    run(main)
