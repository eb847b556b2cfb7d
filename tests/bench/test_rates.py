"""How ``bench.live.rates`` finds the highest rate in time."""

import os
from argparse import Namespace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.open_loop import LoadRun
from bench.kit.solo import Solo
from bench.live.rates import FEWEST, Search, at_load, traces_of
from loadgen.measure import Sample
from serve.workload import Trace

MS = 1_000_000


@given(edge=st.floats(1.001, 255.9))
def test_the_highest_value_that_passes_within_a_step(edge):
    search = Search(1.0, 256.0)
    for _ in range(6):
        search.learn(search.next <= edge)
    assert search.low <= edge < search.high
    assert search.high / search.low == pytest.approx(256 ** (1 / 2**6))
    assert search.found == (search.low if search.low > 1 else None)


def test_nothing_is_found_where_nothing_passes():
    search = Search(1.0, 256.0)
    for _ in range(6):
        search.learn(False)
    assert search.found is None


class Client:
    """Stands for client and server: of ten answers one is late, one is late at the client, one
    an error."""

    def run(self, path, address, pid):
        trace = Trace.load(path)
        seen = [
            Sample(model="gcn", due_ns=0, lag_ns=0, latency_ns=(5 if index % 10 == 1 else 1) * MS,
                   status="INTERNAL" if index % 10 == 2 else "OK", target_us=item.qos_target_us,
                   late_by_server=index % 10 == 0)
            for index, item in enumerate(trace.items)
        ]  # fmt: skip
        return LoadRun(tuple(seen), 1.0, 0.1), {"cores_server": 0.25}


def test_a_load_tells_who_was_late_by_which_clock(tmp_path):
    traces = traces_of(Namespace(workload="small", nodes=100, requests=4_000), tmp_path)
    traces.solo = {task: Solo(MS, MS, MS, 0, 0) for task in traces.tasks(0)}
    server = SimpleNamespace(target="", pid=1)
    row = at_load(Client(), "this", {"this": server}, traces, 0.001)
    assert row["rate_hz"] == pytest.approx(len(os.sched_getaffinity(0)))
    assert row["requests"] == FEWEST
    assert row["late_server"] == pytest.approx(0.2)
    assert row["missed"] == pytest.approx(0.2)
    assert row["over_qt"]["p99"] == pytest.approx(2.5)
    # At more arrivals a second the trace is as long as it may be, not longer.
    more = at_load(Client(), "this", {"this": server}, traces, 0.05)
    assert more["requests"] == pytest.approx(20 * row["rate_hz"] * 50, abs=1)
