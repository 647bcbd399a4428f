"""
The table of claims, and the one rule that turns a measurement into a verdict.

claims.csv has a row for each claim. Its column `measure` names a function with its arguments, which
returns a number (algebra.py, micro.py, timing.py, trained.py), or the ratio of two numbers, as in
"pairs 8192 / pairs 4096". Its column `holds` says for which values of the number the claim is true:

    = 12   = 0.33 ± 0.01   < 1e-5   > 0   0.9 to 1.1

What would refute a claim is then any other value: the interval of the measurement lies inside these
values (confirmed), outside (contradicted), or in part of each (undecided).
"""

import csv
import math
import re
import shlex
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy import special

from bench.ablation.power import deciding
from common.errors import UserError

TABLE = Path(__file__).with_name("claims.csv")
COLUMNS = ("id", "kind", "claim", "source", "measure", "quantity", "holds")
KINDS = ("algebra", "micro", "trained", "gpu")
ALPHA = 0.05  # of all intervals of one kind together
MOST_RUNS = 100_000  # an estimate of the runs that would decide stops here

CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
UNDECIDED = "undecided at our scale"
NOT_HERE, NOT_YET = "not measurable here", "not measured"
WORDS = (CONFIRMED, CONTRADICTED, UNDECIDED, NOT_HERE, NOT_YET)


class NotMeasurable(Exception):
    """This machine cannot measure it; the message says what it lacks."""


class NotMeasured(Exception):
    """It could be measured, and has not been; the message says what is missing."""


@dataclass
class Measurement:
    """A number and its standard error. With `log` the error is that of its logarithm."""

    value: float
    se: float = 0.0  # 0: exact
    df: float = math.inf
    runs: int = 0  # runs, or rounds of a timing, in the smaller of the two groups compared
    note: str = ""  # the setting
    log: bool = False
    screening: bool = False  # a screening ranks, and decides nothing

    def interval(self, level):
        """(low, high) that hold the true value with probability 1 - level."""
        if not self.se:
            return self.value, self.value
        half = float(special.stdtrit(self.df, 1 - level / 2)) * self.se
        if self.log:
            return self.value * math.exp(-half), self.value * math.exp(half)
        return self.value - half, self.value + half


def error_of(low, high):
    """The standard error of a ratio's logarithm, from its 95 % interval."""
    return math.log(high / low) / (2 * 1.96)


@dataclass
class Claim:
    """A row of the table."""

    id: str
    kind: str  # of KINDS
    claim: str
    source: str
    measure: str
    quantity: str  # what is measured, in words
    holds: str

    @property
    def calls(self):
        """[(name of a function, its arguments)]: of one, or of the two that make a ratio."""
        words = shlex.split(self.measure)
        sides = [list(side) for is_slash, side in groupby(words, "/".__eq__) if not is_slash]
        return [(name, arguments) for name, *arguments in sides]

    @property
    def bounds(self):
        """(least, greatest) value for which the claim is true."""
        return parse_bounds(self.holds)


def parse_bounds(text):
    """(least, greatest) of a column `holds`. Raises ValueError for any other form."""
    number = r"([-+]?[\d.]+(?:e[-+]?\d+)?)"
    for form, bounds in (
        (rf"= {number} ± {number}", lambda a, b: (a - b, a + b)),
        (rf"= {number}", lambda a: (a, a)),
        (rf"< {number}", lambda a: (-math.inf, math.nextafter(a, -math.inf))),
        (rf"> {number}", lambda a: (math.nextafter(a, math.inf), math.inf)),
        (rf"{number} to {number}", lambda a, b: (a, b)),
    ):
        match = re.fullmatch(form, text)
        if match:
            least, greatest = bounds(*map(float, match.groups()))
            if least <= greatest:
                return least, greatest
    raise ValueError(f"no bound: {text!r}")


def read(path=TABLE):
    """[Claim] of the table. Raises UserError for a row that means nothing."""
    fix = "write it as the rows above it"
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    claims = []
    for number, row in enumerate(rows, 2):
        if tuple(row) != COLUMNS or None in row.values() or row["kind"] not in KINDS:
            raise UserError("a row of the table has other columns", f"{path}:{number}", fix)
        claim = Claim(**row)
        try:
            claim.bounds, claim.calls  # noqa: B018 (both raise ValueError)
        except ValueError as error:
            raise UserError(str(error), f"{path}:{number}", fix) from None
        claims.append(claim)
    if len({claim.id for claim in claims}) < len(claims):
        raise UserError("two rows of the table have one id", path, "give each its own")
    return claims


def levels(claims):
    """{kind: the level of each of its intervals}, such that all of a kind hold together with
    probability 1 - ALPHA (Bonferroni), also those that have not been measured."""
    return {kind: ALPHA / max(1, sum(c.kind == kind for c in claims)) for kind in KINDS}


# ---------------------------------------------------------------- the verdict


def verdict(claim, measurement, level):
    """The word for a claim: where the measurement's interval lies."""
    least, greatest = claim.bounds
    low, high = measurement.interval(level)
    if math.isnan(low + high) or measurement.screening:
        return UNDECIDED
    if least <= low and high <= greatest:
        return CONFIRMED
    return CONTRADICTED if high < least or low > greatest else UNDECIDED


def runs_to_decide(claim, measurement, level):
    """About how many runs would decide an undecided claim with 80 % power, if its true value is the
    measured one; None if over MOST_RUNS, or if there is no error to shrink."""
    m, ends = measurement, np.array(claim.bounds)
    if not m.se or not math.isfinite(m.se) or not m.runs:
        return None
    value = m.value
    if m.log:
        ends = np.log(np.maximum(ends, 1e-300))
        value = math.log(value)
    distance = float(np.min(abs(ends - value)))  # to the nearest end of the bound
    numbers = np.unique(np.geomspace(m.runs + 1, MOST_RUNS, 2000).astype(int))
    growth = numbers / m.runs
    return deciding(numbers, distance, m.se / np.sqrt(growth), m.df * growth, 0, level)


# ---------------------------------------------------------------- a claim, measured


@dataclass
class Finding:
    """A claim with its measurement and its verdict."""

    claim: Claim
    word: str
    measurement: Measurement | None = None
    level: float = ALPHA
    reason: str = ""  # why there is no measurement

    @property
    def more(self):
        """Runs that would decide; None for a claim that is not undecided."""
        if self.word != UNDECIDED:
            return None
        return runs_to_decide(self.claim, self.measurement, self.level)


def examine(claim, functions, level):
    """The Finding of a claim: call its function, and judge what it returns."""
    try:
        found, *below = [functions[name](*arguments) for name, arguments in claim.calls]
    except (NotMeasured, NotMeasurable) as missing:
        word = NOT_HERE if isinstance(missing, NotMeasurable) else NOT_YET
        return Finding(claim, word, level=level, reason=str(missing))
    if not isinstance(found, Measurement):
        found = Measurement(found / below[0] if below else float(found))
    return Finding(claim, verdict(claim, found, level), found, level)
