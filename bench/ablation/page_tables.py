"""The tables of the page of the answer, besides the parts' own: functions of a Page that return a
frame of texts, or None."""

import math

import pandas as pd

from bench.ablation import effects, factors, figures, tables
from bench.ablation.tables import DASH, known, number
from bench.settings import table

ENOUGH = 12  # planned settings; fewer cannot tell the factors apart


def settings_table(page):
    """What each setting is, and how far its base has learned."""
    rows = []
    for setting in page.settings:
        plan = setting.section.plan
        facts = setting.section.facts
        values = plan["base_values"]
        tokens = plan["max_iters"] * values["batch_size"] * values["block_size"]
        rows.append(
            {
                "setting": setting.name,
                "parameters": number(
                    setting.section.cost(plan["base"], "parameters"), tables.short
                ),
                "text": figures.NAMES.get(plan["data"]["dataset"], plan["data"]["dataset"]),
                "vocabulary": f"{plan['data']['vocab_size']:,}",
                "optimizer": figures.NAMES.get(values["optimizer"], values["optimizer"]),
                "tokens": tables.short(tokens),
                "steps": f"{plan['max_iters']:,}",
                "loss of the base": number(facts.base_whole, ".3f"),
                "trigrams": number(plan["ngrams"].get("trigrams"), ".3f"),
                "runs of the base": number(facts.base_n, ".0f"),
                "in the model": "yes" if setting in page.modelled else "no",
                "timed on": next(iter(setting.section.costs["machine"]), DASH),
            }
        )
    return pd.DataFrame(rows) if rows else None


def scores_table(page):
    """How good the predictions are, a column for each kind of them."""
    columns = {heading: texts_of(scores) for heading, scores in page.scores.items()}
    if not columns:
        return None
    frame = pd.DataFrame(columns).fillna(DASH)
    return frame.rename_axis("predicted").reset_index()


def texts_of(scores):
    """The scores of some predictions, as {their name: text}."""
    ends = ""
    if known(scores["coverage_low"]):
        ends = f" [{scores['coverage_low']:.2f}, {scores['coverage_high']:.2f}]"
    texts = {
        "settings": f"{scores['settings']}",
        "predictions": f"{scores['n']}",
        "coverage [95 %, by setting]": f"{scores['coverage']:.2f}{ends}",
        "Brier score of P(helps)": f"{scores['brier']:.3f}",
    }
    if "brier_shares" in scores:
        name = "Brier score of the share elsewhere"
        texts[name] = f"{scores['brier_shares']:.3f}"
    texts["Brier score of the best constant"] = f"{scores['brier_constant']:.3f}"
    texts["signs called"] = f"{scores['called']}"
    texts["wrong among these"] = number(scores["wrong"], ".0%")
    return texts


def recipe_table(page):
    """The steps of the recipe."""
    rows = []
    for step, section in page.recipe.items():
        for row in section.swaps:
            cells = {"step": step, "change": row["name"], "verdict": row["verdict"]}
            cells["nats"] = tables.difference(row, 3)
            cells["worth × tokens"] = tables.multiple(row, ends=section.curve_ends)
            time_ends = section.time_ends(row["arm"])
            cells["× time"] = tables.multiple(row, "worth_time", time_ends)
            rows.append(cells | {"runs": f"{row['n']:.0f}"})
    return pd.DataFrame(rows) if rows else None


def planned_table(page):
    """The parts over the planned settings (config/answer/settings.py) that have run so far."""
    columns = page.planned_columns
    if not columns["part"]:
        return None
    rows = [
        dict(zip(["part", *table.HEADINGS], table.cells(e), strict=True))
        for e in effects.fit(columns)
    ]
    return pd.DataFrame(rows).replace("", DASH)


def plan_table(page):
    """What each planned setting is that has run, and whether it is admitted."""
    rows = []
    for each in page.planned:
        factors = each.facts["factors"]
        admission = each.facts["admission"] or {}
        rows.append(
            {
                "setting": each.name,
                "text": factors["text"],
                "tokens": factors["tokens"],
                "optimizer": figures.NAMES.get(factors["optimizer"], factors["optimizer"]),
                "base": factors["base"],
                "layers × width": f"{factors['layers']} × {factors['width']}",
                "context": f"{factors['context']}",
                "tokens trained": tables.short(each.facts["tokens"]),
                "best rate": number(each.best_rate or math.nan, ".2g"),
                "loss of the base": number(admission.get("loss", math.nan), ".3f"),
                "trigrams": number(admission.get("trigrams", math.nan), ".3f"),
                "runs": f"{len(each.rows)}",
                "admitted": "yes" if each.admitted else admission.get("why", "not yet known"),
            }
        )
    return pd.DataFrame(rows) if rows else None


def factors_table(page):
    """The worth of each part at one level of each factor over its worth at the other, by the means
    over the planned settings; a star marks the factors that the part depends on."""
    columns = page.planned_columns
    if len(set(columns["setting"])) < ENOUGH:
        return None
    levels = pd.DataFrame({each.name: each.facts["factors"] for each in page.planned}).T
    levels = levels.loc[list(dict.fromkeys(columns["setting"]))]
    levels = levels.loc[:, levels.nunique() == 2]
    named = factors.depends_on(columns, levels)
    frame = pd.DataFrame(columns).merge(levels, left_on="setting", right_index=True)
    rows = []
    for part, own in frame.groupby("part", sort=False):
        row = {"part": part}
        for factor in levels:
            low, high = sorted(levels[factor].unique())
            means = own.groupby(factor)["log_worth"].mean()
            ratio = number(math.exp(means.get(high, math.nan) - means.get(low, math.nan)), ".2f")
            row[f"{factor}: {high} ÷ {low}"] = f"{ratio} *" if factor in named[part] else ratio
        rows.append(row)
    return pd.DataFrame(rows)


TABLES = {
    "planned": planned_table,
    "plan": plan_table,
    "factors": factors_table,
    "scores": scores_table,
    "settings": settings_table,
    "recipe": recipe_table,
}


def made(page):
    """{key: frame of texts} of the tables that have rows."""
    frames = {key: make(page) for key, make in TABLES.items()}
    return {key: frame for key, frame in frames.items() if frame is not None}
