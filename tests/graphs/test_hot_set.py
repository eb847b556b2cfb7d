"""Which rows are hot: how much memory there is, by degree at first, by what is asked for then."""

import numpy as np
import pytest

from serve.graphs.columns import Column
from serve.graphs.csr import grouped
from serve.graphs.edges import Edges
from serve.graphs.features import FeatureKeeper
from serve.graphs.hot_set import HotSet, most_rows, share_memory, slots_bytes
from serve.graphs.resident import ResidentGraph
from serve.graphs.snapshot import Snapshot
from serve.graphs.updates import Change

NODES, FEATURES = 4_000, 8
ROW_BYTES = 4 * FEATURES
MIB = 1 << 20


@pytest.fixture
def graph(tmp_path):
    """Node v is the in-neighbour of v others, so the last have the highest degrees."""
    sources = np.repeat(np.arange(NODES), np.arange(NODES) // 100)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NODES, FEATURES), dtype=np.float32)
    keeper = FeatureKeeper(dtype="float32", folder=tmp_path, shared=True)
    rows = grouped(rng.integers(0, NODES, sources.size), sources, NODES)
    first = Snapshot(1, Edges.of(rows), Column.of(keeper.kept(x, "test"), "float32"))
    return ResidentGraph("g", first, keeper, "test")


def memory_for(count, num_rows=NODES):
    return slots_bytes(num_rows) + count * ROW_BYTES


def ids_of(rows):
    found = np.ndarray((rows.count,), np.int64, rows.file)
    assert np.array_equal(np.flatnonzero(rows.inside), found)
    return found


def ask(hot, rows, draw, count):
    """So many requests of 1,000 rows."""
    for _ in range(count):
        hot.count(rows.table, np.unique(draw(1_000)))


def test_memory_is_shared_by_size_and_never_more_than_all_rows_need():
    whole = memory_for(NODES)
    assert share_memory([(NODES, ROW_BYTES)], [None], 1 << 30) == [2 * MIB]
    assert whole < 2 * MIB
    large = (100_000_000, 400)
    a, b, none, given = share_memory(
        [large, large, (NODES, ROW_BYTES), large], [None, None, 0, 3 << 30], 16 << 30
    )
    assert a == b
    assert (1 << 30) <= a <= (1 << 30) + 2 * MIB
    assert (none, given) == (0, 3 << 30)
    # Where not a row fits beside their places, nothing is taken.
    assert share_memory([large], [None], 1 << 20) == [0]
    assert share_memory([(0, 0)], [None], 1 << 30) == [0]


@pytest.mark.parametrize("count", [0, 1, 500, NODES])
def test_as_many_rows_as_fit_of_the_highest_degrees(graph, count):
    memory_bytes = memory_for(count)
    assert most_rows(memory_bytes, NODES, ROW_BYTES) == count
    assert most_rows(memory_bytes - 1, NODES, ROW_BYTES) == max(0, count - 1)
    rows = HotSet(memory_bytes).rows(graph.snapshot)
    if count == 0:
        assert rows is None
        return
    ids = ids_of(rows)
    assert ids.size == count
    # Of nodes of the same degree any.
    assert ids.min() // 100 >= (NODES - count) // 100


def test_the_rows_stay_until_the_table_is_another(graph, monkeypatch):
    monkeypatch.setattr("serve.graphs.columns._LEAST_PATCHED_ROWS", 300)
    hot = HotSet(memory_for(500))
    first = hot.rows(graph.snapshot)
    graph.update(Change(set_ids=np.arange(5), set_x=np.ones((5, FEATURES), np.float32)))
    assert hot.rows(graph.snapshot) is first
    more = np.ones((600, FEATURES), np.float32)
    snapshot = graph.update(Change(add_x=more))
    second = hot.rows(snapshot)
    assert second.table != first.table
    assert second.inside.size == NODES + 600
    # The memory is the same, and more rows have to be found in it.
    assert first.count == 500
    assert second.count == most_rows(memory_for(500), NODES + 600, ROW_BYTES) < 500


def test_what_is_asked_for_takes_the_place_of_what_is_not(graph):
    hot, rng = HotSet(memory_for(500)), np.random.default_rng(1)
    first = hot.rows(graph.snapshot)
    hot.held(first.file.number)

    def wanted(count):
        return rng.integers(0, 600, count)

    changes = 0
    for _ in range(3):
        ask(hot, first, wanted, 1_200)
        changes += hot.reconsider(graph.snapshot)
    assert changes == 1
    second = hot.rows(graph.snapshot)
    assert (ids_of(second) < 600).mean() > 0.95
    rows, served = hot.gathered
    assert rows > 0
    assert served == 0  # the rows of high degree were never asked for, nor are the new ones held
    hot.held(second.file.number)
    ask(hot, second, wanted, 800)
    rows_after, served_after = hot.gathered
    assert served_after / (rows_after - rows) > 0.7


def test_what_only_looked_better_does_not(graph):
    """Every row is asked for as often: by chance some more than others, but not the next time."""
    hot, rng = HotSet(memory_for(500)), np.random.default_rng(2)
    rows = hot.rows(graph.snapshot)
    for _ in range(6):
        ask(hot, rows, lambda count: rng.integers(0, NODES, count), 1_200)
        assert not hot.reconsider(graph.snapshot)
    assert hot.rows(graph.snapshot) is rows


def test_rows_count_as_served_once_a_device_has_them_and_by_their_table_only(graph):
    hot = HotSet(memory_for(NODES))
    rows = hot.rows(graph.snapshot)
    ids = np.arange(100)
    for _ in range(8):
        hot.count(rows.table, ids)
        hot.count(rows.table + 1, ids)
    assert hot.gathered == (200, 0)
    hot.held(rows.file.number)
    for _ in range(8):
        hot.count(rows.table, ids)
    assert hot.gathered == (300, 100)
    hot.held(None)
    for _ in range(8):
        hot.count(rows.table, ids)
    assert hot.gathered == (400, 100)
