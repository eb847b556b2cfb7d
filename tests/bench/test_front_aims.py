"""What was asked of the native front stands beside what was measured."""

import pytest

from bench.pages import front

RATES = {
    "commit": "0123456789ab",
    "closed": [
        {"version": version, "in_flight": count, "rate_hz": [rate, rate - 1, rate + 1],
         "server_us": 100.0}
        for version, rates in (("other", (200, 300)), ("this", (900, 1500)))
        for count, rate in zip((1, 4), rates, strict=True)
    ],
    "limits": [{"version": "other", "rate_at_limit_hz": None},
               {"version": "this", "rate_at_limit_hz": 700.0}],
}  # fmt: skip
PEERS = {
    "rows": [
        {"system": system, "rho": 0.5, "late": late, "requests": 100}
        for system, each in (("gnnserve", (3, 5)), ("mosec", (30, 50)), ("slow", (90, 90)),
                             ("a front that runs nothing", (0, 0)))
        for late in each
    ]
}  # fmt: skip
LIVE = {
    "means": [{"system": front.OURS, "rho": 0.5, "late_server": 0.01, "missed": 0.06}],
    "floor": [{"rho": 0.5, "missed": 0.02}],
    "simulated": [{"rho": 0.1, "late_server": 0.02, "as_live": 0.01},
                  {"rho": 0.5, "late_server": 0.01, "as_live": 0.05}],
}  # fmt: skip


@pytest.fixture
def results(monkeypatch):
    found = {"rates": RATES, "peers": PEERS, "live": LIVE}

    def read(name):
        try:
            return found[name]
        except KeyError:
            raise FileNotFoundError(2, "no such file", f"{name}.json") from None

    monkeypatch.setattr(front, "read_result", read)
    return found


def line(measure):
    (found,) = (row.split(" | ") for row in front.aims().splitlines() if f"| {measure} " in row)
    return [*found[2:4], found[5].removesuffix(" |")]


def test_an_aim_is_met_or_not_by_all_its_values(results):
    assert line("small requests a second ÷ those of the version before the native front") == [
        "5.0", "yes", "0123456"
    ]  # fmt: skip
    assert line("late by the server, ρ 0.5") == ["1.0 %", "yes", "older"]
    assert line("late at the client, ρ 0.5")[:2] == ["6.0 %", "no"]
    assert line("the same ÷ that of the front alone")[:2] == ["3.0", "no"]
    assert line("simulated beside live, points apart at each load")[:2] == ["1.0 %, 4.0 %", "no"]


def test_the_best_other_server_is_one_that_runs_models(results):
    assert line("late beside other servers, ρ 0.5")[:2] == ["4.0 %", "yes"]
    assert line("the same ÷ that of the best other server")[:2] == ["0.10", "yes"]


def test_what_no_result_has_is_not_measured(results):
    del results["live"]["floor"]
    assert line("the same ÷ that of the front alone") == ["not measured yet", "–", "–"]
    assert line("way to a lane and back, 99th percentiles, ρ 0.5")[0] == "not measured yet"


def test_small_requests_that_no_rate_serves_in_time_are_a_dash(results):
    before, now = front.small_requests().splitlines()[2:]
    assert before.endswith("| – |")
    assert now.endswith("| 1,500 (1,499 to 1,501), 100 µs | 700 |")
