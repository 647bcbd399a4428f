"""The answer page: its figures, and the whole as HTML and Markdown, and the README's sentences."""

import os.path
import re
from dataclasses import dataclass

import matplotlib
from markupsafe import Markup, escape

from bench.ablation import answer, answer_figures, answer_sentences, cost_figures, figures, plots
from bench.ablation.answer import RESULTS
from bench.ablation.answer_figures import BASES
from bench.ablation.answer_tables import (
    claims_table,
    estimates_table,
    interactions_table,
    ledger_table,
    parts_tables,
    slopes_table,
)
from bench.ablation.caveats import caveats
from bench.ablation.design_report import effects_against_compute
from bench.ablation.report import render
from bench.ablation.sentences import arms_of, signed, unfinished
from bench.ablation.significance import ALPHA
from bench.ablation.stats import listed
from bench.ablation.tables import contexts_of
from common.errors import UserError
from common.files import ROOT, read_json
from common.files import write as write_file

MOST_LINES = 9  # in a figure of curves; those of more arms hide each other
TITLES = {  # of the figures that have a section of their own
    "rates": "Learning rates",
    "extrapolation": "Beyond the training context",
    "curves": "Curves of loss",
}
MARKS = "<!-- answer -->", "<!-- end of answer -->"  # around the part of README.md that this writes


@dataclass
class Picture:
    plot: object  # plots.Plot
    link: str  # the place in the page of its rows and commands


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


def pictures(kind, function, found, title=""):
    """[Picture] of one figure for each section that has something for it; its title is the
    section's label if none is given."""
    made = []
    for experiment in found:
        for place, section in enumerate(experiment.sections):
            key = f"{kind}_{experiment.name}" + (f"_{place}" if place else "")
            plot = drawn(function, section, key, title or section.label.capitalize())
            made += [Picture(plot, f"at-{experiment.name}")] if plot else []
    return made


def label(found):
    """Give each section a name on the page: its experiment's, and of a scale its size's, too; and
    its arms the names that readers know."""
    for experiment in found:
        for section in experiment.sections:
            of_scale = len(experiment.sections) > 1
            size = f", {section.folders[0].name}" if of_scale else ""
            section.label = experiment.name.replace("_", " ") + size
            model = section.sweep["base_values"].get("model", "gpt2")
            base = BASES.get(model, model)
            for arm, facts in section.sweep["arms"].items():
                name = answer.shown_name(facts["changes"], arm)
                section.names[arm] = (
                    f"{base} again" if (facts.get("again") or facts.get("replicate")) else name
                )
            section.names[section.sweep["base"]] = base


def top_of(facts, parts):
    """[(sentences, pictures)] of the top of the page, for each base."""
    lines, made = answer_sentences.answer(facts), []
    for base in [*BASES, ""]:
        title = f"Worth in tokens, in {BASES.get(base, base)}"
        of_base = [part for part in parts if part.base == base]
        plot = drawn(answer_figures.worths, of_base, f"parts_{base}", title)
        if plot or base in lines:
            made.append((lines.get(base, []), [Picture(plot, "rows")] if plot else []))
    return made


def figures_of(found):
    """{place in the page: [Picture]}."""
    sections = [section for one in found for section in one.sections]
    single = [
        one for one in found if one.sections and not one.sections[0].scale and not one.screening
    ]
    plain = [
        one
        for one in single
        if not one.sections[0].effects and len(arms_of(one.sections[0])) <= MOST_LINES
    ]
    scales = [one for one in found if one.sections and one.sections[0].scale]
    shown = {
        "noise": [Picture(drawn(answer_figures.noise, sections, "noise", "The noise"), "rows")],
        "tokens": [],
        "scale": [],
        "rates": pictures("rates", figures.learning_rates, single),
        "curves": pictures("curves", figures.curves, plain)[:4],
        "extrapolation": pictures("extrapolation", cost_figures.extrapolation, reach(plain))[:2],
    }
    for one in scales:
        caption = (
            "The effect of each part at each size, with its 95 % interval, and the fitted line."
            " Below zero the part is better than the base of its size."
        )
        plot = drawn(
            effects_against_compute, one.sections[0], f"scale_{one.name}", one.question, caption
        )
        shown["scale"] += [Picture(plot, f"at-{one.name}")] if plot else []
    curve = next((one for one in found if one.name == "base" and one.sections), None)
    if curve:
        shown["tokens"] = pictures("tokens", figures.tokens, [curve], "What tokens are worth")
    return {place: [one for one in made if one.plot] for place, made in shown.items()}


def reach(found):
    """The experiments with losses beyond the training context: the one on positions first, then
    those with most arms that have them."""
    first = {one.name: one.sections[0] for one in found}
    counts = {
        name: sum(len(contexts_of(section, arm)) > 1 for arm in arms_of(section))
        for name, section in first.items()
    }
    having = [one for one in found if counts[one.name]]
    return sorted(having, key=lambda one: (one.name != "positions", -counts[one.name]))


# ---------------------------------------------------------------- the page


def linked(text):
    """HTML of a text with links as Markdown has them."""
    return Markup(re.sub(r"\[([^]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>', str(escape(text))))


def findings(claims):
    """What the page says of an experiment's comparisons, by word, the largest first: of a scale's,
    of the slopes alone."""
    shown, words = answer.of_slopes(claims), {}
    for claim in sorted(shown or claims, key=lambda claim: -abs(claim.subject.mean)):
        text = f"{answer.name_of(claim)} {signed(claim.subject.mean, 3)}"
        words.setdefault(claim.subject.word, []).append(text)
    unit = "nats per factor of ten of compute" if shown else "nats"
    lines = [f"{word}: {listed(texts)}" for word, texts in words.items()]
    return f"{answer_sentences.sentence('; '.join(lines))} ({unit})." if lines else ""


def experiments_of(found, claims, out):
    """What the page says about each experiment: question, answer, command, rows, caveats."""
    made = []
    for one in found:
        folders = [folder for section in one.sections for folder in section.folders]
        facts = {
            "name": one.name,
            "question": one.question,
            "found": findings([claim for claim in claims if claim.experiment is one]),
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
    path, fix = results / "claims.json", "run python bench/claims.py again"
    ledger = read_json(path, fix)["claims"] if path.exists() else []
    facts = answer_sentences.Facts(found, claims, parts, ledger)
    shown = {
        "top": top_of(facts, parts),
        "noise": answer_sentences.noise(facts),
        "surprises": answer_sentences.surprises(facts),
        "unknown": answer_sentences.unknown(facts),
        "method": answer_sentences.method(facts, ALPHA),
        "parts": parts_tables(parts),
        "tables": {
            made.table.key: made
            for made in (
                estimates_table(parts),
                slopes_table(claims),
                interactions_table(claims),
                ledger_table(ledger),
                claims_table(claims),
            )
        },
        "figures": figures_of(found),
        "titles": TITLES,
        "experiments": experiments_of(found, claims, out),
    }
    return shown


def write(results=RESULTS, configs=ROOT / "config", readme=ROOT / "README.md"):
    """Write the page, its twin in Markdown, their pictures, and the README's sentences. Returns the
    path of the page."""
    shown, out = content_of(results, configs), results / "answer"
    files = {
        "index.html": render("answer.html", **shown, linked=linked),
        "index.md": render("answer.md", **shown),
        "readme.md": render("answer_readme.md", **shown, folder=""),
    }
    drawings = [*(made for _, made in shown["top"]), *shown["figures"].values()]
    for plot in (picture.plot for made in drawings for picture in made):
        with matplotlib.rc_context(plots.STYLE):
            files[f"{plot.key}.png"] = plots.saved(plot.figure, "png", dpi=150)
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
