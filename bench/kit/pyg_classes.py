"""Small arguments and inputs for every class of `torch_geometric.nn`, by their usual meaning."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

from bench.kit.gallery_models import Near
from serve.interface import InputSlot

#: Columns of features, and nodes of a model that is made for one graph.
F, FIXED = 8, 50
EDGES = [("a", "to", "b"), ("b", "of", "a")]
#: Why a class cannot be a model of its own, where trying it would not show that.
CANNOT = {
    "MessagePassing": "It is the base of the others: its propagate takes no features.",
    "WLConv": "It numbers colours in the order in which it meets them, so answers depend on the"
    " requests before.",
    "MeshCNNConv": "It takes exactly four neighbours of each edge, in an order that random inputs"
    " do not have.",
    "LPFormer": "It takes a sparse matrix, which no request can hold.",
}
#: What to call instead of forward.
METHODS = dict.fromkeys(("GAE", "VGAE", "ARGA", "ARGVA"), "encode")
#: Arguments of it that no request brings.
METHOD_ARGS: dict[str, dict[str, Any]] = {"MetaPath2Vec": {"node_type": "a"}}


def layers(columns: int, out: int = F) -> nn.Module:
    return nn.Sequential(nn.Linear(columns, out), nn.ReLU(), nn.Linear(out, out))


class _Edges(nn.Module):
    """An edge model of MetaLayer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2 * F + 4, 4)

    def forward(self, source: Tensor, target: Tensor, edge_attr: Tensor, *_: Any) -> Any:
        return self.layers(torch.cat([source, target, edge_attr], dim=1))


class _Nodes(nn.Module):
    """A node model of MetaLayer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(F + 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, *_: Any) -> Any:
        out = x.new_zeros(x.shape[0], 4).index_add(0, edge_index[1], edge_attr)
        return self.layers(torch.cat([x, out], dim=1))


class _Normal(nn.Module):
    """A variational encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation = GCNConv(F, F), GCNConv(F, F)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.mean(x, edge_index), self.deviation(x, edge_index)


#: Arguments of constructors that mean the same in all classes.
_USUAL: dict[str, Any] = {
    "in_channels": F, "out_channels": F, "hidden_channels": F, "channels": F, "dim": 4,
    "num_layers": 2, "num_relations": 3, "edge_dim": 4, "num_node_types": 2, "depth": 2,
    "num_edge_types": 3, "edge_type_emb_dim": 4, "edge_attr_emb_dim": 4, "kernel_size": 3,
    "K": 2, "alpha": 0.5, "filter_size": 2, "k": 3, "num_nodes": FIXED, "embedding_dim": F,
    "num_timesteps": 2, "first_aggr": True, "deg": torch.tensor([1, 4, 3, 2]),
    "aggregators": ["mean", "max"], "scalers": ["identity"], "num_blocks": 2, "ratio": 0.5,
    "space_dimensions": 3, "propagate_dimensions": 3, "out_emb_channels": F, "num_radial": 3,
    "int_emb_size": 4, "basis_emb_size": 4, "num_bilinear": 2, "num_spherical": 3,
    "metadata": (["a", "b"], EDGES), "in_features": F, "normalize": True,
    "hidden_node_channels": F, "hidden_edge_channels": F,
}  # fmt: skip


def _edges(nodes: int) -> Tensor:
    """Return the ring that a model is made for."""
    return torch.stack([torch.arange(nodes), torch.arange(1, nodes + 1) % nodes])


def _own(name: str) -> dict[str, Any]:
    """Return arguments of one class, beside or instead of the usual ones."""
    models: Any = importlib.import_module("torch_geometric.nn.models")
    tgn: Any = importlib.import_module("torch_geometric.nn.models.tgn")
    pna = {"aggregators": ["mean"], "scalers": ["identity"], "deg": torch.tensor([1, 4, 3])}
    links = {edge: _edges(FIXED) for edge in EDGES}
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "MLP": lambda: {"in_channels": F, "hidden_channels": F, "out_channels": F,
                        "num_layers": 2},
        "PNA": lambda: pna,
        "EdgeConv": lambda: {"nn": layers(2 * F)},
        "DynamicEdgeConv": lambda: {"nn": layers(2 * F)},
        "GINConv": lambda: {"nn": layers(F)}, "GINEConv": lambda: {"nn": layers(F), "edge_dim": 4},
        "NNConv": lambda: {"nn": nn.Linear(4, F * F)},
        "ECConv": lambda: {"nn": nn.Linear(4, F * F)},
        "CGConv": lambda: {"dim": 4}, "XConv": lambda: {"dim": 3},
        "SplineConv": lambda: {"dim": 4},
        "PointNetConv": lambda: {"local_nn": layers(F + 3)},
        "PPFConv": lambda: {"local_nn": layers(F + 4)},
        "PointGNNConv": lambda: {"mlp_h": layers(F, 3), "mlp_f": layers(F + 3),
                                 "mlp_g": layers(F)},
        "GPSConv": lambda: {"conv": GCNConv(F, F)}, "DirGNNConv": lambda: {"conv": SAGEConv(F, F)},
        "HeteroConv": lambda: {"convs": {edge: SAGEConv((F, F), F) for edge in EDGES}},
        "GAE": lambda: {"encoder": GCNConv(F, F)}, "VGAE": lambda: {"encoder": _Normal()},
        "ARGA": lambda: {"encoder": GCNConv(F, F), "discriminator": nn.Linear(F, F)},
        "ARGVA": lambda: {"encoder": _Normal(), "discriminator": nn.Linear(F, F)},
        "EGConv": lambda: {"num_heads": 4},
        "DeepGCNLayer": lambda: {"conv": GCNConv(F, F)},
        "TransformerConv": lambda: {"edge_dim": 4},
        "GeneralConv": lambda: {"in_edge_channels": 4}, "GENConv": lambda: {"edge_dim": 4},
        # Only training gains from giving memory back early.
        "GroupAddRev": lambda: {"conv": GCNConv(F // 2, F // 2), "num_groups": 2, "disable": True},
        "JumpingKnowledge": lambda: {"mode": "cat"},
        "HeteroJumpingKnowledge": lambda: {"types": ["a", "b"], "mode": "max"},
        "MetaLayer": lambda: {"edge_model": _Edges(), "node_model": _Nodes()},
        "DeepGraphInfomax": lambda: {
            "encoder": GCNConv(F, F), "summary": lambda z, *_: z.mean(dim=0).sigmoid(),
            "corruption": lambda x, edge_index: (x.flip(0), edge_index)},
        "RENet": lambda: {"num_rels": 3, "seq_len": 4},
        "SchNet": lambda: {"hidden_channels": F, "num_filters": F, "num_interactions": 2,
                           "cutoff": 2.0, "interaction_graph": Near()},
        "GPSE": lambda: {"dim_in": F, "dim_inner": 16, "layers_mp": 2},
        "GPSENodeEncoder": lambda: {"dim_emb": 12, "dim_pe_in": F, "dim_pe_out": 4},
        "MetaPath2Vec": lambda: {"edge_index_dict": links, "metapath": EDGES, "walk_length": 4,
                                 "context_size": 3},
        "Node2Vec": lambda: {"edge_index": _edges(FIXED), "walk_length": 4, "context_size": 3},
        "TGNMemory": lambda: {"raw_msg_dim": 4, "memory_dim": F, "time_dim": 4,
                              "message_module": models.tgn.IdentityMessage(4, F, 4),
                              "aggregator_module": tgn.LastAggregator()},
        "CorrectAndSmooth": lambda: {"num_correction_layers": 2, "correction_alpha": 0.5,
                                     "num_smoothing_layers": 2, "smoothing_alpha": 0.5},
        "MaskLabel": lambda: {"num_classes": 3, "method": "add"},
        "FusedGATConv": lambda: {"in_channels": F, "out_channels": F, "add_self_loops": False},
    }  # fmt: skip
    return found.get(name, dict)()


def build(kind: type[nn.Module], **more: Any) -> nn.Module:
    """Return the class with small arguments; raises ValueError for one that is not known."""
    given = _own(kind.__name__) | more
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and parameter.name not in given:
            if parameter.name not in _USUAL:
                raise ValueError(f"its constructor takes '{parameter.name}'")
            given[parameter.name] = _USUAL[parameter.name]
    torch.manual_seed(0)
    module = kind(**given)
    if kind.__name__ == "GPSE":
        # As its `from_pretrained` does.
        module.post_mp = importlib.import_module("torch_geometric.nn.models.gpse").IdentityHead()
    module.eval()
    module.requires_grad_(False)
    return module


#: Parameters with a default that are given all the same, of classes that need them.
_GIVEN = {
    "edge_type": ("RGCNConv", "FastRGCNConv", "RGATConv", "FiLMConv"),
    "edge_attr": ("GINEConv", "NNConv", "ECConv", "CGConv", "GMMConv", "SplineConv", "PDNConv",
                  "TransformerConv", "GeneralConv", "GENConv", "HEATConv", "AttentiveFP",
                  "MetaLayer"),
    "batch": ("SchNet", "DimeNet", "DimeNetPlusPlus", "ViSNet", "AttentiveFP", "GPSConv"),
}  # fmt: skip
#: Models whose `z` are atomic numbers.
_MOLECULES = ("SchNet", "DimeNet", "DimeNetPlusPlus", "ViSNet", "GNNFF")
_GRAPH = ("x", "edge_index")
#: Inputs where forward's parameters do not say them.
_NAMES = {
    "HeteroConv": ("x_dict", "edge_index_dict"), "GPSConv": (*_GRAPH, "batch"),
    "GPSE": (*_GRAPH, "batch"), "CorrectAndSmooth": ("y_soft", "y_true", "mask", "edge_index"),
    "RENet": ("sub", "rel", "obj", "h_sub", "h_sub_t", "h_sub_batch", "h_obj", "h_obj_t",
              "h_obj_batch"),
    "MetaPath2Vec": ("batch",),
    **dict.fromkeys(("GAE", "VGAE", "ARGA", "ARGVA", "DeepGCNLayer", "GroupAddRev", "PMLP",
                     "DeepGraphInfomax", "AntiSymmetricConv"), _GRAPH),
}  # fmt: skip


def _ids(name: str, symbol: str, high: int = FIXED, rows: int = 0) -> InputSlot:
    """Return integers in [0, high), by default nodes of the graph that a model is made for."""
    shape = (rows, symbol) if rows else (symbol,)
    return InputSlot(name, "INT64", shape, low=0, high=high)


def _of_class(owner: str) -> dict[str, list[InputSlot]]:
    """Return inputs that mean something else in one class."""
    if owner in _MOLECULES:
        return {"z": [InputSlot("z", "INT64", ("N",), low=1, high=9)]}
    by_class: dict[str, list[InputSlot]] = {
        "DNAConv": [InputSlot("x", "FP32", ("N", 2, F))],
        "LightGCN": [_ids("edge_index", "E", rows=2), _ids("edge_label_index", "K", rows=2)],
        "LINKX": [InputSlot("x", "FP32", (FIXED, F)), _ids("edge_index", "E", rows=2)],
        "MetaPath2Vec": [_ids("batch", "K")],
        "TGNMemory": [_ids("n_id", "K")],
        "LabelPropagation": [InputSlot("y", "FP32", ("N", F))],
        # Predictions add up to 1.
        "CorrectAndSmooth": [
            InputSlot("y_soft", "FP32", ("N", F), low=0.999 / F, high=1.001 / F),
            _ids("y_true", "K", high=F), InputSlot("mask", "INT64", ("K",), index=("N",)),
        ],
        "MaskLabel": [_ids("y", "N", high=3), InputSlot("mask", "BOOL", ("N",))],
        "RENet": [
            *(_ids(key, "N") for key in ("sub", "obj")), _ids("rel", "N", high=3),
            *(_ids(f"h_{key}", symbol) for key, symbol in (("sub", "E"), ("obj", "K"))),
            *(_ids(f"h_{key}_t", symbol, high=4) for key, symbol in (("sub", "E"), ("obj", "K"))),
            *(InputSlot(f"h_{key}_batch", "INT64", (symbol,), index=("N",))
              for key, symbol in (("sub", "E"), ("obj", "K"))),
        ],
    }  # fmt: skip
    return {slot.name: [slot] for slot in by_class.get(owner, ())}


def _usual_slots(name: str) -> list[InputSlot]:
    """Return the inputs of a forward's parameter by its usual meaning; raises ValueError."""
    floats = {
        "x": ("N", F), "x_0": ("N", F), "z": ("N", F), "pos": ("N", 3), "pos_enc": ("N", F),
        "normal": ("N", 3), "edge_weight": ("E",), "edge_attr": ("E", 4),
    }  # fmt: skip
    links = {"edge_index": "E", "hyperedge_index": "E", "edge_label_index": "K",
             "pos_edge_index": "K", "neg_edge_index": "P"}  # fmt: skip
    if name in floats:
        return [InputSlot(name, "FP32", floats[name])]
    if name in links:
        return [InputSlot(name, "INT64", (2, links[name]), index=("N",))]
    if name == "edge_type":
        return [_ids(name, "E", high=3)]
    if name == "node_type":
        return [_ids(name, "N", high=2)]
    if name == "batch":
        return [InputSlot(name, "INT64", ("N",), index=("G",))]
    if name == "xs":
        return [InputSlot(f"xs.{i}", "FP32", ("N", F)) for i in range(2)]
    if name == "xs_dict":
        return [
            InputSlot(f"xs.{kind}.{i}", "FP32", (f"N.{kind}", F)) for kind in "ab" for i in range(2)
        ]
    if name == "x_dict":
        return [InputSlot(f"x.{kind}", "FP32", (f"N.{kind}", F)) for kind in "ab"]
    if name == "edge_index_dict":
        return [
            InputSlot(f"edge_index.{a}__{by}__{b}", "INT64", (2, f"E.{by}"), (f"N.{a}", f"N.{b}"))
            for a, by, b in EDGES
        ]
    raise ValueError(f"its forward takes '{name}'")


def inputs(module: nn.Module) -> tuple[InputSlot, ...]:
    """Return the declared inputs of a class; raises ValueError for one that is not known."""
    owner = type(module).__name__
    own = _of_class(owner)
    names = _NAMES.get(owner, ()) or tuple(
        key
        for key, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is parameter.empty or owner in _GIVEN.get(key, ())
    )
    return tuple(slot for key in names for slot in own.get(key) or _usual_slots(key))


def pairs(module: nn.Module) -> tuple[InputSlot, ...]:
    """Return the inputs of a convolution from things of one kind to things of another."""
    found: list[InputSlot] = []
    for slot in inputs(module):
        if slot.name == "x":
            found += [InputSlot(f"x.{i}", "FP32", (f"N.{kind}", F)) for i, kind in enumerate("ab")]
        elif slot.index == ("N",) and slot.is_links:
            found.append(replace(slot, index=("N.a", "N.b")))
        else:
            found.append(slot)
    return tuple(found)
