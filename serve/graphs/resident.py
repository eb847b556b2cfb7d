"""A graph held by the server, in versions: the newest answers requests, updates make the next.

Readers take ``snapshot`` and never wait. Updates are made one at a time and become visible as a
whole.
"""

import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from serve.errors import Mismatch
from serve.graphs.csr import Rows
from serve.graphs.features import FeatureKeeper
from serve.graphs.snapshot import Snapshot, no_patch
from serve.graphs.updates import Change, changed, compacted, needs_compacting


class ResidentGraph:
    """The newest version of one graph, under its name."""

    def __init__(
        self, name: str, base: Rows, x: NDArray[Any], keeper: FeatureKeeper, source: str
    ) -> None:
        """`base` has in-neighbours by destination, `x` [N, F] features as `keeper` stores them."""
        self.name = name
        #: Origin, for people.
        self.source = source
        self._keeper = keeper
        self._lock = threading.Lock()
        self._snapshot = Snapshot(
            version=1,
            num_nodes=base.starts.size - 1,
            num_edges=base.values.size,
            base=base,
            x=x,
            patch=no_patch(x.shape[1]),
        )

    @property
    def snapshot(self) -> Snapshot:
        """The newest version; a request takes it once."""
        return self._snapshot

    def update(
        self,
        change: Change,
        *,
        if_version: int | None = None,
        accept: Callable[[Snapshot], None] = lambda _: None,
    ) -> Snapshot:
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
            new = changed(old, change)
            if needs_compacting(new):
                patch = new.patch
                x = self._keeper.rewritten(new.x, new.num_nodes, patch.featured, patch.x)
                new = compacted(new, x)
            accept(new)
            self._snapshot = new
            return new
