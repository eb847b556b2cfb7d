"""Check that an executor answers as PyG does, on odd graphs, before it may serve."""

import math
from collections.abc import Collection, Iterator
from functools import partial

import torch

from serve.inputs import INPUTS
from serve.interface import Interface
from serve.lane.executors import kernels
from serve.lane.measure.probe_graphs import Shape, declared_graph, probe_graph
from serve.lane.measure.probe_signature import probe_inputs
from serve.lane.measure.where_measured import Site
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec

#: Upper bound of the difference, relative to the largest value of the answer.
TOLERANCE = 1e-4
#: Nodes and pairs behind a graph's last ones.
_SPARE_NODES, _SPARE_EDGES = 7, 19

Inputs = dict[str, torch.Tensor]


def disagreement(
    eager: LoadedModel,
    other: LoadedModel,
    signature: Signature,
    trial: LoadedModel | None = None,
) -> str:
    """Say on which probe graph the two models disagree, and how; empty when they agree.

    Graphs that `eager` refuses are skipped, as are those that `trial` refuses, which runs first
    (see ``choose.ExecutorOptions``). A model that is not deterministic cannot be compared.
    """
    if not signature.deterministic:
        return "the model does not give the same answer twice"
    for name, inputs in _graphs(eager.spec, signature):
        try:
            if trial is not None:
                trial.outputs(inputs)
            expected = eager.outputs(inputs)
        except Exception:
            continue
        try:
            given = other.outputs(inputs)
        except Exception as error:
            return f"on a graph that is {name} it raises {type(error).__name__}: {error}"
        for one, wanted in zip(given, expected, strict=True):
            if one.shape != wanted.shape:
                return f"on a graph that is {name} it gives {list(one.shape)}"
            one, wanted = one.double(), wanted.double()
            error_bound = TOLERANCE * float(wanted.abs().max()) if wanted.numel() else 0.0
            if not torch.allclose(one, wanted, rtol=0, atol=error_bound, equal_nan=True):
                difference = float((one - wanted).abs().max())
                return f"on a graph that is {name} it is off by {difference:.2g}"
    return ""


def takes_narrow_edges(loaded: LoadedModel, signature: Signature, site: Site) -> bool:
    """Return True when int32 edges give the same answers as int64 ones and take no more memory.

    `site` is where the model runs.
    """
    try:
        for _, inputs in _graphs(loaded.spec, signature):
            if not torch.equal(loaded.run(_narrow(inputs)), loaded.run(inputs)):
                return False
        size = 60, 3000
        wide = probe_graph(*size, Shape.PLAIN, loaded.spec.inputs, signature)
        peaks = [
            site.trace(partial(loaded.run, inputs), loaded.module, *size).peak_bytes
            for inputs in (site.place(_narrow(wide)), site.place(wide))
        ]
    except Exception:
        return False
    return peaks[0] <= peaks[1]


def takes_spare_room(loaded: LoadedModel, signature: Signature) -> bool:
    """Return True when nodes and pairs behind a graph's last ones change none of its answers.

    Spare nodes have features that are no numbers; spare pairs are no edges (``kernels.NO_EDGE``).
    `loaded` runs by `csr` on the processor, where a node that does not exist is only an error, with
    the operators that GPUs have.
    """
    spec = loaded.spec
    if signature.rows != "node" or spec.interface is not None or "batch" in spec.inputs:
        return False
    compared = False
    with kernels.as_on_devices():
        for _, inputs in _graphs(spec, signature):
            try:
                expected = loaded.run(inputs)
            except Exception:
                continue
            try:
                found = loaded.run(_with_spare_room(inputs, spec.inputs))
            except Exception:
                return False
            nodes = len(expected)
            error_bound = TOLERANCE * float(expected.abs().max()) if nodes else 0.0
            if len(found) != nodes + _SPARE_NODES or not torch.allclose(
                found[:nodes], expected, rtol=0, atol=error_bound, equal_nan=True
            ):
                return False
            compared = True
    return compared


def _with_spare_room(inputs: Inputs, names: Collection[str]) -> Inputs:
    """Return the inputs of these names with nodes and pairs more."""
    found = {}
    for name in inputs.keys() & set(names):
        value, (per, axis) = inputs[name], INPUTS[name].per
        shape = list(value.shape)
        shape[axis] = _SPARE_NODES if per == "N" else _SPARE_EDGES
        spare = kernels.NO_EDGE if name == "edge_index" else math.nan
        more = torch.full(shape, spare, dtype=value.dtype)
        found[name] = torch.cat([value, more], dim=axis)
    return found


def _narrow(inputs: Inputs) -> Inputs:
    return inputs | {"edge_index": inputs["edge_index"].int()}


def _graphs(spec: ModelSpec, signature: Signature) -> Iterator[tuple[str, Inputs]]:
    """Yield a description and the inputs of each probe graph."""
    if spec.interface is not None:
        yield from _declared_graphs(spec.interface)
        return
    names = spec.inputs
    features, edge_dim = signature.num_features, signature.edge_dim
    yield "empty", probe_inputs(0, 0, 1, features, edge_dim)
    yield "without edges", probe_inputs(5, 0, 1, features, edge_dim)
    yield "one node", probe_inputs(1, 1, 1, features, edge_dim)
    yield "random", probe_inputs(97, 700, 3, features, edge_dim)
    for shape in Shape:
        yield shape.value, probe_graph(70, 300, shape, names, signature)
    yield "mostly isolated nodes", probe_graph(300, 11, Shape.PLAIN, names, signature)
    twice = probe_graph(40, 90, Shape.MIXED, names, signature)
    for name in ("edge_index", "edge_weight", "edge_attr"):
        if name in twice:
            dim = 1 if name == "edge_index" else 0
            twice[name] = torch.cat([twice[name], twice[name]], dim=dim)
    yield "every edge twice", twice


def _declared_graphs(interface: Interface) -> Iterator[tuple[str, Inputs]]:
    """Yield the same for a model that declares its inputs."""
    for name, num_nodes, num_edges in (
        ("empty", 0, 0), ("without edges", 5, 0), ("tiny", 4, 3), ("random", 97, 700),
        ("mostly isolated nodes", 300, 11),
    ):  # fmt: skip
        counts = interface.spread(num_nodes, num_edges)
        yield name, declared_graph(interface, counts, Shape.PLAIN)
    for shape in Shape:
        yield shape.value, declared_graph(interface, interface.spread(70, 300), shape)
