"""The random-effects model: its likelihood, its predictions, censored worths, and its refusals."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import logsumexp

from bench.ablation import effects, factors, page_tables, predictions
from helpers import simulate_settings

WOBBLE = np.array([0.05, -0.02, 0.01, -0.04, 0.03, -0.01, 0.02, -0.04])  # its mean is 0


def table(**log_worths):
    """A table of worths with an error of 0.01, from {part: log worths by setting}. Infinite ones
    are censored at a worth of 4 or of 1/4."""
    rows = []
    for part, values in log_worths.items():
        for setting, value in enumerate(values):
            censored = int(np.sign(value)) if np.isinf(value) else 0
            bounded = float(np.clip(value, -np.log(4), np.log(4)))
            rows.append((part, setting, bounded, 0.01, censored))
    return pd.DataFrame(rows, columns=["part", "setting", "log_worth", "se", "censored"])


def by_part(worths, **keys):
    return {effect.part: effect for effect in effects.fit(worths, **keys)}


def test_the_likelihood_of_tau_is_reml():
    """The likelihood of the contrasts of a part's worths, which no mean enters."""
    random = np.random.default_rng(0)
    y = random.normal(0.1, 0.1, 6)
    se = random.uniform(0.01, 0.1, 6)
    rows = {"log_worth": y, "se": se, "censored": np.zeros(6, int)}
    taus = np.array([[0.01], [0.1], [0.4]])
    *_, log_likelihood = effects.grid(rows, taus)
    contrasts = np.eye(6)[1:] - np.eye(6)[0]
    expected = []
    for tau in taus[:, 0]:
        covariance = contrasts @ np.diag(tau**2 + se**2) @ contrasts.T
        normal = stats.multivariate_normal(cov=covariance)
        expected.append(normal.logpdf(contrasts @ y))
    found = logsumexp(log_likelihood, 1)
    assert np.diff(found) == pytest.approx(np.diff(expected), abs=1e-6)


def test_the_words():
    parts = dict(gains=0.3 + WOBBLE, loses=-0.3 + WOBBLE, same=WOBBLE / 10, varies=10 * WOBBLE)
    found = by_part(table(**parts))
    words = {part: effect.word for part, effect in found.items()}
    assert words == dict(gains="helps", loses="hurts", same="no difference", varies="not known")
    gains = found["gains"]
    assert (gains.n_settings, gains.n_helps) == (8, 8)
    assert gains.mean == pytest.approx(0.3, abs=0.005)
    assert gains.new_low < gains.mean_low < gains.mean < gains.mean_high < gains.new_high
    for ends in ((gains.mean_low, gains.mean_high), (gains.new_low, gains.new_high)):
        assert np.mean(ends) == pytest.approx(gains.mean, rel=1e-3)  # as likely on either side
    assert found["loses"].p_helps < 0.01 < 0.99 < gains.p_helps


def test_three_settings_predict_nothing():
    effect = by_part(table(gains=[0.3, 0.31, 0.32]))["gains"]
    assert (effect.n_settings, effect.n_helps, effect.word) == (3, 3, "not known")
    assert np.isnan([effect.mean, effect.new_low, effect.p_helps, effect.p_within]).all()


def test_alone_a_part_has_the_same_prior_whatever_its_worths_are():
    tables = (table(part=worths) for worths in (WOBBLE, np.arange(8) > 6))
    one, other = (effects.posteriors(each)["part"].prior for each in tables)
    assert one / one.sum() == pytest.approx(other / other.sum())
    assert effects.spread({"log_worth": np.ones(4), "se": np.full(4, 0.2)}) == pytest.approx(0.2)


def test_the_unit_of_the_worths_does_not_matter():
    worths = table(gains=0.1 + WOBBLE, varies=5 * WOBBLE)
    scaled = worths.assign(log_worth=1000 * worths.log_worth, se=1000 * worths.se)
    for small, large in zip(effects.fit(worths), effects.fit(scaled), strict=True):
        assert large.p_helps == pytest.approx(small.p_helps)
        assert large.new_high == pytest.approx(1000 * small.new_high)


def test_censored_worths_are_not_clipped():
    """Worths above the curve's end leave room above it; if all are, the interval is open. A
    diverged run is far below."""
    clipped = table(part=[1.2, 1.3, 1.1, np.log(4), np.log(4), 1.2])
    censored = table(part=[1.2, 1.3, 1.1, np.inf, np.inf, 1.2])
    assert by_part(censored)["part"].mean > by_part(clipped)["part"].mean + 0.03
    above = by_part(table(part=[np.inf] * 5, other=WOBBLE))["part"]
    assert above.new_high == above.mean_high == np.inf and above.new_low > 0
    assert above.mean == above.mean_low > 0  # what is known of it
    assert above.word == "helps"

    learned = by_part(table(part=0.1 + WOBBLE))["part"]
    diverged = by_part(table(part=[*(0.1 + WOBBLE[:7]), -np.inf]))["part"]
    assert (learned.word, diverged.word) == ("helps", "not known")
    assert diverged.n_helps == 7 and diverged.new_low < -1


def test_a_factor_is_named_where_it_matters():
    text = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    tokens = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    beyond = np.where(text, np.inf, WOBBLE)
    worths = table(by_text=0.1 * text + WOBBLE / 5, by_chance=WOBBLE, beyond=beyond)
    found = factors.depends_on(worths, {"text": text, "tokens": tokens})
    assert found == {"by_text": {"text": [1, 0]}, "by_chance": {}, "beyond": {"text": [1, 0]}}
    one, two = {"text": text}, {"text": text, "tokens": tokens}
    for effect, of, seen in ((0.06, one, 0), (0.07, one, 1), (0.07, two, 0)):  # P = 0.966, 0.980
        assert len(factors.depends_on(table(part=effect * text + WOBBLE), of)["part"]) == seen
    confounded = factors.depends_on(worths, {"text": text, "same": 1 - text})
    assert not any(confounded.values())


def test_a_setting_is_predicted_from_the_others():
    worths = table(gains=0.3 + WOBBLE, same=WOBBLE / 10)
    found = predictions.leave_one_out(worths)
    assert len(found) == 16
    last = predictions.predict(worths[worths.setting < 7], worths[worths.setting == 7])
    assert last == found[-2:]
    assert last[0].low < 0.3 < last[0].high
    assert not predictions.leave_one_out(worths[worths.setting < 4])
    assert predictions.share_that_helped({"log_worth": np.array([0.1, 0.2, -0.1])}) == 2.5 / 4


def prediction(setting, p_helps, log_worth, censored=0):
    ends = {"low": -1.0, "high": 1.0}
    chances = {"p_helps": p_helps, "p_within": 0.1, "share": 0.75}
    worth = {"log_worth": log_worth, "censored": censored}
    return predictions.Prediction("part", setting, **ends, **chances, **worth)


def test_the_scores_of_predictions():
    given = [
        prediction("a", 0.95, 0.5),
        prediction("a", 0.95, -0.5),  # wrong
        prediction("b", 0.5, 0.9, censored=1),
        prediction("b", 0.05, -2.0),  # not covered
    ]
    found = predictions.scores(given)
    assert found["n"] == 4 and found["settings"] == 2
    assert found["coverage"] == 0.75
    assert found["coverage_low"] == 0 and found["coverage_high"] == 1  # two settings say little
    assert found["brier"] == pytest.approx((0.05**2 + 0.95**2 + 0.25 + 0.05**2) / 4)
    assert found["brier_constant"] == 0.25
    assert found["brier_shares"] == (0.75**2 + 0.25**2) / 2  # two of the four helped
    assert found["called"] == 3 and found["wrong"] == pytest.approx(1 / 3)
    assert page_tables.texts_of(found | {"n": 40})["wrong among helps and hurts"] == "1 of 3"
    shares, clusters = np.array([0.4, 0.6, 0.5, 0.6, 0.55, 0.65]), np.array(list("aabbcc"))
    interval = stats.ttest_1samp([0.5, 0.55, 0.6], 0).confidence_interval()
    assert predictions.clustered_interval(shares, clusters) == pytest.approx(tuple(interval))


@pytest.mark.parametrize(
    ("log_worth", "censored", "covered"),
    [(0.9, 1, True), (1.1, 1, False), (1.1, 0, False), (-0.9, -1, True), (-1.1, -1, False)],
)
def test_a_censored_worth_is_covered_by_what_lies_beyond_it(log_worth, censored, covered):
    assert prediction("a", 0.5, log_worth, censored).covered == covered


def test_no_sign_is_called_of_a_difference_that_is_probably_none():
    worths = table(small=0.045 + WOBBLE / 20, other=WOBBLE, minus=-0.045 - WOBBLE / 20)
    found, minus = (by_part(worths)[part] for part in ("small", "minus"))
    assert found.p_helps > effects.SURE and effects.SMALL < found.p_within < effects.SURE
    assert found.word == minus.word == "not known" and minus.p_helps < 1 - effects.SURE
    assert by_part(worths, within=0.001)["small"].word == "helps"
    assert by_part(worths, within=np.nan)["small"].word == "helps"


@pytest.mark.parametrize("world", simulate_settings.WORLDS[2:5:2], ids=lambda world: world.name)
def test_the_predictions_hold_in_a_few_simulated_studies(world):
    """Eight predictions of a study stand and fall together."""
    found = simulate_settings.scores(world, settings=4, runs=1, studies=6)
    assert found["coverage"] >= 0.8
    assert found["brier"] < found["brier_constant"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [4, 8, 16])
@pytest.mark.parametrize("world", simulate_settings.WORLDS[:-1], ids=lambda world: world.name)
def test_coverage_and_wrong_signs_in_simulated_studies(world, settings):
    """At least 90 % and at most 10 %, with two standard errors of room."""
    for runs in (1, 3):
        found = simulate_settings.scores(world, settings, runs, 60 * 8 // world.parts)
        assert found["coverage_high"] >= 0.9
        assert found["wrong"] <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / found["called"])


def test_the_stored_simulation_keeps_its_promise():
    """Coverage with one standard error of room. Where no part does anything, few are called."""
    _, first, second, *_ = re.split(r"\n## ", simulate_settings.PAGE.read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (\w[^|]*) \| \d+ \| \d \|(.*)\|$", first + second, re.MULTILINE)
    assert len(rows) == 60
    for world, cells in rows:
        coverage, wrong, called, _ = cells.split("|")
        assert float(coverage) >= 89
        if world == simulate_settings.WORLDS[-1].name:
            assert float(called) <= 2
        else:
            assert float(wrong) <= 10
