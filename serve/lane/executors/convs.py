"""Fused forward passes for PyG's convolutions, one class each, over ``kernels``.

Where the aggregation and the linear map commute, the narrower of the two sides is aggregated.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.nn import Linear as PygLinear

from serve.lane.executors import kernels
from serve.lane.executors.attention import FusedGAT, FusedGATv2, FusedTransformer
from serve.lane.executors.fused import Fused, has_hooks, is_vector, linear_of, require
from serve.lane.executors.graphs import Graphs


class FusedGCN(Fused):
    """GCNConv; normalisation once per run, narrower side aggregated."""

    takes = ("edge_weight",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(self.reduce == "sum", f"aggr is {conv.aggr}")
        self.linear = linear_of(conv.lin)
        require(conv.lin.bias is None, "its linear map has a bias")
        require(not conv.cached, "it is cached")

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor | None:
        """Run GCNConv.forward."""
        if edge_weight is not None and not is_vector(edge_weight):
            return None
        conv, weight = self.conv, self.linear.weight
        graph = self.graphs.csr(
            edge_index,
            x.shape[0],
            replace_loops=conv.add_self_loops,
            edges=edge_weight is not None,
        )
        # PyG gives added loops a weight of 2 only where edges have weights at all.
        by_slot = self.graphs.weights(
            graph,
            edge_weight,
            normalise=conv.normalize,
            missing=2.0 if conv.improved else 1.0,
        )
        if weight.shape[1] < weight.shape[0]:
            return functional.linear(kernels.aggregate(graph, x, by_slot), weight, conv.bias)
        h = functional.linear(x, weight)
        return kernels.aggregate(graph, h, by_slot, bias=conv.bias)


class _TwoMaps(Fused):
    """map(reduce(x_j)) + root(x_i), the form of SAGEConv and GraphConv."""

    def __init__(self, conv: Any, graphs: Graphs, mapped: Any, root: Any) -> None:
        super().__init__(conv, graphs)
        self.mapped = linear_of(mapped)
        self.root = None if root is None else linear_of(root)
        narrows = self.mapped.weight.shape[0] <= self.mapped.weight.shape[1]
        self.map_first = self.reduce in kernels.DIFFERENTIABLE and narrows

    def combine(
        self, x: Tensor, neighbours: Tensor, graph: kernels.Csr, by_slot: Tensor | None
    ) -> Tensor:
        """Return the layer's output from the features to aggregate and the node's own."""
        mapped, root = self.mapped, self.root
        if self.map_first:
            own = None if root is None else functional.linear(x, root.weight, mapped.bias)
            h = functional.linear(neighbours, mapped.weight)
            # The root map has already added the first map's bias.
            bias = mapped.bias if own is None else None
            if root is not None and root.bias is not None:
                bias = root.bias
            return kernels.aggregate(graph, h, by_slot, self.reduce, skip=own, bias=bias)
        out = functional.linear(
            kernels.aggregate(graph, neighbours, by_slot, self.reduce), mapped.weight, mapped.bias
        )
        if root is not None:
            out.addmm_(x, root.weight.t())
            if root.bias is not None:
                out += root.bias
        return out


class FusedSAGE(_TwoMaps):
    """SAGEConv."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs, conv.lin_l, conv.lin_r if conv.root_weight else None)
        self.project = linear_of(conv.lin) if conv.project else None

    def fused(self, x: Tensor, edge_index: Tensor) -> Tensor | None:
        """Run SAGEConv.forward."""
        graph = self.graphs.csr(edge_index, x.shape[0])
        neighbours = x
        if self.project is not None:
            neighbours = functional.linear(x, self.project.weight, self.project.bias).relu_()
        if not self.conv.normalize:
            return self.combine(x, neighbours, graph, None)
        return functional.normalize(self.combine(x, neighbours, graph, None), p=2.0, dim=-1)


class FusedGraphConv(_TwoMaps):
    """GraphConv, with or without edge weights."""

    takes = ("edge_weight",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs, conv.lin_rel, conv.lin_root)

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor | None:
        """Run GraphConv.forward."""
        if edge_weight is not None and not is_vector(edge_weight):
            return None
        graph = self.graphs.csr(edge_index, x.shape[0], edges=edge_weight is not None)
        by_slot = self.graphs.weights(graph, edge_weight, normalise=False)
        return self.combine(x, x, graph, by_slot)


class FusedGIN(Fused):
    """GINConv; the first linear layer of its network goes before the sum when it narrows."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        self.own = 1.0 + float(conv.eps)
        self.first: Any = None
        self.first_relu = False
        self.rest: list[nn.Module] = [conv.nn]
        layers = list(conv.nn) if type(conv.nn) is nn.Sequential else [conv.nn]
        if self.reduce == "sum" and layers and not has_hooks(conv.nn) and _narrows(layers[0]):
            self.first, *self.rest = layers
            follower = self.rest[0] if self.rest else None
            if type(follower) is nn.ReLU and not has_hooks(follower):
                self.first_relu = True
                del self.rest[0]

    def fused(self, x: Tensor, edge_index: Tensor) -> Tensor | None:
        """Run GINConv.forward."""
        graph = self.graphs.csr(edge_index, x.shape[0])
        own = self.own
        if self.first is not None:
            h = functional.linear(x, self.first.weight)
            out = kernels.aggregate(
                graph, h, skip=h, skip_scale=own, bias=self.first.bias, relu=self.first_relu
            )
        else:
            out = kernels.aggregate(graph, x, None, self.reduce, skip=x, skip_scale=own)
        for layer in self.rest:
            out = layer(out)
        return out


def _narrows(layer: Any) -> bool:
    """Return True for a plain linear map with no more outputs than inputs."""
    if type(layer) not in (nn.Linear, PygLinear) or has_hooks(layer):
        return False
    return bool(layer.weight.shape[0] <= layer.weight.shape[1])


#: Replacement of the forward of exactly these classes.
FUSED: dict[type[MessagePassing], Callable[[Any, Graphs], Fused]] = {
    GCNConv: FusedGCN,
    SAGEConv: FusedSAGE,
    GINConv: FusedGIN,
    GraphConv: FusedGraphConv,
    GATConv: FusedGAT,
    GATv2Conv: FusedGATv2,
    TransformerConv: FusedTransformer,
}
