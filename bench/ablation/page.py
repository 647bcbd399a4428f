"""The page of the answer: a row for each part, from the sweeps of the shelves.

A shelf is the sweep of all parts in one base, and has columns: the same arms at another size, on
another text, or with AdamW. config/answer/page.py names the arms that put a part into a base or
take it out, and what others published. All numbers come from the sweeps, all sentences from the
templates. A screening, and a sweep whose base ends above the trigrams, are kept off the table.
"""

import os
from dataclasses import dataclass, replace

import matplotlib
import numpy as np

from bench.ablation import figures, report, tables, verdicts
from bench.ablation.caveats import replicate_differs
from common.files import write as write_file

BASES = {"gpt2": "GPT-2", "llama": "LLaMA"}
HERE = ""  # the column of a shelf itself, beside those of config/answer/page.py


# ---------------------------------------------------------------- what a part is worth


@dataclass
class Estimate:
    """What one sweep says of a part, which an arm puts into the base or takes out of it."""

    part: str
    base: str
    column: str
    section: report.Section
    row: dict  # of the verdicts, with a badge
    taken_out: bool  # the arm takes the part out of the base

    @property
    def sign(self):
        """1, 0, -1: the part helps, makes no difference, hurts; None: undecided."""
        sign = tables.sign_of(self.row)
        return -sign if sign and self.taken_out else sign

    def ratio(self, key, of_part=True):
        """A cost with the part, times that without it, or that of the arm, times that of the base;
        nan if unknown."""
        arm, base = (self.section.cost(self.row[of], key) for of in ("arm", "against"))
        return base / arm if self.taken_out and of_part else arm / base

    def worth(self):
        """(worth × tokens, low, high) within the curve of the base; None if it is not known."""
        worth = [self.row[key] for key in ("worth", "worth_low", "worth_high")]
        return np.clip(worth, *self.section.curve_ends).tolist() if not np.isnan(worth[0]) else None

    def training(self):
        """[("base" or "part", [(step, mean loss)])] during training."""
        lines = []
        for kind, arm in (("base", self.row["against"]), ("part", self.row["arm"])):
            runs = figures.curves_of(self.section, arm)
            steps = figures.late_steps(runs, 0) if runs else []
            if len(steps):
                losses = figures.mean_at(runs, steps)[0].tolist()
                lines.append((kind, list(zip(steps.astype(int).tolist(), losses, strict=True))))
        return lines

    def rates(self):
        """[("base" or "part", [(log2 of the rate, mean loss)])] of the runs that chose rates."""
        tuned, lines = self.section.tuned, []
        for arm in [*filter(self.section.is_replicate, self.section.arms), self.row["arm"]]:
            means = tuned[tuned["arm"] == arm].groupby("rate")["val_loss_tune"].mean()
            kind = "part" if arm == self.row["arm"] else "base"
            points = list(zip(np.log2(means.index).tolist(), means.tolist(), strict=True))
            if len(points) > 1:
                lines.append((kind, points))
        return lines


@dataclass
class Part:
    """A row of the table and its card."""

    name: str
    swap: str
    published: list  # of claims: (text, how it stands beside ours, source, address)
    estimates: dict  # (base, column) -> Estimate

    def at(self, base, column=HERE):
        return self.estimates.get((base, column))

    def first(self, column=HERE):
        """The estimate in GPT-2, or else in LLaMA; None if there is none."""
        return self.at("gpt2", column) or self.at("llama", column)

    @property
    def signs(self):
        """{base: 1, 0, -1 or None} of the bases in which it was measured."""
        return {base: self.at(base).sign for base in BASES if self.at(base)}

    @property
    def word(self):
        return word_of(self.signs)

    @property
    def anchor(self):
        """The end of the address of its card."""
        return self.name.lower().replace(" ", "-")


def word_of(signs):
    """The word for {base: sign}, of the bases in which a part was measured."""
    helped, hurt, same = ([BASES[base] for base in signs if signs[base] == k] for k in (1, -1, 0))
    other = f", not {same[0]}" if same else ""
    if helped and hurt:
        return f"helps {helped[0]}, hurts {hurt[0]}"
    for verb, bases in (("helps", helped), ("hurts", hurt)):
        if bases:
            return f"{verb} in both" if len(bases) > 1 else f"{verb} {bases[0]}{other}"
    if not same:
        return "undecided"
    return f"no difference in {same[0]}" if len(same) == 1 else "no difference"


def beside(says, signs):
    """How what others published, a verdict or None, stands beside ours, {base: sign}. Directions
    are compared, not sizes."""
    if says is None or not signs:
        return "cannot be tested here" if says is None else tables.DASH
    theirs = tables.SIGNS[says]
    words = {None: "undecided", 1: "better", -1: "worse", 0: "not seen"}
    words |= {-theirs: "opposite", theirs: "seen"} if theirs else {0: "seen"}
    if len(set(signs.values())) > 1:
        return ", ".join(f"{words[sign]} in {BASES[base]}" for base, sign in signs.items())
    (sign,) = set(signs.values())
    return "seen" if sign == theirs else f"{words[sign]} at our scale"


# ---------------------------------------------------------------- the content of the page


class Page:
    """The content of the page, for the templates. sections: {folder below the answer: Section}."""

    def __init__(self, config, sections):
        self.config, self.sweeps = config, {}  # (base, column) -> Section
        for base, folder in config["shelves"].items():
            for column, name in {HERE: "", **config["columns"]}.items():
                if section := sections.get(f"{folder}/{name}".rstrip("/")):
                    self.sweeps[base, column] = self.named(section, base)
        screening = {key: s.facts.screening for key, s in self.sweeps.items()}
        self.shelves = {key: s for key, s in self.sweeps.items() if not screening[key]}
        steps = {step: sections.get(folder) for folder, step in config["recipe"].items()}
        self.recipe = {step: self.named(found, "llama") for step, found in steps.items() if found}
        judged = [(section.verdicts, section.facts) for section in self.shelves.values()]
        for (table, _), agree in zip(judged, verdicts.badges(judged), strict=True):
            table["badge"] = agree
        self.here = {base: s for (base, column), s in self.shelves.items() if column == HERE}
        by_arm = {key: {row["arm"]: row for row in s.swaps} for key, s in self.shelves.items()}
        self.parts = [self.part(name, by_arm, **facts) for name, facts in config["parts"].items()]
        self.measured = [part for part in self.parts if part.first()]

    def named(self, section, base):
        """The section with the names that this page gives the parts."""
        names = {}
        for part, facts in self.config["parts"].items():
            into, out_of = (facts.get(way, {}).get(base) for way in ("into", "out_of"))
            names |= {into: part, out_of: f"{part} taken out"}
        arms, own = section.verdicts["arm"], section.verdicts["name"]
        return replace(section, verdicts=section.verdicts.assign(name=arms.map(names).fillna(own)))

    def part(self, name, by_arm, swap, claims, into=None, out_of=None):
        """The Part of an entry of the config. by_arm: {shelf: {arm: its verdict}}."""
        part = Part(name, swap, [], {})
        for (base, column), section in self.shelves.items():
            for out, arms in ((False, into or {}), (True, out_of or {})):
                if row := by_arm[base, column].get(arms.get(base)):
                    part.estimates[base, column] = Estimate(name, base, column, section, row, out)
        part.published = [(text, beside(says, part.signs), *rest) for text, says, *rest in claims]
        return part

    def arms(self, base, names):
        """The arms of some parts that a shelf has measured."""
        parts = {part.name: part.at(base) for part in self.measured}
        return [parts[name].row["arm"] for name in names if parts.get(name)]

    def warnings(self, unfinished, little, differs):
        """One line for each sweep whose planned runs are missing, whose base has learned little, or
        whose base differs from its second copy, with the sentences of the template."""
        lines = []
        for (base, column), section in self.shelves.items():
            name = ", ".join(word for word in (BASES[base], column) if word)
            if section.missing():
                lines.append(f"{name}. {unfinished}")
            if section.facts.marked:
                lines.append(f"{name}. {little}")
            if replicate_differs(section):
                copy = section.replicate.to_dict("records")[0]
                lines.append(f"{name}. {differs} {tables.difference(copy, 3)}")
        return lines

    def beside_published(self):
        """A figure of the parts whose worth in tokens was published: ours, and beside it theirs."""
        ours = [part.first() for part in self.measured if part.name in self.config["multiples"]]
        if len(ours) < 3:
            return None
        theirs = [self.config["multiples"][found.part] for found in ours]
        theirs = [1 / k if found.taken_out else k for found, k in zip(ours, theirs, strict=True)]
        others = [dict.fromkeys(("worth", "worth_low", "worth_high"), k) for k in theirs]
        rows = [found.row for found in ours]
        title = figures.rank_correlation([row["worth"] for row in rows], theirs)
        heads, ends = ("ours", "published"), ours[0].section.curve_ends
        return figures.worths_beside(rows, others, "worth", heads, ends, title)

    def has_answer(self):
        """Whether a part is measured, the bases beat the counts and all planned runs ended."""
        early = any(s.facts.marked or s.missing() for s in self.here.values())
        return bool(self.measured) and not early


# ---------------------------------------------------------------- files


def pictures_of(page):
    """{file name: Figure} of the page, without those that have nothing to show."""
    config, here, made = page.config, page.here, {}
    base, name = config["example"]
    for arm in page.arms(base, [name]):
        made["example"] = figures.example(here[base], arm)
    for key, draw, base in (("swaps", figures.forest, "gpt2"), ("worths", figures.worths, "llama")):
        if base in here:
            for end, test in (("", "!="), ("-undecided", "==")):
                shown = here[base].verdicts.query(f"verdict {test} 'undecided'")
                made[key + end] = draw(here[base], shown.to_dict("records"))
    if gpt2 := here.get("gpt2"):
        arms = [*page.arms("gpt2", config["rates"]), *filter(gpt2.is_replicate, gpt2.arms)]
        made["rates"] = figures.learning_rates(gpt2, arms)
    for base, section in here.items():  # the figure of the last base that has one
        arms = [section.plan["base"], *page.arms(base, config["contexts"])]
        made["contexts"] = figures.extrapolation(section, arms) or made.get("contexts")
        for column, other in config["beside"].items():
            if all(pair := [page.sweeps.get((base, one)) for one in (other, column)]):
                made[column] = figures.agreement(*pair) or made.get(column)
    made["published"] = page.beside_published()
    found = [part.at(base) for base in here for part in page.measured if part.at(base)]
    rows = [one.row | {"name": f"{one.row['name']}, {BASES[one.base]}"} for one in found]
    made["tests"] = figures.on_test_split(rows)
    return {key: figure for key, figure in made.items() if figure}


def write(config, folders, out):
    """Write the page of the sweeps in some folders, and the report of each, into the folder `out`.
    Returns the path of the page."""
    # Each folder by itself: the seeds of a confirmation are not those of the shelf that chose it.
    sections = [section for folder in folders for section in report.judge([folder])]
    page = Page(config, {os.path.relpath(s.folders[0], out): s for s in sections})
    with matplotlib.rc_context(figures.STYLE):
        pictures = pictures_of(page)
        for key, figure in pictures.items():
            write_file(out / f"{key}.png", figures.saved(figure, "png", dpi=150))
    reports = [os.path.relpath(report.write_report(s), out) for s in sections]
    values = {"page": page, "pictures": pictures, "reports": reports, "names": figures.NAMES}
    for name in ("index.html", "index.md"):
        write_file(out / name, report.render(f"{name}.j2", tables=tables, bases=BASES, **values))
    return out / "index.html"
