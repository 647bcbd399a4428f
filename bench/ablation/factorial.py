"""
The analysis of a factorial: one linear model over all runs, fitted by statsmodels.

A main effect is the mean loss at a factor's high level minus that at its low level, over all
combinations of the other factors: an average over hybrids. The columns alone, alone_low and
alone_high estimate the swap in the base itself, where all other factors are low. An interaction is
how much larger a difference is where the other factor is high, too: (ab - a) - (b - base).
Intervals come from the whole model's residual variance. Holm's method corrects the main effects as
one family and the interactions as another; looks and ties are those of any sweep (verdicts.py).

A cell with a run that diverged is left out. A term that the other cells cannot tell from an earlier
one is left out, too.
"""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import statsmodels.api as sm

from bench.ablation import looks, power, verdicts, worth
from bench.ablation.verdicts import ALPHA, COLUMNS, Contrast, losses_of, pick

SCREENED = {"better": "larger than the noise", "worse": "larger than the noise"}
ALONE = ["alone", "alone_low", "alone_high"]
STEP_RATIO = ["step_ratio", "step_ratio_low", "step_ratio_high"]


def cells_of(plan):
    """{arm: {factor: 0 or 1}} of a factorial; {} for other sweeps."""
    return {arm: facts["cell"] for arm, facts in plan["arms"].items() if facts["cell"]}


class Model:
    """loss = sum of coefficient x term + noise, levels -1 and 1; a term is a tuple of factors."""

    def __init__(self, cells, losses):
        """cells: {arm: {factor: 0 or 1}}; losses: {arm: losses [n]} of those that count."""
        self.arms = [arm for arm in cells if len(losses.get(arm, ()))]
        self.counts = [len(losses[arm]) for arm in self.arms]
        factors = list(next(iter(cells.values())))
        self.levels = {f: np.array([2.0 * cells[arm][f] - 1 for arm in self.arms]) for f in factors}
        self.terms, self.mixed = [()], set()
        self.columns = np.ones((len(self.arms), 1))  # [cells, terms]
        for term in [*combinations(factors, 1), *combinations(factors, 2)]:
            self.add(term)
        columns = self.columns.repeat(self.counts, 0)  # [runs, terms]
        self.fit = sm.OLS(np.concatenate([losses[arm] for arm in self.arms]), columns).fit()

    def column(self, term):
        return np.prod([self.levels[factor] for factor in term], axis=0)  # [cells]

    def add(self, term):
        """Add a term, unless those before it make it up: then note that it is mixed with them."""
        column = self.column(term)
        shares = np.linalg.lstsq(self.columns, column)[0]
        if not np.allclose(self.columns @ shares, column):
            self.terms.append(term)
            self.columns = np.column_stack([self.columns, column])
            return
        self.mixed |= {t for t, share in zip(self.terms, shares, strict=True) if abs(share) > 1e-9}

    def effect(self, term):
        """The weights of the coefficients whose sum is the effect of a term."""
        return np.array([2.0 * len(term) * (term == other) for other in self.terms])

    def effect_alone(self, factor):
        """The same for a factor's effect where all others are low; None if a term is missing."""
        pairs = [term for term in combinations(list(self.levels), 2) if factor in term]
        if not set(pairs) <= set(self.terms):
            return None
        return np.array([2.0 * (term == (factor,)) - 2.0 * (term in pairs) for term in self.terms])

    def weights_of_runs(self, weights):
        """{arm: weight of each of its runs} in a sum of coefficients."""
        of_runs = weights @ self.fit.model.pinv_wexog  # [runs]
        return dict(zip(self.arms, of_runs[np.cumsum(self.counts) - 1], strict=True))

    def contrast(self, weights):
        """The Contrast of a sum of coefficients."""
        if not self.fit.df_resid:
            return Contrast(weights @ self.fit.params, np.array(math.nan), np.array(math.nan))
        test = self.fit.t_test(weights)
        return Contrast(test.effect[0], test.sd[0, 0], self.fit.df_resid)


def effects(runs, plan, history=(), measure="loss"):
    """The DataFrame of the effects of a factorial: the columns of verdicts.judge, ALONE and
    STEP_RATIO, main effects, then interactions."""
    attrs = verdicts.judge(runs, plan, history, measure).attrs
    losses, cells = losses_of(runs, measure), cells_of(plan)
    seen = {arm: pick(losses, [arm]) for arm in cells}
    cells = {arm: cell for arm, cell in cells.items() if np.isfinite(seen[arm]).all()}
    diverged = {arm: int(np.isinf(group).sum()) for arm, group in seen.items() if arm not in cells}
    models = [model_at(cells, losses, look.seeds) for look in attrs["looks"][:-1]]
    models.append(model_at(cells, losses))
    last, lines = models[-1], []
    if last is not None:
        planned = looks.planned_runs(plan, plan["looks"][0])
        missing = any(len(group) < planned[arm] for arm, group in seen.items())
        curve = worth.curve_of(runs, measure)
        for size in (1, 2):
            terms = [term for term in last.terms if len(term) == size]
            family = judged(terms, models, attrs)
            for line in family:
                complete(line, last, runs, curve)
                settle(line, last, plan, diverged, missing)
                look_ahead(line, last, attrs["margin"], len(family))
            lines += family
    frame = pd.DataFrame(lines, columns=[*COLUMNS, *ALONE, *STEP_RATIO])
    frame.attrs |= attrs | visible(frame, last)
    return frame


def model_at(cells, losses, seeds=None):
    """The Model of the runs at a look, or of all; None if the look is not reached."""
    if seeds is not None and not all(arm in seeds for arm in cells):
        return None
    groups = {arm: pick(losses, [arm], seeds) for arm in cells}
    return Model(cells, groups) if sum(map(len, groups.values())) > 1 else None


def judged(terms, models, attrs):
    """The rows of a family of terms, with their verdicts and corrected p-values."""
    if not terms:
        return []
    tests = np.ones((3, len(models), len(terms)))  # p, p of a tie, difference
    for place, model in enumerate(models):
        if model is not None:
            contrasts = [model.contrast(model.effect(term)) for term in terms]
            tests[0, place] = [test.p() for test in contrasts]
            tests[1, place] = [test.p_tie(attrs["margin"]) for test in contrasts]
            tests[2, place] = [test.difference for test in contrasts]
    taken = attrs["looks"]
    columns = verdicts.words(*tests, [x.share for x in taken], [x.tie_share for x in taken])
    reached, lines = any(model is not None for model in models[:-1]), []
    for place, term in enumerate(terms):
        name, pair = ":".join(term), len(term) == 2
        kind, against = ("interaction", " + ".join(term)) if pair else ("effect", "its low level")
        line = verdicts.row_of(name, against, kind, term=term)
        line |= {key: values[place].item() for key, values in columns.items()}
        lines.append(line if reached else line | {"verdict": "no verdict"})
    return lines


def complete(line, model, runs, curve):
    """Fill in the numbers of an effect."""
    term = line["term"]
    weights = model.effect(term)
    high = model.column(term).repeat(model.counts) > 0
    line |= model.contrast(weights).columns() | {"n": high.sum(), "n_control": (~high).sum()}
    line |= verdicts.text_interval(runs, model.weights_of_runs(weights))
    if len(term) > 1:
        return
    alone = model.effect_alone(*term)
    if alone is not None:
        columns = model.contrast(alone).columns()
        line |= dict(
            zip(ALONE, (columns[key] for key in ("difference", "low", "high")), strict=True)
        )
    ratio = step_ratio(model, *term, runs)
    line |= dict(zip(STEP_RATIO, ratio, strict=True))
    if curve:
        loss, n = curve.loss_at(1) + line["difference"], model.fit.df_resid + 1
        line |= worth.columns_of(curve, loss, line["se"], n, ratio)


def step_ratio(model, factor, runs):
    """[ratio, low, high] of the time per step at a factor's high level to that at its low level:
    geometric means over the cells of each, with a 95 % interval from those of the cells."""
    logs = np.log(runs.groupby("arm")[STEP_RATIO].first().loc[model.arms].to_numpy())  # [cells, 3]
    high = model.column((factor,)) > 0
    weights = np.where(high, 1 / high.sum(), -1 / (~high).sum())
    half = np.linalg.norm(weights * (logs[:, 2] - logs[:, 1]) / 2)
    mean = weights @ logs[:, 0]
    return np.exp([mean, mean - half, mean + half])


def settle(line, model, plan, diverged, missing):
    """Take back what the runs do not bear, and say why."""
    term, reasons, cells = line["term"], [], cells_of(plan)
    line["diverged"] = sum(n for arm, n in diverged.items() if all(cells[arm][f] for f in term))
    if line["diverged"]:
        reasons.append("runs diverged at its high level")
        if line["verdict"] in ("better", "tie"):
            line["verdict"] = "undecided"
    if not model.fit.df_resid:
        line["verdict"] = "no verdict"
        reasons.append("no run is left over to estimate the noise")
    elif missing:
        reasons.append("planned runs are missing")
    if term in model.mixed:
        reasons.append("mixed with other effects")
    if line["verdict"] in ("better", "worse") and line["text_low"] <= 0 <= line["text_high"]:
        reasons.append("not on every text")
    if plan["screening"] and line["verdict"] != "no verdict":
        line["verdict"] = SCREENED.get(line["verdict"], "not seen")
    line["reason"] = "; ".join(reasons)


def look_ahead(line, model, margin, family):
    """Fill in about how many more seeds of each cell would decide an undecided effect."""
    if line["verdict"] != "undecided" or line["diverged"]:
        return
    cells = len(model.counts)
    n = sum(model.counts) // cells
    numbers = np.arange(n + 1, power.MOST_SEEDS + 1)
    se, df = line["se"] * np.sqrt(n / numbers), cells * numbers - len(model.terms)
    level = ALPHA * looks.share_of(unplanned=1) / family
    enough = power.deciding(numbers, line["difference"], se, df, margin, level)
    line["more_seeds"] = enough - n if math.isfinite(enough) else math.inf


def visible(frame, model):
    """What the factorial can see: {smallest_visible, family} of its main effects."""
    main = frame[frame.kind == "effect"]
    if model is None or not model.fit.df_resid or not len(main):
        return {"smallest_visible": math.nan, "tie_power": math.nan}
    level = ALPHA * looks.share_of(planned=1) / len(main)
    smallest = power.smallest_visible(main.se.min(), model.fit.df_resid, level)
    return {"smallest_visible": smallest, "family": len(main), "tie_power": math.nan}
