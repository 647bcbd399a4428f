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
HERE = ""  # the column of a shelf itself, beside the columns of config/answer/page.py


# ---------------------------------------------------------------- the estimates of a part


@dataclass
class Estimate:
    """The result of one sweep for a part, which an arm puts into the base or takes out of it."""

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
        """The cost with the part over the cost without it, or else the cost of the arm over the
        cost of the base; nan if unknown."""
        arm = self.section.cost(self.row["arm"], key)
        base = self.section.cost(self.row["against"], key)
        return base / arm if self.taken_out and of_part else arm / base

    def worth(self):
        """(worth × tokens, low, high) within the curve of the base; None if it is not known."""
        worth = [self.row["worth"], self.row["worth_low"], self.row["worth_high"]]
        if np.isnan(worth[0]):
            return None
        return np.clip(worth, *self.section.curve_ends).tolist()

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
        tuned = self.section.tuned
        lines = []
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
    """The verdict on a part, as words. signs: {base: sign} of the bases that measured it."""
    helped = [BASES[base] for base, sign in signs.items() if sign == 1]
    hurt = [BASES[base] for base, sign in signs.items() if sign == -1]
    same = [BASES[base] for base, sign in signs.items() if sign == 0]
    other = f", not {same[0]}" if same else ""
    if helped and hurt:
        return f"helps {helped[0]}, hurts {hurt[0]}"
    if helped:
        return "helps in both" if len(helped) > 1 else f"helps {helped[0]}{other}"
    if hurt:
        return "hurts in both" if len(hurt) > 1 else f"hurts {hurt[0]}{other}"
    if len(same) > 1:
        return "no difference"
    return f"no difference in {same[0]}" if same else "undecided"


def beside(says, signs):
    """A published verdict (or None) beside ours, as words. signs: {base: sign} of ours. Directions
    are compared, not sizes."""
    if says is None:
        return "cannot be tested here"
    if not signs:
        return tables.DASH
    theirs = tables.SIGNS[says]
    words = {None: "undecided", 1: "better", -1: "worse", 0: "not seen"}
    if theirs:
        words[-theirs] = "opposite"
    words[theirs] = "seen"
    if len(set(signs.values())) > 1:
        return ", ".join(f"{words[sign]} in {BASES[base]}" for base, sign in signs.items())
    (sign,) = set(signs.values())
    return "seen" if sign == theirs else f"{words[sign]} at our scale"


# ---------------------------------------------------------------- the content of the page


class Page:
    """The content of the page, for the templates. sections: {folder below the answer: Section}."""

    def __init__(self, config, sections):
        self.config = config
        self.sweeps = {}  # (base, column) -> Section
        for base, folder in config["shelves"].items():
            for column, name in {HERE: "", **config["columns"]}.items():
                section = sections.get(f"{folder}/{name}".rstrip("/"))
                if section:
                    self.sweeps[base, column] = self.named(section, base)
        self.recipe = {}  # step -> Section
        for folder, step in config["recipe"].items():
            if folder in sections:
                self.recipe[step] = self.named(sections[folder], "llama")

        self.shelves = {}  # (base, column) -> Section, without screenings
        self.here = {}  # base -> Section of the shelf itself
        for (base, column), section in self.sweeps.items():
            if not section.facts.screening:
                self.shelves[base, column] = section
                if column == HERE:
                    self.here[base] = section
        judged = [(section.verdicts, section.facts) for section in self.shelves.values()]
        badges = verdicts.badges(judged)
        rows = {}  # (base, column) -> {arm: its verdict}
        for badge, (key, section) in zip(badges, self.shelves.items(), strict=True):
            section.verdicts["badge"] = badge
            rows[key] = {row["arm"]: row for row in section.swaps}
        self.parts = [self.part(name, rows, **facts) for name, facts in config["parts"].items()]
        self.measured = [part for part in self.parts if part.first()]

    def named(self, section, base):
        """The section with the names that this page gives the parts."""
        names = {}
        for part, facts in self.config["parts"].items():
            names[facts.get("into", {}).get(base)] = part
            names[facts.get("out_of", {}).get(base)] = f"{part} taken out"
        table = section.verdicts
        given = table["arm"].map(names).fillna(table["name"])
        return replace(section, verdicts=table.assign(name=given))

    def part(self, name, rows, swap, claims, into=None, out_of=None):
        """The Part of an entry of the config. rows: {(base, column): {arm: its verdict}}."""
        part = Part(name, swap, published=[], estimates={})
        for key, section in self.shelves.items():
            base, column = key
            for taken_out, arms in ((False, into or {}), (True, out_of or {})):
                row = rows[key].get(arms.get(base))
                if row:
                    part.estimates[key] = Estimate(name, base, column, section, row, taken_out)
        for text, says, source, address in claims:
            part.published.append((text, beside(says, part.signs), source, address))
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
        theirs = []
        others = []
        for found in ours:
            k = self.config["multiples"][found.part]
            if found.taken_out:
                k = 1 / k
            theirs.append(k)
            others.append({"worth": k, "worth_low": k, "worth_high": k})
        rows = [found.row for found in ours]
        title = figures.rank_correlation([row["worth"] for row in rows], theirs)
        ends = ours[0].section.curve_ends
        return figures.worths_beside(rows, others, "worth", ("ours", "published"), ends, title)

    def has_answer(self):
        """Whether a part is measured, the bases beat the n-grams and all planned runs ended."""
        early = any(s.facts.marked or s.missing() for s in self.here.values())
        return bool(self.measured) and not early


# ---------------------------------------------------------------- files


def pictures_of(page):
    """{file name: Figure} of the page; figures without data are left out."""
    config = page.config
    here = page.here
    made = {}
    base, name = config["example"]
    for arm in page.arms(base, [name]):
        made["example"] = figures.example(here[base], arm)
    for key, draw, base in (("swaps", figures.forest, "gpt2"), ("worths", figures.worths, "llama")):
        if base in here:
            rows = here[base].verdicts.to_dict("records")
            decided = [row for row in rows if row["verdict"] != "undecided"]
            undecided = [row for row in rows if row["verdict"] == "undecided"]
            made[key] = draw(here[base], decided)
            made[f"{key}-undecided"] = draw(here[base], undecided)
    if "gpt2" in here:
        gpt2 = here["gpt2"]
        arms = [*page.arms("gpt2", config["rates"]), *filter(gpt2.is_replicate, gpt2.arms)]
        made["rates"] = figures.learning_rates(gpt2, arms)
    for base, section in here.items():  # the figure of the last base that has one
        arms = [section.plan["base"], *page.arms(base, config["contexts"])]
        made["contexts"] = figures.extrapolation(section, arms) or made.get("contexts")
        for column, other in config["beside"].items():
            beside = page.sweeps.get((base, other))
            section = page.sweeps.get((base, column))
            if beside and section:
                made[column] = figures.agreement(beside, section) or made.get(column)
    made["published"] = page.beside_published()
    rows = []
    for base in here:
        for part in page.measured:
            if part.at(base):
                row = part.at(base).row
                rows.append(row | {"name": f"{row['name']}, {BASES[base]}"})
    made["tests"] = figures.on_test_split(rows)
    return {key: figure for key, figure in made.items() if figure}


def write(config, folders, out):
    """Write the page of the sweeps in some folders, and the report of each, into the folder `out`.
    Returns the path of the page."""
    # Each folder by itself: a confirmation has other seeds than the shelf that chose its part.
    sections = []
    for folder in folders:
        sections += report.judge([folder])
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
