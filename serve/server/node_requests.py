"""A request by node id before its sample is drawn: fit, fan-outs, and expected size."""

import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np

from serve import native
from serve.core.types import Nanos, Sized, TaskEstimate
from serve.errors import InvalidInput
from serve.estimate.estimator import ModelEstimator
from serve.estimate.sampling import SampleProbe, SampleSizes
from serve.graphs.hot_set import HotSet
from serve.graphs.resident import ResidentGraph
from serve.graphs.snapshot import Snapshot
from serve.server import clock
from serve.server.catalogue import ModelEntry
from serve.server.graphs import GraphStore, check_fit

#: Fan-out of each of the first hops, and of later ones, where neither request nor model sets it.
#: GraphSAGE's 25 and 10 are for training; at inference ten times the neighbours gain little.
DEFAULT_FANOUT, DEFAULT_FANOUT_BEYOND, _FIRST_HOPS = 10, 5, 2
#: Probe samples: numbers of ids, samples of each, and the time limit for all of them.
_PROBED_IDS = (1, 8, 64, 512, 4096)
_PROBE_REPEATS = 5
_PROBE_LIMIT_NS = 150_000_000
#: Size models kept at most, one per graph and fan-outs; clients may send any fan-outs.
_MOST_SIZES = 64

Fanouts = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request by node id, checked as far as possible without its content."""

    graph: ResidentGraph
    fanouts: tuple[int, ...]
    num_ids: int
    #: Edges are staged as int32.
    narrow_edges: bool
    #: Belongs to the driver's lock.
    sizes: SampleSizes
    #: Lanes gather the features themselves.
    in_place: bool = False
    #: Counts the rows that lanes gather; None when devices keep no hot set of the graph.
    hot_set: HotSet | None = None

    def expected(self, estimator: ModelEstimator) -> Sized:
        """Return the size before sampling: time of a median sample, memory of a large one."""
        size = self.sizes.expected(self.num_ids)
        run_ns, solo_ns = estimator.times(size.num_nodes, size.num_edges)
        large = estimator.memory(
            size.num_nodes_high, size.num_edges_high, narrow_edges=self.narrow_edges
        )
        estimate = TaskEstimate(*large, run_ns, Nanos(solo_ns + size.prepare_ns))
        return Sized(size.num_nodes, size.num_edges, estimate)

    def exact(self, estimator: ModelEstimator, found: SampleProbe) -> Sized:
        """Return the size of the sample that was drawn, and learn from it."""
        self.sizes.observe(found)
        run_ns, solo_ns = estimator.times(found.num_nodes, found.num_edges)
        need = estimator.memory(
            found.num_nodes,
            found.num_edges,
            num_loops=found.num_loops,
            narrow_edges=self.narrow_edges,
        )
        estimate = TaskEstimate(*need, run_ns, Nanos(solo_ns + found.prepare_ns))
        return Sized(found.num_nodes, found.num_edges, estimate)


class NodeRequests:
    """Makes node requests, with a model of sample sizes for each graph and fan-outs. Any thread."""

    def __init__(self, graphs: GraphStore) -> None:
        self._graphs = graphs
        self._sizes: dict[tuple[str, tuple[int, ...]], SampleSizes] = {}
        self._probing = threading.Lock()

    def make(
        self, graph_name: str, num_ids: int, fanouts: Fanouts | None, entry: ModelEntry
    ) -> NodeRequest:
        """Check a request for `num_ids` nodes of a graph and find its expected sample sizes.

        `fanouts` as in ``InferCall``. Raises UnknownName, Mismatch or InvalidInput.
        """
        graph, tables = self._graphs.get(graph_name), self._graphs.tables
        check_fit(graph, entry)
        if num_ids == 0 and not entry.signature.accepts_empty:
            raise InvalidInput(
                f"input 'node_ids' has 0 ids, which model '{entry.spec.name}' cannot take"
            )
        resolved = resolve_fanouts(fanouts, entry)
        return NodeRequest(
            graph,
            resolved,
            num_ids,
            narrow_edges=entry.signature.narrow_edges and graph.snapshot.num_nodes < 2**31,
            sizes=self._sizes_of(graph, resolved),
            in_place=tables.gathered_by_lanes,
            hot_set=tables.hot_set(graph_name),
        )

    def warm(self, entry: ModelEntry) -> None:
        """Learn the sizes of the model's usual samples before the first request for one."""
        for name in self._graphs.fitting(entry):
            self._sizes_of(self._graphs.get(name), resolve_fanouts(None, entry))

    def _sizes_of(self, graph: ResidentGraph, fanouts: tuple[int, ...]) -> SampleSizes:
        """Return the size model of the graph's samples; the first use draws probe samples."""
        key = graph.name, fanouts
        snapshot = graph.snapshot
        found = self._sizes.get(key)
        if found is None:
            with self._probing:
                found = self._sizes.get(key)
                if found is None:
                    found = self._probed(graph, snapshot, fanouts)
                    while len(self._sizes) >= _MOST_SIZES:
                        self._sizes.pop(next(iter(self._sizes)), None)
                    self._sizes[key] = found
        # The graph may have changed since the sizes were learned.
        found.resized(snapshot.num_nodes, snapshot.num_edges)
        return found

    def _probed(
        self, graph: ResidentGraph, snapshot: Snapshot, fanouts: tuple[int, ...]
    ) -> SampleSizes:
        gathers = self._graphs.tables.gathered_by_host(graph)
        probes = _draw_probes(snapshot, fanouts, gathers=gathers)
        return SampleSizes(probes, snapshot.num_nodes, snapshot.num_edges)


def resolve_fanouts(asked: Fanouts | None, entry: ModelEntry) -> tuple[int, ...]:
    """Return the request's fan-outs, else the model's, else defaults for the hops it reads.

    Raises InvalidInput for `all` when the model reads any number of hops.
    """
    chosen = entry.spec.fanouts if asked is None else asked
    signature = entry.signature
    if chosen == "all":
        if signature.exact_hops is None:
            raise InvalidInput(
                f"parameter 'fanouts': model '{entry.spec.name}' looks any number of hops far, "
                "so 'all' has no end; give numbers"
            )
        return (native.ALL_NEIGHBOURS,) * signature.exact_hops
    if chosen is not None:
        return tuple(chosen)
    hops = _FIRST_HOPS if signature.hops is None else signature.hops
    first = min(hops, _FIRST_HOPS)
    return (DEFAULT_FANOUT,) * first + (DEFAULT_FANOUT_BEYOND,) * (hops - first)


def _draw_probes(
    snapshot: Snapshot, fanouts: tuple[int, ...], *, gathers: bool
) -> list[SampleProbe]:
    """Draw and time samples of growing numbers of random ids, until the time limit.

    With `gathers`, the time includes gathering their features.
    """
    rng = np.random.default_rng(snapshot.num_nodes)
    started_ns = clock.now_ns()
    probes: list[SampleProbe] = []
    for num_ids in _PROBED_IDS:
        for _ in range(_PROBE_REPEATS):
            ids = rng.integers(0, snapshot.num_nodes, num_ids)
            began_ns = clock.now_ns()
            sample = snapshot.sample(ids, fanouts, int(rng.integers(2**63)))
            nodes = np.empty(sample.num_nodes, np.int64)
            sample.write_nodes(nodes)
            if gathers:
                snapshot.features(nodes)
            took_ns = clock.now_ns() - began_ns
            probes.append(SampleProbe(num_ids, sample.num_nodes, sample.num_edges, took_ns))
        if clock.now_ns() - started_ns > _PROBE_LIMIT_NS or num_ids > snapshot.num_nodes:
            break
    return probes
