"""Graphs of files, which requests bring whole, with the tensors that the files have.

A file is an archive (.npz), a .safetensors file, or what PyG saved (.pt): a `Data`, a `HeteroData`,
a list of them, or an in-memory dataset. A process with torch reads the latter, and runs no code
that they bring. `docs/load.md` says what `--data` may name.
"""

import importlib.util
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.commands.torch_reader import read_apart
from serve.errors import ConfigError, ModelError
from serve.graphs.archive import read_archive
from serve.graphs.datasets import TABLE_4, find_file, graph_name
from serve.graphs.import_messages import GraphsOrder, GraphsRead
from serve.graphs.load import graph_arrays
from serve.typed_names import edge_ends, name_parts, typed_name

Array = NDArray[Any]

#: Most graphs that a run takes of its files, evenly spaced.
MOST_GRAPHS = 1000
_PICKLED = (".pt", ".pth")
_SUFFIXES = (".npz", ".safetensors", *_PICKLED)
#: What PyG writes beside the graphs of a dataset.
_NO_GRAPHS = ("pre_filter.pt", "pre_transform.pt")
_READER = "serve.lane.graphs_reading"
_EDGES, _COUNT = "edge_index", "num_nodes"
#: Arrays that have a row for each node, where no count of them is told.
_OF_NODES = ("x", "pos", "z", "batch")


@dataclass(frozen=True, slots=True)
class FileGraph:
    """One graph."""

    #: File, and which graph of several in it, for people.
    where: str
    #: Tensors by name, as a model declares them: `x`, or `x.author` where there are types.
    arrays: Mapping[str, Array]
    #: Nodes of each type; of the type "" where there is one.
    nodes: Mapping[str, int]

    @property
    def num_nodes(self) -> int:
        """Nodes of all types."""
        return sum(self.nodes.values())

    @property
    def num_edges(self) -> int:
        """Edges of all types."""
        found = (array for name, array in self.arrays.items() if name_parts(name)[0] == _EDGES)
        return sum(array.shape[1] for array in found)

    @property
    def edges(self) -> Array:
        """Edges [2, E] of a graph of one type, without any where it has none."""
        return self.arrays.get(_EDGES, np.zeros((2, 0), np.int64))

    @property
    def is_typed(self) -> bool:
        """True for a graph with types of nodes."""
        return any(self.nodes)


@dataclass(frozen=True, slots=True)
class FileGraphs:
    """The graphs that `--data` names, or those of them that a run takes."""

    #: By which traces name them.
    name: str
    #: File or folder, and how many graphs there are, for people.
    source: str
    graphs: tuple[FileGraph, ...]


def names_own_graphs(path: Path | None) -> bool:
    """Return True for graphs of a user's own; False for a folder of the datasets of Table 4."""
    if path is None or not path.is_dir():
        return path is not None and path.is_file()
    return not any(find_file(name, path) for name in TABLE_4)


def read_graphs(path: Path) -> FileGraphs:
    """Read the graphs at `path`; raises ConfigError that names file, tensor and rule."""
    files = _files(path)
    try:
        facts = tuple((file, file.stat().st_mtime_ns) for file in files)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    graphs, total = _read(facts)
    source = f"{'folder' if path.is_dir() else 'file'} {path.name}"
    if total > 1:
        taken = f"{total}" if len(graphs) == total else f"{len(graphs)} of {total}"
        source += f", {taken} graphs"
    return FileGraphs(graph_name(path), source, graphs)


def _files(path: Path) -> list[Path]:
    """Return the files of graphs at `path`; raises ConfigError where there are none."""
    if not path.is_dir():
        if path.suffix not in _SUFFIXES:
            raise ConfigError(f"{path}: a file of graphs ends in {', '.join(_SUFFIXES)}")
        return [path]
    processed = path / "processed"
    folder = processed if processed.is_dir() else path
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix in _SUFFIXES and file.name not in _NO_GRAPHS and file.is_file()
    )
    if not files:
        raise ConfigError(f"{folder}: holds no file of graphs: {', '.join(_SUFFIXES)}")
    return files


@lru_cache(maxsize=1)  # a search for a limit asks again before each of its runs
def _read(files: tuple[tuple[Path, int], ...]) -> tuple[tuple[FileGraph, ...], int]:
    """Return the graphs of the files, which have these times, and how many there are in all."""
    chosen = [files[at][0] for at in evenly(len(files), MOST_GRAPHS)]
    pickled = [file for file in chosen if file.suffix in _PICKLED]
    most_each = max(1, MOST_GRAPHS // len(chosen))
    found = {file: _plain(file) for file in chosen if file not in pickled}
    total = len(files) - len(pickled)
    if pickled:
        read, total_pickled = _saved_by_pyg(pickled, most_each)
        found |= read
        total += total_pickled
    return tuple(graph for file in chosen for graph in found[file]), total


def evenly(count: int, most: int) -> list[int]:
    """Return at most so many of the numbers below `count`, evenly spaced."""
    return sorted({at * count // min(count, most) for at in range(min(count, most))})


def _plain(file: Path) -> list[FileGraph]:
    arrays = graph_arrays(file)
    if "x_indptr" in arrays:
        x = read_archive(file).x
        arrays = {name: array for name, array in arrays.items() if not name.startswith("x_")}
        if x is not None:
            arrays["x"] = x
    return [_graph(str(file), arrays)]


def _saved_by_pyg(files: list[Path], most_each: int) -> tuple[dict[Path, list[FileGraph]], int]:
    """Have a process with torch read files; returns graphs, and how many there are in all."""
    if not all(map(importlib.util.find_spec, ("torch", "torch_geometric"))):
        raise ConfigError(
            f"{files[0]}: reading it needs torch and PyG, which are not installed here: "
            "pip install 'gnnserve[server]', or write it as .safetensors elsewhere"
        )
    with tempfile.TemporaryDirectory(prefix="gnnserve-load-") as folder:
        target = Path(folder) / "graphs.safetensors"
        order = GraphsOrder(sources=tuple(map(str, files)), target=str(target), most_each=most_each)
        try:
            done = read_apart(_READER, order, str(files[0]), GraphsRead)
        except ModelError as error:
            raise ConfigError(str(error)) from error
        if done.error:
            raise ConfigError(done.error)
        arrays = graph_arrays(target)
    parts: dict[int, dict[str, Array]] = {number: {} for number in range(len(done.graphs))}
    for name, array in arrays.items():
        place, _, own = name.partition("/")
        parts[int(place)][own] = array
    found: dict[Path, list[FileGraph]] = {file: [] for file in files}
    for number, (at, index) in enumerate(done.graphs):
        where = f"{files[at]}, graph {index}" if done.totals[at] > 1 else str(files[at])
        found[files[at]].append(_graph(where, parts[number]))
    return found, sum(done.totals)


def _graph(where: str, arrays: Mapping[str, Array]) -> FileGraph:
    """Return the graph of these arrays; raises ConfigError."""
    for name, array in arrays.items():
        if fault := _fault(name, array):
            raise ConfigError(f"{where}: array '{name}': {fault}")
    nodes = {kind: _num_nodes(where, arrays, kind) for kind in _node_types(arrays)}
    if sum(nodes.values()) < 1:
        raise ConfigError(f"{where}: the graph has no nodes")
    for name, array in arrays.items():
        base, of = name_parts(name)
        if base == _EDGES and array.size:
            for ids, kind in zip(array, edge_ends(of) if of else ("", ""), strict=True):
                if not 0 <= int(ids.min()) <= int(ids.max()) < nodes[kind]:
                    raise ConfigError(
                        f"{where}: array '{name}': ids {ids.min()} to {ids.max()}, of"
                        f" {nodes[kind]} nodes"
                    )
    own = {name: array for name, array in arrays.items() if name_parts(name)[0] != _COUNT}
    return FileGraph(where, own, nodes)


def _fault(name: str, array: Array) -> str:
    """Return what is wrong with an array by itself; empty for nothing."""
    base, of = name_parts(name)
    form = f"{array.dtype} {list(array.shape)}"
    if array.dtype.kind not in "biuf":
        return f"numbers wanted, got {form}"
    if base == _COUNT and (array.size != 1 or array.dtype.kind not in "iu"):
        return f"one integer wanted, got {form}"
    if base == _EDGES and (array.ndim != 2 or len(array) != 2 or array.dtype.kind not in "iu"):
        return f"integers [2, E] wanted, got {form}"
    if "__" in of or (of and base == _EDGES):
        try:
            edge_ends(of)
        except ValueError as error:
            return str(error)
    return ""


def _node_types(arrays: Iterable[str]) -> list[str]:
    """Return the types of nodes in the names of arrays; the type "" where there is one."""
    found: set[str] = set()
    for name in arrays:
        _, of = name_parts(name)
        if "__" in of:
            found.update(edge_ends(of))
        elif of:
            found.add(of)
    return sorted(found) or [""]


def _num_nodes(where: str, arrays: Mapping[str, Array], kind: str) -> int:
    count = typed_name(_COUNT, kind)
    if count in arrays:
        return int(arrays[count].reshape(()))
    for base in _OF_NODES:
        found = arrays.get(typed_name(base, kind))
        if found is not None and found.ndim:
            return len(found)
    names = ", ".join(typed_name(base, kind) for base in _OF_NODES)
    raise ConfigError(f"{where}: array '{count}' is missing, and so is each of {names}")
