"""The inputs of a request by node id for a model that declares them: a sample, gathered by type."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.core.types import Sized, Task
from serve.errors import InvalidInput
from serve.estimate.sampling import SampleProbe
from serve.graphs.csr import Ids
from serve.graphs.typed import TypedSample, TypedSnapshot
from serve.ipc.messages import TensorRef
from serve.ipc.shared_pool import SharedPool
from serve.server import clock
from serve.server.api import InferCall
from serve.server.catalogue import ModelEntry
from serve.server.declared_inputs import output_bytes, output_refs
from serve.server.node_requests import TypedRequest
from serve.server.node_sampling import read_ids
from serve.server.request_inputs import SampledInputs
from serve.server.staging import Layout, Staged, plan_layout, take_block

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was drawn from one version of the graph, enough to draw it again."""

    snapshot: TypedSnapshot
    #: A copy of the request's ids: the client may overwrite its own memory.
    ids: Ids
    #: For each requested id, its local id.
    positions: Ids
    layout: Layout
    found: SampleProbe


class TypedInputs(SampledInputs):
    """The inputs of a request for nodes of one type of a resident graph."""

    def __init__(
        self, call: InferCall, entry: ModelEntry, pool: SharedPool, request: TypedRequest
    ) -> None:
        """Draw nothing yet; raises InvalidInput for an output without rows for the ids' type."""
        super().__init__(call, entry, pool)
        rows = request.fit.outputs[request.node_type]
        for name in call.wanted:
            if name not in rows:
                raise InvalidInput(
                    f"output '{name}' has no row for each id of '{request.node_type}'; "
                    f"{', '.join(rows)} has"
                )
        self._request = request
        self._drawn: _Drawn | None = None
        self._outputs: tuple[TensorRef, ...] = ()

    @property
    def layout(self) -> Layout | None:
        """See ``RequestInputs``."""
        return None if self._drawn is None else self._drawn.layout

    @property
    def graph_version(self) -> int:
        """See ``RequestInputs``."""
        return 0 if self._drawn is None else self._drawn.snapshot.version

    @property
    def output_refs(self) -> tuple[TensorRef, ...]:
        """See ``RequestInputs``."""
        return self._outputs

    def expected(self) -> Sized:
        """See ``RequestInputs``."""
        return self._request.expected(self.entry.estimator)

    def stage(self) -> bool:
        """Sample the neighbourhood and gather its features; see ``RequestInputs``."""
        if self._drawn is not None and self.staged is not None:
            # The sample is drawn again rather than kept, so requests that run once pay nothing.
            sample = self._sample(self._drawn.snapshot, self._drawn.ids)
            self._fill(self.staged, self._drawn.snapshot, sample)
            return False
        # The graph may change meanwhile: the request sees one version throughout.
        snapshot = self._request.snapshot
        node_type = self._request.node_type
        ids = read_ids(self.call, self._request.graph.name, snapshot.nodes[node_type].num_nodes)
        started_ns = clock.now_ns()
        sample = self._sample(snapshot, ids)
        interface, things = self._request.interface, self._request.fit.things
        counts = tuple(map(sample.count, things))
        if not interface.totals(counts)[1] and not self.entry.signature.accepts_edgeless:
            raise InvalidInput(
                "input 'node_ids': its nodes have no in-edges in graph "
                f"'{self._request.graph.name}', and model '{self.entry.spec.name}' cannot take a "
                "graph of 0 edges"
            )
        sizes = dict(zip(interface.counts, counts, strict=True))
        interface.graph_counts({}, sizes)
        given = self._request.fit.edges.keys() | self._request.fit.features.keys()
        layout = plan_layout(
            {s.name: s.shape_for(sizes) for s in interface.inputs if s.name in given},
            self.entry.spec.inputs,
            output_bytes(interface.outputs, sizes),
            dtypes={slot.name: slot.dtype for slot in interface.inputs},
        )
        # From here on the block is the request's.
        self.staged = staged = layout.at(take_block(self._pool, layout.size_bytes))
        self.network_ns = sample.network_ns + self._fill(staged, snapshot, sample)
        self._outputs = output_refs(interface.outputs, sizes, staged)
        took_ns = clock.now_ns() - started_ns
        found = SampleProbe(self._request.num_ids, counts, took_ns)
        self._drawn = _Drawn(snapshot, ids, sample.positions(), layout, found)
        return True

    def exact(self, task: Task) -> Sized:
        """See ``RequestInputs``; the estimates of sample sizes learn from it."""
        assert self._drawn is not None
        return self._request.exact(self.entry.estimator, self._drawn.found)

    def read_outputs(self, shape: tuple[int, int]) -> dict[str, _Array] | None:
        """Return the rows of the requested ids, in their order; see ``RequestInputs``."""
        if self.staged is None or self._drawn is None:
            return None
        wanted = self.call.wanted or self._request.fit.outputs[self._request.node_type]
        slots = {slot.name: slot for slot in self._request.interface.outputs}
        return {
            ref.name: self._pool.array(ref.offset_bytes, ref.dtype, ref.shape).take(
                self._drawn.positions, axis=slots[ref.name].symbol_axis
            )
            for ref in self._outputs
            if ref.name in wanted
        }

    def _sample(self, snapshot: TypedSnapshot, ids: Ids) -> TypedSample:
        """Return the sample: deterministic in snapshot, request and seed."""
        assert self.seed is not None
        request = self._request
        return snapshot.sample(request.node_type, ids, request.fanouts, self.seed & (2**64 - 1))

    def _fill(self, staged: Staged, snapshot: TypedSnapshot, sample: TypedSample) -> int:
        """Write the model's inputs to their places in the pool; return how long others took."""
        network_ns = 0
        fit = self._request.fit
        nodes = {of: sample.nodes(of) for of, _ in fit.features.values()}
        for ref in staged.inputs:
            target = self._pool.array(ref.offset_bytes, ref.dtype, ref.shape)
            if ref.name in fit.edges:
                sample.write_edges(fit.edges[ref.name], target)
            else:
                of, feature = fit.features[ref.name]
                network_ns += snapshot.nodes[of].columns[feature].gather(nodes[of], target)
        return network_ns
