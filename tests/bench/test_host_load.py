"""The summary of bench/host/load.py."""

import pytest

from bench.host.load import summary


def rows(*server_us):
    return [{"server_us": us, "handovers": us / 100, "client_p50_ms": 2.0} for us in server_us]


def test_ratios_are_by_round_and_everything_else_is_a_median():
    found = {
        row["way"]: row
        for row in summary(
            {
                "ours": rows(500, 900, 1200),
                "other": rows(1000, 1000, 2000),
                "echo": rows(300, 400, 500),
            }
        )
    }
    assert found["echo"]["server_us"] == 400
    assert found["ours"]["server_us_ratio"] == [0.6, 0.5, 0.9]
    assert "server_us_ratio" not in found["other"]


def test_without_another_checkout_there_is_no_ratio():
    (row,) = summary({"ours": rows(500)})
    assert row["server_us"] == pytest.approx(500)
    assert "server_us_ratio" not in row
