"""The executor `csr`: known convolutions run over sorted edges.

Layers of exactly the classes in ``_BUILDERS``, with supported options, get a fused forward. Other
PyG layers with simple messages get another propagation (``propagate``). All other layers keep their
code, also a user's subclass of a known layer, whose messages may differ. A model may be fused in
part.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GINConv,
    GINEConv,
    MessagePassing,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    TransformerConv,
)

from serve.lane.executors import kernels
from serve.lane.executors.convs import FUSED
from serve.lane.executors.edges import FusedEdgeConv, FusedGINE, FusedResGated
from serve.lane.executors.fused import Fused, has_hooks, is_learned, reduction_of, require
from serve.lane.executors.graphs import Graphs
from serve.lane.executors.pna import FusedPNA
from serve.lane.executors.propagate import Propagated
from serve.lane.executors.relations import FusedRGCN
from serve.lane.executors.spectral import SPECTRAL
from serve.lane.models.loader import LoadedModel

_log = logging.getLogger(__name__)

_BUILDERS = {
    **FUSED,
    PNAConv: FusedPNA,
    GINEConv: FusedGINE,
    EdgeConv: FusedEdgeConv,
    ResGatedGraphConv: FusedResGated,
}
#: The same, for layers that ``Propagated`` covers too.
_FASTER = {**SPECTRAL, RGCNConv: FusedRGCN}

_ATTENTION = {GATConv, GATv2Conv, TransformerConv}

Build = Callable[[Any, Graphs], Fused | Propagated]


class CannotRun(Exception):
    """An executor cannot run a model; the text says why."""


#: Names of the executor by the variant of the kernels that it uses, see ``kernels.VARIANTS``.
NAMES = ("csr", *(f"csr_{name}" for name in kernels.VARIANTS[1:]))


def with_csr(loaded: LoadedModel, variant: int = 0) -> LoadedModel:
    """Replace the forward of every layer that is known; raises CannotRun when none is."""
    graphs = _fuse(loaded.module, loaded.spec.key, _serving, variant)
    for layer in loaded.module.modules():
        if type(layer) is nn.Dropout and not has_hooks(layer):
            dropout: Any = layer
            dropout.forward = _undropped(layer)
    return replace(loaded, executor=NAMES[variant], after_run=graphs.clear)


def train_with_csr(module: nn.Module, key: str) -> Callable[[], None]:
    """Replace the forward of every layer whose kernels have gradients, for training.

    Sums, means and attention; extremes keep PyG's code, and so does attention that drops weights
    out or scores features of edges. Returns what to call after each forward pass; raises CannotRun
    when no layer is known. `key` names the model.
    """
    return _fuse(module, key, _training).clear


def _fuse(
    module: nn.Module, key: str, build_for: Callable[[MessagePassing], Build], variant: int = 0
) -> Graphs:
    if kernels.UNAVAILABLE:
        raise CannotRun(kernels.UNAVAILABLE)
    graphs = Graphs(variant)
    fused: list[tuple[MessagePassing, Fused | Propagated]] = []
    left: list[str] = []
    for name, layer in module.named_modules():
        if not isinstance(layer, MessagePassing):
            continue
        try:
            fused.append((layer, build_for(layer)(layer, graphs)))
        except ValueError as error:
            left.append(f"'{name}' ({type(layer).__name__}): {error}")
    if not fused:
        raise CannotRun("; ".join(left) or "it has no graph convolution")
    for layer, forward in fused:
        layer.forward = forward
    if left:
        _log.info("model %s: layers left as they are: %s", key, "; ".join(left))
    return graphs


def _undropped(layer: nn.Dropout) -> Callable[[Tensor], Tensor]:
    """Return the layer's forward without what it does in vain where nothing is dropped."""
    drops = layer.forward

    def forward(x: Tensor) -> Tensor:
        return drops(x) if layer.training else x

    return forward


def _serving(layer: MessagePassing) -> Build:
    require(not layer.training, "it is in training mode")
    return _fastest if type(layer) in _FASTER else _BUILDERS.get(type(layer), Propagated)


def _fastest(layer: Any, graphs: Graphs) -> Fused | Propagated:
    with suppress(ValueError):
        return _FASTER[type(layer)](layer, graphs)
    return Propagated(layer, graphs)


def _training(layer: MessagePassing) -> Build:
    require(reduction_of(layer) in kernels.DIFFERENTIABLE, f"aggr is {layer.aggr}")
    if type(layer) in _ATTENTION:
        require(not layer.dropout, "it drops out weights of its attention")
        require(layer.lin_edge is None, "features of edges in attention have no gradient here")
    if type(layer) is GINConv and is_learned(layer.eps):
        return Propagated
    return FUSED.get(type(layer), Propagated)
