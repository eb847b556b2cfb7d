import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from serve.errors import ConfigError, InvalidInput, ModelError
from serve.lane.models.loader import load_model, tied_names
from serve.models.repository import find

X, EDGES = torch.randn(5, 9), torch.tensor([[0, 1, 2, 4], [1, 2, 3, 4]])


def spec_of(folder):
    return find(folder.parent, folder.name)


def test_runs_as_plain_pyg_does(put):
    from torch_geometric.nn import GCNConv

    spec = spec_of(put())
    loaded = load_model(spec)
    plain = GCNConv(9, 4)
    plain.load_state_dict({k: v.clone() for k, v in loaded.module.conv.state_dict().items()})
    output = loaded.run({"x": X, "edge_index": EDGES})
    assert torch.equal(output, plain(X, EDGES))
    assert output.is_inference()
    assert not any(p.requires_grad for p in loaded.module.parameters())
    assert not loaded.module.training


def test_factory_of_an_installed_package_with_arguments(put):
    folder = put()
    config = """
        [model]
        factory = "torch_geometric.nn.models:GraphSAGE"
        [model.args]
        in_channels = 9
        hidden_channels = 8
        num_layers = 2
        out_channels = 3
    """
    (folder / "config.toml").write_text(config)
    from torch_geometric.nn.models import GraphSAGE

    save_file(GraphSAGE(9, 8, 2, 3).state_dict(), folder / "1" / "weights.safetensors")
    assert load_model(spec_of(folder)).run({"x": X, "edge_index": EDGES}).shape == (5, 3)


def test_inputs_go_to_forward_in_the_configured_order_and_the_rest_is_ignored(put):
    loaded = load_model(
        spec_of(put(factory="./model.py:Edges", more='inputs = ["edge_attr", "x", "edge_index"]'))
    )
    inputs = {"batch": torch.zeros(5), "x": X, "edge_index": EDGES, "edge_attr": torch.ones(4, 3)}
    assert loaded.run(inputs).shape == (5, 4)
    with pytest.raises(InvalidInput, match="needs the tensor 'edge_attr'"):
        loaded.run({"x": X, "edge_index": EDGES})


def test_a_method_and_a_data_are_called_as_configured(put):
    plain = load_model(spec_of(put())).module
    inputs = {"x": X, "edge_index": EDGES}
    for factory, more, scale in (
        ("./model.py:OfData", "", 1.0),
        ("./model.py:Coder", 'method = "encode"\nmethod_args = {scale = 2.0}', 2.0),
    ):
        loaded = load_model(spec_of(put("other", factory, more)))
        loaded.module.load_state_dict(
            {f"model.{name}": tensor for name, tensor in plain.state_dict().items()}
        )
        assert torch.equal(loaded.run(inputs), scale * plain(X, EDGES))
        assert not loaded.module.model.training


def test_missing_edge_weight_means_ones_and_missing_batch_one_graph(put):
    weighted = load_model(
        spec_of(put("w", "./model.py:Weighted", 'inputs = ["x", "edge_index", "edge_weight"]'))
    )
    inputs = {"x": X, "edge_index": EDGES}
    ones = weighted.run(inputs | {"edge_weight": torch.ones(4)})
    assert torch.equal(weighted.run(inputs), ones)
    assert not torch.equal(weighted.run(inputs | {"edge_weight": torch.rand(4)}), ones)

    pooled = load_model(
        spec_of(put("p", "./model.py:Pooled", 'inputs = ["x", "edge_index", "batch"]'))
    )
    assert pooled.run(inputs).shape == (1, 4)
    assert pooled.run(inputs | {"batch": torch.tensor([0, 0, 1, 2, 2])}).shape == (3, 4)


def test_a_vector_becomes_one_column(put):
    output = load_model(spec_of(put(factory="./model.py:Column"))).run(
        {"x": X, "edge_index": EDGES}
    )
    assert output.shape == (5, 1)
    assert output.is_contiguous()


@pytest.mark.parametrize(
    ("factory", "told"),
    [("Pair", "forward returned a tuple"), ("Labels", r"forward returned torch.int64 \[5\]")],
)
def test_wrong_output_is_named(put, factory, told):
    loaded = load_model(spec_of(put(factory=f"./model.py:{factory}")))
    with pytest.raises(ModelError, match=rf"model mine:1: {told}; it must be torch.float32"):
        loaded.run({"x": X, "edge_index": EDGES})


def test_what_forward_raises_passes_through(put):
    with pytest.raises(RuntimeError, match="shapes"):
        load_model(spec_of(put())).run({"x": X[:, :3], "edge_index": EDGES})


@pytest.mark.parametrize(
    ("factory", "more", "told"),
    [
        ("./model.py:Nope", "", "./model.py has no callable 'Nope'"),
        ("./model.py:MODEL", "", "has no callable 'MODEL'"),
        ("no_such_package.net:Net", "", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("./model.py:raises", "", "./model.py:raises with {}: ValueError: no such width"),
        ("./model.py:Node", "args = {width = 3}", "TypeError: .*'width'"),
        ("./model.py:not_a_module", "", "returned a int, not a torch.nn.Module"),
        ("./model.py:Node", "args = {cached = true}", "layer 'conv' (GCNConv) has cached=True"),
        (
            "./model.py:Node",
            "args = {in_channels = 8}",
            "tensor 'conv.lin.weight' is torch.float32 [4, 9], the model has torch.float32 [4, 8]",
        ),
        ("./model.py:double", "", "is torch.float32 [4], the model has torch.float64 [4]"),
        ("./model.py:Edges", "", "lacks conv.att, conv.lin_edge.weight, "),
        ("./model.py:Node", 'method = "encode"', "model.method: 'Node' has no method 'encode'"),
        ("torch.nn:ReLU", "", "has the unknown conv.bias, conv.lin.weight"),
    ],
)
def test_what_cannot_be_loaded_is_named(put, factory, more, told):
    spec = spec_of(put(factory=factory, more=more, weights_of="Node"))
    pattern = told if ".*" in told else re.escape(told)
    with pytest.raises(ModelError, match=rf"^model mine:1: .*{pattern}"):
        load_model(spec)


def test_a_file_that_raises_is_reported_and_may_be_mended(put):
    folder = put()
    good = (folder / "model.py").read_text()
    (folder / "model.py").write_text("import nothing_like_this")
    with pytest.raises(ModelError, match=r"model.py:Node'.*nothing_like_this"):
        load_model(spec_of(folder))
    (folder / "model.py").write_text(good)
    load_model(spec_of(folder))


def test_two_models_with_their_own_model_py_do_not_mix(put):
    one, two = put("one"), put("two")
    text = (two / "model.py").read_text().replace("self.conv(x, edge_index)", "x")
    (two / "model.py").write_text(text)
    inputs = {"x": X, "edge_index": EDGES}
    assert load_model(spec_of(one)).run(inputs).shape == (5, 4)
    assert load_model(spec_of(two)).run(inputs).shape == (5, 9)


def test_weights_changed_since_the_scan_are_refused(put):
    folder = put()
    spec = spec_of(folder)
    weights = folder / "1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="truncated"):
        load_model(spec)


def test_a_transpose_is_no_second_name_of_its_tensor():
    module = torch.nn.Module()
    module.one = torch.nn.Parameter(torch.rand(3, 3))
    module.same = torch.nn.Parameter(module.one.data)
    module.turned = torch.nn.Parameter(module.one.data.t())
    assert tied_names(module) == [["one", "same"]]


def test_lazy_layers_take_their_width_from_the_weights(put):
    loaded = load_model(spec_of(put(more="args = {in_channels = -1}")))
    assert loaded.run({"x": X, "edge_index": EDGES}).shape == (5, 4)


# Loads the spec on stdin, reads every weight, says so, and stays until stdin closes.
OTHER_LANE = """
import sys, msgspec
from serve.lane.models.loader import load_model
from serve.models.repository import ModelSpec
loaded = load_model(msgspec.json.decode(sys.stdin.readline(), type=ModelSpec))
print(sum(float(p.sum()) for p in loaded.module.parameters()), flush=True)
sys.stdin.read()
"""


def test_two_processes_share_the_pages_of_the_weights(put):
    folder = put(more="args = {in_channels = 100_000}")
    save_file(
        {"conv.bias": torch.zeros(4), "conv.lin.weight": torch.ones(4, 100_000)},
        folder / "1" / "weights.safetensors",
    )
    spec = spec_of(folder)
    loaded = load_model(spec)
    assert sum(float(p.sum()) for p in loaded.module.parameters()) == 400_000
    first, last = next(iter(mappings(spec.weights)))
    assert all(first <= p.data_ptr() < last for p in loaded.module.parameters())

    with subprocess.Popen(
        [sys.executable, "-c", OTHER_LANE],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(msgspec.json.encode(spec) + b"\n")
        other.stdin.flush()
        assert float(other.stdout.readline()) == 400_000
        usage = mappings(spec.weights)[first, last]
        other.stdin.close()
    # The kernel's own account: mapped by both, copied by neither.
    assert usage["Shared_Clean"] + usage["Shared_Dirty"] >= 4 * 400_000
    assert usage["Anonymous"] == 0


def mappings(path):
    """Bytes by kind, by (start, end) address, of this process's mappings of `path`."""
    found = {}
    current: dict | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) .{4} ", line)
        if head:
            current = None
            if line.endswith(f" {path}"):
                current = found[int(head[1], 16), int(head[2], 16)] = {}
        elif current is not None and line.endswith("kB"):
            key, value, _ = line.split()
            current[key.rstrip(":")] = int(value) * 1024
    return found
