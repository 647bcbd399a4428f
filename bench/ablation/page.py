"""The page of the answer: a row for each part, over the planned settings in which it was measured.

A planned setting is one of config/answer/settings.py; an older sweep is of one setting, with many
seeds. config/answer/page.py names the sweeps, the arms that put a part into a base or take it out,
and what others published. Every number here is of the part, the model with it beside the model
without it, whichever of the two is the base. All numbers come from the rows, all sentences from the
templates.
"""

import math
import os
from dataclasses import dataclass, field

import matplotlib
import numpy as np
import pandas as pd

from bench.ablation import (
    effects,
    factors,
    figures,
    page_figures,
    page_tables,
    page_worths,
    predictions,
    report,
    tables,
)
from bench.ablation.estimates import WORDS, Estimate, Shelf
from bench.settings import held_out, worths
from bench.settings.table import span
from common.files import write as write_file

CUT = math.log(10)  # of a figure's axis


@dataclass
class Part:
    """A row of a table and its card."""

    name: str
    swap: str
    estimates: list  # of Estimate, in the order of the sweeps
    claims: list  # (text, effect on the loss, source, address)
    published: list  # of (worth in tokens, source)
    effect: effects.Effect | None = None  # over the planned settings; None if it ran in none
    depends: dict = field(default_factory=dict)  # {factor: levels, the better one first}
    rows: list = field(default_factory=list)  # of worths.csv, that its chart shows

    def within(self, base):
        """The estimate of the first sweep of a base that has one; None if none has."""
        found = [each for each in self.estimates if each.shelf.base == base]
        return found[0] if found else None

    @property
    def word(self):
        """The verdict over the planned settings; without any, the one within its first sweep."""
        if not self.effect:
            return self.estimates[0].word
        if self.effect.n_settings < effects.LEAST_SETTINGS:
            return "too few settings"
        if self.effect.word == "not known" and self.depends:
            return f"depends on {' and '.join(self.depends)}"
        return self.effect.word

    @property
    def worth(self):
        """Its mean worth, or that in its first sweep; nan if it is not known."""
        return np.exp(self.effect.mean) if self.effect else self.estimates[0].row["worth"]

    @property
    def ends(self):
        """The ends of the prediction in figures, as logs; an open one is cut. Empty without one."""
        if not (self.effect and tables.known(self.effect.mean)):
            return []
        return np.clip([self.effect.new_low, self.effect.new_high], -CUT, CUT).tolist()

    def in_time(self):
        """Its worth over the time of a step, in the first setting that timed it."""
        return self.worth / self.cost("step_time")

    def cost(self, column):
        """A cost with the part over the cost without it, in the first setting that measured it; nan
        if none did."""
        ratios = [each.ratio(page_worths.COSTS[column]) for each in self.estimates]
        ratios += [row[column] for row in self.rows]
        return next(filter(tables.known, ratios), math.nan)

    @property
    def anchor(self):
        """The end of the address of its card."""
        return self.name.lower().replace(" ", "-")


def order(part):
    """What parts are sorted by: enough settings or few, then the worth, an unknown one last."""
    few = part.effect is not None and part.effect.n_settings < factors.ENOUGH
    return few, -part.worth if tables.known(part.worth) else math.inf


def beside(says, word):
    """A published effect (or None) beside our word, as words: by direction, not by size."""
    if says is None:
        return "cannot be tested here"
    if word not in WORDS.values():
        return f"{word} here"
    theirs = WORDS[says]
    if theirs == word:
        return "the same here"
    return "opposite" if {theirs, word} == {"helps", "hurts"} else "differs here"


def multiple(value, low, high):
    """A worth with its interval, from their logs, as a text: one end where the other is open."""
    if high == math.inf:
        return f">{np.exp(low):.2f}"
    if low == -math.inf:
        return f"<{np.exp(high):.2f}"
    return tables.interval(*np.exp([value, low, high]), "{:.2f}".format)


# ---------------------------------------------------------------- the content of the page


class Page:
    """The content of the page, for the templates. sections: {folder below the answer: Section}.
    planned: [worths.Measured] of the planned settings that have run, and of their test. tested:
    [Prediction] of the settings of the test."""

    def __init__(self, config, sections, planned=(), tested=()):
        self.config = config
        self.planned = planned
        self.shelves = []  # those whose base has learned: it ends below the trigrams of its text
        for folder, (base, name) in config["settings"].items():
            if folder in sections and not sections[folder].facts.above_trigrams:
                self.shelves.append(Shelf(base, name, sections[folder]))

        columns, measured = worths.table(planned)
        measured += worths.table(planned, held_out=True)[1]
        self.columns = pd.DataFrame(columns)  # of the parts that the page shows
        self.columns = self.columns[self.columns["part"].isin(config["parts"])]
        self.worths = [worth for worth in measured if worth.part in config["parts"]]
        self.n_settings = len(set(self.columns["setting"]))
        self.levels = None  # of the factors, once the settings can tell them apart
        if self.n_settings >= factors.ENOUGH:
            self.levels = factors.levels_of(planned, self.columns["setting"])

        parts = self.parts_of_config()
        self.parts = [part for part in parts if part.effect or part.estimates]
        self.unmeasured = [part.name for part in parts if not (part.effect or part.estimates)]
        self.answers = sorted((part for part in self.parts if part.effect), key=order)
        self.rows = page_worths.table(self)
        for part in self.parts:
            part.rows = self.rows_of(part)
        self.others = sorted((part for part in self.parts if not part.effect), key=order)
        self.predictions, self.scores = self.judge_predictions(tested)

    def parts_of_config(self):
        """The Part of each entry of the config, with its effect over the planned settings."""
        fitted = {effect.part: effect for effect in effects.fit(self.columns)}
        depends = {}
        if self.levels is not None:
            depends = factors.depends_on(self.columns, self.levels)
        parts = []
        for name, facts in self.config["parts"].items():
            part = self.part(name, **facts)
            part.effect = fitted.get(name)
            part.depends = depends.get(name, {})
            parts.append(part)
        return parts

    def judge_predictions(self, tested):
        """([Prediction] of single parts, {kind: their scores}): of the settings of the test, and of
        each planned setting from the others."""
        single = [name for name in self.config["parts"] if name != page_tables.TOGETHER]
        tested = [each for each in tested if each.part in single]
        left_out = predictions.leave_one_out(self.columns[self.columns["part"].isin(single)])
        kinds = {"the settings of the test": tested, "each setting from the others": left_out}
        scores = {kind: predictions.scores(own) for kind, own in kinds.items() if own}
        return tested + left_out, scores

    def rows_of(self, part):
        """The rows that a part's chart shows: of the planned settings if it ran there, else of the
        sweeps. Each with its setting in words, its level of the factor that colours the chart, and
        the logs of worth and interval."""
        rows = self.rows[self.rows["part"] == part.name]
        is_planned = rows["planned"] > 0
        rows = rows[is_planned if part.effect else ~is_planned]
        facts_of = {each.name: each.facts for each in self.planned}
        factor = next(iter(part.depends), "base")
        charted = []
        for row in rows.to_dict("records"):
            facts = facts_of.get(row["setting"])
            if facts:
                name = page_worths.name_of(facts)
                level = facts["factors"][factor]
            else:  # an older sweep
                name = row["setting"]
                level = row["base"]
            logs = np.log([row["worth"], row["low"], row["high"]]).tolist()
            charted.append(row | {"name": name, "level": page_worths.word(level), "logs": logs})
        return sorted(charted, key=lambda row: (row["level"], row["worth"]))

    def worth_at(self, part, factor, level):
        """The mean worth of a part in the planned settings at a level of a factor, as a text."""
        names = [each.name for each in self.planned if each.facts["factors"][factor] == level]
        rows = self.rows[(self.rows["part"] == part.name) & (self.rows["planned"] == 1)]
        return page_worths.mean(rows[rows["setting"].isin(names)])

    def part(self, name, swap, claims=(), into=None, out_of=None):
        """The Part of an entry of the config."""
        estimates = []
        for shelf in self.shelves:
            rows = {row["arm"]: row for row in shelf.section.swaps}
            for taken_out, arms in ((False, into or {}), (True, out_of or {})):
                row = rows.get(arms.get(shelf.base))
                if row:
                    estimates.append(Estimate(name, shelf, row, taken_out))
        return Part(name, swap, estimates, claims, self.config["multiples"].get(name, []))


# ---------------------------------------------------------------- files


def pictures_of(page):
    """{file name: Figure} of the page; figures without data are left out."""
    base, name = page.config["example"]
    made = {"settings": page_figures.across(page.answers, page.rows)}
    for found in [part.within(base) for part in page.parts if part.name == name]:
        if found:
            made["example"] = page_figures.example(found.shelf.section, found.arm["arm"], name)
    return {key: figure for key, figure in made.items() if figure}


def values_of(page, pictures, reports):
    """What the templates read. reports: the paths of the reports, from the page's folder."""
    return {
        "page": page,
        "pictures": pictures,
        "reports": reports,
        "made": page_tables.made(page),
        "tiles": page_tables.tiles(page),
        "card_table": page_tables.card_table,
        "marked": page_worths.marked,
        "tables": tables,
        "span": span,
        "word": page_worths.word,
        "multiple": multiple,
        "beside": beside,
    }


def write(config, folders, out):
    """Write the page of the sweeps in some folders, and the report of each, into the folder `out`.
    Returns the path of the page."""
    sections = report.judge(folders)
    named = {os.path.relpath(section.folder, out): section for section in sections}
    measured = worths.load(out / "settings")
    page = Page(config, named, measured, tested=held_out.scored(out / "settings"))
    with matplotlib.rc_context(figures.STYLE):
        pictures = pictures_of(page)
        for key, figure in pictures.items():
            write_file(out / f"{key}.png", figures.saved(figure, "png", dpi=150))
    reports = [os.path.relpath(report.write_report(s), out) for s in sections]
    values = values_of(page, pictures, reports)
    write_file(out / "worths.csv", page.rows.to_csv(index=False, float_format="%.7g"))
    for name in ("index.html", "index.md"):
        write_file(out / name, report.render(f"{name}.j2", **values))
    return out / "index.html"
