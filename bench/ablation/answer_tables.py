"""The tables of the answer page. Each row of one leads to the experiment that its numbers come
from."""

import math
from dataclasses import dataclass

from bench.ablation import answer
from bench.ablation.answer_figures import BASES, bar
from bench.ablation.scale import Slope
from bench.ablation.sentences import DASH, signed
from bench.ablation.stats import listed
from bench.ablation.tables import (
    Cell,
    Table,
    difference_cell,
    interval_cell,
    number,
    short,
    worth_cell,
)

LEAST_P = 1e-4  # smaller ones are shown as below it
KINDS = {"cannot tell": "undecided", "holds": "tie", "grows": "better", "fades": "worse"}
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


def p_cell(p):
    if not math.isfinite(p):
        return Cell()
    return Cell(f"{p:.2g}" if p >= LEAST_P else f"< {LEAST_P:g}", p, tip=f"{p:.2g}")


def p_cells(subject):
    """The p-value that the sweep itself gives, and that of the page."""
    equal = subject.word in answer.OF_EQUALITY
    return [p_cell(subject.p_tie if equal else subject.p_holm), p_cell(subject.p_page)]


def name_cell(claim, base=""):
    """What a claim is about, in a base if one is given, with its keys on hovering."""
    inside = f" in {BASES.get(base, base)}" if base else ""
    return Cell(answer.name_of(claim) + inside, kind="arm", tip=answer.keys_of(claim))


def experiment_cell(claim):
    return Cell(claim.experiment.name.replace("_", " "), kind="of-sweep")


def word_cell(subject, elsewhere=()):
    word = subject.word
    text = f"{word}, elsewhere {listed(elsewhere)}" if elsewhere else word
    return Cell(text, kind=KINDS.get(word, word.replace(" ", "-")), tip=subject.why)


def ratio_text(value):
    return f"{value:.2f} ×"


def time_cell(part):
    """The time of a step, to the base's; about, where other work disturbed the timing."""
    if not part.time:
        return Cell()
    time, low, high = part.time
    if math.isfinite(low):
        return Cell(f"{time:.2f} × ({low:.2f} to {high:.2f})", time, ends=(low, high))
    costs = part.priced.section.costs.values()
    why = next((cost["disturbed"] for cost in costs if cost.get("disturbed")), "")
    return Cell(f"about {time:.2f} ×", time, tip=f"without an interval: {why}" if why else "")


def parts_tables(parts):
    """[Linked]: a table for each base, and one of the parts that only a screening has seen."""
    shown, screened = {base: [] for base in BASES}, []
    for part in parts:
        of_base = shown.setdefault(part.base, [])
        (screened if part.claim.experiment.screening else of_base).append(part)
    note = (
        "A part that is worth 1.4 × gets as far as its base does with 1.4 times the training"
        " tokens. Time, memory of training and the cache of keys and values are times the base's;"
        ' "about": other work disturbed the timing. Of several sweeps that measured a part, the one'
        " with the smallest standard error counts, for its costs the newest. In a factorial an"
        " effect is the mean over all combinations of the other parts."
    )
    made = []
    for base, of_base in shown.items():
        title = f"What each part is worth in {BASES.get(base, base)}"
        made += [parts_table(f"parts_{base}", title, note, of_base)] if of_base else []
    note = "A screening ranks and decides nothing: few runs of each, and no curve of tokens."
    if screened:
        made.append(parts_table("screened", "Parts that were only screened", note, screened))
    return made


def parts_table(key, title, note, parts):
    rows = []
    for part in parts:
        subject = part.claim.subject
        name = name_cell(part.claim, part.base if part.claim.experiment.screening else "")
        picture = bar(subject.worth, subject.word) if subject.worth else DASH
        rows.append(
            [
                name,
                word_cell(subject, part.elsewhere),
                Cell(picture, kind="picture"),
                worth_cell(subject.worth),
                difference_cell(subject),
                *p_cells(subject),
                time_cell(part),
                worth_cell(part.worth_time),
                number(part.memory, ratio_text),
                number(part.cache, ratio_text),
                Cell(f"{subject.n} + {subject.n_against}", subject.n),
            ]
        )
    headings = (
        "part|verdict|worth|worth in tokens|difference [95 %], nats|p, its sweep|p, this page"
        "|time of a step|worth in time|memory|cache|runs"
    )
    table = Table(key, title, note, headings.split("|"), rows).without_empty_columns()
    return Linked(table, [part.claim.experiment.name for part in parts], cards=True)


def estimates_table(parts):
    """All estimates of the parts that more than one sweep with a verdict has measured."""
    rows, links = [], []
    for part in parts:
        claims = [claim for claim in part.claims if not claim.experiment.screening]
        for claim in claims if len(claims) > 1 else ():
            name, subject = name_cell(claim, part.base), claim.subject
            setting = [experiment_cell(claim), Cell(setting_of(claim.section))]
            worth = [worth_cell(subject.worth), difference_cell(subject)]
            rows.append([name, *setting, word_cell(subject), *worth])
            links.append(claim.experiment.name)
    note = (
        "Every estimate of the parts that several experiments measured: on other texts, at other"
        " sizes, and beside other parts. In a factorial an effect is the mean over all combinations"
        " of the other parts; elsewhere all other parts are the base's."
    )
    headings = "part|experiment|setting|verdict|worth in tokens|difference [95 %], nats"
    table = Table("estimates", "Does it hold elsewhere?", note, headings.split("|"), rows)
    return Linked(table, links, cards=True)


def setting_of(section):
    """The text, the steps, the size of the base and the learning rate of a section."""
    sweep = section.sweep
    size = (section.costs.get(sweep["base"]) or {}).get("parameters")
    parts = [sweep["data"]["dataset"], f"{sweep['max_iters']:,} steps"]
    parts += [f"{short(size)} parameters"] if size else []
    rate = f"learning rate {sweep['base_values'].get('learning_rate', 0):g}"
    own = "each arm at its own best learning rate"
    return ", ".join([*parts, own if answer.has_own_rates(section) else rate])


def interactions_table(claims):
    """The decided interactions, or else the surest one."""
    found = answer.of_interactions(claims)
    decided = [claim for claim in found if claim.subject.word in ("better", "worse")]
    rows, shown = [], decided or found[:1]
    for claim in shown:
        subject = claim.subject
        cells = [experiment_cell(claim), word_cell(subject), difference_cell(subject)]
        rows.append([name_cell(claim), *cells, *p_cells(subject)])
    note = (
        f"Of {len(found)} interactions measured, [{len(decided)} are decided](#claims); the table"
        f" shows the {len(shown)} surest. Each number is the effect of both parts together beyond"
        " the sum of their effects. Below zero both together are better than their sum."
    )
    headings = "parts|experiment|verdict|beyond the sum [95 %], nats|p, its sweep|p, this page"
    table = Table("interactions", "Do they add up?", note, headings.split("|"), rows)
    return Linked(table, [claim.experiment.name for claim in shown], cards=True)


def slopes_table(claims):
    found = answer.of_slopes(claims)
    rows = []
    for claim in found:
        one = claim.subject
        slope = interval_cell(one.mean, one.low, one.high)
        ends = [Cell(signed(end.mean, 3), end.mean) for end in (one.effects[0], one.effects[-1])]
        cells = [experiment_cell(claim), word_cell(one), slope, *ends]
        rows.append([name_cell(claim), *cells, *p_cells(one)])
    headings = (
        "part|experiment|verdict|slope [95 %], nats per factor of ten of compute|at the smallest"
        "|at the largest|p, its sweep|p, this page"
    )
    note = (
        "The measured effect at both ends of the range, and the fitted slope; below zero is better."
    )
    table = Table("slopes", "More, or less, as the model grows?", note, headings.split("|"), rows)
    return Linked(table, [claim.experiment.name for claim in found], cards=True)


def measured(row):
    """What a row of the ledger says that we measured, and for which values the claim holds."""
    found = (
        "{quantity}: {measured}; claimed: {holds}".format_map(row) if row.get("measured") else ""
    )
    found = found.replace("claimed: = ", "claimed: ")
    return "; ".join(filter(None, [found, row.get("note")]))


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
    words = [row.get("verdict") for row in rows]
    count = f"{len(words)} claims, {words.count('confirmed')} are confirmed, and"
    note = (
        "Published claims, and what our own measurements say of each. Of"
        f" [{count} {words.count('contradicted')}](#at-claims) contradicted. The ledger has a"
        " correction of its own: the intervals of all claims of one kind hold together with 95 %"
        " probability (Bonferroni)."
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
        what = Cell("slope" if slope else "difference")
        difference = interval_cell(one.mean, one.low, one.high)
        cells = [Cell(claim.section.label), what, Cell(claim.own), word_cell(one), difference]
        rows.append([name_cell(claim), *cells, *p_cells(one), Cell(one.why or DASH)])
    headings = (
        "comparison|sweep|what|verdict of its sweep|verdict of the page|estimate [95 %]"
        "|p, its sweep|p, this page|note"
    )
    note = (
        "All comparisons of all sweeps: the family of the page's correction. For a tie, p tests"
        " equality. An interval is for its row alone; a verdict is corrected for all rows."
    )
    table = Table("claims", "Every comparison", note, headings.split("|"), rows)
    return Linked(table, [claim.experiment.name for claim in claims])
