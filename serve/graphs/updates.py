"""Updates of a resident graph: a change is checked as a whole, then makes the next version.

A change is atomic. Its order is: add nodes, replace features, remove edges, add edges; so an added
node can get edges in the same change.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from serve.errors import InvalidInput
from serve.graphs.columns import Column
from serve.graphs.csr import Ids
from serve.graphs.edges import NO_IDS, check_ids
from serve.graphs.features import FeatureKeeper
from serve.graphs.snapshot import Floats, Snapshot

NO_EDGES: NDArray[np.int64] = np.empty((2, 0), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A change. Edges are int64 [2, E], sources first; features FP32 [rows, F]."""

    #: Features of added nodes, which get the next ids.
    add_x: Floats | None = None
    #: Nodes and their new features, each node once.
    set_ids: Ids = field(default_factory=lambda: NO_IDS)
    set_x: Floats | None = None
    #: Edges to remove, with all their duplicates.
    remove_edges: NDArray[np.int64] = field(default_factory=lambda: NO_EDGES)
    add_edges: NDArray[np.int64] = field(default_factory=lambda: NO_EDGES)


def changed(old: Snapshot, change: Change, keeper: FeatureKeeper) -> Snapshot:
    """Return the next version, with `keeper` storing features that are worked into a new base.

    Raises InvalidInput, which names tensor, index and rule.
    """
    column, num_nodes = _features(old, change)
    new = old.next(column, num_nodes, change.remove_edges, change.add_edges)
    if new.column.needs_compacting or new.in_edges.needs_compacting:
        column = new.column.compacted(num_nodes, keeper)
        new = replace(new, in_edges=new.in_edges.compacted(num_nodes), column=column)
    return new


def _features(old: Snapshot, change: Change) -> tuple[Column, int]:
    """Return the new features, and the number of nodes."""
    column, num_nodes = old.column, old.num_nodes
    if change.add_x is not None:
        column.check("add_x", change.add_x)
        num_nodes += len(change.add_x)
        column = column.updated(np.arange(old.num_nodes, num_nodes), change.add_x)
    rows = 0 if change.set_x is None else change.set_x.shape[0]
    if rows != change.set_ids.size:
        raise InvalidInput(f"tensor 'set_x': {rows} rows for {change.set_ids.size} 'set_ids'")
    if change.set_x is not None:
        column.check("set_x", change.set_x)
        # A node that this change adds has its features from `add_x`.
        check_ids("set_ids", change.set_ids, old.num_nodes)
        check_once("set_ids", change.set_ids)
        column = column.updated(change.set_ids, change.set_x)
    return column, num_nodes


def check_once(name: str, ids: Ids) -> None:
    """Raise InvalidInput, with the place, for an id that is given twice."""
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(np.diff(ids[order]) == 0)
    if again.size:
        at = int(order[again + 1].min())
        raise InvalidInput(f"tensor '{name}' [{at}]: node {ids[at]} is given twice")
