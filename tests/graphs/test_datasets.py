import numpy as np
import pytest

from serve.errors import ConfigError, UnknownName
from serve.graphs.datasets import TABLE_4, load_dataset


@pytest.mark.parametrize("name", ["pubmed", "artist", "amazon"])
def test_generated_counts_are_the_scaled_ones_of_table_4(name):
    dataset = load_dataset(name, scale=0.05)
    spec = TABLE_4[name]
    assert dataset.num_nodes == round(spec.num_nodes * 0.05)
    assert spec.num_edges * 0.05 - dataset.num_edges <= 2
    assert dataset.source == "generated, scale 0.05, seed 0"
    assert dataset.offsets[-1] == dataset.num_edges


def test_a_scale_too_small_for_the_degree_gives_a_sparser_graph():
    dataset = load_dataset("reddit", scale=0.001)
    assert dataset.num_nodes == 233
    assert dataset.num_edges == 233 * 232 // 4 // 2 * 2


def test_a_file_is_preferred_and_made_symmetric(tmp_path):
    np.savez(tmp_path / "pubmed_topology.npz", num_nodes=4, edge_index=[[0, 1, 2, 2], [1, 0, 2, 3]])
    dataset = load_dataset("pubmed", folder=tmp_path)
    assert dataset.source == "file pubmed_topology.npz"
    assert dataset.edge_index.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]


def test_any_file_can_be_a_dataset(tmp_path):
    np.savez(tmp_path / "mine.npz", num_nodes=2, edge_index=[[0], [1]])
    assert load_dataset("mine", folder=tmp_path).num_edges == 2


def test_unknown_name_says_where_it_looked(tmp_path):
    with pytest.raises(UnknownName, match=r"no file cora\.npz in .*not one of pubmed, artist"):
        load_dataset("cora", folder=tmp_path)
    with pytest.raises(UnknownName, match="no folder of graphs was given"):
        load_dataset("cora")
    with pytest.raises(ConfigError, match="no such folder of graphs"):
        load_dataset("pubmed", folder=tmp_path / "absent")


@pytest.mark.parametrize("scale", [0, -1, 1.5, float("nan")])
def test_scale_out_of_range(scale):
    with pytest.raises(ConfigError, match="at most 1"):
        load_dataset("pubmed", scale=scale)
