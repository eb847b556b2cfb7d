"""Reports of some requests, and of many."""

import math
import resource
import time

import msgspec
import numpy as np
import pytest

from serve.errors import ConfigError
from serve.obs.report import load_report
from serve.obs.selection import Selection, last, selection_of
from serve.obs.sketch import EXACT, Sketch
from serve.obs.store import RecordStore
from serve.obs.sweeps import END_NS, ConcurrentPeak
from serve.quantiles import quantiles
from tests.obs.builders import MS, RUN, START_UNIX_NS, late, record, summary_of, traffic

ROWS = [
    record("a", tenant="t", client_id="c", version="2"),
    late("b", model="gat", cause="queue"),
    late("c", cause="overload", arrived_unix_ns=START_UNIX_NS + 10**9),
]


@pytest.mark.parametrize(
    ("filters", "uids"),
    [
        ({}, "abc"),
        ({"model": "gat"}, "b"),
        ({"version": "2"}, "a"),
        ({"tenant": "t"}, "a"),
        ({"client": "c"}, "a"),
        ({"cause": "overload"}, "c"),
        ({"cause": "overload", "model": "gat"}, ""),
        ({"model": "' OR 1 = 1 --"}, ""),
        ({"from": "2026-09-21T14:13:21"}, "c"),
        ({"from": "2026-09-21T16:13:21+02:00"}, "c"),
        ({"until": "2026-09-21T14:13:21Z"}, "ab"),
        # Beyond what the database's integers hold.
        ({"until": "9999-12-31"}, "abc"),
        ({"from": "9999-12-31"}, ""),
        ({"since": f"{10**20}d"}, "abc"),
    ],
)
def test_a_filter_leaves_what_it_names(filters, uids):
    summary = summary_of(ROWS, selection_of(filters))
    assert summary.all.requests == len(uids)
    assert set(summary.shown["request_uid"]) <= set(uids)


@pytest.mark.parametrize("seconds", [0, 1e10, 1e300, math.inf])
def test_a_time_before_all_rows_selects_everything(seconds):
    assert last(seconds) == Selection()


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"modle": "gcn"}, "unknown filter 'modle'"),
        ({"from": "yesterday"}, "from='yesterday' is no time"),
        ({"since": "1h", "from": "2026-01-01"}, "exclude each other"),
        ({"since": "soon"}, "'soon' is not a duration"),
    ],
)
def test_a_wrong_filter_is_named(filters, said):
    with pytest.raises(ConfigError, match=said):
        selection_of(filters)


@pytest.mark.parametrize("seed", range(5))
def test_a_sketch_is_exact_for_few_values_and_near_for_many(seed):
    values = np.random.default_rng(seed).lognormal(0.0, 3.0, EXACT + 5)
    shares = (0.0, 0.5, 0.9, 0.99, 1.0)
    few, many = Sketch(), Sketch()
    for part in np.array_split(values[:EXACT], 7):
        few.add(part)
    for part in np.array_split(values, 7):
        many.add(part)
    assert few.quantiles(shares) == quantiles(values[:EXACT].tolist(), shares)
    assert many.quantiles(shares) == pytest.approx(quantiles(values.tolist(), shares), rel=0.01)
    assert many.mean == pytest.approx(values.mean())


@pytest.mark.parametrize("counts", [(0, 9, 100), (EXACT, 1, 0), (EXACT // 2, EXACT, 2 * EXACT)])
def test_sketches_merged_are_the_sketch_of_all(counts):
    rng = np.random.default_rng(1)
    parts = [rng.lognormal(0.0, 3.0, count) for count in counts]
    whole, merged = Sketch(), Sketch()
    for part in parts:
        one = Sketch()
        one.add(part)
        whole.add(part)
        merged.merge(one)
    shares = (0.0, 0.5, 0.9, 0.99, 1.0)
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean)
    assert merged.quantiles(shares) == whole.quantiles(shares)


@pytest.mark.parametrize("seed", range(20))
def test_a_peak_in_parts_is_the_peak_of_all(seed):
    rng = np.random.default_rng(seed)
    arrived = np.sort(rng.integers(0, 50 * MS, 300))
    start = arrived + rng.integers(0, 5 * MS, 300)
    end, weight = start + rng.integers(0, 9 * MS, 300), rng.integers(1, 99, 300)
    held = np.maximum(end - 50_000, start)
    expected = max(
        int(weight[(start <= moment) & (held > moment)].sum()) for moment in start.tolist()
    )
    peak = ConcurrentPeak(2)
    for part in np.array_split(np.arange(300), 9):
        weights = weight[part], 2 * weight[part]
        peak.add(start[part], end[part], weights, int(arrived[part[-1]]))
    nothing = np.zeros(0, np.int64)
    peak.add(nothing, nothing, (nothing, nothing), END_NS)
    assert peak.highest == [expected, 2 * expected]


def store_many(path, count):
    rows = traffic(2_000)
    store = RecordStore(path, RUN)
    span = rows[-1].arrived_unix_ns - rows[0].arrived_unix_ns + 200 * MS
    for turn in range(count // len(rows)):
        for row in rows:
            moved = row.arrived_unix_ns + turn * span
            store.insert(msgspec.structs.replace(row, arrived_unix_ns=moved))
    store.close()


def cost(path):
    began_s = time.process_time()
    report = load_report(path, Selection())
    return time.process_time() - began_s, report


def test_a_large_report_costs_time_in_proportion_and_little_memory(tmp_path):
    store_many(tmp_path / "small.db", 20_000)
    store_many(tmp_path / "large.db", 200_000)
    small_s, small = min((cost(tmp_path / "small.db") for _ in range(3)), key=lambda c: c[0])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large_s, large = cost(tmp_path / "large.db")
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    assert large_s < 30 * small_s
    assert grown_mib < 60
    assert large.requests == 10 * small.requests
    assert large.rejected == {reason: 10 * count for reason, count in small.rejected.items()}
    assert large.violation_rate == pytest.approx(small.violation_rate)
    assert large.overhead == pytest.approx(small.overhead)
    assert large.memory.peak_bytes == small.memory.peak_bytes
    assert math.isclose(large.latency_ms.p99, small.latency_ms.p99, rel_tol=0.01)
    assert math.isclose(large.latency_over_qt.p50, small.latency_over_qt.p50, rel_tol=0.01)
