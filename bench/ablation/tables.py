"""The tables of a report as plain data, for every format that it is written in."""

import math
from dataclasses import dataclass, replace

import numpy as np

from bench.ablation.effects import levels
from bench.ablation.sentences import (
    DASH,
    NOT_TIMED,
    arm_name,
    arms_of,
    comparisons,
    rate_note,
    signed,
)
from bench.ablation.stats import MEASURES

WORDS = (  # in sorted order
    *("better", "larger than the noise", "tie", "undecided", "not seen", "worse"),
    *("no verdict", "not yet", "failed", "not run", "noise"),
)
CONTEXTS = (1, 2, 4, 8)  # times that of training
RATIO = ("ratio", "low", "high")  # of a step's time, in a row of costs.jsonl
# Columns of the runs' rows whose means stand beside a verdict; no decision has used the test loss.
COLUMNS = (("test_loss", ".4f"), ("wrong_answers", ".1%"), ("wrong_tokens", ".1%"))


@dataclass
class Cell:
    """One cell of a table."""

    text: str = DASH
    key: float = math.nan  # sorts the column; nan comes last
    kind: str = ""  # the class that gives its colour
    tip: str = ""  # shown on hovering
    ends: tuple = ()  # of its interval

    @property
    def is_words(self):
        """Whether it may take several lines."""
        return self.kind != "arm" and self.text.count(" ") > 1 and self.text[0] not in "+\u2212["

    @property
    def sort_key(self):
        return f"{self.key:.10g}" if math.isfinite(self.key) else ""


@dataclass
class Table:
    key: str  # the name of its files
    title: str
    note: str
    headings: list
    rows: list  # of lists of Cells

    def without_empty_columns(self):
        """The table without columns that hold only dashes."""
        columns = enumerate(zip(*self.rows, strict=True))
        kept = [place for place, cells in columns if any(cell.text != DASH for cell in cells)]
        headings = [self.headings[place] for place in kept]
        return replace(self, headings=headings, rows=[[row[i] for i in kept] for row in self.rows])


def number(value, form, tip=""):
    """The cell of a number, by a format or a function; a dash if there is none."""
    if value is None or not math.isfinite(value):
        return Cell()
    return Cell(form(value) if callable(form) else format(value, form), value, tip=tip)


def short(value):
    """Three digits and a unit: 1234567 is 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


# --- verdicts


def word_cell(section, verdict, brief=False):
    """The word of a comparison, in full with what qualifies it."""
    if verdict is section.main.floor or verdict.word == "noise":
        return Cell("noise floor", WORDS.index("noise"), "noise", verdict.why)
    text = verdict.word if brief else str(verdict) + rate_note(section, verdict)
    return Cell(text, WORDS.index(verdict.word), verdict.word.replace(" ", "-"), verdict.why)


def interval_cell(mean, low, high):
    """A difference with its interval, if there is one."""
    if not math.isfinite(mean):
        return Cell()
    if not math.isfinite(low + high):
        return Cell(signed(mean), mean)
    return Cell(f"{signed(mean)} [{signed(low)}, {signed(high)}]", mean, ends=(low, high))


def difference_cell(verdict):
    return interval_cell(verdict.mean, verdict.low, verdict.high)


def worth_cell(worth):
    return Cell(str(worth), worth.k, ends=(worth.low, worth.high)) if worth else Cell()


def text_cell(verdict):
    """The interval over the text, and whether the word holds on it."""
    low, high = verdict.text_low, verdict.text_high
    if not math.isfinite(low + high):
        return Cell()
    note, kind = (", not on every text", "worse") if verdict.text_note else ("", "")
    return Cell(f"[{signed(low)}, {signed(high)}]{note}", low, kind, ends=(low, high))


def runs_cell(verdict):
    diverged = f", {verdict.diverged} diverged" if verdict.diverged else ""
    return Cell(f"{verdict.n}{diverged}", verdict.n, "worse" if diverged else "")


def verdicts_table(section):
    """The base and its second copy, then each arm and interaction with its verdict."""
    name, n = section.sweep["base"], section.main.base_n
    of_base = [mean_of(section, name, *column) for column in COLUMNS]
    rows = [[Cell(name, kind="arm"), *[Cell() for _ in range(5)], Cell(f"{n}", n), *of_base]]
    rows += [
        [
            Cell(arm_name(verdict), kind="arm"),
            word_cell(section, verdict),
            difference_cell(verdict),
            worth_cell(verdict.worth),
            worth_cell(verdict.worth_time),
            text_cell(verdict),
            runs_cell(verdict),
            *means(section, verdict),
        ]
        for verdict in comparisons(section)
    ]
    headings = (
        "arm|verdict|difference [95 %]|worth in tokens|worth in time|over the text [95 %]|runs"
        "|test loss|wrong answers|wrong tokens"
    )
    return Table(
        "verdicts",
        "Verdicts",
        "Differences are in nats per token; negative is better. An arm that is worth 1.4 × gets as"
        " far as the base does with 1.4 times the tokens, or the time.",
        headings.split("|"),
        rows,
    ).without_empty_columns()


def means(section, verdict):
    """The cells of COLUMNS; the second copy of the base has none, since it is no arm."""
    if verdict is section.main.floor:
        return [Cell() for _ in COLUMNS]
    return [mean_of(section, verdict.arm, *column) for column in COLUMNS]


def mean_of(section, arm, key, form):
    """The cell of an arm's mean of one column of its rows."""
    rows = section.runs.done.get(arm, {}).values()
    values = [row[key] for row in rows if row.get(key) is not None]
    return number(float(np.mean(values)) if values else None, form)


def tests_table(section):
    """What a verdict was computed from."""
    analysis, base = section.main, section.sweep["base"]
    of_base = loss_cells(section, analysis.base_mean, analysis.base_sd)
    rows = [[Cell(base, kind="arm"), Cell("the base"), *of_base, *[Cell() for _ in range(5)]]]
    rows += [
        [
            Cell(arm_name(verdict), kind="arm"),
            Cell(what_changes(section, verdict)),
            *loss_cells(section, verdict.loss, verdict.loss_sd),
            number(verdict.p, ".2g"),
            number(verdict.p_holm, ".2g"),
            number(verdict.p_page, ".2g"),
            number(verdict.p_tie, ".2g"),
            Cell(verdict.why or DASH),
        ]
        for verdict in comparisons(section)
    ]
    headings = "arm|what changes|loss (sd)|bits/byte|p|p (Holm)|p (page)|p (tie)|note"
    return Table(
        "tests",
        "Losses and tests",
        f"Loss: {MEASURES[analysis.measure]} on the reported half of the text, mean (sd over runs)."
        " p: this comparison alone; p (Holm): corrected for the looks and the family, it decides;"
        " p (page): corrected for all sweeps of this page.",
        headings.split("|"),
        rows,
    ).without_empty_columns()


def loss_cells(section, mean, sd):
    """A mean loss in nats per token with its sd, and the same in bits per byte."""
    loss = Cell()
    if math.isfinite(mean):
        loss = Cell(f"{mean:.4f}" + (f" ({sd:.4f})" if math.isfinite(sd) else ""), mean)
    factor = section.sweep["data"].get("bits_per_byte") or math.nan
    return [loss, number(mean * factor, ".4f")]


def what_changes(section, verdict):
    against = f"against {verdict.against}; " if verdict.against != section.sweep["base"] else ""
    if verdict is section.main.floor:
        return f"{against}other initialisations"
    if section.effects:
        return levels(section.sweep, verdict.arm)
    changes = section.sweep["arms"][verdict.arm]["changes"]
    return against + ", ".join(f"{key}={value}" for key, value in changes.items())


def measures_table(section):
    """The verdict again by each other measure."""
    others = [one for one in section.analyses.values() if one is not section.main]
    if section.effects:  # an effect of many cells has no moment at which an arm ends
        others = [one for one in others if one.measure != "equal_time"]
    headings, rows = ["arm"], {arm_name(one): [] for one in comparisons(section)}
    for analysis in others:
        headings += [MEASURES[analysis.measure], "verdict"]
        everyone = [*analysis.verdicts, *filter(None, [analysis.floor])]
        known = {arm_name(one): one for one in everyone if math.isfinite(one.mean)}
        for name, row in rows.items():
            one, cells = known.get(name), [Cell(), Cell()]
            row += [difference_cell(one), word_cell(section, one, brief=True)] if one else cells
    return Table(
        "measures",
        "By other measures",
        f"Each measure is a family of its own; {MEASURES[section.main.measure]} decides.",
        headings,
        [[Cell(name, kind="arm"), *row] for name, row in rows.items()],
    )


# --- costs


def on_each_machine(section, make):
    """The tables `make(section, costs of the arms)` of all machines, each with the name of its own;
    those for which it returns None are left out."""
    found, several = [], len(section.machines) > 1
    for number, (machine, costs) in enumerate((section.machines or {"": {}}).items(), 1):
        table = make(section, costs)
        if table is None:
            continue
        if machine:
            table.note += f" Measured on {machine}."
        if several:
            table.note += f" The verdicts use the times of {section.machine}."
            table.title += f" on {machine}"
            table.key += f"-{number}" if number > 1 else ""
        found.append(table)
    return found


def costs_table(section, costs):
    """What each arm costs on one machine."""
    headings = (
        "arm|verdict|parameters|FLOPs/token|tokens/s|peak bytes|KV bytes/token|decode ms/token"
    )
    return Table(
        "costs",
        "Costs",
        "FLOPs are of a forward pass. Training tokens/s and decoding times are medians; each arm is"
        " timed alone, the arms in turn.",
        headings.split("|"),
        [costs_row(section, arm, costs.get(arm) or {}) for arm in arms_of(section)],
    ).without_empty_columns()


def costs_row(section, arm, cost):
    verdict = section.verdicts.get(arm)
    decoding = (cost.get("decode_ms_per_token") or {}).get("median")
    step_times = quartiles(cost, "milliseconds_per_step", ".1f")
    return [
        Cell(arm, kind="arm"),
        word_cell(section, verdict, brief=True) if verdict else Cell(),
        number(cost.get("parameters"), short, tip=str(cost.get("parameters"))),
        number(cost.get("flops_per_token"), short),
        number(
            cost.get("tokens_per_second"),
            ",.0f",
            tip=f"{step_times} ms per step" if step_times else "",
        ),
        number(cost.get("peak_memory_bytes"), short, tip=cost.get("peak_memory", "")),
        number(cost.get("kv_bytes_per_token"), ",.0f"),
        number(decoding, ".2f", tip=quartiles(cost, "decode_ms_per_token", ".2f")),
    ]


def forms_table(section, costs):
    """The time and memory of both forms of each arm, and which of them the verdict at equal time
    uses; of eager mode alone if none was to be compiled, and None if no arm was timed."""
    priced = {arm: costs.get(arm) or {} for arm in arms_of(section)}
    timed = [cost["forms"] for cost in priced.values() if cost.get("forms")]
    if not timed:
        return None
    tried = any((forms.get("compiled") or {}).get("why") != NOT_TIMED for forms in timed)
    rows = [forms_row(arm, cost, tried) for arm, cost in priced.items()]

    headings = "arm|tokens/s, eager|tokens/s, compiled|bytes, eager|bytes, compiled"
    headings += "|step, times the base's [95 %]"
    use = "is what worth in time and the verdict at equal time use."
    if tried:
        headings += "|forms compared|not timed"
        title = "Speed of both forms"
        note = (
            "Eager PyTorch runs each operation by itself; compiled, it joins them. An arm that has"
            " more operations loses more in eager mode, so the faster form of each arm counts: its"
            f" time per step over the base's {use}"
        )
    else:
        title = "Speed"
        note = (
            f"The time per step over the base's {use} All arms are timed eager, where an arm that"
            " has more operations loses more than it does compiled; `--time_forms=True` times both."
        )
    return Table("forms", title, note, headings.split("|"), rows).without_empty_columns()


def forms_row(arm, cost, both):
    """A row of forms_table; the last two cells are there where `both` forms were timed."""
    forms, ratio = cost.get("forms") or {}, cost.get("step_ratio")
    eager, compiled = (forms.get(form) or {} for form in ("eager", "compiled"))
    row = [Cell(arm, kind="arm")]
    for key, form in (("tokens_per_second", ",.0f"), ("peak_memory_bytes", short)):
        row += [number(each.get(key), form) for each in (eager, compiled)]
    row.append(ratio_cell(ratio and tuple(ratio[key] for key in RATIO)))
    if not both:
        return row
    used = Cell()
    if ratio and "form" in ratio:
        used = Cell(f"{ratio['form']}, base {ratio['base_form']}")
    return [*row, used, Cell(eager.get("why") or compiled.get("why") or DASH)]


def ratio_cell(ratio):
    """The cell of a (ratio, low, high), or of None."""
    if not ratio:
        return Cell()
    return Cell("{:.2f} [{:.2f}, {:.2f}]".format(*ratio), ratio[0], ends=ratio[1:])


def quartiles(cost, key, form):
    times = cost.get(key)
    return f"quartiles {times['q25']:{form}} to {times['q75']:{form}}" if times else ""


# --- beyond the training context


def contexts_of(section, arm):
    """{times the training context: [loss, low, high, loss with only the training context visible]},
    means over runs; low and high are of the 95 % interval over windows of the text."""
    found = {}
    for row in section.runs.done.get(arm, {}).values():
        for times, entry in (row.get("extrapolation") or {}).items():
            if entry.get("loss") is not None:
                window = entry["window"]["loss"]
                losses = [entry["loss"], entry["low"], entry["high"], window]
                found.setdefault(int(times), []).append(losses)
    return {times: np.array(runs, float).mean(0) for times, runs in sorted(found.items())}


def why_not(section, arm):
    """Why an arm has no loss beyond the training context; empty if it has."""
    for row in section.runs.done.get(arm, {}).values():
        for found in (row.get("extrapolation") or {}).values():
            if found and found.get("why"):
                return found["why"]
    return ""


def contexts_table(section):
    """Each arm's loss with more context than in training, and with only the training context."""
    headings, rows = ["arm"], []
    for times in CONTEXTS:
        headings += [f"{times}×"] if times == 1 else [f"{times}×", f"{times}×, window"]
    for arm in arms_of(section):
        contexts, row = contexts_of(section, arm), [Cell(arm, kind="arm")]
        for times in CONTEXTS:
            mean, low, high, window = contexts.get(times, [math.nan] * 4)
            half = f" ± {(high - low) / 2:.3f}" if math.isfinite(low) else ""
            row.append(Cell(f"{mean:.3f}{half}", mean) if math.isfinite(mean) else Cell())
            row += [] if times == 1 else [number(window, ".3f")]
        rows.append([*row, Cell(why_not(section, arm) or DASH)])
    return Table(
        "contexts",
        "Beyond the training context",
        "Losses with 1 to 8 times the training context, on the same target tokens, means over runs"
        " with 95 % intervals over the text. Window: the last training context alone is visible.",
        [*headings, "cannot go further"],
        rows,
    ).without_empty_columns()
