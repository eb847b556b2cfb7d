"""Check that an executor answers as PyG does, on odd graphs, before it may serve."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serve.interface import InputSlot, Interface
from serve.lane.executors import kernels
from serve.lane.measure.closeness import is_close
from serve.lane.measure.probe_graphs import Shape, declared_graph, probe_graph
from serve.lane.measure.probe_signature import probe_inputs
from serve.lane.measure.where_measured import Site
from serve.lane.models.loader import LoadedModel
from serve.lane.models.sizing import SizedInput, Sizing, sizing_of
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec

#: Nodes and pairs behind a graph's last ones.
_SPARE_NODES, _SPARE_EDGES = 7, 19
#: What is in spare room as a float, and a number that no comparison overlooks; float16 holds it.
_SPARE_FLOAT, _OTHER_FLOAT = math.nan, 1e4
#: Spare nodes, and the floats in spare room, that are tried. Where a graph fills a bucket's nodes,
#: spare pairs that are taken for indices from the end would reach its own last node.
_TRIED = ((_SPARE_NODES, _SPARE_FLOAT), (0, _SPARE_FLOAT), (_SPARE_NODES, _OTHER_FLOAT))

_aten: Any = torch.ops.aten
#: Operations whose results exceed what they are made of: the number of an edge among all pairs of
#: nodes leaves int32's range from 46,341 nodes on.
_GROWING = {
    _aten.mul, _aten.mul_, _aten.pow, _aten.pow_, _aten.addcmul, _aten.addcmul_, _aten.mm,
    _aten.__lshift__, _aten.__ilshift__, _aten.bitwise_left_shift, _aten.bitwise_left_shift_,
}  # fmt: skip

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
    compared = False
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
            if not is_close(one, wanted):
                difference = float((one.double() - wanted.double()).abs().max())
                return f"on a graph that is {name} it is off by {difference:.2g}"
        compared = True
    return "" if compared else "the model answers no probe graph"


def takes_narrow_edges(loaded: LoadedModel, signature: Signature, site: Site) -> bool:
    """Return True when int32 edges give the same answers as int64 ones and take no more memory.

    They may not where the model computes with them: on graphs larger than those tried, the numbers
    would leave int32's range. `site` is where the model runs.
    """
    try:
        for _, inputs in _graphs(loaded.spec, signature):
            with _NoLargeIntegers():  # type: ignore[no-untyped-call]
                found = loaded.run(_narrow(inputs))
            if not torch.equal(found, loaded.run(inputs)):
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


def needs_exact_sizes(loaded: LoadedModel, signature: Signature) -> str:
    """Say why nodes and pairs behind a graph's last ones change its answers.

    Empty when they change none. What is tried in spare room is what ``spare_value`` says, and
    another number in the place of floats. `loaded` runs by `csr` on the processor, where a node
    that does not exist is only an error, with the operators that GPUs have.
    """
    spec = loaded.spec
    if spec.interface is None and (signature.rows != "node" or "batch" in spec.inputs):
        return "it answers for whole graphs"
    for slot in spec.interface.inputs if spec.interface is not None else ():
        if not _may_be_zero(slot):
            return f"0 is no value of '{slot.name}'"
    sizing = sizing_of(spec.interface)
    compared = False
    with kernels.as_on_devices():
        for name, inputs in _graphs(spec, signature):
            try:
                expected = loaded.outputs(inputs)
            except Exception:
                continue
            for nodes, number in _TRIED:
                try:
                    found = loaded.outputs(_with_spare_room(inputs, sizing, nodes, number))
                except Exception as error:
                    return f"on a graph that is {name} it raises {type(error).__name__}: {error}"
                if not all(map(_agree_but_for_room, found, expected)):
                    return f"its answers for a graph that is {name} depend on what is behind it"
            compared = True
    return "" if compared else "it answers no probe graph"


def spare_value(sized: SizedInput, dtype: torch.dtype, number: float = _SPARE_FLOAT) -> float | int:
    """Return what an input holds behind a graph's last nodes and pairs.

    Indices point to no node (``kernels.NO_EDGE``), floats are `number`, and all else is 0.
    """
    if sized.points_to:
        return kernels.NO_EDGE
    return number if dtype.is_floating_point else 0


def _may_be_zero(slot: InputSlot) -> bool:
    """Return True unless zeros, which spare room holds, are no values of the input."""
    lows: list[float] = [low for low, _ in slot.columns] or [slot.low or 0]
    return not slot.is_kind or max(lows) <= 0


def _agree_but_for_room(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True when both agree in the shape of `expected`."""
    cut = found[tuple(slice(size) for size in expected.shape)]
    return cut.shape == expected.shape and is_close(cut, expected)


class _NoLargeIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises OverflowError for an int32 result that may be much larger than what it is made of."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler to keep it from compiling this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        grows = func.overloadpacket in _GROWING or (kwargs or {}).get("alpha", 1) != 1
        if grows and isinstance(result, torch.Tensor) and result.dtype == torch.int32:
            raise OverflowError(f"{func} of int32")
        return result


def _with_spare_room(inputs: Inputs, sizing: Sizing, nodes: int, number: float) -> Inputs:
    """Return the inputs with so many nodes more of each kind, and pairs; their floats are `number`.

    Of a kind without nodes there are always spare ones, as no bucket is empty.
    """
    found = dict(inputs)
    for name, sized in sizing.inputs.items():
        if (value := inputs.get(name)) is None:
            continue
        shape = list(value.shape)
        if sized.symbol not in sizing.nodes:
            shape[sized.axis] = _SPARE_EDGES
        else:
            shape[sized.axis] = nodes if shape[sized.axis] else _SPARE_NODES
        more = torch.full(shape, spare_value(sized, value.dtype, number), dtype=value.dtype)
        found[name] = torch.cat([value, more], dim=sized.axis)
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
