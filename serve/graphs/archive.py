"""Read a graph from a compressed NumPy archive (`.npz`).

Arrays: `num_nodes` (scalar), `edge_index` integer [2, E], and optionally labels `y` [N] and the
features, dense as `x` [N, F] or in CSR form as `x_data`, `x_indices`, `x_indptr`, `x_shape`.
Every fault is a ``ConfigError`` that names the file, the array and the rule. Pickled content is
never loaded.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError

Array = NDArray[Any]
_ROWS = ("x_data", "x_indices", "x_indptr", "x_shape")
_ROW_KINDS = ("iubf", "iu", "iu", "iu")


@dataclass(frozen=True, slots=True)
class GraphArchive:
    """The content of one archive, edges in the order of the file."""

    num_nodes: int
    #: [2, E], ids in [0, num_nodes).
    edge_index: NDArray[np.int64]
    #: [N, F]; None when the file has topology only.
    x: NDArray[np.float32] | None
    #: [N]; None when the file has no labels.
    y: NDArray[np.int64] | None


def read_archive(path: Path) -> GraphArchive:
    """Read and check the archive at `path`; raises ConfigError."""
    arrays = archive_arrays(path)
    num_nodes = _node_count(arrays, path)
    edges = _need(arrays, "edge_index", path)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise _wrong(path, "edge_index", f"integers [2, E] wanted, got {_form(edges)}")
    if edges.size and not 0 <= int(edges.min()) <= int(edges.max()) < num_nodes:
        raise _wrong(
            path,
            "edge_index",
            f"ids must be in 0..{num_nodes - 1}, found {edges.min()}..{edges.max()}",
        )
    labels = arrays.get("y")
    if labels is not None and (labels.shape != (num_nodes,) or labels.dtype.kind not in "iubf"):
        raise _wrong(path, "y", f"one label per node [{num_nodes}] wanted, got {_form(labels)}")
    return GraphArchive(
        num_nodes,
        edges.astype(np.int64),
        _features(arrays, num_nodes, path),
        None if labels is None else labels.astype(np.int64),
    )


def archive_names(path: Path) -> list[str]:
    """Return the names of the arrays in the archive at `path`; raises ConfigError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except Exception as error:  # both libraries raise all kinds for a damaged file
        raise ConfigError(f"{path}: not a readable .npz archive: {error}") from error


def archive_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, Array]:
    """Return the named arrays of the archive at `path`, or all; raises ConfigError."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file), np.load(file) as archive:
            return {name: archive[name] for name in (archive.files if names is None else names)}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except Exception as error:
        raise ConfigError(f"{path}: not a readable .npz archive: {error}") from error


def _node_count(arrays: dict[str, Array], path: Path) -> int:
    count = _need(arrays, "num_nodes", path)
    if count.size != 1 or count.dtype.kind not in "iu" or int(count.reshape(())) < 1:
        raise _wrong(path, "num_nodes", f"one integer of at least 1 wanted, got {_form(count)}")
    return int(count.reshape(()))


def _features(arrays: dict[str, Array], num_nodes: int, path: Path) -> NDArray[np.float32] | None:
    """Return dense features [N, F]; None when the file has none."""
    x = arrays.get("x")
    if x is not None:
        if x.ndim != 2 or x.shape[0] != num_nodes or x.dtype.kind not in "iubf":
            raise _wrong(path, "x", f"[{num_nodes}, F] wanted, got {_form(x)}")
        return np.ascontiguousarray(x, dtype=np.float32)
    if not any(name in arrays for name in _ROWS):
        return None
    data, indices, indptr, shape = (_need(arrays, name, path) for name in _ROWS)
    for name, array, kinds in zip(_ROWS, (data, indices, indptr, shape), _ROW_KINDS, strict=True):
        if array.dtype.kind not in kinds:
            raise _wrong(path, name, f"numbers wanted, got {_form(array)}")
    if shape.shape != (2,) or int(shape[0]) != num_nodes or int(shape[1]) < 0:
        raise _wrong(path, "x_shape", f"({num_nodes}, F) wanted, got {shape.tolist()}")
    num_features = int(shape[1])
    steps = np.diff(indptr)
    if indptr.shape != (num_nodes + 1,) or (steps < 0).any() or indptr[0] != 0:
        raise _wrong(path, "x_indptr", f"{num_nodes + 1} ascending offsets from 0 wanted")
    if not data.shape == indices.shape == (int(indptr[-1]),):
        raise _wrong(path, "x_data", f"{indptr[-1]} values and column numbers wanted")
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < num_features:
        raise _wrong(path, "x_indices", f"column numbers must be in 0..{num_features - 1}")
    try:
        dense = np.zeros((num_nodes, num_features), dtype=np.float32)
    except (MemoryError, ValueError) as error:
        raise _wrong(path, "x_shape", f"{shape.tolist()} does not fit into memory") from error
    dense[np.repeat(np.arange(num_nodes), steps), indices] = data
    return dense


def _need(arrays: dict[str, Array], name: str, path: Path) -> Array:
    if name not in arrays:
        raise ConfigError(f"{path}: array '{name}' is missing; found: {', '.join(sorted(arrays))}")
    return arrays[name]


def _form(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _wrong(path: Path, name: str, rule: str) -> ConfigError:
    return ConfigError(f"{path}: array '{name}': {rule}")
