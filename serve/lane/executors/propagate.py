"""Generic layers: PyG's own forward, with the propagation along edges over the kernels.

This covers every PyG layer whose message is its source's features, as they are or times an edge
weight, reduced by sum, mean or extremes: ARMAConv, MixHopConv, GatedGraphConv, MFConv and more. The
layer's code before and after the propagation stays.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from serve.lane.executors import kernels
from serve.lane.executors.fused import (
    is_edges,
    is_learned,
    is_plain,
    is_vector,
    reduction_of,
    require,
    require_ordinary,
)
from serve.lane.executors.graphs import Graphs

_EDGES = 5


class Propagated:
    """A layer's propagate over the kernels, and its forward, which marks the end of its run."""

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        """Replace the layer's propagate; raises ValueError naming what is not covered."""
        require_ordinary(conv)
        self.reduce = reduction_of(conv)
        require(type(conv).__module__.startswith("torch_geometric."), "it is not among those known")
        require(conv.node_dim in (-2, 0), f"node_dim is {conv.node_dim}")
        require(conv.decomposed_layers == 1, "it is decomposed")
        for name in ("aggregate", "update"):
            own = getattr(type(conv), name) is not getattr(MessagePassing, name)
            require(not own, f"it has its own {name}")
        hooked = any(
            value for name, value in vars(conv).items() if name.startswith("_") and "_hooks" in name
        )
        require(not hooked, "it has hooks")
        #: Names, among the arguments of propagate, of the edge weights and of the argument that
        #: must be None; empty when there is none.
        self.weight, self.absent = _arguments_of(conv)
        self.graphs = graphs
        self.forward: Callable[..., Any] = conv.forward
        self.original: Callable[..., Any] = conv.propagate
        conv.propagate = self.propagate

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the layer's own forward."""
        try:
            return self.forward(*inputs, **named)
        finally:
            self.graphs.leave_layer()

    def propagate(self, edge_index: Any, size: Any = None, **named: Any) -> Any:
        """Propagate over the kernels; uses PyG's own propagate where they cannot."""
        x, weight = _sources(named.get("x")), named.get(self.weight)
        nodes = getattr(x, "shape", (0, 0))[-2:-1]
        stacks = list(x) if isinstance(x, Tensor) and x.dim() == 3 else [x]
        if (
            (size is None or tuple(size) == (*nodes, *nodes))
            and named.get(self.absent) is None
            and all(map(is_plain, stacks))
            and is_edges(edge_index)
            and (weight is None or (is_vector(weight) and not is_learned(weight)))
            and set(named) <= {"x", self.weight, self.absent}
        ):
            graph, by_slot = self.graphs.of_layer(edge_index, weight, stacks[0].shape[0])
            outs = [kernels.aggregate(graph, one, by_slot, self.reduce) for one in stacks]
            return outs[0] if x is stacks[0] else torch.stack(outs)
        return self.original(edge_index, size=size, **named)


def _sources(x: Any) -> Any:
    """Return the features of sources when targets are the same nodes; else `x`."""
    if isinstance(x, tuple) and len(x) == 2 and (x[1] is None or x[1] is x[0]):
        return x[0]
    return x


def _arguments_of(conv: Any) -> tuple[str, str]:
    """Return the names of the message's edge weight and of its argument that must be None.

    At most one of them is not empty. Raises ValueError for any other message.
    """
    names = list(inspect.signature(type(conv).message).parameters)[1:]
    others = [name for name in names if name != "x_j"]
    require(
        "x_j" in names and len(others) <= 1 and not any(o.endswith(("_i", "_j")) for o in others),
        f"its messages are of {', '.join(names)}",
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(_EDGES, 3, generator=generator)
    weight = torch.rand(_EDGES, generator=generator)

    def gives(given: Tensor | None, expected: Tensor) -> bool:
        try:
            with torch.no_grad():
                found = conv.message(x_j=x, **dict.fromkeys(others, given))
        except Exception as error:
            raise ValueError(f"its message does not run: {error}") from error
        return isinstance(found, Tensor) and torch.equal(found, expected)

    if not others:
        require(gives(None, x), "its messages are not the sources' features")
        return "", ""
    if gives(weight, weight.view(-1, 1) * x):
        return others[0], ""
    require(gives(None, x), "its messages are not the sources' features times a weight")
    return "", others[0]
