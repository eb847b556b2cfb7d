"""How lanes on a GPU gather features of resident graphs: from tables, and hot sets of their rows.

A table is the feature matrix of one graph version without its patch, in a memory file that the
device's process maps. A hot set is the part of its rows that the device keeps a copy of, see
``serve.graphs.hot_set``. On the processor there are no tables: the host gathers.
"""

import logging
from collections.abc import Mapping, Sequence

from serve.errors import NotReady
from serve.graphs.features import memory_file
from serve.graphs.hot_set import HotSet, share_memory
from serve.graphs.resident import ResidentGraph
from serve.graphs.snapshot import Snapshot
from serve.ipc.messages import HotSetHeld, HotSetRef, MapTable, TableMapped, TableRef

_log = logging.getLogger(__name__)


class FeatureTables:
    """The tables of all resident graphs, and what devices said of them."""

    def __init__(self, graphs: Mapping[str, ResidentGraph]) -> None:
        """`graphs` is the store's own mapping, which fills as graphs are opened."""
        self._graphs = graphs
        self._hot_sets: dict[str, HotSet] = {}
        #: True once a lane could map a table, False once one could not; None before.
        self._mapped: bool | None = None

    @property
    def hot_bytes(self) -> int:
        """Memory of each device for the hot sets of all graphs."""
        return sum(hot_set.memory_bytes for hot_set in self._hot_sets.values())

    @property
    def gathered_by_lanes(self) -> bool:
        """True when lanes gather features themselves; not before one has said that it can."""
        return self._mapped is True

    def gathered_by_host(self, graph: ResidentGraph) -> bool:
        """Return True when requests for the graph's nodes have their features gathered here."""
        return self._mapped is False or table_of(graph, graph.snapshot) is None

    def share_hot_memory(self, wanted_bytes: Sequence[int | None], budget_bytes: int) -> None:
        """Divide a device's `budget_bytes` among the graphs' hot sets, once; 0 means no hot sets.

        `wanted_bytes` has an upper bound per graph, None for an automatic share. Raises NotReady
        when the hot sets would fill the device.
        """
        if not budget_bytes:
            return
        shapes = []
        for graph in self._graphs.values():
            table = table_of(graph, graph.snapshot)
            shapes.append((0, 0) if table is None else (table.shape[0], table.row_bytes))
        shares_bytes = share_memory(shapes, wanted_bytes, budget_bytes)
        for name, size_bytes in zip(self._graphs, shares_bytes, strict=True):
            if size_bytes:
                self._hot_sets[name] = HotSet(size_bytes)
        if self.hot_bytes >= budget_bytes:
            raise NotReady(
                f"hot sets of all graphs would take {self.hot_bytes} bytes, the device has "
                f"{budget_bytes} (graph.hot_memory, device.memory_budget)"
            )

    def hot_set(self, name: str) -> HotSet | None:
        """Return the hot set of that graph; None when devices keep none."""
        return self._hot_sets.get(name)

    def offers(self) -> tuple[MapTable, ...]:
        """Return the messages that have a device map every table and keep its hot set."""
        return tuple(MapTable(table, self._hot_set_ref(table)) for table in self._tables())

    def answered(self, message: TableMapped | HotSetHeld) -> None:
        """Take note of a device's answer to an offer."""
        if isinstance(message, TableMapped):
            self._table_mapped(message.number, message.failure)
        elif message.graph in self._hot_sets:
            held = None if message.failure else message.number
            self._hot_sets[message.graph].held(held)

    def reconsider(self, name: str) -> bool:
        """Return True when the graph's hot set has other rows now; see ``HotSet.reconsider``."""
        hot_set = self._hot_sets.get(name)
        return hot_set is not None and hot_set.reconsider(self._graphs[name].snapshot)

    def gathered_rows(self) -> dict[str, tuple[int, int]]:
        """Return ``HotSet.gathered`` of each graph that has a hot set."""
        return {name: hot_set.gathered for name, hot_set in self._hot_sets.items()}

    def _tables(self) -> list[TableRef]:
        """Return every table that lanes may map; none after one failed to."""
        if self._mapped is False:
            return []
        found = (table_of(graph, graph.snapshot) for graph in self._graphs.values())
        return [table for table in found if table is not None]

    def _hot_set_ref(self, table: TableRef) -> HotSetRef | None:
        hot_set, snapshot = self._hot_sets.get(table.graph), self._graphs[table.graph].snapshot
        rows = None if hot_set is None else hot_set.rows(snapshot)
        if hot_set is None or rows is None or rows.table != table.number:
            return None
        return HotSetRef(rows.file.number, rows.file.path, rows.count, hot_set.memory_bytes)

    def _table_mapped(self, number: int, failure: str) -> None:
        if all(table.number != number for table in self._tables()):
            return  # superseded meanwhile, and perhaps gone before the lane came to it
        if failure:
            _log.warning("features of resident graphs are gathered by the host: %s", failure)
        self._mapped = not failure


def table_of(graph: ResidentGraph, snapshot: Snapshot) -> TableRef | None:
    """Return the version's table; None when its features are not in memory that lanes can map."""
    file = memory_file(snapshot.x)
    if file is None or not snapshot.x.size:
        return None
    rows, columns = snapshot.x.shape
    return TableRef(graph.name, file.number, file.path, snapshot.x.dtype.name, (rows, columns))
