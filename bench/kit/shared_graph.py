"""One graph that servers share out, where there is no server around it."""

from collections.abc import Callable

from serve.graphs.resident import GraphVersion, ResidentGraph
from serve.graphs.shared_column import shared_files
from serve.graphs.snapshot import Snapshot
from serve.graphs.updates import Change


class OneGraph:
    """Implements ``serve.graphs.shared_changes.SharedGraphs``."""

    def __init__(self, graph: ResidentGraph) -> None:
        self._graph = graph

    def files_of(self, graph: str) -> bytes | None:
        """See ``SharedGraphs``."""
        return shared_files(self._graph.snapshot.column) if graph == self._graph.name else None

    def make(
        self,
        graph: str,
        change: Change,
        if_version: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Snapshot:
        """See ``SharedGraphs``."""

        def accept(new: GraphVersion) -> None:
            before()
            assert isinstance(new, Snapshot)
            new.publish()

        return self._graph.update(change, if_version=if_version, accept=accept)
