"""First runs of a model, so that no request pays for them."""

from serve.lane.measure.probe_graphs import Shape, declared_graph
from serve.lane.measure.probe_signature import probe_inputs
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature

#: Nodes and edges of the graphs. One is large: the memory that libraries keep from their first run
#: of that kind would otherwise count against the first request's limit.
_SIZES = ((16, 48), (256, 1024), (2048, 20_480), (16, 48))


def warm_up(model: LoadedModel, signature: Signature) -> None:
    """Run the model on small graphs. Raises what the model raises."""
    for num_nodes, num_edges in _SIZES:
        if (interface := model.spec.interface) is not None:
            counts = interface.spread(num_nodes, num_edges)
            model.outputs(declared_graph(interface, counts, Shape.PLAIN))
            continue
        model.run(probe_inputs(num_nodes, num_edges, 1, signature.num_features, signature.edge_dim))
