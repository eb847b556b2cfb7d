"""A graph held by the server: the version requests are answered from, and how it changes.

Readers take ``snapshot`` and never wait. Changes are made one at a time, beside them, and become
visible as a whole.
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
        """`base` are in-neighbours by destination, `x` [N, F] features as `keeper` keeps them."""
        self.name = name
        #: Where it came from, for people.
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
        """The newest version; take it once for all of a request."""
        return self._snapshot

    def update(
        self,
        change: Change,
        *,
        if_version: int | None = None,
        accept: Callable[[Snapshot], None] = lambda _: None,
    ) -> Snapshot:
        """Make the change and return the version with it.

        `accept` is asked before the version becomes visible and may raise to prevent it. Raises
        InvalidInput for a change that cannot be, Mismatch when `if_version` is no longer the
        newest; then nothing has changed.
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
