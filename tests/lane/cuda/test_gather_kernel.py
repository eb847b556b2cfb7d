"""The gather of rows over the bus: the kernel's source, thread by thread on this processor."""

import ctypes

import pytest
import torch

from serve.lane.cuda.queues import HostQueue, HotRows
from serve.native_cuda import GATHER_THREADS, CudaLibrary, library_path

SIMT = library_path("libgnnserve_simt.so")
pytestmark = pytest.mark.skipif(SIMT is None, reason="only an editable install builds it")


@pytest.fixture(scope="module")
def library():
    """What of the library for CUDA runs without it."""
    found = CudaLibrary.__new__(CudaLibrary)
    call = ctypes.CDLL(str(SIMT)).gnnserve_cuda_gather
    pointer, size, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    call.argtypes = [pointer, pointer, size, size, pointer, pointer, pointer, code, size, pointer]
    found._gather, found._error = call, lambda number: b"refused"
    return found


@pytest.mark.parametrize("columns", [1, 3, 33, 64, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("offset", [0, 1])
def test_hot_rows_come_from_the_device_and_others_from_the_table(library, columns, dtype, offset):
    generator = torch.Generator().manual_seed(columns)
    size = 50 * columns + 1
    table = torch.randint(0, 100, (size,), generator=generator).to(dtype)
    # As mapped, and as far past a line as one element.
    table = table[offset : offset + 50 * columns].view(50, columns)
    ids = torch.randint(50, (90,), generator=generator)
    hot_ids = torch.arange(5, 50, 3)
    slot_of = torch.full((50,), -1, dtype=torch.int32)
    slot_of[hot_ids] = torch.arange(len(hot_ids), dtype=torch.int32)
    # Other values, so that it shows where a row was taken from.
    hot = HotRows(slot_of, table[hot_ids] + 100)
    expected = HostQueue().gather(table, ids, hot)
    there = slot_of[ids] >= 0
    assert 0 < there.sum() < 90
    torch.testing.assert_close(expected[there], table[ids[there]] + 100, rtol=0, atol=0)
    torch.testing.assert_close(expected[~there], table[ids[~there]], rtol=0, atol=0)
    for shift in (True, False):
        out = torch.zeros(90, columns, dtype=dtype)
        library.gather(
            table.data_ptr(), ids.data_ptr(), 90, columns * dtype.itemsize, out.data_ptr(),
            stream=0, hot=hot.rows.data_ptr(), slot_of=slot_of.data_ptr(), shift=shift,
            most_threads=512,
        )  # fmt: skip
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("columns", [1, 3, 16, 33, 64, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_become_floats_exactly(columns, dtype, offset):
    generator = torch.Generator().manual_seed(columns)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    # All bits there are, so also what is infinite, no number, or too small for a whole exponent.
    size = 50 * columns + 1
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max
    table = torch.randint(low, high, (size,), generator=generator).to(bits).view(dtype)
    table = table[offset : offset + 50 * columns].view(50, columns)
    ids = torch.randint(50, (90,), generator=generator)
    slot_of = torch.full((50,), -1, dtype=torch.int32)
    slot_of[7] = 0
    hot = table[[3]].clone()
    out = torch.zeros(90, columns)
    call = ctypes.CDLL(str(SIMT)).gnnserve_cuda_gather_floats
    number = ctypes.c_int64
    address = ctypes.c_uint64
    call.argtypes = [address] * 2 + [number] * 3 + [address] * 3 + [number, ctypes.c_void_p]
    row_bytes = columns * dtype.itemsize
    code = call(table.data_ptr(), ids.data_ptr(), 90, row_bytes, dtype.itemsize, hot.data_ptr(),
                slot_of.data_ptr(), out.data_ptr(), 512, None)  # fmt: skip
    assert code == 0
    read = ids.clone()
    read[ids == 7] = 3
    torch.testing.assert_close(out, table[read].float(), rtol=0, atol=0, equal_nan=True)


def test_a_gather_keeps_the_bus_busy_and_leaves_the_device_to_others(library, monkeypatch):
    """Of a device of 132 processors with 2,048 threads each, on a bus of 55 GB/s and 2 µs."""
    asked = []
    monkeypatch.setattr(library, "_gather", lambda *arguments: asked.append(arguments[8]) or 0)
    library.gather(0, 0, 1 << 20, 512, 0, stream=0)
    assert asked == [GATHER_THREADS]
    assert 16 * GATHER_THREADS >= 55e9 * 2e-6
    assert GATHER_THREADS <= 132 * 2048 / 8
