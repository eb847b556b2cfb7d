"""Requests that bring a graph of a file whole, with the tensors that the file has."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from loadgen.graph_files import Array, FileGraph, FileGraphs
from loadgen.inputs import Shapes, declaration_of, takes_edges
from loadgen.requests import parameters_of
from serve.client.arrays import array_for
from serve.client.errors import InvalidRequest
from serve.errors import ConfigError
from serve.graphs.random_inputs import declared_inputs
from serve.interface import InputSlot, Interface, is_float
from serve.typed_names import edge_ends, name_parts, typed_name
from serve.wire.messages import encode_request
from serve.workload import GraphRef, PoolSpec, TraceItem, WorkloadTask

_EDGES = "edge_index"


@dataclass(frozen=True, slots=True)
class FileRequests:
    """Requests for graphs of files. What a model requires and a graph lacks is drawn at random."""

    files: FileGraphs
    #: Inputs of each model.
    inputs: Mapping[str, Shapes]
    #: Estimates a request by model, nodes and edges.
    estimate_s: Callable[[str, int, int], float]

    @property
    def refs(self) -> tuple[GraphRef, ...]:
        """All graphs."""
        return tuple(
            GraphRef(self.files.name, index, graph.num_nodes, graph.num_edges)
            for index, graph in enumerate(self.files.graphs)
        )

    @property
    def sources(self) -> dict[str, str]:
        """The file or folder, and what of its requests is random."""
        drawn = sorted(
            {
                slot.name
                for shapes in self.inputs.values()
                for slot in declaration_of(shapes).inputs
                for graph in self.files.graphs
                if not slot.optional and _own_name(slot, graph) is None
            }
        )
        told = f", random {', '.join(drawn)}" if drawn else ""
        return {self.files.name: self.files.source + told}

    def check(self, pool: PoolSpec) -> None:
        """Raise ConfigError for a graph that is too large, or does not fit a model."""
        for graph in self.files.graphs:
            refuse_too_large(graph, pool)
            for model, shapes in self.inputs.items():
                tensors_of(graph, model, declaration_of(shapes), 0)

    def solo_s(self, task: WorkloadTask) -> float:
        """Return the server's estimate of the task's solo time, in seconds."""
        edges = task.graph.num_edges if takes_edges(self.inputs[task.model]) else 0
        return self.estimate_s(task.model, task.graph.num_nodes, edges)

    def message(self, item: TraceItem) -> bytes:
        """Encode a graph, and the target if set; raises ConfigError for another file's graph."""
        graphs = self.files.graphs
        known = self.refs[item.index] if 0 <= item.index < len(graphs) else None
        if item.graph != known:
            raise ConfigError(
                f"graph {item.dataset}/{item.index}: the trace is for other files than"
                f" {self.files.source}"
            )
        tensors = tensors_of(
            graphs[item.index], item.model, declaration_of(self.inputs[item.model]), item.index
        )
        return encode_request(item.model, tensors, parameters=parameters_of(item))


def refuse_too_large(graph: FileGraph, pool: PoolSpec) -> None:
    """Raise ConfigError for a graph that is over the limits of requests."""
    for count, most, what in (
        (graph.num_nodes, pool.max_nodes, "nodes"),
        (graph.num_edges, pool.max_edges, "edges"),
    ):
        if count > most:
            raise ConfigError(
                f"{graph.where}: {count} {what}, and a request has at most --max-{what} {most};"
                " only one graph alone, of one type, is cut into smaller ones"
            )


def tensors_of(graph: FileGraph, model: str, interface: Interface, seed: int) -> dict[str, Array]:
    """Return the inputs of `model` for a graph; raises ConfigError where one does not fit."""
    own = {
        slot.name: _own(slot, name, graph, model)
        for slot in interface.inputs
        if (name := _own_name(slot, graph)) is not None
    }
    counts = _counts(interface, own, graph, model)
    sizes = interface.sizes(counts)
    for slot in interface.inputs:
        if slot.name in own:
            _check_values(slot, own[slot.name], sizes, graph, interface)
    lacking = [slot for slot in interface.inputs if not slot.optional and slot.name not in own]
    if lacking:
        rng = np.random.default_rng([zlib.crc32(graph.where.encode()), seed])
        drawn = declared_inputs(interface, counts, rng)
        own |= {slot.name: drawn[slot.name] for slot in lacking}
    return {slot.name: own[slot.name] for slot in interface.inputs if slot.name in own}


def _own_name(slot: InputSlot, graph: FileGraph) -> str | None:
    """Return the name of the tensor for an input; None where the graph has none.

    An input without a type is that of the only type that has it, as for the Python client.
    """
    if slot.name in graph.arrays:
        return slot.name
    if name_parts(slot.name)[1]:
        return None
    typed = [name for name in graph.arrays if name_parts(name)[0] == slot.name]
    return typed[0] if len(typed) == 1 else None


def _own(slot: InputSlot, name: str, graph: FileGraph, model: str) -> Array:
    """Return a graph's tensor as the input takes it; raises ConfigError."""
    try:
        array = array_for(name, graph.arrays[name], slot.datatype, narrow=False)
    except InvalidRequest as error:
        raise ConfigError(f"{graph.where}: {error}; model '{model}' takes it") from None
    fits = len(array.shape) == len(slot.shape) and all(
        isinstance(wanted, str) or wanted == size
        for wanted, size in zip(slot.shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, slot.shape))
        raise ConfigError(
            f"{graph.where}: tensor '{name}': shape {list(array.shape)}; model '{model}' takes"
            f" [{wanted}]"
        )
    return array


def _counts(
    interface: Interface, own: Mapping[str, Array], graph: FileGraph, model: str
) -> tuple[int, ...]:
    """Return the counts of a request; raises ConfigError where nothing tells one, or two differ."""
    told = {
        symbol: (count, typed_name("num_nodes", kind))
        for kind, symbol in _node_symbols(interface).items()
        if (count := graph.nodes.get(kind)) is not None
    }
    for slot in interface.inputs:
        for dim, size in zip(slot.shape, own.get(slot.name, np.empty(0)).shape, strict=False):
            if slot.name in own and isinstance(dim, str):
                count, by = told.setdefault(dim, (size, slot.name))
                if count != size:
                    raise ConfigError(
                        f"{graph.where}: tensor '{slot.name}': {size} {dim}, but '{by}' tells"
                        f" {count}"
                    )
    for symbol in interface.divided:
        told.setdefault(symbol, (1, "one graph"))
    for symbol in interface.counts:
        if symbol not in told:
            names = [slot.name for slot in interface.inputs if symbol in slot.symbols]
            raise ConfigError(
                f"{graph.where}: model '{model}' takes '{names[0]}', which the graph lacks, and"
                f" nothing else tells how many {symbol} there are; the graph has"
                f" {', '.join(graph.arrays) or 'nothing'}"
            )
    return tuple(told[symbol][0] for symbol in interface.counts)


def _node_symbols(interface: Interface) -> dict[str, str]:
    """Return the symbol of each type of nodes, as far as names and edges tell."""
    found: dict[str, str] = {}
    for slot in interface.inputs:
        base, of = name_parts(slot.name)
        if base == _EDGES and slot.is_links:
            ends = edge_ends(of) if of else ("", "")
            found.update(zip(ends, slot.row_bounds, strict=True))
    if not found and len(interface.nodes) == 1:
        found[""] = interface.nodes[0]
    return found


def _check_values(
    slot: InputSlot,
    array: Array,
    sizes: Mapping[str, int],
    graph: FileGraph,
    interface: Interface,
) -> None:
    """Raise ConfigError for values outside what the model declares."""
    columns: Array
    ranges: list[tuple[float | None, float | None]]
    if array.size == 0 or is_float(slot.datatype) or slot.datatype == "BOOL":
        return
    columns, ranges = array[np.newaxis], [(slot.low, slot.high)]
    if slot.index and not interface.numbers_graphs(slot):
        columns = array if len(slot.index) > 1 else columns
        ranges = [(0, sizes[symbol]) for symbol in slot.index]
    elif slot.index:
        ranges = [(0, None)]
    elif slot.columns:
        columns, ranges = np.moveaxis(array, -1, 0), list(slot.columns)
    for values, (low, high) in zip(columns, ranges, strict=True):
        least, largest = int(values.min()), int(values.max())
        if (low is not None and least < low) or (high is not None and largest >= high):
            above = "" if high is None else f" and below {high:g}"
            raise ConfigError(
                f"{graph.where}: tensor '{slot.name}': values {least} to {largest}; at least"
                f" {low or 0:g}{above} is wanted"
            )
