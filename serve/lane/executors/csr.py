"""The executor `csr`: known convolutions run over sorted edges.

Layers of exactly the classes in ``_BUILDERS``, with supported options, get a fused forward. Other
PyG layers with simple messages get another propagation (``propagate``). All other layers keep their
code, also a user's subclass of a known layer, whose messages may differ. A model may be fused in
part.
"""

import logging
from dataclasses import replace

from torch_geometric.nn import (
    EdgeConv,
    GINEConv,
    MessagePassing,
    PNAConv,
    ResGatedGraphConv,
)

from serve.lane.executors import kernels
from serve.lane.executors.convs import FUSED
from serve.lane.executors.edges import FusedEdgeConv, FusedGINE, FusedResGated
from serve.lane.executors.fused import Fused
from serve.lane.executors.graphs import Graphs
from serve.lane.executors.pna import FusedPNA
from serve.lane.executors.propagate import Propagated
from serve.lane.models.loader import LoadedModel

_log = logging.getLogger(__name__)

_BUILDERS = {
    **FUSED,
    PNAConv: FusedPNA,
    GINEConv: FusedGINE,
    EdgeConv: FusedEdgeConv,
    ResGatedGraphConv: FusedResGated,
}


class CannotRun(Exception):
    """An executor cannot run a model; the text says why."""


def with_csr(loaded: LoadedModel) -> LoadedModel:
    """Replace the forward of every layer that is known; raises CannotRun when none is."""
    if kernels.UNAVAILABLE:
        raise CannotRun(kernels.UNAVAILABLE)
    graphs = Graphs()
    fused: list[tuple[MessagePassing, Fused | Propagated]] = []
    left: list[str] = []
    for name, layer in loaded.module.named_modules():
        if not isinstance(layer, MessagePassing):
            continue
        what = f"'{name}' ({type(layer).__name__})"
        build = _BUILDERS.get(type(layer), Propagated)
        try:
            fused.append((layer, build(layer, graphs)))
        except ValueError as error:
            left.append(f"{what}: {error}")
    if not fused:
        raise CannotRun("; ".join(left) or "it has no graph convolution")
    for layer, forward in fused:
        layer.forward = forward
    if left:
        _log.info("model %s: layers left as they are: %s", loaded.spec.key, "; ".join(left))
    return replace(loaded, executor="csr", after_run=graphs.clear)
