import os
from pathlib import Path

import numpy as np
import pytest

from serve.errors import ConfigError
from serve.graphs.archive import read_archive
from serve.graphs.datasets import load_dataset

GOOD = {"num_nodes": 3, "edge_index": np.array([[0, 1], [1, 2]])}
SPARSE = {
    "x_data": np.array([5.0, 7.0]),
    "x_indices": np.array([1, 0]),
    "x_indptr": np.array([0, 1, 1, 2]),
    "x_shape": np.array([3, 2]),
}


def test_reads_dense_and_sparse_features_alike(tmp_path):
    x = [[0, 5], [0, 0], [7, 0]]
    np.savez(tmp_path / "dense.npz", **GOOD, x=x, y=[0, 1, 0])
    np.savez(tmp_path / "sparse.npz", **GOOD, **SPARSE)
    dense, sparse = read_archive(tmp_path / "dense.npz"), read_archive(tmp_path / "sparse.npz")
    assert dense.x is not None
    assert dense.x.dtype == np.float32
    assert dense.x.tolist() == sparse.x.tolist() == x
    assert dense.y.tolist() == [0, 1, 0]
    assert sparse.y is None
    assert dense.edge_index.tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": None}, "array 'num_nodes' is missing; found: edge_index"),
        ({"num_nodes": 0}, "array 'num_nodes': one integer of at least 1"),
        ({"num_nodes": 2.5}, "array 'num_nodes': one integer"),
        ({"edge_index": None}, "array 'edge_index' is missing"),
        ({"edge_index": np.zeros((3, 2), int)}, r"integers \[2, E\] wanted, got int64 \[3, 2\]"),
        ({"edge_index": np.zeros((2, 2))}, r"integers \[2, E\] wanted, got float64"),
        ({"edge_index": np.array([[0], [3]])}, r"ids must be in 0\.\.2, found 0\.\.3"),
        ({"edge_index": np.array([[0], [-1]])}, r"ids must be in 0\.\.2, found -1\.\.0"),
        ({"x": np.zeros((2, 4))}, r"array 'x': \[3, F\] wanted, got float64 \[2, 4\]"),
        ({"y": np.zeros(2)}, "one label per node"),
        ({"x_data": None, **{k: SPARSE[k] for k in list(SPARSE)[1:]}}, "'x_data' is missing"),
        (SPARSE | {"x_shape": np.array([4, 2])}, "'x_shape'"),
        (SPARSE | {"x_indptr": np.array([0, 1, 2])}, "'x_indptr': 4 ascending offsets"),
        (SPARSE | {"x_indptr": np.array([0, 2, 1, 2])}, "'x_indptr': 4 ascending offsets"),
        (SPARSE | {"x_data": np.array([5.0])}, "'x_data': 2 values"),
        (
            SPARSE | {"x_indices": np.array([1, 2])},
            r"'x_indices': column numbers must be in",
        ),
    ],
)
def test_wrong_content_names_file_array_and_rule(tmp_path, change, message):
    arrays = {name: value for name, value in (GOOD | change).items() if value is not None}
    np.savez(tmp_path / "g.npz", **arrays)
    with pytest.raises(ConfigError, match=r"g\.npz: array .*" + message.removeprefix("array ")):
        read_archive(tmp_path / "g.npz")


def test_no_archive(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_archive(tmp_path / "absent.npz")
    for name, content in {"text.npz": b"not a zip", "empty.npz": b"", "cut.npz": b"PK\3\4"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=r"not a readable \.npz archive"):
            read_archive(tmp_path / name)
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ConfigError, match="not a readable"):
        read_archive(tmp_path / "one.npz")


def test_pickles_are_refused(tmp_path):
    np.savez(tmp_path / "evil.npz", num_nodes=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match="not a readable"):
        read_archive(tmp_path / "evil.npz")


@pytest.mark.skipif("GNNSERVE_DATA" not in os.environ, reason="GNNSERVE_DATA names no folder")
def test_the_real_graphs():
    folder = Path(os.environ["GNNSERVE_DATA"])
    cora = read_archive(folder / "cora.npz")
    assert cora.x is not None
    assert (cora.num_nodes, cora.edge_index.shape, cora.x.shape) == (2708, (2, 10556), (2708, 1433))
    pubmed = load_dataset("pubmed", folder=folder)
    assert (pubmed.num_nodes, pubmed.num_edges) == (19_717, 88_648)
    assert pubmed.source == "file pubmed_topology.npz"
