"""Tensors of an inference request: checked against the model that they are for.

The checks use names, datatypes, shapes and byte counts alone, so that nothing is allocated for a
size that a request merely claims. Values (index ranges, NaN) are checked when the request is
prepared. Every refusal is an InvalidInput that names the tensor and the rule.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from serve.errors import InvalidInput, UnknownName, Unsupported
from serve.inputs import COUNTED_BY, INPUTS
from serve.pb import grpc_service_pb2 as pb
from serve.rpc.parameters import Parameters, integer, text
from serve.server.api import NODE_IDS, ModelInfo, Tensor, TensorSpec, node_ids_of
from serve.server.regions import RegionPart, Regions
from serve.typed_names import name_parts
from serve.wire.messages import (
    DATATYPES,
    REGION,
    REGION_OFFSET,
    REGION_SIZE,
    Datatype,
    WireOutput,
    WireRequest,
    WireTensor,
)

#: Second datatype that an input of the short form may have, by input name.
_ALSO = {name: each.also for name, each in INPUTS.items() if each.also}


def decode_tensors(
    request: WireRequest, graph: str | None, model: ModelInfo, regions: Regions
) -> dict[str, Tensor]:
    """Return the inputs of `request` by name, checked alone and together.

    Args:
        request: Decoded message; the returned tensors keep views of its raw contents.
        graph: Resident graph that the request names, if any.
        model: Model that the request is for.
        regions: Registered shared memory, which may hold tensors instead of the message.

    Raises:
        InvalidInput: An input is malformed or missing, or does not fit the model or the others.
        UnknownName: It names a shared memory region that is not registered.
        Unsupported: It needs shared memory, which this server does not offer.
    """
    raws = raw_contents(request)
    specs = {spec.name: spec for spec in model.inputs}
    tensors: dict[str, Tensor] = {}
    for position, wired in enumerate(request.inputs):
        spec = specs.get(wired.name)
        if spec is None:
            base, node_type = name_parts(wired.name)
            if base != NODE_IDS.name:
                raise InvalidInput(
                    f"inputs[{position}]: model '{model.name}' has no input '{wired.name}'; "
                    f"it takes {', '.join(specs)}"
                )
            spec = node_ids_of(node_type)
        if wired.name in tensors:
            raise InvalidInput(f"inputs[{position}]: tensor '{wired.name}' is given twice")
        tensors[wired.name] = _tensor(wired, spec, raws[position], model, regions)
    _check_together(tensors, graph, model)
    return tensors


def raw_contents(request: WireRequest) -> list[memoryview | None]:
    """Return the raw form of each input; None for one in shared memory or sent as numbers.

    Raises InvalidInput when there are not as many as inputs that could have one.
    """
    sent = [not _in_region(wired) for wired in request.inputs]
    if request.raws and len(request.raws) != sum(sent):
        raise InvalidInput(
            f"raw_input_contents: {len(request.raws)} entries for {sum(sent)} inputs; "
            "give one for each input that is not in shared memory, or none"
        )
    unread = iter(request.raws)
    return [next(unread, None) if one else None for one in sent]


def output_place(
    outputs: Sequence[WireOutput],
    tensors: Mapping[str, Tensor],
    model: ModelInfo,
    regions: Regions,
) -> RegionPart | None:
    """Return where in shared memory the client wants its output; None to send it in the answer.

    Raises the errors of ``decode_tensors``, also when the output cannot fit there.
    """
    place = None
    names = [spec.name for spec in model.outputs]
    for position, output in enumerate(outputs):
        if output.name not in names:
            raise InvalidInput(
                f"outputs[{position}]: model '{model.name}' has no output '{output.name}'; "
                f"it has {', '.join(names)}"
            )
        if output.parameters and "classification" in output.parameters:
            raise Unsupported(f"output '{output.name}': 'classification' is not offered")
        if output.parameters and REGION in output.parameters:
            if len(names) > 1:
                raise Unsupported(
                    f"output '{output.name}': only a model's single output goes to shared memory"
                )
            place = _region_part(output.parameters, f"output '{output.name}'", regions)
    if place is not None and model.interface is None:
        place.require_room(_least_output_bytes(tensors, model))
    return place


def _tensor(
    wired: WireTensor,
    spec: TensorSpec,
    raw: memoryview | None,
    model: ModelInfo,
    regions: Regions,
) -> Tensor:
    """Return one input, with exactly as many bytes as its shape says."""
    kind = _datatype(wired.datatype, spec, _also(spec, model))
    shape = wired.shape
    _check_shape(shape, spec)
    data: bytes | memoryview | RegionPart
    if _in_region(wired):
        data = _region_part(wired.parameters, f"tensor '{wired.name}'", regions)
    elif raw is not None:
        if wired.contents is not None and wired.contents.ListFields():
            raise InvalidInput(
                f"tensor '{wired.name}': has contents beside raw_input_contents; use one of them"
            )
        data = raw
    else:
        data = _typed_bytes(wired.contents, kind, shape, wired.name)
    size_bytes = prod(shape) * kind.size
    if len(data) != size_bytes:
        raise InvalidInput(
            f"tensor '{wired.name}': {len(data)} bytes, but shape {list(shape)} of "
            f"{kind.name} needs {size_bytes}"
        )
    if _is_node_ids(spec.name) and isinstance(data, RegionPart):
        data = b"".join(bytes(piece) for piece in data.pieces())
    return Tensor(wired.datatype, shape, data)


def _in_region(wired: WireTensor) -> bool:
    return bool(wired.parameters) and REGION in wired.parameters


def _region_part(parameters: Parameters, of: str, regions: Regions) -> RegionPart:
    """Return the part of a shared memory region that a tensor's parameters name.

    Raises InvalidInput, UnknownName or Unsupported; their messages name the tensor as `of`.
    """
    try:
        size_bytes = integer(parameters, REGION_SIZE, 0, 2**63 - 1)
        if size_bytes is None:
            raise InvalidInput(f"parameter '{REGION_SIZE}' is missing")
        offset_bytes = integer(parameters, REGION_OFFSET, 0, 2**63 - 1) or 0
        return regions.part(text(parameters, REGION) or "", offset_bytes, size_bytes)
    except (InvalidInput, UnknownName, Unsupported) as error:
        raise type(error)(f"{of}: {error}") from error


def _also(spec: TensorSpec, model: ModelInfo) -> str | None:
    """Return a second datatype that requests may send: INT32 for INT64 indices of any model."""
    if model.interface is None:
        return _ALSO.get(spec.name)
    slot = model.interface.by_name.get(spec.name)
    return "INT32" if slot is not None and slot.index and slot.datatype == "INT64" else None


def _datatype(name: str, spec: TensorSpec, second: str | None) -> Datatype:
    """Return the element type `name`; raises InvalidInput unless it is `spec`'s or the second."""
    kind = DATATYPES.get(name)
    if kind is None:
        raise InvalidInput(
            f"tensor '{spec.name}': unknown datatype '{name}'; known: {', '.join(DATATYPES)}"
        )
    if name not in (spec.datatype, second):
        also = f" or {second}" if second else ""
        raise InvalidInput(
            f"tensor '{spec.name}': datatype {name}, but {spec.datatype}{also} is required"
        )
    return kind


def _check_shape(shape: tuple[int, ...], spec: TensorSpec) -> None:
    """Raise InvalidInput unless `shape` matches `spec` and costs bytes for what it claims."""
    if len(shape) != len(spec.shape):
        raise InvalidInput(
            f"tensor '{spec.name}': rank {len(shape)} (shape {list(shape)}), but rank "
            f"{len(spec.shape)} {list(spec.shape)} is required"
        )
    for axis, (dim, required) in enumerate(zip(shape, spec.shape, strict=True)):
        if dim < 0:
            raise InvalidInput(
                f"tensor '{spec.name}': shape {list(shape)} is negative on axis {axis}"
            )
        if required not in (-1, dim):
            raise InvalidInput(
                f"tensor '{spec.name}': {dim} on axis {axis} of shape {list(shape)}, but "
                f"{required} is required"
            )
        # Rows without columns take no bytes, so a request could claim any number of them.
        if axis > 0 and dim == 0 and required == -1 and -1 in spec.shape[:axis]:
            raise InvalidInput(
                f"tensor '{spec.name}': 0 on axis {axis} of shape {list(shape)}, but at least "
                "1 is required"
            )


def _typed_bytes(
    contents: pb.InferTensorContents | None, kind: Datatype, shape: tuple[int, ...], name: str
) -> bytes:
    """Return the bytes of elements that were sent as numbers instead of in raw form."""
    if contents is None:
        contents = pb.InferTensorContents()
    for held, _ in contents.ListFields():
        if held.name != kind.contents:
            raise InvalidInput(
                f"tensor '{name}': contents.{held.name} is given, but {kind.name} belongs "
                f"in {kind.contents or 'raw_input_contents'}"
            )
    values = getattr(contents, kind.contents) if kind.contents else ()
    if len(values) != prod(shape):
        raise InvalidInput(
            f"tensor '{name}': {len(values)} elements in contents, but shape {list(shape)} "
            f"needs {prod(shape)}"
        )
    try:
        return np.array(values, kind.dtype).tobytes()
    except OverflowError as error:
        raise InvalidInput(f"tensor '{name}': contents do not fit {kind.name}: {error}") from error


def _least_output_bytes(tensors: Mapping[str, Tensor], model: ModelInfo) -> int:
    """Return a lower bound of the output's size, 0 when only the run can tell."""
    asked = next((each for name, each in tensors.items() if _is_node_ids(name)), None)
    asked = asked or tensors["x"]
    rows = asked.shape[0]
    if model.rows == "graph":
        # The run alone knows how many graphs a batch holds.
        rows = 0 if "batch" in tensors else min(1, rows)
    return rows * model.outputs[0].shape[1] * 4 if model.rows is not None else 0


def _is_node_ids(name: str) -> bool:
    return name_parts(name)[0] == NODE_IDS.name


def _check_together(tensors: Mapping[str, Tensor], graph: str | None, model: ModelInfo) -> None:
    """Raise InvalidInput when a tensor is missing or two of them disagree."""
    ids = [name for name in tensors if _is_node_ids(name)]
    if (graph is None) != (not ids):
        given, missing = ("parameter 'graph'", "tensor 'node_ids'")
        if graph is None:
            given, missing = missing, given
        raise InvalidInput(f"{given} is given without {missing}; a resident graph needs both")
    if graph is not None:
        for name in tensors:
            if name not in ids:
                raise InvalidInput(
                    f"tensor '{name}': not taken beside 'node_ids'; graph '{graph}' has its own"
                )
        if len(ids) > 1:
            raise InvalidInput(
                f"tensors {', '.join(ids)}: a request asks for nodes of one type; send one for each"
            )
        return
    for spec in model.inputs:
        if not spec.optional and spec.name not in tensors:
            raise InvalidInput(
                f"tensor '{spec.name}' is missing; model '{model.name}' requires "
                f"{', '.join(s.name for s in model.inputs if not s.optional)}"
            )
    if model.interface is not None:
        model.interface.counts_of({name: tensor.shape for name, tensor in tensors.items()})
        return
    for name, each in INPUTS.items():
        per, axis = each.per
        counted, counted_axis = COUNTED_BY[per]
        if name != counted and name in tensors and counted in tensors:
            rows, count = tensors[name].shape[axis], tensors[counted].shape[counted_axis]
            if rows != count:
                things = "edges" if per == "E" else "nodes"
                raise InvalidInput(
                    f"tensor '{name}': {rows} rows, but '{counted}' has {count} {things}"
                )
    x, edges = tensors.get("x"), tensors.get("edge_index")
    if x is not None and edges is not None and x.shape[0] == 0 and edges.shape[1] > 0:
        raise InvalidInput(
            f"tensor 'edge_index': {edges.shape[1]} edges in a graph of 0 nodes ('x' is empty)"
        )
