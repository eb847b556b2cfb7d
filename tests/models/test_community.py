import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.loader import load_model
from serve.models.community import community_graph, labelled
from serve.models.repository import ModelSpec, find, scan

MODELS = Path(__file__).parents[2] / "configs" / "models"


@pytest.fixture(scope="module")
def graph():
    return community_graph()


def test_same_seed_same_graph_another_seed_another(graph):
    again, other = community_graph(0), community_graph(1)
    for field in dataclasses.fields(graph):
        value = getattr(graph, field.name)
        assert np.array_equal(value, getattr(again, field.name))
        assert not np.array_equal(value, getattr(other, field.name))


def test_the_graph_the_shipped_models_know(graph):
    # Whoever changes the generator trains and commits the models again.
    digest = hashlib.sha256(graph.edge_index.tobytes() + graph.y.tobytes()).hexdigest()
    assert digest == "6af9d33ba60e8c9e1f068bb1ca99e50234b04a10ca490a464a7e48b5990eb3a0"


def test_structure(graph):
    source, target = graph.edge_index
    assert (graph.x.dtype, graph.x.shape) == (np.float32, (2000, 32))
    assert graph.edge_index.dtype == graph.y.dtype == np.int64
    assert np.bincount(graph.y).tolist() == [400] * 5
    assert (source != target).all()
    pairs = set(zip(source.tolist(), target.tolist(), strict=True))
    assert len(pairs) == len(source)
    assert {(b, a) for a, b in pairs} == pairs
    assert 0.7 < (graph.y[source] == graph.y[target]).mean() < 0.8
    assert (graph.train_mask ^ graph.test_mask).all()
    assert graph.train_mask.sum() == 1000


def test_labelled_splits_given_arrays_by_seed(graph):
    one, two = (labelled(graph.x, graph.edge_index, graph.y, seed) for seed in (3, 4))
    assert one.x is graph.x
    assert one.train_mask.sum() == one.test_mask.sum() == 1000
    assert not np.array_equal(one.train_mask, two.train_mask)


def test_features_alone_are_not_enough(graph):
    # Least squares on the features, the best a linear model without the graph can do.
    train, test = graph.train_mask, graph.test_mask
    weights, *_ = np.linalg.lstsq(graph.x[train], np.eye(5)[graph.y[train]], rcond=None)
    accuracy = ((graph.x[test] @ weights).argmax(axis=1) == graph.y[test]).mean()
    assert 0.3 < accuracy < 0.7


def test_shipped_models():
    found = {spec.name: spec for spec in scan(MODELS)}
    assert set(found) == {"gcn", "sage", "gin", "gat"}
    assert all(isinstance(spec, ModelSpec) for spec in found.values())
    assert max(spec.weights_bytes for spec in found.values()) < 200_000


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat"])
def test_shipped_model_knows_its_graph(graph, name):
    loaded = load_model(find(MODELS, name))
    logits = loaded.run(
        {"x": torch.from_numpy(graph.x), "edge_index": torch.from_numpy(graph.edge_index)}
    )
    right = logits.argmax(dim=1).numpy() == graph.y
    assert right[graph.test_mask].mean() > 0.95
    signature = probe_signature(loaded)
    assert (signature.num_features, signature.num_outputs, signature.rows) == (32, 5, "node")
    assert signature.accepts_empty
    assert signature.accepts_edgeless
    assert signature.deterministic
