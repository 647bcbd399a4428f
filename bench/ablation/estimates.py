"""What one setting of the page of the answer says about a part, whichever of the two is the base:
the model with the part or the model without it."""

import math
from dataclasses import dataclass

import numpy as np

from bench.ablation import report, tables
from bench.ablation.comparisons import TEST
from bench.ablation.worth import TOKENS_OF_A_MARGIN, Z

WORDS = {"better": "helps", "worse": "hurts", "tie": "no difference"}
OPPOSITE = {"better": "worse", "worse": "better"}


@dataclass
class Setting:
    """One sweep."""

    folder: str  # below the page's
    base: str
    name: str
    section: report.Section

    @property
    def admitted(self):
        """Whether its base has learned: it ends below the trigrams of its text."""
        return not self.section.facts.above_trigrams


@dataclass
class Estimate:
    """What one setting says about a part, which an arm puts into the base or takes out of it."""

    part: str
    setting: Setting
    arm: dict  # the row of the arm's verdict
    taken_out: bool

    def __post_init__(self):
        self.row = of_part(self.arm) if self.taken_out else self.arm
        self.ends = self.setting.section.curve_ends
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
        section = self.setting.section
        arm = section.cost(self.arm["arm"], key)
        base = section.cost(self.arm["against"], key)
        return base / arm if self.taken_out else arm / base

    def worth(self):
        """The worth in tokens with its interval, as a text."""
        text = tables.multiple(self.row, ends=self.ends)
        return text.replace(" [", " × [") if "[" in text else text

    def worth_in_time(self):
        """The worth in time, as a text."""
        ends = self.ends / self.ratio("step_ratio")
        return tables.multiple(self.row, "worth_time", ends).split(" [")[0]

    def bar(self):
        """(worth, low, high) within the curve of the base; None if it is not known."""
        values = [self.row[key] for key in ("worth", "worth_low", "worth_high")]
        return None if np.isnan(values[0]) else np.clip(values, *self.ends).tolist()

    def log_worth(self):
        """The row of a table for effects.fit: the log of the worth, its standard error, and whether
        it lies beyond the end of the curve, as it does where no run learned; None if it is not
        known."""
        low, high = self.ends
        worth = self.row["worth"]
        fails = self.word.startswith("fails")
        if fails and math.isnan(worth):
            worth = high if self.taken_out else low
        if math.isnan(worth):
            return None
        censored = int(worth >= high) - int(worth <= low)
        if fails:
            censored = 1 if self.taken_out else -1
        worth = np.clip(worth, low, high)
        bounds = np.array([self.row["worth_low"], self.row["worth_high"]])
        inside = bounds[(bounds > low) & (bounds < high)]
        distances = np.abs(np.log(inside / worth)) / Z
        se = distances.mean() if len(inside) else abs(self.row["se"]) / self.fall()
        if math.isnan(se):
            se = TOKENS_OF_A_MARGIN  # one run, or none that learned
        return {
            "part": self.part,
            "setting": self.setting.name,
            "log_worth": float(np.log(worth)),
            "se": float(se),
            "censored": censored,
        }

    def fall(self):
        """The nats that the base's loss falls by while its tokens grow e-fold, over its curve."""
        points = self.setting.section.curve.points
        return (points[0][1] - points[-1][1]) / math.log(points[-1][0] / points[0][0])

    def rates(self):
        """[("base" or "part", [(log2 of the rate, mean loss)])] of the runs that chose rates."""
        section = self.setting.section
        lines = []
        for arm in [*filter(section.is_replicate, section.arms), self.arm["arm"]]:
            runs = section.tuned[section.tuned["arm"] == arm]
            means = runs.groupby("rate")["val_loss_tune"].mean()
            kind = "base" if section.is_replicate(arm) else "part"
            if self.taken_out:
                kind = {"base": "part", "part": "base"}[kind]
            points = list(zip(np.log2(means.index).tolist(), means.tolist(), strict=True))
            if len(points) > 1:
                lines.append((kind, points))
        return lines


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
