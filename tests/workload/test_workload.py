import random
import statistics
from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, poisson

from serve.errors import ConfigError
from serve.workload import (
    MODELS,
    WORKLOADS,
    GraphRef,
    PoolSpec,
    Trace,
    TraceHeader,
    build_trace,
    bursty_arrivals,
    poisson_arrivals,
    rate_for_rho,
    slot_arrivals,
    workload_tasks,
)

POOL = [
    GraphRef(dataset, index, 100 + index, 400)
    for dataset in ("pubmed", "artist", "amazon", "reddit")
    for index in range(25)
]


def make_trace(workload="mix", seed=1, rate_hz=50.0, arrivals="poisson", **end):
    header = TraceHeader(workload=workload, seed=seed, rate_hz=rate_hz, arrivals=arrivals)
    return build_trace(header, workload_tasks(workload, POOL, seed), **(end or {"count": 300}))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_lists_hold_100_tasks(workload):
    tasks = workload_tasks(workload, POOL, 0)
    assert len(tasks) == 100
    assert len(set(tasks)) == 100
    models = Counter(task.model for task in tasks)
    if workload == "mix":
        assert set(models) == set(MODELS)
        assert all(12 <= count <= 38 for count in models.values())
    else:
        assert models == {workload: 100}
        assert {task.graph for task in tasks} == set(POOL)


def test_lists_do_not_depend_on_the_order_of_the_pool():
    assert workload_tasks("mix", POOL, 3) == workload_tasks("mix", POOL[::-1], 3)
    assert workload_tasks("mix", POOL, 3) != workload_tasks("mix", POOL, 4)


def test_unknown_workload_lists_the_choices():
    with pytest.raises(ConfigError, match="'gnn' is not one of gcn, sage, gin, gat, mix"):
        workload_tasks("gnn", POOL, 0)
    with pytest.raises(ConfigError, match="at least one graph"):
        workload_tasks("gcn", [], 0)


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "slots"])
def test_same_seed_same_bytes(arrivals):
    assert make_trace(arrivals=arrivals).encode() == make_trace(arrivals=arrivals).encode()
    assert make_trace(arrivals=arrivals).encode() != make_trace(arrivals=arrivals, seed=2).encode()


def test_the_rate_changes_times_only():
    slow, fast = make_trace(rate_hz=10.0), make_trace(rate_hz=40.0)
    assert [i.graph for i in slow.items] == [i.graph for i in fast.items]
    assert [i.seed for i in slow.items] == [i.seed for i in fast.items]
    for a, b in zip(slow.items, fast.items, strict=True):
        assert a.offset_ns == pytest.approx(4 * b.offset_ns, abs=4)


def test_every_task_comes_once_per_round():
    items = make_trace("gcn", count=250).items
    rounds = [[i.graph for i in items[k : k + 100]] for k in (0, 100)]
    assert set(rounds[0]) == set(rounds[1]) == set(POOL)
    assert rounds[0] != rounds[1]
    assert {i.graph for i in items[200:]} <= set(POOL)


def test_poisson_gaps_are_exponential_at_the_rate():
    offsets = list(poisson_arrivals(200.0, random.Random(5), count=20_000))
    gaps = [(b - a) / 1e9 for a, b in pairwise(offsets)]
    # Standard error of the mean gap is 0.7 %, of the variance ratio about 2 %.
    assert statistics.fmean(gaps) == pytest.approx(1 / 200, rel=0.03)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(1, rel=0.05)
    over = sum(gap > 1 / 200 for gap in gaps) / len(gaps)
    assert over == pytest.approx(0.3679, abs=0.015)


def test_bursty_has_the_same_mean_rate_and_more_variance():
    rng = random.Random(5)
    offsets = list(bursty_arrivals(100.0, rng, duration_s=2_000, on_s=0.2, off_s=0.6))
    assert len(offsets) / 2_000 == pytest.approx(100, rel=0.1)
    counts = Counter(offset // 1_000_000_000 for offset in offsets)
    per_s = [counts.get(second, 0) for second in range(2_000)]
    # A Poisson process has a ratio of 1.
    assert statistics.pvariance(per_s) / statistics.fmean(per_s) > 5


@pytest.mark.parametrize("mean_batch", [1.0, 2.0])
def test_a_slot_has_a_poisson_number_of_arrivals_at_its_beginning(mean_batch):
    slot_ns, slots = 20_000_000, 5_000
    offsets = list(
        slot_arrivals(
            mean_batch / 0.02, random.Random(7), duration_s=slots * 0.02, mean_batch=mean_batch
        )
    )
    assert all(offset % slot_ns == 0 for offset in offsets)
    sizes = Counter(Counter(offset // slot_ns for offset in offsets).values())
    sizes[0] = slots - sum(sizes.values())
    most = 6
    found = [*(sizes[size] for size in range(most)), sum(n for k, n in sizes.items() if k >= most)]
    shares = [poisson.pmf(size, mean_batch) for size in range(most)]
    expected = [slots * share for share in (*shares, 1 - sum(shares))]
    assert chisquare(found, expected).pvalue > 0.01


def test_slots_are_in_traces():
    header = TraceHeader(workload="mix", seed=1, rate_hz=100.0, arrivals="slots", mean_batch=2.0)
    trace = build_trace(header, workload_tasks("mix", POOL, 1), count=50)
    assert {item.offset_ns % 20_000_000 for item in trace.items} == {0}
    assert Trace.decode(trace.encode()) == trace


@given(count=st.integers(0, 50), seed=st.integers())
def test_count_ends_arrivals(count, seed):
    assert len(list(poisson_arrivals(1e3, random.Random(seed), count=count))) == count


def test_duration_ends_arrivals():
    offsets = make_trace(duration_s=5.0).items
    assert 150 < len(offsets) < 350
    assert offsets[-1].offset_ns < 5e9


def test_round_trip(tmp_path):
    trace = make_trace().with_targets(lambda item: item.num_nodes * 10)
    assert trace.items[0].qos_target_us == trace.items[0].num_nodes * 10
    trace.save(tmp_path / "a.trace")
    again = Trace.load(tmp_path / "a.trace")
    assert again == trace
    assert again.encode() == trace.encode()


def test_integers_given_for_rates_do_not_change_the_bytes():
    trace = make_trace(rate_hz=50)
    assert Trace.decode(trace.encode()).encode() == trace.encode() == make_trace().encode()


def test_an_empty_trace_is_one():
    trace = make_trace(count=0)
    assert Trace.decode(trace.encode()).items == ()
    assert trace.duration_s == 0.0


LINES = make_trace(count=2).encode().splitlines()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "t: empty"),
        ([b"nonsense"], "t, line 1: JSON is malformed"),
        ([b"{}"], "t, line 1: Object missing required field"),
        ([LINES[0].replace(b"trace-1", b"trace-9")], "t, line 1: format 'gnnserve-trace-9'"),
        ([LINES[0].replace(b'"seed"', b'"sead"', 1)], "t, line 1: Object contains unknown field"),
        ([LINES[0], b'{"offset_ns":-1}'], "t, line 2: Expected `int` >= 0"),
        ([LINES[0], LINES[2], LINES[1]], "t, line 3: offset_ns goes back in time"),
    ],
)
def test_a_wrong_trace_names_the_line(lines, message):
    with pytest.raises(ConfigError, match=message):
        Trace.decode(b"\n".join(lines), "t")


def test_a_missing_trace(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace.load(tmp_path / "absent.trace")


def test_what_a_trace_needs():
    header = TraceHeader(workload="gcn", seed=0, rate_hz=1.0)
    tasks = workload_tasks("gcn", POOL, 0)
    with pytest.raises(ConfigError, match="a duration or a number"):
        build_trace(header, tasks)
    with pytest.raises(ConfigError, match="'steady' is not one of poisson, bursty"):
        build_trace(msgspec.structs.replace(header, arrivals="steady"), tasks, count=1)
    with pytest.raises(ConfigError, match=r"> 0.*rate_hz"):
        build_trace(msgspec.structs.replace(header, rate_hz=0.0), tasks, count=1)
    with pytest.raises(ConfigError, match=r"pool\.scale"):
        build_trace(msgspec.structs.replace(header, pool=PoolSpec(scale=2.0)), tasks, count=1)


def test_rate_for_rho():
    assert rate_for_rho(0.5, mean_solo_s=0.02, slots=4) == pytest.approx(100)
    for wrong in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ConfigError, match="rho"):
            rate_for_rho(*wrong)
