"""What runs do to one another, learned from runs beside others."""

import math
import random

import pytest

from serve.estimate.slowdown import SlowdownEstimator

TRUE = (1.0, 1.6, 2.2, 2.9)


def test_it_is_learned_by_the_number_of_others():
    slowdown = SlowdownEstimator()
    assert (slowdown.factor(0), slowdown.factor(3), slowdown.table) == (1, 1, (1.0,))
    rng = random.Random(1)
    for _ in range(300):
        others = rng.randrange(4)
        slowdown.observe(others, TRUE[others] * rng.lognormvariate(0, 0.05))
    assert slowdown.table == pytest.approx(TRUE, rel=0.05)
    assert slowdown.table[0] == 1
    # Beside more than were ever seen it is no less.
    assert slowdown.factor(9) == pytest.approx(2.9, rel=0.05)


def test_runs_beside_some_for_part_of_the_time_tell_of_both_numbers():
    slowdown = SlowdownEstimator()
    rng = random.Random(2)
    for _ in range(400):
        beside = rng.uniform(0, 3)
        below = int(beside)
        true = TRUE[below] + (beside - below) * (TRUE[min(3, below + 1)] - TRUE[below])
        slowdown.observe(beside, true)
    assert slowdown.table == pytest.approx(TRUE, rel=0.06)
    assert slowdown.factor(1.5) == pytest.approx(1.9, rel=0.06)


def test_the_first_runs_are_believed_at_once_and_a_change_is_followed():
    slowdown = SlowdownEstimator()
    slowdown.observe(1, 1.5)
    assert slowdown.table == (1.0, 1.5)
    for _ in range(60):
        slowdown.observe(1, 1.1)
    assert slowdown.table == (1.0, pytest.approx(1.1, rel=0.05))


def test_what_others_cannot_have_done_counts_for_little():
    slowdown = SlowdownEstimator()
    for _ in range(1000):
        slowdown.observe(1, 1e6)
    assert slowdown.factor(1) <= 4.0
    for _ in range(1000):
        slowdown.observe(1, 0.1)
    assert slowdown.factor(1) == pytest.approx(1.0)


def test_the_table_never_falls():
    slowdown = SlowdownEstimator()
    for beside, ratio in ((2, 1.8), (1, 1.2), (3, 1.5)):
        slowdown.observe(beside, ratio)
    assert slowdown.table == (1.0, 1.2, 1.8, 1.8)
    assert math.isclose(slowdown.factor(3), 1.5)
