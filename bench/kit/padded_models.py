"""Models that pad the graphs of a batch to the largest, and requests for them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GPSConv, global_add_pool
from torch_geometric.nn.aggr import SetTransformerAggregation
from torch_geometric.utils import to_dense_batch

from serve.graphs.random_inputs import declared_inputs, random_inputs
from serve.inputs import Size
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.models.declared import DeclaredForward
from serve.lane.models.loader import LoadedModel
from serve.models.repository import ModelSpec

CHANNELS = 8


class Dense(nn.Module):
    """Works on graphs padded to the largest, and pools each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(CHANNELS, 32), nn.ReLU(), nn.Linear(32, CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        dense, mask = to_dense_batch(x, batch)
        found: Tensor = (self.layers(dense) * mask.unsqueeze(-1)).sum(1)
        return found


class Gps(nn.Module):
    """One layer of GPS: a convolution beside attention within each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GPSConv(CHANNELS, GINConv(nn.Linear(CHANNELS, CHANNELS)), heads=2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        found: Tensor = self.conv(x, edge_index, batch)
        return found


class AttentionPooling(nn.Module):
    """A set transformer for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SetTransformerAggregation(CHANNELS, num_seed_points=2, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        found: Tensor = self.pool(x, batch)
        return found


class Compared(nn.Module):
    """Compares all nodes, whatever graphs they are in, and pads graphs besides."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        dense, _ = to_dense_batch(x, batch)
        found: Tensor = dense.exp().sum(1) + torch.cdist(x, x).sum()
        return found


class OfGraphs(nn.Module):
    """Joins what it pools of each graph with an attribute of it."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, u: Tensor) -> Tensor:
        return torch.cat([global_add_pool(x[:, 2:], batch), u], dim=-1)


class DenseOfGraphs(nn.Module):
    """Works on graphs padded to the largest, and adds an attribute of each."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Dense()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, u: Tensor) -> Tensor:
        found: Tensor = self.dense(x, edge_index, batch) + u.mean(-1, keepdim=True)
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gps": Gps,
    "dense": Dense,
    "attention pooling": AttentionPooling,
    "compared": Compared,
}
#: Models that also take an attribute of each graph.
OF_GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "of graphs": OfGraphs,
    "dense of graphs": DenseOfGraphs,
}
#: Shapes of outputs that are not [G, CHANNELS].
WIDTHS: dict[str, tuple[str, int]] = {
    "gps": ("N", CHANNELS),
    "attention pooling": ("G", 2 * CHANNELS),
}


def declared(name: str) -> Interface:
    """Return what the model declares."""
    return Interface(
        (
            InputSlot("x", "FP32", ("N", CHANNELS)),
            InputSlot("edge_index", "INT64", (2, "E"), index=("N",)),
            InputSlot("batch", "INT64", ("N",), index=("G",)),
            *([InputSlot("u", "FP32", ("G", 2))] if name in OF_GRAPHS else []),
        ),
        (TensorSlot("y", "FP32", WIDTHS.get(name, ("G", CHANNELS))),),
    )


def load(name: str, *, short: bool = False) -> LoadedModel:
    """Return the model, loaded with its declaration or, `short`, with names of inputs alone."""
    torch.manual_seed(0)
    module = (MODELS | OF_GRAPHS)[name]().eval()
    interface = None if short else declared(name)
    spec = ModelSpec(
        name="m", version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
        inputs=tuple(slot.name for slot in declared(name).inputs), interface=interface,
        qos_factor=None,
        num_features=CHANNELS,
    )  # fmt: skip
    if interface is None:
        return LoadedModel(spec, module)
    return LoadedModel(spec, module, declared=DeclaredForward(module, interface, "m:1"))


def request(
    loaded: LoadedModel, sizes: Sequence[int], rng: np.random.Generator
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return counts and inputs for graphs of these sizes with three edges a node."""
    nodes, edges = sum(sizes), 3 * sum(sizes)
    batch = np.repeat(np.arange(len(sizes)), sizes)
    counts: tuple[int, ...] = nodes, edges
    if loaded.spec.interface is None:
        links = rng.integers(0, nodes, (2, edges))
        named: dict[Size, int] = {"N": nodes, "E": edges, "F": CHANNELS, "D": 0}
        arrays = random_inputs(loaded.spec.inputs, named, links, rng, batch=batch)
    else:
        counts += (len(sizes),) * ("G" in loaded.spec.interface.counts)
        arrays = declared_inputs(loaded.spec.interface, counts, rng, graphs=lambda things: batch)
        arrays["batch"] = batch
    return counts, {key: torch.from_numpy(array) for key, array in arrays.items()}
