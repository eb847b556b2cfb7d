"""Opening graphs: every kind of file gives the same graph, and what is wrong is named."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from serve.errors import ConfigError
from serve.graphs.load import OpenOptions, open_dataset, open_graph
from serve.graphs.updates import Change

EDGES = np.array([[0, 1, 2, 2], [1, 2, 0, 1]])
X = np.array([[0.5, 1], [2, 3], [4, 5]], np.float32)


def write(folder, kind, edges=EDGES, x=X):
    if kind == "npz":
        path = folder / "g.npz"
        np.savez_compressed(path, num_nodes=len(x), edge_index=edges, x=x)
    elif kind == "safetensors":
        path = folder / "g.safetensors"
        save_file({"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edges)}, path)
    else:
        path = folder / "g"
        path.mkdir()
        np.save(path / "x.npy", x)
        np.save(path / "edge_index.npy", edges)
    return path


def opened(path, tmp_path, **options):
    return open_graph("g", path, OpenOptions(cache=tmp_path / "cache", **options), lambda *_: None)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", ["npz", "safetensors", "folder"])
def test_the_same_graph_from_every_kind_of_file(tmp_path, kind, mapped):
    path = write(tmp_path, kind)
    graph = opened(path, tmp_path, map_above_bytes=0 if mapped else None)
    snapshot = graph.snapshot
    assert snapshot.mapped == mapped
    assert (snapshot.features(np.array([2, 0])) == X[[2, 0]]).all()
    assert sorted(zip(*snapshot.edges().tolist(), strict=True)) == [(0, 1), (1, 2), (2, 0), (2, 1)]
    assert (snapshot.held_bytes < snapshot.base.nbytes + X.nbytes) == mapped


def test_mapped_features_can_change(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.graphs.columns._LEAST_PATCHED_ROWS", 1)
    monkeypatch.setattr("serve.graphs.columns.PATCH_SHARE", 1000)
    graph = opened(write(tmp_path, "folder"), tmp_path, map_above_bytes=0)
    old = graph.snapshot
    new = graph.update(Change(set_ids=np.array([0, 2]), set_x=X[[1, 1]], add_x=X[:1]))
    assert new.mapped
    assert new.column.changed.size == 0, "worked into a new file"
    assert (new.features(np.arange(4)) == X[[1, 1, 1, 0]]).all()
    assert (old.features(np.arange(3)) == X).all()


def test_undirected_adds_the_reverses(tmp_path):
    snapshot = opened(write(tmp_path, "npz"), tmp_path, undirected=True).snapshot
    assert snapshot.num_edges == 6


@pytest.mark.parametrize(
    ("x", "option", "kept"),
    [
        (X, "float32", "float32"),
        (X, "float16", "float16"),
        (np.floor(X), "float32", "uint8"),
        (X.astype(np.float64), "float32", "float32"),
    ],
)
def test_features_are_kept_as_small_as_is_exact(tmp_path, x, option, kept):
    snapshot = opened(write(tmp_path, "folder", x=x), tmp_path, feature_dtype=option).snapshot
    assert snapshot.x.dtype.name == kept
    assert (snapshot.features(np.arange(3)) == x).all()


@pytest.mark.parametrize("kind", ["npz", "safetensors", "folder"])
@pytest.mark.parametrize(
    ("edges", "x", "told"),
    [
        (np.array([[0, 3], [1, 1]]), X, "'edge_index'"),
        (EDGES[:1], X, r"'edge_index': integers \[2, E\] wanted"),
        (EDGES.astype(np.float32), X, r"'edge_index': integers \[2, E\] wanted"),
        (EDGES, X[:, 0].copy(), "'x'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, kind, edges, x, told):
    with pytest.raises(ConfigError, match=told):
        opened(write(tmp_path, kind, edges, x), tmp_path)


def test_features_that_are_no_numbers_are_named(tmp_path):
    x = X.copy()
    x[1, 1] = np.nan
    with pytest.raises(ConfigError, match=r"'x' \[1, 1\] is nan; features must be finite"):
        opened(write(tmp_path, "npz", x=x), tmp_path)


@pytest.mark.parametrize(("factor", "option"), [(1e5, "float16"), (1e39, "float32")])
@pytest.mark.parametrize("mapped", [False, True])
def test_features_that_what_they_are_stored_as_cannot_hold_are_named(
    tmp_path, factor, option, mapped
):
    path = write(tmp_path, "folder", x=factor * X.astype(np.float64))
    with pytest.raises(ConfigError, match=rf"'x' \[\d, \d\] is .*; the largest number of {option}"):
        opened(path, tmp_path, feature_dtype=option, map_above_bytes=0 if mapped else None)


def test_changes_that_half_precision_cannot_hold_are_kept_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.graphs.columns._LEAST_PATCHED_ROWS", 1)
    monkeypatch.setattr("serve.graphs.columns.PATCH_SHARE", 1000)
    graph = opened(write(tmp_path, "folder"), tmp_path, feature_dtype="float16")
    new = graph.update(Change(set_ids=np.array([0, 2]), set_x=1e5 * X[:2]))
    assert new.column.changed.size == 0, "worked into a new base"
    assert (new.features(np.array([0, 2, 1])) == [*(1e5 * X[:2]), X[1]]).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_features_in_the_other_order_of_bytes_are_the_same_numbers(tmp_path, mapped):
    path = write(tmp_path, "folder", x=X.astype(">f4"))
    graph = opened(path, tmp_path, map_above_bytes=0 if mapped else None)
    assert (graph.snapshot.features(np.arange(3)) == X).all()


def test_files_that_are_none(tmp_path):
    for name in ("a.npz", "a.safetensors"):
        with pytest.raises(ConfigError, match=rf"{name}: no such file"):
            opened(tmp_path / name, tmp_path)
        (tmp_path / name).write_bytes(b"\xff" * 20)
        with pytest.raises(ConfigError, match="not a readable"):
            opened(tmp_path / name, tmp_path)
    with pytest.raises(
        ConfigError, match=r"array 'edge_index' is missing: no file edge_index\.npy"
    ):
        opened(tmp_path, tmp_path)
    save_file({"y": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(ConfigError, match="tensor 'edge_index' is missing; found: y"):
        opened(tmp_path / "y.safetensors", tmp_path)


def test_a_damaged_archive_whose_features_are_mapped_is_told(tmp_path):
    path = tmp_path / "g.npz"
    for x, damaged, told in (
        (np.zeros((3, 2), np.float32), b"edge_index.npy", "not a readable .npz archive: Bad CRC"),
        (np.zeros((3, 2), np.float32), b"y.npy", "not a readable .npz archive: Bad CRC"),
        (np.float32(0), b"", r"array 'x': \[N, F\] wanted, got \[\]"),
    ):
        edges = np.array([[0, 1], [1, 2]])
        np.savez(path, num_nodes=3, edge_index=edges, x=x, y=np.arange(3))
        data = bytearray(path.read_bytes())
        # Behind the name of the array are the bytes of its header, then its own.
        if damaged:
            data[data.index(b"}", data.index(damaged)) + 80] ^= 1
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=told):
            opened(path, tmp_path, map_above_bytes=0)


def test_nothing_is_unpickled(tmp_path):
    (tmp_path / "g").mkdir()
    np.save(tmp_path / "g" / "x.npy", np.array([{}], object), allow_pickle=True)
    np.save(tmp_path / "g" / "edge_index.npy", EDGES)
    with pytest.raises(ConfigError, match="not a readable array"):
        opened(tmp_path / "g", tmp_path)


def test_a_dataset_of_the_paper_is_generated_the_same_again(tmp_path):
    options = OpenOptions(cache=tmp_path)
    one, other = (
        open_dataset("g", "pubmed", None, 0.01, options, lambda *_: None).snapshot for _ in "ab"
    )
    assert (one.num_nodes, one.num_features) == (197, 500)
    assert (one.edges() == other.edges()).all()
    assert (one.features(np.arange(197)) == other.features(np.arange(197))).all()


ENTRY = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shape": None}, "not a readable safetensors file"),
        ({"shape": [-1, 1]}, "not a readable safetensors file"),
        ({"data_offsets": []}, "not a readable safetensors file"),
        ({"data_offsets": [0, 80]}, r"F32 \[2, 1\] takes 8 bytes, .* others at 0 to 80"),
        ({"shape": [1 << 40, 1], "data_offsets": [0, 1 << 42]}, "takes 4398046511104 bytes"),
        ({"data_offsets": [1 << 40, (1 << 40) + 8]}, "the file holds others at 1099511627776 to"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_told(tmp_path, change, told):
    header = json.dumps({"edge_index": ENTRY, "x": ENTRY | change}).encode()
    path = tmp_path / "g.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ConfigError, match=told):
        opened(path, tmp_path)
