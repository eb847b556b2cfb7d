"""Models that pad the graphs of a batch to the largest, and requests for them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GPSConv
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gps": Gps,
    "dense": Dense,
    "attention pooling": AttentionPooling,
    "compared": Compared,
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
        ),
        (TensorSlot("y", "FP32", WIDTHS.get(name, ("G", CHANNELS))),),
    )


def load(name: str, *, short: bool = False) -> LoadedModel:
    """Return the model, loaded with its declaration or, `short`, with names of inputs alone."""
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    interface = None if short else declared(name)
    spec = ModelSpec(
        name="m", version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
        inputs=("x", "edge_index", "batch"), interface=interface, qos_factor=None,
        num_features=CHANNELS,
    )  # fmt: skip
    if interface is None:
        return LoadedModel(spec, module)
    return LoadedModel(spec, module, declared=DeclaredForward(module, interface, "m:1"))


def request(
    loaded: LoadedModel, sizes: Sequence[int], rng: np.random.Generator
) -> tuple[tuple[int, int], dict[str, Tensor]]:
    """Return counts and inputs for graphs of these sizes with three edges a node."""
    nodes, edges = sum(sizes), 3 * sum(sizes)
    batch = np.repeat(np.arange(len(sizes)), sizes)
    if loaded.spec.interface is None:
        links = rng.integers(0, nodes, (2, edges))
        named: dict[Size, int] = {"N": nodes, "E": edges, "F": CHANNELS, "D": 0}
        arrays = random_inputs(loaded.spec.inputs, named, links, rng, batch=batch)
    else:
        arrays = declared_inputs(
            loaded.spec.interface, (nodes, edges), rng, graphs=lambda things: batch
        )
    return (nodes, edges), {key: torch.from_numpy(array) for key, array in arrays.items()}
