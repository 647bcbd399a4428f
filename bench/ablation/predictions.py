"""
The test of the model of effects.py: each setting is predicted from the others, and the predictions
are scored. A prediction of a setting that was measured later is scored by the same functions.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from bench.ablation import effects


@dataclass
class Prediction:
    """The log worth of a part in one setting, predicted before it was seen, and what it became."""

    part: str
    setting: str
    low: float  # 95 % prediction interval of the worth as it is measured, with its own error
    high: float
    p_helps: float
    p_within: float  # probability of no difference
    share: float  # of the settings it is predicted from, those in which the part helped
    log_worth: float  # measured; the end of the curve if censored
    censored: int = 0  # 1: it is above log_worth; -1: below, or diverged

    @property
    def covered(self):
        """Whether the interval contains the measured worth, or reaches beyond a censored one."""
        reaches_up = self.log_worth <= self.high or self.censored < 0
        reaches_down = self.log_worth >= self.low or self.censored > 0
        return reaches_up and reaches_down

    @property
    def helps(self):
        return self.log_worth > 0

    @property
    def called(self):
        """Whether a sign was called."""
        return effects.word_of(self) in ("helps", "hurts")


def leave_one_out(worths):
    """[Prediction] of each part in each setting, from the other settings alone. Parts that the
    others measured less than effects.LEAST_SETTINGS times are not predicted."""
    columns = effects.columns_of(worths)
    found = []
    for setting in dict.fromkeys(columns["setting"]):
        left_out = columns["setting"] == setting
        known = {key: values[~left_out] for key, values in columns.items()}
        new = {key: values[left_out] for key, values in columns.items()}
        found += predict(known, new)
    return found


def predict(known, new):
    """[Prediction] of the rows of `new` from the rows of `known`: tables of worths, as effects.fit
    takes them."""
    new = effects.columns_of(new)
    posteriors = effects.posteriors(known)
    found = []
    for place, part in enumerate(new["part"]):
        model = posteriors.get(str(part))
        if model is None or len(model.rows["se"]) < effects.LEAST_SETTINGS:
            continue
        low, high = model.interval(se=new["se"][place])
        found.append(
            Prediction(
                part=str(part),
                setting=str(new["setting"][place]),
                low=low,
                high=high,
                p_helps=1 - model.below(0),
                p_within=model.inside(effects.WITHIN),
                share=share_that_helped(model.rows),
                log_worth=float(new["log_worth"][place]),
                censored=int(new["censored"][place]),
            )
        )
    return found


def share_that_helped(rows):
    """P(helps) by a simpler method: the share of a part's settings in which it helped, with half a
    setting added to either side, so that it is neither 0 nor 1."""
    helps = rows["log_worth"] > 0
    return float((helps.sum() + 0.5) / (len(helps) + 1))


def scores(predictions):
    """What predictions are worth, as a dictionary: n; coverage with its 95 % interval clustered by
    setting; the Brier scores of P(helps), of the share, and of the best constant; how many said
    helps or hurts, of which parts they were, and the share of them that was wrong."""
    helps = np.array([each.helps for each in predictions], float)
    p_helps = np.array([each.p_helps for each in predictions])
    shares = np.array([each.share for each in predictions])
    covered = np.array([each.covered for each in predictions], float)
    settings = np.array([each.setting for each in predictions])
    called = np.array([each.called for each in predictions])
    wrong = (p_helps > 0.5) != (helps > 0)
    low, high = clustered_interval(covered, settings)
    return {
        "n": len(predictions),
        "settings": len(set(settings)),
        "coverage": covered.mean(),
        "coverage_low": low,
        "coverage_high": high,
        "brier": np.mean((p_helps - helps) ** 2),
        "brier_shares": np.mean((shares - helps) ** 2),
        "brier_constant": helps.mean() * (1 - helps.mean()),
        "called": int(called.sum()),
        "parts_called": sorted({each.part for each in predictions if each.called}),
        "parts_wrong": {predictions[place].part for place in np.flatnonzero(called & wrong)},
        "wrong": wrong[called].mean() if called.any() else np.nan,
    }


def clustered_interval(values, clusters):
    """The 95 % interval of the mean of shares, as if their clusters were independent: t over the
    means of the clusters, cut at 0 and 1. nan where the clusters do not differ."""
    means = np.array([values[clusters == cluster].mean() for cluster in dict.fromkeys(clusters)])
    if len(means) < 2 or not means.std():
        return np.nan, np.nan
    half = stdtrit(len(means) - 1, 0.975) * means.std(ddof=1) / np.sqrt(len(means))
    return max(0.0, means.mean() - half), min(1.0, means.mean() + half)
