"""Run several requests' graphs as one: as their disjoint union, split again afterwards.

No edge leads from one graph to another. A model that uses only edges, and `batch` where it pools,
therefore answers each graph as if it were alone. ``Signature.mergeable`` says whether a model does.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from serve.errors import ModelError
from serve.inputs import INPUTS
from serve.lane.models import declared
from serve.lane.models.loader import LoadedModel, default_input
from serve.models.model_signature import Rows

Inputs = Mapping[str, torch.Tensor]


def run_union(model: LoadedModel, graphs: Sequence[Inputs], rows: Rows) -> tuple[torch.Tensor, ...]:
    """Return the model's output float32 [rows, C] for each of `graphs`, from one run.

    `graphs` are inputs for ``LoadedModel.run``. `rows` says whether the output has a row for each
    node or each graph. Raises ModelError when the number of rows does not fit the graphs.
    """
    if len(graphs) == 1:
        return (model.run(graphs[0]),)
    joined, counts = join(graphs, model.spec.inputs)
    output = model.run(joined)
    if rows == "node":
        counts = [graph["x"].shape[0] for graph in graphs]
    if output.shape[0] != sum(counts):
        raise ModelError(
            f"model {model.spec.key}: {len(graphs)} graphs merged gave {output.shape[0]} rows, "
            f"they should give {sum(counts)}"
        )
    return tuple(torch.split(output, counts))


def run_parts(
    model: LoadedModel,
    graphs: Sequence[Inputs],
    rows: Rows,
    sizes: Sequence[declared.Sizes] | None = None,
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return all outputs of the model for each of `graphs`, from one run; see ``run_union``.

    `sizes` are those of each graph, where they are known. Raises ModelError for graphs that cannot
    be joined.
    """
    forward = model.declared
    if forward is None:
        return tuple((output,) for output in run_union(model, graphs, rows))
    if sizes is None:
        sizes = [forward.sizes(graph) for graph in graphs]
    if len(graphs) == 1:
        return (model.outputs(graphs[0], sizes[0]),)
    try:
        joined = declared.join(forward, graphs, sizes)
    except ValueError as error:
        raise ModelError(f"model {model.spec.key}: {error}") from error
    outputs = model.outputs(joined, declared.joined_sizes(sizes))
    return declared.split(forward.interface, outputs, sizes)


def rows_wanted(graph: Inputs, rows: Rows) -> int:
    """Return the number of output rows for the graph; reads its `batch` if there is one."""
    return graph["x"].shape[0] if rows == "node" else _graphs_in(graph)


def join(
    graphs: Sequence[Inputs], names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the named inputs of the union, and the number of graphs in each of `graphs`."""
    nodes = [graph["x"].shape[0] for graph in graphs]
    firsts = list(accumulate(nodes, initial=0))[:-1]
    joined: dict[str, torch.Tensor] = {}
    counts = [min(1, count) for count in nodes]
    for name in dict.fromkeys(["x", *names]):
        if not any(name in graph for graph in graphs) and INPUTS[name].ids_below is None:
            continue  # left out by all: the model's default
        parts = [graph[name] if name in graph else default_input(name, graph) for graph in graphs]
        if INPUTS[name].ids_below == "N":
            joined[name] = _shifted(parts, firsts)
        elif INPUTS[name].ids_below == "G":
            counts = [_graphs_in(graph) for graph in graphs]
            joined[name] = _shifted(parts, list(accumulate(counts, initial=0))[:-1])
        else:
            joined[name] = torch.cat(parts)
    return joined, counts


def _shifted(parts: Sequence[torch.Tensor], by: Sequence[int]) -> torch.Tensor:
    """Concatenate the parts along the last axis, each with its number added."""
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    lengths = [part.shape[-1] for part in parts]
    shape = (*parts[0].shape[:-1], sum(lengths))
    whole = torch.empty(shape, dtype=dtype, device=parts[0].device)
    for part, place, number in zip(parts, torch.split(whole, lengths, -1), by, strict=True):
        torch.add(part, number, out=place)
    return whole


def _graphs_in(graph: Inputs) -> int:
    """Return the number of graphs in `batch`; one without it, none without nodes."""
    batch, count = graph.get("batch"), graph["x"].shape[0]
    return min(1, count) if batch is None or not count else int(batch.max()) + 1
