"""What bench/claims.py prints and writes: a line for each claim, claims.md and claims.json. The
guide's own tables (tables.toml) stand in claims.md with our measurements beside them."""

import json
import math
import textwrap
import time
import tomllib
from collections import Counter
from pathlib import Path

from bench.ledger.table import ALPHA, KINDS, MOST_RUNS, UNDECIDED, WORDS
from bench.timing.results import folder
from common import files
from common.runtime import versions

TABLES = Path(__file__).with_name("tables.toml")
TITLES = {
    "algebra": "Counted",
    "micro": "Computed: one operation, or one forward pass",
    "trained": "Trained models",
    "gpu": "For a GPU",
}
COLUMNS = ("id", "claim", "verdict", "measured", "holds if", "setting")
INTRODUCTION = f"""
A claim is *confirmed* if the interval of its measurement lies within the values for which it holds,
*contradicted* if it lies outside, and *undecided at our scale* otherwise: any other value refutes
it. No verdict is typed in. The intervals of all claims of one kind hold together with
{1 - ALPHA:.0%} probability (Bonferroni). Trained models have 0.05 to 0.5 million parameters and
read Shakespeare's plays, at one learning rate: their verdicts are on that scale, and losses are in
nats per character. Intervals are over seeds, not over texts. A screening has two or three runs of
each arm, whose variances it pools: it ranks, and leaves every claim undecided. Times are CPU time
of one thread, on a machine that does nothing else; elsewhere they are not measured.

## The guide's tables, and ours

From a widely read guide to Transformer improvements, whose tables are often quoted without a
source. Each of our cells is a claim of the tables below."""


def number(value):
    """A number with four digits: 393,216, 0.3333, 1.2e-07."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:.4g}"


def measured(found):
    """The measurement of a Finding, with its interval where it has one."""
    if not found.measurement:
        return ""
    low, high = found.measurement.interval(found.level)
    text = number(found.measurement.value)
    if low < high:
        text += f" ({number(low)} to {number(high)})"
    return text


def explanation(found):
    """The setting, why there is no measurement, or how many runs would decide."""
    if found.word != UNDECIDED or not found.measurement.runs:
        return found.reason or found.measurement.note
    count = f"about {found.more:,}" if found.more else f"over {MOST_RUNS:,}"
    more = f"{count} runs would decide, where it has {found.measurement.runs}"
    return f"{found.measurement.note}; {more}"


def line(found):
    """A Finding on one line of a terminal."""
    value = number(found.measurement.value) if found.measurement else ""
    left = f"{found.claim.id:<15} {found.word:<22} {value:<14} "
    return left + textwrap.shorten(found.claim.claim, max(15, 79 - len(left)), placeholder=" …")


# ---------------------------------------------------------------- claims.md


def rows_of(columns, rows):
    """The lines of a Markdown table."""
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(text.replace("|", "\\|") for text in row) + " |"


def row_of(found):
    """The cells of a Finding."""
    claim = found.claim
    holds = f"{claim.quantity} is {claim.holds.removeprefix('= ')}"
    named = f"{claim.claim} ({claim.source})"
    return claim.id, named, f"**{found.word}**", measured(found), holds, explanation(found)


def guide_tables(findings):
    """The lines of the guide's tables. A cell "@D24" becomes the measurement of the claim D24."""
    by_id = {found.claim.id: found for found in findings}

    def shown(cell):
        if not cell.startswith("@"):
            return cell
        found = by_id[cell[1:]]
        return f"{measured(found)} **{found.word}** ({found.claim.id})".strip()

    for table in tomllib.loads(TABLES.read_text(encoding="utf-8"))["table"]:
        yield from ("", f"### {table['id']}. {table['title']}", "")
        yield from rows_of(table["columns"], (map(shown, row) for row in table["rows"]))
        if table.get("note"):
            yield from ("", table["note"])


def markdown(findings, facts):
    """The lines of claims.md."""
    counts = Counter(found.word for found in findings)
    summary = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    yield "# What papers and guides claim, and what we measure"
    yield ""
    yield f"{len(findings)} claims: {summary}. `python bench/claims.py` measures them and writes"
    yield f"this page; {facts['hardware']}, torch {facts['torch']}, commit {facts['git_commit']},"
    yield f"{facts['date']}. The table is [claims.csv](../ledger/claims.csv)."
    yield INTRODUCTION
    yield from guide_tables(findings)
    for kind in KINDS:
        of_kind = [row_of(found) for found in findings if found.claim.kind == kind]
        yield from ("", f"## {TITLES[kind]}", "")
        yield from rows_of(COLUMNS, of_kind)


# ---------------------------------------------------------------- claims.json


def record(found):
    """A Finding as JSON; a number that is not known or not finite is null."""
    given = vars(found.measurement) if found.measurement else {}
    if given:
        low, high = found.measurement.interval(found.level)
        given = given | {"low": low, "high": high}

    def known(key):
        return given[key] if math.isfinite(given.get(key, math.nan)) else None

    numbers = ("value", "low", "high", "se", "df", "log", "runs", "screening")
    return {
        **vars(found.claim),
        **{"verdict": found.word, "measured": measured(found)},
        **{key: known(key) for key in numbers},
        **{"runs_to_decide": found.more, "level": found.level},
        "note": found.reason or given["note"],
    }


def write(findings):
    """Write claims.md and claims.json."""
    facts = versions() | {"date": time.strftime("%Y-%m-%d")}
    folder().mkdir(parents=True, exist_ok=True)
    page = "\n".join(markdown(findings, facts)) + "\n"
    files.write(folder() / "claims.md", page)
    content = {"facts": facts, "claims": [record(found) for found in findings]}
    files.write(folder() / "claims.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
