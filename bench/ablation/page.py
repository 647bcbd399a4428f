"""The page of the answer: a row for each part, over the settings in which it was measured.

A setting is one sweep: a text, a size, an optimizer and a base. config/answer/page.py names the
settings, the arms that put a part into a base or take it out, and what others published. Every
number here is of the part, the model with it beside the model without it, whichever of the two is
the base. All numbers come from the sweeps, all sentences from the templates.
"""

import math
import os
from dataclasses import dataclass, field, replace

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
from bench.ablation.estimates import WORDS, Estimate, Setting
from bench.settings import held_out, worths
from common.files import write as write_file

PLAN = "plan"  # model_of: the model is of the planned settings


# ---------------------------------------------------------------- a part


@dataclass
class Part:
    """A row of the table and its card."""

    name: str
    swap: str
    estimates: list  # of Estimate, in the order of the sweeps
    planned: list  # of worths.Worth, in the planned settings
    claims: list  # (text, effect on the loss, source, address)
    published: float | None  # worth in tokens
    effect: effects.Effect | None = None  # over the settings that the model is about
    rows: list = field(default_factory=list)  # of worths.csv, in all settings

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
        return np.exp(self.effect.mean) / self.cost("step_ratio") if self.effect else math.nan

    def cost(self, key):
        """The cost with the part over the cost without it, in the first setting that measured it;
        nan if none did."""
        ratios = [each.ratio(key) for each in self.estimates]
        if key == "step_ratio":
            ratios += [math.exp(each.log_step) for each in self.planned]
        return next(filter(tables.known, ratios), math.nan)

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
        return "the same here"
    return "opposite" if {theirs, word} == {"helps", "hurts"} else "not confirmed here"


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

        self.planned_columns, planned_worths = worths.table(planned)
        parts = [
            self.part(name, [each for each in planned_worths if each.part == name], **facts)
            for name, facts in config["parts"].items()
        ]
        self.parts = [part for part in parts if part.estimates or part.planned]
        self.unmeasured = [part.name for part in parts if part not in self.parts]
        self.rows = page_worths.table(self)
        modelled = self.worths()
        fitted = {found.part: found for found in effects.fit(modelled)} if modelled["part"] else {}
        for part in self.parts:
            part.effect = fitted.get(part.name)
            part.rows = self.rows_of(part.name)
        self.parts.sort(key=order)  # stable: parts without a prediction keep the config's order
        left_out = predictions.leave_one_out(modelled)
        self.scores = {}  # {what was predicted: its scores}
        if left_out:
            shares = {"brier_shares": predictions.brier_of_shares(left_out)}
            self.scores["each from the others"] = predictions.scores(left_out) | shares
        new = [found for found in planned if found.facts["factors"]["base"] == config["model_of"]]
        if left_out and new:
            checked = predictions.predict(modelled, worths.table(new)[0])
            self.scores["planned, from these"] = predictions.scores(checked)
        if tested:
            self.scores["the test"] = predictions.scores(tested)

    def rows_of(self, part):
        """The rows of a part, each with its setting in words and the logs of worth and interval."""
        names = {each.name: page_worths.name_of(each.facts) for each in self.planned}
        found = []
        for row in self.rows[self.rows["part"] == part].to_dict("records"):
            logs = np.log([row["worth"], row["low"], row["high"]]).tolist()
            name = names.get(row["setting"], row["setting"])
            found.append(row | {"name": name, "logs": logs})
        return found

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

    def part(self, name, planned, swap, claims, into=None, out_of=None):
        """The Part of an entry of the config."""
        estimates = []
        for setting in self.admitted:
            rows = {row["arm"]: row for row in setting.section.swaps}
            for taken_out, arms in ((False, into or {}), (True, out_of or {})):
                row = rows.get(arms.get(setting.base))
                if row:
                    estimates.append(Estimate(name, setting, row, taken_out))
        return Part(name, swap, estimates, planned, claims, self.config["multiples"].get(name))

    def worths(self):
        """The table of log worths for effects.fit, of the settings that it is about."""
        if self.config["model_of"] == PLAN:
            return self.planned_columns
        rows = []
        for part in self.parts:
            for found in part.estimates:
                if found.setting in self.modelled and found.log_worth():
                    rows.append(found.log_worth())
        keys = ("part", "setting", "log_worth", "se", "censored")
        return {key: [row[key] for row in rows] for key in keys}

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
    of_plan = page.config["model_of"] == PLAN
    rows = page.rows[(page.rows.planned == 1) if of_plan else (page.rows.planned == 0)]
    if not of_plan:
        rows = rows[rows.base == page.config["model_of"]]
    made["settings"] = page_figures.across(page.parts, rows)
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
    worths_csv = page.rows.to_csv(index=False, float_format="%.5g")
    write_file(out / "worths.csv", worths_csv)
    for name in ("index.html", "index.md"):
        write_file(out / name, report.render(f"{name}.j2", **values))
    return out / "index.html"
