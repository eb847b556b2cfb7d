"""The load generator against a server of models it has never heard of."""

import json
import subprocess
import sys

import pytest

from bench.kit.servers import ROOT, ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.native import front_lacks

MODELS = """
import torch
from torch_geometric.nn import GATv2Conv, GCNConv, global_mean_pool


class Everything(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.edges = GATv2Conv(9, 8, edge_dim=3)
        self.weights = GCNConv(8, 4)

    def forward(self, x, edge_index, edge_weight, edge_attr, batch):
        x = self.edges(x, edge_index, edge_attr).relu()
        return global_mean_pool(self.weights(x, edge_index, edge_weight), batch)


class Points(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 4)

    def forward(self, x, batch):
        return self.linear(x)
"""
INPUTS = {
    "Everything": ["x", "edge_index", "edge_weight", "edge_attr", "batch"],
    "Points": ["x", "batch"],
}


@pytest.fixture
def repository(tmp_path):
    """Two models under names of their own, whose inputs are not those of the demo's."""
    from safetensors.torch import save_file

    factories: dict = {}
    exec(MODELS, factories)
    for name, inputs in INPUTS.items():
        folder = tmp_path / "models" / name.lower()
        (folder / "1").mkdir(parents=True)
        (folder / "model.py").write_text(MODELS)
        (folder / "config.toml").write_text(
            f'[model]\nfactory = "./model.py:{name}"\ninputs = {json.dumps(inputs)}\n'
        )
        save_file(factories[name]().state_dict(), folder / "1" / "weights.safetensors")
    return tmp_path / "models"


@pytest.mark.parametrize("front", ["python", "native"])
def test_models_of_any_inputs_are_loaded(front, tmp_path, repository):
    lacks = front_lacks()
    if lacks and front == "native":
        pytest.skip(lacks)
    seen = []
    sections: dict[str, dict[str, object]] = {"server": {"front": front}}
    server = ServerProcess(tmp_path, repository=repository, sections=sections)
    with server:
        for sender in [[]] if lacks else [[], ["--native"]]:
            command = [
                sys.executable, "-m", "loadgen", "--target", server.target, "--rho", "0.2",
                "--requests", "30", "--scale", "0.01", "--max-nodes", "200", "--json", *sender,
            ]  # fmt: skip
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
            assert done.returncode == 0, done.stderr
            seen.append(json.loads(done.stdout))
    for one in seen:
        assert one["messages"] == {}
        assert one["by_status"] == {"OK": 30}
        assert set(one["by_model"]) == {"everything", "points"}
        # Every answer told its target.
        assert one["latency_over_qt"]["p50"] > 0
