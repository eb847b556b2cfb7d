import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.estimate.correction import Drift, Quantile, SizeBias


def noisy(rng, factor=1.0):
    return factor * math.exp(0.1 * rng.standard_normal())


def test_drift_starts_at_the_calibration_and_one_outlier_does_nothing():
    drift = Drift()
    assert drift.factor == 1.0
    drift.observe(50.0, 1.0)
    assert drift.factor == 1.0
    rng = np.random.default_rng(0)
    for _ in range(50):
        drift.observe(noisy(rng), 1.0)
    before = drift.factor
    drift.observe(1000.0, 1.0)
    assert drift.factor == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("change", [0.5, 2.0, 5.0])
def test_drift_follows_a_change_for_good_within_20_runs(change):
    rng = np.random.default_rng(1)
    drift = Drift()
    for _ in range(100):
        drift.observe(noisy(rng), 1.0)
    assert drift.factor == pytest.approx(1.0, rel=0.15)
    for _ in range(20):
        drift.observe(noisy(rng, change), 1.0)
    assert drift.factor == pytest.approx(change, rel=0.15)


def test_drift_survives_a_fifth_of_absurd_ratios():
    rng = np.random.default_rng(2)
    drift = Drift()
    for i in range(200):
        drift.observe(40.0 if i % 5 == 0 else noisy(rng), 1.0)
    assert drift.factor == pytest.approx(1.0, rel=0.25)


def test_size_bias_learns_by_size():
    bias = SizeBias()
    for _ in range(200):
        bias.observe(1.3 * 2e5, 2e5)
        bias.observe(0.9 * 1e8, 1e8)
    assert bias.factor(2e5) == pytest.approx(1.3, rel=0.02)
    assert bias.factor(1e8) == pytest.approx(0.9, rel=0.02)
    assert 0.9 < bias.factor(4e6) < 1.3


@given(st.lists(st.tuples(st.floats(3, 12), st.floats(-3, 3)), max_size=300))
def test_size_bias_never_turns_an_order_round(observed):
    bias = SizeBias()
    for place, log_ratio in observed:
        bias.observe(10**place * math.exp(log_ratio), 10**place)
    corrected = [x * bias.factor(x) for x in np.geomspace(1e3, 1e12, 400)]
    assert (np.diff(corrected) > 0).all()


def test_quantile_settles_where_a_twentieth_is_above():
    rng = np.random.default_rng(3)
    quantile = Quantile(3.0)
    ratios = np.exp(0.3 * rng.standard_normal(20_000))
    for ratio in ratios:
        quantile.observe(ratio)
    assert quantile.value == pytest.approx(np.quantile(ratios, 0.95), rel=0.15)


def test_quantile_is_at_least_one():
    quantile = Quantile(1.0)
    for _ in range(100):
        quantile.observe(0.5)
    assert quantile.value == 1.0
