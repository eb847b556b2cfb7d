"""How a model that declares its inputs gets them from a resident graph.

`x.author` is a feature of the nodes of a type, and `edge_index.author__writes__paper` are the edges
of one, sampled. A graph with one type of each has names without a type: `x` and `edge_index`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from serve.errors import Mismatch
from serve.graphs.typed import TypedSnapshot
from serve.graphs.typed_load import EDGES
from serve.interface import InputSlot, Interface, is_float
from serve.server.catalogue import ModelEntry
from serve.typed_names import edge_ends, edge_type, name_parts


@dataclass(frozen=True, slots=True)
class TypedFit:
    """Which of a graph's things each input, output and count of a model is of."""

    #: The node type or edge type of each of the model's counts, in their order.
    things: tuple[str, ...]
    #: Edge type of each input that holds edges.
    edges: Mapping[str, str]
    #: Node type and feature of each other input that is given.
    features: Mapping[str, tuple[str, str]]
    #: Outputs with a row for each node of a type, by node type.
    outputs: Mapping[str, tuple[str, ...]]


def fit(graph: str, snapshot: TypedSnapshot, entry: ModelEntry) -> TypedFit:
    """Return how the model takes the graph of that name; raises Mismatch, naming both."""
    interface, model = entry.spec.interface, entry.spec.name
    if interface is None:
        raise Mismatch(
            f"graph '{graph}' has several types of nodes or edges, and model '{model}' declares no"
            " inputs (model.input), so it cannot take them"
        )
    things: dict[str, str] = {}
    edges: dict[str, str] = {}
    features: dict[str, tuple[str, str]] = {}
    for slot in interface.inputs:
        fault = _column_fault(slot, snapshot)
        if slot.is_links and name_parts(slot.name)[0] == EDGES:
            fault = _edges_fault(slot, snapshot)
        if fault and slot.optional:
            continue
        if fault:
            raise Mismatch(f"model '{model}' takes '{slot.name}'; graph '{graph}' {fault}")
        base, of = name_parts(slot.name)
        if slot.is_links:
            of = edges[slot.name] = of or edge_type("", "", "")
        else:
            features[slot.name] = of, base
        (symbol,) = slot.symbols
        if things.setdefault(symbol, of) != of:
            raise Mismatch(
                f"model '{model}': '{symbol}' counts '{things[symbol]}' and '{of}', which graph"
                f" '{graph}' has numbers of their own of"
            )
    for text in _index_faults(interface, things, edges):
        raise Mismatch(f"model '{model}' and graph '{graph}': {text}")
    outputs: dict[str, tuple[str, ...]] = {}
    for output in interface.outputs:
        of = things.get(output.symbols[0], "") if output.symbols else ""
        if output.symbols and output.symbols[0] in things and of in snapshot.nodes:
            outputs[of] = (*outputs.get(of, ()), output.name)
    if not outputs:
        raise Mismatch(
            f"model '{model}' has no output with a row for each node of a type, so it cannot be "
            f"asked for nodes of graph '{graph}'"
        )
    return TypedFit(tuple(things[symbol] for symbol in interface.counts), edges, features, outputs)


def _column_fault(slot: InputSlot, snapshot: TypedSnapshot) -> str:
    """Return why the graph has no such feature for the input; empty when it has."""
    base, of = name_parts(slot.name)
    if "" in snapshot.nodes and of:
        return "has one type of nodes"
    if of not in snapshot.nodes:
        return f"has the types {', '.join((*snapshot.nodes, *snapshot.edges))}"
    column = snapshot.nodes[of].columns.get(base)
    if column is None:
        known = ", ".join(snapshot.nodes[of].columns) or "no feature"
        return f"has {known} of '{of}'" if of else f"has {known}"
    if slot.index:
        return "cannot give it: it points to nodes, of which a sample has others"
    wanted = (slot.symbols[0] if slot.symbols else -1, *column.shape)
    if slot.shape != wanted or not np.can_cast(column.dtype, slot.dtype, "safe"):
        return f"has {column.dtype} {['N', *column.shape]}, not {slot.dtype} {list(slot.shape)}"
    if slot.columns:
        return "cannot give it: its columns have ranges of their own, which held graphs lack"
    if not is_float(slot.datatype) and slot.datatype != "BOOL":
        low, high = column.bounds
        least, beyond = slot.bounds
        if not least <= low <= high < beyond and column.base.size:
            return f"has values from {low} to {high}, not all in [{least:g}, {beyond:g})"
    return ""


def _edges_fault(slot: InputSlot, snapshot: TypedSnapshot) -> str:
    """Return why the graph has no such edges for the input; empty when it has."""
    _, of = name_parts(slot.name)
    if (of or edge_type("", "", "")) not in snapshot.edges:
        return f"has the edges {', '.join(filter(None, snapshot.edges))}"
    return "" if slot.symbols else "has any number of them"


def _index_faults(
    interface: Interface, things: Mapping[str, str], edges: Mapping[str, str]
) -> Iterator[str]:
    """Yield each input of edges whose ends are declared to be of other types than they are."""
    for name, of in edges.items():
        bounds = interface.by_name[name].row_bounds
        for symbol, end in zip(bounds, edge_ends(of), strict=True):
            if things.get(symbol) != end:
                counted = things.get(symbol, "nothing that the graph has")
                yield (
                    f"'{name}' leads to or from '{end}', but its index says '{symbol}', which"
                    f" counts '{counted}'"
                )
