"""
The analysis of a factorial: one linear model over all runs, fitted by statsmodels.

A main effect is the mean loss at a factor's high level minus that at its low level, over all
combinations of the other factors: an average over hybrids. The columns alone, alone_low and
alone_high estimate the swap in the base itself, where all other factors are low. An interaction is
how much larger a difference is where the other factor is high, too: (ab - a) - (b - base).
Intervals come from the whole model's residual variance. Holm's method corrects the main effects as
one family and the interactions as another; looks and ties are those of any sweep (verdicts.py), and
so is what runs that did not learn mean for a factor. Beside such runs no interaction is decided.

The model is fitted to the runs that learned. A term is left out if the cells that still have runs
cannot tell it from earlier terms.
"""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import statsmodels.api as sm

from bench.ablation import looks, verdicts
from bench.ablation.contrasts import Contrast, failures, family_verdicts, outcome
from bench.ablation.verdicts import COLUMNS, finite, losses_of, pick

SCREENED = {"better": "larger than the noise", "worse": "larger than the noise"}
SCREENED |= {"undecided": "not seen", "tie": "not seen"}
ALONE = ["alone", "alone_low", "alone_high"]


def cells_of(plan):
    """{arm: {factor: 0 or 1}} of a factorial; {} for other sweeps."""
    return {arm: facts["cell"] for arm, facts in plan["arms"].items() if facts["cell"]}


class Model:
    """loss = sum of coefficient x term + noise, levels -1 and 1; a term is a tuple of factors."""

    def __init__(self, cells, losses):
        """cells: {arm: {factor: 0 or 1}}; losses: {arm: losses [n]} of those that count."""
        groups = {arm: losses[arm] for arm in cells if len(losses.get(arm, ()))}
        factors = list(next(iter(cells.values())))
        self.levels = {f: np.array([2.0 * cells[arm][f] - 1 for arm in groups]) for f in factors}
        self.terms, self.mixed = [()], set()
        self.columns = np.ones((len(groups), 1))  # [cells, terms]
        for term in [*combinations(factors, 1), *combinations(factors, 2)]:
            self.add(term)
        columns = self.columns.repeat([*map(len, groups.values())], 0)  # [runs, terms]
        self.fit = sm.OLS(np.concatenate([*groups.values()]), columns).fit()

    def add(self, term):
        """Add a term, or note that it is mixed with the terms before it, which add up to it."""
        column = np.prod([self.levels[factor] for factor in term], axis=0)  # [cells]
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

    def contrast(self, weights):
        """The Contrast of a sum of coefficients; its error is nan where no run is left over."""
        df = self.fit.df_resid or math.nan
        variance = weights @ self.fit.normalized_cov_params @ weights * self.fit.ssr / df
        return Contrast(weights @ self.fit.params, np.sqrt(variance), np.array(df))


def effects(runs, plan, history=()):
    """The DataFrame of the effects of a factorial: the columns of verdicts.judge and ALONE, main
    effects, then interactions."""
    attrs = verdicts.judge(runs, plan, history).attrs
    runs, _ = verdicts.yardstick(runs, plan)
    losses, cells = losses_of(runs), cells_of(plan)
    first = next(iter(cells))  # a look takes all cells together
    seeds = [*(look.seeds_for(first) for look in attrs["looks"][:-1]), None]  # None: all runs
    models = [model_at(cells, losses, taken) for taken in seeds]
    last, lines = models[-1], []
    if last is not None:
        planned = looks.planned_runs(plan, plan["looks"][0])
        missing = any(len(pick(losses, [arm])) < planned[arm] for arm in cells)
        for size in (1, 2):
            terms = [term for term in last.terms if len(term) == size]
            family = judged(terms, models, seeds, losses, cells, attrs)
            for line in family:
                complete(line, last, runs, losses, cells)
                settle(line, last, attrs, missing)
            lines += family
    frame = pd.DataFrame(lines, columns=[*COLUMNS, *ALONE])
    frame.attrs |= attrs | verdicts.still_open(frame)
    return frame


def model_at(cells, losses, seeds=None):
    """The Model of the runs at a look, or of all; None if the look is not reached."""
    if seeds is not None and not all(arm in seeds for arm in cells):
        return None
    groups = {arm: finite(pick(losses, [arm], seeds)) for arm in cells}
    return Model(cells, groups) if sum(map(len, groups.values())) > 1 else None


def judged(terms, models, seeds, losses, cells, attrs):
    """The rows of a family of terms, with their verdicts and corrected p-values. models, seeds: of
    each look, the last of all runs."""
    if not terms:
        return []
    tests, taken = np.ones((3, len(models), len(terms))), attrs["looks"]  # p, tie, difference
    for place, model in enumerate(models):
        if model is None:
            continue
        for column, term in enumerate(terms):
            test = model.contrast(model.effect(term))
            counts = failures([pick(losses, arms, seeds[place]) for arms in sides(term, cells)])
            test = outcome(test.p(), test.p_tie(attrs["margin"]), test.difference, counts)
            undecidable = len(term) == 2 and (counts[0] or counts[2])
            tests[:, place, column] = (1, 1, 0) if undecidable else test
    columns = family_verdicts(*tests, [x.share for x in taken], [x.tie_share for x in taken])
    reached, lines = any(model is not None for model in models[:-1]), []
    for place, term in enumerate(terms):
        name, pair = ":".join(term), len(term) == 2
        kind, against = ("interaction", " + ".join(term)) if pair else ("effect", "its low level")
        line = verdicts.row_of(name, against, kind, term=term)
        line |= {key: values[place].item() for key, values in columns.items()}
        lines.append(line if reached else line | {"verdict": "no verdict"})
    return lines


def sides(term, cells):
    """[arms, arms]: the cells where all factors of a term are high, and the others."""
    high = [arm for arm, levels in cells.items() if all(levels[factor] for factor in term)]
    return [high, [arm for arm in cells if arm not in high]]


def complete(line, model, runs, losses, cells):
    """Fill in the numbers of an effect."""
    term, (high, low) = line["term"], sides(line["term"], cells)
    line |= model.contrast(model.effect(term)).columns()
    line |= verdicts.not_learned(runs, high, [pick(losses, high), pick(losses, low)])
    alone = model.effect_alone(*term) if len(term) == 1 else None
    if alone is not None:
        own = model.contrast(alone).columns()
        line |= {"alone": own["difference"], "alone_low": own["low"], "alone_high": own["high"]}


def settle(line, model, attrs, missing):
    """Withdraw a verdict that the runs cannot support, and set the reason."""
    reasons = verdicts.reasons_of(line)
    if line["verdict"] == "worse":
        line["verdict"] = verdicts.failing_word(line) or "worse"
    if not model.fit.df_resid:
        line["verdict"] = "no verdict"
        reasons.append("no run is left over to estimate the noise")
    elif missing:
        reasons.append("planned runs are missing")
    if line["term"] in model.mixed:
        reasons.append("mixed with other effects")
    if attrs["screening"]:
        line["verdict"] = SCREENED.get(line["verdict"], line["verdict"])
    line["reason"] = "; ".join(reasons)
