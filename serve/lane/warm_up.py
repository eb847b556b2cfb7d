"""First runs of a model, so that no request pays for them."""

import logging
from collections.abc import Callable
from functools import partial

from serve.lane.measure.allocator import UNMETERED, Run, TooLarge, limited_by
from serve.lane.measure.probe_graphs import Shape, declared_graph
from serve.lane.measure.probe_signature import probe_inputs
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.native import Meter

_log = logging.getLogger(__name__)

#: Nodes and edges of the graphs. One is large: the memory that libraries keep from their first run
#: of that kind would otherwise count against the first request's limit.
_SIZES = ((16, 48), (256, 1024), (2048, 20_480), (16, 48))
#: Most memory of a run on a processor.
_MOST_BYTES = 256 << 20


def warm_up(
    model: LoadedModel,
    signature: Signature,
    limited: Callable[[Run], Run] = UNMETERED.limited,
) -> None:
    """Run the model on small graphs, but on those for which `limited` raises TooLarge.

    Raises what the model raises.
    """
    for num_nodes, num_edges in _SIZES:
        try:
            limited(partial(_run, model, signature, num_nodes, num_edges))()
        except TooLarge as error:
            # As where all pairs are compared: requests of such a model are of smaller graphs.
            _log.info("model %s: warmed up with less: %s", model.spec.key, error)


def limited_warm_up(model: LoadedModel, signature: Signature, meter: Meter | None) -> None:
    """Warm a model up on a processor, with a bound of its memory where there is a meter."""
    warm_up(
        model, signature, UNMETERED.limited if meter is None else limited_by(meter, _MOST_BYTES)
    )


def _run(model: LoadedModel, signature: Signature, num_nodes: int, num_edges: int) -> None:
    if (interface := model.spec.interface) is not None:
        counts = interface.spread(num_nodes, num_edges)
        model.outputs(declared_graph(interface, counts, Shape.PLAIN))
        return
    model.run(probe_inputs(num_nodes, num_edges, 1, signature.num_features, signature.edge_dim))
