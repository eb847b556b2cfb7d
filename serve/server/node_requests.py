"""A request by node id before its sample is drawn: fit, fan-outs, and expected size."""

import itertools
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from serve import native
from serve.core.types import Nanos, Sized, TaskEstimate
from serve.errors import InvalidInput
from serve.estimate.estimator import ModelEstimator
from serve.estimate.sampling import SampleProbe, SampleSizes
from serve.graphs.hot_set import HotSet
from serve.graphs.resident import ResidentGraph
from serve.graphs.snapshot import Snapshot
from serve.graphs.typed import TypedSnapshot
from serve.graphs.typed_updates import TypedGraph
from serve.interface import Interface
from serve.server import clock
from serve.server.api import Fanouts
from serve.server.catalogue import ModelEntry
from serve.server.graphs import GraphStore, check_fit, typed_snapshot
from serve.server.typed_fit import TypedFit, fit

#: Fan-out of each of the first hops, and of later ones, where neither request nor model sets it.
#: GraphSAGE's 25 and 10 are for training; at inference ten times the neighbours gain little.
DEFAULT_FANOUT, DEFAULT_FANOUT_BEYOND, _FIRST_HOPS = 10, 5, 2
#: Probe samples: numbers of ids, samples of each, and the time limit for all of them.
_PROBED_IDS = (1, 8, 64, 512, 4096)
_PROBE_REPEATS = 5
_PROBE_LIMIT_NS = 150_000_000
#: Size models kept at most, one per graph and fan-outs; clients may send any fan-outs. Those that
#: are in use stay.
_MOST_SIZES = 64
#: Stands for all types of edges that have no fan-outs of their own.
OTHERS = "*"


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """A request by node id, checked as far as possible without its content."""

    num_ids: int
    #: Edges are staged as int32.
    narrow_edges: bool
    #: Belongs to the driver's lock.
    sizes: SampleSizes

    def expected(self, estimator: ModelEstimator) -> Sized:
        """Return the size before sampling: time of a median sample, memory of a large one."""
        size = self.sizes.expected(self.num_ids)
        run_ns, solo_ns = estimator.times(*size.counts)
        large = estimator.memory(*size.counts_high, narrow_edges=self.narrow_edges)
        estimate = TaskEstimate(*large, run_ns, Nanos(solo_ns + size.prepare_ns))
        return Sized(size.num_nodes, size.num_edges, estimate, self.told(size.counts))

    def exact(self, estimator: ModelEstimator, found: SampleProbe) -> Sized:
        """Return the size of the sample that was drawn, and learn from it."""
        self.sizes.observe(found)
        run_ns, solo_ns = estimator.times(*found.counts)
        need = estimator.memory(
            *found.counts, num_loops=found.num_loops, narrow_edges=self.narrow_edges
        )
        estimate = TaskEstimate(*need, run_ns, Nanos(solo_ns + found.prepare_ns))
        return Sized(*self.totals(found.counts), estimate, self.told(found.counts))

    def totals(self, counts: tuple[int, ...]) -> tuple[int, int]:
        """Return all nodes and all edges among the counts."""
        num_nodes, num_edges = counts
        return num_nodes, num_edges

    def told(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return what the task's size says beside its totals."""
        return ()


@dataclass(frozen=True, slots=True)
class NodeRequest(SampledRequest):
    """A request for a model of the short form, which takes a graph with one type of nodes."""

    graph: ResidentGraph
    fanouts: tuple[int, ...]
    #: Lanes gather the features themselves.
    in_place: bool = False
    #: Counts the rows that lanes gather; None when devices keep no hot set of the graph.
    hot_set: HotSet | None = None


@dataclass(frozen=True, slots=True)
class TypedRequest(SampledRequest):
    """A request for a model that declares its inputs."""

    graph: ResidentGraph | TypedGraph
    interface: Interface
    fit: TypedFit
    #: Type of the ids.
    node_type: str
    #: By edge type.
    fanouts: Mapping[str, tuple[int, ...]]

    @property
    def snapshot(self) -> TypedSnapshot:
        """The graph's newest version."""
        return typed_snapshot(self.graph)

    def totals(self, counts: tuple[int, ...]) -> tuple[int, int]:
        """See ``SampledRequest``."""
        return self.interface.totals(counts)

    def told(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """See ``SampledRequest``."""
        return counts


@dataclass(slots=True)
class _Learned:
    """Sample sizes, and when they were used last: a number that grows."""

    sizes: SampleSizes
    used: int = -1


class NodeRequests:
    """Makes node requests, with a model of sample sizes for each graph and fan-outs. Any thread."""

    def __init__(self, graphs: GraphStore) -> None:
        self._graphs = graphs
        self._sizes: dict[tuple[Hashable, ...], _Learned] = {}
        self._uses = itertools.count()
        self._probing = threading.Lock()

    @property
    def part(self) -> int | None:
        """Part that is here of graphs that are shared out; None where none are."""
        return self._graphs.part

    def make(
        self,
        graph_name: str,
        num_ids: int,
        fanouts: Fanouts | None,
        entry: ModelEntry,
        node_type: str | None = "",
        *,
        at_home: bool = False,
    ) -> NodeRequest | TypedRequest:
        """Check a request for `num_ids` nodes of a graph and find its expected sample sizes.

        `fanouts` as in ``InferCall``. `node_type` is the type of the ids, empty in a graph with
        one; None for the only one that the model can be asked about. `at_home` tells that they all
        live here, so that less is elsewhere than of others. Raises UnknownName, Mismatch
        or InvalidInput.
        """
        graph = self._graphs.get(graph_name)
        if entry.spec.interface is not None or isinstance(graph, TypedGraph):
            return self._typed(graph, num_ids, fanouts, entry, node_type)
        tables = self._graphs.tables
        check_fit(graph, entry)
        _check_type(graph_name, ("",), node_type or "")
        _check_number(num_ids, entry)
        resolved = resolve_fanouts(fanouts, entry)
        snapshot = graph.snapshot

        def probes() -> SampleSizes:
            gathers = tables.gathered_by_host(graph)
            drawn = draw_probes(
                lambda ids, seed: _prepare(snapshot, ids, resolved, seed, gathers=gathers),
                snapshot.num_nodes,
            )
            return SampleSizes(drawn, (snapshot.num_nodes, snapshot.num_edges))

        sizes = self._sizes_of((graph_name, resolved, at_home), probes)
        # The graph may have changed since the sizes were learned.
        sizes.resized(snapshot.num_nodes, snapshot.num_edges)
        narrow_edges = entry.signature.narrow_edges and snapshot.num_nodes < 2**31
        return NodeRequest(
            num_ids,
            narrow_edges,
            sizes,
            graph,
            resolved,
            in_place=tables.gathered_by_lanes,
            hot_set=tables.hot_set(graph_name),
        )

    def _typed(
        self,
        graph: ResidentGraph | TypedGraph,
        num_ids: int,
        fanouts: Fanouts | None,
        entry: ModelEntry,
        node_type: str | None,
    ) -> TypedRequest:
        snapshot = typed_snapshot(graph)
        found = fit(graph.name, snapshot, entry)
        interface = entry.spec.interface
        assert interface is not None
        if node_type is None and len(found.outputs) == 1:
            (node_type,) = found.outputs
        node_type = node_type or ""
        _check_type(graph.name, tuple(snapshot.nodes), node_type)
        if node_type not in found.outputs:
            raise InvalidInput(
                f"input 'node_ids.{node_type}': model '{entry.spec.name}' has outputs for nodes of"
                f" {', '.join(found.outputs)}"
            )
        _check_number(num_ids, entry)
        per_edges = resolve_typed_fanouts(fanouts, entry, tuple(found.edges.values()))
        key = graph.name, node_type, found.things, tuple(per_edges.items())
        limits = tuple(map(snapshot.count, found.things))

        def probes() -> SampleSizes:
            drawn = draw_probes(
                lambda ids, seed: _prepare_typed(snapshot, found, node_type, ids, per_edges, seed),
                snapshot.nodes[node_type].num_nodes,
            )
            nodes = len(interface.nodes)
            asked = found.things.index(node_type)
            return SampleSizes(drawn, limits, kinds_of_nodes=nodes, asked=asked)

        sizes = self._sizes_of(key, probes)
        sizes.resized(*limits)
        return TypedRequest(num_ids, False, sizes, graph, interface, found, node_type, per_edges)

    def warm(self, entry: ModelEntry) -> None:
        """Learn the sizes of the model's usual samples before the first request for one."""
        for name, node_types in self._graphs.fitting(entry).items():
            for node_type in node_types:
                self.make(name, 1, None, entry, node_type)

    def _sizes_of(
        self, key: tuple[Hashable, ...], probes: Callable[[], SampleSizes]
    ) -> SampleSizes:
        """Return the size model of that key; the first use draws probe samples."""
        found = self._sizes.get(key)
        if found is None:
            with self._probing:
                found = self._sizes.get(key)
                if found is None:
                    found = _Learned(probes())
                    while len(self._sizes) >= _MOST_SIZES:
                        # Not the oldest: usual fan-outs are known from the start.
                        del self._sizes[min(self._sizes, key=lambda one: self._sizes[one].used)]
                    self._sizes[key] = found
        found.used = next(self._uses)
        return found.sizes


def _check_type(graph: str, known: tuple[str, ...], node_type: str) -> None:
    """Raise InvalidInput unless the graph has nodes of that type; empty in a graph with one."""
    if node_type in known:
        return
    if known == ("",):
        raise InvalidInput(
            f"input 'node_ids.{node_type}': graph '{graph}' has one type of nodes; give 'node_ids'"
        )
    names = ", ".join(f"'node_ids.{name}'" for name in known)
    told = f"input 'node_ids.{node_type}'" if node_type else "input 'node_ids'"
    raise InvalidInput(f"{told}: graph '{graph}' has several types of nodes; give one of {names}")


def _check_number(num_ids: int, entry: ModelEntry) -> None:
    """Raise InvalidInput for a request for no node, where the model cannot take an empty graph."""
    if num_ids == 0 and not entry.signature.accepts_empty:
        raise InvalidInput(
            f"input 'node_ids' has 0 ids, which model '{entry.spec.name}' cannot take"
        )


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
    if isinstance(chosen, Mapping):
        raise InvalidInput(
            "parameter 'fanouts': it is given by type of edges, and the graph has one type"
        )
    return _default_fanouts(entry) if chosen is None else tuple(chosen)


def resolve_typed_fanouts(
    asked: Fanouts | None, entry: ModelEntry, edge_types: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the fan-outs for each of the edge types; see ``resolve_fanouts``.

    Raises InvalidInput for a type of edges that has none, and for numbers of hops that differ.
    """
    chosen = entry.spec.fanouts if asked is None else asked
    if not isinstance(chosen, Mapping):
        return dict.fromkeys(edge_types, resolve_fanouts(asked, entry))
    told = "parameter 'fanouts'"
    for name in chosen:
        if name != OTHERS and name not in edge_types:
            raise InvalidInput(
                f"{told}: model '{entry.spec.name}' takes no edges '{name}'; it takes"
                f" {', '.join(edge_types)}"
            )
    for name in edge_types:
        if name not in chosen and OTHERS not in chosen:
            raise InvalidInput(f"{told}: there are none for '{name}', nor for '{OTHERS}'")
    hops = {len(each) for each in chosen.values()}
    if len(hops) > 1:
        raise InvalidInput(f"{told}: types of edges have {sorted(hops)} hops; give as many for all")
    return {name: tuple(chosen.get(name, chosen.get(OTHERS, ()))) for name in edge_types}


def _default_fanouts(entry: ModelEntry) -> tuple[int, ...]:
    signature = entry.signature
    hops = _FIRST_HOPS if signature.hops is None else signature.hops
    first = min(hops, _FIRST_HOPS)
    return (DEFAULT_FANOUT,) * first + (DEFAULT_FANOUT_BEYOND,) * (hops - first)


def draw_probes(
    prepare: Callable[[np.ndarray, int], tuple[tuple[int, ...], int]], num_nodes: int
) -> list[SampleProbe]:
    """Draw and time samples of growing numbers of random ids, until the time limit.

    `prepare` samples for ids below `num_nodes` with a seed. It returns the counts, and what other
    servers would take, in ns.
    """
    rng = np.random.default_rng(num_nodes)
    started_ns = clock.now_ns()
    probes: list[SampleProbe] = []
    for num_ids in _PROBED_IDS:
        for _ in range(_PROBE_REPEATS):
            ids = rng.integers(0, num_nodes, num_ids if num_nodes else 0)
            began_ns = clock.now_ns()
            counts, network_ns = prepare(ids, int(rng.integers(2**63)))
            took_ns = clock.now_ns() - began_ns + network_ns
            probes.append(SampleProbe(num_ids, counts, took_ns))
        if clock.now_ns() - started_ns > _PROBE_LIMIT_NS or num_ids > num_nodes:
            break
    return probes


def _prepare(
    snapshot: Snapshot, ids: np.ndarray, fanouts: tuple[int, ...], seed: int, *, gathers: bool
) -> tuple[tuple[int, int], int]:
    """Sample, and with `gathers` gather the features; see ``draw_probes``."""
    sample, network_ns = snapshot.rehearsed(ids, fanouts, seed)
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    if gathers:
        features = np.empty((nodes.size, snapshot.num_features), np.float32)
        network_ns += snapshot.column.rehearse(nodes, features)
    return (sample.num_nodes, sample.num_edges), network_ns


def _prepare_typed(
    snapshot: TypedSnapshot,
    found: TypedFit,
    node_type: str,
    ids: np.ndarray,
    fanouts: Mapping[str, tuple[int, ...]],
    seed: int,
) -> tuple[tuple[int, ...], int]:
    """Sample and gather the features; see ``draw_probes``."""
    sample = snapshot.sample(node_type, ids, fanouts, seed, rehearse=True)
    network_ns = sample.network_ns
    for of, name in found.features.values():
        nodes = sample.nodes(of)
        column = snapshot.nodes[of].columns[name]
        target = np.empty((nodes.size, *column.shape), column.dtype)
        network_ns += column.rehearse(nodes, target)
    return tuple(map(sample.count, found.things)), network_ns
