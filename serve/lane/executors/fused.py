"""The base of fused layers, and the checks that a layer and its arguments must pass.

A fused layer keeps the PyG layer's weights and takes the place of its forward. It covers ordinary
use: features float32 [N, F] and edges int64 or int32 [2, E]. Every other call (pairs of features,
sparse matrices, attention weights to be returned) goes to PyG's own forward.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch_geometric.nn import Linear as PygLinear

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


class Fused:
    """A layer's forward over the kernels."""

    #: Names of the arguments that may follow x and edge_index.
    takes: tuple[str, ...] = ()

    def __init__(self, conv: Any, graphs: Graphs) -> None:
        """Check the layer; raises ValueError naming the option that is not covered."""
        require_ordinary(conv)
        self.reduce = self.reduction(conv)
        self.conv = conv
        self.graphs = graphs
        self.original: Callable[..., Any] = conv.forward

    def __call__(self, x: Any, edge_index: Any, *more: Any, **named: Any) -> Any:
        """Run the fused forward; calls PyG's own where it does not cover the call."""
        if (
            is_plain(x)
            and is_edges(edge_index)
            and len(more) <= len(self.takes)
            and (not named or set(named) <= set(self.takes))
            and not any(map(is_learned, (*more, *named.values())))
        ):
            out = self.fused(x, edge_index, *more, **named)
            if out is not None:
                return out
        if is_tensor(edge_index) and edge_index.dtype == torch.int32:
            edge_index = edge_index.long()  # PyG's own scatters take no other indices
        return self.original(x, edge_index, *more, **named)

    def reduction(self, conv: Any) -> Reduction:
        """Return the layer's reduction of messages; raises ValueError for one without a kernel."""
        return reduction_of(conv)

    def fused(self, x: Tensor, edge_index: Tensor) -> Tensor | None:
        """Return the forward pass's output; None when this call is not covered."""
        raise NotImplementedError


def require(holds: bool, otherwise: str) -> None:
    """Raise ValueError with the text unless it holds."""
    if not holds:
        raise ValueError(otherwise)


def require_ordinary(conv: Any) -> None:
    """Raise ValueError unless the layer has the properties that all kernels need."""
    require(conv.flow == "source_to_target", f"flow is {conv.flow}")


def reduction_of(conv: Any) -> Reduction:
    """Return the layer's reduction of messages; raises ValueError for one without a kernel."""
    # Several are a list.
    known = isinstance(conv.aggr, str) and conv.aggr in _REDUCTIONS
    require(known, f"aggr is {conv.aggr}")
    return _REDUCTIONS[conv.aggr]


def linear_of(layer: Any) -> Any:
    """Return `layer`; raises ValueError unless it is a plain linear map without hooks."""
    require(type(layer) in (nn.Linear, PygLinear), f"it maps with a {type(layer).__name__}")
    require(not has_hooks(layer), "its linear map has hooks")
    return layer


def has_hooks(module: nn.Module) -> bool:
    """Return True when the module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return True for a tensor that is not of a subclass, which could mean anything."""
    # Under export, subclasses stand for the tensors.
    return type(value) is Tensor or (isinstance(value, Tensor) and torch.compiler.is_exporting())


def is_learned(value: object) -> bool:
    """Return True for a tensor whose gradient is wanted: an argument of edges has none here."""
    return isinstance(value, Tensor) and value.requires_grad


def is_plain(x: object) -> bool:
    """Return True for a float32 matrix that the kernels can read."""
    return (
        is_tensor(x)
        and x.dim() == 2
        and x.dtype == torch.float32
        and x.device.type in kernels.devices
        and x.is_contiguous()
    )


def is_edges(value: object) -> bool:
    """Return True for edges [2, E] whose rows the kernels can read."""
    return (
        is_tensor(value)
        and value.dtype in (torch.int64, torch.int32)
        and value.dim() == 2
        and value.shape[0] == 2
        and (value.stride(1) == 1 or value.shape[1] < 2)
    )


def is_vector(value: object) -> bool:
    """Return True for a float32 vector that the kernels can read."""
    return (
        is_tensor(value)
        and value.dim() == 1
        and value.dtype == torch.float32
        and value.is_contiguous()
    )
