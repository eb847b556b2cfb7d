"""Find a model's signature, its inputs and outputs, by running it on tiny graphs.

No model declares its own shapes reliably, so candidates (the config, the factory's arguments,
the weights' dimensions) are tried in that order and the first that runs wins.
"""

from collections.abc import Iterator
from itertools import product
from typing import Literal

import numpy as np
import torch

from serve.errors import ModelError
from serve.graphs.random_inputs import random_inputs
from serve.inputs import INPUTS, Size
from serve.lane.measure.batch_order import needs_sorted_batch, short_interface
from serve.lane.measure.closeness import is_close
from serve.lane.measure.hops import probe_reach
from serve.lane.measure.probe_declared import probe_declared
from serve.lane.models.calling import required_parameters
from serve.lane.models.loader import LoadedModel
from serve.lane.models.union import run_union
from serve.models.model_signature import Signature as Signature
from serve.models.wrappers import wrapper

_FEATURE_ARGS = ("in_channels", "num_features", "in_features", "num_node_features", "in_dim",
                 "input_dim", "in_feats")  # fmt: skip
_EDGE_ARGS = ("edge_dim", "edge_channels", "num_edge_features", "edge_features", "edge_attr_dim")
_MAX_CANDIDATES = 32
#: Nodes, edges and graphs of the trial union.
_UNION = ((7, 12, 3), (64, 256, 4), (11, 20, 1), (40, 400, 2))
#: Those of several graphs in one request.
_BATCHED = (64, 256, 4)


def probe_signature(loaded: LoadedModel) -> Signature:
    """Run `loaded` on graphs of at most 11 nodes; raises ModelError when nothing runs."""
    if loaded.spec.interface is not None:
        return probe_declared(loaded, loaded.spec.interface)
    first: tuple[str, Exception] | None = None
    misshapen: ModelError | None = None
    for num_features, edge_dim in _candidates(loaded):
        try:
            output = loaded.run(probe_inputs(7, 12, 3, num_features, edge_dim))
        except Exception as error:
            tried = f"{num_features} features" + (f", edge_dim {edge_dim}" if edge_dim else "")
            first = first or (f"with {tried}: {type(error).__name__}: {error}", error)
            continue
        try:
            return _describe(loaded, num_features, edge_dim, output)
        except ModelError as error:
            # A width that is not the model's may run, where layers reshape what they get.
            misshapen = misshapen or error
    if misshapen is not None:
        raise misshapen
    if first is None:
        raise ModelError(
            f"model {loaded.spec.key}: the number of features is unknown; give it as"
            " model.num_features in config.toml"
        )
    spec = loaded.spec
    advice = wrapper(spec.factory, spec.method, required_parameters(loaded.module.forward))
    raise ModelError(
        f"model {spec.key}: no probe graph runs; {first[0]}{advice and '; '}{advice}"
    ) from first[1]


def probe_inputs(
    num_nodes: int, num_edges: int, num_graphs: int, num_features: int, edge_dim: int | None
) -> dict[str, torch.Tensor]:
    """Return every input that a model may take, for a random graph seeded by its size.

    `batch` is sorted and names all of `num_graphs` graphs when there are nodes enough.
    """
    rng = np.random.default_rng((num_nodes, num_edges))
    nodes = max(num_nodes, 1)
    sizes: dict[Size, int] = {"N": num_nodes, "E": num_edges, "F": num_features, "D": edge_dim or 0}
    names = [name for name, each in INPUTS.items() if "D" not in each.shape or edge_dim is not None]
    edges = rng.integers(0, nodes, (2, num_edges))
    batch = np.arange(num_nodes) * num_graphs // nodes
    made = random_inputs(names, sizes, edges, rng, batch=batch)
    return {name: torch.from_numpy(array) for name, array in made.items()}


def _describe(
    loaded: LoadedModel, num_features: int, edge_dim: int | None, output: torch.Tensor
) -> Signature:
    """Describe the output's rows, and the model's behaviour on degenerate graphs."""

    def run(num_nodes: int, num_edges: int, num_graphs: int) -> torch.Tensor | None:
        try:
            return loaded.run(
                probe_inputs(num_nodes, num_edges, num_graphs, num_features, edge_dim)
            )
        except Exception:
            return None

    key = loaded.spec.key
    other = run(11, 20, 2)
    if other is None or other.shape[1] != output.shape[1]:
        got = "raises" if other is None else f"gives {list(other.shape)}"
        raise ModelError(
            f"model {key}: 7 nodes give {list(output.shape)}, but 11 nodes {got};"
            " it must take graphs of any size and keep its number of columns"
        )
    counts = (output.shape[0], other.shape[0])
    graphs = (3, 2) if "batch" in loaded.spec.inputs else (1, 1)
    if counts not in ((7, 11), graphs):
        raise ModelError(
            f"model {key}: 7 and 11 nodes in {graphs[0]} and {graphs[1]} graphs give {counts[0]}"
            f" and {counts[1]} rows; there must be one per node or one per graph"
        )
    again = run(7, 12, 3)
    # Equal up to rounding: torch's scatter on a GPU adds in any order.
    deterministic = again is not None and is_close(again, output)
    empty, edgeless = run(0, 0, 0), run(3, 0, 1)
    by_node = counts == (7, 11)
    rows: Literal["node", "graph"] = "node" if by_node else "graph"
    hops, exact_hops = probe_reach(loaded, num_features) if by_node else (None, None)
    return Signature(
        num_features=num_features,
        edge_dim=edge_dim,
        num_outputs=output.shape[1],
        rows=rows,
        accepts_empty=empty is not None and empty.shape == (0, output.shape[1]),
        accepts_edgeless=edgeless is not None,
        deterministic=deterministic,
        hops=hops,
        exact_hops=exact_hops,
        mergeable=deterministic and _is_mergeable(loaded, num_features, edge_dim, rows),
        needs_sorted_batch=needs_sorted_batch(
            loaded.outputs,
            short_interface(loaded.spec.inputs, rows),
            probe_inputs(*_BATCHED, num_features, edge_dim),
            deterministic=deterministic,
        ),
    )


def _is_mergeable(
    loaded: LoadedModel, num_features: int, edge_dim: int | None, rows: Literal["node", "graph"]
) -> bool:
    """Return True when graphs of several sizes have the same outputs merged and alone.

    It is False for a model that normalises over all nodes, samples, or pools without `batch`.
    """
    graphs = [probe_inputs(*size, num_features, edge_dim) for size in _UNION]
    try:
        alone = [loaded.run(graph) for graph in graphs]
        merged = run_union(loaded, graphs, rows)
    except Exception:
        return False
    return all(
        one.shape == other.shape and is_close(one, other)
        for one, other in zip(alone, merged, strict=True)
    )


def _candidates(loaded: LoadedModel) -> Iterator[tuple[int, int | None]]:
    """Yield (features, edge_dim) to try, likeliest first."""
    spec = loaded.spec
    dims = [
        int(size)
        for value in loaded.module.parameters()
        for size in reversed(value.shape)
        if value.dim() >= 2
    ]

    def ranked(names: tuple[str, ...]) -> list[int]:
        told = [spec.args[name] for name in names if name in spec.args]
        likely = [size for size in told if type(size) is int and size > 0]
        return list(dict.fromkeys([*likely, *dims]))[:_MAX_CANDIDATES]

    features = [spec.num_features] if spec.num_features else ranked(_FEATURE_ARGS)
    if not any("D" in INPUTS[name].shape for name in spec.inputs):
        return product(features, (None,))
    return product(features, dict.fromkeys([*ranked(_EDGE_ARGS), 1]))
