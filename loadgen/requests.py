"""What requests hold: a subgraph each, or ids of nodes of a graph that the server holds."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loadgen.inputs import Shapes, make_tensors, takes_edges
from serve.errors import ConfigError
from serve.graphs.pool import GraphPool
from serve.payloads import Payloads
from serve.recording import RecordedRequest
from serve.typed_names import typed_name
from serve.wire.messages import ParameterValue, encode_request, encode_wire_request
from serve.workload import TASKS_PER_LIST, GraphRef, ResidentSpec, TraceItem, WorkloadTask


class RequestSource(Protocol):
    """What makes the requests of a run."""

    @property
    def refs(self) -> tuple[GraphRef, ...]:
        """What tasks may ask about."""
        ...

    @property
    def sources(self) -> dict[str, str]:
        """Origin of each graph."""
        ...

    def solo_s(self, task: WorkloadTask) -> float:
        """Return the server's estimate of the task's solo time, in seconds."""
        ...

    def message(self, item: TraceItem) -> bytes:
        """Encode one request; raises ConfigError for an item of another source."""
        ...


@dataclass(frozen=True, slots=True)
class SubgraphRequests:
    """Requests that bring a graph of a pool, with random features."""

    pool: GraphPool
    #: Inputs of each model.
    inputs: Mapping[str, Shapes]
    #: Estimates a request by model, nodes and edges.
    estimate_s: Callable[[str, int, int], float]

    @property
    def refs(self) -> tuple[GraphRef, ...]:
        """All graphs of the pool."""
        return self.pool.refs

    @property
    def sources(self) -> dict[str, str]:
        """File or generator of each dataset."""
        return self.pool.sources

    def solo_s(self, task: WorkloadTask) -> float:
        """Return the server's estimate of the task's solo time, in seconds."""
        edges = task.graph.num_edges if takes_edges(self.inputs[task.model]) else 0
        return self.estimate_s(task.model, task.graph.num_nodes, edges)

    def message(self, item: TraceItem) -> bytes:
        """Encode a graph, random features seeded by the graph, and the target if set."""
        rng = np.random.default_rng(
            [self.pool.spec.seed, zlib.crc32(item.dataset.encode()), item.index]
        )
        shapes = self.inputs[item.model]
        tensors = make_tensors(shapes, item.num_nodes, self.pool.edges(item.graph), rng)
        return encode_request(item.model, tensors, parameters=parameters_of(item))


@dataclass(frozen=True, slots=True)
class ResidentRequests:
    """Requests for random nodes of a graph that the server holds; some ids may come twice."""

    spec: ResidentSpec
    #: Where the server has the graph from.
    origin: str
    #: Estimates a request by model and number of ids.
    estimate_s: Callable[[str, int], float]

    @property
    def refs(self) -> tuple[GraphRef, ...]:
        """Lists of ids, whose numbers are evenly spread from the fewest to the most."""
        spec = self.spec
        numbers = np.linspace(spec.min_ids, spec.max_ids, TASKS_PER_LIST).round().astype(int)
        return tuple(GraphRef(spec.graph, i, int(k), 0) for i, k in enumerate(numbers))

    @property
    def sources(self) -> dict[str, str]:
        """Origin of the graph."""
        return {self.spec.graph: self.origin}

    def solo_s(self, task: WorkloadTask) -> float:
        """Return the server's estimate of the task's solo time, in seconds."""
        return self.estimate_s(task.model, task.graph.num_nodes)

    def message(self, item: TraceItem) -> bytes:
        """Encode random ids, and a seed, so that equal requests get equal samples."""
        spec = self.spec
        if item.dataset not in (spec.graph, spec.key) or item.index < 0:
            raise ConfigError(
                f"graph {item.dataset}/{item.index}: the trace is for nodes of '{spec.graph}'"
            )
        rng = np.random.default_rng([spec.seed, item.index])
        assert spec.num_nodes is not None  # the plan has asked the server
        ids = rng.integers(0, spec.num_nodes, item.num_nodes)
        parameters = parameters_of(item) | {"graph": spec.graph, "seed": item.index}
        if spec.fanouts:
            parameters["fanouts"] = spec.fanouts
        name = typed_name("node_ids", spec.node_type)
        return encode_request(item.model, {name: ids}, parameters=parameters)


@dataclass(frozen=True, slots=True)
class MixedRequests:
    """Requests of a recording: some for nodes of graphs of the server, others with their own."""

    #: By the dataset of an item.
    residents: Mapping[str, RequestSource]
    brought: RequestSource

    @property
    def refs(self) -> tuple[GraphRef, ...]:
        """Nothing: a recording has its own items."""
        return ()

    @property
    def sources(self) -> dict[str, str]:
        """Origin of each graph."""
        all_of = (*self.residents.values(), self.brought)
        return {name: origin for one in all_of for name, origin in one.sources.items()}

    def solo_s(self, task: WorkloadTask) -> float:
        """Return the server's estimate of the task's solo time, in seconds."""
        return self.residents.get(task.graph.dataset, self.brought).solo_s(task)

    def message(self, item: TraceItem) -> bytes:
        """Encode one request."""
        return self.residents.get(item.dataset, self.brought).message(item)


@dataclass(frozen=True, slots=True)
class PayloadRequests:
    """Requests of a recording with the tensors they had; those without any are made as others."""

    payloads: Payloads
    #: The recorded requests; the seed of an item is its place among them.
    recorded: Sequence[RecordedRequest]
    #: None where every request has its tensors.
    made: RequestSource | None

    @property
    def refs(self) -> tuple[GraphRef, ...]:
        """Nothing: a recording has its own items."""
        return ()

    @property
    def sources(self) -> dict[str, str]:
        """Origin of each graph."""
        return {} if self.made is None else self.made.sources

    def solo_s(self, task: WorkloadTask) -> float:
        """Raise ConfigError: a recording has its own times, not those of an offered load."""
        raise ConfigError("a recording has its own send times: give no rho with it")

    def payload(self, item: TraceItem) -> tuple[int, int] | None:
        """Return what equal payloads have in common; None for an item without one."""
        return self.payloads.places.get(self.recorded[item.seed].uid)

    def message(self, item: TraceItem) -> bytes:
        """Encode one request; raises ConfigError for a payload that cannot be read."""
        if self.payload(item) is None:
            assert self.made is not None
            return self.made.message(item)
        one = self.recorded[item.seed]
        parameters = parameters_of(item)
        if one.graph:
            parameters["graph"] = one.graph
            if one.seed is not None:
                parameters["seed"] = one.seed
            if one.fanouts:
                parameters["fanouts"] = one.fanouts
        request = self.payloads.request(one.uid)
        return encode_wire_request(request._replace(parameters=parameters))


def parameters_of(item: TraceItem) -> dict[str, ParameterValue]:
    """Return target, tenant and priority, each where the item has it."""
    found: dict[str, ParameterValue] = {}
    if item.qos_target_us is not None:
        found["qos_target_us"] = item.qos_target_us
    if item.tenant:
        found["tenant"] = item.tenant
    if item.priority:
        found["priority"] = item.priority
    return found
