"""What a model is stacked of, for estimates that know the kinds of its layers."""

from itertools import pairwise
from typing import Any

from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv

_KINDS: dict[type[MessagePassing], str] = {
    GCNConv: "gcn", SAGEConv: "sage", GINConv: "gin", GATConv: "gat",
}  # fmt: skip


def stack_of(module: nn.Module) -> tuple[str, tuple[int, ...]]:
    """Return the kind of the model's graph layers and their widths, features first.

    The kind is `gcn`, `sage`, `gin` or `gat`, and empty unless the layers are of one such kind and
    each takes what the one before it gives.
    """
    layers = [one for one in module.modules() if isinstance(one, MessagePassing)]
    kinds = {type(layer) for layer in layers}
    kind = _KINDS.get(kinds.pop(), "") if len(kinds) == 1 else ""
    if not kind:
        return "", ()
    widths = [_widths(kind, layer) for layer in layers]
    if any(out != into for (_, out), (into, _) in pairwise(widths)):
        return "", ()
    return kind, (widths[0][0], *(out for _, out in widths))


def _widths(kind: str, layer: Any) -> tuple[int, int]:
    """Return the columns that the layer takes and gives; 0 where it does not tell."""
    if kind == "gin":
        maps = [one for one in layer.nn.modules() if isinstance(one, nn.Linear)]
        return (maps[0].in_features, maps[-1].out_features) if maps else (0, 0)
    into = layer.in_channels if isinstance(layer.in_channels, int) else 0
    if kind == "gat" and layer.concat:
        return into, layer.heads * layer.out_channels
    return into, layer.out_channels
