"""Tables of features in a device's process: mapped once, pinned for a GPU, dropped when old."""

import mmap
import threading

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from serve.graphs.features import FeatureKeeper, memory_file
from serve.ipc.messages import TableRef
from serve.lane.cuda import cuda_queue
from serve.lane.cuda.cuda_queue import Pinned
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.tables import Tables
from serve.native_cuda import CudaError
from tests.processes import wait_for

IDS = torch.tensor([2, 0, 2])


class Library:
    """What CUDA has pinned now, by address, and the number of calls that pinned something.

    The device sees memory where the host does, or each part of it elsewhere.
    """

    def __init__(self):
        self.sizes = {}
        self.calls = 0
        self.refuses = lambda size_bytes: False
        self.scatters = False

    def register(self, address, size_bytes, device):
        self.calls += 1
        if self.refuses(size_bytes):
            raise CudaError("too much is pinned already")
        self.sizes[address] = size_bytes
        return address + (self.calls << 40 if self.scatters else 0)

    def unregister(self, address):
        del self.sizes[address]

    def seen(self, tensor):
        return tensor.data_ptr()


def kept(x, folder, *, dtype="float32", shared=True):
    return FeatureKeeper(dtype=dtype, folder=folder, shared=shared).kept(x, "test")


def table_of(x, graph="g"):
    file = memory_file(x)
    return TableRef(graph, file.number, file.path, x.dtype.name, x.shape)


@pytest.fixture
def library():
    return Library()


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_a_table_shows_the_features(tmp_path, library, dtype):
    x = np.arange(12, dtype=np.float32).reshape(3, 4) + (0 if dtype == "uint8" else 0.5)
    found = kept(x, tmp_path, dtype="float32" if dtype == "uint8" else dtype)
    assert found.dtype == dtype
    pinned = Pinned(library)
    with Tables(pinned).using(table_of(found)) as table:
        np.testing.assert_array_equal(HostQueue().gather(table.rows, IDS).float(), x[IDS])
        assert table.read_in_place()
        assert library.sizes == {table.rows.data_ptr(): found.nbytes}
        assert pinned.seen(table.rows) == table.rows.data_ptr()


def test_a_table_that_cannot_be_pinned_is_read_all_the_same(tmp_path, library, caplog):
    library.refuses = lambda size_bytes: True
    tables = Tables(Pinned(library))
    for number in range(2):
        x = kept(np.full((3, 2), number + 0.5, np.float32), tmp_path)
        with tables.using(table_of(x)) as table:
            assert table.rows[0, 0] == number + 0.5
            assert not table.read_in_place()
    assert "graph 'g': features are read by the host" in caplog.text


def test_features_are_in_a_file_only_where_that_is_asked_for(tmp_path):
    x = np.full((2, 2), 0.5, np.float32)
    assert memory_file(kept(x, tmp_path, shared=False)) is None
    keeper = FeatureKeeper(dtype="float32", folder=tmp_path, shared=True)
    found = keeper.kept(x, "test")
    again = keeper.rewritten(found, 3, np.array([2]), np.ones((1, 2), np.float32))
    assert memory_file(again).number > memory_file(found).number
    np.testing.assert_array_equal(again, [[0.5, 0.5], [0.5, 0.5], [1, 1]])


def test_a_table_is_mapped_once_and_an_old_one_dropped_when_it_is_used_no_more(tmp_path, library):
    x = np.full((3, 2), 0.5, np.float32)
    first, second, other = (kept(x + number, tmp_path) for number in range(3))
    tables = Tables(Pinned(library))
    with tables.using(table_of(first)) as old:
        with tables.using(table_of(first)) as same:
            assert same is old
        with tables.using(table_of(other, "another")):
            pass
        with tables.using(table_of(second)) as new:
            assert old.read_in_place()
            assert new.read_in_place()
            assert len(library.sizes) == 3
        assert old.rows[0, 0] == 0.5
        assert new.rows[0, 0] == 1.5
    wait_for(lambda: len(library.sizes) == 2, "the old table to be unpinned")
    assert old.rows.data_ptr() not in library.sizes


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


class SlowLibrary(Library):
    """One that pins from the second call on when it may go on."""

    def __init__(self):
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def register(self, address, size_bytes, device):
        if self.calls:
            self.begun.set()
            assert self.go_on.wait(600)
        return super().register(address, size_bytes, device)


@pytest.fixture
def slow(monkeypatch):
    """A library that is in the middle of pinning a table of four pages, a page at a time."""
    monkeypatch.setattr(cuda_queue, "PART_BYTES", mmap.PAGESIZE)
    library = SlowLibrary()
    yield library
    library.go_on.set()


FOUR_PAGES = np.full((4, mmap.PAGESIZE // 4), 0.5, np.float32)


def test_nobody_waits_for_a_table_that_is_pinned(tmp_path, slow):
    """Not those that use it either: the host reads it until the device can."""
    large = table_of(large_x := kept(FOUR_PAGES, tmp_path), "large")
    small = table_of(small_x := kept(FOUR_PAGES[:1] + 1, tmp_path), "small")
    pinned = Pinned(slow)
    tables = Tables(pinned)
    with tables.using(large) as table:
        assert slow.begun.wait(600)
        assert table.rows[0, 0] == large_x[0, 0]
        assert pinned.seen(table.rows) is None
        assert pinned.seen(table.rows[:1]) is None
        with tables.using(small) as other:
            assert other.rows[0, 0] == small_x[0, 0]
        slow.go_on.set()
        assert table.read_in_place()
        start = table.rows.data_ptr()
        assert {at - start: size for at, size in slow.sizes.items() if at < start + (4 << 12)} == {
            number * mmap.PAGESIZE: mmap.PAGESIZE for number in range(4)
        }
        assert pinned.seen(table.rows) == start
        assert other.read_in_place()


def test_pinning_ends_between_two_parts_when_the_table_is_replaced(tmp_path, slow):
    first, second = kept(FOUR_PAGES, tmp_path), kept(FOUR_PAGES + 1, tmp_path)
    tables = Tables(Pinned(slow))
    with tables.using(table_of(first)) as old:
        assert slow.begun.wait(600)
    with tables.using(table_of(second)) as new:
        slow.go_on.set()
        assert new.read_in_place()
        assert not old.read_in_place()
        # Two parts of the first, then the second's four.
        assert slow.calls == 2 + 4
        start = new.rows.data_ptr()
        assert sorted(slow.sizes) == [start + number * mmap.PAGESIZE for number in range(4)]


def test_when_a_part_is_refused_nothing_of_the_table_stays_pinned(tmp_path, slow, caplog):
    slow.go_on.set()
    slow.refuses = lambda size_bytes: slow.calls == 3
    x = kept(FOUR_PAGES, tmp_path)
    with Tables(pinned := Pinned(slow)).using(table_of(x)) as table:
        assert not table.read_in_place()
        assert slow.sizes == {}
        assert pinned.seen(table.rows) is None
    assert "too much is pinned already" in caplog.text


def test_a_device_that_sees_parts_apart_has_the_table_in_one(tmp_path, slow):
    slow.go_on.set()
    slow.scatters = True
    x = kept(FOUR_PAGES, tmp_path)
    with Tables(pinned := Pinned(slow)).using(table_of(x)) as table:
        assert table.read_in_place()
        start = table.rows.data_ptr()
        assert slow.sizes == {start: x.nbytes}
        assert pinned.seen(table.rows) == start + (5 << 40)


def test_parts_share_no_page():
    gib = cuda_queue.PART_BYTES
    assert gib == 1 << 30
    assert list(cuda_queue.parts_of(gib, 3 * gib)) == [(gib, gib), (2 * gib, gib), (3 * gib, gib)]
    assert list(cuda_queue.parts_of(gib + 64, 100)) == [(gib + 64, 100)]
    assert list(cuda_queue.parts_of(2 * gib - 4096, 4096 + 7)) == [
        (2 * gib - 4096, 4096), (2 * gib, 7),
    ]  # fmt: skip


def test_a_table_that_could_not_be_mapped_is_tried_again(tmp_path):
    ref = table_of(x := kept(np.full((3, 2), 0.5, np.float32), tmp_path))
    tables = Tables(None)
    with pytest.raises(OSError, match="No such file"), tables.using(replace(ref, path="/none")):
        pass
    with tables.using(ref) as table:
        assert table.rows[0, 0] == x[0, 0]
