"""PNAConv over the kernels (Corso et al., Principal Neighbourhood Aggregation, 2020).

Its message is a linear map of [x_i, x_j], the sum of a target part and a source part. Only the
source part is reduced. The target part is added afterwards, except to variances, which it does not
change.
No tensor of E messages is made, and none of every aggregation times every scaler.

A variance is a difference, which PyG takes between larger numbers. Where all neighbours are nearly
alike, the two results differ by more than rounding, and a model that depends on it stays with PyG.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import aggr

from serve.lane.executors import kernels
from serve.lane.executors.fused import Fused, linear_of, require
from serve.lane.executors.graphs import Graphs
from serve.lane.executors.kernels import Csr, Reduction

_REDUCED: dict[type, Reduction] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MinAggregation: "min",
    aggr.MaxAggregation: "max",
}
_SPREADS = (aggr.VarAggregation, aggr.StdAggregation)
#: Lower bound of a variance; PyG counts anything less as no deviation.
_LEAST_VARIANCE = 1e-5

#: Factor of a node, from its degree and the average degrees of the training graphs.
_SCALERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "amplification": lambda degree, by: torch.log(degree + 1) / by.avg_deg_log,
    "attenuation": lambda degree, by: by.avg_deg_log / torch.log(degree.clamp(min=1) + 1),
    "linear": lambda degree, by: degree / by.avg_deg_lin,
    "inverse_linear": lambda degree, by: by.avg_deg_lin / degree.clamp(min=1),
}


class FusedPNA(Fused):
    """PNAConv without edge features."""

    takes = ("edge_attr",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        require(conv.edge_dim is None, "it takes edge features")
        require(all(len(pre) == 1 for pre in conv.pre_nns), "its messages have several layers")
        self.scaled = conv.aggr_module
        several = getattr(self.scaled.aggr, "aggrs", None)
        require(several is None or self.scaled.aggr.mode == "cat", "its aggregations are mixed")
        self.aggregations = list(several) if several is not None else [self.scaled.aggr]
        for one in self.aggregations:
            require(type(one) in (*_REDUCED, *_SPREADS), f"it has a {type(one).__name__}")
        for scaler in self.scaled.scaler:
            require(scaler == "identity" or scaler in _SCALERS, f"it scales by {scaler}")
        self.pre = [linear_of(pre[0]) for pre in conv.pre_nns]
        self.post = [(linear_of(post[0]), list(post)[1:]) for post in conv.post_nns]

    def reduction(self, conv: Any) -> Reduction:
        """Check that the layer has PNA's own aggregation; see `aggregated`."""
        require(type(conv.aggr_module) is aggr.DegreeScalerAggregation, "it aggregates otherwise")
        return "mean"

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """Run PNAConv.forward."""
        if edge_attr is not None:
            return None
        conv, width = self.conv, self.conv.F_in
        graph = self.graphs.csr(edge_index, x.shape[0])
        begin = graph.tensor[: x.shape[0] + 1]
        degree = (begin[1:] - begin[:-1]).to(x.dtype).unsqueeze(1)
        outs = []
        for tower, (pre, (first, rest)) in enumerate(zip(self.pre, self.post, strict=True)):
            own = x[:, tower * width : (tower + 1) * width] if conv.divide_input else x
            target = functional.linear(own, pre.weight[:, :width], pre.bias)
            source = functional.linear(own, pre.weight[:, width:])
            reduced = self.aggregated(graph, target, source, degree)
            out = functional.linear(own, first.weight[:, :width], first.bias)
            begins = width
            for scaler in self.scaled.scaler:
                ends = begins + reduced.shape[1]
                part = functional.linear(reduced, first.weight[:, begins:ends])
                if scaler != "identity":
                    part *= _SCALERS[scaler](degree, self.scaled)
                out += part
                begins = ends
            for layer in rest:
                out = layer(out)
            outs.append(out)
        result: Tensor = conv.lin(outs[0] if len(outs) == 1 else torch.cat(outs, dim=1))
        return result

    def aggregated(self, graph: Csr, target: Tensor, source: Tensor, degree: Tensor) -> Tensor:
        """Return all aggregations of target_i + source_j side by side, [N, aggregations · F]."""
        found = []
        # A node without neighbours has no messages, hence no target part either.
        once = target * degree.clamp(max=1)
        mean: Tensor | None = None
        for one in self.aggregations:
            if type(one) in _REDUCED:
                reduce = _REDUCED[type(one)]
                added = target * degree if reduce == "sum" else once
                found.append(kernels.aggregate(graph, source, None, reduce, skip=added))
                continue
            if mean is None:
                mean = kernels.aggregate(graph, source, None, "mean")
            variance = kernels.aggregate(graph, source * source, None, "mean") - mean * mean
            if type(one) is aggr.StdAggregation:
                deviation = variance.clamp(min=_LEAST_VARIANCE).sqrt()
                variance = deviation.masked_fill(deviation <= math.sqrt(_LEAST_VARIANCE), 0.0)
            found.append(variance)
        return torch.cat(found, dim=1)
