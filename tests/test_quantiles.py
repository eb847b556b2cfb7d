"""One definition of a quantile: NumPy's default, by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.quantiles import quantile, quantiles


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
)
def test_quantiles_are_those_of_numpy(values, shares):
    assert quantiles(values, shares) == pytest.approx(tuple(np.quantile(values, shares)), abs=1e-3)


def test_between_two_values_the_quantile_is_interpolated():
    assert quantile([1.0, 3.0], 0.25) == 1.5
    assert quantiles([3, 1, 2], (0.0, 0.5, 1.0)) == (1.0, 2.0, 3.0)


def test_of_nothing_it_is_zero():
    assert quantile([], 0.99) == 0.0


@pytest.mark.parametrize("share", [-0.1, 1.1, 50])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile([1.0], share)
