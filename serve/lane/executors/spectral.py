"""Layers that multiply by a normalised graph, once or several times, over the kernels.

The graph's weights are made once a run, for all layers that use them. PyG's own code drops loops
with a boolean mask, so it waits for the device to learn how many edges remain, and its runs cannot
be captured. Here a dropped edge becomes ``kernels.NO_EDGE``, and every size is known beforehand.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    ClusterGCNConv,
    GCN2Conv,
    LGConv,
    MessagePassing,
    SGConv,
    SSGConv,
    TAGConv,
)

from serve.lane.executors import kernels
from serve.lane.executors.fused import (
    Fused,
    is_edges,
    is_plain,
    is_tensor,
    is_vector,
    linear_of,
    require,
)
from serve.lane.executors.graphs import Graphs
from serve.lane.executors.kernels import Csr


class _Weighted(Fused):
    """Base of layers whose graph has a graph convolution's weights."""

    takes = ("edge_weight",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(self.reduce == "sum", f"aggr is {conv.aggr}")
        require(not getattr(conv, "cached", False), "it is cached")

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor | None:
        """Run the layer's forward."""
        if edge_weight is not None and not is_vector(edge_weight):
            return None
        return self.on_graph(x, *self.graph_of(edge_index, edge_weight, x.shape[0]))

    def graph_of(
        self, edge_index: Tensor, edge_weight: Tensor | None, rows: int
    ) -> tuple[Csr, Tensor | None]:
        """Return the sorted graph and its weights by slot; None stands for ones."""
        conv = self.conv
        normalise = getattr(conv, "normalize", True)
        graph = self.graphs.csr(
            edge_index,
            rows,
            replace_loops=normalise and getattr(conv, "add_self_loops", False),
            edges=edge_weight is not None,
        )
        return graph, self.graphs.weights(graph, edge_weight, normalise=normalise)

    def on_graph(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """Return the layer's output from the graph."""
        raise NotImplementedError


class _Mapped(_Weighted):
    """Base of layers with one map, before or after the graph, whichever side is narrower."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        self.linear = linear_of(conv.lin)
        require(conv.K >= 1, f"K is {conv.K}")
        self.map_first = self.linear.weight.shape[0] < self.linear.weight.shape[1]

    def on_graph(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """See ``_Weighted``."""
        weight, bias = self.linear.weight, self.linear.bias
        if not self.map_first:
            return functional.linear(self.smoothed(x, graph, by_slot), weight, bias)
        out = self.smoothed(functional.linear(x, weight), graph, by_slot)
        return out if bias is None else out.add_(bias)

    def smoothed(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """Return `x` after all steps over the graph, in memory of its own."""
        raise NotImplementedError


class FusedSGC(_Mapped):
    """SGConv."""

    def smoothed(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """See ``_Mapped``."""
        for _ in range(self.conv.K):
            x = kernels.aggregate(graph, x, by_slot)
        return x


class FusedSSGC(_Mapped):
    """SSGConv."""

    def smoothed(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """See ``_Mapped``."""
        alpha, steps = self.conv.alpha, self.conv.K
        out: Tensor = x * alpha
        for _ in range(steps):
            x = kernels.aggregate(graph, x, by_slot)
            out.add_(x, alpha=(1 - alpha) / steps)
        return out


class FusedTAG(_Weighted):
    """TAGConv."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        self.maps = [linear_of(lin) for lin in conv.lins]

    def on_graph(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """See ``_Weighted``."""
        first, *others = self.maps
        out = functional.linear(x, first.weight, self.conv.bias)
        for one in others:
            x = kernels.aggregate(graph, x, by_slot)
            out.addmm_(x, one.weight.t())
        return out


class FusedLG(_Weighted):
    """LGConv."""

    def on_graph(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """See ``_Weighted``."""
        return kernels.aggregate(graph, x, by_slot)


class FusedAPPNP(_Weighted):
    """APPNP; each step adds the share of the start where it reduces."""

    def on_graph(self, x: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """See ``_Weighted``."""
        step = _step(by_slot, self.conv.alpha)
        out = x
        for _ in range(self.conv.K):
            out = step(graph, out, x)
        return out


class FusedGCN2(_Weighted):
    """GCN2Conv, whose second argument is the first layer's features."""

    def __call__(  # type: ignore[override]
        self, x: Any, x_0: Any, edge_index: Any, edge_weight: Any = None, **named: Any
    ) -> Any:
        """Run the fused forward; calls PyG's own where it does not cover the call."""
        if (
            not named
            and is_plain(x)
            and is_plain(x_0)
            and x.shape == x_0.shape
            and is_edges(edge_index)
            and (edge_weight is None or is_vector(edge_weight))
        ):
            return self.mixed(x, x_0, *self.graph_of(edge_index, edge_weight, x.shape[0]))
        if is_tensor(edge_index) and edge_index.dtype == torch.int32:
            edge_index = edge_index.long()  # PyG's own scatters take no other indices
        return self.original(x, x_0, edge_index, edge_weight, **named)

    def mixed(self, x: Tensor, x_0: Tensor, graph: Csr, by_slot: Tensor | None) -> Tensor:
        """Return the layer's output from the graph and the first features, [N, F] both."""
        conv, alpha = self.conv, self.conv.alpha
        shares = {"beta": 1 - conv.beta, "alpha": conv.beta}
        if conv.weight2 is None:
            x = _step(by_slot, alpha)(graph, x, x_0)
            return torch.addmm(x, x, conv.weight1, **shares)
        x, first = _step(by_slot, alpha)(graph, x, None), alpha * x_0
        out = torch.addmm(x, x, conv.weight1, **shares)
        return out + torch.addmm(first, first, conv.weight2, **shares)


def _step(by_slot: Tensor | None, alpha: float) -> Callable[[Csr, Tensor, Tensor | None], Tensor]:
    """Return the step that maps x to (1 - alpha) · graph · x + alpha · start."""
    scaled = None if by_slot is None else by_slot * (1 - alpha)

    def step(graph: Csr, x: Tensor, start: Tensor | None) -> Tensor:
        x = x if scaled is not None else x * (1 - alpha)
        return kernels.aggregate(graph, x, scaled, skip=start, skip_scale=alpha)

    return step


class FusedCluster(Fused):
    """ClusterGCNConv: a mean over neighbours and the node itself, which may count more."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(self.reduce == "sum", f"aggr is {conv.aggr}")
        require(conv.add_self_loops, "it adds no loops")
        self.out, self.root = linear_of(conv.lin_out), linear_of(conv.lin_root)

    def fused(self, x: Tensor, edge_index: Tensor) -> Tensor | None:
        """Run ClusterGCNConv.forward."""
        graph = self.graphs.csr(edge_index, x.shape[0], replace_loops=True)
        more, skip = float(self.conv.diag_lambda), None
        if more:
            skip = x / graph.degrees.unsqueeze(1)
        mean = kernels.aggregate(graph, x, None, "mean", skip=skip, skip_scale=more)
        out = functional.linear(mean, self.out.weight, self.out.bias)
        return out.addmm_(x, self.root.weight.t())


class FusedCheb(Fused):
    """ChebConv with PyG's default bound of the eigenvalues."""

    takes = ("edge_weight",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(self.reduce == "sum", f"aggr is {conv.aggr}")
        self.maps = [linear_of(lin) for lin in conv.lins]

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor | None:
        """Run ChebConv.forward."""
        rows, conv = x.shape[0], self.conv
        if rows == 0 or (edge_weight is not None and not is_vector(edge_weight)):
            return None  # PyG refuses a graph without nodes.
        first, *others = self.maps
        out = functional.linear(x, first.weight, conv.bias)
        if not others:
            return out
        graph, by_slot, twice = self.graphs.derived(
            ("laplacian", conv.normalization),
            (edge_index, edge_weight),
            rows,
            lambda: _scaled_laplacian(
                edge_index, edge_weight, rows, conv.normalization, self.graphs.variant
            ),
        )
        before, now = x, kernels.aggregate(graph, x, by_slot)
        out.addmm_(now, others[0].weight.t())
        for one in others[1:]:
            skipped = kernels.aggregate(graph, now, twice, skip=before, skip_scale=-1.0)
            before, now = now, skipped
            out.addmm_(now, one.weight.t())
        return out


def _scaled_laplacian(
    edge_index: Tensor, edge_weight: Tensor | None, rows: int, normalization: str | None,
    variant: int,
) -> tuple[Csr, Tensor, Tensor]:  # fmt: skip
    """Return ChebConv's graph, and its weights by slot, also doubled."""
    is_loop = edge_index[0] == edge_index[1]  # Pairs that are no edges are loops too.
    pairs = torch.where(is_loop, kernels.NO_EDGE, edge_index)
    by_source = Csr(pairs.flip(0), rows, replace_loops=False, edges=edge_weight is not None)
    if edge_weight is None:
        degree = by_source.degrees.float()
        weight = torch.where(is_loop, 0.0, 1.0)
    else:
        weight = torch.where(is_loop, 0.0, edge_weight)
        ones = weight.new_ones(rows, 1)
        degree = kernels.aggregate(by_source, ones, kernels.spread(by_source, weight, 0.0))[:, 0]
    if normalization is None:
        own = degree
    else:
        own = torch.ones_like(degree)
        scale = degree.pow(-0.5) if normalization == "sym" else degree.reciprocal()
        scale = scale.masked_fill(scale == torch.inf, 0.0)
        ends = scale.index_select(0, pairs.clamp(min=0).flatten()).view(2, -1)
        weight = weight * ends[0] * (ends[1] if normalization == "sym" else 1.0)
    weights = torch.cat([torch.where(is_loop, 0.0, -weight), own])
    scaled = 2.0 * weights / (2.0 * weights.max())
    scaled = scaled.masked_fill(scaled == torch.inf, 0.0)
    scaled[edge_index.shape[1] :] -= 1
    loops = torch.arange(rows, dtype=pairs.dtype, device=pairs.device).expand(2, -1)
    pairs = torch.cat([pairs, loops], dim=1)
    graph = Csr(pairs, rows, replace_loops=False, edges=True, variant=variant)
    by_slot = kernels.spread(graph, scaled, 0.0)
    return graph, by_slot, 2.0 * by_slot


#: Replacement of the forward of exactly these classes, in serving.
SPECTRAL: dict[type[MessagePassing], Callable[[Any, Graphs], Fused]] = {
    APPNP: FusedAPPNP,
    ChebConv: FusedCheb,
    ClusterGCNConv: FusedCluster,
    GCN2Conv: FusedGCN2,
    LGConv: FusedLG,
    SGConv: FusedSGC,
    SSGConv: FusedSSGC,
    TAGConv: FusedTAG,
}
