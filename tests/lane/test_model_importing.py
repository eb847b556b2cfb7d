"""Weights as others save them become safetensors, and pickled code never runs."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch_geometric.nn import GCNConv, SchNet

from serve.errors import ConfigError
from serve.lane.model_importing import convert, required_parameters


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(4, 2)

    def forward(self, x, edge_index, edge_weight=None):
        return self.conv(x, edge_index, edge_weight)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "weights.safetensors"


def converted(tmp_path, target, saved, strip=""):
    path = tmp_path / "saved.pt"
    torch.save(saved, path)
    _, notes = convert(path, target, strip)
    return load_file(target), notes


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_a_state_dict_is_written_as_it_is(tmp_path, target):
    state = Net().state_dict()
    found, notes = converted(tmp_path, target, state)
    same(found, state)
    assert notes == ()


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_checkpoint_holds_one(tmp_path, target, key):
    state = Net().state_dict()
    found, _ = converted(tmp_path, target, {"epoch": 3, key: state, "lr": 0.1})
    same(found, state)


@pytest.mark.parametrize(
    ("prefix", "strip"), [("module.", ""), ("_orig_mod.", ""), ("model.", "model.")]
)
def test_prefixes_of_wrappers_are_removed_and_told(tmp_path, target, prefix, strip):
    state = Net().state_dict()
    wrapped = {prefix + name: tensor for name, tensor in state.items()}
    found, notes = converted(tmp_path, target, wrapped, strip)
    same(found, state)
    assert notes == (f"'{prefix}' was removed from the names",)


def test_other_precisions_become_float32(tmp_path, target):
    state = {name: tensor.half() for name, tensor in Net().state_dict().items()}
    state["steps"] = torch.tensor(7)
    found, notes = converted(tmp_path, target, state)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32, torch.int64}
    assert notes == ("2 tensors of float16 became float32",)


def schnet():
    """SchNet on edges that are given, as its own search for them needs another package."""
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])

    def interactions(pos, batch):
        return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=1)

    return SchNet(16, 16, 2, 8, interaction_graph=interactions).eval()


@pytest.mark.parametrize("form", ["torch.save", "save_model"])
def test_tied_weights_come_back(tmp_path, target, form):
    torch.manual_seed(0)
    trained, fresh = schnet(), schnet()
    path = tmp_path / ("saved.pt" if form == "torch.save" else "saved.safetensors")
    if form == "torch.save":
        torch.save(trained.state_dict(), path)
    else:
        save_model(trained, str(path))
        assert load_file(path).keys() < trained.state_dict().keys()
    convert(path, target)
    fresh.load_state_dict(load_file(target), strict=True, assign=True)
    z, pos = torch.tensor([6, 1, 8]), torch.rand(3, 3)
    torch.testing.assert_close(fresh(z, pos), trained(z, pos))


class Harmful:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_pickled_code_is_refused_and_not_run(tmp_path, target):
    marker = tmp_path / "ran"
    with pytest.raises(ConfigError, match=r"it holds '\w+\.system'.* nothing was loaded"):
        converted(tmp_path, target, {"weight": torch.ones(1), "more": Harmful(marker)})
    assert not marker.exists()
    assert not target.exists()


def test_a_pickled_module_is_refused(tmp_path, target):
    with pytest.raises(ConfigError, match=r"Net'.* Save the state dict alone"):
        converted(tmp_path, target, Net())


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ([1, 2], "holds no state dict"),
        ({"epoch": 3}, "a dict with epoch"),
        ({"w": torch.ones(1, dtype=torch.complex64)}, "'w' is torch.complex64"),
        ({"w": torch.eye(2).to_sparse()}, "'w' is torch.float32"),
    ],
)
def test_what_is_no_weights_is_told(tmp_path, target, saved, told):
    with pytest.raises(ConfigError, match=told):
        converted(tmp_path, target, saved)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"no weights at all"])
def test_strange_files_are_told(tmp_path, target, suffix, content):
    path = tmp_path / f"saved{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"saved\.\w+: "):
        convert(path, target)


def test_safetensors_are_read_too(tmp_path, target):
    state = Net().state_dict()
    save_file(
        {name: tensor.bfloat16() for name, tensor in state.items()}, tmp_path / "w.safetensors"
    )
    count, _ = convert(tmp_path / "w.safetensors", target)
    assert count == len(state)
    assert {tensor.dtype for tensor in load_file(target).values()} == {torch.float32}


def test_forward_tells_what_it_requires():
    assert required_parameters(Net().forward) == ("x", "edge_index")
