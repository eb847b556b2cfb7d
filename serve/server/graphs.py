"""The resident graphs of one server: opened, held within the device's memory, changed and told of.

The main process holds each graph once. How requests for nodes are sized is in ``node_requests``,
how lanes reach the features in ``feature_tables``.
"""

from collections.abc import Callable
from dataclasses import replace

from serve.config import Config, GraphConfig
from serve.errors import (
    ConfigError,
    InvalidInput,
    Mismatch,
    NotReady,
    TooBig,
    UnknownName,
)
from serve.graphs.academic import academic_graph
from serve.graphs.load import (
    GraphParts,
    OpenOptions,
    held,
    keeper_of,
    open_dataset,
    open_graph,
)
from serve.graphs.resident import GraphVersion, ResidentGraph
from serve.graphs.shared_column import RowSource, shared_files
from serve.graphs.sharing import Parting
from serve.graphs.snapshot import Snapshot
from serve.graphs.typed import TypedSnapshot
from serve.graphs.typed_load import held_typed
from serve.graphs.typed_updates import TypedChange, TypedGraph
from serve.graphs.updates import Change
from serve.inputs import INPUTS
from serve.models.community import community_graph
from serve.progress import Progress
from serve.server.api import GraphInfo
from serve.server.catalogue import ModelEntry
from serve.server.feature_tables import FeatureTables
from serve.server.typed_fit import fit
from serve.typed_names import typed_name

#: With `memory_map = "auto"`, features larger than 1/4 of the device stay in their file.
_MAPPED_SHARE = 4
#: Papers of the generated academic graph, at scale 1.
ACADEMIC_PAPERS = 2_000


class GraphStore:
    """The resident graphs of one server, by name."""

    def __init__(
        self,
        config: Config,
        budget_bytes: int | None,
        changed: Callable[[], None],
        *,
        hot_budget_bytes: int = 0,
        rows: RowSource | None = None,
    ) -> None:
        """Hold no graph yet, see `open`; `changed` is called when `held_bytes` may have changed.

        `budget_bytes` is the device's memory, None when graphs do not lie in it: the host then
        holds them, lanes reach the features through `tables`, and each device may keep hot sets
        within `hot_budget_bytes`. `rows` has the features that are not here; None where no graph is
        shared out.
        """
        self._config = config
        self._budget_bytes = budget_bytes
        self._changed = changed
        self._hot_budget_bytes = hot_budget_bytes
        self._graphs: dict[str, ResidentGraph | TypedGraph] = {}
        #: Those whose features devices may gather themselves.
        self._plain: dict[str, ResidentGraph] = {}
        self.tables = FeatureTables(self._plain)
        self._rows = rows
        self._order = None if rows is None else rows.changes

    @property
    def held_bytes(self) -> int:
        """Memory that all graphs take."""
        return sum(graph.snapshot.held_bytes for graph in self._graphs.values())

    def open(self, progress: Progress) -> None:
        """Open every graph of the configuration, with all changes that others made.

        Raises ConfigError or NotReady.
        """
        for index, config in enumerate(self._config.graph):
            share = index / len(self._config.graph)

            def tell(step: str, fraction: float, name: str = config.name, s: float = share) -> None:
                progress(f"graph {name}: {step}", s + fraction / len(self._config.graph))

            found = self._open(config, tell)
            self._graphs[config.name] = found
            if isinstance(found, ResidentGraph):
                self._plain[config.name] = found
            if self._budget_bytes is not None and self.held_bytes >= self._budget_bytes:
                raise NotReady(
                    f"graph '{config.name}': resident graphs take {self.held_bytes} bytes, the "
                    f"device has {self._budget_bytes} (device.memory_budget); see graph.memory_map"
                )
        wanted = [
            config.hot_memory_bytes for config in self._config.graph if config.name in self._plain
        ]
        self.tables.share_hot_memory(wanted, self._hot_budget_bytes)
        if self._graphs:
            self._changed()
        if self._order is not None:
            self._order.follow(self, progress, self._config.server.start_timeout_s)

    @property
    def part(self) -> int | None:
        """Part that is here of graphs that are shared out; None where none are."""
        return None if self._rows is None else self._rows.part

    @property
    def in_step(self) -> bool:
        """False when it cannot make changes that other servers made."""
        return self._order is None or not self._order.trouble

    def interrupt(self) -> None:
        """Have `open` wait for no other server."""
        if self._order is not None:
            self._order.interrupt()

    def files_of(self, graph: str) -> bytes | None:
        """See ``SharedGraphs``."""
        found = self._plain.get(graph)
        return None if found is None else shared_files(found.snapshot.column)

    def get(self, name: str) -> ResidentGraph | TypedGraph:
        """Return the graph of that name; raises UnknownName."""
        graph = self._graphs.get(name)
        if graph is None:
            raise UnknownName(
                f"unknown graph '{name}'; this server holds: {', '.join(self._graphs) or 'none'}"
            )
        return graph

    def fitting(self, entry: ModelEntry) -> dict[str, tuple[str, ...]]:
        """Return the names of the graphs that the model can be asked about, with the node types.

        The type is empty in a graph with one.
        """
        found: dict[str, tuple[str, ...]] = {}
        for graph in self._graphs.values():
            try:
                if entry.spec.interface is not None or isinstance(graph, TypedGraph):
                    found[graph.name] = tuple(fit(graph.name, typed_snapshot(graph), entry).outputs)
                else:
                    check_fit(graph, entry)
                    found[graph.name] = ("",)
            except Mismatch:
                continue
        return found

    def update(self, name: str, change: Change | TypedChange, if_version: int | None) -> GraphInfo:
        """See ``api.Inference.update_graph``."""
        graph = self.get(name)
        if isinstance(graph, TypedGraph):
            if isinstance(change, Change):
                raise InvalidInput(
                    f"graph '{name}' has several types of nodes: give 'tensors' by type"
                )
            typed = graph.update(change, if_version=if_version, accept=self._accepting(graph))
            self._changed()
            return _typed_info(graph, typed)
        if isinstance(change, TypedChange):
            raise InvalidInput(f"graph '{name}' has one type of nodes: 'tensors' are not for it")
        if self._order is not None and self.files_of(name) is not None:
            graph.snapshot.check_removed(change.remove_edges)
            return _info(graph, self._order.change(name, change, if_version))
        return _info(graph, self.make(name, change, if_version))

    def make(
        self,
        graph: str,
        change: Change,
        if_version: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Snapshot:
        """Make the change here alone; see ``SharedGraphs``."""
        found = self._plain[graph]
        accept = self._accepting(found, before)
        snapshot = found.update(change, if_version=if_version, accept=accept)
        self._changed()
        return snapshot

    def _accepting(
        self, graph: ResidentGraph | TypedGraph, before: Callable[[], None] = lambda: None
    ) -> Callable[[GraphVersion], None]:
        """Return what raises for a version that the device cannot hold, then calls `before`."""
        before_bytes = graph.snapshot.held_bytes

        def accept(new: GraphVersion) -> None:
            total_bytes = self.held_bytes - graph.snapshot.held_bytes + new.held_bytes
            most = self._budget_bytes
            if most is not None and total_bytes >= most and new.held_bytes > before_bytes:
                raise TooBig(
                    f"graph '{graph.name}': resident graphs would take {total_bytes} bytes, the"
                    f" device has {most} (device.memory_budget)"
                )
            before()
            if isinstance(new, Snapshot):
                new.publish()

        return accept

    def infos(self, name: str = "") -> tuple[GraphInfo, ...]:
        """See ``api.Inference.graphs``."""
        graphs = (self.get(name),) if name else tuple(self._graphs.values())
        return tuple(
            _typed_info(graph, graph.snapshot)
            if isinstance(graph, TypedGraph)
            else _info(graph, graph.snapshot)
            for graph in graphs
        )

    def _open(self, config: GraphConfig, progress: Progress) -> ResidentGraph | TypedGraph:
        share_bytes = None if self._budget_bytes is None else self._budget_bytes // _MAPPED_SHARE
        above = {"auto": share_bytes, "always": 0, "never": None}
        options = OpenOptions(
            undirected=config.undirected,
            feature_dtype=config.feature_dtype,
            map_above_bytes=above[config.memory_map],
            cache=self._config.cache_path() / "graphs",
            shared=self._budget_bytes is None,
        )
        if config.parts is not None:
            if self._rows is None:
                raise ConfigError(f"graph '{config.name}': parts: cluster.rows.listen is missing")
            parting = Parting(
                self._config.path(config.parts),
                config.hot_share,
                self._rows,
                with_edges=config.share == "all",
            )
            # Only what belongs here is read into memory.
            options = replace(options, map_above_bytes=0, shared=False, parting=parting)
        if config.file is not None:
            return open_graph(config.name, self._config.path(config.file), options, progress)
        assert config.dataset is not None
        if config.dataset == "community":
            graph = community_graph()
            source = "the demo models' communities, generated, seed 0"
            parts = GraphParts(len(graph.x), graph.edge_index, graph.x, source, graph.y)
            return held(config.name, parts, options, progress)
        if config.dataset == "academic":
            if options.parting is not None:
                raise ConfigError(
                    f"graph '{config.name}': parts: it has several types of nodes, whose features"
                    " cannot be shared out yet"
                )
            arrays = academic_graph(max(1, int(ACADEMIC_PAPERS * config.scale)))
            source = f"an academic graph, generated, scale {config.scale:g}, seed 0"
            keeper = keeper_of(options)
            return held_typed(config.name, arrays, keeper, source, progress)
        folder = None if config.folder is None else self._config.path(config.folder)
        try:
            return open_dataset(
                config.name, config.dataset, folder, config.scale, options, progress
            )
        except UnknownName as error:
            raise ConfigError(
                f"graph '{config.name}': {error}, nor 'community' or 'academic'"
            ) from error


def check_fit(graph: ResidentGraph, entry: ModelEntry) -> None:
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


def typed_snapshot(graph: ResidentGraph | TypedGraph) -> TypedSnapshot:
    """Return the newest version of the graph as one that may have several types."""
    if isinstance(graph, TypedGraph):
        return graph.snapshot
    return TypedSnapshot.of(graph.snapshot)


def _typed_info(graph: TypedGraph, snapshot: TypedSnapshot) -> GraphInfo:
    columns = snapshot.columns
    return GraphInfo(
        name=graph.name,
        version=snapshot.version,
        num_nodes=snapshot.num_nodes,
        num_edges=snapshot.num_edges,
        num_features=0,
        feature_dtype="",
        held_bytes=snapshot.held_bytes,
        memory_mapped=any(column.mapped for column in columns.values()),
        source=graph.source,
        node_types={name: table.num_nodes for name, table in snapshot.nodes.items()},
        edge_types={name: edges.num_edges for name, edges in snapshot.edges.items()},
        features={
            typed_name(name, of): f"{column.dtype} {['N', *column.shape]}".replace("'", "")
            for (of, name), column in columns.items()
        },
    )


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
