"""Resident graphs: every version equals a graph made anew, and readers see one version."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import InvalidInput, Mismatch
from serve.graphs import columns
from serve.graphs import edges as edges_module
from serve.graphs.load import GraphParts, OpenOptions, held
from serve.graphs.updates import Change


def opened(num_nodes, edges, x, folder):
    edges = np.asarray(edges, np.int64).reshape(2, -1)
    x = np.asarray(x, np.float32)
    return held(
        "g", GraphParts(num_nodes, edges, x, "test"), OpenOptions(cache=folder), lambda *_: None
    )


def pairs(edges):
    return sorted(zip(*np.asarray(edges).tolist(), strict=True))


class Model:
    """What the graph must be: a list of edges and an array."""

    def __init__(self, edges, x):
        self.edges, self.x = list(edges), x

    def apply(self, change):
        if change.add_x is not None:
            self.x = np.concatenate([self.x, change.add_x])
        if change.set_x is not None:
            self.x = self.x.copy()
            self.x[change.set_ids] = change.set_x
        gone = set(pairs(change.remove_edges))
        self.edges = [edge for edge in self.edges if edge not in gone] + pairs(change.add_edges)

    def check(self, snapshot):
        assert (snapshot.num_nodes, snapshot.num_edges) == (len(self.x), len(self.edges))
        assert pairs(snapshot.edges()) == sorted(self.edges)
        assert (snapshot.features(np.arange(len(self.x))) == self.x).all()
        # What is sampled is what is there.
        sample = snapshot.sample(np.arange(len(self.x)), [-1], 0)
        assert sample.num_edges == len(self.edges)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize("compacts", [True, False])
@given(data=st.data())
@settings(max_examples=60)
def test_any_history_of_changes(folder, compacts, data):
    least = 2 if compacts else 1 << 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "_LEAST_PATCHED_EDGES", least)
        patch.setattr(columns, "_LEAST_PATCHED_ROWS", least)
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        num_nodes = int(rng.integers(1, 12))
        edges = rng.integers(0, num_nodes, (2, rng.integers(0, 30)))
        whole = data.draw(st.booleans())
        x = rng.integers(0, 9, (num_nodes, 3)) + (0 if whole else rng.random((num_nodes, 3)))
        graph = opened(num_nodes, edges, x, folder)
        assert graph.snapshot.x.dtype == (np.uint8 if whole else np.float32)
        model = Model(pairs(edges), x.astype(np.float32))
        model.check(graph.snapshot)
        for step in range(data.draw(st.integers(1, 6))):
            before = graph.snapshot
            change = random_change(rng, model)
            old_edges = pairs(before.edges())
            after = graph.update(change, if_version=before.version)
            model.apply(change)
            assert after.version == step + 2
            model.check(after)
            assert pairs(before.edges()) == old_edges, "readers of the old version are disturbed"


def random_change(rng, model):
    added = int(rng.integers(0, 3))
    total = len(model.x) + added
    chosen = np.flatnonzero(rng.random(len(model.x)) < 0.3)
    gone = [edge for edge in model.edges if rng.random() < 0.3]
    features = rng.random((added, 3), dtype=np.float32)
    return Change(
        add_x=features if added else None,
        set_ids=chosen,
        set_x=rng.random((chosen.size, 3), dtype=np.float32) if chosen.size else None,
        remove_edges=np.array(gone, np.int64).reshape(-1, 2).T,
        add_edges=rng.integers(0, total, (2, rng.integers(0, 6))),
    )


X = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def graph(tmp_path):
    return opened(3, [[0, 1, 1], [1, 2, 2]], X, tmp_path)


def edge(*ends):
    return np.array(ends, np.int64).reshape(-1, 2).T


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Change(add_edges=edge((0, 3))), r"'add_edges' \[1, 0\] is 3; it must be in \[0, 3\)"),
        (Change(remove_edges=edge((0, 1), (-1, 1))), r"'remove_edges' \[0, 1\] is -1"),
        (Change(remove_edges=edge((0, 1), (2, 0))), r"'remove_edges' \[:, 1\]: .* no edge 2 → 0"),
        (Change(set_ids=np.array([3]), set_x=X[:1]), r"'set_ids' \[0\] is 3"),
        (Change(set_ids=np.array([1, 0, 1]), set_x=X), r"'set_ids' \[2\]: node 1 is given twice"),
        (Change(set_ids=np.array([1]), set_x=X), "'set_x': 3 rows for 1 'set_ids'"),
        (Change(set_ids=np.array([1])), "'set_x': 0 rows for 1 'set_ids'"),
        (Change(add_x=X[:, :1]), "'add_x': 1 columns, but the graph has 2 features"),
        (Change(add_x=X * np.nan), r"'add_x' \[0, 0\] is nan; features must be finite"),
    ],
)
def test_what_cannot_be_changed_is_named_and_nothing_is(graph, change, told):
    before = graph.snapshot
    with pytest.raises(InvalidInput, match=told):
        graph.update(change)
    assert graph.snapshot is before


def test_parallel_edges_go_together_and_new_nodes_get_edges(graph):
    graph.update(Change(add_x=X[:1], remove_edges=edge((1, 2)), add_edges=edge((3, 2), (0, 3))))
    assert pairs(graph.snapshot.edges()) == [(0, 1), (0, 3), (3, 2)]


def test_a_change_for_another_version_is_refused(graph):
    graph.update(Change(add_edges=edge((0, 0))))
    with pytest.raises(Mismatch, match="'g' is at version 2, the change is for version 1"):
        graph.update(Change(add_edges=edge((0, 0))), if_version=1)


def test_who_does_not_accept_prevents_it(graph):
    def refuse(new):
        raise Mismatch(f"{new.num_edges} edges")

    with pytest.raises(Mismatch, match="4 edges"):
        graph.update(Change(add_edges=edge((0, 0))), accept=refuse)
    assert graph.snapshot.version == 1


def test_readers_see_one_version_while_it_changes(tmp_path):
    """Writers move all features and all edges at once; no reader may see some of each."""
    size = 64
    ring = np.stack([np.arange(size), np.roll(np.arange(size), -1)])
    graph = opened(size, ring, np.zeros((size, 2)), tmp_path)
    everything = np.arange(size)
    wrong, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            snapshot = graph.snapshot
            x = snapshot.features(everything)
            shift = int(x[0, 0])
            ends = snapshot.edges()
            if (x != shift).any() or ((ends[1] - ends[0]) % size != shift + 1).any():
                wrong.append(snapshot.version)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for shift in range(1, 60):
        here = np.stack([np.arange(size), (np.arange(size) + shift) % size])
        there = np.stack([np.arange(size), (np.arange(size) + shift + 1) % size])
        x = np.full((size, 2), shift, np.float32)
        graph.update(Change(set_ids=everything, set_x=x, remove_edges=here, add_edges=there))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert graph.snapshot.version == 60
