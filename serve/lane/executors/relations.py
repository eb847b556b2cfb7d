"""RGCNConv over the kernels: the edges are sorted once, by relation and then by target.

PyG takes a relation's edges out with a boolean mask, so it waits for the device to learn how many
there are, for every relation of every layer, and its runs cannot be captured.
"""

from typing import Any

import torch
from torch import Tensor

from serve.lane.executors import kernels
from serve.lane.executors.fused import Fused, is_tensor
from serve.lane.executors.graphs import Graphs
from serve.lane.executors.kernels import Csr

#: Upper bound of nodes times relations, which the device's sort numbers in 32 bits.
_MOST_ROWS = 2**32 - 2


class FusedRGCN(Fused):
    """RGCNConv: a matrix for each relation, bases, or blocks."""

    takes = ("edge_type",)

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        super().__init__(conv, graphs)
        self.bases: int | None = conv.num_bases
        self.blocks: int | None = conv.num_blocks
        narrows = conv.out_channels <= conv.in_channels_l
        self.map_first = self.reduce in kernels.DIFFERENTIABLE and narrows

    def fused(
        self, x: Tensor, edge_index: Tensor, edge_type: Tensor | None = None
    ) -> Tensor | None:
        """Run RGCNConv.forward."""
        conv, rows, relations = self.conv, x.shape[0], self.conv.num_relations
        if not _is_types(edge_type) or rows * relations > _MOST_ROWS:
            return None
        graph = self.graphs.derived(
            ("relations", relations),
            (edge_index, edge_type),
            rows,
            lambda: _by_relation(edge_index, edge_type, rows, relations, self.graphs.variant),
        )
        weight = conv.weight
        if self.bases is not None:
            shape = relations, conv.in_channels_l, conv.out_channels
            weight = (conv.comp @ weight.view(self.bases, -1)).view(shape)
        out = x.new_zeros(rows, conv.out_channels) if conv.root is None else x @ conv.root
        if conv.bias is not None:
            out += conv.bias
        for relation in range(relations):
            part = graph.part(relation * rows, rows)
            if self.map_first:
                mapped = self.mapped(x, weight[relation])
                out = kernels.aggregate(part, mapped, None, self.reduce, skip=out)
            else:
                out += self.mapped(kernels.aggregate(part, x, None, self.reduce), weight[relation])
        return out

    def mapped(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x` [N, in] times a relation's matrix, or its blocks [blocks, in / blocks, …]."""
        if self.blocks is None:
            return x @ weight
        rows, width = x.shape[0], weight.shape[1]
        parts = x.view(rows, self.blocks, width).transpose(0, 1)
        return torch.bmm(parts, weight).transpose(0, 1).reshape(rows, self.conv.out_channels)


def _is_types(value: object) -> bool:
    return is_tensor(value) and value.dim() == 1 and value.dtype in (torch.int64, torch.int32)


def _by_relation(
    edge_index: Tensor, edge_type: Any, rows: int, relations: int, variant: int
) -> Csr:
    """Sort the edges; those of relation r to node i are in row r · rows + i.

    Raises IndexError, as ``Csr`` does, for a node or relation that does not exist.
    """
    source, target = edge_index[0].long(), edge_index[1].long()
    exists = (target >= 0) & (torch.maximum(source, target) < rows)
    nowhere = torch.where(target == kernels.NO_EDGE, kernels.NO_EDGE, rows * relations)
    target = torch.where(exists, edge_type * rows + target, nowhere)
    pairs = torch.stack([source, target])
    return Csr(pairs, rows * relations, replace_loops=False, edges=False, variant=variant)
