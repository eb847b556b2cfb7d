"""Updates of a resident graph: a change is checked as a whole, then makes the next version.

A change is atomic. Its order is: add nodes, replace features, remove edges, add edges; so an added
node can get edges in the same change.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.errors import InvalidInput
from serve.graphs.csr import Ids, Rows, grouped, joined
from serve.graphs.snapshot import Floats, Patch, Snapshot, no_patch

_NO_EDGES = np.empty((2, 0), np.int64)
_NO_IDS = np.empty(0, np.int64)
#: A patch of more entries than these and than 1/8 of the base is compacted into a new base.
_PATCH_SHARE = 8
_LEAST_PATCHED_EDGES, _LEAST_PATCHED_ROWS = 1 << 16, 1 << 12


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A change. Edges are int64 [2, E], sources first; features FP32 [rows, F]."""

    #: Features of added nodes, which get the next ids.
    add_x: Floats | None = None
    #: Nodes and their new features, each node once.
    set_ids: Ids = field(default_factory=lambda: _NO_IDS)
    set_x: Floats | None = None
    #: Edges to remove, with all their duplicates.
    remove_edges: NDArray[np.int64] = field(default_factory=lambda: _NO_EDGES)
    add_edges: NDArray[np.int64] = field(default_factory=lambda: _NO_EDGES)


def changed(old: Snapshot, change: Change) -> Snapshot:
    """Return the next version; raises InvalidInput, which names tensor, index and rule."""
    num_added = 0 if change.add_x is None else change.add_x.shape[0]
    num_nodes = old.num_nodes + num_added
    featured, x = _features(old, change, num_nodes)
    nodes, rows = _topology(old, change, num_nodes)
    # Edges are counted over the changed rows only: summing over the graph would cost O(N).
    before, after = old.neighbours(nodes).values.size, rows.values.size
    merged = Patch(*_merged_rows(old.patch, nodes, rows), *_merged_x(old.patch, featured, x))
    return Snapshot(
        version=old.version + 1,
        num_nodes=num_nodes,
        num_edges=old.num_edges + after - before,
        base=old.base,
        x=old.x,
        patch=merged,
    )


def needs_compacting(snapshot: Snapshot) -> bool:
    """Return True when the patch is so large that copying it for each change is slow."""
    patch = snapshot.patch
    edges, rows = patch.rows.values.size + patch.nodes.size, patch.featured.size
    most_edges = max(_LEAST_PATCHED_EDGES, snapshot.base.values.size // _PATCH_SHARE)
    return edges > most_edges or rows > max(_LEAST_PATCHED_ROWS, len(snapshot.x) // _PATCH_SHARE)


def compacted(snapshot: Snapshot, x: NDArray[Any]) -> Snapshot:
    """Return the same version without a patch; `x` [N, F] are all its features."""
    starts, values = native.build_rows(snapshot.edges(), snapshot.num_nodes)
    return Snapshot(
        version=snapshot.version,
        num_nodes=snapshot.num_nodes,
        num_edges=snapshot.num_edges,
        base=Rows(starts, values),
        x=x,
        patch=no_patch(snapshot.num_features),
    )


def _features(old: Snapshot, change: Change, num_nodes: int) -> tuple[Ids, Floats]:
    """Return the nodes with new features, ascending, and these features."""
    ids, parts = [], []
    if change.add_x is not None:
        _check_x("add_x", change.add_x, old.num_features)
        ids.append(np.arange(old.num_nodes, num_nodes))
        parts.append(change.add_x)
    rows = 0 if change.set_x is None else change.set_x.shape[0]
    if rows != change.set_ids.size:
        raise InvalidInput(f"tensor 'set_x': {rows} rows for {change.set_ids.size} 'set_ids'")
    if change.set_x is not None:
        _check_x("set_x", change.set_x, old.num_features)
        _check_ids("set_ids", change.set_ids, num_nodes)
        _check_once("set_ids", change.set_ids)
        # A node that this change adds has its features from `add_x`.
        _check_ids("set_ids", change.set_ids, old.num_nodes)
        ids.append(change.set_ids)
        parts.append(change.set_x)
    if not ids:
        return _NO_IDS, np.empty((0, old.num_features), np.float32)
    found, x = np.concatenate(ids), np.concatenate(parts)
    order = np.argsort(found)
    return found[order], x[order]


def _topology(old: Snapshot, change: Change, num_nodes: int) -> tuple[Ids, Rows]:
    """Return the nodes with changed in-neighbours, ascending, and these in-neighbours."""
    _check_ids("remove_edges", change.remove_edges, num_nodes)
    _check_ids("add_edges", change.add_edges, num_nodes)
    nodes = np.unique(np.concatenate([change.remove_edges[1], change.add_edges[1]]))
    rows = old.neighbours(nodes)
    sources, ends = rows.values, rows.row_numbers()
    if change.remove_edges.size:
        present = ends * num_nodes + sources
        removed = np.searchsorted(nodes, change.remove_edges[1]) * num_nodes
        removed += change.remove_edges[0]
        missing = ~np.isin(removed, present)
        if missing.any():
            at = int(missing.argmax())
            source, end = change.remove_edges[:, at].tolist()
            raise InvalidInput(
                f"tensor 'remove_edges' [:, {at}]: there is no edge {source} → {end}"
            )
        kept = ~np.isin(present, removed)
        sources, ends = sources[kept], ends[kept]
    sources = np.concatenate([sources, change.add_edges[0]])
    ends = np.concatenate([ends, np.searchsorted(nodes, change.add_edges[1])])
    return nodes, grouped(ends, sources, nodes.size)


def _merged_rows(patch: Patch, nodes: Ids, rows: Rows) -> tuple[Ids, Rows]:
    """Merge new rows into the patch's rows; new ones replace old ones."""
    if not nodes.size:
        return patch.nodes, patch.rows
    kept = np.flatnonzero(~np.isin(patch.nodes, nodes))
    found = np.concatenate([patch.nodes[kept], nodes])
    order = np.argsort(found)
    return found[order], joined([patch.rows.take(kept), rows]).take(order)


def _merged_x(patch: Patch, featured: Ids, x: Floats) -> tuple[Ids, Floats]:
    """Merge new features into the patch's features; new ones replace old ones."""
    if not featured.size:
        return patch.featured, patch.x
    kept = ~np.isin(patch.featured, featured)
    found = np.concatenate([patch.featured[kept], featured])
    order = np.argsort(found)
    return found[order], np.concatenate([patch.x[kept], x])[order]


def _check_ids(name: str, ids: NDArray[np.int64], num_nodes: int) -> None:
    bad = (ids < 0) | (ids >= num_nodes)
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), ids.shape)
        where = ", ".join(str(int(i)) for i in at)
        raise InvalidInput(
            f"tensor '{name}' [{where}] is {ids[at]}; it must be in [0, {num_nodes})"
        )


def _check_once(name: str, ids: Ids) -> None:
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(np.diff(ids[order]) == 0)
    if again.size:
        at = int(order[again + 1].min())
        raise InvalidInput(f"tensor '{name}' [{at}]: node {ids[at]} is given twice")


def _check_x(name: str, x: Floats, num_features: int) -> None:
    if x.shape[1] != num_features:
        raise InvalidInput(
            f"tensor '{name}': {x.shape[1]} columns, but the graph has {num_features} features"
        )
    bad = ~np.isfinite(x)
    if bad.any():
        row, column = np.unravel_index(int(bad.argmax()), x.shape)
        raise InvalidInput(
            f"tensor '{name}' [{row}, {column}] is {x[row, column]}; features must be finite"
        )
