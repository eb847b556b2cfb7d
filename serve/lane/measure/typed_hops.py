"""Measure how far a model that declares its inputs looks, on levels of nodes of every type.

As ``hops``, with levels in place of the path's nodes: the nodes of a level have in-edges from the
next level alone, along every type of edges.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serve.graphs.random_inputs import declared_inputs
from serve.interface import InputSlot, Interface
from serve.lane.measure.hops import FARTHEST_HOPS
from serve.lane.models.loader import LoadedModel

_Arrays = dict[str, NDArray[Any]]
_LEVELS = FARTHEST_HOPS + 2
#: Nodes of each type in a level, and beside all levels.
_WIDTH = 2
_DEEPEST = (_LEVELS - 1) * _WIDTH
_BESIDE = _LEVELS * _WIDTH
_DRAWS = 4


def probe_typed_reach(loaded: LoadedModel, interface: Interface) -> tuple[int | None, int | None]:
    """Return (hops, exact hops), see ``hops.probe_reach``.

    Also None for a model without edges between nodes, without an output for each node, or with
    inputs that are neither these edges nor features of nodes.
    """
    links = [slot for slot in interface.inputs if slot.is_links and slot.symbols]
    nodes = {symbol for slot in links for symbol in slot.row_bounds}
    features = [
        slot
        for slot in interface.inputs
        if not slot.index and slot.shape[:1] and slot.shape[0] in nodes
    ]
    given = {slot.name for slot in (*links, *features)}
    rows = [
        at for at, slot in enumerate(interface.outputs) if slot.shape[:1] and slot.shape[0] in nodes
    ]
    if not rows or any(s.name not in given and not s.optional for s in interface.inputs):
        return None, None
    reach = reach_of_edges = -1
    for draw in range(_DRAWS):
        base = _graph(interface, links, draw)
        by_x = dict(base)
        for slot in features:
            by_x[slot.name] = base[slot.name].copy()
            other = _graph(interface, links, draw + _DRAWS)[slot.name]
            by_x[slot.name][_DEEPEST:_BESIDE] = other[_DEEPEST:_BESIDE]
        by_edge = dict(base)
        for slot in links:
            # Both graphs have the same number of edges, so that kernels treat other rows alike.
            by_edge[slot.name] = base[slot.name].copy()
            by_edge[slot.name][1, -1] = _DEEPEST
        try:
            plain, other_x, other_edge = (
                _outputs(loaded, given, arrays) for arrays in (base, by_x, by_edge)
            )
        except Exception:
            # The model's code may raise anything on a graph it was not made for.
            return None, None
        for at in rows:
            reach = max(reach, _reach(plain[at], other_x[at]))
            reach_of_edges = max(reach_of_edges, _reach(plain[at], other_edge[at]))
    hops = None if reach > FARTHEST_HOPS else max(0, reach)
    unbounded = hops is None or reach_of_edges > FARTHEST_HOPS
    return hops, None if unbounded else max(hops or 0, reach_of_edges + 1)


def _graph(interface: Interface, links: Sequence[InputSlot], seed: int) -> _Arrays:
    """Return all inputs, with the edges of the levels and one edge beside them, which is last."""
    targets = np.repeat(np.arange(_DEEPEST), _WIDTH)
    sources = (targets // _WIDTH + 1) * _WIDTH + np.tile(np.arange(_WIDTH), _DEEPEST)
    edges = np.stack([np.append(sources, _BESIDE), np.append(targets, _BESIDE + 1)])
    bounds = {symbol for slot in links for symbol in slot.row_bounds}
    counts = [_BESIDE + _WIDTH if symbol in bounds else edges.shape[1]
              for symbol in interface.counts]  # fmt: skip
    possible = interface.with_nodes_in_each(counts)
    made = declared_inputs(interface, possible, np.random.default_rng(seed))
    return made | {slot.name: edges.astype(slot.dtype) for slot in links}


def _outputs(loaded: LoadedModel, given: set[str], arrays: _Arrays) -> tuple[torch.Tensor, ...]:
    return loaded.outputs({name: torch.from_numpy(arrays[name]) for name in given})


def _reach(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return the distance from the deepest level of the farthest row that differs; -1: none."""
    differs = (one != other).reshape(one.shape[0], -1).any(dim=1)[:_BESIDE]
    rows = torch.nonzero(differs).flatten()
    return _LEVELS - 1 - int(rows[0]) // _WIDTH if rows.numel() else -1
