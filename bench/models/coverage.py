"""Which classes of PyG serve as a model of their own, with declared inputs?

Every class of `torch_geometric.nn.models` and `nn.conv` is built with small arguments. The inputs
of its forward are declared by their usual meaning, and its outputs by what it returns. Then it goes
through what the server does with a new model: it is run on graphs of several sizes with its outputs
checked, and its memory is measured.
"""

import argparse
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.kit.script import Script, Table
from serve.graphs.random_inputs import declared_inputs
from serve.interface import DTYPES, InputSlot, Interface, TensorSlot
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.declared import DeclaredForward
from serve.lane.models.loader import LoadedModel
from serve.models.repository import ModelSpec

PACKAGES = ("torch_geometric.nn.models", "torch_geometric.nn.conv")
SCRIPT = Script(
    "coverage",
    full={"names": ("",), "limit_mib": 64},
    quick={"names": ("GCN", "RGCNConv"), "limit_mib": 16},
    tables=(
        Table("Classes of PyG as models of their own", "rows",
              {"class": "{name}", "serves": "{serves}", "inputs, or why not": "{told}"}),
    ),
)  # fmt: skip

#: Columns of features, and counts that outputs are recognised by.
_F = 8
_COUNTS = {"N": 13, "E": 37, "K": 29, "P": 17, "N.a": 11, "N.b": 19, "E.to": 23, "E.of": 31}
_EDGES = [("a", "to", "b"), ("b", "of", "a")]


def _layers(columns: int, out: int = _F) -> nn.Module:
    return nn.Sequential(nn.Linear(columns, out), nn.ReLU(), nn.Linear(out, out))


def _required(name: str) -> Any:
    """Return the value of a constructor's parameter that has no default; raises ValueError."""
    values = {
        "in_channels": _F, "out_channels": _F, "hidden_channels": _F, "channels": _F, "dim": 4,
        "num_layers": 2, "num_relations": 3, "edge_dim": 4, "num_node_types": 2, "depth": 2,
        "num_edge_types": 3, "edge_type_emb_dim": 4, "edge_attr_emb_dim": 4, "kernel_size": 3,
        "K": 2, "alpha": 0.5, "filter_size": 2, "k": 3, "num_nodes": 50, "embedding_dim": _F,
        "num_timesteps": 2, "first_aggr": True, "deg": torch.tensor([1, 4, 3, 2]),
        "aggregators": ["mean", "max"], "scalers": ["identity"], "num_blocks": 2, "ratio": 0.5,
        "space_dimensions": 3, "propagate_dimensions": 3, "out_emb_channels": _F, "num_radial": 3,
        "int_emb_size": 4, "basis_emb_size": 4, "num_bilinear": 2, "num_spherical": 3,
        "discriminator": nn.Linear(_F, _F),
        "metadata": (["a", "b"], _EDGES), "in_features": _F, "normalize": True, "nn": _layers(_F),
    }  # fmt: skip
    if name not in values:
        raise ValueError(f"its constructor takes '{name}'")
    return values[name]


def _own(name: str) -> dict[str, Any]:
    """Return arguments of one class, beside or instead of those of ``_required``."""
    conv: Any = importlib.import_module("torch_geometric.nn.conv")
    pna = {"aggregators": ["mean"], "scalers": ["identity"], "deg": torch.tensor([1, 4, 3])}
    found: dict[str, dict[str, Any]] = {
        "MLP": {"in_channels": _F, "hidden_channels": _F, "out_channels": _F, "num_layers": 2},
        "PNA": pna, "GINEConv": {"edge_dim": 4}, "EdgeConv": {"nn": _layers(2 * _F)},
        "DynamicEdgeConv": {"nn": _layers(2 * _F)}, "NNConv": {"nn": nn.Linear(4, _F * _F)},
        "ECConv": {"nn": nn.Linear(4, _F * _F)}, "CGConv": {"dim": 4}, "XConv": {"dim": 3},
        "PointNetConv": {"local_nn": _layers(_F + 3)}, "PPFConv": {"local_nn": _layers(_F + 4)},
        "PointGNNConv": {"mlp_h": _layers(_F, 3), "mlp_f": _layers(_F + 3), "mlp_g": _layers(_F)},
        "GPSConv": {"conv": conv.GCNConv(_F, _F)}, "DirGNNConv": {"conv": conv.SAGEConv(_F, _F)},
        "HeteroConv": {"convs": {edge: conv.SAGEConv((_F, _F), _F) for edge in _EDGES}},
        **{name: {"encoder": conv.GCNConv(_F, _F)} for name in ("GAE", "VGAE", "ARGA", "ARGVA")},
        "EGConv": {"num_heads": 4},
        "DeepGCNLayer": {"conv": conv.GCNConv(_F, _F)}, "TransformerConv": {"edge_dim": 4},
        "GeneralConv": {"in_edge_channels": 4}, "GENConv": {"edge_dim": 4},
        "GroupAddRev": {"conv": conv.GCNConv(_F // 2, _F // 2), "num_groups": 2},
        "JumpingKnowledge": {"mode": "cat"},
    }  # fmt: skip
    return found.get(name, {})


#: Parameters with a default that are given all the same, of classes that need them.
_GIVEN = {
    "edge_type": ("RGCNConv", "FastRGCNConv", "RGATConv", "FiLMConv"),
    "edge_attr": ("GINEConv", "NNConv", "ECConv", "CGConv", "GMMConv", "SplineConv", "PDNConv",
                  "TransformerConv", "GeneralConv", "GENConv", "HEATConv", "AttentiveFP"),
    "batch": ("SchNet", "DimeNet", "DimeNetPlusPlus", "ViSNet", "AttentiveFP", "GPSConv"),
}  # fmt: skip
#: Models whose `z` are atomic numbers.
_MOLECULES = ("SchNet", "DimeNet", "DimeNetPlusPlus", "ViSNet", "GNNFF")
#: Inputs of wrappers, whose forward takes anything.
_ANYTHING = {"HeteroConv": ("x_dict", "edge_index_dict"), "GAE": ("x", "edge_index"),
             "VGAE": ("x", "edge_index"), "ARGA": ("x", "edge_index"),
             "ARGVA": ("x", "edge_index"), "DeepGCNLayer": ("x", "edge_index"),
             "GroupAddRev": ("x", "edge_index"), "PMLP": ("x", "edge_index"),
             "GPSConv": ("x", "edge_index", "batch"),
             "AntiSymmetricConv": ("x", "edge_index")}  # fmt: skip


def _slots(name: str, owner: str) -> list[InputSlot]:
    """Return the inputs of a forward's parameter by its usual meaning; raises ValueError."""
    nodes, edges = "N", "E"
    floats = {
        "x": (nodes, _F), "x_0": (nodes, _F), "z": (nodes, _F), "pos": (nodes, 3),
        "normal": (nodes, 3), "edge_weight": (edges,), "edge_attr": (edges, 4),
    }  # fmt: skip
    integers = {"edge_type": (edges, 3), "node_type": (nodes, 2)}
    links = {"edge_index": edges, "hyperedge_index": edges, "edge_label_index": "K",
             "pos_edge_index": "K", "neg_edge_index": "P"}  # fmt: skip
    if name == "z" and owner in _MOLECULES:
        return [InputSlot(name, "INT64", (nodes,), low=1, high=9)]
    if name == "x" and owner == "DNAConv":
        return [InputSlot(name, "FP32", (nodes, 2, _F))]
    if name in floats:
        return [InputSlot(name, "FP32", floats[name])]
    if name in integers:
        symbol, high = integers[name]
        return [InputSlot(name, "INT64", (symbol,), low=0, high=high)]
    if name in links:
        return [InputSlot(name, "INT64", (2, links[name]), index=(nodes,))]
    if name == "batch":
        return [InputSlot(name, "INT64", (nodes,), index=("G",))]
    if name == "x_dict":
        return [InputSlot(f"x.{kind}", "FP32", (f"N.{kind}", _F)) for kind in "ab"]
    if name == "edge_index_dict":
        return [
            InputSlot(f"edge_index.{a}__{by}__{b}", "INT64", (2, f"E.{by}"), (f"N.{a}", f"N.{b}"))
            for a, by, b in _EDGES
        ]
    raise ValueError(f"its forward takes '{name}'")


def _inputs(name: str, module: nn.Module) -> tuple[InputSlot, ...]:
    if name == "LightGCN":
        # Its nodes are those it was trained on.
        return tuple(
            InputSlot(key, "INT64", (2, symbol), low=0, high=50)
            for key, symbol in (("edge_index", "E"), ("edge_label_index", "K"))
        )
    names = _ANYTHING.get(name, ())
    if not names:
        names = tuple(
            key
            for key, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.default is parameter.empty or name in _GIVEN.get(key, ())
        )
    return tuple(slot for key in names for slot in _slots(key, name))


def _tensors(returned: object, name: str = "y") -> Iterator[tuple[str, Tensor]]:
    """Yield a name and each tensor of what forward returns."""
    if isinstance(returned, Tensor):
        yield name, returned
    elif isinstance(returned, Mapping):
        for key, value in returned.items():
            yield from _tensors(value, str(key))
    elif isinstance(returned, tuple | list):
        for position, value in enumerate(returned):
            yield from _tensors(value, f"{name}{position}")
    else:
        raise ValueError(f"its forward returns a {type(returned).__name__}")


def _outputs(module: nn.Module, slots: tuple[InputSlot, ...]) -> tuple[TensorSlot, ...]:
    """Return the outputs by what the module returns for one graph, of three in a batch."""
    interface = Interface(slots, ())
    counts = [_COUNTS[symbol] for symbol in interface.counts]
    arrays = declared_inputs(
        interface,
        counts,
        np.random.default_rng(0),
        graphs=lambda things: np.arange(things) * 3 // things,
    )
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    forward = DeclaredForward(module, interface, "it")
    sizes = forward.sizes(tensors)
    symbols = {count: symbol for symbol, count in sizes.items()}
    with torch.inference_mode():
        returned = forward.returned(module, tensors, sizes)
    wires = {name: wire for wire, name in DTYPES.items()}
    return tuple(
        TensorSlot(
            key,
            wires[str(tensor.dtype).removeprefix("torch.")],
            tuple(symbols.get(size, size) for size in tensor.shape),
        )
        for key, tensor in _tensors(returned)
    )


def tried(package: str, name: str, limit_mib: int) -> str:
    """Take one class through what the server does with a new model; returns its inputs.

    Raises what stands in the way.
    """
    kind = getattr(importlib.import_module(package), name)
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    given = _own(name)
    for parameter in parameters:
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and parameter.name not in given:
            given[parameter.name] = _required(parameter.name)
    torch.manual_seed(0)
    module = kind(**given).eval().requires_grad_(False)
    slots = _inputs(name, module)
    interface = Interface(slots, _outputs(module, slots))
    spec = ModelSpec(
        name=name, version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
        inputs=tuple(slot.name for slot in slots), interface=interface, qos_factor=None,
    )  # fmt: skip
    loaded = LoadedModel(spec, module, declared=DeclaredForward(module, interface, name))
    signature = probe_signature(loaded)
    measure_memory(loaded, signature, max_bytes=limit_mib << 20)
    return ", ".join(spec.inputs)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Try all classes, or those named."""
    rows = []
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            wanted = not any(options.names) or name in options.names
            if not wanted or not inspect.isclass(getattr(importlib.import_module(package), name)):
                continue
            row = {"package": package.rpartition(".")[2], "name": name}
            try:
                rows.append(
                    {**row, "serves": True, "told": tried(package, name, options.limit_mib)}
                )
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:110]
                rows.append({**row, "serves": False, "told": reason})
    return {"rows": rows}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    SCRIPT.main(measure, __doc__)
