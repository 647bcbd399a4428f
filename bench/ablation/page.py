"""The page of the answer: a row for each part, over the settings in which it was measured.

A setting is one sweep: a text, a size, an optimizer and a base. config/answer/page.py names the
settings, the arms that put a part into a base or take it out, and what others published. Every
number here is of the part, the model with it beside the model without it, whichever of the two is
the base. All numbers come from the sweeps, all sentences from the templates.
"""

import math
import os
from dataclasses import dataclass, replace

import matplotlib
import numpy as np

from bench.ablation import (
    effects,
    figures,
    page_figures,
    page_tables,
    page_worths,
    predictions,
    report,
    tables,
)
from bench.ablation.caveats import replicate_differs
from bench.ablation.comparisons import TEST
from bench.ablation.worth import TOKENS_OF_A_MARGIN, Z
from bench.settings import held_out, worths
from common.files import write as write_file

BASES = {"llama": "LLaMA", "gpt2": "GPT-2"}
WORDS = {"better": "helps", "worse": "hurts", "tie": "no difference"}
OPPOSITE = {"better": "worse", "worse": "better"}


# ---------------------------------------------------------------- a part in one setting


@dataclass
class Setting:
    """One sweep."""

    folder: str  # below the page's
    base: str
    name: str
    section: report.Section

    @property
    def base_name(self):
        return BASES[self.base]

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

    @property
    def known(self):
        return self.bar() is not None

    @property
    def log_bar(self):
        """The logs of `bar`, for the figure of a card."""
        return np.log(self.bar()).tolist()

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


# ---------------------------------------------------------------- a part


@dataclass
class Part:
    """A row of the table and its card."""

    name: str
    swap: str
    estimates: list  # of Estimate, in the order of the settings
    claims: list  # (text, effect on the loss, source, address)
    published: float | None  # worth in tokens
    effect: effects.Effect | None = None  # over the settings that the model is about

    def at(self, folder):
        """The estimate in a setting; None if there is none."""
        found = [each for each in self.estimates if each.setting.folder == folder]
        return found[0] if found else None

    @property
    def word(self):
        if not self.effect or self.effect.n_settings < effects.LEAST_SETTINGS:
            return "too few settings"
        return self.effect.word

    def in_time(self):
        """The mean worth over the time of a step, in the first setting that timed it."""
        ratios = [each.ratio("step_ratio") for each in self.estimates]
        known = [ratio for ratio in ratios if tables.known(ratio)]
        return np.exp(self.effect.mean) / known[0] if self.effect and known else math.nan

    @property
    def anchor(self):
        """The end of the address of its card."""
        return self.name.lower().replace(" ", "-")


def order(part):
    """What parts are sorted by: those with a prediction first, by their mean worth."""
    predicted = bool(part.effect) and tables.known(part.effect.mean)
    return -part.effect.mean if predicted else math.inf


def beside(says, word):
    """A published effect (or None) beside our word, as words. Directions are compared, not
    sizes."""
    if says is None:
        return "cannot be tested here"
    if word in ("not known", "too few settings"):
        return f"{word} here"
    theirs = WORDS[says]
    if theirs == word:
        return "seen"
    return "opposite" if {theirs, word} == {"helps", "hurts"} else "not seen"


def chance(p):
    """A probability as a text of as many digits as show on which side of a word's limit it is."""

    def words(p):
        return p >= effects.SURE, p <= round(1 - effects.SURE, 9)

    digits = 2
    while words(p) != words(float(f"{p:.{digits}f}")):
        digits += 1
    return f"{p:.{digits}f}"


def multiple(value, low=math.nan, high=math.nan):
    """A worth with its interval, from their logs, as a text."""
    return tables.interval(*np.exp([value, low, high]), lambda each: f"{each:.2f}")


# ---------------------------------------------------------------- the content of the page


class Page:
    """The content of the page, for the templates. sections: {folder below the answer: Section}.
    planned: [worths.Measured] of the planned settings that have run. tested: [Prediction] of the
    settings of the test."""

    def __init__(self, config, sections, planned=(), tested=()):
        self.config = config
        self.planned = planned
        self.settings = []
        for folder, (base, name) in config["settings"].items():
            if folder in sections:
                section = self.named(sections[folder], base)
                self.settings.append(Setting(folder, base, name, section))
        self.recipe = {}  # step -> Section
        for folder, step in config["recipe"].items():
            if folder in sections:
                self.recipe[step] = self.named(sections[folder], "llama")
        self.admitted = [setting for setting in self.settings if setting.admitted]
        self.modelled = [each for each in self.admitted if each.base == config["model_of"]]

        parts = [self.part(name, **facts) for name, facts in config["parts"].items()]
        self.parts = [part for part in parts if part.estimates]
        self.unmeasured = [part.name for part in parts if not part.estimates]
        worths = self.worths()
        fitted = {found.part: found for found in effects.fit(worths)} if worths["part"] else {}
        for part in self.parts:
            part.effect = fitted.get(part.name)
        self.parts.sort(key=order)  # stable: parts without a prediction keep the config's order
        left_out = predictions.leave_one_out(worths)
        self.scores = {}  # {what was predicted: its scores}
        if left_out:
            shares = {"brier_shares": predictions.brier_of_shares(left_out)}
            self.scores["each setting, from the others"] = predictions.scores(left_out) | shares
        if tested:
            self.scores["the settings of the test"] = predictions.scores(tested)
        self.test = self.on_test_split()

    def named(self, section, base):
        """The section with the names and colours that this page gives the parts."""
        names = {}
        places = {}
        for place, (part, facts) in enumerate(self.config["parts"].items()):
            for way, name in (("into", part), ("out_of", f"without {part}")):
                arm = facts.get(way, {}).get(base)
                names[arm] = name
                places[arm] = place
        table = section.verdicts
        given = table["arm"].map(names).fillna(table["name"])
        return replace(section, verdicts=table.assign(name=given), places=places)

    def part(self, name, swap, claims, into=None, out_of=None):
        """The Part of an entry of the config."""
        estimates = []
        for setting in self.admitted:
            rows = {row["arm"]: row for row in setting.section.swaps}
            for taken_out, arms in ((False, into or {}), (True, out_of or {})):
                row = rows.get(arms.get(setting.base))
                if row:
                    estimates.append(Estimate(name, setting, row, taken_out))
        return Part(name, swap, estimates, claims, self.config["multiples"].get(name))

    def worths(self):
        """The table of log worths for effects.fit, of the settings that it is about."""
        rows = []
        for part in self.parts:
            for found in part.estimates:
                if found.setting in self.modelled and found.log_worth():
                    rows.append(found.log_worth())
        keys = ("part", "setting", "log_worth", "se", "censored")
        return {key: [row[key] for row in rows] for key in keys}

    def on_test_split(self):
        """{outcome on the test split: number} of the differences that the first setting of each
        base decided, by the same tests and correction; {} where there is no test split."""
        counts = dict.fromkeys(("shown", "not shown", "contradicted"), 0)
        for folder in self.config["first"].values():
            for part in self.parts:
                found = part.at(folder)
                decided = found and tables.sign_of(found.row)
                there = tables.sign_on_test(found.row) if decided else None
                if there is not None:
                    counts[("not shown", "shown", "contradicted")[decided * there]] += 1
        return counts if sum(counts.values()) else {}

    def warnings(self, unfinished, little, differs):
        """One line for each setting whose planned runs are missing, whose base has learned little,
        or whose base differs from its second copy, with the sentences of the template."""
        lines = []
        for setting in self.admitted:
            section = setting.section
            if section.missing():
                lines.append(f"{setting.name}. {unfinished}")
            if section.facts.marked:
                lines.append(f"{setting.name}. {little}")
            if replicate_differs(section):
                copy = section.replicate.to_dict("records")[0]
                lines.append(f"{setting.name}. {differs} {tables.difference(copy, 3)}")
        return lines


# ---------------------------------------------------------------- files


def pictures_of(page):
    """{file name: Figure} of the page; figures without data are left out."""
    sections = {setting.folder: setting.section for setting in page.admitted}
    made = {}
    folder, name = page.config["example"]
    for found in filter(None, [part.at(folder) for part in page.parts if part.name == name]):
        made["example"] = page_figures.example(sections[folder], found.arm["arm"])
    made["settings"] = page_figures.across(page.parts, page.modelled)
    for key, draw in (("rates", figures.learning_rates), ("contexts", figures.extrapolation)):
        folder, names = page.config[key]
        if folder in sections:
            section = sections[folder]
            control = [section.plan["base"]]
            if key == "rates":
                control = list(filter(section.is_replicate, section.arms))
            parts = [part for part in page.parts if part.name in names]
            arms = [part.at(folder).arm["arm"] for part in parts if part.at(folder)]
            made[key] = draw(section, [*control, *arms])
    found = [part.at(folder) for folder in page.config["first"].values() for part in page.parts]
    made["tests"] = page_figures.on_test_split([each for each in found if each])
    return {key: figure for key, figure in made.items() if figure}


def values_of(page, pictures, reports):
    """What the templates read. reports: the paths of the reports, from the page's folder."""
    return {
        "page": page,
        "pictures": pictures,
        "reports": reports,
        "made": page_tables.made(page),
        "tables": tables,
        "multiple": multiple,
        "chance": chance,
        "beside": beside,
    }


def write(config, folders, out):
    """Write the page of the sweeps in some folders, and the report of each, into the folder `out`.
    Returns the path of the page."""
    # Each folder by itself: a confirmation has other seeds than the shelf that chose its part.
    sections = []
    for folder in folders:
        sections += report.judge([folder])
    named = {os.path.relpath(section.folders[0], out): section for section in sections}
    planned = worths.load(out / "settings")
    page = Page(config, named, planned, tested=held_out.scored(out / "settings"))
    with matplotlib.rc_context(figures.STYLE):
        pictures = pictures_of(page)
        for key, figure in pictures.items():
            write_file(out / f"{key}.png", figures.saved(figure, "png", dpi=150))
    reports = [os.path.relpath(report.write_report(s), out) for s in sections]
    values = values_of(page, pictures, reports)
    worths_csv = page_worths.table(page).to_csv(index=False, float_format="%.5g")
    write_file(out / "worths.csv", worths_csv)
    for name in ("index.html", "index.md"):
        write_file(out / name, report.render(f"{name}.j2", **values))
    return out / "index.html"
