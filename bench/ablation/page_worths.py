"""The worth of each part in each setting as one table: worths.csv, beside the page of the answer.

worth, low, high: multiples of the tokens. beyond: 1 where the worth lies above its number, at the
end of the base's curve, -1 where it lies below. step_time, parameters, memory, kv_cache: the cost
with the part over the cost without it.
planned: 1 for a setting of config/answer/settings.py, 2 for one of its test, 0 for an older sweep.
"""

import math

import numpy as np
import pandas as pd

from bench.ablation.tables import DASH
from bench.ablation.worth import Z

WORDS = {"muon": "Muon", "adamw": "AdamW", "gpt2": "GPT-2", "llama": "LLaMA"}
WORDS |= {"python": "Python", "byte": "bytes", "bpe1024": "BPE"}
TEXTS = {"python_source": "python"}  # a dataset whose name is not the name of its text
BEYOND = {-1: "<", 0: "", 1: ">"}
COLUMNS = ["part", "setting", "planned", "base", "text", "optimizer", "runs"]
COSTS = {
    "step_time": "step_ratio",
    "parameters": "parameters",
    "memory": "memory_bytes",
    "kv_cache": "kv_bytes_per_token",
}
COLUMNS += ["worth", "low", "high", "beyond", *COSTS, "stage"]


def table(page):
    """A row for each part in each setting: of the sweeps, then of the planned settings."""
    rows = [of_sweep(found) for part in page.parts for found in part.estimates if found.bar()]
    measured = {each.name: each for each in page.planned}
    rows += [of_planned(measured[found.setting], found) for found in page.worths]
    return pd.DataFrame(rows, columns=COLUMNS)


def of_sweep(found):
    """The row of an Estimate."""
    plan = found.shelf.section.plan
    worth, low, high = found.bar()
    text = plan["data"]["dataset"]
    return {
        "part": found.part,
        "setting": found.shelf.name,
        "planned": 0,
        "base": found.shelf.base,
        "text": TEXTS.get(text, text),
        "optimizer": plan["base_values"]["optimizer"],
        "runs": int(found.row["n"]),
        "worth": worth,
        "low": low,
        "high": high,
        "beyond": found.beyond,
    } | {column: found.ratio(key) for column, key in COSTS.items()}


def of_planned(measured, found):
    """The row of a Worth in a planned setting."""
    factors = measured.facts["factors"]
    half = Z * found.se
    low = found.log_worth if found.censored < 0 else found.log_worth - half
    high = found.log_worth if found.censored > 0 else found.log_worth + half
    return {
        "part": found.part,
        "setting": found.setting,
        "planned": 2 if measured.facts["held_out"] else 1,
        "base": factors["base"],
        "text": factors["text"],
        "optimizer": factors["optimizer"],
        "runs": found.runs,
        "worth": math.exp(found.log_worth),
        "low": math.exp(low),
        "high": math.exp(high),
        "beyond": found.censored,
        "stage": measured.stage[0],
    } | {column: measured.cost(found.part, key) for column, key in COSTS.items()}


def word(level):
    """A level of a factor in words."""
    return str(WORDS.get(level, level))


def levels_of(facts):
    """{factor: its level in a planned setting, in words}, and its size."""
    levels = {factor: word(level) for factor, level in facts["factors"].items()}
    return levels | {"size": f"{levels['layers']} × {levels['width']}"}


def name_of(facts):
    """A planned setting in words."""
    levels = levels_of(facts)
    shown = [levels[key] for key in ("text", "tokens", "optimizer", "size")]
    return f"{facts['setting']}: {', '.join(shown)}"


def marked(row):
    """The worth of a row {"worth", "beyond"}: at least or at most so much beyond a curve's end."""
    return f"{BEYOND[row['beyond']]}{row['worth']:.2f}"


def helps(rows):
    """In how many of some rows the worth is above 1."""
    return f"{(rows.worth > 1).sum()} of {len(rows)}" if len(rows) else DASH


def lowest_to_highest(rows):
    """The lowest and the highest worth of some rows."""
    if rows.empty:
        return DASH
    ends = rows.sort_values("worth").iloc[[0, -1]]
    low, high = [marked(row) for row in ends.to_dict("records")]
    if (rows.beyond < 0).any():
        low = f"<{low.removeprefix('<')}"
    if (rows.beyond > 0).any():
        high = f">{high.removeprefix('>')}"
    return low if low == high else f"{low} to {high}"


def mean(rows):
    """The mean worth of some rows, of the logarithms: at least or at most so much where some lie
    beyond the end of a curve, and unknown where some lie beyond either end."""
    ends = sorted(set(rows.beyond) - {0})
    if rows.empty or len(ends) == 2:
        return DASH
    return marked({"beyond": sum(ends), "worth": math.exp(np.log(rows.worth).mean())})
