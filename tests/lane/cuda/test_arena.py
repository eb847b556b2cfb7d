"""The arena as torch and lanes reach it, on addresses that nobody ever touches."""

import ctypes
import subprocess
import sys

import pytest

from serve import native_cuda
from serve.lane.cuda.arena import DeviceArena
from serve.native_cuda import CUDA_LIBRARY, DEVICE_LIBRARY, library_path, required_path

BASE, CAPACITY = 0x7F00_0000_0000, 64 << 20


@pytest.fixture(scope="module")
def arena():
    return DeviceArena.open(BASE, CAPACITY)


@pytest.fixture(scope="module")
def torchs():
    """The two functions as torch calls them: with a device and a stream."""
    library = ctypes.PyDLL(str(required_path(DEVICE_LIBRARY)))
    pointer, size, device = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.gnnserve_device_alloc.restype = pointer
    library.gnnserve_device_alloc.argtypes = [size, device, pointer]
    library.gnnserve_device_free.restype = None
    library.gnnserve_device_free.argtypes = [pointer, size, device, pointer]
    return library


def test_a_task_has_its_buffer_and_its_peak(arena, torchs):
    lane, other = arena.add_lane(), arena.add_lane()
    other.insert(4096)
    lane.insert(8192)
    before = arena.held_bytes
    block = torchs.gnnserve_device_alloc(1000, 0, None)
    assert BASE <= block < BASE + CAPACITY
    assert arena.held_bytes == before
    assert (lane.live_bytes(), lane.peak_bytes(), lane.held_peak_bytes()) == (1000, 1000, 1024)
    assert other.live_bytes() == 0
    torchs.gnnserve_device_free(block, 1000, 0, None)
    assert (lane.live_bytes(), lane.peak_bytes(), lane.blocks_peak()) == (0, 1000, 1)
    assert lane.clear() == other.clear() == 0
    assert lane.refused_bytes() == 0


def test_outside_of_tasks_memory_is_static_and_by_stream(arena, torchs):
    before = arena.static_bytes
    first = torchs.gnnserve_device_alloc(100, 0, 11)
    second = torchs.gnnserve_device_alloc(100, 0, 12)
    assert arena.static_bytes == before + (4 << 20)
    torchs.gnnserve_device_free(first, 100, 0, 11)
    assert torchs.gnnserve_device_alloc(100, 0, 11) == first != second


def test_a_slab_that_is_full_is_a_memory_error(arena):
    lane = arena.add_lane()
    with pytest.raises(MemoryError, match="no 67108865 bytes left"):
        lane.insert(CAPACITY + 1)
    lane.insert(512)
    with pytest.raises(RuntimeError, match="still holds"):
        lane.insert(512)
    lane.clear()


def test_what_outlives_its_task_costs_no_more_than_itself(arena, torchs):
    lane = arena.add_lane()
    before, most_bytes = arena.held_bytes, lane.most_bytes()
    lane.insert(most_bytes)
    kept = torchs.gnnserve_device_alloc(1000, 0, None)
    assert lane.clear() == arena.outlived_bytes == 1024
    assert arena.held_bytes == before + 1024
    lane.insert(most_bytes - 1024)
    lane.clear()
    torchs.gnnserve_device_free(kept, 1000, 0, None)
    assert (arena.held_bytes, arena.outlived_bytes) == (before, 0)


def test_a_buffer_held_for_good_is_used_inside_held_only(arena, torchs):
    lane, task = arena.add_lane(), arena.add_lane()
    static = arena.static_bytes
    lane.hold(4096)
    torchs.gnnserve_device_alloc(100, 0, 21)
    assert arena.static_bytes > static
    static = arena.static_bytes
    with lane.held():
        first = torchs.gnnserve_device_alloc(1000, 0, None)
        passing = torchs.gnnserve_device_alloc(2000, 0, None)
        torchs.gnnserve_device_free(passing, 2000, 0, None)
    # Between two uses a task runs in a buffer of its own, and what is live stays.
    task.insert(2048)
    elsewhere = torchs.gnnserve_device_alloc(2048, 0, None)
    assert not first <= elsewhere < first + 4096
    torchs.gnnserve_device_free(elsewhere, 2048, 0, None)
    assert task.clear() == 0
    assert (lane.live_bytes(), lane.refusals()) == (1000, 0)
    with lane.held():
        assert torchs.gnnserve_device_alloc(2000, 0, None) == passing
    assert arena.static_bytes == static
    lane.clear()


def test_a_trace_is_what_was_asked_for(arena, torchs):
    lane = arena.add_lane()
    lane.insert(1 << 20)
    lane.start_trace()
    block = torchs.gnnserve_device_alloc(700, 0, None)
    torchs.gnnserve_device_free(block, 700, 0, None)
    assert lane.take_trace() == (700, -700)
    lane.clear()


def test_there_is_one_arena_in_a_process(arena):
    with pytest.raises(ValueError, match="a second one"):
        DeviceArena.open(BASE, CAPACITY)


def test_an_overrun_throws_what_torch_can_catch(tmp_path):
    """It must be an exception and never a null pointer, which torch would take for memory."""
    source = tmp_path / "caller.cpp"
    source.write_text(CALLER)
    program = tmp_path / "caller"
    subprocess.run(["c++", "-std=c++20", source, "-o", program, "-ldl"], check=True)
    found = subprocess.run(
        [program, required_path(DEVICE_LIBRARY)], check=True, capture_output=True, text=True
    )
    assert found.stdout == "gnnserve: 4097 bytes do not fit into the device buffer\nnext: fine\n"


def test_the_library_for_cuda_is_named_when_it_is_missing():
    if library_path(CUDA_LIBRARY) is None:
        with pytest.raises(FileNotFoundError, match=r"docs/cuda\.md"):
            required_path(CUDA_LIBRARY)


def test_libraries_are_found_in_a_checkout_without_the_extension(monkeypatch, tmp_path):
    """As on a machine of ``make gpu-check`` where the extension cannot be built."""
    monkeypatch.setattr(native_cuda.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(native_cuda, "__file__", str(tmp_path / "native_cuda.py"))
    (tmp_path / CUDA_LIBRARY).touch()
    assert library_path(CUDA_LIBRARY) == tmp_path / CUDA_LIBRARY


def test_importing_lanes_does_not_initialise_cuda():
    code = "import serve.lane.cuda.process, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


CALLER = """
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <new>
template <typename F> F get(void* library, const char* name) {
    return reinterpret_cast<F>(dlsym(library, name));
}
int main(int, char** arguments) {
    void* l = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (l == nullptr) { std::puts(dlerror()); return 1; }
    auto open = get<long (*)(unsigned long, long)>(l, "gnnserve_device_open");
    auto add = get<long (*)()>(l, "gnnserve_device_add_lane");
    auto bind = get<void (*)(int)>(l, "gnnserve_device_bind");
    auto insert = get<long (*)(int, long)>(l, "gnnserve_device_insert");
    auto alloc = get<void* (*)(unsigned long, int, void*)>(l, "gnnserve_device_alloc");
    open(0x7f0000000000, 1 << 20);
    const int lane = static_cast<int>(add());
    insert(lane, 4096);
    bind(lane);
    try {
        alloc(4097, 0, nullptr);
    } catch (const std::bad_alloc& error) {
        std::puts(error.what());
    }
    std::puts(alloc(4096, 0, nullptr) != nullptr ? "next: fine" : "next: null");
}
"""
