"""Four graph neural networks in plain PyG: GCN, GraphSAGE, GIN and GAT.

Each factory stacks `num_layers` convolutions with ReLU between them and returns logits, float32
[N, out_channels]; no softmax, so that clients can rank, calibrate or threshold as they like.
The default, 3 layers of 64, makes the small models; 8 layers of 256 are the paper's.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv


class ConvStack(torch.nn.Module):
    """Convolutions of the given widths, ReLU and (in training) dropout between them."""

    def __init__(
        self, conv: Callable[[int, int, bool], torch.nn.Module], widths: list[int], dropout: float
    ) -> None:
        super().__init__()
        last = len(widths) - 2
        self.convs = torch.nn.ModuleList(
            conv(widths[i], widths[i + 1], i == last) for i in range(last + 1)
        )
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits, float32 [N, C], for x float32 [N, F] and edge_index int64 [2, E]."""
        # A slice of a ModuleList is a module made anew.
        *convs, last = self.convs
        for conv in convs:
            x = self.dropout(conv(x, edge_index).relu())
        out: Tensor = last(x, edge_index)
        return out


def gcn(
    in_channels: int,
    out_channels: int,
    hidden_channels: int = 64,
    num_layers: int = 3,
    dropout: float = 0.5,
) -> ConvStack:
    """Graph convolutional network (Kipf and Welling, 2017)."""
    widths = _widths(in_channels, hidden_channels, out_channels, num_layers)
    return ConvStack(lambda a, b, _: GCNConv(a, b), widths, dropout)


def sage(
    in_channels: int,
    out_channels: int,
    hidden_channels: int = 64,
    num_layers: int = 3,
    dropout: float = 0.5,
) -> ConvStack:
    """GraphSAGE with mean aggregation (Hamilton, Ying and Leskovec, 2017)."""
    widths = _widths(in_channels, hidden_channels, out_channels, num_layers)
    return ConvStack(lambda a, b, _: SAGEConv(a, b), widths, dropout)


def gin(
    in_channels: int,
    out_channels: int,
    hidden_channels: int = 64,
    num_layers: int = 3,
    dropout: float = 0.5,
) -> ConvStack:
    """Graph isomorphism network (Xu, Hu, Leskovec and Jegelka, 2019); two linear layers each."""

    def conv(a: int, b: int, _: bool) -> torch.nn.Module:
        mlp = torch.nn.Sequential(
            torch.nn.Linear(a, hidden_channels),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden_channels, b),
        )
        result: torch.nn.Module = GINConv(mlp)
        return result

    widths = _widths(in_channels, hidden_channels, out_channels, num_layers)
    return ConvStack(conv, widths, dropout)


def gat(
    in_channels: int,
    out_channels: int,
    hidden_channels: int = 64,
    num_layers: int = 3,
    heads: int = 4,
    dropout: float = 0.5,
) -> ConvStack:
    """Graph attention network (Veličković et al., 2018).

    Heads are concatenated to `hidden_channels` in all but the last layer, which averages them.
    """
    if hidden_channels % heads:
        raise ValueError(f"hidden_channels {hidden_channels} must be a multiple of heads {heads}")

    def conv(a: int, b: int, last: bool) -> torch.nn.Module:
        width = b if last else b // heads
        result: torch.nn.Module = GATConv(a, width, heads=heads, concat=not last)
        return result

    widths = _widths(in_channels, hidden_channels, out_channels, num_layers)
    return ConvStack(conv, widths, dropout)


def _widths(first: int, hidden: int, last: int, num_layers: int) -> list[int]:
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    return [first, *[hidden] * (num_layers - 1), last]
