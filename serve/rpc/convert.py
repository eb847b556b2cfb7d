"""Between wire messages and ``serve.server.api``: what a request must look like, and the answer.

Structure is checked here, by shapes and byte counts alone, so that nothing is allocated for what
a request merely claims; the values (index ranges, NaN) are checked when the request is prepared.
Every refusal is an InvalidInput that names the tensor or parameter, and the rule.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from serve.errors import InvalidInput, Unsupported
from serve.inputs import COUNTED_BY, INPUTS
from serve.pb import grpc_service_pb2 as pb
from serve.rpc.options import MAX_TEXT, decode_options, effective_timeout_ns, region_part
from serve.server.api import NODE_IDS, InferCall, InferResult, ModelInfo, Tensor, TensorSpec
from serve.server.regions import RegionPart, Regions
from serve.wire.messages import (
    DATATYPES,
    REGION,
    Datatype,
    ParameterValue,
    Places,
    WireOutput,
    WireRequest,
    WireTensor,
    array_bytes,
    encode_response,
)

OUTPUT = "output"

#: Inputs that may come in another datatype than the model's own.
_ALSO = {name: each.also for name, each in INPUTS.items() if each.also}


def decode_call(
    request: WireRequest,
    model: ModelInfo,
    regions: Regions,
    arrived_ns: int,
    remaining_s: float,
) -> InferCall:
    """The call that `request` makes of `model`.

    Args:
        request: As ``wire.decode_request`` gives it; its raw contents are kept in the tensors.
        model: Whose inputs are required.
        regions: Where tensors may lie instead of in the message.
        arrived_ns: When the transport got it.
        remaining_s: What is left of the gRPC deadline.

    Raises:
        InvalidInput: The request is malformed.
        DeadlineExceeded: It came after its own deadline.
        UnknownName: It names a shared memory region that is not registered.
        Unsupported: It needs an extension that is not offered.
    """
    if len(request.request_id) > MAX_TEXT:
        raise InvalidInput(
            f"id: {len(request.request_id)} characters, at most {MAX_TEXT} are taken"
        )
    options = decode_options(request.parameters)
    tensors = _tensors(request.inputs, request.raws, model, regions)
    output_place = _output_place(request.outputs, model, regions)
    _check_together(tensors, options.graph, model)
    if output_place is not None:
        output_place.require_room(_least_output_bytes(tensors, model))
    return InferCall(
        model=request.model,
        version=request.version,
        tensors=tensors,
        arrived_ns=arrived_ns,
        client_id=request.request_id,
        qos_target_ns=None if options.qos_target_us is None else options.qos_target_us * 1000,
        timeout_ns=effective_timeout_ns(options.timeout_us, remaining_s),
        priority=options.priority,
        tenant=options.tenant,
        seed=options.seed,
        graph=options.graph,
        output_place=output_place,
        fanouts=options.fanouts,
    )


def encode_answer(request_id: str, result: InferResult, place: RegionPart | None = None) -> bytes:
    """The serialized response: `output` in raw form, and what happened as parameters.

    With a `place` the output goes there, and its raw form is empty. Raises InvalidInput when it
    does not fit.
    """
    record, output = result.record, result.output
    places = None
    if place is not None:
        place.write(array_bytes(output))
        places = Places(place.region.name, {OUTPUT: place.start_bytes}, place.start_bytes)
    facts: dict[str, ParameterValue | None] = {
        "request_uid": record.request_uid,
        "queue_us": record.queue_ns // 1000,
        "prepare_us": record.prepare_ns // 1000,
        "run_us": record.run_ns // 1000,
        "group_id": record.group_id,
        "group_size": record.group_size,
        "merged": record.merged,
        "policy": record.policy,
        "discipline": record.discipline,
        "lane": record.lane,
        "executor": record.executor,
        "solo_estimate_us": record.solo_estimate_ns // 1000,
        "qos_target_us": record.qos_target_ns // 1000,
        "qos_violated": record.violated,
        "pmc_estimate_bytes": record.pmc_estimate_bytes,
        "pmc_measured_bytes": record.pmc_measured_bytes,
    }
    if record.graph:
        facts |= {
            "graph": record.graph,
            "graph_version": record.graph_version,
            "seed": record.seed,
            "sampled_nodes": record.num_nodes,
            "sampled_edges": record.num_edges,
        }
    return encode_response(
        record.model,
        {OUTPUT: output},
        version=record.version,
        request_id=request_id or record.request_uid,
        parameters=facts,
        places=places,
    )


# -- tensors ----------------------------------------------------------------------------------


def _tensors(
    inputs: Sequence[WireTensor], raws: Sequence[memoryview], model: ModelInfo, regions: Regions
) -> dict[str, Tensor]:
    """The inputs by name, each as `model` wants it and with as many bytes as its shape says."""
    sent = [not (wired.parameters and REGION in wired.parameters) for wired in inputs]
    if raws and len(raws) != sum(sent):
        raise InvalidInput(
            f"raw_input_contents: {len(raws)} entries for {sum(sent)} inputs; "
            "give one for each input that is not in shared memory, or none"
        )
    unread = iter(raws)
    specs = {spec.name: spec for spec in model.inputs}
    tensors: dict[str, Tensor] = {}
    for position, wired in enumerate(inputs):
        name = wired.name
        spec = specs.get(name)
        if spec is None:
            if name != NODE_IDS.name:
                raise InvalidInput(
                    f"inputs[{position}]: model '{model.name}' has no input '{name}'; "
                    f"it takes {', '.join(specs)}"
                )
            spec = NODE_IDS
        if name in tensors:
            raise InvalidInput(f"inputs[{position}]: tensor '{name}' is given twice")
        kind = _datatype(wired.datatype, spec)
        shape = wired.shape
        _check_shape(shape, spec)
        data: bytes | memoryview | RegionPart
        if not sent[position]:
            data = region_part(wired.parameters, f"tensor '{name}'", regions)
        elif raws:
            if wired.contents is not None and wired.contents.ListFields():
                raise InvalidInput(
                    f"tensor '{name}': has contents beside raw_input_contents; use one of them"
                )
            data = next(unread)
        else:
            data = _typed_bytes(wired.contents, kind, shape, name)
        size_bytes = prod(shape) * kind.size
        if len(data) != size_bytes:
            raise InvalidInput(
                f"tensor '{name}': {len(data)} bytes, but shape {list(shape)} of "
                f"{kind.name} needs {size_bytes}"
            )
        if spec is NODE_IDS and isinstance(data, RegionPart):
            data = b"".join(bytes(piece) for piece in data.pieces())
        tensors[name] = Tensor(wired.datatype, shape, data)
    return tensors


def _datatype(name: str, spec: TensorSpec) -> Datatype:
    """The element type `name`, which must be the one `spec` asks for or its stand-in."""
    kind = DATATYPES.get(name)
    if kind is None:
        raise InvalidInput(
            f"tensor '{spec.name}': unknown datatype '{name}'; known: {', '.join(DATATYPES)}"
        )
    if name != spec.datatype and name != _ALSO.get(spec.name):
        also = f" or {_ALSO[spec.name]}" if spec.name in _ALSO else ""
        raise InvalidInput(
            f"tensor '{spec.name}': datatype {name}, but {spec.datatype}{also} is required"
        )
    return kind


def _check_shape(shape: tuple[int, ...], spec: TensorSpec) -> None:
    """It must match that of `spec` and be no lie that costs no bytes."""
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
        # Rows without columns take no bytes, so any number of rows could be claimed.
        if axis > 0 and dim == 0 and required == -1 and spec.name != "edge_index":
            raise InvalidInput(
                f"tensor '{spec.name}': 0 on axis {axis} of shape {list(shape)}, but at least "
                "1 is required"
            )


def _typed_bytes(
    contents: pb.InferTensorContents | None, kind: Datatype, shape: tuple[int, ...], name: str
) -> bytes:
    """Elements given as numbers instead of raw bytes."""
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


def _output_place(
    outputs: Sequence[WireOutput], model: ModelInfo, regions: Regions
) -> RegionPart | None:
    """Where the request wants its output; None: in the answer."""
    place = None
    for position, output in enumerate(outputs):
        if output.name != OUTPUT:
            raise InvalidInput(
                f"outputs[{position}]: model '{model.name}' has no output '{output.name}'; "
                f"it has {OUTPUT}"
            )
        if output.parameters and "classification" in output.parameters:
            raise Unsupported(f"output '{OUTPUT}': 'classification' is not offered")
        if output.parameters and REGION in output.parameters:
            place = region_part(output.parameters, f"output '{OUTPUT}'", regions)
    return place


def _least_output_bytes(tensors: Mapping[str, Tensor], model: ModelInfo) -> int:
    """What the output takes; 0 where only the run will tell, as for graphs of a batch."""
    asked = tensors.get(NODE_IDS.name) or tensors["x"]
    rows = asked.shape[0]
    if model.rows == "graph":
        rows = 0 if "batch" in tensors else min(1, rows)
    return rows * model.outputs[0].shape[1] * 4 if model.rows is not None else 0


def _check_together(tensors: Mapping[str, Tensor], graph: str | None, model: ModelInfo) -> None:
    """Rules over more than one tensor."""
    if (graph is None) != (NODE_IDS.name not in tensors):
        given, missing = ("parameter 'graph'", "tensor 'node_ids'")
        if graph is None:
            given, missing = missing, given
        raise InvalidInput(f"{given} is given without {missing}; a resident graph needs both")
    if graph is not None:
        for name in tensors:
            if name != NODE_IDS.name:
                raise InvalidInput(
                    f"tensor '{name}': not taken beside 'node_ids'; graph '{graph}' has its own"
                )
        return
    for spec in model.inputs:
        if not spec.optional and spec.name not in tensors:
            raise InvalidInput(
                f"tensor '{spec.name}' is missing; model '{model.name}' requires "
                f"{', '.join(s.name for s in model.inputs if not s.optional)}"
            )
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
