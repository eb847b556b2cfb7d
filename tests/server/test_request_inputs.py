"""Inputs of a request: staged early, later or again, and given back whatever happens."""

from types import SimpleNamespace

import numpy as np
import pytest

from serve.core.types import Sized
from serve.errors import InvalidInput
from serve.server.request_inputs import TensorInputs
from tests.builders import sized, task
from tests.server.test_staging import EDGES, NODES, call, pool

__all__ = ["pool"]

LOOPS = np.array([[0, 1, 2, 3, 4, 4, 0], [0, 2, 2, 1, 4, 4, 1]])


class Estimator:
    """Reserves what was counted, so that a test can tell what it was asked."""

    counts_graphs = False

    def __init__(self, counts_loops):
        self.counts_loops = counts_loops

    def output_bytes(self, num_nodes, num_edges):
        return 8 * num_nodes

    def estimate(self, num_nodes, num_edges, num_loops, *, narrow_edges):
        return sized(reserve=1000 if num_loops is None else num_loops).estimate

    def memory(self, num_nodes, num_edges, num_loops, *, narrow_edges):
        return num_loops, num_loops


def inputs(pool, *, counts_loops=True, accepts=True, **changed):
    signature = SimpleNamespace(
        narrow_edges=True,
        accepts_empty=accepts,
        accepts_edgeless=accepts,
        needs_sorted_batch=False,
    )
    entry = SimpleNamespace(
        estimator=Estimator(counts_loops),
        signature=signature,
        spec=SimpleNamespace(inputs=("x", "edge_index")),
    )
    return TensorInputs(call(**changed), entry, pool, check_finite=True)


def edges(found, pool):
    place = found.staged.inputs[1]
    return pool.array(place.offset_bytes, place.dtype, place.shape)


def test_inputs_staged_early_are_admitted_with_what_was_counted(pool):
    found = inputs(pool, edge_index=LOOPS)
    assert found.expected().estimate.reserve_bytes == 1000
    found.stage_early()
    assert found.early_ns is not None
    assert found.expected().estimate.reserve_bytes == 4


def test_inputs_staged_later_correct_what_the_task_was_admitted_with(pool):
    found = inputs(pool, edge_index=LOOPS)
    admitted = task(1)
    assert found.stage()
    exact = found.exact(admitted)
    assert exact == Sized(NODES, EDGES, exact.estimate)
    assert (exact.estimate.reserve_bytes, exact.estimate.run_ns) == (4, admitted.estimate.run_ns)


def test_nothing_is_corrected_where_no_loops_are_counted(pool):
    found = inputs(pool, counts_loops=False)
    assert not found.stage()
    assert found.num_loops is None


def test_inputs_are_staged_again_where_they_lie(pool):
    found = inputs(pool, edge_index=LOOPS)
    assert found.stage()
    first = found.staged
    edges(found, pool)[:] = 0
    assert not found.stage()
    assert found.staged == first
    np.testing.assert_array_equal(edges(found, pool), LOOPS)


@pytest.mark.parametrize("early", [True, False])
def test_what_cannot_be_staged_leaves_nothing_behind(pool, early):
    found = inputs(pool, edge_index=np.full((2, EDGES), NODES))
    if early:
        found.stage_early()
        assert found.early_ns is None
    else:
        with pytest.raises(InvalidInput, match="edge_index"):
            found.stage()
    assert (found.staged, pool.used_bytes) == (None, 0)


def test_a_full_pool_has_inputs_wait_for_the_scheduler(pool):
    block = pool.allocate(pool.capacity_bytes)
    found = inputs(pool)
    found.stage_early()
    assert (found.early_ns, found.staged) == (None, None)
    pool.free(block)
    found.stage()
    assert found.staged is not None


def test_inputs_are_released_once(pool):
    found = inputs(pool)
    found.stage()
    found.release()
    found.release()
    assert pool.used_bytes == 0
    assert found.read_outputs((1, 1)) is None


def test_an_output_outlives_its_place(pool):
    found = inputs(pool)
    found.stage()
    pool.array(found.staged.output_offset_bytes, "float32", (NODES, 2))[:] = 7
    output = found.read_outputs((NODES, 2))["output"]
    pool.array(found.staged.output_offset_bytes, "float32", (NODES, 2))[:] = 0
    assert (output == 7).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros((0, 3), np.float32)}, "input 'x' has 0 nodes, which model 'm' cannot take"),
        ({"edge_index": np.zeros((2, 0), np.int64)}, "input 'edge_index' has 0 edges"),
    ],
)
def test_a_size_that_the_model_cannot_take_is_refused(pool, changed, message):
    with pytest.raises(InvalidInput, match=message):
        inputs(pool, accepts=False, **changed)
    inputs(pool, **changed)
