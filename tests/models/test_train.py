import os
from pathlib import Path

import numpy as np
import pytest
import torch

from serve.errors import ConfigError
from serve.lane.models.loader import load_model
from serve.models import zoo
from serve.models.community import community_graph
from serve.models.repository import ModelSpec, find, scan
from serve.models.train import FACTORIES, main, read_graph, train_model
from serve.models.writer import write_model

SAVED = {"x": np.eye(3, 2), "edge_index": np.array([[0, 1], [1, 2]]), "y": np.array([0, 1, 0])}


@pytest.fixture(autouse=True)
def _keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(("hidden_channels", "num_layers"), [(64, 3), (256, 8), (4, 1)])
def test_zoo_builds_small_and_paper_models(name, hidden_channels, num_layers):
    module = FACTORIES[name](7, 3, hidden_channels=hidden_channels, num_layers=num_layers).eval()
    assert len(module.convs) == num_layers
    logits = module(torch.randn(5, 7), torch.tensor([[0, 1, 3], [1, 2, 4]]))
    assert logits.shape == (5, 3)
    assert logits.isfinite().all()
    # Logits, not log-probabilities: rows do not sum to 1 under exp.
    assert not torch.allclose(logits.exp().sum(dim=1), torch.ones(5))


def test_zoo_refuses_impossible_shapes():
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        zoo.gcn(7, 3, num_layers=0)
    with pytest.raises(ValueError, match="hidden_channels 10 must be a multiple of heads 4"):
        zoo.gat(7, 3, hidden_channels=10)


def test_training_learns_and_a_seed_is_one_set_of_weights():
    torch.set_num_threads(1)
    graph = community_graph()
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        module = zoo.gcn(32, 5)
        accuracy = train_model(module, graph, epochs=25)
        runs.append((accuracy, module.state_dict()))
    assert runs[0][0] == runs[1][0] > 0.8
    assert all(torch.equal(value, runs[1][1][key]) for key, value in runs[0][1].items())


def test_command_writes_a_repository_that_loads(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--epochs", "2"]) == 0
    specs = scan(tmp_path)
    assert {spec.name for spec in specs if isinstance(spec, ModelSpec)} == set(FACTORIES)
    for spec in specs:
        assert isinstance(spec, ModelSpec)
        assert "community graph, seed 0, 2 epochs; test accuracy 0." in spec.description
        load_model(spec)
    told = capsys.readouterr().out
    assert all(name in told for name in FACTORIES)


def test_command_trains_on_a_file_and_names_models_after_it(tmp_path):
    np.savez(tmp_path / "tiny.npz", **SAVED)
    assert (
        main(["--out", str(tmp_path), "--epochs", "1", "--data", str(tmp_path / "tiny.npz")]) == 0
    )
    spec = find(tmp_path, "gcn_tiny")
    assert spec.args["in_channels"] == 2
    assert spec.args["out_channels"] == 2


def test_command_says_what_is_wrong_with_the_file(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "out"), "--data", str(tmp_path / "none.npz")]) == 2
    assert "none.npz: not a readable npz file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sparse_and_dense_features_are_the_same_graph(tmp_path):
    np.savez(tmp_path / "dense.npz", **SAVED)
    sparse = {
        "x_data": np.array([1.0, 1.0]),
        "x_indices": np.array([0, 1]),
        "x_indptr": np.array([0, 1, 2, 2]),
        "x_shape": np.array([3, 2]),
    }
    np.savez(tmp_path / "sparse.npz", edge_index=SAVED["edge_index"], y=SAVED["y"], **sparse)
    dense, csr = (read_graph(tmp_path / f"{name}.npz") for name in ("dense", "sparse"))
    assert dense.x.dtype == csr.x.dtype == np.float32
    assert np.array_equal(dense.x, csr.x)
    assert np.array_equal(dense.edge_index, csr.edge_index)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"y": None}, "no array 'y'"),
        ({"x": None}, "no array 'x_shape'"),
        ({"edge_index": np.zeros((3, 2), int)}, r"edge_index \(3, 2\)"),
        ({"y": np.zeros(4, int)}, r"y \(4,\)"),
        ({"y": np.array([object()])}, "not a readable npz file"),
    ],
)
def test_bad_graph_files_are_named(tmp_path, change, told):
    arrays = {key: value for key, value in (SAVED | change).items() if value is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ConfigError, match=rf"bad\.npz: .*{told}"):
        read_graph(tmp_path / "bad.npz")


def test_a_failed_write_leaves_the_old_model(tmp_path, monkeypatch):
    def write(module):
        write_model(
            tmp_path,
            "mine",
            module,
            factory="serve.models.zoo:gcn",
            args={"in_channels": 4, "out_channels": 2},
            description='says "ü"\n',
        )

    write(zoo.gcn(4, 2))
    spec = find(tmp_path, "mine")
    assert spec.description == 'says "ü"\n'
    before = load_model(spec).module.state_dict()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write(zoo.gcn(4, 2))
    after = load_model(find(tmp_path, "mine")).module.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert sorted(path.name for path in (tmp_path / "mine" / "1").iterdir()) == [
        "weights.safetensors"
    ]

    # A process that has the old file mapped keeps what it mapped.
    write(zoo.gcn(4, 2))
    new = load_model(find(tmp_path, "mine")).module.state_dict()
    assert any(not torch.equal(value, new[key]) for key, value in before.items())


@pytest.mark.slow
def test_cora(tmp_path):
    if "GNNSERVE_DATA" not in os.environ:
        pytest.skip("GNNSERVE_DATA does not name a folder with cora.npz")
    data = Path(os.environ["GNNSERVE_DATA"]) / "cora.npz"
    assert main(["--out", str(tmp_path), "--data", str(data), "--epochs", "60"]) == 0
    graph = read_graph(data)
    inputs = {"x": torch.from_numpy(graph.x), "edge_index": torch.from_numpy(graph.edge_index)}
    for name in FACTORIES:
        logits = load_model(find(tmp_path, f"{name}_cora")).run(inputs)
        right = logits.argmax(dim=1).numpy() == graph.y
        assert right[graph.test_mask].mean() > 0.75
