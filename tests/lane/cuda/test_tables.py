"""Tables of features in a device's process: mapped once, pinned for a GPU, dropped when old."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from serve.graphs.features import FeatureKeeper, memory_file
from serve.ipc.messages import TableRef
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.tables import Tables
from serve.native_cuda import CudaError

IDS = torch.tensor([2, 0, 2])


class FakePinned:
    """What is pinned now, by address."""

    def __init__(self):
        self.sizes = {}
        self.refuses = False

    def register(self, address, size_bytes):
        if self.refuses:
            raise CudaError("too much is pinned already")
        self.sizes[address] = size_bytes

    def unregister(self, address):
        del self.sizes[address]


def kept(x, folder, *, dtype="float32", shared=True):
    return FeatureKeeper(dtype=dtype, folder=folder, shared=shared).kept(x, "test")


def table_of(x, graph="g"):
    file = memory_file(x)
    return TableRef(graph, file.number, file.path, x.dtype.name, x.shape)


@pytest.fixture
def pinned():
    return FakePinned()


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_a_table_shows_the_features(tmp_path, pinned, dtype):
    x = np.arange(12, dtype=np.float32).reshape(3, 4) + (0 if dtype == "uint8" else 0.5)
    found = kept(x, tmp_path, dtype="float32" if dtype == "uint8" else dtype)
    assert found.dtype == dtype
    with Tables(pinned).using(table_of(found)) as table:
        np.testing.assert_array_equal(HostQueue().gather(table.rows, IDS).float(), x[IDS])
        assert pinned.sizes == {table.rows.data_ptr(): found.nbytes}


def test_a_table_that_cannot_be_pinned_is_read_all_the_same(tmp_path, pinned, caplog):
    pinned.refuses = True
    tables = Tables(pinned)
    for number in range(2):
        x = kept(np.full((3, 2), number + 0.5, np.float32), tmp_path)
        with tables.using(table_of(x)) as table:
            assert table.rows[0, 0] == number + 0.5
    assert "graph 'g': features are read by the host" in caplog.text


def test_features_are_in_a_file_only_where_that_is_asked_for(tmp_path):
    x = np.full((2, 2), 0.5, np.float32)
    assert memory_file(kept(x, tmp_path, shared=False)) is None
    keeper = FeatureKeeper(dtype="float32", folder=tmp_path, shared=True)
    found = keeper.kept(x, "test")
    again = keeper.rewritten(found, 3, np.array([2]), np.ones((1, 2), np.float32))
    assert memory_file(again).number > memory_file(found).number
    np.testing.assert_array_equal(again, [[0.5, 0.5], [0.5, 0.5], [1, 1]])


def test_a_table_is_mapped_once_and_an_old_one_dropped_when_it_is_used_no_more(tmp_path, pinned):
    x = np.full((3, 2), 0.5, np.float32)
    first, second, other = (kept(x + number, tmp_path) for number in range(3))
    tables = Tables(pinned)
    with tables.using(table_of(first)) as old:
        with tables.using(table_of(first)) as same:
            assert same is old
        with tables.using(table_of(other, "another")):
            pass
        with tables.using(table_of(second)) as new:
            assert len(pinned.sizes) == 3
        assert old.rows[0, 0] == 0.5
        assert new.rows[0, 0] == 1.5
    assert len(pinned.sizes) == 2


@pytest.mark.parametrize("reused", [False, True])
def test_a_table_whose_file_is_gone_is_an_error(tmp_path, reused):
    """Also when its descriptor's number is that of another file by now."""
    x = kept(np.full((3, 2), 0.5, np.float32), tmp_path)
    ref = table_of(x)
    del x
    other = kept(np.full((3, 2), 1.5, np.float32), tmp_path) if reused else None
    assert (other is not None and table_of(other).path == ref.path) == reused
    with pytest.raises(OSError, match="No such file"), Tables(None).using(ref):
        pass


class SlowPinned(FakePinned):
    """Pinning of memory of one size takes until it may go on."""

    def __init__(self, slow_bytes):
        super().__init__()
        self.slow_bytes = slow_bytes
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.calls = 0

    def register(self, address, size_bytes):
        self.calls += 1
        if size_bytes == self.slow_bytes:
            self.begun.set()
            assert self.go_on.wait(600)
        super().register(address, size_bytes)


def test_a_table_that_is_pinned_for_long_keeps_no_other_waiting(tmp_path):
    large = table_of(large_x := kept(np.full((5, 2), 0.5, np.float32), tmp_path), "large")
    small = table_of(small_x := kept(np.full((3, 2), 1.5, np.float32), tmp_path), "small")
    pinned = SlowPinned(large_x.nbytes)
    tables = Tables(pinned)

    def first_value(ref):
        with tables.using(ref) as table:
            return table, float(table.rows[0, 0])

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(first_value, large)]
        try:
            assert pinned.begun.wait(600)
            both.append(threads.submit(first_value, large))
            assert first_value(small)[1] == small_x[0, 0]
        finally:
            pinned.go_on.set()
        (one, value), (other, _) = (each.result(600) for each in both)
    assert one is other
    assert value == 0.5
    assert pinned.calls == 2


def test_a_table_that_could_not_be_mapped_is_tried_again(tmp_path):
    ref = table_of(x := kept(np.full((3, 2), 0.5, np.float32), tmp_path))
    tables = Tables(None)
    with pytest.raises(OSError, match="No such file"), tables.using(replace(ref, path="/none")):
        pass
    with tables.using(ref) as table:
        assert table.rows[0, 0] == x[0, 0]
