"""Layers with nonlinear messages, of both ends of an edge or of edge features.

They use ``kernels.combine``, which makes and reduces a message in registers. The maps of the two
ends before the nonlinearity are linear, so they run once per node.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from serve.lane.executors import kernels
from serve.lane.executors.fused import Fused, has_hooks, is_plain, linear_of, require
from serve.lane.executors.graphs import Graphs
from serve.lane.executors.kernels import Csr

#: Upper bound of the columns of edge features that the kernel itself maps. Above it, a matrix
#: product over all edges costs less, with the tensor that it makes.
_MOST_MAPPED = 32


class _Combining(Fused):
    """Base of these layers."""

    def covers(self, x: Tensor) -> bool:
        """Return True when ``kernels.combine`` supports the device of `x`."""
        return x.device.type in kernels.combining


class FusedGINE(_Combining):
    """GINEConv."""

    takes = ("edge_attr",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        self.own = 1.0 + float(conv.eps)
        self.linear = None if conv.lin is None else linear_of(conv.lin)
        self.mapped = self.linear is not None and self.linear.weight.shape[1] <= _MOST_MAPPED
        if self.mapped:
            # Transposed, as the kernel reads it. It is a buffer of the layer, so that export has a
            # name for it.
            weight = conv.lin.weight.detach().t().contiguous()
            conv.register_buffer("edge_map", weight, persistent=False)

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """Run GINEConv.forward."""
        if edge_attr is None or not (is_plain(edge_attr) and self.covers(x)):
            return None
        conv, linear, edge = self.conv, self.linear, edge_attr
        bias = edge_map = None
        if linear is not None and self.mapped:
            bias, edge_map = linear.bias, conv.edge_map
        elif linear is not None:
            edge = functional.linear(edge, linear.weight, linear.bias)
        elif edge.shape[1] != x.shape[1]:
            return None
        graph = self.graphs.csr(edge_index, x.shape[0], edges=True)
        out = kernels.combine(
            graph, x.shape[1], "relu", self.reduce, x=x, target=bias, edge=edge,
            edge_map=edge_map, skip=x, skip_scale=self.own,
        )  # fmt: skip
        result: Tensor = conv.nn(out)
        return result


class FusedResGated(_Combining):
    """ResGatedGraphConv without edge features."""

    takes = ("edge_attr",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(conv.edge_dim is None, "it takes edge features")
        require(type(conv.act) is nn.Sigmoid, f"its gate is a {type(conv.act).__name__}")
        self.key, self.query, self.value = (
            linear_of(conv.lin_key),
            linear_of(conv.lin_query),
            linear_of(conv.lin_value),
        )
        self.skip = linear_of(conv.lin_skip) if conv.root_weight else None

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """Run ResGatedGraphConv.forward."""
        if edge_attr is not None or not self.covers(x):
            return None
        key, query, value = (
            functional.linear(x, one.weight, one.bias) for one in (self.key, self.query, self.value)
        )
        return kernels.combine(
            self.graphs.csr(edge_index, x.shape[0]), key.shape[1], "sigmoid", self.reduce,
            x=query, target=key, value=value, bias=self.conv.bias,
            skip=None if self.skip is None
            else functional.linear(x, self.skip.weight, self.skip.bias),
        )  # fmt: skip


class FusedEdgeConv(_Combining):
    """EdgeConv whose network begins with a linear map of [x_i, x_j - x_i].

    That is the sum of a map of x_i and one of x_j. The kernel applies a ReLU after it. A linear map
    after that runs once per node where it commutes with the reduction. Any other network runs on a
    row for each edge.
    """

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        layers: list[Any] = list(conv.nn) if type(conv.nn) is nn.Sequential else [conv.nn]
        require(not has_hooks(conv.nn) and bool(layers), "its network has hooks")
        self.first, rest = linear_of(layers[0]), layers[1:]
        self.relu = bool(rest) and type(rest[0]) is nn.ReLU and not has_hooks(rest[0])
        after = rest[1:] if self.relu else rest
        self.last: Any = None
        if len(after) == 1 and self.reduce in ("sum", "mean") and type(after[0]) is nn.Linear:
            self.last = linear_of(after[0])
        #: Layers that run on a row for each edge; empty when all run on nodes.
        self.rest: list[Any] = rest if after and self.last is None else []
        width = self.first.weight.shape[1] // 2
        weight = self.first.weight.detach()
        own = (weight[:, :width] - weight[:, width:]).contiguous()
        conv.register_buffer("own_weight", own, persistent=False)
        conv.register_buffer("other_weight", weight[:, width:].contiguous(), persistent=False)

    def fused(self, x: Tensor, edge_index: Tensor) -> Tensor | None:
        """Run EdgeConv.forward."""
        if not self.covers(x):
            return None
        target = functional.linear(x, self.conv.own_weight, self.first.bias)
        source = functional.linear(x, self.conv.other_weight)
        graph = self.graphs.csr(edge_index, x.shape[0], edges=bool(self.rest))
        if self.rest:
            rows = source.index_select(0, edge_index[0])
            rows += target.index_select(0, edge_index[1])
            for layer in self.rest:
                rows = layer(rows)
            return kernels.combine(graph, rows.shape[1], "none", self.reduce, edge=rows)
        gate: kernels.Gate = "relu" if self.relu else "none"
        out = kernels.combine(graph, source.shape[1], gate, self.reduce, x=source, target=target)
        return out if self.last is None else self._mapped(out, graph)

    def _mapped(self, reduced: Tensor, graph: Csr) -> Tensor:
        """Apply the last map to the reduced messages; each message counts its bias once."""
        out = functional.linear(reduced, self.last.weight)
        if self.last.bias is not None:
            begin = graph.tensor[: graph.rows + 1]
            messages = (begin[1:] - begin[:-1]).to(out.dtype).unsqueeze(1)
            if self.reduce == "mean":
                messages = messages.clamp(max=1)
            out = torch.addcmul(out, messages, self.last.bias)
        return out
