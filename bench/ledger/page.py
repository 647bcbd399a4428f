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
    parts = [found.reason or found.measurement.note]
    if found.word == UNDECIDED and found.measurement.runs:
        count = f"about {found.more:,}" if found.more else f"over {MOST_RUNS:,}"
        parts.append(f"{count} runs would decide, where it has {found.measurement.runs}")
    return "; ".join(filter(None, parts))


def line(found):
    """A Finding on one line of a terminal."""
    value = number(found.measurement.value) if found.measurement else ""
    left = f"{found.claim.id:<15} {found.word:<22} {value:<14} "
    return left + textwrap.shorten(found.claim.claim, max(15, 79 - len(left)), placeholder=" …")


# ---------------------------------------------------------------- claims.md


def cells(*texts):
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def claim_table(findings):
    """The lines of a Markdown table of findings."""
    yield cells("id", "claim", "verdict", "measured", "holds if", "setting")
    yield cells(*["---"] * 6)
    for found in findings:
        claim = found.claim
        yield cells(
            claim.id,
            f"{claim.claim} ({claim.source})",
            f"**{found.word}**",
            measured(found),
            f"{claim.quantity} is {claim.holds.removeprefix('= ')}",
            explanation(found),
        )


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
        yield cells(*table["columns"])
        yield cells(*["---"] * len(table["columns"]))
        yield from (cells(*map(shown, row)) for row in table["rows"])
        if table.get("note"):
            yield from ("", table["note"])


def markdown(findings, facts):
    """The lines of claims.md."""
    counts = Counter(found.word for found in findings)
    summary = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    yield "# What papers and guides claim, and what we measure"
    yield ""
    yield f"{len(findings)} claims: {summary}. `python bench/claims.py` measures them all and writes"
    yield f"this page; {facts['hardware']}, torch {facts['torch']}, commit {facts['git_commit']},"
    yield f"{facts['date']}. The table is [claims.csv](../ledger/claims.csv)."
    yield ""
    yield "A claim is *confirmed* if the interval of its measurement lies within the values for which"
    yield "it holds, *contradicted* if it lies outside, and *undecided at our scale* otherwise: any"
    yield "measurement outside these values refutes it. No verdict is typed in. The intervals of all"
    yield f"claims of one kind hold together with {1 - ALPHA:.0%} probability (Bonferroni). Trained"
    yield "models have 0.05 to 0.2 million parameters and read Shakespeare's plays, at one learning"
    yield "rate: their verdicts are on that scale, and losses are in nats per character. Intervals are"
    yield "over seeds, not over texts. A screening has two or three runs of each arm, whose variances it"
    yield "pools: it ranks, and leaves every claim undecided. Times of one operation are CPU time of one"
    yield "thread, on a machine that does nothing else."
    yield ""
    yield "## The guide's tables, and ours"
    yield ""
    yield "From a widely read guide to Transformer improvements, whose tables are often quoted without"
    yield "a source. Each of our cells is a claim of the tables below."
    yield from guide_tables(findings)
    for kind in KINDS:
        of_kind = [found for found in findings if found.claim.kind == kind]
        yield from ("", f"## {TITLES[kind]}", "")
        yield from claim_table(of_kind)


# ---------------------------------------------------------------- claims.json


def finite(value):
    return value if value is not None and math.isfinite(value) else None


def record(found):
    """A Finding as JSON."""
    claim, m = found.claim, found.measurement
    low, high = m.interval(found.level) if m else (None, None)
    return vars(claim) | {
        "verdict": found.word,
        "value": finite(m.value) if m else None,
        "low": finite(low),
        "high": finite(high),
        "se": finite(m.se) if m else None,
        "df": finite(m.df) if m else None,
        "log": m.log if m else None,
        "runs": m.runs if m else None,
        "screening": m.screening if m else None,
        "runs_to_decide": found.more,
        "level": found.level,
        "note": found.reason or (m.note if m else ""),
    }


def write(findings):
    """Write claims.md and claims.json."""
    facts = versions() | {"date": time.strftime("%Y-%m-%d")}
    folder().mkdir(parents=True, exist_ok=True)
    page = "\n".join(markdown(findings, facts)) + "\n"
    files.write(folder() / "claims.md", page)
    content = {"facts": facts, "claims": [record(found) for found in findings]}
    files.write(folder() / "claims.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
