"""Resident graphs at work: which are held, how requests for their nodes are sized and prepared.

The main process holds each graph once. Sampling and gathering run in the thread that serves the
request, without the interpreter lock, while lanes run other requests.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from serve import native
from serve.config import Config, GraphConfig
from serve.core.types import Estimate, Nanos, Sized
from serve.errors import ConfigError, InvalidInput, Mismatch, NotReady, TooBig, UnknownName
from serve.estimate.estimator import ModelEstimator
from serve.estimate.sampling import SampleProbe, SampleSizes
from serve.graphs.features import memory_file
from serve.graphs.hot_rows import HotSet, share_memory
from serve.graphs.load import OpenOptions, Parts, held, open_dataset, open_graph
from serve.graphs.resident import ResidentGraph
from serve.graphs.snapshot import Snapshot
from serve.graphs.updates import Change
from serve.inputs import INPUTS
from serve.ipc.messages import HotHeld, HotRef, MapTable, TableMapped, TableRef
from serve.ipc.shared_pool import SharedPool
from serve.models.community import community_graph
from serve.server import clock
from serve.server.api import GraphInfo, InferCall
from serve.server.staging import (
    GATHERED_AT,
    GATHERED_IDS,
    GATHERED_NEW,
    Layout,
    Staged,
    count_loops,
    plan_layout,
    stage_indices,
    take_block,
)

if TYPE_CHECKING:
    from serve.server.catalogue import ModelEntry

_log = logging.getLogger(__name__)

#: Drawn at each of the first hops, and beyond them, where nobody says how many: GraphSAGE's own
#: numbers (25 and 10) are for training, with ten times the neighbours little is gained.
DEFAULT_FANOUT, DEFAULT_FANOUT_BEYOND, _FIRST_HOPS = 10, 5, 2
#: Features beyond this share of the device are left in their file.
_MAPPED_SHARE = 4
#: Ids of the samples drawn to learn from, and how often, within so much time.
_PROBED_IDS = (1, 8, 64, 512, 4096)
_PROBE_REPEATS = 5
_PROBE_LIMIT_NS = 150_000_000
#: Choices of fan-outs remembered; clients may come with any.
_MOST_SIZES = 64

Fanouts = tuple[int, ...] | Literal["all"]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What a request by node id asks for, checked as far as that goes without its content."""

    graph: ResidentGraph
    fanouts: tuple[int, ...]
    num_ids: int
    #: Edges are staged as int32.
    narrow_edges: bool
    #: Belongs to the driver's lock.
    sizes: SampleSizes
    #: Lanes gather the features themselves.
    in_place: bool = False
    #: Counts what they gather.
    hot: HotSet | None = None

    def expected(self, estimator: ModelEstimator) -> Sized:
        """Before it is sampled: memory for a large sample, time for a usual one."""
        size = self.sizes.expected(self.num_ids)
        run_ns, solo_ns = estimator.times(size.num_nodes, size.num_edges)
        large = estimator.memory(
            size.num_nodes_high, size.num_edges_high, narrow_edges=self.narrow_edges
        )
        estimate = Estimate(*large, run_ns, Nanos(solo_ns + size.prepare_ns))
        return Sized(size.num_nodes, size.num_edges, estimate)

    def exact(self, estimator: ModelEstimator, found: SampleProbe) -> Sized:
        """Once it is sampled; learns from it."""
        self.sizes.observe(found)
        run_ns, solo_ns = estimator.times(found.num_nodes, found.num_edges)
        need = estimator.memory(
            found.num_nodes, found.num_edges, found.num_loops, narrow_edges=self.narrow_edges
        )
        estimate = Estimate(*need, run_ns, Nanos(solo_ns + found.prepare_ns))
        return Sized(found.num_nodes, found.num_edges, estimate)


@dataclass(frozen=True, slots=True)
class PreparedNodes:
    """A sampled subgraph in the shared pool."""

    #: As if all inputs were in the pool.
    layout: Layout
    staged: Staged
    found: SampleProbe
    #: As asked; a client's own memory may hold others by now.
    ids: np.ndarray
    #: For each asked id, its row of the output.
    positions: np.ndarray
    #: What was sampled, and features are gathered from: held until no lane needs it any more.
    snapshot: Snapshot


class GraphStore:
    """The resident graphs of one server."""

    def __init__(
        self,
        config: Config,
        budget_bytes: int | None,
        changed: Callable[[], None],
        *,
        hot_budget_bytes: int = 0,
    ) -> None:
        """Nothing is opened yet; `changed` is called when `held_bytes` is another.

        `budget_bytes` is what the device has, None where its memory is not the host's: graphs are
        held by the host. Lanes then reach features by ``tables``, and each device, which has
        `hot_budget_bytes`, keeps some of them itself.
        """
        #: Whether lanes gather features themselves; not before one has said that it can.
        self._in_place: bool | None = None
        self._config = config
        self._budget_bytes = budget_bytes
        self._changed = changed
        self._hot_budget_bytes = hot_budget_bytes
        self._graphs: dict[str, ResidentGraph] = {}
        #: Of graphs that devices have hot rows of.
        self._hot: dict[str, HotSet] = {}
        self._sizes: dict[tuple[str, tuple[int, ...]], SampleSizes] = {}
        self._probing = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Memory that all graphs take."""
        return sum(graph.snapshot.held_bytes for graph in self._graphs.values())

    @property
    def hot_bytes(self) -> int:
        """Memory of each device for hot rows of all graphs."""
        return sum(hot.memory_bytes for hot in self._hot.values())

    @property
    def names(self) -> tuple[str, ...]:
        """In the configuration's order."""
        return tuple(self._graphs)

    def open(self, progress: Progress) -> None:
        """Open every graph of the configuration; raises ConfigError or NotReady."""
        for index, config in enumerate(self._config.graph):
            share = index / len(self._config.graph)

            def tell(step: str, fraction: float, name: str = config.name, s: float = share) -> None:
                progress(f"graph {name}: {step}", s + fraction / len(self._config.graph))

            self._graphs[config.name] = self._open(config, tell)
            if self._budget_bytes is not None and self.held_bytes >= self._budget_bytes:
                raise NotReady(
                    f"graph '{config.name}': resident graphs take {self.held_bytes} bytes, the "
                    f"device has {self._budget_bytes} (device.memory_budget); see graph.memory_map"
                )
        self._share_hot_memory()
        if self._graphs:
            self._changed()

    def _share_hot_memory(self) -> None:
        """Decide, once, what each graph's hot rows may take; raises NotReady for too much."""
        if not self._hot_budget_bytes:
            return
        shapes = []
        for name in self._graphs:
            table = _table(self._graphs[name], self._graphs[name].snapshot)
            shapes.append((0, 0) if table is None else (table.shape[0], table.row_bytes))
        wanted = [config.hot_memory_bytes for config in self._config.graph]
        for name, size in zip(
            self._graphs, share_memory(shapes, wanted, self._hot_budget_bytes), strict=True
        ):
            if size:
                self._hot[name] = HotSet(size)
        if self.hot_bytes >= self._hot_budget_bytes:
            raise NotReady(
                f"hot rows of all graphs would take {self.hot_bytes} bytes, the device has "
                f"{self._hot_budget_bytes} (graph.hot_memory, device.memory_budget)"
            )

    def get(self, name: str) -> ResidentGraph:
        """The graph of that name; raises UnknownName."""
        graph = self._graphs.get(name)
        if graph is None:
            raise UnknownName(
                f"unknown graph '{name}'; this server holds: {', '.join(self._graphs) or 'none'}"
            )
        return graph

    def request(
        self, name: str, num_ids: int, fanouts: Fanouts | None, entry: "ModelEntry"
    ) -> NodeRequest:
        """What is asked of the model for so many nodes of a graph; raises ServeErrors.

        `fanouts` as in ``InferCall``.
        """
        graph = self.get(name)
        check_fit(graph, entry)
        if num_ids == 0 and not entry.signature.accepts_empty:
            raise InvalidInput(
                f"input 'node_ids' has 0 ids, which model '{entry.spec.name}' cannot take"
            )
        resolved = resolve_fanouts(fanouts, entry)
        narrow = entry.signature.narrow_edges and graph.snapshot.num_nodes < 2**31
        sizes, in_place = self.sizes(graph, resolved), self._in_place is True
        hot = self._hot.get(name)
        return NodeRequest(graph, resolved, num_ids, narrow, sizes, in_place, hot)

    def sizes(self, graph: ResidentGraph, fanouts: tuple[int, ...]) -> SampleSizes:
        """What is known of samples of the graph; found out by drawing some at first use."""
        key = graph.name, fanouts
        found = self._sizes.get(key)
        if found is not None:
            return found
        with self._probing:
            found = self._sizes.get(key)
            if found is None:
                snapshot = graph.snapshot
                gathers = self._in_place is False or _table(graph, snapshot) is None
                probes = _probes(snapshot, fanouts, gathers=gathers)
                found = SampleSizes(probes, snapshot.num_nodes, snapshot.num_edges)
                while len(self._sizes) >= _MOST_SIZES:
                    self._sizes.pop(next(iter(self._sizes)), None)
                self._sizes[key] = found
        return found

    def warm(self, entry: "ModelEntry") -> None:
        """Learn the sizes of the model's usual samples before the first request for one."""
        for name in self.fitting(entry):
            self.sizes(self._graphs[name], resolve_fanouts(None, entry))

    def fitting(self, entry: "ModelEntry") -> tuple[str, ...]:
        """Names of the graphs that the model can be asked about."""
        names = []
        for graph in self._graphs.values():
            try:
                check_fit(graph, entry)
            except Mismatch:
                continue
            names.append(graph.name)
        return tuple(names)

    def update(self, name: str, change: Change, if_version: int | None) -> GraphInfo:
        """See ``api.Inference.update_graph``."""
        graph = self.get(name)
        before = graph.snapshot.held_bytes

        def accept(new: Snapshot) -> None:
            if self._budget_bytes is None:
                return
            total = self.held_bytes - graph.snapshot.held_bytes + new.held_bytes
            if total >= self._budget_bytes and new.held_bytes > before:
                raise TooBig(
                    f"graph '{name}': resident graphs would take {total} bytes, the device has "
                    f"{self._budget_bytes} (device.memory_budget)"
                )

        snapshot = graph.update(change, if_version=if_version, accept=accept)
        for (of, _), sizes in tuple(self._sizes.items()):
            if of == name:
                sizes.resized(snapshot.num_nodes, snapshot.num_edges)
        self._changed()
        return _info(graph, snapshot)

    def tables(self) -> tuple[TableRef, ...]:
        """The features of all graphs as lanes may map them; none where these are processes."""
        if self._budget_bytes is not None or self._in_place is False:
            return ()
        found = (_table(graph, graph.snapshot) for graph in self._graphs.values())
        return tuple(table for table in found if table is not None)

    def offers(self) -> tuple[MapTable, ...]:
        """The same with the rows that a device is to keep itself, as the message to a lane."""
        return tuple(MapTable(table, self._hot_ref(table)) for table in self.tables())

    def said(self, message: TableMapped | HotHeld) -> None:
        """What a lane says of a table."""
        if isinstance(message, TableMapped):
            self.mapped(message.number, message.failure)
        elif message.graph in self._hot:
            self._hot[message.graph].held(None if message.failure else message.number)

    def reconsider(self, name: str) -> bool:
        """Whether other rows of that graph are hot from now on; see ``HotSet.reconsider``."""
        hot = self._hot.get(name)
        return hot is not None and hot.reconsider(self._graphs[name].snapshot)

    def gathered_rows(self) -> dict[str, tuple[int, int]]:
        """See ``HotSet.gathered``, for each graph that has hot rows."""
        return {name: hot.gathered for name, hot in self._hot.items()}

    def _hot_ref(self, table: TableRef) -> HotRef | None:
        hot, snapshot = self._hot.get(table.graph), self._graphs[table.graph].snapshot
        choice = None if hot is None else hot.choice(snapshot)
        if hot is None or choice is None or choice.table != table.number:
            return None
        return HotRef(choice.file.number, choice.file.path, choice.count, hot.memory_bytes)

    def mapped(self, number: int, failure: str) -> None:
        """A lane says whether it can gather from the table of that number."""
        if all(table.number != number for table in self.tables()):
            return  # superseded meanwhile, and perhaps gone before the lane came to it
        if failure:
            _log.warning("features of resident graphs are gathered by the host: %s", failure)
        self._in_place = not failure

    def infos(self, name: str = "") -> tuple[GraphInfo, ...]:
        """See ``api.Inference.graphs``."""
        graphs = (self.get(name),) if name else tuple(self._graphs.values())
        return tuple(_info(graph, graph.snapshot) for graph in graphs)

    def _open(self, config: GraphConfig, progress: Progress) -> ResidentGraph:
        share = None if self._budget_bytes is None else self._budget_bytes // _MAPPED_SHARE
        above = {"auto": share, "always": 0, "never": None}
        options = OpenOptions(
            undirected=config.undirected,
            feature_dtype=config.feature_dtype,
            map_above_bytes=above[config.memory_map],
            cache=self._config.cache_path() / "graphs",
            shared=self._budget_bytes is None,
        )
        if config.file is not None:
            return open_graph(config.name, self._config.path(config.file), options, progress)
        assert config.dataset is not None
        if config.dataset == "community":
            graph = community_graph()
            source = "the demo models' communities, generated, seed 0"
            parts = Parts(len(graph.x), graph.edge_index, graph.x, source)
            return held(config.name, parts, options, progress)
        folder = None if config.folder is None else self._config.path(config.folder)
        try:
            return open_dataset(
                config.name, config.dataset, folder, config.scale, options, progress
            )
        except UnknownName as error:
            raise ConfigError(f"graph '{config.name}': {error}, nor 'community'") from error


def check_fit(graph: ResidentGraph, entry: "ModelEntry") -> None:
    """Raise Mismatch, naming both, unless the model can be asked about the graph's nodes."""
    name, signature = entry.spec.name, entry.signature
    if signature.rows != "node":
        raise Mismatch(
            f"model '{name}' gives one row for a whole graph, so it cannot be asked for nodes of "
            f"graph '{graph.name}'"
        )
    num_features = graph.snapshot.num_features
    if signature.num_features != num_features:
        raise Mismatch(
            f"graph '{graph.name}' has {num_features} features, model '{name}' takes "
            f"{signature.num_features}"
        )
    given = INPUTS.keys() - {name for name, each in INPUTS.items() if each.always or each.optional}
    missing = given & set(entry.spec.inputs)
    if missing:
        raise Mismatch(
            f"model '{name}' takes {', '.join(sorted(missing))}, which graph '{graph.name}' "
            "does not have"
        )


def resolve_fanouts(asked: Fanouts | None, entry: "ModelEntry") -> tuple[int, ...]:
    """The request's fan-outs, else the model's own, else by how far the model looks."""
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


def derived_seed(request_uid: str) -> int:
    """The seed of a request that brought none: again the same for the same uid."""
    return int.from_bytes(hashlib.sha256(request_uid.encode()).digest()[:8]) >> 1


def prepare_nodes(
    request: NodeRequest, call: InferCall, entry: "ModelEntry", seed: int, pool: SharedPool
) -> PreparedNodes:
    """Sample, and gather into a block of the pool.

    Raises InvalidInput for an id that is no node and a sample that the model cannot take,
    QueueFull when the pool has no room.
    """
    # One version for all of it.
    snapshot = request.graph.snapshot
    ids = np.empty(request.num_ids, np.int64)
    bad = stage_indices(call.tensors["node_ids"], ids.view(np.uint8).data, snapshot.num_nodes)
    if bad is not None:
        raise InvalidInput(
            f"input 'node_ids' [{bad[0]}] is {bad[1]}; it must be in [0, {snapshot.num_nodes}), "
            f"the nodes of graph '{request.graph.name}'"
        )
    started_ns = clock.now_ns()
    sample, nodes = _draw(snapshot, ids, request, seed)
    num_nodes, num_edges = sample.num_nodes, sample.num_edges
    if num_edges == 0 and not entry.signature.accepts_edgeless:
        raise InvalidInput(
            f"input 'node_ids': its nodes have no in-edges in graph '{request.graph.name}', and "
            f"model '{entry.spec.name}' cannot take a graph of 0 edges"
        )
    positions = np.empty(request.num_ids, np.int64)
    sample.write_positions(positions)
    order, output_bytes = entry.spec.inputs, entry.estimator.output_bytes(num_nodes, num_edges)
    shapes = {"x": (num_nodes, snapshot.num_features), "edge_index": (2, num_edges)}
    narrow = request.narrow_edges
    layout = in_pool = plan_layout(shapes, order, output_bytes, narrow_edges=narrow)
    lists: dict[str, np.ndarray] = {}
    table = _table(request.graph, snapshot) if request.in_place else None
    if table is not None:
        rows, at, new = snapshot.patched(nodes)
        if request.hot is not None:
            request.hot.count(table.number, np.delete(rows, at) if at.size else rows)
        lists = {GATHERED_IDS: rows, GATHERED_AT: at, GATHERED_NEW: new}
        in_place = {"edge_index": (2, num_edges)} | {name: a.shape for name, a in lists.items()}
        in_pool = plan_layout(in_place, (*order, *lists), output_bytes, narrow_edges=narrow)
    staged = in_pool.at(take_block(pool, in_pool))
    # Nothing below raises: the block is the ticket's to give back.
    _fill(staged, snapshot, sample, nodes, pool)
    for ref in staged.inputs:
        if ref.name in lists:
            pool.array(ref.offset_bytes, ref.dtype, ref.shape)[:] = lists[ref.name]
    if table is not None:
        staged = staged.gathering(table)
    num_loops = count_loops(staged, pool) if entry.estimator.counts_loops else None
    took_ns = clock.now_ns() - started_ns
    found = SampleProbe(request.num_ids, num_nodes, num_edges, took_ns, num_loops)
    return PreparedNodes(layout, staged, found, ids, positions, snapshot)


def stage_again(prepared: PreparedNodes, request: NodeRequest, seed: int, pool: SharedPool) -> None:
    """Lay the same sample out once more where it lies: a run may have changed what it was given.

    It is drawn anew, which costs runs that are made once nothing.
    """
    snapshot = prepared.snapshot
    sample, nodes = _draw(snapshot, prepared.ids, request, seed)
    _fill(prepared.staged, snapshot, sample, nodes, pool)


def _draw(
    snapshot: Snapshot, ids: np.ndarray, request: NodeRequest, seed: int
) -> tuple[native.Sample, np.ndarray]:
    """The sample, and its nodes; the same for the same snapshot, request and seed."""
    sample = snapshot.sample(ids, request.fanouts, seed & (2**64 - 1))
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    return sample, nodes


def _fill(
    staged: Staged, snapshot: Snapshot, sample: native.Sample, nodes: np.ndarray, pool: SharedPool
) -> None:
    """Write the inputs that a model gets as they lie in the pool."""
    for ref in staged.inputs:
        target = pool.array(ref.offset_bytes, ref.dtype, ref.shape)
        if ref.name == "edge_index":
            sample.write_edges(target, ref.dtype == "int32")
        elif ref.name == "x":
            snapshot.gather(nodes, target)


def _table(graph: ResidentGraph, snapshot: Snapshot) -> TableRef | None:
    """The version's features without its patch as lanes may map them."""
    file = memory_file(snapshot.x)
    if file is None or not snapshot.x.size:
        return None
    rows, columns = snapshot.x.shape
    return TableRef(graph.name, file.number, file.path, snapshot.x.dtype.name, (rows, columns))


def _probes(snapshot: Snapshot, fanouts: tuple[int, ...], *, gathers: bool) -> list[SampleProbe]:
    """A few samples of doubling numbers of random ids, as long as they are quick.

    With `gathers`, the host gathers their features too.
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


def _info(graph: ResidentGraph, snapshot: Snapshot) -> GraphInfo:
    return GraphInfo(
        name=graph.name,
        version=snapshot.version,
        num_nodes=snapshot.num_nodes,
        num_edges=snapshot.num_edges,
        num_features=snapshot.num_features,
        feature_dtype=snapshot.x.dtype.name,
        held_bytes=snapshot.held_bytes,
        memory_mapped=snapshot.mapped,
        source=graph.source,
    )
