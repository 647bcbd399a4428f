"""
Measure the claims of papers and guides, and say which hold:

    python bench/claims.py           # all of bench/ledger/claims.csv, in some minutes
    python bench/claims.py D14 C24   # only these, and nothing is written

One line for each claim, with its verdict. Writes bench/results/claims.md and claims.json. Claims on
trained models are read from the stored rows of the sweeps in bench/results; nothing is trained.
"""

import time
from collections import Counter
from dataclasses import dataclass

import repo_root  # noqa: F401 (puts the repo's root on the path)

from common.configurator import PositiveInt, build, load
from common.errors import UserError, run


@dataclass
class ClaimsConfig:
    threads: PositiveInt = 1  # CPU threads


def chosen(claims, words):
    """The claims with these ids; D24 also means D24.total. Raises UserError for an id that no claim
    has."""
    for word in words:
        if not any(claim.id == word or claim.id.startswith(f"{word}.") for claim in claims):
            raise UserError(f"there is no claim {word}", "command line", "see claims.csv")
    wanted = tuple(f"{word}." for word in words)
    return [claim for claim in claims if not words or f"{claim.id}.".startswith(wanted)]


def main(argv):
    from bench.ledger import page, table
    from bench.ledger.functions import FUNCTIONS

    values, words = load(argv, [ClaimsConfig], __doc__)
    config = build(ClaimsConfig, values)
    claims = table.read()
    levels, findings, began = table.levels(claims), [], time.perf_counter()
    wanted = chosen(claims, words)

    import torch

    torch.set_num_threads(config.threads)
    for claim in wanted:
        found = table.examine(claim, FUNCTIONS, levels[claim.kind])
        findings.append(found)
        print(page.line(found), flush=True)

    counts = Counter(found.word for found in findings)
    print(", ".join(f"{counts[word]} {word}" for word in table.WORDS if counts[word]), end="; ")
    print(f"{time.perf_counter() - began:.0f} s")
    if not words:
        page.write(findings)


if __name__ == "__main__":
    run(main)
