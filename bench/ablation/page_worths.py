"""The worth of each part in each setting as one table: worths.csv, beside the page of the answer.

worth, low, high: multiples of the tokens. beyond: 1 where the worth lies above its number, at the
end of the base's curve, -1 where it lies below. step_time, kv_cache: with the part over without it.
planned: 1 for a setting of config/answer/settings.py, 2 for one of its test.
"""

import math

import pandas as pd

from bench.ablation.figures import NAMES
from bench.ablation.worth import Z
from bench.settings import worths

TOKENS = {"byte": "bytes", "bpe1024": "BPE"}
TEXTS = {"python_source": "python"}  # a dataset whose name is not the name of its text


def table(page):
    """A row for each part in each setting: of the sweeps, then of the planned settings."""
    rows = [of_sweep(found) for part in page.parts for found in part.estimates if found.log_worth()]
    for measured in page.planned:
        if measured.admitted:
            rows += [of_planned(measured, found) for found in worths.worths_of(measured)]
    return pd.DataFrame(rows)


def of_sweep(found):
    """The row of an Estimate."""
    plan = found.setting.section.plan
    logs = found.log_worth()
    worth = math.exp(logs["log_worth"])
    _, low, high = found.bar() or (worth, worth, worth)
    text = plan["data"]["dataset"]
    return {
        "part": found.part,
        "setting": found.setting.name,
        "planned": 0,
        "base": found.setting.base,
        "text": TEXTS.get(text, text),
        "optimizer": plan["base_values"]["optimizer"],
        "runs": int(found.row["n"]),
        "worth": worth,
        "low": low,
        "high": high,
        "beyond": logs["censored"],
        "step_time": found.ratio("step_ratio"),
        "kv_cache": found.ratio("kv_bytes_per_token"),
    }


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
        "step_time": math.exp(found.log_step),
    }


def name_of(facts):
    """A planned setting in words."""
    factors = facts["factors"]
    optimizer = NAMES.get(factors["optimizer"], factors["optimizer"])
    tokens = TOKENS.get(factors["tokens"], factors["tokens"])
    size = f"{factors['layers']} × {factors['width']}"
    text = NAMES.get(factors["text"], factors["text"])
    return f"{facts['setting']}: {text}, {tokens}, {optimizer}, {size}"
