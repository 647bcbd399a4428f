"""The tables of a report as plain data, for every format that it is written in."""

import math
from dataclasses import dataclass

import numpy as np

from bench.ablation.sentences import DASH, arm_name, signed
from bench.ablation.stats import MEASURES

WORDS = (  # in sorted order
    *("better", "larger than the noise", "tie", "undecided", "not seen", "no verdict", "worse"),
    *("failed", "not run", "noise"),
)

VERDICT_HEADINGS = "arm|verdict|difference [95 %]|p (Holm)|loss (sd)|bits/byte|seeds|what changes"
COST_HEADINGS = (
    "arm|verdict|parameters|FLOPs/token|tokens/s|peak bytes|KV bytes/token|decode ms/token"
    "|1×|2×|4×|8×"
)


@dataclass
class Cell:
    """One cell of a table."""

    text: str = DASH
    key: float = math.nan  # sorts the column; nan comes last
    kind: str = ""  # the class that gives its colour
    tip: str = ""  # shown on hovering

    @property
    def sort_key(self):
        return f"{self.key:.10g}" if math.isfinite(self.key) else ""


@dataclass
class Table:
    title: str
    note: str
    headings: list
    rows: list  # of lists of Cells


def number(value, form, tip=""):
    """The cell of a number in a format (a format's text, or a function); a dash if there is
    none."""
    if value is None or not math.isfinite(value):
        return Cell()
    return Cell(form(value) if callable(form) else format(value, form), value, tip=tip)


def short(value):
    """Three digits and a unit: 1234567 is 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def word_cell(verdict, brief=False):
    text = verdict.word if brief else str(verdict)
    if verdict.word == "noise":
        text = "noise floor"
    return Cell(text, WORDS.index(verdict.word), verdict.word, verdict.why)


def difference_cell(verdict):
    interval = (
        f" [{signed(verdict.low)}, {signed(verdict.high)}]" if math.isfinite(verdict.low) else ""
    )
    return Cell(signed(verdict.mean) + interval, verdict.mean)


def loss_cells(section, mean, sd):
    """A mean loss in nats per token with its sd, and the same in bits per byte."""
    loss = Cell()
    if math.isfinite(mean):
        loss = Cell(f"{mean:.4f}" + (f" ({sd:.4f})" if math.isfinite(sd) else ""), mean)
    factor = section.sweep["data"].get("bits_per_byte") or math.nan
    return [loss, number(mean * factor, ".4f")]


def what_changes(section, verdict):
    against = f"against {verdict.against}; " if verdict.against != section.sweep["base"] else ""
    if verdict.word == "noise":
        return f"{against}other initialisations"
    changes = section.sweep["arms"][verdict.arm]["changes"]
    return against + ", ".join(f"{key}={value}" for key, value in changes.items())


def verdicts_table(section):
    """The base, then each arm and interaction with its verdict."""
    base, analysis = section.sweep["base"], section.main
    of_base = [
        Cell(base, kind="arm"),
        *(Cell(), Cell(), Cell()),
        *loss_cells(section, analysis.base_mean, analysis.base_sd),
        number(len(section.runs.done[base]), "d"),
        Cell("the base"),
    ]
    of_arms = [
        [
            Cell(arm_name(verdict), kind="arm"),
            word_cell(verdict),
            difference_cell(verdict),
            number(verdict.p_holm, ".3g", tip=f"alone: {verdict.p:.2g}") if verdict.n else Cell(),
            *loss_cells(section, verdict.loss, verdict.loss_sd),
            number(verdict.n, "d", tip=verdict.why),
            Cell(what_changes(section, verdict)),
        ]
        for verdict in analysis.verdicts
    ]
    return Table(
        "Verdicts",
        "Differences are in nats per token; negative is better."
        f" Loss: {MEASURES[analysis.measure]}, mean (sd over seeds).",
        VERDICT_HEADINGS.split("|"),
        [of_base, *of_arms],
    )


def costs_table(section):
    """What each arm costs, and how far it goes beyond the training context."""
    return Table(
        "Costs",
        "FLOPs are of a forward pass. Training tokens/s and decoding times are medians; each arm is"
        " timed alone, the arms in turn. Losses at 1 to 8 times the training context are on the"
        " same target tokens; a dash stands where the position scheme cannot go.",
        COST_HEADINGS.split("|"),
        [costs_row(section, arm) for arm in section.sweep["arms"]],
    )


def costs_row(section, arm):
    cost, verdict = section.costs.get(arm) or {}, section.verdicts.get(arm)
    decoding = (cost.get("decode_ms_per_token") or {}).get("median")
    step_times = quartiles(cost, "milliseconds_per_step", ".1f")
    return [
        Cell(arm, kind="arm"),
        word_cell(verdict, brief=True) if verdict else Cell(),
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
        *(number(loss_at(section, arm, times), ".3f") for times in ("1", "2", "4", "8")),
    ]


def quartiles(cost, key, form):
    times = cost.get(key)
    return f"quartiles {times['q25']:{form}} to {times['q75']:{form}}" if times else ""


def loss_at(section, arm, times):
    """The arm's mean loss over seeds at so many times the training context, or None."""
    rows = section.runs.done[arm].values()
    losses = [(row.get("extrapolation") or {}).get(times, {}).get("loss") for row in rows]
    losses = [loss for loss in losses if loss is not None]
    return float(np.mean(losses)) if losses else None


def measures_table(section):
    """The verdict again by each measure, and the tests that decide nothing."""
    headings = ["arm"]
    for measure in section.analyses:
        short_name = MEASURES[measure].replace("validation loss", "").strip()
        headings += [short_name if measure == "equal_time" else f"{short_name} loss", "verdict"]
    headings += ["p (tie)"]
    return Table(
        "By other measures",
        f"Each measure is a family of its own; {MEASURES[section.main.measure]} decides.",
        headings,
        [measures_row(section, verdict) for verdict in section.main.verdicts],
    )


def measures_row(section, verdict):
    row = [Cell(arm_name(verdict), kind="arm")]
    for analysis in section.analyses.values():
        by_name = {arm_name(other): other for other in analysis.verdicts}
        other = by_name[arm_name(verdict)]
        row += [difference_cell(other), word_cell(other, brief=True) if other.n else Cell()]

    return [*row, number(verdict.p_tie, ".2g")]
