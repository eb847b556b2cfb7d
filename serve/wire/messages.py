"""Codec of inference messages, for both ends: numpy arrays in, numpy arrays out.

``serve.native`` writes and reads common messages in one pass, and copies a tensor only into the
message that is sent. The protobuf library handles all other messages (``serve.wire.protobuf``).
Both produce the same wire format, so either end may be another implementation.

Messages are bytes here: give `None` as serializer and deserializer to gRPC. Which tensors a model
takes is checked in ``serve.rpc.tensors``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from serve import native
from serve.wire import protobuf as wire_library
from serve.wire.fields import WireError as WireError
from serve.wire.protobuf import MOST_TENSORS as MOST_TENSORS
from serve.wire.protobuf import ParameterValue as ParameterValue
from serve.wire.protobuf import Unsigned as Unsigned

Array = np.ndarray[Any, np.dtype[Any]]
#: gRPC method paths whose messages this module writes and reads.
INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

#: Parameters of a tensor in a shared memory region.
REGION = "shared_memory_region"
REGION_OFFSET = "shared_memory_offset"
REGION_SIZE = "shared_memory_byte_size"

#: Trailer with the time after which to send a refused request again, in ms.
RETRY_TRAILER = "grpc-retry-pushback-ms"
#: Default limit of a gRPC message, for clients and for the server, in both directions.
MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Datatype:
    """One of the protocol's element types."""

    name: str
    #: Bytes of one element; 0 for BYTES, whose elements differ.
    size: int
    #: Little-endian numpy dtype; None where numpy has none (BF16, BYTES).
    dtype: np.dtype[Any] | None
    #: Field of `InferTensorContents` that may hold it; empty for raw form only.
    contents: str


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, size, np.dtype(code) if code else None, contents)
    for name, size, code, contents in (
        ("BOOL", 1, "?", "bool_contents"),
        ("UINT8", 1, "u1", "uint_contents"),
        ("UINT16", 2, "<u2", "uint_contents"),
        ("UINT32", 4, "<u4", "uint_contents"),
        ("UINT64", 8, "<u8", "uint64_contents"),
        ("INT8", 1, "i1", "int_contents"),
        ("INT16", 2, "<i2", "int_contents"),
        ("INT32", 4, "<i4", "int_contents"),
        ("INT64", 8, "<i8", "int64_contents"),
        ("FP16", 2, "<f2", ""),
        ("FP32", 4, "<f4", "fp32_contents"),
        ("FP64", 8, "<f8", "fp64_contents"),
        ("BF16", 2, "", ""),
        ("BYTES", 0, "", "bytes_contents"),
    )
}
_NAMES = {kind.dtype: name for name, kind in DATATYPES.items() if kind.dtype is not None}


def datatype_of(array: Array) -> str:
    """Return the protocol's name for the dtype of `array`; raises WireError if it has none."""
    name = _NAMES.get(array.dtype) or _NAMES.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise WireError(f"no wire datatype for numpy {array.dtype}")
    return name


class WireTensor(NamedTuple):
    """Description of an input or output tensor; its raw contents are elsewhere."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    #: By name; None for a parameter that holds no value.
    parameters: dict[str, ParameterValue | None]
    #: An `InferTensorContents` message, or None.
    contents: Any = None


class WireOutput(NamedTuple):
    """Output that a request asks for."""

    name: str
    parameters: dict[str, ParameterValue | None]


class Places(NamedTuple):
    """Places of a message's tensors in a shared memory region."""

    region: str
    #: From the start of the region, by tensor name.
    offsets_bytes: Mapping[str, int]
    #: Offset of the block that holds them all.
    block_bytes: int


# -- requests ---------------------------------------------------------------------------------


class WireRequest(NamedTuple):
    """Decoded `ModelInferRequest`."""

    model: str
    version: str
    request_id: str
    parameters: Mapping[str, ParameterValue | None]
    inputs: list[WireTensor]
    outputs: list[WireOutput]
    #: Views of the message at any alignment: copy them as bytes before reading numbers.
    raws: list[memoryview]


def encode_request(
    model: str,
    tensors: Mapping[str, Array],
    *,
    version: str = "",
    request_id: str = "",
    parameters: Mapping[str, ParameterValue | None] | None = None,
    places: Places | None = None,
) -> bytes:
    """Serialize a `ModelInferRequest` with all `tensors` in raw form, or at `places`, in order.

    Arrays may have any layout and byte order; contiguous little-endian ones are copied once.
    Parameters may be bool, int, str or float; None is not sent. Raises WireError.
    """
    heads, raws = _tensors(tensors, places)
    return _encode(True, model, version, request_id, parameters, heads, raws)


def encode_wire_request(request: WireRequest) -> bytes:
    """Serialize a request that was decoded or made elsewhere. Raises WireError."""
    raws = [memoryview(raw) for raw in request.raws]
    head = request.model, request.version, request.request_id, request.parameters
    if not request.outputs:
        return _encode(True, *head, request.inputs, raws)
    return wire_library.encode_infer(True, *head, request.inputs, raws, request.outputs)


def decode_request(message: bytes | memoryview) -> WireRequest:
    """Decode the request in `message`; raises WireError."""
    found = native.decode_infer(True, message)
    if found is None:
        found = wire_library.decode_infer(True, message)
    model, version, request_id, parameters, inputs, outputs, raws = found
    return WireRequest(
        model,
        version,
        request_id,
        parameters,
        [WireTensor._make(tensor) for tensor in inputs],
        [WireOutput._make(output) for output in outputs],
        raws,
    )


# -- responses --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Response:
    """Decoded `ModelInferResponse`."""

    model: str
    version: str
    request_id: str
    #: Read-only views of the message, by output name.
    outputs: dict[str, Array]
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


class WireResponse(NamedTuple):
    """Decoded `ModelInferResponse`, whose outputs are not read."""

    model: str
    version: str
    request_id: str
    parameters: Mapping[str, ParameterValue | None]
    outputs: list[WireTensor]
    #: Views of the message; empty for outputs in shared memory.
    raws: list[memoryview]


def encode_response(
    model: str,
    outputs: Mapping[str, Array],
    *,
    version: str = "",
    request_id: str = "",
    parameters: Mapping[str, ParameterValue | None] | None = None,
    places: Places | None = None,
) -> bytes:
    """Serialize a `ModelInferResponse`; with `places` the raw forms of its outputs are empty."""
    heads, raws = _tensors(outputs, places)
    if places is not None:
        raws = [memoryview(b"")] * len(heads)
    return _encode(False, model, version, request_id, parameters, heads, raws)


def encode_response_head(
    model: str,
    outputs: Sequence[tuple[str, str, tuple[int, ...]]],
    *,
    version: str,
    request_id: str,
    parameters: Mapping[str, ParameterValue | None],
) -> bytes:
    """Serialize a `ModelInferResponse` up to the raw forms of its outputs.

    `outputs` are name, numpy's name of the dtype, and shape of each.
    """
    heads = [WireTensor(name, _NAMES[np.dtype(dtype)], shape, {}) for name, dtype, shape in outputs]
    return _encode(False, model, version, request_id, parameters, heads, [])


def decode_wire_response(message: bytes | memoryview) -> WireResponse:
    """Decode the response in `message`; raises WireError, also for outputs not in raw form."""
    found = native.decode_infer(False, message)
    if found is None:
        found = wire_library.decode_infer(False, message)
    model, version, request_id, parameters, tensors, _, raws = found
    if len(raws) != len(tensors):
        raise WireError(f"{len(tensors)} outputs but {len(raws)} raw_output_contents")
    heads = [WireTensor._make(tensor) for tensor in tensors]
    return WireResponse(model, version, request_id, parameters, heads, raws)


def decode_response(message: bytes | memoryview) -> Response:
    """Decode the response in `message` and read its outputs; raises WireError."""
    model, version, request_id, parameters, heads, raws = decode_wire_response(message)
    outputs = {}
    for (name, datatype, shape, *_), raw in zip(heads, raws, strict=True):
        kind = DATATYPES.get(datatype)
        if kind is None or kind.dtype is None:
            raise WireError(f"output '{name}': cannot read datatype {datatype!r}")
        try:
            outputs[name] = np.frombuffer(raw, kind.dtype).reshape(shape)
        except ValueError as error:
            raise WireError(f"output '{name}': {error}") from error
    held = {name: "" if value is None else value for name, value in parameters.items()}
    return Response(model, version, request_id, outputs, held)


def decode_facts(message: bytes) -> dict[str, ParameterValue]:
    """Return the parameters of a response whose raw contents may be left out; raises WireError."""
    found = native.decode_infer(False, message)
    if found is None:
        found = wire_library.decode_infer(False, message)
    return {name: "" if value is None else value for name, value in found[3].items()}


@dataclass(frozen=True, slots=True)
class Failure:
    """Error that a stream carries instead of an answer."""

    message: str
    #: Id of the request that failed; empty when the server does not say.
    request_id: str = ""
    #: gnnserve sends `status` (gRPC's name of the code) and, if retrying helps, `retry_after_ms`.
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


def encode_stream_answer(answer: bytes | Failure) -> bytes:
    """Serialize a `ModelStreamInferResponse` with a serialized response or an error."""
    if isinstance(answer, bytes):
        return wire_library.wrap_answer(answer)
    return wire_library.encode_failure(answer.message, answer.request_id, answer.parameters)


def decode_stream_answer(message: bytes) -> Response | Failure:
    """Decode a message of a stream; raises WireError."""
    error, answer = wire_library.unwrap_answer(message)
    if answer is not None and not error:
        return decode_response(answer)
    return Failure(
        error or "an empty message of the stream", *wire_library.decode_failure(answer or b"")
    )


# -- bytes ------------------------------------------------------------------------------------


def array_bytes(array: Array) -> memoryview:
    """Return the elements of `array`, row-major and little-endian, without a copy if possible."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def _tensors(
    tensors: Mapping[str, Array], places: Places | None
) -> tuple[list[WireTensor], list[memoryview]]:
    """Return the descriptions of `tensors` and their raw contents."""
    heads, raws = [], []
    for name, array in tensors.items():
        parameters: dict[str, ParameterValue | None] = {}
        if places is not None:
            parameters = {REGION: places.region, REGION_SIZE: array.nbytes}
            if offset_bytes := places.offsets_bytes[name]:
                parameters[REGION_OFFSET] = offset_bytes
        heads.append(WireTensor(name, datatype_of(array), array.shape, parameters))
        if places is None:
            raws.append(_raw(array))
    return heads, raws


def _raw(array: Array) -> memoryview:
    """Return `array_bytes`, by a short cut for arrays that already have the right layout."""
    if array.flags.c_contiguous and array.dtype in _NAMES:
        return array.data
    return array_bytes(array)


def _encode(
    is_request: bool,
    model: str,
    version: str,
    request_id: str,
    parameters: Mapping[str, ParameterValue | None] | None,
    heads: Sequence[WireTensor],
    raws: Sequence[memoryview],
) -> bytes:
    message = is_request, model, version, request_id, dict(parameters or {}), heads, raws
    return native.encode_infer(*message) or wire_library.encode_infer(*message)
