import pytest

from serve.errors import ModelError
from serve.lane.measure.probe_signature import probe_inputs, probe_signature
from serve.lane.models.loader import load_model
from serve.models.model_signature import Signature
from serve.models.repository import find


def probed(folder):
    return probe_signature(load_model(find(folder.parent, folder.name)))


#: Every node's row may depend on every other, or on more than a resident graph has.
ANYWHERE = {"hops": None, "exact_hops": None}


def signature(**different):
    usual = {
        "num_features": 9,
        "edge_dim": None,
        "num_outputs": 4,
        "rows": "node",
        "accepts_empty": True,
        "accepts_edgeless": True,
        "deterministic": True,
        # Test models are a GCN layer: its neighbours, and their degrees. See test_reach.
        "hops": 1,
        "exact_hops": 2,
        "mergeable": True,
    }
    if different.get("rows") == "graph" or different.get("edge_dim"):
        usual |= ANYWHERE
    return Signature(**usual | different)


@pytest.mark.parametrize(
    ("factory", "more", "expected"),
    [
        ("Node", "", signature()),
        ("Node", "args = {in_channels = 9}", signature()),
        ("Node", "num_features = 9", signature()),
        ("Weighted", 'inputs = ["x", "edge_index", "edge_weight"]', signature()),
        ("Edges", 'inputs = ["edge_attr", "x", "edge_index"]', signature(edge_dim=3)),
        ("Pooled", 'inputs = ["x", "edge_index", "batch"]', signature(rows="graph")),
        ("Sum", "", signature(rows="graph", accepts_empty=False, mergeable=False)),
        ("Column", "", signature(num_outputs=1)),
        ("NeedsNodes", "", signature(accepts_empty=False, mergeable=False, **ANYWHERE)),
        ("Stateful", "", signature(deterministic=False, mergeable=False, **ANYWHERE)),
    ],
)
def test_shapes_are_found_by_running(put, factory, more, expected):
    assert probed(put(factory=f"./model.py:{factory}", more=more)) == expected


def test_a_width_that_gives_other_rows_is_not_the_models(put):
    # 8 columns are tried first, and run.
    assert probed(put(factory="./model.py:Folded")).num_features == 4


@pytest.mark.parametrize(
    ("factory", "more", "told"),
    [
        ("Node", "num_features = 7", "with 7 features: RuntimeError: mat1 and mat2"),
        ("Pair", "", "forward returned a tuple"),
        ("PerEdge", "", "7 and 11 nodes in 1 and 1 graphs give 12 and 20 rows"),
        ("Pooled", 'inputs = ["x", "batch", "edge_index"]', "no probe graph runs"),
        ("Edges", 'inputs = ["x", "edge_index"]', "missing 1 required positional argument"),
        ("Sampled", "", r"with 9 features: .*; its 'adjs' is .*class Served\(Sampled\):"),
    ],
)
def test_what_does_not_run_is_told(put, factory, more, told):
    with pytest.raises(ModelError, match=f"(?s)^model mine:1: .*{told}"):
        probed(put(factory=f"./model.py:{factory}", more=more))


def test_without_any_hint_the_config_is_asked_for(put):
    folder = put(factory="torch.nn:Identity", weights_of="Node")
    from safetensors.torch import save_file

    save_file({}, folder / "1" / "weights.safetensors")
    with pytest.raises(ModelError, match=r"give it as model\.num_features in config\.toml"):
        probed(folder)


def test_a_probe_is_a_valid_graph_and_always_the_same():
    one, two = (probe_inputs(7, 12, 3, 5, 2) for _ in range(2))
    assert all((one[name] == two[name]).all() for name in one)
    assert {name: tuple(value.shape) for name, value in one.items()} == {
        "x": (7, 5),
        "edge_index": (2, 12),
        "edge_weight": (12,),
        "edge_attr": (12, 2),
        "batch": (7,),
    }
    assert one["edge_index"].max() < 7
    assert one["batch"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert probe_inputs(0, 0, 0, 5, None)["x"].shape == (0, 5)
