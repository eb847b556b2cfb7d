"""Updates of a resident graph with several types; see ``serve.graphs.updates`` for the rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.errors import InvalidInput
from serve.graphs.columns import Column
from serve.graphs.edges import Edges, check_ids
from serve.graphs.features import FeatureKeeper
from serve.graphs.resident import Versioned
from serve.graphs.typed import NodeTable, TypedSnapshot
from serve.graphs.updates import NO_EDGES, check_once
from serve.typed_names import edge_ends

Arrays = Mapping[str, NDArray[Any]]
#: Name of the ids among the tensors of changed nodes; no feature has it.
IDS = "ids"


@dataclass(frozen=True, slots=True, eq=False)
class TypedChange:
    """A change, by node type or edge type. Edges are int64 [2, E], sources first."""

    #: All features of added nodes, which get the next ids.
    add_nodes: Mapping[str, Arrays] = field(default_factory=dict)
    #: Ids of nodes, each once, as `ids`; and their new features, of which some may be left out.
    set_nodes: Mapping[str, Arrays] = field(default_factory=dict)
    #: Edges to remove, with all their duplicates.
    remove_edges: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    add_edges: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


class TypedGraph(Versioned[TypedSnapshot, TypedChange]):
    """A graph with several types of nodes and edges."""

    def __init__(self, name: str, first: TypedSnapshot, keeper: FeatureKeeper, source: str) -> None:
        """`keeper` stores the features that changes make."""
        super().__init__(name, source, first, lambda old, change: changed(old, change, keeper))


def changed(old: TypedSnapshot, change: TypedChange, keeper: FeatureKeeper) -> TypedSnapshot:
    """Return the next version; raises InvalidInput, which names tensor, index and rule."""
    for given, known in (
        (change.add_nodes, old.nodes),
        (change.set_nodes, old.nodes),
        (change.remove_edges, old.edges),
        (change.add_edges, old.edges),
    ):
        for name in given:
            if name not in known:
                raise InvalidInput(f"the graph has no type '{name}'; it has {', '.join(known)}")
    nodes = dict(old.nodes)
    for name, features in change.add_nodes.items():
        nodes[name] = _added(name, nodes[name], features)
    for name, features in change.set_nodes.items():
        nodes[name] = _replaced(name, nodes[name], old.nodes[name].num_nodes, features)
    edges = {name: _rewired(name, held, nodes, change) for name, held in old.edges.items()}
    for name, table in nodes.items():
        if any(column.needs_compacting for column in table.columns.values()):
            columns = {
                key: column.compacted(table.num_nodes, keeper)
                for key, column in table.columns.items()
            }
            nodes[name] = NodeTable(table.num_nodes, columns)
    return TypedSnapshot(old.version + 1, nodes, edges)


def _added(name: str, table: NodeTable, features: Arrays) -> NodeTable:
    if not table.columns:
        raise InvalidInput(f"nodes of type '{name}' have no features, so none can be added")
    for key in [*features, *table.columns]:
        if key not in table.columns or key not in features:
            raise InvalidInput(
                f"tensor 'add_nodes.{name}.{key}': added nodes need all features of their type,"
                f" {', '.join(table.columns)}"
            )
    count = len(next(iter(features.values())))
    # Checked first: rows without columns may be any number and take no bytes of a message.
    rows = {
        key: _checked(f"add_nodes.{name}.{key}", column, features[key], count)
        for key, column in table.columns.items()
    }
    ids = np.arange(table.num_nodes, table.num_nodes + count)
    return NodeTable(
        table.num_nodes + count,
        {key: column.updated(ids, rows[key]) for key, column in table.columns.items()},
    )


def _replaced(name: str, table: NodeTable, old_nodes: int, given: Arrays) -> NodeTable:
    ids, tensor = given.get(IDS), f"set_nodes.{name}.{IDS}"
    if ids is None or len(given) == 1:
        raise InvalidInput(f"tensor '{tensor}' needs features beside it, and these need it")
    # A node that this change adds has its features from there.
    check_ids(tensor, ids, old_nodes)
    check_once(tensor, ids)
    columns = dict(table.columns)
    for key, rows in given.items():
        if key == IDS:
            continue
        if key not in columns:
            raise InvalidInput(
                f"tensor 'set_nodes.{name}.{key}': nodes of this type have"
                f" {', '.join(columns) or 'no features'}"
            )
        where = f"set_nodes.{name}.{key}"
        columns[key] = columns[key].updated(ids, _checked(where, columns[key], rows, ids.size))
    return NodeTable(table.num_nodes, columns)


def _checked(where: str, column: Column, given: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the given rows in the column's dtype; raises InvalidInput unless they are `count`.

    Integers must be in its range, and only integers and booleans become integers.
    """
    if not np.can_cast(given.dtype, column.dtype, "same_kind"):
        raise InvalidInput(f"tensor '{where}': {given.dtype}, but the graph has {column.dtype}")
    with np.errstate(over="ignore"):
        rows = given.astype(column.dtype)
    if column.dtype.kind != "f" and not (rows == given).all():
        raise InvalidInput(f"tensor '{where}': its values do not fit {column.dtype}")
    if len(rows) != count:
        raise InvalidInput(f"tensor '{where}': {len(rows)} rows for {count} nodes")
    column.check(where, rows)
    return rows


def _rewired(name: str, edges: Edges, nodes: Mapping[str, NodeTable], change: TypedChange) -> Edges:
    """Return the edges of one type after the change."""
    source, target = (nodes[end].num_nodes for end in edge_ends(name))
    remove, add = change.remove_edges.get(name), change.add_edges.get(name)
    if remove is None and add is None and edges.num_nodes == target:
        return edges
    found = edges.updated(
        NO_EDGES if remove is None else remove,
        NO_EDGES if add is None else add,
        num_sources=source,
        num_nodes=target,
        of=f".{name}",
    )
    return found.compacted(source) if found.needs_compacting else found
