"""The errors and the power that bench/results/simulation.md promises, with fewer sweeps."""

import numpy as np
import pytest

from bench.ablation.contrasts import contrast, holm
from helpers import simulate
from helpers.simulate import Design, average

SWEEPS = 4000
ROOM = 2 * np.sqrt(0.06 * 0.94 / SWEEPS)  # two standard errors of the simulation
CASES = [(noise, design) for noise in simulate.NOISES for design in [simulate.FIVE]]
DESIGNS = [d for d in (*simulate.SIZES, *simulate.SHELVES) if not d.refused]
CASES += [(noise, design) for noise in simulate.OUTCOMES for design in DESIGNS]
# Every third case is quick: each noise and each design is in some of them.
CASES = [
    pytest.param(*case, marks=pytest.mark.slow if number % 3 else ())
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize(("noise", "design"), CASES, ids=lambda each: each.name)
def test_the_family_error_is_at_most_6_percent(noise, design):
    assert average(simulate.family_error, noise, design, sweeps=SWEEPS) <= 0.06 + ROOM


def test_without_the_rules_the_simulation_sees_false_claims():
    x, control = simulate.draw(Design("", 20), 3000)
    base = np.concatenate(control)
    tests = [contrast([x[:n], base[:n]]).p() for n in (5, 7, 10, 14, 20)]
    assert (tests[0] <= 0.05).any(1).mean() > 0.15  # no correction for the family
    assert (holm(np.min(tests, 0)) <= 0.05).any(1).mean() > 0.1  # read whenever it looks good
    for noise, design, error in (
        (simulate.OUTCOMES[4], simulate.SIZES[0], 0.12),  # half the runs stuck, and four seeds
        (simulate.EQUAL, simulate.SHELVES[0], 0.15),  # four seeds of 25 arms: refused
        (simulate.OUTCOMES[6], simulate.SHELVES[2], 0.25),  # a plateau below the trigrams
    ):
        assert simulate.family_error(2000, noise, design, simulate.by_welch) > error


def test_a_tie_can_be_reached_and_is_not_given_away():
    for noise in (simulate.EQUAL, simulate.TWICE):
        ties, wrong = average(simulate.tie_rates, Design("", 8), 1.4, noise, sweeps=SWEEPS)
        assert wrong <= 0.05 + ROOM and (ties > 0.4) == (noise is simulate.EQUAL)


def test_an_arm_with_runs_that_are_stuck_is_not_better():
    """To drop those runs calls the arm better in most sweeps."""
    better, fails, dropped = simulate.stuck_rates(1000, 8, 0.4, 2)
    assert better < 0.03 and dropped > 0.7
    better, fails, _ = simulate.stuck_rates(1000, 8, 0.8, 0)
    assert better == 0 and fails > 0.9


def test_a_screening_errs_as_often_as_it_says():
    design, test = simulate.SCREENINGS[1], simulate.by_screening
    for noise, error in zip(simulate.NOISES[:2], (0.05, 0.09), strict=True):
        assert average(simulate.family_error, noise, design, test, sweeps=SWEEPS) <= error + ROOM
    assert average(simulate.power, design, 3, test=test, sweeps=SWEEPS) > 0.8


@pytest.mark.slow
def test_the_page_is_what_the_command_writes():
    text = simulate.PAGE.read_text(encoding="utf-8")
    assert simulate.page(text, simulate.tables(simulate.SWEEPS)) == text
