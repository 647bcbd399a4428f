"""The table of the answer on a terminal: a row for each part."""

import math

from rich.console import Console
from rich.table import Table

from bench.ablation import effects
from bench.ablation.progress import say
from bench.settings import worths
from bench.settings.plan import resolved
from common.commands import WIDTH

HEADINGS = ("helps in", "worth", "95 %", "new setting", "P(helps)", "verdict")


def show(folder, parts):
    """Print the rows of some parts of the settings below a folder, and how to read them."""
    measured = worths.load(folder)
    for part in parts:
        for each in measured:
            has_run = any(row["arm"] == part.name for row in each.rows)
            if has_run and is_other(part, each.facts):
                say(f"left out: {each.name} has another change named {part.name}")
                each.facts["arms"].pop(part.name)
    columns, _ = worths.table(measured)
    names = [part.name for part in parts]
    found = [effect for effect in effects.fit(columns) if effect.part in names]
    if not found:
        return
    table = Table(box=None, padding=(0, 1, 0, 0), width=WIDTH)
    table.add_column("part", overflow="fold", ratio=1)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for effect in found:
        table.add_row(*cells(effect))
    Console(width=WIDTH, highlight=False).print(table)
    say(
        "A worth is a multiple of tokens: without the part, a model needs so many times the tokens."
        " 'new setting' is where 95 of 100 new settings lie."
    )
    if min(effect.n_settings for effect in found) < effects.LEAST_SETTINGS:
        say(f"Nothing is predicted from fewer than {effects.LEAST_SETTINGS} settings.")


def is_other(part, facts):
    """Whether the part that ran in the setting with these facts has the name, but other changes."""
    possible = [resolved(each, facts["base_values"]) for each in (part.put_in, part.take_out)]
    return facts["arms"][part.name]["changes"] not in possible


def cells(effect):
    """The cells of a part."""
    return (
        effect.part,
        f"{effect.n_helps} of {effect.n_settings}",
        times(effect.mean),
        span(effect.mean_low, effect.mean_high),
        span(effect.new_low, effect.new_high),
        effect.chance,
        effect.word,
    )


def times(log_worth):
    """A worth as text; "" if it is not known."""
    return "" if math.isnan(log_worth) else f"{math.exp(log_worth):.2f}"


def span(low, high):
    """An interval of worths as text; "" if it is not known."""
    if math.isnan(low):
        return ""
    ends = ["0" if low == -math.inf else times(low), "∞" if high == math.inf else times(high)]
    return " to ".join(ends)
