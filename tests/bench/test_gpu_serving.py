"""The GPU benches on the server's engine: what they ask of it, and how they judge it."""

import json
import random
from statistics import median
from types import SimpleNamespace

import pytest

from bench.gpu import engines, figures
from bench.gpu.engines import Bench
from bench.gpu.kit import Result
from serve.server import device as devices
from serve.server import gpus as probe
from tests.gpu import serving

GIB = 1 << 30


@pytest.fixture
def result(tmp_path):
    return Result("made up", True, tmp_path / "result.json")


def written(tmp_path):
    return json.loads((tmp_path / "result.json").read_text())


@pytest.fixture
def asked(monkeypatch):
    """How often a process was started to look for the GPU there is."""
    times = []

    def ask():
        times.append(1)
        return "found " + json.dumps([[0, "Made up", "", 138 * GIB, 139 * GIB, "", ""]])

    monkeypatch.setattr(probe, "_ask", ask)
    monkeypatch.setattr(probe, "_cuda_of_torch", lambda: "13.0")
    engines._gpus.cache_clear()
    yield times
    engines._gpus.cache_clear()


class Engine:
    """Started and stopped at once."""

    def __init__(self, config, device, sink, cache) -> None:
        self.device = device

    def start(self):
        pass

    open = wait_loaded = stop = start


def test_the_gpu_is_looked_for_once_however_many_engines_start(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "Engine", Engine)
    monkeypatch.setattr(engines, "CalibrationCache", lambda *_, **__: None)
    bench = Bench(tmp_path, dry=False, quick=True)
    for lanes in (1, 4, 16):
        with bench.engine("slack", "rolling", lanes) as (engine, _):
            assert engine.device.places[0].name == "cuda:0"
            assert len(engine.device.lane_cores) == lanes
    assert len(asked) == 1


def test_a_budget_leaves_what_was_wanted_for_tasks(asked, tmp_path):
    bench = Bench(tmp_path, dry=False, quick=True)
    wanted = 700 << 20
    text = bench.budget_for(wanted, 16)
    made = devices.find_device(
        devices.DeviceConfig(kind="cuda", lanes=16, memory_budget=text), spare_lanes=False
    )
    assert wanted <= made.budget_bytes < wanted + (1 << 20)


def filled(budget, reserves, lanes):
    """How full the budget is when first comes first, at every end of a task."""
    rng, running, shares = random.Random(0), [], []
    for reserve in reserves:
        while len(running) == lanes or sum(running) + reserve > budget:
            shares.append(sum(running) / budget)
            running.pop(rng.randrange(len(running)))
        running.append(reserve)
    return median(shares)


def test_a_tight_budget_can_be_filled():
    """By the sizes of the bench's own graphs; with 3.9 GiB, as it was, it could not."""
    rng = random.Random(1)
    reserves = [int(6000 * 500 * 32 ** rng.random()) for _ in range(1000)]
    budget = serving.tight(reserves, 16)
    assert max(reserves) <= budget
    assert filled(budget, reserves, 16) >= 0.8
    assert filled(3948 << 20, reserves, 16) < 0.3


def test_a_budget_must_hold_the_largest_task():
    assert serving.tight([1, 1, 1000], 2) == 1000


@pytest.mark.parametrize(
    ("shares", "waiting", "reached"),
    [
        ([0.1, 0.9, 0.9, 1.0], [0.9, 0.9, 1.0], True),
        ([0.1, 0.9, 0.9, 0.9], [0.1, 0.7, 0.9], False),
        ([1.1, 0.9, 0.9, 0.9], [0.9, 0.9, 1.1], False),
    ],
)
def test_a_budget_is_to_be_full_while_something_waits(result, tmp_path, shares, waiting, reached):
    serving.fullness(result, shares, waiting)
    (aim,) = written(tmp_path)["aims"]
    assert (aim["aim"], aim["reached"]) == (6, reached)


def test_a_budget_nothing_waited_for_shows_nothing(result, tmp_path):
    serving.fullness(result, [0.1, 0.2], [])
    assert "aims" not in written(tmp_path)


def system(**other):
    made = {
        "violation_rate": 0.0, "latency_over_target": {"p99": 1.0}, "jct_ms": 10.0,
        "scheduler_us_a_request": 90.0, "scheduler_per_mille_of_run_time": 45.0,
    }  # fmt: skip
    return made | other


def test_what_is_hoped_for_of_the_figures(result, tmp_path):
    found = {
        "slack, preemptive at 0.9": system(),
        "mps_base (4 streams) at 0.9": system(latency_over_target={"p99": 3.0}),
        "default at 0.9": system(jct_ms=30.0),
    }
    figures.aims(result, found, 0.9)
    reached = {row["aim"]: row["reached"] for row in written(tmp_path)["aims"]}
    assert reached == {7: True, 8: True, 9: False, 10: True}


def test_the_schedulers_time_is_told_by_request():
    record = SimpleNamespace(
        status="OK", latency_ns=2_000_000, qos_target_ns=4_000_000, run_ns=1_000_000, quet_ns=1,
        pmc_estimate_bytes=1, pmc_measured_bytes=None,
    )  # fmt: skip
    told = figures.summary([record] * 4, {}, 200e-6)
    assert told["scheduler_us_a_request"] == pytest.approx(50)
    assert told["scheduler_per_mille_of_run_time"] == pytest.approx(50)
