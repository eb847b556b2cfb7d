"""How far models look that declare their inputs, by types of nodes and edges."""

import pytest
from torch_geometric.nn import GCN

from bench.kit import academic, gallery
from serve.lane.measure.typed_hops import probe_typed_reach
from serve.lane.models.loader import load_model
from serve.models.repository import find
from serve.models.writer import write_model


@pytest.mark.parametrize("name", academic.MODELS)
def test_two_layers_look_two_hops_far(tmp_path, name):
    loaded = academic.write(tmp_path, name)
    assert probe_typed_reach(loaded, loaded.spec.interface) == (2, 2)


@pytest.mark.parametrize(
    ("name", "reach"),
    [
        ("attention", (2, 2)),
        # Types of edges, pairs and positions belong to requests that bring their graph.
        ("rgcn", (None, None)),
        ("links", (None, None)),
        ("schnet", (None, None)),
    ],
)
def test_models_of_one_type(tmp_path, name, reach):
    loaded = gallery.write(tmp_path, name)
    assert probe_typed_reach(loaded, loaded.spec.interface) == reach


def test_the_degree_of_a_neighbour_is_one_hop_further(tmp_path):
    """As `gcn` of the short form: its first layer divides by a neighbour's in-edges."""
    args = {"in_channels": 8, "hidden_channels": 16, "out_channels": 3, "num_layers": 2}
    entry = gallery.Entry("GCN", gallery.graph(8), ("y FP32 [N, 3]",))
    write_model(
        tmp_path, "gcn", GCN(**args), factory="torch_geometric.nn.models:GCN", args=args,
        declaration=gallery.declaration(entry),
    )  # fmt: skip
    loaded = load_model(find(tmp_path, "gcn"))
    assert probe_typed_reach(loaded, loaded.spec.interface) == (2, 3)
