"""Fused forward passes for PyG's convolutions, one class each, over ``kernels``.

A fused conv keeps the layer's own weights and takes the place of its forward. It answers what the
layer is asked in ordinary use: features float32 [N, F], edges int64 or int32 [2, E]; everything
else (pairs of features, sparse matrices, attention weights to be returned) goes to PyG's forward.
Where the aggregation and the linear map commute, the narrower of the two sides is aggregated.
"""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
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

from serve import native
from serve.lane.executors import kernels
from serve.lane.executors.graphs import Graphs
from serve.lane.executors.kernels import Reduction

_REDUCTIONS: dict[str, Reduction] = {
    "add": "sum",
    "sum": "sum",
    "mean": "mean",
    "max": "max",
    "min": "min",
}
#: Reductions that a linear map may be moved across.
_LINEAR = ("sum", "mean")


class Fused:
    """A layer's forward over the kernels."""

    #: What may follow x and edge_index, by position or name.
    takes: tuple[str, ...] = ()

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        """Raises ValueError saying which option of the layer is not covered."""
        require_ordinary(conv)
        self.reduce = self.reduction(conv)
        self.conv = conv
        self.graphs = graphs
        self.original: Callable[..., Any] = conv.forward

    def __call__(self, x: Any, edge_index: Any, *more: Any, **named: Any) -> Any:
        """What the layer's forward takes and gives."""
        if (
            is_plain(x)
            and is_edges(edge_index)
            and len(more) <= len(self.takes)
            and (not named or set(named) <= set(self.takes))
        ):
            out = self.fused(x, edge_index, *more, **named)
            if out is not None:
                return out
        if is_tensor(edge_index) and edge_index.dtype == torch.int32:
            edge_index = edge_index.long()  # PyG's own scatters take no other indices
        return self.original(x, edge_index, *more, **named)

    def reduction(self, conv: Any) -> Reduction:
        """How the layer reduces its messages; raises ValueError where the kernels do not."""
        return reduction_of(conv)

    def fused(self, x: Tensor, edge_index: Tensor) -> Tensor | None:
        """The forward pass; None when this call is not covered."""
        raise NotImplementedError


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
        """See GCNConv.forward."""
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
        self.map_first = self.reduce in _LINEAR and narrows

    def combine(
        self, x: Tensor, neighbours: Tensor, graph: kernels.Csr, by_slot: Tensor | None
    ) -> Tensor:
        """The layer's output for the features to aggregate and the node's own."""
        mapped, root = self.mapped, self.root
        if self.map_first:
            own = None if root is None else functional.linear(x, root.weight, mapped.bias)
            h = functional.linear(neighbours, mapped.weight)
            # The bias of the first map came with the second.
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
        """See SAGEConv.forward."""
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
        """See GraphConv.forward."""
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
        """See GINConv.forward."""
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


class _Attention(Fused):
    """What the three attention layers share: heads, and what is added when they are in."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(self.reduce == "sum", f"aggr is {conv.aggr}")
        require(conv.heads <= native.MOST_HEADS, f"it has {conv.heads} heads")

    def attend(self, graph: kernels.Csr, score: Any, left: Tensor, right: Tensor, value: Tensor,
               **options: Any) -> Tensor:  # fmt: skip
        """``kernels.attend`` with the layer's heads and bias."""
        conv = self.conv
        options.setdefault("bias", getattr(conv, "bias", None))
        return kernels.attend(
            graph, score, left, right, value, conv.heads,
            average=not conv.concat, **options,
        )  # fmt: skip

    def loops(self, edge_index: Tensor, rows: int, *, edges: bool = False) -> kernels.Csr:
        return self.graphs.csr(
            edge_index, rows, replace_loops=self.conv.add_self_loops, edges=edges
        )


class FusedGAT(_Attention):
    """GATConv, with or without edge features."""

    takes = ("edge_attr",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(conv.lin is not None, "it maps sources and targets differently")
        self.linear = linear_of(conv.lin)
        self.residual = None if conv.res is None else linear_of(conv.res)
        self.edge_linear = None if conv.lin_edge is None else linear_of(conv.lin_edge)
        self.scores_edges = self.edge_linear is not None
        if self.edge_linear is not None:
            require(conv.fill_value == "mean", f"fill_value is {conv.fill_value}")
            by_head = self.edge_linear.weight.view(conv.heads, conv.out_channels, -1)
            # att_edge · lin_edge, [H, D]: edges are only needed for their score. The layer's, so
            # that export knows it by a name.
            score = (conv.att_edge[0, :, :, None] * by_head).sum(1).contiguous()
            conv.register_buffer("edge_score", score, persistent=False)

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """See GATConv.forward."""
        conv, edge = self.conv, None
        if self.scores_edges and edge_attr is not None:
            if not is_plain(edge_attr):
                return None
            edge = functional.linear(edge_attr, conv.edge_score)
        graph = self.loops(edge_index, x.shape[0], edges=edge is not None)
        h = functional.linear(x, self.linear.weight, self.linear.bias)
        return self.attend(
            graph,
            "additive",
            kernels.head_dots(h, conv.att_src, conv.heads),
            kernels.head_dots(h, conv.att_dst, conv.heads),
            h,
            scale=conv.negative_slope,
            edge=edge,
            skip=None
            if self.residual is None
            else functional.linear(x, self.residual.weight, self.residual.bias),
        )


class FusedGATv2(_Attention):
    """GATv2Conv without edge features."""

    takes = ("edge_attr",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(conv.lin_edge is None, "it takes edge features")
        self.left, self.right = linear_of(conv.lin_l), linear_of(conv.lin_r)
        self.residual = None if conv.res is None else linear_of(conv.res)

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """See GATv2Conv.forward."""
        if edge_attr is not None:
            return None
        conv = self.conv
        left = functional.linear(x, self.left.weight, self.left.bias)
        right = left
        if not conv.share_weights:
            right = functional.linear(x, self.right.weight, self.right.bias)
        return self.attend(
            self.loops(edge_index, x.shape[0]), "dynamic", left, right, left,
            scale=conv.negative_slope, att=conv.att,
            skip=None if self.residual is None
            else functional.linear(x, self.residual.weight, self.residual.bias),
        )  # fmt: skip


class FusedTransformer(_Attention):
    """TransformerConv without edge features."""

    takes = ("edge_attr",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(conv.lin_edge is None, "it takes edge features")
        require(conv.lin_beta is None, "it weighs its skip connection (beta)")
        self.query, self.key, self.value = (
            linear_of(conv.lin_query),
            linear_of(conv.lin_key),
            linear_of(conv.lin_value),
        )
        self.skip = linear_of(conv.lin_skip) if conv.root_weight else None

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """See TransformerConv.forward."""
        if edge_attr is not None:
            return None
        query, key, value = (
            functional.linear(x, one.weight, one.bias) for one in (self.query, self.key, self.value)
        )
        return self.attend(
            self.graphs.csr(edge_index, x.shape[0]), "dot", key, query, value,
            scale=1.0 / math.sqrt(self.conv.out_channels), bias=None,
            skip=None if self.skip is None
            else functional.linear(x, self.skip.weight, self.skip.bias),
        )  # fmt: skip


#: What replaces the forward of exactly these classes.
FUSED: dict[type[MessagePassing], Callable[[Any, Graphs], Fused]] = {
    GCNConv: FusedGCN,
    SAGEConv: FusedSAGE,
    GINConv: FusedGIN,
    GraphConv: FusedGraphConv,
    GATConv: FusedGAT,
    GATv2Conv: FusedGATv2,
    TransformerConv: FusedTransformer,
}


def require(holds: bool, otherwise: str) -> None:
    """Raise ValueError with the text unless it holds."""
    if not holds:
        raise ValueError(otherwise)


def require_ordinary(conv: Any) -> None:
    """What every layer over the kernels must be."""
    require(conv.flow == "source_to_target", f"flow is {conv.flow}")
    require(not conv.training, "it is in training mode")


def reduction_of(conv: Any) -> Reduction:
    """How the layer reduces messages; raises ValueError where the kernels do not."""
    require(conv.aggr in _REDUCTIONS, f"aggr is {conv.aggr}")
    return _REDUCTIONS[conv.aggr]


def linear_of(layer: Any) -> Any:
    """`layer`, if it is a plain linear map whose weights can be used directly."""
    require(type(layer) in (nn.Linear, PygLinear), f"it maps with a {type(layer).__name__}")
    require(not has_hooks(layer), "its linear map has hooks")
    return layer


def _narrows(layer: Any) -> bool:
    """Is it a plain linear map to no more columns than it takes?"""
    if type(layer) not in (nn.Linear, PygLinear) or has_hooks(layer):
        return False
    return bool(layer.weight.shape[0] <= layer.weight.shape[1])


def has_hooks(module: nn.Module) -> bool:
    """Did somebody hook into it?"""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Is it a tensor, and of no class of its own, which could mean anything?"""
    # Where a model is exported, its tensors are of classes that stand for them.
    return type(value) is Tensor or (isinstance(value, Tensor) and torch.compiler.is_exporting())


def is_plain(x: object) -> bool:
    """Is it a float32 matrix whose memory the kernels can read?"""
    return (
        is_tensor(x)
        and x.dim() == 2
        and x.dtype == torch.float32
        and x.device.type in kernels.devices
        and x.is_contiguous()
    )


def is_edges(value: object) -> bool:
    """Are they edges [2, E] whose rows the kernels can read?"""
    return (
        is_tensor(value)
        and value.dtype in (torch.int64, torch.int32)
        and value.dim() == 2
        and value.shape[0] == 2
        and (value.stride(1) == 1 or value.shape[1] < 2)
    )


def is_vector(value: object) -> bool:
    """Is it a float32 vector whose memory the kernels can read?"""
    return (
        is_tensor(value)
        and value.dim() == 1
        and value.dtype == torch.float32
        and value.is_contiguous()
    )
