"""The answer page: its tables and figures, as HTML and Markdown, and the README's sentences."""

import os.path
import re
from dataclasses import dataclass

import matplotlib

from bench.ablation import answer, answer_figures, answer_sentences, cost_figures, figures, plots
from bench.ablation.answer import RESULTS
from bench.ablation.answer_figures import BASES, bar
from bench.ablation.caveats import caveats
from bench.ablation.design_report import effects_against_compute
from bench.ablation.report import render
from bench.ablation.scale import Slope
from bench.ablation.sentences import DASH, unfinished
from bench.ablation.significance import ALPHA
from bench.ablation.tables import (
    Cell,
    Table,
    contexts_of,
    difference_cell,
    interval_cell,
    number,
    worth_cell,
)
from common.errors import UserError
from common.files import ROOT
from common.files import write as write_file

FEW_INTERACTIONS = 8
MARKS = "<!-- answer -->", "<!-- end of answer -->"  # around the part of README.md that this writes
LEDGER_WORDS = {  # a verdict of the ledger, and the class that gives its colour
    "confirmed": "better",
    "contradicted": "worse",
}


@dataclass
class Linked:
    """A table each of whose rows leads to the experiment that its numbers come from."""

    table: Table
    links: list  # of an experiment's name, or "", for each row
    cards: bool = False  # on a phone each row is a card


@dataclass
class Picture:
    plot: object  # plots.Plot
    link: str  # the name of its experiment


# ---------------------------------------------------------------- tables


def p_cells(subject):
    """The p-value that the sweep itself gives, and that of the page."""
    equal = subject.word in answer.OF_EQUALITY
    own = subject.p_tie if equal else subject.p_holm
    return [number(own, ".2g"), number(subject.p_page, ".2g")]


def word_cell(subject):
    kind = {"cannot tell": "undecided", "holds": "tie", "grows": "better", "fades": "worse"}
    word = subject.word
    return Cell(word, kind=kind.get(word, word.replace(" ", "-")), tip=subject.why)


def ratio_text(value):
    return f"{value:.2f} ×"


def time_cell(time):
    return Cell("{:.2f} × ({:.2f} to {:.2f})".format(*time), time[0]) if time else Cell()


def parts_table(parts):
    rows = []
    for part in parts:
        subject = part.claim.subject
        picture = bar(subject.worth, subject.word) if subject.worth else ""
        rows.append(
            [
                Cell(f"{part.name} in {BASES.get(part.base, part.base)}", kind="arm"),
                word_cell(subject),
                Cell(picture, kind="picture"),
                worth_cell(subject.worth),
                difference_cell(subject),
                *p_cells(subject),
                time_cell(part.time),
                worth_cell(subject.worth_time),
                number(part.memory, ratio_text),
                number(part.cache, ratio_text),
                Cell(f"{subject.n} + {subject.n_against}", subject.n),
            ]
        )
    headings = (
        "part|verdict|worth|worth in tokens|difference [95 %], nats|p, its sweep|p, this page"
        "|time of a step|worth in time|memory|cache|runs"
    )
    note = (
        "A part that is worth 1.4 × gets as far as its base does with 1.4 times the training"
        " tokens. Time, memory of training and the cache of keys and values are times the base's."
        " Of several sweeps that measured a part, the one with the smallest standard error counts."
    )
    links = [part.claim.experiment.name for part in parts]
    table = Table("parts", "What each part is worth", note, headings.split("|"), rows)
    return Linked(table, links, cards=True)


def interactions_table(claims):
    """The decided interactions, or else the surest ones."""
    found = answer.of_interactions(claims)
    decided = [claim for claim in found if claim.subject.word in ("better", "worse")]
    rows, shown = [], (decided or found)[:FEW_INTERACTIONS]
    for claim in shown:
        subject = claim.subject
        cells = [word_cell(subject), difference_cell(subject), *p_cells(subject)]
        rows.append([Cell(answer.name_of(claim), kind="arm"), *cells])
    note = (
        f"The effect of both parts together beyond the sum of their effects: {len(shown)} of"
        f" {len(found)} that were measured, {len(decided)} of them decided. Below zero both"
        " together are better than their sum."
    )
    headings = ["parts", "verdict", "beyond the sum [95 %], nats", "p, its sweep", "p, this page"]
    table = Table("interactions", "Do they add up?", note, headings, rows)
    return Linked(table, [claim.experiment.name for claim in shown], cards=True)


def slopes_table(claims):
    found = answer.of_slopes(claims)
    rows = []
    for claim in found:
        one = claim.subject
        slope = interval_cell(one.mean, one.low, one.high)
        ends = [number(end, "+.3f") for end in one.line]
        name = Cell(answer.name_of(claim), kind="arm")
        rows.append([name, word_cell(one), slope, *ends, *p_cells(one)])
    headings = (
        "part|verdict|slope [95 %], nats per factor of ten of compute|at the smallest"
        "|at the largest|p, its sweep|p, this page"
    )
    note = "The fitted effect at the ends of the range, and its slope; below zero is better."
    table = Table("slopes", "More, or less, as the model grows?", note, headings.split("|"), rows)
    return Linked(table, [claim.experiment.name for claim in found], cards=True)


def measured(row):
    """What a row of the ledger says that we measured: a number with its interval, and how."""
    text = row.get("measured") or ""
    if not text and row.get("value") is not None:
        text = f"{row.get('quantity') or 'value'}: {row['value']:.4g}"
        if row.get("low") is not None and row["low"] < row["high"]:
            text += f" ({row['low']:.4g} to {row['high']:.4g})"
    return "; ".join(filter(None, [text, row.get("note")]))


def ledger_table(rows):
    """The published claims beside our measurements, those decided first."""
    made = []
    for row in sorted(rows, key=lambda row: row.get("verdict") not in LEDGER_WORDS):
        word = str(row.get("verdict") or "not measured")
        kind = LEDGER_WORDS.get(word, "undecided")
        texts = [str(row.get(key) or DASH) for key in ("claim", "source")]
        texts.append(measured(row) or DASH)
        cells = [Cell(text, kind="long") for text in texts]
        name = Cell(str(row.get("id", DASH)), kind="arm")
        made.append([name, cells[0], cells[1], cells[2], Cell(word, kind=kind)])
    note = (
        "Published claims, and what our own measurements say of each. The ledger has a correction"
        " of its own: the intervals of all claims of one kind hold together with 95 % probability"
        " (Bonferroni)."
    )
    headings = ["claim", "what was published", "where", "what we measured", "verdict"]
    table = Table("ledger", "The ledger", note, headings, made)
    return Linked(table, ["claims"] * len(made), cards=True)


def claims_table(claims):
    """Everything that the page corrects for."""
    rows = []
    for claim in claims:
        one = claim.subject
        slope = isinstance(one, Slope)
        name = Cell(answer.name_of(claim), kind="arm")
        what = Cell("slope" if slope else "difference")
        difference = interval_cell(one.mean, one.low, one.high)
        cells = [Cell(claim.section.label), what, Cell(claim.own), word_cell(one), difference]
        rows.append([name, *cells, *p_cells(one), Cell(one.why or DASH)])
    headings = (
        "comparison|sweep|what|verdict of its sweep|verdict of the page|estimate [95 %]"
        "|p, its sweep|p, this page|note"
    )
    note = "All comparisons of all sweeps: the family of the page's correction."
    table = Table("claims", "Every comparison", note, headings.split("|"), rows)
    return Linked(table, [claim.experiment.name for claim in claims])


# ---------------------------------------------------------------- figures


def drawn(function, subject, key, title, caption=None):
    """The Plot of a figure, or None if there is nothing to draw."""
    with matplotlib.rc_context(plots.STYLE):
        tips = figures.Tips()
        figure = function(subject, tips)
        if figure is None:
            return None
        svg = plots.saved(figure, "svg", transparent=True).decode()
        text = " ".join((caption or function.__doc__).split())
        return plots.Plot(function, key, title, text, figure, plots.inline(svg, key, title, tips))


def pictures(kind, function, found, title):
    """[Picture] of one figure for each section that has something for it."""
    made = []
    for experiment in found:
        for place, section in enumerate(experiment.sections):
            key = f"{kind}_{experiment.name}" + (f"_{place}" if place else "")
            plot = drawn(function, section, key, f"{title}: {section.label}")
            made += [Picture(plot, experiment.name)] if plot else []
    return made


def label(found):
    """Give each section a name on the page: its experiment's, and of a scale its size's, too."""
    for experiment in found:
        for section in experiment.sections:
            of_scale = len(experiment.sections) > 1
            size = f", {section.folders[0].name}" if of_scale else ""
            section.label = experiment.name.replace("_", " ") + size


def figures_of(found, parts):
    """{place in the page: [Picture]}."""
    sections = [section for one in found for section in one.sections]
    single = [
        one for one in found if one.sections and not one.sections[0].scale and not one.screening
    ]
    scales = [one for one in found if one.sections and one.sections[0].scale]
    base = next((one.name for one in found if one.sections), "")
    shown = {
        "noise": [Picture(drawn(answer_figures.noise, sections, "noise", "The noise floor"), base)],
        "parts": [Picture(drawn(answer_figures.worths, parts, "parts", "Worth in tokens"), base)],
        "tokens": [],
        "scale": [],
        "rates": pictures("rates", figures.learning_rates, single, "Learning rates"),
        "curves": pictures("curves", plain_curves, found, "Curves of loss")[:4],
        "extrapolation": pictures(
            "extrapolation", extrapolation, reach(found), "Beyond the training context"
        )[:2],
    }
    for one in scales:
        caption = (
            "The effect of each part at each size, with its 95 % interval, and the fitted line."
            " Below zero the part is better than the base of its size."
        )
        plot = drawn(
            effects_against_compute, one.sections[0], f"scale_{one.name}", one.question, caption
        )
        shown["scale"] += [Picture(plot, one.name)] if plot else []
    curve = next((one for one in found if one.name == "base" and one.sections), None)
    if curve:
        shown["tokens"] = pictures("tokens", figures.tokens, [curve], "What tokens are worth")
    return {place: [one for one in made if one.plot] for place, made in shown.items()}


def plain_curves(section, tips):
    """The upper panel shows the mean loss over runs after the warm-up, on the reported half of the
    text, with a band of one sd. The lower panel shows differences of means, with their 95 % band.
    """
    if section.effects or section.label.count(","):  # cells of a factorial, sizes of a scale
        return None
    return figures.curves(section, tips)


def extrapolation(section, tips):
    """Each line shows the mean loss over runs with 1 to 8 times the training context, with its 95 %
    interval over the text. A dotted line shows the loss on the same tokens where the model sees
    only the last training context."""
    return None if section.effects else cost_figures.extrapolation(section, tips)


def reach(found):
    """The experiments with losses beyond the training context: the one on positions first, then
    those with most arms that have them."""
    counts = {
        one.name: sum(
            len(contexts_of(section, arm)) > 1
            for section in one.sections[:1]
            if not section.effects
            for arm in section.sweep["arms"]
        )
        for one in found
    }
    having = [one for one in found if counts[one.name]]
    return sorted(having, key=lambda one: (one.name != "positions", -counts[one.name]))


# ---------------------------------------------------------------- the page


def experiments_of(found, out):
    """What the page says about each experiment: question, command, rows, caveats."""
    made = []
    for one in found:
        folders = [folder for section in one.sections for folder in section.folders]
        facts = {
            "name": one.name,
            "question": one.question,
            "command": one.command,
            "runs": one.runs,
            "rows": [relative(folder / "rows.jsonl", out) for folder in folders],
            "report": None,
            "state": unfinished(one.sections) if one.sections else "not run yet",
            "screening": one.screening,
            "caveats": [],
            "facts": "",
        }
        if one.sections:
            report = one.folder / "report.html"
            facts["report"] = relative(report, out) if report.exists() else None
            facts["caveats"] = list(dict.fromkeys(sum(map(caveats, one.sections), [])))
            sweep = one.sections[0].sweep
            facts["facts"] = (
                f"{sweep['data']['dataset']}, code {sweep['code_hash']}, commit"
                f" {sweep['git_commit']}, {sweep['hardware']}"
            )
        made.append(facts)
    return made


def relative(path, out):
    """A path as a link from the page."""
    return os.path.relpath(path, out).replace("\\", "/")


def content_of(results=RESULTS, configs=ROOT / "config"):
    """All that the page says, as plain data for its templates, and its figures."""
    out = results / "answer"
    found = answer.experiments(results, configs)
    if not any(one.sections for one in found):
        raise UserError("no sweep has rows here", results, "run python bench/ablate.py first")
    label(found)
    claims = answer.claims_of(found)
    parts = answer.parts_of(claims)
    ledger = answer.ledger(results / "claims.json")
    told = answer_sentences.Facts(found, claims, parts, ledger)
    shown = {
        "answer": answer_sentences.answer(told),
        "noise": answer_sentences.noise(told),
        "surprises": answer_sentences.surprises(told),
        "unknown": answer_sentences.unknown(told),
        "method": answer_sentences.method(told, ALPHA),
        "tables": {
            made.table.key: made
            for made in (
                parts_table(parts),
                slopes_table(claims),
                interactions_table(claims),
                ledger_table(ledger),
                claims_table(claims),
            )
        },
        "figures": figures_of(found, parts),
        "experiments": experiments_of(found, out),
    }
    return shown


def write(results=RESULTS, configs=ROOT / "config", readme=ROOT / "README.md"):
    """Write the page, its twin in Markdown, their pictures, and the README's sentences. Returns the
    path of the page."""
    shown, out = content_of(results, configs), results / "answer"
    files = {
        "index.html": render("answer.html", **shown),
        "index.md": render("answer.md", **shown),
        "readme.md": render("answer_readme.md", **shown, folder=""),
    }
    for made in shown["figures"].values():
        for picture in made:
            with matplotlib.rc_context(plots.STYLE):
                files[f"{picture.plot.key}.png"] = plots.saved(picture.plot.figure, "png", dpi=150)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_file(out / name, content)
    if readme and readme.exists():
        text = render("answer_readme.md", **shown, folder="bench/results/answer/")
        write_file(readme, with_block(readme.read_text(encoding="utf-8"), text))
    return out / "index.html"


def with_block(text, block):
    """A text with another block between MARKS; as it is without them."""
    first, last = map(re.escape, MARKS)
    return re.sub(
        f"{first}.*?{last}", lambda _: f"{MARKS[0]}\n{block.strip()}\n{MARKS[1]}", text, flags=re.S
    )
