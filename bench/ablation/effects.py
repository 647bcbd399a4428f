"""
The analysis of a factorial: one linear model over all runs, fitted by statsmodels.

A main effect is the mean loss at a factor's high level minus that at its low level, over all
combinations of the other factors. An interaction is how much larger that difference is where the
other factor is high, too: (ab - a) - (b - base). Intervals come from the whole model's residual
variance. Holm's method corrects the main effects as one family and the interactions as another;
looks and ties are those of any sweep (significance.py).

A cell with a run that diverged is left out. A term that the other cells cannot tell from an earlier
one is left out, too, and named beside it.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, count

import numpy as np
import statsmodels.api as sm

from bench.ablation.factorial import design_of
from bench.ablation.history import control_runs, planned_runs
from bench.ablation.losses import Losses
from bench.ablation.power import deciding
from bench.ablation.significance import ALPHA, MOST_SEEDS, Contrast, difference, judge, share_of
from bench.ablation.stats import Verdict

SCREENED = {"better": "larger than the noise", "worse": "larger than the noise"}


@dataclass
class Effects:
    """The effects of a factorial by one measure."""

    verdicts: list = field(default_factory=list)  # main effects, then interactions
    alone: dict = field(default_factory=dict)  # factor -> Contrast where all others are low
    step_ratios: dict = field(default_factory=dict)  # factor -> (ratio, low, high) of a step's time
    contrasts: dict = field(default_factory=dict)  # name -> mean of its high runs minus the others
    se: float = math.nan  # the least standard error of a contrast
    left_out: dict = field(default_factory=dict)  # cell -> runs that diverged
    missing: int = 0  # planned runs without a result
    model: object = None  # the Model of all runs


def cells_of(sweep):
    """{arm: {factor: 0 or 1}} of a factorial; {} for other sweeps."""
    arms = sweep["arms"].items()
    return {arm: facts["cell"] for arm, facts in arms if facts.get("cell")}


class Model:
    """loss = sum of coefficient x term + noise, levels -1 and 1; a term is a tuple of factors."""

    def __init__(self, cells, losses):
        """cells: {arm: {factor: 0 or 1}}; losses: {arm: losses [n]} of those that count."""
        self.arms = [arm for arm in cells if len(losses.get(arm, ()))]
        self.counts = [len(losses[arm]) for arm in self.arms]
        self.losses = np.concatenate([losses[arm] for arm in self.arms])  # [runs]
        self.design = design_of([cells[arm] for arm in self.arms])  # [cells, factors]
        self.factors = list(next(iter(cells.values())))
        self.terms, self.mixed = [()], {}
        for term in [*combinations(self.factors, 1), *combinations(self.factors, 2)]:
            self.add(term)

    def column(self, term):
        return self.design[:, [self.factors.index(factor) for factor in term]].prod(1)

    @property
    def columns(self):
        return np.column_stack([self.column(term) for term in self.terms])  # [cells, terms]

    def of_runs(self, weights):
        """The weights [runs] of the runs' losses in a sum of coefficients."""
        return weights @ np.linalg.pinv(self.columns.repeat(self.counts, 0))

    def add(self, term):
        """Add a term, unless those before it make it up: then note it as mixed with them."""
        column, columns = self.column(term), self.columns
        shares, *_ = np.linalg.lstsq(columns, column, rcond=None)
        if not np.allclose(columns @ shares, column):
            self.terms.append(term)
            return
        for other, share in zip(self.terms, shares, strict=True):
            if abs(share) > 1e-9:
                self.mixed.setdefault(other, []).append((-1 if share < 0 else 1, term))

    @cached_property
    def fit(self):
        return sm.OLS(self.losses, self.columns.repeat(self.counts, 0)).fit()

    def effect_of(self, term):
        """The weights of the coefficients whose sum is the effect of a term."""
        return np.array([2.0 * len(term) * (term == other) for other in self.terms])

    def effect_alone(self, factor):
        """The same for a factor's effect where all others are low; None if a term is missing."""
        pairs = [term for term in combinations(self.factors, 2) if factor in term]
        if not set(pairs) <= set(self.terms):
            return None
        return np.array([2.0 * (term == (factor,)) - 2.0 * (term in pairs) for term in self.terms])

    def weight_of_a_run(self, weights, arm):
        """The weight of each run of an arm in a sum of coefficients; 0 if the arm is left out."""
        if arm not in self.arms:
            return 0.0
        return self.of_runs(weights)[sum(self.counts[: self.arms.index(arm)])]

    def contrast(self, weights):
        """The Contrast of a sum of coefficients."""
        if not self.fit.df_resid:
            return Contrast(weights @ self.fit.params, np.array(math.nan), np.array(math.nan))
        test = self.fit.t_test(weights)
        return Contrast(test.effect[0], test.sd[0, 0], self.fit.df_resid)


def analyse(sweep, runs, analysis, costs=None):
    """The Effects of a factorial. `analysis` is that of its sweep by one measure, whose verdicts
    these become; costs: {cell: row of costs.jsonl}."""
    losses = Losses(sweep, runs, analysis.measure, costs or {})
    cells, looks = cells_of(sweep), [*analysis.looks[:-1], None]
    found = {arm: losses.of(arm) for arm in cells}
    planned = planned_runs(sweep, min(sweep["looks"]))
    diverged = {arm: int(np.isinf(values).sum()) for arm, values in found.items()}
    effects = Effects(left_out={arm: count for arm, count in diverged.items() if count})
    effects.missing = sum(max(0, planned[arm] - len(found[arm])) for arm in cells)

    models = [model_at(cells, losses, look, effects.left_out) for look in looks]
    effects.model = models[-1]
    if models[-1] is None:
        return effects
    for size in (1, 2):
        terms = [term for term in models[-1].terms if len(term) == size]
        effects.verdicts += judged(terms, models, analysis, size)
    for verdict in effects.verdicts:
        complete(verdict, models[-1], effects, analysis, losses, sweep)
    analysis.verdicts = effects.verdicts
    return effects


def model_at(cells, losses, look, left_out):
    """The Model of the runs at a look, or of all runs; None if the look is not reached."""
    arms = [arm for arm in cells if arm not in left_out]
    if look and not all(arm in look.seeds for arm in arms):
        return None
    found = {arm: losses.of(arm, look and look.seeds[arm]) for arm in arms}
    return Model(cells, found) if sum(map(len, found.values())) > 1 else None


def judged(terms, models, analysis, size):
    """[Verdict] of a family of terms, with its words and corrected p-values."""
    tests = np.ones((3, len(models), len(terms)))  # p, p of a tie, mean
    for place, model in enumerate(models):
        if model is not None:
            found = [model.contrast(model.effect_of(term)) for term in terms]
            ties = [one.p_within(analysis.margin) for one in found]
            tests[:, place] = [one.p() for one in found], ties, [one.mean for one in found]
    shares = [look.share for look in analysis.looks]
    words = judge(*tests, shares, [look.tie_share for look in analysis.looks])
    reached = any(model is not None for model in models[:-1])
    verdicts = []
    for place, term in enumerate(terms):
        against = " + ".join(term) if size == 2 else "its low level"
        verdict = Verdict(":".join(term), against, interaction=size == 2)
        verdict.word = str(words["word"][place]) if reached else "no verdict"
        for key in ("p_looks", "p_tie_looks", "p_holm", "p_tie"):
            setattr(verdict, key, float(words[key][place]))
        verdicts.append(verdict)
    return verdicts


def complete(verdict, model, effects, analysis, losses, sweep):
    """Fill in the numbers of an effect, and settle its word."""
    term = tuple(verdict.arm.split(":"))
    weights = model.effect_of(term)
    verdict.measure(model.contrast(weights))
    high = model.column(term).repeat(model.counts) > 0
    verdict.n, verdict.n_against = int(high.sum()), int((~high).sum())
    effects.contrasts[verdict.arm] = verdict.mean / len(term)
    effects.se = float(np.fmin(effects.se, verdict.se / len(term)))
    add_text_interval(verdict, model, weights, losses)

    if len(term) == 1:
        alone = model.effect_alone(term[0])
        effects.alone[term[0]] = None if alone is None else model.contrast(alone)
        effects.step_ratios[term[0]] = ratio = step_ratio(cells_of(sweep), losses, term[0])
        if analysis.curve:
            loss, n = analysis.curve.loss_at(1) + verdict.mean, model.fit.df_resid + 1
            verdict.worth = analysis.curve.worth(loss, verdict.se, n)
            verdict.worth_time = ratio and analysis.curve.worth(loss, verdict.se, n, ratio)
    settle(verdict, term, model, effects, sweep)
    if verdict.word == "undecided" and not verdict.diverged:
        verdict.more = more_seeds(verdict, model, analysis.margin)


def step_ratio(cells, losses, factor):
    """(ratio, low, high) of the time per step at a factor's high level to that at its low level:
    geometric means over the cells of each, with a 95 % interval from those of the cells. None
    unless all cells were timed."""
    ratios = [losses.step_ratio(arm) for arm in cells]
    if not all(ratios):
        return None
    logs = np.log(ratios)  # [cells, 3]
    levels = np.array([cell[factor] for cell in cells.values()])
    weights = np.where(levels, 1 / levels.sum(), -1 / (1 - levels).sum())
    half = np.linalg.norm(weights * (logs[:, 2] - logs[:, 1]) / 2)
    mean = weights @ logs[:, 0]
    return tuple(np.exp([mean, mean - half, mean + half]).tolist())


def more_seeds(verdict, model, margin):
    """About how many more seeds of each cell would decide an effect at the next look, with 80 %
    power at the observed effect; 0 if over MOST_SEEDS."""
    n, cells = len(model.losses) // len(model.counts), len(model.counts)
    numbers = np.arange(n + 1, MOST_SEEDS + 1)
    family = sum(len(term) == 1 + verdict.interaction for term in model.terms)
    level = ALPHA * share_of(unplanned=1) / family
    se, df = verdict.se * np.sqrt(n / numbers), cells * numbers - len(model.terms)
    enough = deciding(numbers, verdict.mean, se, df, margin, level)
    return enough - n if enough else 0


def add_text_interval(verdict, model, weights, losses):
    """The interval of an effect over the text: a bootstrap over its blocks."""
    rows = [row for arm in model.arms for row in losses.runs.ended(arm).values()]
    if not all(row.get("blocks") for row in rows):
        return
    verdict.resample(model.of_runs(weights) @ np.array([row["blocks"] for row in rows]))


def settle(verdict, term, model, effects, sweep):
    """Take back what the runs do not bear, and say why."""
    cells, parts = cells_of(sweep), []
    diverged = [arm for arm in effects.left_out if all(cells[arm][factor] for factor in term)]
    verdict.diverged = sum(effects.left_out[arm] for arm in diverged)
    if diverged:
        parts.append(f"{verdict.diverged} runs diverged at its high level: {', '.join(diverged)}")
        if verdict.word in ("better", "tie"):
            verdict.word = "undecided"
    if not model.fit.df_resid:
        verdict.word = "no verdict"
        parts.append("no run is left over to estimate the noise")
    elif effects.missing:
        parts.append(f"{effects.missing} planned runs are missing")
    if term in model.mixed:
        mixed = ["-" * (sign < 0) + ":".join(other) for sign, other in model.mixed[term]]
        parts.append(f"mixed with {', '.join(mixed)}")
    parts.append(verdict.text_note)
    if sweep.get("screening") and verdict.word != "no verdict":
        verdict.word = SCREENED.get(verdict.word, "not seen")
    verdict.why = "; ".join(filter(None, parts))


def high_level(sweep, factor):
    """{key: value} of a factor's high level."""
    cells = cells_of(sweep)
    high = [sweep["arms"][arm]["changes"] for arm, cell in cells.items() if cell[factor]]
    return {key: value for key, value in high[0].items() if all(key in c for c in high)}


def levels(sweep, factor):
    """ "position=learned to rope", of a factor or of both of an interaction."""
    base = sweep["base_values"]
    high = [high_level(sweep, name).items() for name in factor.split(":")]
    return ", ".join(f"{key}={base.get(key)} to {value}" for key, value in chain(*high))


# ---------------------------------------------------------------- beside one part at a time


def runs_one_by_one(parts, variance):
    """The runs that one part at a time takes until each effect has this variance, in a run's."""
    for seeds in count(2):
        control = sum(control_runs(parts, seeds))
        if 1 / seeds + 1 / control <= variance:
            return parts * seeds + control


def beside(factorial, single):
    """[(factor, one, [(effect, difference)])] of the factors that a sweep `single` of one part at a
    time has, too: Contrasts of its effect, of the factorial's alone and on average, and of these
    minus the first. The sections have the same base, whose first seeds may be the same runs."""
    found, model = [], factorial.effects.model
    for factor, alone in factorial.effects.alone.items():
        high = high_level(factorial.sweep, factor)
        verdict = next((v for v in single.main.verdicts if is_single(single, v, high)), None)
        if verdict is None or alone is None:
            continue
        one, pairs = Contrast(verdict.mean, verdict.se, verdict.df), []
        for weights in (model.effect_alone(factor), model.effect_of((factor,))):
            effect = model.contrast(weights)
            of_base = model.weight_of_a_run(weights, factorial.sweep["base"])
            # The same runs count in both estimates: in the other one as part of its control group.
            covariance = -shared_runs(factorial, single) * of_base / verdict.n_against
            pairs.append((effect, difference(effect, one, covariance * model.fit.scale)))
        found.append((factor, one, pairs))
    return found


def is_single(section, verdict, changes):
    """Whether a verdict is on an arm with just these changes to the base."""
    arm = section.sweep["arms"][verdict.arm]
    to_base = verdict.against == section.sweep["base"] and not verdict.interaction
    return to_base and arm["changes"] == changes and math.isfinite(verdict.se)


def shared_runs(section, other):
    """The number of runs of the base that two sections have in common."""
    base = section.sweep["base"]
    mine, theirs = (each.runs.done.get(base, {}) for each in (section, other))
    keys = ("code_hash", "config_hash", "lr")
    return sum(
        all(mine[seed].get(key) == theirs[seed].get(key) for key in keys)
        for seed in mine.keys() & theirs.keys()
    )
