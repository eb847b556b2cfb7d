"""Reads graphs of PyG for ``loadgen.graph_files``, in a process of its own with torch.

    echo '{"sources": ["a.pt"], …}' | python -m serve.lane.reader serve.lane.graphs_reading

A file holds a `Data`, a `HeteroData`, a list of them, or what PyG writes for an in-memory dataset.
No code that a file brings is run, see ``graph_importing``.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.separate import separate

from serve.errors import ConfigError, ServeError
from serve.graphs.import_messages import GraphsOrder, GraphsRead
from serve.lane.graph_importing import checked_type, dense, graph_of, read_saved
from serve.typed_names import edge_type, typed_name

#: Number of graphs, and what returns one of them.
Graphs = tuple[int, Callable[[int], Data | HeteroData]]


def main() -> None:
    """Read the order from stdin, carry it out, and write what was found to stdout."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=GraphsOrder)
    with redirect_stdout(sys.stderr):
        try:
            found = write_graphs(order)
        except ServeError as error:
            found = GraphsRead(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


def write_graphs(order: GraphsOrder) -> GraphsRead:
    """Write the tensors of all graphs that are wanted; raises ConfigError for a file without."""
    tensors: dict[str, torch.Tensor] = {}
    graphs: list[tuple[int, int]] = []
    totals = []
    for at, text in enumerate(order.sources):
        source = Path(text)
        total, graph = _graphs_in(read_saved(source), source)
        totals.append(total)
        taken = min(total, order.most_each)
        for index in (number * total // taken for number in range(taken)):
            where = f"{source}, graph {index}" if total > 1 else text
            for name, tensor in _tensors(graph(index), where):
                tensors[f"{len(graphs)}/{name}"] = tensor
            graphs.append((at, index))
    save_file(tensors, order.target)
    return GraphsRead(graphs=tuple(graphs), totals=tuple(totals))


def _graphs_in(held: Any, source: Path) -> Graphs:
    """Return the graphs in what a file held; raises ConfigError."""
    if isinstance(held, list):
        if not held:
            raise ConfigError(f"{source}: it holds an empty list; a graph at least is wanted")
        return len(held), lambda index: graph_of(held[index], source)
    if isinstance(held, tuple) and len(held) >= 2 and isinstance(held[1], Mapping):
        whole, slices, *kind = held
        if isinstance(whole, Mapping) and kind and kind[0] in (Data, HeteroData):
            whole = kind[0].from_dict(dict(whole))
        return _sliced(graph_of(whole, source), slices, source)
    found = graph_of(held, source)
    return 1, lambda _: found


def _sliced(whole: Data | HeteroData, slices: Mapping[Any, Any], source: Path) -> Graphs:
    """Return the graphs of an in-memory dataset, which keeps them joined."""
    ends = next(iter(slices.values()), None)
    while isinstance(ends, Mapping):  # by type
        ends = next(iter(ends.values()), None)
    if ends is None or len(ends) < 2:
        raise ConfigError(f"{source}: it holds a dataset without graphs")
    # A type of nodes without tensors has no slices, which PyG does not expect.
    typed = whole.node_types if isinstance(whole, HeteroData) else []
    all_slices: dict[Any, Any] = {kind: {} for kind in typed} | dict(slices)
    one = partial(separate, type(whole), whole, slice_dict=all_slices, decrement=False)
    return len(ends) - 1, lambda index: _separated(one, index, source)


def _separated(one: Callable[[int], Any], index: int, source: Path) -> Data | HeteroData:
    try:
        return graph_of(one(index), source)
    except (RuntimeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}, graph {index}: cannot be taken apart: {error}") from error


def _tensors(graph: Data | HeteroData, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the graph's tensors as a model declares them, and its numbers of nodes."""
    for store in graph.stores:
        key = store._key
        if isinstance(key, tuple):
            kind = edge_type(*(checked_type(str(part), Path(where)) for part in key))
        else:
            kind = "" if key is None else checked_type(str(key), Path(where))
        for name, value in store.items():
            if isinstance(value, torch.Tensor) and name != "num_nodes":
                yield typed_name(name, kind), dense(name, value, [])
        if not isinstance(key, tuple) and (count := _num_nodes(graph, store, key)) is not None:
            yield typed_name("num_nodes", kind), torch.tensor(count)


def _num_nodes(graph: Data | HeteroData, store: Any, key: str | None) -> int | None:
    """Return the nodes of a store; None where it has none, or does not tell."""
    if key is None and isinstance(graph, HeteroData):
        return None  # attributes of the whole graph
    count = store.num_nodes
    return None if count is None else int(count)
