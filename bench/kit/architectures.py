"""PyG models to measure estimates on, beyond the four that ship, as a user would write them."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    ARMAConv,
    ChebConv,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINEConv,
    GraphConv,
    PNAConv,
    ResGatedGraphConv,
    SAGEConv,
    TopKPooling,
    TransformerConv,
    global_mean_pool,
)

from serve.lane.executors import CannotRun, with_executor
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.loader import LoadedModel
from serve.models import zoo
from serve.models.model_signature import PACKAGED, Signature
from serve.models.repository import ModelSpec

NODE_INPUTS = ("x", "edge_index")
EDGE_DIM = 8
#: Degree histogram of the training graphs, for PNA.
_DEGREES = torch.tensor([1, 4, 16, 30, 25, 12, 6, 3, 2, 1])


class Stack(nn.Module):
    """Convolutions with ReLU between them; edge values go to all of them."""

    def __init__(self, convs: list[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor, *edge_values: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index, *edge_values).relu()
        out: Tensor = self.convs[-1](x, edge_index, *edge_values)
        return out


class Residual(nn.Module):
    """GCN with batch normalisation and residual connections."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.enter = nn.Linear(widths[0], widths[1])
        self.convs = nn.ModuleList(GCNConv(w, w) for w in widths[1:-1])
        self.norms = nn.ModuleList(nn.BatchNorm1d(w) for w in widths[1:-1])
        self.leave = nn.Linear(widths[-2], widths[-1])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.enter(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + norm(conv(x, edge_index)).relu()
        out: Tensor = self.leave(x)
        return out


class Pooled(nn.Module):
    """A graph-level model: GraphSAGE, mean over each graph, a linear layer."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.nodes = _stack(SAGEConv, widths[:-1])
        self.leave = nn.Linear(widths[-2], widths[-1])

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        out: Tensor = self.leave(global_mean_pool(self.nodes(x, edge_index), batch))
        return out


class Shrinking(nn.Module):
    """Top-k pooling between two convolutions: the content decides what is left."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        features, hidden, classes = widths[0], widths[1], widths[-1]
        self.first, self.second = GraphConv(features, hidden), GraphConv(hidden, hidden)
        self.pool = TopKPooling(hidden, 0.5)
        self.leave = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x, edge_index, _, batch, _, _ = self.pool(x, edge_index, None, batch)
        out: Tensor = self.leave(global_mean_pool(self.second(x, edge_index), batch))
        return out


class AllPairs(nn.Module):
    """Attention between all pairs of nodes: memory grows with the square of N."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.query, self.leave = nn.Linear(widths[0], 16), nn.Linear(widths[0], widths[-1])

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        query = self.query(x)
        out: Tensor = self.leave(torch.softmax(query @ query.t(), dim=-1) @ x)
        return out


def _stack(conv: Callable[[int, int], nn.Module], widths: list[int]) -> Stack:
    return Stack([conv(a, b) for a, b in pairwise(widths)])


def _heads(conv: Any, widths: list[int], **options: Any) -> Stack:
    """Return a stack with four concatenated heads in all layers but the last."""
    inner = [conv(a, b // 4, heads=4, **options) for a, b in pairwise(widths[:-1])]
    return Stack([*inner, conv(widths[-2], widths[-1], **options)])


def _pna(a: int, b: int) -> nn.Module:
    aggregators = ["mean", "min", "max", "std"]
    scalers = ["identity", "amplification", "attenuation"]
    conv: nn.Module = PNAConv(a, b, aggregators, scalers, _DEGREES)
    return conv


def _edge_conv(a: int, b: int) -> nn.Module:
    conv: nn.Module = EdgeConv(nn.Sequential(nn.Linear(2 * a, b), nn.ReLU(), nn.Linear(b, b)))
    return conv


def _gine(a: int, b: int) -> nn.Module:
    conv: nn.Module = GINEConv(nn.Linear(a, b), edge_dim=EDGE_DIM)
    return conv


def _of_zoo(factory: Callable[..., nn.Module]) -> Callable[[list[int]], nn.Module]:
    return lambda w: factory(w[0], w[-1], hidden_channels=w[1], num_layers=len(w) - 1)


_WITH_BATCH = (*NODE_INPUTS, "batch")
_WITH_ATTRIBUTES = (*NODE_INPUTS, "edge_attr")
#: Inputs of forward, and the builder from the layers' widths, by name.
ARCHITECTURES: dict[str, tuple[tuple[str, ...], Callable[[list[int]], nn.Module]]] = {
    "gcn": (NODE_INPUTS, _of_zoo(zoo.gcn)),
    "sage": (NODE_INPUTS, _of_zoo(zoo.sage)),
    "gin": (NODE_INPUTS, _of_zoo(zoo.gin)),
    "gat": (NODE_INPUTS, _of_zoo(zoo.gat)),
    "gatv2": (NODE_INPUTS, lambda w: _heads(GATv2Conv, w)),
    "transformer": (NODE_INPUTS, lambda w: _heads(TransformerConv, w)),
    "graph": (NODE_INPUTS, lambda w: _stack(GraphConv, w)),
    "pna": (NODE_INPUTS, lambda w: _stack(_pna, w)),
    "arma": (NODE_INPUTS, lambda w: _stack(ARMAConv, w)),
    "edge": (NODE_INPUTS, lambda w: _stack(_edge_conv, w)),
    "res_gated": (NODE_INPUTS, lambda w: _stack(ResGatedGraphConv, w)),
    "cheb": (NODE_INPUTS, lambda w: _stack(lambda a, b: ChebConv(a, b, 3), w)),
    "residual": (NODE_INPUTS, Residual),
    "pooled": (_WITH_BATCH, Pooled),
    "gcn_weighted": ((*NODE_INPUTS, "edge_weight"), lambda w: _stack(GCNConv, w)),
    "gat_attributed": (_WITH_ATTRIBUTES, lambda w: _heads(GATConv, w, edge_dim=EDGE_DIM)),
    "gine": (_WITH_ATTRIBUTES, lambda w: _stack(_gine, w)),
    "top_k": (_WITH_BATCH, Shrinking),
    "all_pairs": (NODE_INPUTS, AllPairs),
}
#: Their memory is not linear in N and E: estimates are upper bounds with a warning.
BOUNDED = frozenset({"top_k", "all_pairs"})


def load(
    name: str, *, features: int = 32, hidden: int = 64, classes: int = 7, layers: int = 3
) -> tuple[LoadedModel, Signature]:
    """Return the architecture with random weights, as a lane holds it."""
    inputs, build = ARCHITECTURES[name]
    torch.manual_seed(0)
    return wrap(build([features, *[hidden] * (layers - 1), classes]), name, inputs, features)


def on_executor(
    make: Callable[[], tuple[LoadedModel, Signature]], executor: str, package: Path
) -> LoadedModel:
    """Return the made model on the executor, compiled into `package` where that is needed.

    Raises CannotRun, also where export or compiler fail.
    """
    loaded, signature = make()
    if executor in PACKAGED:
        from serve.lane.executors.compiling import compile_model

        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(package.parent / "inductor"))
        try:
            compile_model(make()[0], signature, executor, package)
        except CannotRun:
            raise
        except Exception as error:
            told = str(error).strip().splitlines()[:1]
            raise CannotRun(f"{type(error).__name__}: {''.join(told)}") from error
    return with_executor(loaded, executor, signature, str(package))


def wrap(
    module: nn.Module, name: str, inputs: tuple[str, ...], features: int
) -> tuple[LoadedModel, Signature]:
    """Return a module as if loaded from a repository, and its signature."""
    args = {"edge_dim": EDGE_DIM} if "edge_attr" in inputs else {}
    spec = ModelSpec(
        name=name, version=1, folder="", factory=f"bench.kit.architectures:{name}", args=args,
        inputs=inputs, qos_factor=2.0, weights="", weights_bytes=0, num_features=features,
        description="",
    )  # fmt: skip
    loaded = LoadedModel(spec=spec, module=module.eval().requires_grad_(False))
    return loaded, probe_signature(loaded)
