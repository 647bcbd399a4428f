"""What one setting of the page of the answer says about a part, whichever of the two is the base:
the model with the part or the model without it."""

import math
from dataclasses import dataclass

import numpy as np

from bench.ablation import report, tables
from bench.ablation.comparisons import TEST

WORDS = {"better": "helps", "worse": "hurts", "tie": "no difference"}
OPPOSITE = {"better": "worse", "worse": "better"}


@dataclass
class Shelf:
    """One sweep, which is of one setting."""

    base: str
    name: str
    section: report.Section


@dataclass
class Estimate:
    """What one setting says about a part, which an arm puts into the base or takes out of it."""

    part: str
    shelf: Shelf
    arm: dict  # the row of the arm's verdict
    taken_out: bool

    def __post_init__(self):
        self.row = of_part(self.arm) if self.taken_out else self.arm
        self.ends = self.shelf.section.curve_ends
        if self.taken_out:
            self.ends = 1 / self.ends[::-1]

    @property
    def word(self):
        """What the part does in this setting, by the verdict on its arm."""
        verdict = self.row["verdict"]
        if verdict.startswith("fails"):
            return f"{verdict} without it" if self.taken_out else verdict
        return WORDS.get(verdict.partition(",")[0], verdict)

    def ratio(self, key):
        """The cost with the part over the cost without it; nan if unknown."""
        section = self.shelf.section
        arm = section.cost(self.arm["arm"], key)
        base = section.cost(self.arm["against"], key)
        return base / arm if self.taken_out else arm / base

    def worth(self):
        """The worth in tokens with its interval, as a text."""
        return tables.multiple(self.row, ends=self.ends).replace(" [", " × [")

    def worth_in_time(self):
        """The worth in time, as a text."""
        ends = self.ends / self.ratio("step_ratio")
        return tables.multiple(self.row, "worth_time", ends).split(" [")[0]

    def bar(self):
        """(worth, low, high) within the curve of the base; None if it is not known."""
        values = [self.row[key] for key in ("worth", "worth_low", "worth_high")]
        return None if np.isnan(values[0]) else np.clip(values, *self.ends).tolist()

    @property
    def beyond(self):
        """1 where the worth lies above the curve of the base, -1 where it lies below, else 0."""
        low, high = self.ends
        return int(self.row["worth"] >= high) - int(self.row["worth"] <= low)


def of_part(arm):
    """The row of a verdict on an arm that takes a part out, as it is for the part: differences with
    the other sign, worths as their reciprocals."""
    row = dict(arm)
    side, *noise = arm["verdict"].partition(",")  # better, by more than the noise
    row["verdict"] = "".join([OPPOSITE.get(side, side), *noise])
    for value, low, high in (("difference", "low", "high"), TEST):
        row |= {value: -arm[value], low: -arm[high], high: -arm[low]}
    for key in ("worth", "worth_time"):
        low = f"{key}_low"
        high = f"{key}_high"
        row |= {key: over(arm[key]), low: over(arm[high]), high: over(arm[low])}
    return row


def over(value):
    """1 / value, of 0 and inf as well."""
    return math.inf if value == 0 else 1 / value
