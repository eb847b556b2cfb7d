"""A graph held by the server, in versions: the newest answers requests, updates make the next.

Readers take ``snapshot`` and never wait. Updates are made one at a time and become visible as a
whole.
"""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from serve.errors import Mismatch
from serve.graphs.features import FeatureKeeper
from serve.graphs.snapshot import Snapshot
from serve.graphs.updates import Change, changed


class GraphVersion(Protocol):
    """One version of any kind of graph."""

    @property
    def version(self) -> int:
        """Number of the version, from 1."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory of all its arrays, without mapped files."""
        ...


VersionT = TypeVar("VersionT", bound=GraphVersion)
ChangeT = TypeVar("ChangeT", contravariant=True)


class Versioned(Generic[VersionT, ChangeT]):
    """The newest version of one graph, under its name."""

    def __init__(
        self,
        name: str,
        source: str,
        first: VersionT,
        next_of: Callable[[VersionT, ChangeT], VersionT],
    ) -> None:
        """`next_of` makes the next version by a change, or raises InvalidInput."""
        self.name = name
        #: Origin, for people.
        self.source = source
        self._next_of = next_of
        self._lock = threading.Lock()
        self._snapshot = first

    @property
    def snapshot(self) -> VersionT:
        """The newest version; a request takes it once."""
        return self._snapshot

    def update(
        self,
        change: ChangeT,
        *,
        if_version: int | None = None,
        accept: Callable[[VersionT], None] = lambda _: None,
    ) -> VersionT:
        """Make the next version by the change and return it.

        `accept` is called before the version becomes visible and may raise to prevent it. Raises
        InvalidInput for an invalid change and Mismatch when `if_version` is not the newest version;
        then nothing has changed.
        """
        with self._lock:
            old = self._snapshot
            if if_version is not None and if_version != old.version:
                raise Mismatch(
                    f"graph '{self.name}' is at version {old.version}, the change is for "
                    f"version {if_version}"
                )
            new = self._next_of(old, change)
            accept(new)
            self._snapshot = new
            return new


class ResidentGraph(Versioned[Snapshot, Change]):
    """A graph with one type of nodes and one of edges."""

    def __init__(
        self,
        name: str,
        first: Snapshot,
        keeper: FeatureKeeper,
        source: str,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        """Begin with the version `first`, whose features are as `keeper` stores them.

        `labels` [N] are classes of the nodes, to train on: negative for none, as of nodes that
        come later. None without any.
        """
        self.labels = labels
        super().__init__(name, source, first, lambda old, change: changed(old, change, keeper))
