"""Try a model that declares its inputs and outputs on tiny graphs, and describe its behaviour."""

from collections.abc import Sequence

from serve.errors import ModelError
from serve.interface import Interface
from serve.lane.measure.batch_order import needs_sorted_batch
from serve.lane.measure.closeness import is_close
from serve.lane.measure.probe_graphs import Shape, declared_graph
from serve.lane.measure.typed_hops import probe_typed_reach
from serve.lane.models.advice import explained
from serve.lane.models.declared import Outputs
from serve.lane.models.loader import LoadedModel
from serve.lane.models.union import run_parts
from serve.models.model_signature import Signature

#: Nodes and all other things of the graphs: two of different sizes must run.
_FIRST, _OTHER = (7, 12), (22, 45)
#: Those of a trial union.
_UNION = ((7, 12), (64, 256), (11, 20), (40, 400))
#: Those of several graphs in one request.
_BATCHED = (64, 256)


def probe_declared(loaded: LoadedModel, interface: Interface) -> Signature:
    """Run `loaded` on tiny graphs; raises ModelError when it does not run or breaks its word."""
    key = loaded.spec.key

    def run(counts: Sequence[int]) -> Outputs:
        return loaded.outputs(declared_graph(interface, counts, Shape.PLAIN))

    def runs(counts: Sequence[int]) -> bool:
        try:
            run(counts)
        except Exception:
            return False
        return True

    for size in (_FIRST, _OTHER):
        counts = interface.spread(*size)
        try:
            found = run(counts)
        except ModelError:
            raise
        except Exception as error:
            told = ", ".join(
                f"{count} {symbol}" for symbol, count in zip(interface.counts, counts, strict=True)
            )
            raise ModelError(
                f"model {key}: a graph of {told} does not run: {explained(error)}"
            ) from error
    deterministic = all(map(is_close, run(interface.spread(*_OTHER)), found))
    nodes = interface.spread(*_FIRST)
    hops, exact_hops = probe_typed_reach(loaded, interface)
    return Signature(
        num_features=0,
        edge_dim=None,
        num_outputs=0,
        rows="declared",
        accepts_empty=runs(interface.spread(0, 0)),
        accepts_edgeless=runs(interface.spread(interface.totals(nodes)[0], 0)),
        deterministic=deterministic,
        hops=hops,
        exact_hops=exact_hops,
        mergeable=deterministic and interface.is_joinable and _is_mergeable(loaded, interface),
        needs_sorted_batch=needs_sorted_batch(
            loaded.outputs,
            interface,
            declared_graph(interface, interface.spread(*_BATCHED), Shape.MANY),
            deterministic=deterministic,
        ),
    )


def _is_mergeable(loaded: LoadedModel, interface: Interface) -> bool:
    """Return True when graphs of several sizes have the same outputs merged and alone."""
    graphs = [
        declared_graph(
            interface, interface.with_nodes_in_each(_uneven(interface.spread(*size), turn)), shape
        )
        for turn, (size, shape) in enumerate(
            zip(_UNION, 2 * (Shape.PLAIN, Shape.LOPSIDED), strict=True)
        )
    ]
    try:
        alone = [loaded.outputs(graph) for graph in graphs]
        merged = run_parts(loaded, graphs, "declared")
    except Exception:
        return False
    return all(
        one.shape == other.shape and is_close(one, other)
        for own, others in zip(alone, merged, strict=True)
        for one, other in zip(own, others, strict=True)
    )


def _uneven(counts: Sequence[int], turn: int) -> tuple[int, ...]:
    """Return the counts with twice as much of one kind, so that kinds have offsets of their own."""
    return tuple(
        2 * count if position == turn % len(counts) else count
        for position, count in enumerate(counts)
    )
