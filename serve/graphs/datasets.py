"""The datasets that requests are cut from: read from a file if there is one, else generated.

These are the four of the GNNSched paper's Table 4, and any that lie in the folder as files. Callers
pass the folder; nothing here reads the environment.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError, UnknownName
from serve.graphs.archive import read_archive
from serve.graphs.generate import both_directions, generate_edges


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """The published sizes of a dataset."""

    name: str
    num_nodes: int
    #: Directed edges, both directions counted.
    num_edges: int
    num_features: int
    num_classes: int


#: Table 4 of the paper.
TABLE_4 = {
    spec.name: spec
    for spec in (
        DatasetSpec("pubmed", 19_717, 88_676, 500, 3),
        DatasetSpec("artist", 50_515, 1_638_396, 100, 12),
        DatasetSpec("amazon", 410_236, 4_878_875, 96, 22),
        DatasetSpec("reddit", 232_965, 114_615_891, 602, 50),
    )
}
#: A scaled-down graph keeps its mean degree, but has at most 1/4 of all possible edges.
_LEAST_SPARSITY = 4


@dataclass(frozen=True, slots=True)
class Dataset:
    """One undirected graph: every edge in both directions, no self-loops."""

    name: str
    num_nodes: int
    #: [2, E], sorted by source.
    edge_index: NDArray[np.int32]
    #: [N + 1]: node v's edges are `edge_index[:, offsets[v]:offsets[v + 1]]`.
    offsets: NDArray[np.int64]
    #: Origin, for people: a file, or the generator's seed and scale.
    source: str

    @property
    def num_edges(self) -> int:
        """Directed edges."""
        return int(self.edge_index.shape[1])


def load_dataset(
    name: str, *, folder: Path | None = None, scale: float = 1.0, seed: int = 0
) -> Dataset:
    """Read `<name>.npz` or `<name>_topology.npz` in `folder`, else generate the dataset.

    `scale` multiplies node and edge counts of generated graphs, not of those from files.
    Raises UnknownName for a name that is neither in Table 4 nor a file, ConfigError for a bad file.
    """
    path = find_file(name, folder)
    if path is not None:
        archive = read_archive(path)
        return dataset_of(name, archive.num_nodes, archive.edge_index, f"file {path.name}")
    if name not in TABLE_4:
        where = f"no file {name}.npz in {folder}" if folder else "no folder of graphs was given"
        raise UnknownName(f"graph '{name}': {where}, and it is not one of {', '.join(TABLE_4)}")
    if not 0 < scale <= 1:
        raise ConfigError(f"scale: {scale} must be more than 0 and at most 1")
    spec = TABLE_4[name]
    num_nodes = max(2, round(spec.num_nodes * scale))
    num_edges = min(round(spec.num_edges * scale), num_nodes * (num_nodes - 1) // _LEAST_SPARSITY)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    edges = generate_edges(num_nodes, num_edges, rng)
    return _dataset(name, num_nodes, edges, f"generated, scale {scale:g}, seed {seed}")


def dataset_of(
    name: str, num_nodes: int, edge_index: NDArray[np.integer[Any]], source: str
) -> Dataset:
    """Return a graph of these edges [2, E] as a dataset: with both directions, and no loops."""
    edges = both_directions(edge_index[0], edge_index[1], num_nodes)
    return _dataset(name, num_nodes, edges, source)


def find_file(name: str, folder: Path | None) -> Path | None:
    """Return the archive of graph `name`: in `folder`, or `folder` itself; None if there is none.

    Raises ConfigError when `folder` is neither a folder nor a file.
    """
    if folder is None:
        return None
    if folder.is_file():
        return folder if graph_name(folder) == name else None
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder of graphs")
    paths = (folder / f"{name}.npz", folder / f"{name}_topology.npz")
    return next((path for path in paths if path.is_file()), None)


def graph_name(path: Path) -> str:
    """Return the name of the graph that an archive holds, by the name of its file."""
    return path.stem.removesuffix("_topology")


def _dataset(name: str, num_nodes: int, edges: NDArray[np.int32], source: str) -> Dataset:
    degrees = np.bincount(edges[0], minlength=num_nodes)
    offsets = np.concatenate([[0], np.cumsum(degrees)])
    return Dataset(name, num_nodes, edges, offsets, source)
