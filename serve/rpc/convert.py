"""Conversion between wire messages and the calls and results of ``serve.server.api``.

Decoding is one path: ``parameters`` checks the request parameters, ``tensors`` the inputs and the
place of the output, and ``decode_call`` puts both together.
"""

from collections.abc import Sequence

from serve.access.principal import ANYBODY, Principal
from serve.errors import InvalidInput
from serve.ipc.messages import TensorRef
from serve.obs.record import RequestRecord
from serve.rpc.parameters import MAX_TEXT, decode_parameters
from serve.rpc.tensors import decode_tensors, output_place
from serve.server.api import InferCall, InferResult, ModelInfo
from serve.server.regions import RegionPart, Regions
from serve.wire.messages import (
    ParameterValue,
    Places,
    WireRequest,
    array_bytes,
    encode_response,
    encode_response_head,
)

#: What the answer to a part of a request tells of the graph, see ``shared_column.graph_state``.
GRAPH_STATE = "graph_state"


def decode_call(
    request: WireRequest,
    model: ModelInfo,
    regions: Regions,
    arrived_ns: int,
    remaining_s: float,
    caller: Principal = ANYBODY,
) -> InferCall:
    """Return the engine call that `request` asks for.

    Args:
        request: Decoded message; the call's tensors keep views of its raw contents.
        model: Model that the request is for.
        regions: Registered shared memory, which may hold tensors instead of the message.
        arrived_ns: Arrival at the transport, on the server's monotonic clock.
        remaining_s: Seconds until the gRPC deadline.
        caller: Whom the request comes from; it sees its own regions only.

    Raises:
        InvalidInput: The request is malformed; names the tensor or parameter, and the rule.
        NotPermitted: The caller's tenant may not ask for this.
        DeadlineExceeded: The request arrived after its own deadline.
        UnknownName: It names a shared memory region that is not registered.
        Unsupported: It needs an extension that this server does not offer.
    """
    if len(request.request_id) > MAX_TEXT:
        raise InvalidInput(
            f"id: {len(request.request_id)} characters, at most {MAX_TEXT} are taken"
        )
    parameters = decode_parameters(request.parameters, remaining_s, caller)
    regions = regions.of(caller.name, sees_all=caller.is_admin)
    tensors = decode_tensors(request, parameters.graph, model, regions)
    return InferCall(
        model=request.model,
        version=request.version,
        tensors=tensors,
        arrived_ns=arrived_ns,
        client_id=request.request_id,
        output_place=output_place(request.outputs, tensors, model, regions),
        wanted=tuple(output.name for output in request.outputs),
        chosen="" if request.version else model.version,
        **parameters._asdict(),
    )


def encode_answer(
    request_id: str,
    result: InferResult,
    place: RegionPart | None = None,
    node: str = "",
    more: dict[str, ParameterValue | None] | None = None,
) -> bytes:
    """Serialize the response: the outputs in raw form, the QoS facts as parameters.

    `node` is the server's name, told where it has one among others, and `more` facts go with the
    others. With a `place`, the only output
    is written there and its raw form is left empty. Raises InvalidInput when it does not fit.
    """
    record, outputs = result.record, result.outputs
    places = None
    if place is not None:
        ((name, output),) = outputs.items()
        place.write(array_bytes(output))
        places = Places(place.region.name, {name: place.start_bytes}, place.start_bytes)
    return encode_response(
        record.model,
        outputs,
        version=record.version,
        request_id=request_id or record.request_uid,
        parameters=qos_facts(record, node) | (more or {}),
        places=places,
    )


def split_facts(call: InferCall, result: InferResult) -> dict[str, ParameterValue | None]:
    """Return what is told of a request that may be split, or that is a part of one."""
    if call.is_part:
        return {GRAPH_STATE: result.graph_state}
    if not call.by_home:
        return {}
    return {"split_parts": 1 if call.split is None else call.split.count}


def encode_answer_head(
    request_id: str, record: RequestRecord, outputs: Sequence[TensorRef], node: str = ""
) -> bytes:
    """Serialize the response up to the raw forms of its outputs, which follow in this order."""
    return encode_response_head(
        record.model,
        [(ref.name, ref.dtype, ref.shape) for ref in outputs],
        version=record.version,
        request_id=request_id or record.request_uid,
        parameters=qos_facts(record, node),
    )


def qos_facts(record: RequestRecord, node: str = "") -> dict[str, ParameterValue | None]:
    """Return what the client is told of its request; `node` is the server's name, if it has one."""
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
    if record.front_ns:
        facts["front_us"] = record.front_ns // 1000
    if node:
        facts |= {"node": node, "hops": record.hops}
    if record.nonfinite_values:
        facts["nonfinite_values"] = record.nonfinite_values
    if record.graph:
        facts |= {
            "graph": record.graph,
            "graph_version": record.graph_version,
            "seed": record.seed,
            "sampled_nodes": record.num_nodes,
            "sampled_edges": record.num_edges,
        }
    return facts
