"""What a server that takes part in changes of shared graphs, and the graphs, know of each other."""

from collections.abc import Callable
from typing import Protocol

from serve.graphs.snapshot import Snapshot
from serve.graphs.updates import Change
from serve.progress import Progress


class SharedGraphs(Protocol):
    """The graphs of a server that are shared out. For one thread at a time."""

    def files_of(self, graph: str) -> bytes | None:
        """Return the digest of what was read of the graph; None where it is not shared out here."""
        ...

    def make(
        self,
        graph: str,
        change: Change,
        if_version: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Snapshot:
        """Make the change on this server and return the version that it makes.

        `before` is called once the change is known to be possible, and before requests see it; it
        may raise to prevent it. Raises what ``api.Inference.update_graph`` raises.
        """
        ...


class ChangeOrder(Protocol):
    """Has all servers make the same changes in one order. Any thread may call any method."""

    @property
    def trouble(self) -> str:
        """Why this server cannot make the changes that others make; empty while it can."""
        ...

    def follow(self, graphs: SharedGraphs, progress: Progress, patience_s: float) -> None:
        """Make all changes until now; then go on with those that come.

        Raises ConfigError for a log of other graphs, and NotReady when no change came for
        `patience_s` and some are missing, or when interrupted.
        """
        ...

    def change(self, graph: str, change: Change, if_version: int | None) -> Snapshot:
        """Have all servers make the change; return the version that it made here.

        Raises what ``api.Inference.update_graph`` raises, and NotReady when who orders changes is
        not heard of.
        """
        ...

    def interrupt(self) -> None:
        """Have `follow` end soon."""
        ...
