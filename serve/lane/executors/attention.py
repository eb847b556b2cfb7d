"""Fused forward passes for PyG's attention layers, over ``kernels``."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from serve import native
from serve.lane.executors import attention_gradients, kernels
from serve.lane.executors.fused import Fused, is_plain, linear_of, require
from serve.lane.executors.graphs import Graphs


class _Attention(Fused):
    """Base of the three attention layers: heads, and the terms added after they are combined."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(self.reduce == "sum", f"aggr is {conv.aggr}")
        require(conv.heads <= native.MOST_HEADS, f"it has {conv.heads} heads")

    def attend(self, graph: kernels.Csr, score: Any, left: Tensor, right: Tensor, value: Tensor,
               **options: Any) -> Tensor:  # fmt: skip
        """Attend by the layer's heads and bias, with gradients where one is wanted."""
        conv = self.conv
        options.setdefault("bias", getattr(conv, "bias", None))
        given = graph, score, left, right, value, conv.heads
        if not self.is_learned(value):
            return kernels.attend(*given, average=not conv.concat, **options)
        assert options.pop("edge", None) is None
        return attention_gradients.attend(*given, average=not conv.concat, **options)

    def is_learned(self, value: Tensor) -> bool:
        """Return True when a gradient is wanted of the layer's weights or of what it maps."""
        return torch.is_grad_enabled() and (
            value.requires_grad or any(one.requires_grad for one in self.conv.parameters())
        )

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
            # att_edge · lin_edge, [H, D]: edges only contribute to the score. It is a buffer of the
            # layer, so that export has a name for it.
            score = (conv.att_edge[0, :, :, None] * by_head).sum(1).contiguous()
            conv.register_buffer("edge_score", score, persistent=False)

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """Run GATConv.forward."""
        conv, edge = self.conv, None
        if self.scores_edges and edge_attr is not None:
            if not is_plain(edge_attr):
                return None
            edge = functional.linear(edge_attr, conv.edge_score)
        graph = self.loops(edge_index, x.shape[0], edges=edge is not None)
        h = functional.linear(x, self.linear.weight, self.linear.bias)
        learned = self.is_learned(h)
        if edge is not None and learned:
            return None
        head_dots = attention_gradients.head_dots if learned else kernels.head_dots
        return self.attend(
            graph,
            "additive",
            head_dots(h, conv.att_src, conv.heads),
            head_dots(h, conv.att_dst, conv.heads),
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
        """Run GATv2Conv.forward."""
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
        """Run TransformerConv.forward."""
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
