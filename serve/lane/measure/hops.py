"""Measure a model's receptive field on a path, where every hop is one node further.

A resident graph is sampled to exactly this number of hops.
"""

import torch

from serve.inputs import INPUTS
from serve.lane.models.loader import LoadedModel

#: Models with a larger receptive field count as unbounded.
FARTHEST_HOPS = 16
#: A path of nodes 0 → 1 → …, then two nodes beside it.
_PATH_NODES = FARTHEST_HOPS + 2
_DRAWS = 4


def probe_reach(loaded: LoadedModel, num_features: int) -> tuple[int | None, int | None]:
    """Return (hops, exact hops) of `loaded`; None where there is no bound or none was found.

    A row of the output depends on features at most `hops` away. It equals its value in the whole
    graph when the sample holds all in-edges of every node less than `exact hops` away. Exact hops
    exceed hops by one for layers that count a neighbour's in-edges, as GCN does for its degree.
    """
    if not all(INPUTS[name].always or INPUTS[name].optional for name in loaded.spec.inputs):
        return None, None
    beside, target = _PATH_NODES, _PATH_NODES + 1
    path = torch.stack([torch.arange(_PATH_NODES - 1), torch.arange(1, _PATH_NODES)])
    # Both graphs have the same number of edges, so that kernels treat the other rows alike.
    away = torch.cat([path, torch.tensor([[beside], [target]])], dim=1)
    into = torch.cat([path, torch.tensor([[beside], [0]])], dim=1)
    generator = torch.Generator().manual_seed(0)
    features = edges = -1
    for _ in range(_DRAWS):
        x = torch.randn(_PATH_NODES + 2, num_features, generator=generator)
        other = x.clone()
        other[0] = torch.randn(num_features, generator=generator)
        try:
            base, by_x, by_edge = (
                loaded.run({"x": given, "edge_index": edge_index})
                for given, edge_index in ((x, away), (other, away), (x, into))
            )
        except Exception:
            # The model's code may raise anything on a graph it was not made for.
            return None, None
        if base.shape[0] != _PATH_NODES + 2:
            return None, None
        features = max(features, _last_difference(base, by_x))
        edges = max(edges, _last_difference(base, by_edge))
    hops = None if features > FARTHEST_HOPS else max(0, features)
    return hops, None if edges > FARTHEST_HOPS or hops is None else max(hops, edges + 1)


def _last_difference(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return the last node of the path whose row differs; -1 when none does."""
    rows = torch.nonzero((one != other).any(dim=1)[:_PATH_NODES]).flatten()
    return int(rows[-1]) if rows.numel() else -1
