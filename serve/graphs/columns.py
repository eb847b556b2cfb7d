"""One feature of all nodes of a type in a resident graph: base rows, and rows changed since.

Immutable, like ``serve.graphs.edges``.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.errors import InvalidInput
from serve.graphs.csr import Ids
from serve.graphs.edges import NO_IDS, PATCH_SHARE, found_in
from serve.graphs.features import FeatureKeeper

#: Dtypes of base rows that are gathered as float32 by compiled code.
_WIDENED = ("float32", "float16", "uint8")
_LEAST_PATCHED_ROWS = 1 << 12


@dataclass(frozen=True)
class Column:
    """A feature [N, ...], of nodes that may be more than the base has."""

    #: Rows of the base's nodes, in memory or memory-mapped; of `rows`' dtype or a smaller one.
    base: NDArray[Any]
    #: Nodes with other rows than in the base, ascending [P], and these rows [P, ...].
    changed: Ids
    rows: NDArray[Any]

    @classmethod
    def of(cls, base: NDArray[Any], dtype: Any = None) -> "Column":
        """Return a column without a patch, which is read as `dtype`, by default the base's."""
        return cls(base, NO_IDS, np.empty((0, *base.shape[1:]), dtype or base.dtype))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype that it is read in."""
        return self.rows.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one node's row."""
        return self.base.shape[1:]

    @property
    def mapped(self) -> bool:
        """True when the base lies in a file and is read on demand."""
        return isinstance(self.base, np.memmap)

    @property
    def nbytes(self) -> int:
        """Memory of all its arrays, without a mapped file."""
        base = 0 if self.mapped else self.base.nbytes
        return base + self.changed.nbytes + self.rows.nbytes

    @property
    def needs_compacting(self) -> bool:
        """True when the patch is so large that copying it for each change is slow."""
        return self.changed.size > max(_LEAST_PATCHED_ROWS, len(self.base) // PATCH_SHARE)

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value, for integers."""
        parts = [part for part in (self.base, self.rows) if part.size]
        return (
            min((int(part.min()) for part in parts), default=0),
            max((int(part.max()) for part in parts), default=0),
        )

    def gather(self, nodes: Ids, target: NDArray[Any]) -> int:
        """Write the rows of `nodes` [K] to `target` [K, ...], whose dtype holds every value.

        Returns for how long it waited for other servers, in ns: 0, as all rows are here.
        """
        if target.dtype == self.dtype == np.float32 and self.base.dtype.name in _WIDENED:
            base = self.base.reshape(len(self.base), math.prod(self.shape))
            native.gather_rows(base, self.changed, self.rows, nodes, target)
            return 0
        patched, places = found_in(self.changed, nodes)
        if len(self.base):
            rows = np.where(patched, 0, nodes)
            if target.dtype == self.base.dtype:
                # Without a mode, numpy would gather into a buffer of its own first.
                np.take(self.base, rows, axis=0, out=target, mode="clip")
            else:
                target[...] = self.base[rows]
        target[patched] = self.rows[places[patched]]
        return 0

    def rehearse(self, nodes: Ids, target: NDArray[Any]) -> int:
        """Do what `gather` does, without others; return how long these would take, in ns."""
        return self.gather(nodes, target)

    def publish(self) -> None:
        """Let other servers know of this version, before requests see it: there are none."""

    def updated(self, nodes: Ids, rows: NDArray[Any]) -> "Column":
        """Return the column with other rows for `nodes`, each of which is named once."""
        if not nodes.size:
            return self
        kept = ~np.isin(self.changed, nodes)
        found = np.concatenate([self.changed[kept], nodes])
        order = np.argsort(found)
        return Column(self.base, found[order], np.concatenate([self.rows[kept], rows])[order])

    def compacted(self, num_nodes: int, keeper: FeatureKeeper) -> "Column":
        """Return the same column of `num_nodes` nodes without a patch."""
        base = keeper.rewritten(self.base, num_nodes, self.changed, self.rows)
        return Column.of(base, self.dtype)

    def check(self, name: str, rows: NDArray[Any]) -> None:
        """Raise InvalidInput, naming `name`, unless `rows` [K, ...] can be rows of it."""
        if rows.shape[1:] != self.shape:
            if len(self.shape) == len(rows.shape[1:]) == 1:
                raise InvalidInput(
                    f"tensor '{name}': {rows.shape[1]} columns, but the graph has {self.shape[0]}"
                    " features"
                )
            raise InvalidInput(
                f"tensor '{name}': rows of shape {list(rows.shape[1:])}, but the graph has"
                f" {list(self.shape)}"
            )
        bad = ~np.isfinite(rows) if rows.dtype.kind == "f" else np.zeros(1, bool)
        if bad.any():
            at = np.unravel_index(int(bad.argmax()), rows.shape)
            where = ", ".join(str(int(i)) for i in at)
            raise InvalidInput(f"tensor '{name}' [{where}] is {rows[at]}; features must be finite")
