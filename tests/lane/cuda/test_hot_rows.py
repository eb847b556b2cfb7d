"""Hot rows in a device's process: copied when nobody reads, used by runs of their table only."""

from queue import SimpleQueue

import numpy as np
import pytest
import torch

from serve.graphs.features import FeatureKeeper, MemoryFile, memory_file
from serve.graphs.hot_set import slots_bytes
from serve.ipc.messages import HotSetHeld, HotSetRef, TableRef
from serve.lane.cuda.cuda_queue import Pinned
from serve.lane.cuda.hot_rows import HotKeeper
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.tables import Tables
from tests.lane.cuda.test_tables import Library
from tests.processes import PATIENCE_S

ROWS, COLUMNS = 40, 6


class Offers:
    """A keeper, what it told, and files that must stay as long as others map them."""

    def __init__(self, tmp_path, pinned=None):
        self.keeper = HotKeeper(Tables(pinned), HostQueue)
        self.told: SimpleQueue[HotSetHeld] = SimpleQueue()
        self.files = []
        self._folder = tmp_path

    def table(self, value, graph="g", dtype="float32"):
        keeper = FeatureKeeper(dtype=dtype, folder=self._folder, shared=True)
        made = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + value
        x = keeper.kept(made, "test")
        file = memory_file(x)
        self.files.append(file)
        return TableRef(graph, file.number, file.path, x.dtype.name, x.shape)

    def hot(self, ids, table, memory_bytes=None):
        ids = np.asarray(ids)
        file = MemoryFile.of(ids.nbytes)
        np.ndarray(ids.shape, np.int64, file)[:] = ids
        self.files.append(file)
        memory_bytes = memory_bytes or slots_bytes(ROWS) + ids.size * table.row_bytes
        return HotSetRef(file.number, file.path, ids.size, memory_bytes)

    def offer(self, table, hot):
        self.keeper.offer(table, hot, self.told.put)

    def hear(self):
        return self.told.get(timeout=PATIENCE_S)


@pytest.fixture
def offers(tmp_path):
    return Offers(tmp_path)


def kept(rows):
    """Ids of the rows, and these."""
    ids = torch.nonzero(rows.slot_of >= 0).flatten()
    return ids.tolist(), rows.rows[rows.slot_of[ids]].float()


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_the_rows_are_those_of_the_table(offers, dtype, monkeypatch):
    monkeypatch.setattr("serve.lane.cuda.hot_rows._PART_BYTES", 50)
    table = offers.table(0 if dtype == "uint8" else 0.5, dtype=dtype.replace("uint8", "float32"))
    assert table.dtype == dtype
    hot = offers.hot([3, 4, 17, 39], table)
    with offers.keeper.using(table) as rows:
        assert rows is None
    offers.offer(table, hot)
    assert offers.hear() == HotSetHeld("g", hot.number)
    with offers.keeper.using(table) as rows:
        ids, found = kept(rows)
        assert ids == [3, 4, 17, 39]
        expected = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)[ids] + 0.5
        torch.testing.assert_close(found, expected if dtype != "uint8" else expected - 0.5)


def test_another_choice_waits_for_those_who_read_and_nobody_waits_for_it(offers):
    table = offers.table(0.5)
    first, second = offers.hot([1, 2], table), offers.hot([30, 31], table)
    offers.offer(table, first)
    offers.hear()
    with offers.keeper.using(table) as before:
        offers.offer(table, second)
        # Whoever comes meanwhile does without, or still uses what there is.
        for _ in range(20):
            with offers.keeper.using(table) as meanwhile:
                assert meanwhile in (None, before)
        assert offers.told.empty()
        assert kept(before)[0] == [1, 2]
    assert offers.hear().number == second.number
    with offers.keeper.using(table) as rows:
        assert kept(rows)[0] == [30, 31]
        # The same memory.
        assert rows.rows.data_ptr() == before.rows.data_ptr()


def test_a_table_that_took_the_place_of_another_does_not_get_its_rows(offers):
    old, new = offers.table(0.5), offers.table(100.5)
    offers.offer(old, offers.hot([1, 2], old))
    offers.hear()
    with offers.keeper.using(new) as rows:
        assert rows is None
    offers.offer(new, offers.hot([1, 5], new))
    offers.hear()
    with offers.keeper.using(old) as rows:
        assert rows is None
    with offers.keeper.using(new) as rows:
        ids, found = kept(rows)
        assert ids == [1, 5]
        assert found[0, 0] == COLUMNS + 100.5


def test_what_is_kept_is_not_copied_again_and_graphs_are_apart(offers):
    table, other = offers.table(0.5), offers.table(7.5, graph="other")
    hot = offers.hot([1, 2], table)
    for _ in range(3):
        offers.offer(table, hot)
    offers.offer(other, offers.hot([9], other))
    assert {offers.hear().graph, offers.hear().graph} == {"g", "other"}
    assert offers.told.empty()
    with offers.keeper.using(table) as rows, offers.keeper.using(other) as others:
        assert (kept(rows)[0], kept(others)[0]) == ([1, 2], [9])
    # None any more: as when a table is so large that none of its rows fits.
    offers.offer(table, None)
    offers.offer(other, offers.hot([8], other))
    offers.hear()
    with offers.keeper.using(table) as rows:
        assert rows is None


def test_what_cannot_be_kept_is_told_and_the_next_can(tmp_path, caplog):
    library = Library()
    offers = Offers(tmp_path, Pinned(library))
    table = offers.table(0.5)
    small = offers.hot([1, 2], table, memory_bytes=slots_bytes(ROWS) + table.row_bytes)
    offers.offer(table, small)
    assert "2 rows take" in offers.hear().failure
    library.refuses = lambda size_bytes: True
    unpinned = offers.table(0.5, graph="other")
    offers.offer(unpinned, offers.hot([1], unpinned))
    assert "the host reads the features" in offers.hear().failure
    assert "graph 'other': no rows are kept on the device" in caplog.text
    offers.offer(table, offers.hot([1], table))
    assert offers.hear().failure == ""
