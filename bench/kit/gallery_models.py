"""Models of the kinds that users bring; needs torch and PyG alone, as a model's own file does."""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    PNA,
    ChebConv,
    GATConv,
    GCNConv,
    GINEConv,
    HGTConv,
    NNConv,
    RGCNConv,
    SAGEConv,
    SchNet,
    TransformerConv,
    global_add_pool,
    global_mean_pool,
    to_hetero,
)

TYPES = ["author", "paper"]
EDGES = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")]


class Relational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = RGCNConv(16, 32, num_relations=4)
        self.second = RGCNConv(32, 7, num_relations=4, num_bases=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Any:
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)


class Hetero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = {"author": 8, "paper": 12}
        self.first = HGTConv(channels, 16, (TYPES, EDGES), heads=2)
        self.second = HGTConv(16, 16, (TYPES, EDGES), heads=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        found = self.first(x_dict, edge_index_dict)
        found = self.second({name: x.relu() for name, x in found.items()}, edge_index_dict)
        return {"author": self.head(found["author"]), "paper": self.head(found["paper"])}


class _Sage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv((8, 8), 16)
        self.second = SAGEConv((16, 16), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def to_hetero_sage() -> nn.Module:
    found: nn.Module = to_hetero(_Sage(), (TYPES, EDGES))
    return found


class Molecules(nn.Module):
    """OGB's integer features of atoms and bonds, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.ModuleList(nn.Embedding(20, 16) for _ in range(3))
        self.bonds = nn.Embedding(5, 16)
        layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.conv = GINEConv(layers)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Any:
        h = sum(atom(x[:, i]) for i, atom in enumerate(self.atoms))
        h = self.conv(h, edge_index, self.bonds(edge_attr))
        return self.head(global_add_pool(h, batch))


#: Values of OGB's features of atoms and of bonds, each column with its own number of them.
ATOMS, BONDS = (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)


class Ogb(nn.Module):
    """A network over molecules with the encoders that OGB's examples have."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.ModuleList(nn.Embedding(values, 16) for values in ATOMS)
        self.bonds = nn.ModuleList(nn.Embedding(values, 16) for values in BONDS)
        self.conv = GINEConv(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Any:
        h = sum(atom(x[:, i]) for i, atom in enumerate(self.atoms))
        bonds = sum(bond(edge_attr[:, i]) for i, bond in enumerate(self.bonds))
        return self.head(global_mean_pool(self.conv(h, edge_index, bonds), batch))


class Gine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GINEConv(nn.Linear(6, 16), edge_dim=3)
        self.norm = nn.BatchNorm1d(16)
        self.second = GINEConv(nn.Linear(16, 5), edge_dim=3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Any:
        x = self.norm(self.first(x, edge_index, edge_attr)).relu()
        return self.second(x, edge_index, edge_attr)


class EdgeNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = NNConv(6, 8, nn.Linear(3, 48))
        self.second = NNConv(8, 5, nn.Linear(3, 40), aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Any:
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class Transformer(nn.Module):
    """Takes its graph as PyG's examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TransformerConv(6, 8, heads=2, edge_dim=3)
        self.second = TransformerConv(16, 5, edge_dim=3, beta=True)

    def forward(self, data: Data) -> Any:
        x = self.first(data.x, data.edge_index, data.edge_attr).relu()
        return self.second(x, data.edge_index, data.edge_attr)


class Near:
    """Pairs of atoms of a molecule that are near, without a compiled neighbour search."""

    def __call__(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        away = torch.cdist(pos, pos)
        near = (away < 2.0) & (batch[:, None] == batch[None, :])
        near.fill_diagonal_(False)
        source, target = near.nonzero().t()
        return torch.stack([source, target]), away[source, target]


def schnet() -> nn.Module:
    found: nn.Module = SchNet(
        hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=10, cutoff=2.0,
        interaction_graph=Near(),
    )  # fmt: skip
    return found


class Links(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(16, 32), SAGEConv(32, 8)

    def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Any:
        z = self.second(self.first(x, edge_index).relu(), edge_index)
        source, target = edge_label_index
        return (z[source] * z[target]).sum(dim=-1)


class GConvGRU(nn.Module):
    """A GRU whose gates are Chebyshev convolutions of features and state, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList(ChebConv(4, 8, K=2) for _ in range(3))
        self.state = nn.ModuleList(ChebConv(8, 8, K=2) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        h: Tensor | None = None,
    ) -> Any:
        h = x.new_zeros(x.shape[0], 8) if h is None else h
        graph = edge_index, edge_weight
        update, reset, new = (conv(x, *graph) for conv in self.features)
        update = torch.sigmoid(update + self.state[0](h, *graph))
        reset = torch.sigmoid(reset + self.state[1](h, *graph))
        new = torch.tanh(new + self.state[2](reset * h, *graph))
        h = update * h + (1 - update) * new
        return {"y": self.head(h.relu()), "h_next": h}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(16, 8, heads=2, add_self_loops=False)
        self.second = GCNConv(16, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h, (_, attention) = self.first(x, edge_index, return_attention_weights=True)
        return self.second(h.relu(), edge_index), attention


def pna() -> nn.Module:
    """Return a PNA; its histogram of degrees is a tensor, which no configuration holds."""
    found: nn.Module = PNA(
        8, 16, 2, 3, aggregators=["mean", "std"], scalers=["identity", "amplification"],
        deg=torch.tensor([1, 4, 3, 2]),
    )  # fmt: skip
    return found
