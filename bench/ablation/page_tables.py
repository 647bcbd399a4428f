"""The tables of the page of the answer, besides the parts' own: functions of a Page that return a
frame of texts, or None."""

import math

import numpy as np
import pandas as pd
from scipy import stats

from bench.ablation import factors, page_worths, predictions, tables
from bench.ablation.arms import BASE
from bench.ablation.page_worths import word
from bench.ablation.tables import DASH, known, number
from bench.settings import rates, worths

LEAST_PARTS = 5  # for a rank correlation
TOGETHER = "All five together"  # never scored beside its own parts
CHANGES = {  # from GPT-2 to LLaMA: the part of config/answer/page.py
    "learned positions → RoPE": "RoPE",
    "GELU → SwiGLU": "SwiGLU",
    "LayerNorm → RMSNorm": "RMSNorm",
    "biases → none": "No biases",
    "tied → untied head": "Untied head",
    "all five together": TOGETHER,
}
# Four models, with or without the five and the convolutions: the arm of each base that makes them.
CONVOLUTIONS = "Convolutions at four sites"
FOUR_MODELS = {
    "gpt2": {
        "neither": BASE,
        "five": TOGETHER,
        "convolutions": CONVOLUTIONS,
        "both": "LLaMA with convolutions",
    },
    "llama": {
        "neither": TOGETHER,  # which takes the five out
        "five": BASE,
        "convolutions": "GPT-2 with convolutions",
        "both": CONVOLUTIONS,
    },
}


def tiles(page):
    """The numbers at the top of the page: settings measured; of all predictions, how many failed,
    and how many of the signs that they called were wrong."""
    numbers = [str(page.n_settings)]
    if page.predictions:
        texts = texts_of(predictions.scores(page.predictions))
        numbers += [texts["outside their 95 % interval"], texts["wrong among helps and hurts"]]
    return numbers


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
    outside = scores["n"] * (1 - scores["coverage"])
    wrong = scores["called"] * scores["wrong"] if scores["called"] else 0
    called = []
    for part in scores["parts_called"]:
        called.append(f"{part} (wrong once or more)" if part in scores["parts_wrong"] else part)
    return {
        "settings": f"{scores['settings']}",
        "outside their 95 % interval": f"{outside:.0f} of {scores['n']}",
        "share inside [95 %, by setting]": f"{scores['coverage']:.2f}{ends}",
        "wrong among helps and hurts": f"{wrong:.0f} of {scores['called']}",
        "parts with helps or hurts": ", ".join(called) or DASH,
        "Brier score of P(helps)": f"{scores['brier']:.3f}",
        "Brier score of a simple count": number(scores["brier_shares"], ".3f"),
        "Brier score of the best constant": f"{scores['brier_constant']:.3f}",
    }


def steps_of(rows):
    """The changes from GPT-2 to LLaMA in the planned settings of either base, from rows of
    worths.csv: one by one, together, and what they would be together if they multiplied."""
    rows = rows[rows["planned"] == 1]
    shown = {change: rows[rows["part"] == part] for change, part in CHANGES.items()}
    *five, _ = CHANGES.values()
    groups = rows[rows["part"].isin(five)].groupby(["base", "setting"], as_index=False)
    ends = {"lowest": ("beyond", "min"), "highest": ("beyond", "max")}
    product = groups.agg(parts=("part", "size"), worth=("worth", "prod"), **ends)
    product = product[product["lowest"] * product["highest"] >= 0]  # not one below, another above
    product["beyond"] = (product["lowest"] + product["highest"]).clip(-1, 1)
    shown["the five multiplied"] = product[product["parts"] == len(five)]
    made = []
    for change, own in shown.items():
        cells = {"change": change}
        for base in ("gpt2", "llama"):
            mine = own[own["base"] == base]
            cells[f"helps {word(base)} in"] = page_worths.helps(mine)
            cells[f"worth in {word(base)}"] = page_worths.mean(mine)
            cells[f"lowest to highest in {word(base)}"] = page_worths.lowest_to_highest(mine)
        if len(own):
            made.append(cells)
    return pd.DataFrame(made)


def sums_table(page):
    """By how much the five and the convolutions lower the loss of GPT-2, each alone and together,
    in the settings where all four models ran at the base's best rate and none diverged."""
    rows = []
    for each in [planned for planned in page.planned if planned.admitted]:
        losses = {}
        for model, arm in FOUR_MODELS[each.facts["factors"]["base"]].items():
            points = each.points(arm, rates.REPORTED)
            at_best = [loss for x, loss in points if abs(x) < worths.AT_BEST]
            losses[model] = np.mean(at_best or math.nan)
        falls = {model: losses["neither"] - loss for model, loss in losses.items()}
        if known(falls["five"] + falls["convolutions"] + falls["both"]):
            added = falls["five"] + falls["convolutions"]
            rows.append(
                {
                    "in": page_worths.name_of(each.facts),
                    "loss of GPT-2": f"{losses['neither']:.3f}",
                    "the five": f"{falls['five']:.3f}",
                    "convolutions": f"{falls['convolutions']:.3f}",
                    "both": f"{falls['both']:.3f}",
                    "both ÷ their sum": f"{falls['both'] / added:.2f}",
                }
            )
    return pd.DataFrame(rows) if rows else None


def plan_table(page):
    """What each planned setting is that has run, and whether it is admitted."""
    rows = []
    for each in page.planned:
        admission = each.facts["admission"] or {}
        stage, beyond = each.stage if each.admitted else (math.nan, 0)
        rows.append(
            cells_of_setting(each)
            | {
                "best rate": number(each.facts["best_rate"] or math.nan, ".2g"),
                "loss of the base": number(admission.get("loss", math.nan), ".3f"),
                "trigrams": number(admission.get("trigrams", math.nan), ".3f"),
                "stage": page_worths.BEYOND[beyond] + number(stage, ".1f"),
                "runs": f"{len(each.rows)}",
                "admitted": "yes" if each.admitted else admission.get("why", "not yet known"),
            }
        )
    return pd.DataFrame(rows) if rows else None


def cells_of_setting(measured):
    """The cells that say what a planned setting is."""
    levels = page_worths.levels_of(measured.facts)
    shown = ("base", "text", "tokens", "optimizer", "size", "context")
    cells = {"setting": measured.name} | {key: levels[key] for key in shown}
    return cells | {"trained on": tables.short(measured.facts["tokens"])}


def card_table(page, part):
    """The planned settings in which a part was measured, and its worth there."""
    measured = {each.name: each for each in page.planned}
    rows = []
    for row in part.rows:
        text = page_worths.marked(row)
        if not row["beyond"]:
            text = tables.interval(row["worth"], row["low"], row["high"], "{:.2f}".format)
        cells = {"setting": row["setting"], "worth × tokens": text}
        rows.append(cells | cells_of_setting(measured[row["setting"]]) | {"runs": f"{row['runs']}"})
    return pd.DataFrame(rows)


def factors_table(page):
    """The worth of each part at one level of each factor over its worth at the other, by the means
    over the planned settings. A ~ marks parts with a worth beyond a curve, which counts as its end;
    a star the factors that the part depends on."""
    levels = page.levels
    if levels is None:
        return None
    frame = pd.DataFrame(page.columns).merge(levels, left_on="setting", right_index=True)
    rows = []
    for part in page.answers:
        if part.effect.n_settings < factors.ENOUGH:
            continue
        own = frame[frame["part"] == part.name]
        row = {"part": part.name}
        about = "~" if own["censored"].any() else ""
        for factor in levels:
            low, high = sorted(levels[factor].unique())
            means = own.groupby(factor)["log_worth"].mean()
            ratio = number(math.exp(means.get(high, math.nan) - means.get(low, math.nan)), ".2f")
            star = " *" if factor in part.depends else ""
            row[f"{factor}: {word(high)}\u00a0÷\u00a0{word(low)}"] = f"{about}{ratio}{star}"
        rows.append(row)
    return pd.DataFrame(rows)


def passes_table(page):
    """The worth of each part by its run at the base's best rate, and by three runs at its own best
    rate, in the settings that have both. Last, by how much the models that were changed gained."""
    at_base_rate = {}  # {(part, setting): its Worth by the first pass}
    for each in page.planned:
        if each.admitted:
            for worth in worths.worths_of(worths.first_pass(each)):
                at_base_rate[worth.part, worth.setting] = worth
    arms = {each.name: each.facts["arms"] for each in page.planned}
    pairs = []
    for worth in page.worths:
        before = at_base_rate.get((worth.part, worth.setting))
        has_both = before and worth.runs > before.runs
        if has_both and not (worth.censored or before.censored):
            change = worth.log_worth - before.log_worth
            row = {"part": worth.part, "setting": worth.setting, "change": change}
            row |= {"first": before.log_worth, "both": worth.log_worth}
            row["gain"] = -change if arms[worth.setting][worth.part]["taken_out"] else change
            pairs.append(row)
    if not pairs:
        return None
    frame = pd.DataFrame(pairs)
    ratio = "ratio [95 %, by setting]"
    rows = []
    for part in page.answers:
        settings = frame[frame["part"] == part.name]
        if len(settings):
            means = np.exp(settings[["first", "both"]].mean())
            cells = {"part": part.name, "settings": f"{len(settings)}"}
            cells["at the base's rate"] = f"{means['first']:.2f}"
            cells["at its own"] = f"{means['both']:.2f}"
            cells[ratio] = ratio_of(settings["change"])
            rows.append(cells)
    gains = frame.groupby("setting")["gain"].mean()
    cells = {"part": "gain of the changed model", "settings": f"{len(gains)}"}
    cells[ratio] = ratio_of(gains)
    return pd.DataFrame([*rows, cells]).fillna("")


def ratio_of(logs):
    """The mean of log ratios with its 95 % interval by t, as a text of ratios."""
    if len(logs) < 2:
        return f"{math.exp(logs.mean()):.2f}"
    ends = stats.ttest_1samp(logs, 0).confidence_interval()
    return tables.interval(*np.exp([logs.mean(), *ends]), "{:.2f}".format)


def published_table(page):
    """The worths that others published beside ours, and the rank correlation of the two over parts,
    with its 95 % interval by Fisher's transformation."""
    parts = [part for part in page.parts if part.published and known(part.worth)]
    rows = []
    for part in parts:
        texts = [f"{worth:.2f} ({source})" for worth, source in part.published]
        rows.append({"part": part.name, "here": f"{part.worth:.2f}", "there": ", ".join(texts)})
    if len(parts) >= LEAST_PARTS:
        ours = [part.worth for part in parts]
        theirs = [stats.gmean([worth for worth, _ in part.published]) for part in parts]
        found = stats.pearsonr(stats.rankdata(ours), stats.rankdata(theirs))
        text = tables.interval(found.statistic, *found.confidence_interval(), "{:.2f}".format)
        rows.append({"part": f"rank correlation over {len(parts)} parts", "here": text})
    return pd.DataFrame(rows).fillna("") if rows else None


TABLES = {
    "scores": scores_table,
    "factors": factors_table,
    "steps": lambda page: steps_of(page.rows) if page.answers else None,
    "sums": sums_table,
    "passes": passes_table,
    "published": published_table,
    "plan": plan_table,
}


def made(page):
    """{key: frame of texts} of the tables that have rows."""
    frames = {key: make(page) for key, make in TABLES.items()}
    return {key: frame for key, frame in frames.items() if frame is not None}
