"""Graphs with several types: opened from every kind of file, changed, and what is wrong named."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from serve.errors import ConfigError, InvalidInput, Mismatch
from serve.graphs import columns
from serve.graphs import edges as edges_module
from serve.graphs.academic import academic_graph
from serve.graphs.features import FeatureKeeper
from serve.graphs.load import OpenOptions, open_graph
from serve.graphs.typed_load import held_typed
from serve.graphs.typed_updates import TypedChange

WRITES, CITES = "author__writes__paper", "paper__cites__paper"
ARRAYS = {
    "x.author": np.array([[0.5, 1], [2, 3]], np.float32),
    "x.paper": np.array([[1], [2], [3]], np.float32),
    "year.paper": np.array([2001, 2002, 2003]),
    "open.paper": np.array([True, False, True]),
    "weight.paper": np.array([0.1, 0.2, 0.3]),
    "num_nodes.venue": np.array(2),
    f"edge_index.{WRITES}": np.array([[0, 1, 1], [0, 0, 2]]),
    f"edge_index.{CITES}": np.array([[1, 2], [0, 1]], np.int32),
    "edge_index.paper__at__venue": np.array([[2], [1]]),
    "y.paper": np.array([0, 1, 0]),
    "train_mask.paper": np.array([True, True, False]),
}


def write(folder, kind, arrays):
    if kind == "npz":
        path = folder / "g.npz"
        np.savez_compressed(path, **arrays)
    elif kind == "safetensors":
        path = folder / "g.safetensors"
        save_file({name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}, path)
    else:
        path = folder / "g"
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    return path


def opened(path, folder, **options):
    return open_graph("g", path, OpenOptions(cache=folder / "cache", **options), lambda *_: None)


def held(arrays, folder):
    keeper = FeatureKeeper(dtype="float32", folder=folder)
    return held_typed("g", arrays, keeper, "test", lambda *_: None)


def gathered(snapshot, node_type, name):
    """All rows of a feature."""
    column = snapshot.nodes[node_type].columns[name]
    ids = np.arange(snapshot.nodes[node_type].num_nodes)
    found = np.empty((ids.size, *column.shape), column.dtype)
    column.gather(ids, found)
    return found


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", ["npz", "safetensors", "folder"])
def test_the_same_graph_from_every_kind_of_file(tmp_path, kind, mapped):
    graph = opened(write(tmp_path, kind, ARRAYS), tmp_path, map_above_bytes=0 if mapped else None)
    snapshot = graph.snapshot
    assert {name: t.num_nodes for name, t in snapshot.nodes.items()} == {
        "author": 2, "paper": 3, "venue": 2,
    }  # fmt: skip
    assert sorted(snapshot.nodes["paper"].columns) == ["open", "weight", "x", "year"]
    for name, array in ARRAYS.items():
        base, _, of = name.partition(".")
        if base == "edge_index":
            assert sorted(snapshot.edges[of].all().T.tolist()) == sorted(array.T.tolist())
        elif base in ("x", "year", "open", "weight"):
            found = gathered(snapshot, of, base)
            assert found.dtype == array.dtype
            assert (found == array).all()
    assert any(column.mapped for column in snapshot.columns.values()) == (mapped and kind != "npz")
    assert (snapshot.num_nodes, snapshot.num_edges) == (7, 6)


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("edge_index.a__b", np.zeros((2, 1), int), "'a__b' is no edge type"),
        ("edge_index.paper__in__city", np.zeros((2, 1), int), "how many nodes 'city' has"),
        (f"edge_index.{WRITES}", np.array([[2], [0]]), r"\[0, 0\] is 2; not in \[0, 2\)"),
        (f"edge_index.{WRITES}", np.array([[0], [3]]), r"\[1, 0\] is 3; not in \[0, 3\)"),
        (f"edge_index.{WRITES}", np.zeros((3, 1), int), r"integers \[2, E\] wanted"),
        ("year.paper", np.zeros(2, int), "'year.paper': 2 rows for 3 paper"),
        ("x.paper", np.array([[1], [np.nan], [2]], np.float32), r"'x.paper' \[1, 0\] is nan"),
        ("weight.paper", np.array([1, 2, np.inf]), r"'weight.paper' \[2\] is inf"),
        ("num_nodes.venue", np.array(-1), "one integer of at least 0"),
        ("num_nodes.paper", np.array(4), "3 rows for 4 paper"),
        (f"edge_attr.{WRITES}", np.zeros((3, 1)), "features of edges are not held"),
        ("ids.paper", np.zeros(3, int), "another name than 'ids'"),
        ("x.author", np.zeros((2, 2), np.complex64), "complex64"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, array, told):
    with pytest.raises(ConfigError, match=told):
        opened(write(tmp_path, "folder", ARRAYS | {name: array}), tmp_path)


def test_reverses_are_types_of_their_own(tmp_path):
    with pytest.raises(ConfigError, match=r"undirected: .* has several types of edges"):
        opened(write(tmp_path, "npz", ARRAYS), tmp_path, undirected=True)


def test_the_academic_graph_is_the_same_again_and_heavy_tailed():
    one, other = academic_graph(500, seed=3), academic_graph(500, seed=3)
    assert all((one[name] == other[name]).all() for name in one)
    assert not np.array_equal(one["x.paper"], academic_graph(500, seed=4)["x.paper"])
    source, target = one["edge_index.paper__cites__paper"]
    assert (source > target).all(), "papers cite older ones"
    cited = np.bincount(target, minlength=500)
    assert cited.max() > 8 * cited.mean()
    back = one["edge_index.paper__written_by__author"]
    assert (back == one["edge_index.author__writes__paper"][::-1]).all()
    fields = one["y.paper"]
    assert (fields[source] == fields[target]).mean() > 0.5, "the structure tells the field"


class Model:
    """What the graph must be: arrays by name."""

    def __init__(self, arrays):
        self.arrays = {name: np.array(array) for name, array in arrays.items()}

    def apply(self, change):
        for of, features in change.add_nodes.items():
            for name, rows in features.items():
                key = f"{name}.{of}"
                self.arrays[key] = np.concatenate([self.arrays[key], rows])
        for of, features in change.set_nodes.items():
            for name, rows in features.items():
                if name != "ids":
                    self.arrays[f"{name}.{of}"][features["ids"]] = rows
        for of in change.remove_edges.keys() | change.add_edges.keys():
            key = f"edge_index.{of}"
            gone = {tuple(edge) for edge in change.remove_edges.get(of, NONE).T.tolist()}
            kept = [edge for edge in self.arrays[key].T.tolist() if tuple(edge) not in gone]
            kept += change.add_edges.get(of, NONE).T.tolist()
            self.arrays[key] = np.array(kept, np.int64).reshape(-1, 2).T

    def check(self, snapshot):
        for key, array in self.arrays.items():
            name, _, of = key.partition(".")
            if name == "edge_index":
                assert sorted(snapshot.edges[of].all().T.tolist()) == sorted(array.T.tolist())
                assert snapshot.edges[of].num_edges == array.shape[1]
            else:
                assert (gathered(snapshot, of, name) == array).all()
        # What is sampled is what is there.
        papers = np.arange(snapshot.nodes["paper"].num_nodes)
        found = snapshot.sample("paper", papers, {CITES: [-1], WRITES: [-1]}, 0)
        assert found.count(CITES) == self.arrays[f"edge_index.{CITES}"].shape[1]
        assert found.count(WRITES) == self.arrays[f"edge_index.{WRITES}"].shape[1]


NONE = np.empty((2, 0), np.int64)
KEPT = ("x.author", "x.paper", "year.paper", f"edge_index.{WRITES}", f"edge_index.{CITES}")


@pytest.mark.parametrize("compacts", [True, False])
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_any_history_of_changes(tmp_path_factory, compacts, seed, steps):
    least = 2 if compacts else 1 << 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "_LEAST_PATCHED_EDGES", least)
        patch.setattr(columns, "_LEAST_PATCHED_ROWS", least)
        rng = np.random.default_rng(seed)
        graph = held({name: ARRAYS[name] for name in KEPT}, tmp_path_factory.getbasetemp())
        model = Model({name: ARRAYS[name] for name in KEPT})
        for step in range(steps):
            before = graph.snapshot
            old = {name: gathered(before, "paper", name) for name in ("x", "year")}
            change = random_change(rng, model)
            after = graph.update(change, if_version=before.version)
            model.apply(change)
            assert after.version == step + 2
            model.check(after)
            for name, rows in old.items():
                assert (gathered(before, "paper", name) == rows).all(), "readers are disturbed"


def random_change(rng, model):
    papers, authors = len(model.arrays["year.paper"]), len(model.arrays["x.author"])
    added = int(rng.integers(0, 3))
    chosen = np.flatnonzero(rng.random(papers) < 0.3)
    x = rng.random((added, 1), dtype=np.float32)
    gone = model.arrays[f"edge_index.{CITES}"]
    total = papers + added
    return TypedChange(
        add_nodes={"paper": {"x": x, "year": rng.integers(2000, 2020, added)}} if added else {},
        set_nodes={"paper": {"ids": chosen, "year": rng.integers(2000, 2020, chosen.size)}},
        remove_edges={CITES: gone[:, rng.random(gone.shape[1]) < 0.3]},
        add_edges={
            CITES: rng.integers(0, total, (2, 3)),
            WRITES: rng.integers(0, [[authors], [total]], (2, 2)),
        },
    )


X = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (TypedChange(add_nodes={"city": {}}), "no type 'city'; it has author, paper, venue"),
        (TypedChange(add_edges={"cites": NONE}), "no type 'cites'"),
        (TypedChange(add_nodes={"author": {"y": X}}), r"'add_nodes.author.y': .* of their type, x"),
        (TypedChange(add_nodes={"paper": {"x": X}}), "'add_nodes.paper.open'"),
        (TypedChange(add_nodes={"venue": {}}), "no features, so none can be added"),
        (TypedChange(add_nodes={"author": {"x": X}}), "'add_nodes.author.x': 1 columns, .* has 2"),
        (
            TypedChange(add_nodes={"author": {"x": np.empty((1 << 50, 0), np.float32)}}),
            "'add_nodes.author.x': 0 columns, .* has 2",
        ),
        (TypedChange(set_nodes={"paper": {"x": X}}), "'set_nodes.paper.ids' needs features"),
        (TypedChange(set_nodes={"paper": {"ids": np.array([3]), "x": X}}), r"ids' \[0\] is 3"),
        (
            TypedChange(set_nodes={"paper": {"ids": np.array([1, 1]), "x": X}}),
            r"ids' \[1\]: node 1 is given twice",
        ),
        (TypedChange(set_nodes={"paper": {"ids": np.array([1]), "z": X}}), "have open, weight, x"),
        (
            TypedChange(set_nodes={"paper": {"ids": np.array([0, 1]), "x": X}}),
            "'set_nodes.paper.x': 1 rows for 2 nodes",
        ),
        (TypedChange(set_nodes={"paper": {"ids": np.array([1]), "year": X[0]}}), "float32, but"),
        (
            TypedChange(set_nodes={"paper": {"ids": np.array([1]), "x": X * np.nan}}),
            r"\[0, 0\] is nan; features must be finite",
        ),
        (
            TypedChange(add_edges={WRITES: np.array([[2], [0]])}),
            rf"'add_edges.{WRITES}' \[0, 0\] is 2; it must be in \[0, 2\)",
        ),
        (
            TypedChange(remove_edges={WRITES: np.array([[0], [2]])}),
            rf"'remove_edges.{WRITES}' \[:, 0\]: there is no edge 0 → 2",
        ),
    ],
)
def test_what_cannot_be_changed_is_named_and_nothing_is(tmp_path, change, told):
    graph = held(ARRAYS, tmp_path)
    before = graph.snapshot
    with pytest.raises(InvalidInput, match=told):
        graph.update(change)
    assert graph.snapshot is before
    with pytest.raises(Mismatch, match="is at version 1"):
        graph.update(TypedChange(), if_version=2)
