"""Staging: the compiled module against its oracle in numpy, and what both must refuse."""

import importlib
import inspect
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import serve
from serve import _core, native
from tests.native import oracle

BOTH = pytest.mark.parametrize("core", [_core, oracle], ids=["compiled", "oracle"])
INDEX_DTYPES = st.sampled_from([np.dtype(np.int32), np.dtype(np.int64)])


def unaligned(array: np.ndarray, shift: int) -> memoryview:
    """The bytes of `array`, read-only and `shift` bytes off its alignment."""
    return memoryview(b"\0" * shift + array.tobytes())[shift:]


def test_without_the_compiled_module_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "serve._core", None)  # as if it was never built
    monkeypatch.delattr(serve, "_core")
    with pytest.raises(ImportError, match=r"serve\._core .*`make setup`.*`pip install \.`"):
        importlib.reload(native)


@pytest.mark.parametrize("name", ["stage_indices", "stage_features"])
def test_the_door_and_the_oracle_take_the_same_arguments(name):
    assert inspect.signature(getattr(native, name)) == inspect.signature(getattr(oracle, name))


@given(
    dtype=INDEX_DTYPES,
    data=st.data(),
    bound=st.integers(0, 2**31 - 1),
    shift=st.integers(0, 9),
)
def test_indices_agree_with_the_oracle(dtype, data, bound, shift):
    limits = np.iinfo(dtype)
    elements = st.integers(0, max(bound - 1, 0)) | st.integers(limits.min, limits.max)
    indices = data.draw(arrays(dtype, st.integers(0, 40), elements=elements))
    source = unaligned(indices, shift)
    target, expected = np.empty(indices.size, np.int64), np.empty(indices.size, np.int64)
    is_int32 = dtype == np.int32
    bad = native.stage_indices(source, is_int32, bound, target)
    assert bad == oracle.stage_indices(source, is_int32, bound, expected)
    if bad < 0:
        np.testing.assert_array_equal(target, indices)
        np.testing.assert_array_equal(expected, indices)


@given(data=st.data(), bound=st.integers(0, 2**40), shift=st.integers(0, 9))
def test_narrow_indices_stay_as_they_are(data, bound, shift):
    elements = st.integers(0, min(max(bound, 1), 2**31) - 1) | st.integers(-(2**31), 2**31 - 1)
    indices = data.draw(arrays(np.int32, st.integers(0, 40), elements=elements))
    source = unaligned(indices, shift)
    target, expected = np.empty(indices.size, np.int32), np.empty(indices.size, np.int32)
    bad = native.stage_indices(source, True, bound, target, True)
    assert bad == oracle.stage_indices(source, True, bound, expected, True)
    if bad < 0:
        np.testing.assert_array_equal(target, indices)


@BOTH
def test_wide_indices_are_not_narrowed(core):
    with pytest.raises(ValueError, match="cannot be narrowed"):
        core.stage_indices(bytes(8), False, 1, bytearray(4), True)


@given(
    values=arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)),
    check_finite=st.booleans(),
    shift=st.integers(0, 9),
)
def test_features_agree_with_the_oracle(values, check_finite, shift):
    source = unaligned(values, shift)
    target, expected = np.empty_like(values), np.empty_like(values)
    bad = native.stage_features(source, target, check_finite)
    assert bad == oracle.stage_features(source, expected, check_finite)
    if bad < 0:
        assert target.tobytes() == expected.tobytes() == values.tobytes()


@BOTH
@pytest.mark.parametrize("position", [0, 1023, 1024, 99_999])
def test_the_first_bad_value_is_found_in_large_arrays(core, position):
    indices = np.full(100_000, 9)
    indices[position:] = 10
    assert core.stage_indices(indices, False, 10, np.empty_like(indices)) == position
    values = np.zeros(100_000, np.float32)
    values[position:] = np.nan
    assert core.stage_features(values, np.empty_like(values), True) == position


@BOTH
def test_bytearrays_and_memoryviews_are_targets_too(core):
    target = bytearray(17)
    source = np.array([3, 4], np.int32).tobytes()
    assert core.stage_indices(source, True, 5, memoryview(target)[1:]) == -1
    assert np.frombuffer(target, np.int64, offset=1).tolist() == [3, 4]


@BOTH
@pytest.mark.parametrize(
    ("source_bytes", "is_int32", "target_bytes"),
    [
        (16, False, 8),
        (8, False, 16),
        (16, True, 16),
        (15, False, 16),
        (6, True, 8),
        (16, False, 17),
    ],
)
def test_index_sizes_that_do_not_match(core, source_bytes, is_int32, target_bytes):
    with pytest.raises(ValueError, match=r"size|bytes|element"):
        core.stage_indices(bytes(source_bytes), is_int32, 1, bytearray(target_bytes))


@BOTH
@pytest.mark.parametrize(("source_bytes", "target_bytes"), [(4, 8), (8, 4), (6, 6)])
def test_feature_sizes_that_do_not_match(core, source_bytes, target_bytes):
    with pytest.raises(ValueError, match=r"size|bytes|element"):
        core.stage_features(bytes(source_bytes), bytearray(target_bytes), True)


@BOTH
def test_targets_and_layouts_that_cannot_be(core):
    with pytest.raises((BufferError, ValueError, TypeError)):
        core.stage_features(bytes(8), bytes(8), True)
    with pytest.raises((BufferError, ValueError)):
        core.stage_features(np.zeros((4, 4), np.float32)[:, ::2], np.zeros(8, np.float32), True)
    with pytest.raises((BufferError, ValueError)):
        core.stage_features(np.zeros(8, np.float32), np.zeros((4, 4), np.float32)[:, ::2], True)
    with pytest.raises(ValueError, match="bound"):
        core.stage_indices(b"", False, -1, bytearray())
    with pytest.raises(TypeError):
        core.stage_features("text", bytearray(4), True)


@pytest.fixture
def unhurried_interpreter():
    """No thread is made to give up the interpreter lock: it runs until it lets go by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("unhurried_interpreter")
def test_other_threads_run_during_a_large_copy():
    values = np.zeros(10_000_000, np.float32)
    target = np.empty_like(values)
    stop = threading.Event()
    count = 0

    def work() -> None:
        nonlocal count
        while not stop.wait(0.0001):  # lets go of the lock while it waits
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    ahead = False
    for _ in range(100):
        before = count
        native.stage_features(values, target, True)
        ahead = ahead or count > before
    stop.set()
    thread.join()
    assert ahead
