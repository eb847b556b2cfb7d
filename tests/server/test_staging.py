"""Content checks and the layout of requests in the shared pool."""

import itertools
from multiprocessing import shared_memory

import numpy as np
import pytest

from serve.errors import InvalidInput, QueueFull
from serve.ipc.shared_pool import TENSOR_ALIGNMENT_BYTES, SharedPool
from serve.server import regions as regions_module
from serve.server.api import InferCall, Tensor
from serve.server.regions import Regions
from serve.server.staging import count_loops, plan_layout, stage, take_block

NODES, EDGES, WIDTH = 5, 7, 3


@pytest.fixture
def pool():
    pool = SharedPool(1 << 20)
    yield pool
    pool.close()


def call(**changed: np.ndarray) -> InferCall:
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((NODES, WIDTH)).astype(np.float32),
        "edge_index": rng.integers(0, NODES, (2, EDGES)),
        "edge_weight": rng.random(EDGES).astype(np.float32),
        "batch": np.zeros(NODES, np.int64),
    } | changed
    names = {"float32": "FP32", "int64": "INT64", "int32": "INT32"}
    tensors = {
        name: Tensor(names[array.dtype.name], array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    return InferCall("m", "", tensors, arrived_ns=0)


def shapes(request: InferCall) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in request.tensors.items()}


def staged(
    pool: SharedPool,
    request: InferCall,
    *,
    check_finite: bool = True,
    narrow_edges: bool = False,
    sorted_batch: bool = False,
):
    order = ("x", "edge_index", "edge_weight", "batch")
    layout = plan_layout(shapes(request), order, output_bytes=40, narrow_edges=narrow_edges)
    block = take_block(pool, layout.size_bytes)
    return stage(
        request,
        layout,
        pool,
        block,
        check_finite=check_finite,
        sorted_batch=sorted_batch,
        staged_before=set(),
    )


@pytest.mark.parametrize(
    ("index_dtype", "narrow"), [(np.int64, False), (np.int32, False), (np.int32, True)]
)
def test_staged_tensors_equal_those_sent(pool, index_dtype, narrow):
    edges = np.random.default_rng(1).integers(0, NODES, (2, EDGES)).astype(index_dtype)
    request = call(edge_index=edges)
    result = staged(pool, request, narrow_edges=narrow)
    arrays = {ref.name: pool.array(ref.offset_bytes, ref.dtype, ref.shape) for ref in result.inputs}
    np.testing.assert_array_equal(arrays["edge_index"], edges)
    assert arrays["edge_index"].dtype == (np.int32 if narrow else np.int64)
    sent = np.frombuffer(request.tensors["x"].data, "<f4").reshape(NODES, WIDTH)
    np.testing.assert_array_equal(arrays["x"], sent)
    assert [ref.name for ref in result.inputs] == ["x", "edge_index", "edge_weight", "batch"]


def test_loops_among_the_staged_edges_are_counted(pool):
    edges = np.array([[0, 1, 2, 3, 4, 4, 0], [0, 2, 2, 1, 4, 4, 1]])
    assert count_loops(staged(pool, call(edge_index=edges)), pool) == 4
    assert count_loops(staged(pool, call(edge_index=edges[:, :0])), pool) == 0


def test_graphs_in_any_order_are_refused_where_the_model_needs_them_sorted(pool):
    request = call(batch=np.array([0, 0, 2, 1, 3]))
    staged(pool, request)
    told = r"'batch' \[3\] is 1 after 2; it must ascend, .* side by side"
    with pytest.raises(InvalidInput, match=told):
        staged(pool, request, sorted_batch=True)
    staged(pool, call(batch=np.array([0, 0, 2, 2, 3])), sorted_batch=True)


def test_order_matters_too_where_another_model_has_staged_the_graphs(pool):
    request, before = call(batch=np.array([0, 0, 2, 1, 3])), set()
    layout = plan_layout(shapes(request), ("x", "batch"), output_bytes=40)
    block = take_block(pool, layout.size_bytes)

    def stage_for(sorted_batch):
        stage(
            request, layout, pool, block,
            check_finite=True, sorted_batch=sorted_batch, staged_before=before,
        )  # fmt: skip

    stage_for(sorted_batch=False)
    with pytest.raises(InvalidInput, match=r"'batch' \[3\] is 1 after 2"):
        stage_for(sorted_batch=True)


@pytest.fixture
def shared(monkeypatch):
    """A request of several pieces a tensor, its tensors in a client's shared memory."""
    monkeypatch.setattr(regions_module, "PIECE_BYTES", 4096)
    nodes, edges = 1000, 4096 // 8 + 3
    rng = np.random.default_rng(2)
    arrays = {
        "x": rng.standard_normal((nodes, 10)).astype(np.float32),
        "edge_index": rng.integers(0, nodes, (2, edges)).astype(np.int32),
    }
    memory = shared_memory.SharedMemory(
        create=True, size=sum(array.nbytes for array in arrays.values())
    )
    regions = Regions()
    regions.register("r", memory.name, 0, memory.size)
    tensors, offset = {}, 0
    for name, array in arrays.items():
        memory.buf[offset : offset + array.nbytes] = array.tobytes()
        part = regions.part("r", offset, array.nbytes)
        datatype = "FP32" if name == "x" else "INT32"
        tensors[name] = Tensor(datatype, array.shape, part)
        offset += array.nbytes
    yield arrays, tensors, memory
    memory.close()
    memory.unlink()


def test_shared_memory_is_staged_like_a_message(pool, shared):
    arrays, tensors, _ = shared
    for ref in staged(pool, InferCall("m", "", tensors, arrived_ns=0)).inputs:
        found = pool.array(ref.offset_bytes, ref.dtype, ref.shape)
        np.testing.assert_array_equal(found, arrays[ref.name])


def test_errors_in_shared_memory_are_found_in_any_piece(pool, shared):
    arrays, tensors, memory = shared
    request = InferCall("m", "", tensors, arrived_ns=0)
    edges = arrays["edge_index"].shape[1]
    last = arrays["x"].nbytes + 4 * (2 * edges - 1)
    memory.buf[last : last + 4] = np.int32(1000).tobytes()
    with pytest.raises(InvalidInput, match=rf"'edge_index' \[1, {edges - 1}\] is 1000"):
        staged(pool, request)
    for row in (700, 999):
        start = 40 * row
        memory.buf[start : start + 4] = np.float32(np.inf).tobytes()
    with pytest.raises(InvalidInput, match=r"'x' \[700, 0\] is inf; .* \(2 of 10000 are not\)"):
        staged(pool, request)


def test_tensors_are_aligned_and_do_not_overlap(pool):
    result = staged(pool, call())
    ends = []
    for ref in result.inputs:
        assert ref.offset_bytes % TENSOR_ALIGNMENT_BYTES == 0
        size = int(np.prod(ref.shape)) * np.dtype(ref.dtype).itemsize
        ends.append((ref.offset_bytes, ref.offset_bytes + size))
    ends.append((result.output_offset_bytes, result.output_offset_bytes + 40))
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert end <= start


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"edge_index": np.array([[0, 1], [2, 5]])}, ["edge_index", "[1, 1]", "is 5", "[0, 5)"]),
        ({"edge_index": np.array([[0, -1], [2, 4]])}, ["edge_index", "[0, 1]", "is -1"]),
        ({"edge_index": np.array([[0, 9], [2, 4]], np.int32)}, ["edge_index", "[0, 1]", "is 9"]),
        ({"batch": np.array([0, 0, 0, 7, 0])}, ["batch", "[3]", "is 7"]),
        (
            {"x": np.array([[0, np.nan, np.inf]] * NODES, np.float32)},
            ["'x'", "[0, 1]", "is nan", "10 of 15"],
        ),
        ({"edge_weight": np.array([0, np.inf], np.float32)}, ["edge_weight", "[1]", "is inf"]),
    ],
)
def test_bad_content_is_named(pool, changed, words):
    with pytest.raises(InvalidInput) as caught:
        staged(pool, call(**changed))
    for word in words:
        assert word in str(caught.value)


def test_non_finite_features_pass_when_allowed(pool):
    odd = np.full((NODES, WIDTH), np.nan, np.float32)
    result = staged(pool, call(x=odd), check_finite=False)
    assert np.isnan(pool.array(result.inputs[0].offset_bytes, "float32", odd.shape)).all()


def test_empty_tensors_take_no_room(pool):
    request = call(
        x=np.zeros((0, WIDTH), np.float32),
        edge_index=np.zeros((2, 0), np.int64),
        edge_weight=np.zeros(0, np.float32),
        batch=np.zeros(0, np.int64),
    )
    assert [ref.shape for ref in staged(pool, request).inputs] == [(0, WIDTH), (2, 0), (0,), (0,)]


def test_a_full_pool_refuses_with_the_numbers_and_recovers(pool):
    request = call()
    layout = plan_layout(shapes(request), ("x",), output_bytes=600_000)
    block = take_block(pool, layout.size_bytes)
    with pytest.raises(QueueFull, match=str(layout.size_bytes)) as caught:
        take_block(pool, layout.size_bytes)
    assert caught.value.retry_after_ns > 0
    pool.free(block)
    assert pool.used_bytes == 0
    pool.free(take_block(pool, layout.size_bytes))
