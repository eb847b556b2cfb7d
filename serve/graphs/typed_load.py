"""Opens a resident graph with several types of nodes and edges.

The arrays of a file are named like declared inputs: `x.author` is a feature of the nodes of a type,
and `edge_index.author__writes__paper` the edges of one. `num_nodes.venue` gives the number of nodes
of a type without features. `docs/resident-graphs.md` specifies the formats.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.errors import ConfigError
from serve.graphs.columns import Column
from serve.graphs.csr import Rows
from serve.graphs.edges import Edges
from serve.graphs.features import FeatureKeeper
from serve.graphs.typed import NodeTable, TypedSnapshot
from serve.graphs.typed_updates import IDS, TypedGraph
from serve.interface import DTYPES
from serve.progress import Progress
from serve.typed_names import edge_ends, name_parts

Array = NDArray[Any]
EDGES, _COUNT = "edge_index", "num_nodes"
#: Arrays beside a graph's own, which files may have: labels, and masks of the nodes trained on.
_IGNORED = ("y", "train_mask", "val_mask", "test_mask")


def is_typed(names: Iterable[str]) -> bool:
    """Return True when arrays of these names make a graph with several types."""
    return any(name.startswith(f"{EDGES}.") for name in names)


def is_wanted(name: str) -> bool:
    """Return True for the name of an array that a graph with several types holds."""
    base, of = name_parts(name)
    return bool(of) and base not in _IGNORED


def held_typed(
    name: str, arrays: Mapping[str, Array], keeper: FeatureKeeper, source: str, progress: Progress
) -> TypedGraph:
    """Build the graph of these arrays; raises ConfigError naming the array and the rule."""
    where = f"graph '{name}': {source}"
    wanted = {key: arrays[key] for key in sorted(arrays) if is_wanted(key)}
    progress("checking features", 0.3)
    features: dict[str, dict[str, Column]] = {}
    counts = {name_parts(key)[1]: _count(key, array, where) for key, array in wanted.items()
              if name_parts(key)[0] == _COUNT}  # fmt: skip
    for key, array in wanted.items():
        base, of = name_parts(key)
        if base in (EDGES, _COUNT):
            continue
        if "__" in of:
            raise ConfigError(f"{where}: array '{key}': features of edges are not held")
        if base == IDS:
            raise ConfigError(f"{where}: array '{key}': a feature has another name than '{IDS}'")
        column = _column(key, array, keeper, where)
        if counts.setdefault(of, len(array)) != len(array):
            raise ConfigError(f"{where}: array '{key}': {len(array)} rows for {counts[of]} {of}")
        features.setdefault(of, {})[base] = column
    progress("sorting edges", 0.6)
    edges = {
        name_parts(key)[1]: _edges(key, array, counts, where)
        for key, array in wanted.items()
        if name_parts(key)[0] == EDGES
    }
    tables = {of: NodeTable(counts[of], features.get(of, {})) for of in sorted(counts)}
    return TypedGraph(name, TypedSnapshot(1, tables, edges), keeper, source)


def _count(key: str, array: Array, where: str) -> int:
    if array.size != 1 or array.dtype.kind not in "iu" or int(array.reshape(())) < 0:
        raise ConfigError(
            f"{where}: array '{key}': one integer of at least 0 wanted, got {_form(array)}"
        )
    return int(array.reshape(()))


def _column(key: str, array: Array, keeper: FeatureKeeper, where: str) -> Column:
    """Return the feature as it is to be stored: FP32 in the smallest exact form, others as is."""
    if array.ndim < 1 or array.dtype.name not in DTYPES.values():
        raise ConfigError(
            f"{where}: array '{key}': [N, ...] of {', '.join(DTYPES.values())} wanted,"
            f" got {_form(array)}"
        )
    if array.dtype == np.float32 and array.ndim == 2 and array.shape[1]:
        return Column.of(keeper.kept(array, where, key), np.float32)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        at = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
        place = ", ".join(str(int(i)) for i in at)
        raise ConfigError(
            f"{where}: array '{key}' [{place}] is {array[at]}; features must be finite"
        )
    return Column.of(array if array.flags.c_contiguous else np.ascontiguousarray(array))


def _edges(key: str, array: Array, counts: Mapping[str, int], where: str) -> Edges:
    _, of = name_parts(key)
    try:
        ends = edge_ends(of)
    except ValueError as error:
        raise ConfigError(f"{where}: array '{key}': {error}") from error
    for end in ends:
        if end not in counts:
            raise ConfigError(
                f"{where}: array '{key}': how many nodes '{end}' has is unknown; give a feature of"
                f" them, or num_nodes.{end}"
            )
    if array.ndim != 2 or array.shape[0] != 2 or array.dtype.kind not in "iu":
        raise ConfigError(f"{where}: array '{key}': integers [2, E] wanted, got {_form(array)}")
    if array.dtype not in (np.int32, np.int64):
        array = array.astype(np.int64)
    source, target = (counts[end] for end in ends)
    try:
        return Edges.of(Rows(*native.build_rows(array, target, source)))
    except ValueError as error:
        raise ConfigError(f"{where}: array '{key}' {error}") from error


def _form(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
