"""How ``bench.live.versions`` finds the highest rate that passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.live.versions import bisect, pooled


@given(edge=st.floats(1.0, 255.9))
def test_the_highest_value_that_passes_within_a_step(edge):
    tried = []

    def passes(value):
        tried.append(value)
        return value <= edge

    found = bisect(passes, 1.0, 256.0, steps=6)

    assert found is not None
    assert found <= edge < found * 256 ** (1 / 2**6) * (1 + 1e-9)
    assert len(tried) == 6 + (found == 1.0)


def test_nothing_passes_where_the_lowest_does_not():
    assert bisect(lambda value: False, 1.0, 256.0, steps=6) is None


def test_traces_of_one_load_count_by_their_requests():
    def row(requests, late, p99):
        cores = {f"cores_{who}": 0.1 for who in ("lanes", "server", "client", "others")}
        return {"rho": 0.5, "requests": requests, "late_server": late, "missed": 2 * late,
                "rate_hz": 10.0, "over_qt": {"p99": p99}, "stages_ms": {"run": 1.0},
                "excess_of_late": {"run": 0.0}, "slower": 1.0, **cores}  # fmt: skip

    found = pooled([row(100, 0.04, 1.0), row(300, 0.0, 2.0)])

    assert found["requests"] == 400
    assert found["late_server"] == pytest.approx(0.01)
    assert found["missed"] == pytest.approx(0.02)
    assert found["over_qt"]["p99"] == pytest.approx(1.5)
