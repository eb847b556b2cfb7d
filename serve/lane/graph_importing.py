"""Reads a graph of PyG for ``serve.commands.import_graph``, in a process of its own with torch.

    echo '{"source": "a.pt", "target": "a.safetensors"}' |
        python -m serve.lane.reader serve.lane.graph_importing

`torch.load(weights_only=True)` runs no code that a file brings: it makes tensors, and objects of
the classes of PyG that are named here or that PyG itself calls safe.
"""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch_geometric.data import Data, HeteroData
from torch_geometric.data import data as of_data
from torch_geometric.data import storage as of_storage

from serve.errors import ConfigError, ServeError
from serve.graphs.import_messages import GraphOrder, GraphRead
from serve.graphs.typed_load import is_wanted
from serve.interface import DTYPES
from serve.lane.pickles import read_pickle
from serve.typed_names import edge_type, typed_name

Tensors = dict[str, torch.Tensor]

#: Classes of PyG in a saved graph, beside those that PyG registers when it is imported.
_CLASSES = [
    getattr(module, name)
    for module, names in (
        (of_storage, ("BaseStorage", "NodeStorage", "EdgeStorage", "GlobalStorage", "AttrType")),
        (of_data, ("DataEdgeAttr", "DataTensorAttr")),
    )
    for name in names
    if hasattr(module, name)
]
_ADVICE = "Save the graph's tensors alone: torch.save(data.to_dict(), …)"
_EDGES = "edge_index"
_LABELS = "y"


def main() -> None:
    """Read the order from stdin, carry it out, and write what was found to stdout."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=GraphOrder)
    with redirect_stdout(sys.stderr):
        try:
            found = GraphRead(notes=convert(Path(order.source), Path(order.target)))
        except ServeError as error:
            found = GraphRead(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


def convert(source: Path, target: Path) -> tuple[str, ...]:
    """Write the arrays of the graph in `source` to `target`; return notes on what was changed.

    Raises ConfigError for a file that holds no graph, or none that a server can hold.
    """
    graph = read_graph(source)
    notes: list[str] = []
    if isinstance(graph, HeteroData):
        tensors = _typed(graph, source, notes)
    else:
        tensors = _plain(graph, source, notes)
    if target.suffix == ".npz":
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        np.savez(target, **arrays)
    else:
        save_file(tensors, target)
    return tuple(notes)


def read_graph(source: Path) -> Data | HeteroData:
    """Return the graph that `torch.save` wrote; raises ConfigError for anything else."""
    return graph_of(read_saved(source), source)


def read_saved(source: Path) -> Any:
    """Return the tensors and graphs that `torch.save` wrote; raises ConfigError for others."""
    with torch.serialization.safe_globals(_CLASSES):
        return read_pickle(source, "a graph", _ADVICE)


def graph_of(held: Any, source: Path) -> Data | HeteroData:
    """Return the graph in what a file held, which may be an in-memory dataset's with one graph."""
    if isinstance(held, tuple) and len(held) >= 2:
        held, slices, *kind = held
        if slices is not None:
            raise ConfigError(
                f"{source}: it holds several graphs; save one: torch.save(dataset[0], …)"
            )
        if isinstance(held, Mapping) and kind and kind[0] in (Data, HeteroData):
            held = kind[0].from_dict(held)
    if type(held) is dict and held:
        # As `to_dict` of either returns it: by type where there are several.
        typed = any(isinstance(value, Mapping) for value in held.values())
        held = (HeteroData if typed else Data).from_dict(dict(held))
    if not isinstance(held, Data | HeteroData):
        raise ConfigError(
            f"{source}: it holds a {type(held).__name__}; a Data or HeteroData of PyG is wanted"
        )
    return held


def _plain(graph: Data, source: Path, notes: list[str]) -> Tensors:
    found: Tensors = {}
    for name in ("x", _EDGES):
        value = graph.get(name)
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{source}: the graph has no tensor '{name}'; a graph to be held has x [N, F] and"
                " edge_index [2, E]"
            )
        found[name] = dense(name, value, notes)
    labels = graph.get(_LABELS)
    if isinstance(labels, torch.Tensor) and is_class_of_nodes(labels, len(found["x"])):
        found[_LABELS] = dense(_LABELS, labels.reshape(-1), notes)
    _tell_left_out([name for name in graph.keys() if name not in found], notes)  # noqa: SIM118
    found["num_nodes"] = torch.tensor(len(found["x"]))
    return found


def is_class_of_nodes(labels: torch.Tensor, num_nodes: int) -> bool:
    """Whether there is an integer for each node, as [N] or [N, 1]: what a training learns."""
    integers = not labels.is_floating_point() and not labels.is_complex()
    return integers and labels.shape in ((num_nodes,), (num_nodes, 1))


def _typed(graph: HeteroData, source: Path, notes: list[str]) -> Tensors:
    found: Tensors = {}
    left_out: list[str] = []
    for store in graph.node_stores:
        kind = checked_type(str(store._key), source)
        count = store.num_nodes
        if count is None:
            raise ConfigError(
                f"{source}: how many nodes '{kind}' has is unknown; set data['{kind}'].num_nodes"
            )
        found[typed_name("num_nodes", kind)] = torch.tensor(int(count))
        for name, value in store.items():
            full = typed_name(name, kind)
            fits = isinstance(value, torch.Tensor) and value.dim() and len(value) == count
            if fits and is_wanted(full):
                found[full] = dense(full, value, notes)
            elif name != "num_nodes":
                left_out.append(full)
    for store in graph.edge_stores:
        kind = edge_type(*(checked_type(str(part), source) for part in store._key))
        edges = store.get(_EDGES)
        if not isinstance(edges, torch.Tensor):
            raise ConfigError(f"{source}: edges '{kind}' have no tensor 'edge_index' [2, E]")
        full = typed_name(_EDGES, kind)
        found[full] = dense(full, edges, notes)
        left_out += [typed_name(name, kind) for name in store.keys() if name != _EDGES]  # noqa: SIM118
    _tell_left_out(left_out, notes)
    return found


def checked_type(kind: str, source: Path) -> str:
    """Return the name of a type; raises ConfigError where it would not be found again."""
    if not kind or "." in kind or "__" in kind or "/" in kind:
        raise ConfigError(
            f"{source}: the type '{kind}' has '.', '__' or '/' in its name, which separate names of"
            " types; rename it"
        )
    return kind


def dense(name: str, value: torch.Tensor, notes: list[str]) -> torch.Tensor:
    """Return the values as one plain tensor of a dtype that graphs may have."""
    if hasattr(value, "as_tensor"):
        value = value.as_tensor()
    if value.layout != torch.strided:
        value = value.to_dense()
        notes.append(f"'{name}' was sparse and became dense")
    if str(value.dtype).removeprefix("torch.") not in DTYPES.values():
        wider = torch.float32 if value.is_floating_point() else torch.int64
        notes.append(f"'{name}' was {value.dtype} and became {wider}")
        value = value.to(wider)
    # A copy, as safetensors takes no tensors that share memory.
    return value.detach().clone(memory_format=torch.contiguous_format)


def _tell_left_out(names: list[str], notes: list[str]) -> None:
    if names:
        notes.append(f"left out, as graphs do not hold it: {', '.join(sorted(names))}")
