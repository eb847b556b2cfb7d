"""How ``bench.live.rates`` finds the highest rate in time."""

from types import SimpleNamespace

import pytest

from bench.kit.open_loop import LoadRun
from bench.live.rates import LOWEST, Search, tasks_of
from loadgen.measure import Sample
from serve.workload import Trace

TASKS = tasks_of(100)


class Limited:
    """Stands for client and server: a tenth of the answers is late above a rate."""

    def __init__(self, edge_hz):
        self.edge_hz, self.rates_hz = edge_hz, []

    def run(self, path, address, pid):
        trace = Trace.load(path)
        assert {item.qos_target_us for item in trace.items} == {77}
        self.rates_hz.append(trace.header.rate_hz)
        late = trace.header.rate_hz > self.edge_hz
        seen = [
            Sample(model="gcn", due_ns=0, lag_ns=0, latency_ns=1, status="OK",
                   late_by_server=late and index % 10 == 0)
            for index in range(len(trace.items))
        ]  # fmt: skip
        return LoadRun(tuple(seen), 1.0, 0.1), {}


def search(edge_hz, folder, high_hz=640.0, steps=6):
    client = Limited(edge_hz)
    server = SimpleNamespace(grpc_port=1, target="", pid=1)
    found = Search(client, server, folder, high_hz)
    for _ in range(steps):
        found.step(TASKS, 77, 300)
    return found


def test_the_highest_rate_in_time_is_found(tmp_path):
    found = search(123.0, tmp_path)
    assert found.found_hz <= 123.0 < found.high_hz
    assert found.high_hz / found.low_hz == pytest.approx((1 / LOWEST) ** (1 / 2**6))


def test_no_rate_passes_where_all_are_late(tmp_path):
    assert search(0.0, tmp_path).found_hz is None
