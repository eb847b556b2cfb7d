"""Models on the academic graph; needs torch and PyG alone, as a model's own file does."""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import HGTConv, SAGEConv, to_hetero

TYPES = ["author", "paper", "venue"]
EDGES = [
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
    ("paper", "cites", "paper"),
    ("paper", "cited_by", "paper"),
    ("paper", "appears_at", "venue"),
    ("venue", "publishes", "paper"),
]


class Hgt(nn.Module):
    """The fields of papers, and the year as an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.years = nn.Embedding(40, 16)
        channels = {"author": 8, "paper": 16, "venue": 4}
        self.first = HGTConv(channels, 16, (TYPES, EDGES), heads=2)
        self.second = HGTConv(16, 16, (TYPES, EDGES), heads=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x_dict: Any, edge_index_dict: Any, year_dict: Any) -> Any:
        x_dict = {**x_dict, "paper": x_dict["paper"] + self.years(year_dict["paper"] - 1990)}
        found = self.first(x_dict, edge_index_dict)
        found = self.second({name: x.relu() for name, x in found.items()}, edge_index_dict)
        return self.head(found["paper"])


class _Sage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv((-1, -1), 16)
        self.second = SAGEConv((-1, -1), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def hetero_sage() -> nn.Module:
    """Embeddings of authors, papers and venues."""
    found: nn.Module = to_hetero(_Sage(), (TYPES, EDGES))
    counts = {"author": 8, "paper": 16, "venue": 4}
    with torch.no_grad():
        # The lazy layers take their sizes from a first pass.
        found(
            {name: torch.ones(1, width) for name, width in counts.items()},
            {kind: torch.zeros(2, 1, dtype=torch.long) for kind in EDGES},
        )
    return found
