"""The inputs of one request in the shared pool, from the moment it is sized until it is answered.

A request brings its graph (`TensorInputs`; `StagedInputs` where the front has staged it) or names
nodes of a resident one (`NodeInputs`). All are sized, staged, staged again when a run is repeated,
and given back in the same way.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from msgspec.structs import replace

from serve.core.types import Nanos, Sized, Task, TaskEstimate
from serve.errors import InvalidInput, NotReady, QueueFull
from serve.estimate.estimator import NARROW_EDGE_SPARES_BYTES
from serve.graphs.shared_column import graph_state
from serve.interface import KindCounts
from serve.ipc.messages import TensorRef
from serve.ipc.shared_pool import Block, SharedPool
from serve.native import PlainRequest
from serve.server import clock
from serve.server.api import OUTPUT, InferCall
from serve.server.catalogue import ModelEntry
from serve.server.graphs_told import graphs_staged, graphs_told
from serve.server.joint_block import JointBlock
from serve.server.node_requests import NodeRequest
from serve.server.node_sampling import PreparedNodes, derived_seed, prepare_nodes, stage_again
from serve.server.staging import Layout, Staged, count_loops, plan_layout, stage, take_block

_Output = np.ndarray[Any, np.dtype[Any]]


class RequestInputs(ABC):
    """A request's input tensors and the place of its output."""

    def __init__(self, call: InferCall, entry: ModelEntry, pool: SharedPool) -> None:
        """Stage nothing yet."""
        self.call = call
        self.entry = entry
        #: Places of the tensors; None until they are staged.
        self.staged: Staged | None = None
        #: Self-loops among the edges; None until they are counted, or where none are counted.
        self.num_loops: int | None = None
        #: Things of each kind; None like the self-loops.
        self.by_kind: KindCounts | None = None
        #: Seed that neighbours are sampled with; None for a request that brings its graph.
        self.seed: int | None = None
        #: How long other servers took to give features that are not here, while it was staged.
        self.network_ns = 0
        #: When staging began; None unless the inputs were staged before the task was made.
        self.early_ns: Nanos | None = None
        self._pool = pool

    @abstractmethod
    def expected(self) -> Sized:
        """Return the size and estimate to admit the request with. Under the driver's lock."""

    @abstractmethod
    def stage(self) -> bool:
        """Lay the inputs out in the pool, and return True when the exact size is known now.

        A task that runs again is staged again in the same place, since its model may have worked
        in place. Runs in the request's own thread. Raises InvalidInput for content that the model
        cannot take, QueueFull when the pool has no room, and NotReady when another server did not
        give the features that it holds.
        """

    @abstractmethod
    def exact(self, task: Task) -> Sized:
        """Return the size and estimate of staged inputs. Under the driver's lock."""

    @property
    @abstractmethod
    def layout(self) -> Layout | None:
        """Layout as if all inputs were in the pool; None until it is known."""

    @property
    def graph_version(self) -> int:
        """Version of the resident graph that was sampled; 0 when none was."""
        return 0

    @property
    def graph_state(self) -> str:
        """See ``shared_column.graph_state``; empty when no resident graph was sampled."""
        return ""

    @abstractmethod
    def take_uid(self, request_uid: str) -> None:
        """Derive the seed from the request's id, where one is needed and the client gave none."""

    @abstractmethod
    def stage_early(self) -> None:
        """Stage before the scheduler hears of the request, if that is possible now.

        An error waits: the scheduler may refuse the request first, and otherwise has it staged
        later, which meets the same error.
        """

    @property
    def output_refs(self) -> tuple[TensorRef, ...]:
        """Places of the outputs that a model declares; empty for a model that has one by rows."""
        return ()

    @property
    def input_bytes(self) -> int:
        """Size of the staged inputs."""
        return 0 if self.layout is None else self.layout.input_bytes

    @property
    def output_capacity_bytes(self) -> int:
        """Size of the output's place."""
        return 0 if self.staged is None else self.staged.output_capacity_bytes

    def spared_bytes(self, num_edges: int) -> int:
        """Return the bytes that int32 edges save against the int64 edges of estimates."""
        if self.layout is None or not self.layout.narrow_edges:
            return 0
        return NARROW_EDGE_SPARES_BYTES * num_edges

    def output_places(self, shape: tuple[int, int]) -> tuple[TensorRef, ...]:
        """Return the place of each output that the client wants: of declared ones, or of `shape`.

        The inputs are staged.
        """
        assert self.staged is not None
        if not self.output_refs:
            return (TensorRef(OUTPUT, "float32", shape, self.staged.output_offset_bytes),)
        wanted = self.call.wanted
        return tuple(ref for ref in self.output_refs if not wanted or ref.name in wanted)

    def read_outputs(self, shape: tuple[int, int]) -> dict[str, _Output] | None:
        """Return a copy of each output by name, see ``output_places``; None when not staged."""
        if self.staged is None:
            return None
        return {
            ref.name: self._answer(self._pool.array(ref.offset_bytes, ref.dtype, ref.shape))
            for ref in self.output_places(shape)
        }

    def release(self) -> None:
        """Give the pool its block back. Idempotent."""
        staged, self.staged = self.staged, None
        if staged is not None:
            self._pool.free(staged.block)

    def _answer(self, output: _Output) -> _Output:
        return output.copy()


class SentInputs(RequestInputs):
    """The inputs of a request that brings its tensors."""

    #: Where other models' tasks of a joint request stage too; None for a block of its own.
    joint: JointBlock | None = None
    #: Nodes and edges, of a model of the short form.
    _size: tuple[int, int]
    #: What they go on with, where the sizes of graphs decide; see ``GraphTerms``.
    _of_graphs: tuple[int, ...] = ()

    def take_uid(self, request_uid: str) -> None:
        """Do nothing: no part of the request is drawn at random."""

    def stage_early(self) -> None:
        """See ``RequestInputs``."""
        started_ns = clock.now_ns()
        try:
            self.stage()
        except (InvalidInput, QueueFull):
            return
        self.early_ns = started_ns

    def _sized(self, estimate: TaskEstimate) -> Sized:
        counts = self._size + self._of_graphs if self._of_graphs else ()
        return Sized(*self._size, estimate, counts)

    def _take_block(self, layout: Layout) -> Block:
        """Return the block to stage in; raises QueueFull."""
        if self.staged is not None:
            return self.staged.block
        return (
            take_block(self._pool, layout.size_bytes) if self.joint is None else self.joint.take()
        )

    def _drop_block(self, block: Block) -> None:
        """Give up a block in which staging failed."""
        if self.staged is None and self.joint is None:
            self._pool.free(block)

    def release(self) -> None:
        """See ``RequestInputs``."""
        if self.joint is None:
            super().release()
            return
        self.staged = None
        joint, self.joint = self.joint, None
        joint.leave()


class LaidOutInputs(SentInputs):
    """The inputs of a request whose tensors tell their layout."""

    _layout: Layout

    @property
    def layout(self) -> Layout:
        """See ``RequestInputs``."""
        return self._layout

    def join(self, joint: JointBlock) -> None:
        """Stage in a block that other models' tasks share."""
        self.joint = joint
        self._layout = joint.plan(self._layout)


class TensorInputs(LaidOutInputs):
    """The inputs of a request that brings its graph."""

    def __init__(
        self, call: InferCall, entry: ModelEntry, pool: SharedPool, *, check_finite: bool
    ) -> None:
        """Size the request and plan its layout.

        Raises InvalidInput for a graph without nodes or edges that the model cannot take.
        """
        super().__init__(call, entry, pool)
        self._check_finite = check_finite
        self._size = _checked_size(call, entry)
        self._of_graphs = graphs_told(call, entry, self._size)
        edges = call.tensors.get("edge_index")
        is_int32 = edges is not None and edges.datatype == "INT32"
        self._layout = plan_layout(
            {name: tensor.shape for name, tensor in call.tensors.items()},
            entry.spec.inputs,
            entry.estimator.output_bytes(*self._size),
            narrow_edges=is_int32 and entry.signature.narrow_edges,
        )

    def expected(self) -> Sized:
        """See ``RequestInputs``."""
        estimate = self.entry.estimator.estimate(
            *self._size,
            *self._of_graphs,
            num_loops=self.num_loops,
            narrow_edges=self._layout.narrow_edges,
        )
        return self._sized(estimate)

    def stage(self) -> bool:
        """See ``RequestInputs``."""
        block = self._take_block(self._layout)
        try:
            staged = stage(
                self.call,
                self._layout,
                self._pool,
                block,
                check_finite=self._check_finite,
                sorted_batch=self.entry.signature.needs_sorted_batch,
                staged_before=set() if self.joint is None else self.joint.staged,
            )
        except BaseException:
            self._drop_block(block)
            raise
        self.staged = replace(staged, is_shared=self.joint is not None)
        if self.num_loops is not None or not self.entry.estimator.counts_loops:
            return False
        self.num_loops = count_loops(staged, self._pool)
        return True

    def exact(self, task: Task) -> Sized:
        """Return the task's size with its memory corrected by the self-loops counted."""
        peak_bytes, reserve_bytes = self.entry.estimator.memory(
            *self._size,
            *self._of_graphs,
            num_loops=self.num_loops,
            narrow_edges=self._layout.narrow_edges,
        )
        estimate = replace(task.estimate, peak_bytes=peak_bytes, reserve_bytes=reserve_bytes)
        return self._sized(estimate)


class StagedInputs(SentInputs):
    """The inputs of a request that brings its graph, which the front has checked and staged."""

    def __init__(
        self, call: InferCall, entry: ModelEntry, pool: SharedPool, request: PlainRequest
    ) -> None:
        """`request` is staged in `pool`; this owns its block from now on."""
        super().__init__(call, entry, pool)
        self.request = request
        self.num_loops = request.num_loops
        self.early_ns = Nanos(call.arrived_ns)
        # A model without edges counts none.
        self._size = (request.counts[0], sum(request.counts[1:2]))
        self._of_graphs = graphs_staged(request, entry, self._size)
        inputs = tuple(TensorRef(*place) for place in request.tensors)
        output_offset_bytes = request.output_offset_bytes
        start_bytes = inputs[0].offset_bytes
        self._input_bytes = output_offset_bytes - start_bytes
        self.staged = Staged(
            Block(start_bytes, request.block_bytes),
            inputs,
            output_offset_bytes,
            request.output_capacity_bytes,
        )

    @property
    def layout(self) -> None:
        """None: the front has laid it out."""

    @property
    def input_bytes(self) -> int:
        """See ``RequestInputs``."""
        return self._input_bytes

    def spared_bytes(self, num_edges: int) -> int:
        """See ``RequestInputs``."""
        return NARROW_EDGE_SPARES_BYTES * num_edges if self.request.narrow_edges else 0

    def expected(self) -> Sized:
        """See ``RequestInputs``."""
        estimate = self.entry.estimator.estimate(
            *self._size,
            *self._of_graphs,
            num_loops=self.num_loops,
            narrow_edges=self.request.narrow_edges,
        )
        return self._sized(estimate)

    def stage(self) -> bool:
        """See ``RequestInputs``; here it is always again.

        Raises NotReady when a model has overwritten the inputs of a message too large to be kept.
        """
        if not self.request.stage():
            raise NotReady(
                f"a run of model '{self.call.model}' did not end and has overwritten its inputs, "
                "which the server does not keep for a message of this size; send it again"
            )
        return False

    def exact(self, task: Task) -> Sized:
        """Return the size that was expected, which is exact."""
        return self._sized(task.estimate)

    def stage_early(self) -> None:
        """Do nothing: it is staged."""

    def release(self) -> None:
        """See ``RequestInputs``; the block stays while the answer is sent from it."""
        self.staged = None
        self.request.release()


class SampledInputs(RequestInputs):
    """The inputs of a request by node id."""

    def __init__(self, call: InferCall, entry: ModelEntry, pool: SharedPool) -> None:
        """Draw nothing yet."""
        super().__init__(call, entry, pool)
        self.seed = call.seed

    def take_uid(self, request_uid: str) -> None:
        """See ``RequestInputs``."""
        if self.seed is None:
            self.seed = derived_seed(request_uid)

    def stage_early(self) -> None:
        """Do nothing: the scheduler decides when to sample."""


class NodeInputs(SampledInputs):
    """The inputs of a request for a model of the short form: a sample of a resident graph."""

    def __init__(
        self, call: InferCall, entry: ModelEntry, pool: SharedPool, request: NodeRequest
    ) -> None:
        """Draw nothing yet."""
        super().__init__(call, entry, pool)
        self._request = request
        self._sample: PreparedNodes | None = None

    @property
    def layout(self) -> Layout | None:
        """See ``RequestInputs``."""
        return None if self._sample is None else self._sample.layout

    @property
    def graph_version(self) -> int:
        """See ``RequestInputs``."""
        return 0 if self._sample is None else self._sample.snapshot.version

    @property
    def graph_state(self) -> str:
        """See ``RequestInputs``."""
        if self._sample is None:
            return ""
        return graph_state(self._sample.snapshot.version, self._sample.snapshot.column)

    def expected(self) -> Sized:
        """See ``RequestInputs``."""
        return self._request.expected(self.entry.estimator)

    def stage(self) -> bool:
        """Sample the neighbourhood and gather its features; see ``RequestInputs``."""
        assert self.seed is not None
        if self._sample is not None:
            stage_again(self._sample, self._request, self.seed, self._pool)
            return False
        self._sample = prepare_nodes(self._request, self.call, self.entry, self.seed, self._pool)
        self.staged = self._sample.staged
        self.network_ns = self._sample.network_ns
        self.num_loops = self._sample.found.num_loops
        return True

    def exact(self, task: Task) -> Sized:
        """See ``RequestInputs``; the estimates of sample sizes learn from it."""
        assert self._sample is not None
        return self._request.exact(self.entry.estimator, self._sample.found)

    def _answer(self, output: _Output) -> _Output:
        """Return the rows of the ids that were asked for, in their order."""
        assert self._sample is not None
        rows: _Output = output[self._sample.positions]
        return rows


def _checked_size(call: InferCall, entry: ModelEntry) -> tuple[int, int]:
    """Return (nodes, edges) of a request that the model can take; raises InvalidInput."""
    edges = call.tensors.get("edge_index")
    num_nodes = call.tensors["x"].shape[0]
    num_edges = 0 if edges is None else edges.shape[1]
    if num_nodes == 0 and not entry.signature.accepts_empty:
        raise InvalidInput(f"input 'x' has 0 nodes, which model '{call.model}' cannot take")
    if num_edges == 0 and not entry.signature.accepts_edgeless:
        raise InvalidInput(
            f"input 'edge_index' has 0 edges, which model '{call.model}' cannot take"
        )
    return num_nodes, num_edges
