"""What bench/host/host_cost.py makes of its rows."""

import pytest

from bench.host.host_cost import summary
from bench.live.live import STAGES


def row(way: str, server_us: float, late: float | None) -> dict[str, object]:
    found = {"way": way, "server_us": server_us, "client_us": 1.0, "handovers": server_us / 100}
    found |= {"client_p50_ms": 2.0, "errors": 0}
    if late is not None:
        found |= {"late": late, "stages_ms": dict.fromkeys(STAGES, 0.5)}
    return found


def test_ratios_are_by_round_and_everything_else_is_a_median():
    rows = [
        row("echo", 300, None), row("other", 1000, 0.2), row("ours", 500, 0.1),
        row("ours", 900, 0.1), row("other", 1000, 0.1), row("echo", 400, None),
        row("other", 2000, 0.3), row("ours", 1200, 0.0), row("echo", 500, None),
    ]  # fmt: skip
    found = summary(rows)
    assert found["echo"]["server_us"] == 400
    assert "late" not in found["echo"]
    assert found["ours"]["stages_ms"] == dict.fromkeys(STAGES, 0.5)
    assert found["ours"]["server_us_ratio"] == pytest.approx([0.6, 0.5, 0.9])
    assert found["ours"]["late_apart"] == pytest.approx([-0.1, -0.3, 0.0])
