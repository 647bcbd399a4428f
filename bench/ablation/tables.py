"""The tables of a report: a function takes a Section and returns a frame of texts, or None.
report.py has their titles and captions."""

import math

import numpy as np
import pandas as pd

from bench.ablation.arms import described
from bench.ablation.comparisons import TEST
from bench.ablation.plans import bits_per_byte
from bench.ablation.power import MOST_SEEDS
from bench.ablation.worth import STEP_RATIO

DASH = "\u2013"  # stands for a missing number
SHARES = ("wrong_answers", "wrong_tokens")  # columns of runs on prompts and answers


# What a column, or a row of the table of the noise, means. A caption has those that are there.
EXPLAINED = {
    "difference [95 %]": "Differences are in nats per token; negative is better.",
    "worth × tokens": "An arm that is worth 1.4 × gets as far as the base does with 1.4 times the "
    "tokens.",
    "step time": "Step time: times the base's, with a 95 % interval, if the machine was quiet.",
    "seeds to decide": "Seeds to decide: about as many as decide an undecided arm, in a sweep of "
    "its own with --first_seed.",
    "test loss": "Test loss: on the test split, of which nothing was chosen.",
    "what changes": "What changes: all that the arm has in another way than the base.",
    "loss (sd)": "Loss: mean on the reported half of the validation text, with the standard "
    "deviation of a run.",
    "p": "p: Welch's test of this comparison alone; a screening takes one variance for all arms.",
    "p (Holm)": "p (Holm): of both tests, corrected for the number of arms; a word needs 5 %.",
    "p (tie)": "p (tie): of a difference that reaches the margin, corrected in the same way.",
    "worth × time": "Worth × time: the worth in tokens divided by the time of a step.",
    "FLOPs/token": "FLOPs are of a forward pass.",
    "base again minus base [95 %]": "Base again is a second copy of the base, with other initial "
    "weights and another order of the data: it should not differ.",
    "difference that 80 of 100 such sweeps find": "Smaller differences are mostly not found.",
}


# ---------------------------------------------------------------- texts of numbers


def known(value):
    """Whether a value is a finite number."""
    return isinstance(value, (int, float, np.number)) and math.isfinite(value)


def number(value, form=".4f"):
    """A number in a format or by a function; a dash if there is none."""
    if not known(value):
        return DASH
    return form(value) if callable(form) else format(value, form)


def signed(value, digits=4):
    """A number with its sign, with a typographic minus."""
    return number(value, f"+.{digits}f").replace("-", "\u2212")


def short(value):
    """Three digits and a unit: 1234567 is 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def interval(value, low, high, text):
    """A number with its interval, each by the function `text`; a dash if there is none."""
    if math.isnan(value):
        return DASH
    if math.isnan(low + high) or text(low) == text(high):
        return text(value)
    return f"{text(value)} [{text(low)}, {text(high)}]"


def difference(row, digits=4, of=("difference", "low", "high")):
    """The difference of a comparison with its interval."""
    values = (row[key] for key in of)
    return interval(*values, lambda value: signed(value, digits))


def multiple(row, key="worth", ends=(-math.inf, math.inf)):
    """The worth of an arm with its interval, as far as the `ends` of the base's curve."""

    def text(value):
        within = f"{np.clip(value, *ends):.2f}"
        if value <= ends[0]:
            return f"<{within}"
        if value >= ends[1]:
            return f">{within}"
        return within

    return interval(row[key], row[f"{key}_low"], row[f"{key}_high"], text)


def step_time(costs):
    """The time of a step over the base's, with its interval."""
    return interval(*(costs[key] for key in STEP_RATIO), lambda value: f"{value:.2f}")


def without_empty_columns(table):
    """The table without the columns that hold only dashes; None if no row is left."""
    return table.loc[:, table.ne(DASH).any()] if len(table) else None


# ---------------------------------------------------------------- verdicts


def verdicts_table(section):
    """Each change beside the runs of base and base again, pooled; a rung beside the one below."""
    rows = []
    for row in section.verdicts.to_dict("records"):
        cells = {"change": row["name"], section.verdict_heading: row["verdict"]}
        cells["difference [95 %]"] = difference(row)
        cells["worth × tokens"] = multiple(row, ends=section.curve_ends)
        cells["step time"] = step_time({key: section.cost(row["arm"], key) for key in STEP_RATIO})
        cells["runs"] = runs_text(row["n"], row["diverged"])
        cells["parameters"] = number(section.cost(row["arm"], "parameters"), short)
        cells["seeds to decide"] = number(row["seeds_to_decide"], ".0f")
        if row["seeds_to_decide"] == math.inf:
            cells["seeds to decide"] = f">{MOST_SEEDS}"
        rows.append(cells | outcomes(section, row["arm"] if row["kind"] != "replicate" else ""))
    base = section.plan["base"]
    runs = section.ended[section.ended["arm"] == base]
    first = {"change": base, "runs": runs_text(len(runs), (runs["status"] == "diverged").sum())}
    first |= outcomes(section, base)
    first["parameters"] = number(section.cost(base, "parameters"), short)
    columns = list(dict.fromkeys(key for row in [*rows, first] for key in row))
    return without_empty_columns(pd.DataFrame([first, *rows], columns=columns).fillna(DASH))


def runs_text(n, diverged):
    """The number of runs, and of those that diverged."""
    return f"{n:.0f}, {diverged:.0f} diverged" if diverged else f"{n:.0f}"


def outcomes(section, arm):
    """Means of an arm's runs that no decision has used: loss of the test split, wrong answers."""
    means = section.reported(arm)[["test_loss", *SHARES]].mean()
    shares = {key.replace("_", " "): number(means[key], ".1%") for key in SHARES}
    return {"test loss": number(means["test_loss"]), **shares}


def tests_table(section):
    """The same comparisons in more detail."""
    factor = bits_per_byte(section.plan)
    rows = []
    for row in section.verdicts.to_dict("records"):
        low = row["text_low"]
        high = row["text_high"]
        rows.append(
            {
                "change": row["name"],
                "what changes": what_changes(section, row),
                "loss (sd)": f"{number(row['val_loss_report'])} ({number(row['sd'])})",
                "bits/byte": number(row["val_loss_report"] * factor),
                "p": number(row["p"], ".2g"),
                "p (Holm)": number(row["p_holm"], ".2g"),
                "p (tie)": number(row["p_tie"], ".2g"),
                "over the text [95 %]": f"[{signed(low)}, {signed(high)}]" if known(low) else DASH,
                "on the test split [95 %]": difference(row, of=TEST),
                "worth × time": multiple(row, "worth_time", section.time_ends(row["arm"])),
                "note": row["reason"] or DASH,
            }
        )
    return without_empty_columns(pd.DataFrame(rows).replace(f"{DASH} ({DASH})", DASH))


def what_changes(section, row):
    """All that the row's arm has in another way than the base, as a text: the keys that it changes,
    the width of its MLP where matching set it, and the learning rate where it chose another one."""
    arm = section.plan["arms"].get(row["arm"], {})
    text = described(arm.get("changes") or {}, arm.get("match"))
    rate = section.times_rate(row["arm"])
    if rate != 1:
        text += f"{', ' if text else ''}learning rate {rate:g} ×"
    if row["against"] != section.plan["base"]:
        text += f" (compared with {row['against']})"
    return text or DASH


def noise_table(section):
    """How much runs of the same model differ."""
    facts = section.facts
    copies = section.replicate.to_dict("records")
    share = facts.tie_power
    values = {
        "loss of the base, on the reported half": number(facts.base_mean),
        "standard deviation of one run": number(facts.base_sd),
        "runs of the base and of base again": number(facts.base_n, ".0f"),
        "base again minus base [95 %]": difference(*copies) if copies else DASH,
        "difference that 80 of 100 such sweeps find": number(facts.smallest_visible),
        "margin of a tie": number(facts.margin),
        "the margin is": facts.margin_source if known(facts.margin) else DASH,
        "chance that an equal arm is called a tie": f"{share:.0%}" if known(share) else DASH,
    }
    rows = [{"noise": key, "": value} for key, value in values.items() if value != DASH]
    return without_empty_columns(pd.DataFrame(rows))


def missing_table(section):
    """The arms whose planned runs have not all ended. The verdicts are of those that have."""
    frame = pd.DataFrame(section.missing(), columns=["arm", "planned", "ended"])
    return without_empty_columns(frame.astype(str))


def costs_table(section):
    """Medians of single steps; the arms take turns."""
    rows = [
        {
            "machine": row["machine"],
            "arm": row["arm"],
            "step time": step_time(row),
            "parameters": number(row["parameters"], short),
            "FLOPs/token": number(row["flops_per_token"], short),
            "ms/step": number(row["ms_per_step"], ".1f"),
            "peak bytes": number(row["memory_bytes"], short),
            "KV bytes/token": number(row["kv_bytes_per_token"], ",.0f"),
        }
        for row in section.costs.to_dict("records")
    ]
    table = pd.DataFrame(rows)
    if rows and table["machine"].nunique() == 1:
        table = table.drop(columns="machine")
    return without_empty_columns(table)


def contexts(section, arm):
    """{times the training context: (loss, low, high, loss with only the training context)}, means
    over an arm's runs; low and high are of the interval over windows of the text."""
    losses = {}
    for entries in section.reported(arm)["extrapolation"]:
        for times, entry in entries.items():
            values = [entry.get(key) for key in ("loss", "low", "high")]
            values.append(entry.get("window", {}).get("loss"))
            if all(map(known, values)):
                losses.setdefault(times, []).append(values)
    return {times: np.mean(runs, axis=0) for times, runs in losses.items()}
