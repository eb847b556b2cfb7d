"""Opens a resident graph: from an archive, a safetensors file, a folder of arrays, or a dataset.

`docs/resident-graphs.md` specifies the formats. Nothing is ever unpickled. Every fault is a
``ConfigError`` that names the file, the array and the rule.
"""

import hashlib
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from serve import native
from serve.errors import ConfigError
from serve.graphs.archive import archive_arrays, archive_names, read_archive
from serve.graphs.columns import Column
from serve.graphs.csr import Rows
from serve.graphs.datasets import TABLE_4, find_file, load_dataset
from serve.graphs.edges import Edges
from serve.graphs.features import FeatureKeeper
from serve.graphs.generate import both_directions
from serve.graphs.resident import ResidentGraph
from serve.graphs.shared_column import SharedColumn
from serve.graphs.sharing import Parting, shared_features, shared_graph
from serve.graphs.snapshot import Snapshot
from serve.graphs.typed_load import EDGES, held_typed, is_typed, is_wanted
from serve.graphs.typed_updates import TypedGraph
from serve.progress import Progress
from serve.typed_names import name_parts

Array = NDArray[Any]
#: Reads the arrays of these names.
_Read = Callable[[Sequence[str]], dict[str, Array]]
#: Accepted safetensors types, as numpy dtypes.
_SAFE_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
                "I8": "i1", "U8": "u1", "BOOL": "?"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to store a graph."""

    undirected: bool = False
    feature_dtype: str = "float32"
    #: Features of more bytes than this stay in their file; None to read all into memory.
    map_above_bytes: int | None = None
    #: Folder for new files of mapped features.
    cache: Path = Path("graphs")
    #: True to have features in memory that other processes can map.
    shared: bool = False
    #: How the graph is shared out over several servers; None: all of it is here.
    parting: Parting | None = None


@dataclass(frozen=True, slots=True)
class GraphParts:
    """A graph as read: edges [2, E], sources first, and features [N, F]."""

    num_nodes: int
    edge_index: Array
    x: Array
    source: str
    #: Classes of the nodes [N], to train on; negative for none.
    y: Array | None = None


def open_graph(
    name: str, path: Path, options: OpenOptions, progress: Progress
) -> ResidentGraph | TypedGraph:
    """Open the graph at `path`: an .npz archive, a .safetensors file or a folder of .npy files."""
    progress("reading", 0.0)
    names, read = _source(path, options)
    if is_typed(names):
        if options.parting is not None:
            raise ConfigError(
                f"graph '{name}': parts: {path} has several types of nodes, whose features cannot"
                " be shared out yet"
            )
        if options.undirected:
            raise ConfigError(
                f"graph '{name}': undirected: {path} has several types of edges; write the"
                " reverses as types of their own"
            )
        arrays = read([key for key in names if is_wanted(key)])
        return held_typed(name, arrays, keeper_of(options), str(path), progress)
    if not path.is_dir() and path.suffix != ".safetensors":
        return held(name, _read_archive(path, options), options, progress)
    arrays = read(["edge_index", "x", *(["y"] if "y" in names else [])])
    x = arrays["x"]
    if x.ndim != 2:
        raise ConfigError(f"{path}: array 'x': [N, F] wanted, got {list(x.shape)}")
    parts = GraphParts(len(x), arrays["edge_index"], x, str(path), arrays.get("y"))
    return held(name, parts, options, progress)


def graph_arrays(path: Path) -> dict[str, Array]:
    """Return all arrays at `path`, which is what `open_graph` takes; raises ConfigError."""
    names, read = _source(path, OpenOptions())
    return read(names)


def read_edges_of(path: Path) -> Array:
    """Return the edges [2, E] at `path`, which is what `open_graph` takes; raises ConfigError."""
    if not path.is_dir() and path.suffix != ".safetensors":
        return read_archive(path).edge_index
    _, read = _source(path, OpenOptions())
    edges = read(["edge_index"])["edge_index"]
    _require_edges(str(path), edges)
    return edges


def _require_edges(where: str, edges: Array) -> None:
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise ConfigError(
            f"{where}: array 'edge_index': integers [2, E] wanted, got {edges.dtype} "
            f"{list(edges.shape)}"
        )


def _source(path: Path, options: OpenOptions) -> tuple[list[str], _Read]:
    """Return the names of the arrays at `path`, and what reads those of some names."""
    if path.is_dir():
        names = [file.stem for file in path.glob("*.npy")]
        return names, partial(_folder_arrays, path, options)
    if path.suffix == ".safetensors":
        header, begin = _safetensors_header(path)
        return list(header), partial(_safetensors_arrays, path, options, header, begin)
    return archive_names(path), partial(archive_arrays, path)


def open_dataset(
    name: str,
    dataset: str,
    folder: Path | None,
    scale: float,
    options: OpenOptions,
    progress: Progress,
) -> ResidentGraph:
    """Open a dataset from `folder` or generated; features default to random normal."""
    progress("reading or generating", 0.0)
    found = load_dataset(dataset, folder=folder, scale=scale)
    path = find_file(dataset, folder)
    archive = None if path is None else read_archive(path)
    x = y = None
    if archive is not None:
        x, y = archive.x, archive.y
    source = found.source
    if x is None:
        if dataset not in TABLE_4:
            raise ConfigError(f"{path}: array 'x' is missing; a graph to be held needs features")
        rng = np.random.default_rng(zlib.crc32(dataset.encode()))
        shape = found.num_nodes, TABLE_4[dataset].num_features
        x = rng.standard_normal(shape, dtype=np.float32)
        source += ", features generated"
    parts = GraphParts(found.num_nodes, found.edge_index, x, source, y)
    return held(name, parts, options, progress)


def held(name: str, parts: GraphParts, options: OpenOptions, progress: Progress) -> ResidentGraph:
    """Build the graph: in-neighbours in CSR form and stored features; raises ConfigError."""
    where = f"graph '{name}': {parts.source}"
    edges = parts.edge_index
    _require_edges(where, edges)
    if len(parts.x) != parts.num_nodes:
        raise ConfigError(f"{where}: array 'x': {len(parts.x)} rows for {parts.num_nodes} nodes")
    if parts.num_nodes < 1:
        raise ConfigError(f"{where}: array 'x': a graph has at least 1 node")
    keeper = keeper_of(options)
    if options.parting is not None and options.parting.with_edges:
        if options.undirected:
            raise ConfigError(
                f"graph '{name}': undirected: edges that are shared out are read as they are; give"
                " a file that has both directions"
            )
        progress("reading edges and features", 0.3)
        snapshot = shared_graph(name, edges, parts.x, keeper, options.parting)
        return ResidentGraph(name, snapshot, keeper, _shared(parts, snapshot.column))
    progress("sorting edges", 0.3)
    if edges.dtype not in (np.int32, np.int64):
        edges = edges.astype(np.int64)
    try:
        rows = Rows(*native.build_rows(edges, parts.num_nodes))
    except ValueError as error:
        raise ConfigError(f"{where}: array 'edge_index' {error}") from error
    if options.undirected:
        both = both_directions(edges[0], edges[1], parts.num_nodes)
        rows = Rows(*native.build_rows(both, parts.num_nodes))
    progress("checking features", 0.6)
    if options.parting is None:
        first = Snapshot(1, Edges.of(rows), Column.of(keeper.kept(parts.x, where), "float32"))
        return ResidentGraph(name, first, keeper, parts.source, _labels(parts, where))
    column = shared_features(name, rows, parts.x, keeper, options.parting)
    first = Snapshot(1, Edges.of(rows), column)
    return ResidentGraph(name, first, keeper, _shared(parts, column))


def _shared(parts: GraphParts, column: SharedColumn) -> str:
    """Return the origin of a graph of which this server has a part."""
    return f"{parts.source}, part {column.source.part} of {column.part_count}"


def _labels(parts: GraphParts, where: str) -> NDArray[np.int64] | None:
    """Return the classes of the nodes, where `y` holds one of a node; raises ConfigError."""
    if parts.y is None or parts.y.ndim != 1 or parts.y.dtype.kind not in "iub":
        return None  # what else it holds is for no training here
    if len(parts.y) != parts.num_nodes:
        raise ConfigError(f"{where}: array 'y': {len(parts.y)} labels, {parts.num_nodes} nodes")
    return parts.y.astype(np.int64)


def keeper_of(options: OpenOptions) -> FeatureKeeper:
    """Return what stores the features of a graph."""
    return FeatureKeeper(dtype=options.feature_dtype, folder=options.cache, shared=options.shared)


def _folder_arrays(path: Path, options: OpenOptions, names: Sequence[str]) -> dict[str, Array]:
    """Read the named arrays, each from its .npy file."""
    arrays = {}
    for name in names:
        file = path / f"{name}.npy"
        try:
            found = np.load(file, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: array '{name}' is missing: no file {file.name}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: not a readable array: {error}") from error
        arrays[name] = _mapped(name, found, options)
    return arrays


class _Entry(msgspec.Struct, frozen=True):
    """What the header of a safetensors file tells of a tensor."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=8)]
    #: From the end of the header.
    data_offsets: tuple[Annotated[int, Meta(ge=0)], int]


def _safetensors_header(path: Path) -> tuple[dict[str, _Entry], int]:
    """Return the entries of the file's tensors, and where their bytes begin."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("it ends within its header")
            header = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error
    return entries, 8 + size


def _safetensors_arrays(
    path: Path, options: OpenOptions, header: Mapping[str, _Entry], begin: int, names: Sequence[str]
) -> dict[str, Array]:
    """Map the named tensors, which needs their offsets: the library hides them."""
    arrays = {}
    for name in names:
        entry = header.get(name)
        if entry is None:
            there = ", ".join(sorted(header)) or "nothing"
            raise ConfigError(f"{path}: tensor '{name}' is missing; found: {there}")
        dtype = _SAFE_DTYPES.get(entry.dtype)
        if dtype is None:
            raise ConfigError(
                f"{path}: tensor '{name}' is {entry.dtype}; taken: {', '.join(_SAFE_DTYPES)}"
            )
        shape, (first, end) = entry.shape, entry.data_offsets
        size_bytes, at = math.prod(shape) * np.dtype(dtype).itemsize, begin + first
        if end - first != size_bytes or at + size_bytes > path.stat().st_size:
            raise ConfigError(
                f"{path}: tensor '{name}': {entry.dtype} {list(shape)} takes {size_bytes} bytes,"
                f" and the file holds others at {first} to {end}"
            )
        empty = size_bytes == 0
        found = np.empty(shape, dtype) if empty else np.memmap(path, dtype, "r", at, shape or (1,))
        arrays[name] = _mapped(name, found, options)
    return arrays


def _read_archive(path: Path, options: OpenOptions) -> GraphParts:
    """Read an archive, see ``archive``; extract large features into a file of their own."""
    if options.map_above_bytes is not None and _x_bytes(path) > options.map_above_bytes:
        x, names = _extracted(path, options.cache), archive_names(path)
        if x.ndim != 2:
            raise ConfigError(f"{path}: array 'x': [N, F] wanted, got {list(x.shape)}")
        if "edge_index" not in names:
            raise ConfigError(f"{path}: array 'edge_index' is missing")
        arrays = archive_arrays(path, [name for name in ("edge_index", "y") if name in names])
        return GraphParts(len(x), arrays["edge_index"], x, str(path), arrays.get("y"))
    found = read_archive(path)
    if found.x is None:
        raise ConfigError(f"{path}: array 'x' is missing; a graph to be held needs features")
    return GraphParts(found.num_nodes, found.edge_index, found.x, str(path), found.y)


def _x_bytes(path: Path) -> int:
    """Return the size of the archive's dense features; 0 when it has none or is unreadable."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.getinfo("x.npy").file_size
    except (OSError, KeyError, zipfile.BadZipFile):
        return 0


def _extracted(path: Path, cache: Path) -> Array:
    """Return the archive's `x`, mapped from an extracted file that the next start finds again."""
    facts = path.stat()
    key = hashlib.sha256(f"{path}\n{facts.st_size}\n{facts.st_mtime_ns}".encode()).hexdigest()
    folder = cache / key[:32]
    file = folder / "x.npy"
    try:
        if not file.exists():
            with zipfile.ZipFile(path) as archive:
                made = Path(archive.extract("x.npy", folder / "part"))
            made.replace(file)
        found: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path}: array 'x' cannot be extracted into {folder}: {error}"
        ) from error
    return found


def _mapped(name: str, array: Array, options: OpenOptions) -> Array:
    """Return mapped features as they are if they are large; read other arrays into memory.

    Edges that are shared out stay in their file: only some of them are kept.
    """
    parted = options.parting is not None and options.parting.with_edges
    edges = name_parts(name)[0] == EDGES and not parted
    if not edges and options.map_above_bytes is not None and array.nbytes > options.map_above_bytes:
        return array
    return np.array(array)
