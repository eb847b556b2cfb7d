"""Tensors and inference messages on the wire, for both ends: numpy arrays in, numpy arrays out.

`ModelInferRequest` and `ModelInferResponse` carry their tensors in one last repeated `bytes`
field. Here that field is written and read beside the protobuf library: a message is joined from
its small part and the arrays' own memory, and taken apart into its small part and views of the
received bytes, where the library would copy every tensor twice more each way. What goes over the
wire is the same, so either end may be somebody else's.

Messages here are bytes: give `None` as serializer and deserializer to gRPC. Does not cover which
tensors a model takes: see ``serve.rpc.convert``.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from serve.pb import grpc_service_pb2 as pb

Array = np.ndarray[Any, np.dtype[Any]]
ParameterValue = bool | int | str | float

#: gRPC method paths whose messages this module writes and reads.
INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

#: Parameters of a tensor that lies in a shared memory region instead of in the message.
REGION = "shared_memory_region"
REGION_OFFSET = "shared_memory_offset"
REGION_SIZE = "shared_memory_byte_size"

#: Largest gRPC message, each way, that clients take and the server takes by default.
MAX_MESSAGE_BYTES = 64 * 2**20

_REQUEST_RAW = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RESPONSE_RAW = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_STREAM_ANSWER = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_LENGTH_DELIMITED = 2


class WireError(ValueError):
    """Bytes that are no message of the kind asked for; `str(error)` names what is wrong."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """One of the protocol's element types."""

    name: str
    #: Bytes of one element; 0 for BYTES, whose elements differ.
    size: int
    #: Little-endian numpy dtype; None where numpy has none (BF16, BYTES).
    dtype: np.dtype[Any] | None
    #: Field of `InferTensorContents` that may hold it; empty: raw form only.
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
    """The protocol's name for the element type of `array`; raises WireError if it has none."""
    try:
        return _NAMES[array.dtype.newbyteorder("<")]
    except KeyError:
        raise WireError(f"no wire datatype for numpy {array.dtype}") from None


# -- requests ---------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where a request's tensors lie in a shared memory region, instead of in the message."""

    region: str
    #: From the start of the region, by tensor name.
    offsets_bytes: Mapping[str, int]
    #: The part of the region that holds them all.
    block_bytes: int


def encode_request(
    model: str,
    tensors: Mapping[str, Array],
    *,
    version: str = "",
    request_id: str = "",
    parameters: Mapping[str, ParameterValue] | None = None,
    places: Places | None = None,
) -> bytes:
    """A serialized `ModelInferRequest` with all `tensors` in raw form, or at `places`, in order.

    Arrays are taken in any layout and byte order; contiguous little-endian ones are copied once.
    Python bool, int, str and float become the parameter of that type.
    """
    head = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    for name, value in (parameters or {}).items():
        set_parameter(head.parameters[name], value)
    parts: list[bytes | memoryview] = [b""]
    for name, array in tensors.items():
        datatype = datatype_of(array)
        sent = head.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if places is not None:
            offset_bytes = places.offsets_bytes[name]
            put_place(sent.parameters, places.region, offset_bytes, array.nbytes)
            continue
        raw = array_bytes(array)
        parts += (_prefix(_REQUEST_RAW, raw.nbytes), raw)
    parts[0] = head.SerializeToString()
    return b"".join(parts)


def decode_request(message: bytes) -> tuple[pb.ModelInferRequest, list[memoryview]]:
    """A request without its raw contents, and these as views of `message`; raises WireError.

    The views start at any byte: copy them as bytes before anything reads them as numbers.
    """
    head, raws = _split(message, _REQUEST_RAW)
    return _parse(pb.ModelInferRequest, head), raws


# -- responses --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Response:
    """A decoded `ModelInferResponse`."""

    model: str
    version: str
    request_id: str
    #: Read-only views of the message, by output name.
    outputs: dict[str, Array]
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


def encode_response(head: pb.ModelInferResponse, arrays: Sequence[Array]) -> bytes:
    """Serialized `head` with its outputs' `arrays` in raw form; `head.outputs` names them."""
    parts: list[bytes | memoryview] = [head.SerializeToString()]
    for array in arrays:
        raw = array_bytes(array)
        parts += (_prefix(_RESPONSE_RAW, raw.nbytes), raw)
    return b"".join(parts)


def decode_response(message: bytes | memoryview) -> Response:
    """The answer in `message`; raises WireError when it is none, or has no raw outputs."""
    head, raws = _split(message, _RESPONSE_RAW)
    answer = _parse(pb.ModelInferResponse, head)
    if len(raws) != len(answer.outputs):
        raise WireError(f"{len(answer.outputs)} outputs but {len(raws)} raw_output_contents")
    outputs = {}
    for output, raw in zip(answer.outputs, raws, strict=True):
        kind = DATATYPES.get(output.datatype)
        if kind is None or kind.dtype is None:
            raise WireError(f"output '{output.name}': cannot read datatype {output.datatype!r}")
        try:
            outputs[output.name] = np.frombuffer(raw, kind.dtype).reshape(tuple(output.shape))
        except ValueError as error:
            raise WireError(f"output '{output.name}': {error}") from error
    parameters = {name: get_parameter(value) for name, value in answer.parameters.items()}
    return Response(answer.model_name, answer.model_version, answer.id, outputs, parameters)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a stream carries instead of an answer."""

    message: str
    #: Of the request that failed; empty when the server does not say.
    request_id: str = ""
    #: Ours: `status` (gRPC's name of the code) and, when trying again helps, `retry_after_ms`.
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


def encode_stream_answer(answer: bytes | Failure) -> bytes:
    """A serialized `ModelStreamInferResponse` with a serialized response, or with an error."""
    if isinstance(answer, bytes):
        return b"".join((_prefix(_STREAM_ANSWER, len(answer)), answer))
    message = pb.ModelStreamInferResponse(error_message=answer.message)
    message.infer_response.id = answer.request_id
    for name, value in answer.parameters.items():
        set_parameter(message.infer_response.parameters[name], value)
    return message.SerializeToString()


def decode_stream_answer(message: bytes) -> Response | Failure:
    """What a message of a stream holds; raises WireError."""
    head, answers = _split(message, _STREAM_ANSWER)
    error = _parse(pb.ModelStreamInferResponse, head).error_message
    if not error and answers:
        return decode_response(answers[-1])
    answer = _parse(pb.ModelInferResponse, b"".join(answers))
    parameters = {name: get_parameter(value) for name, value in answer.parameters.items()}
    return Failure(error or "an empty message of the stream", answer.id, parameters)


# -- parameters -------------------------------------------------------------------------------


def set_parameter(parameter: pb.InferParameter, value: ParameterValue) -> None:
    """Store `value` in the member of its Python type; raises WireError for other types."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        raise WireError(f"a parameter is bool, int, str or float, not {type(value).__name__}")


def put_place(
    parameters: MutableMapping[str, pb.InferParameter],
    region: str,
    offset_bytes: int,
    size_bytes: int,
) -> None:
    """Say that the tensor of these `parameters` lies in shared memory."""
    parameters[REGION].string_param = region
    parameters[REGION_SIZE].int64_param = size_bytes
    if offset_bytes:
        parameters[REGION_OFFSET].int64_param = offset_bytes


def get_parameter(parameter: pb.InferParameter) -> ParameterValue:
    """The value held, or an empty string when none is."""
    choice = parameter.WhichOneof("parameter_choice")
    value: ParameterValue = getattr(parameter, choice) if choice else ""
    return value


# -- bytes ------------------------------------------------------------------------------------


def array_bytes(array: Array) -> memoryview:
    """The elements of `array`, row-major and little-endian, without a copy where possible."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def _prefix(number: int, size_bytes: int) -> bytes:
    """Tag and length before a length-delimited field."""
    prefix = bytearray((number << 3 | _LENGTH_DELIMITED,))
    while size_bytes > 0x7F:
        prefix.append(size_bytes & 0x7F | 0x80)
        size_bytes >>= 7
    prefix.append(size_bytes)
    return bytes(prefix)


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends."""
    byte = view[position]
    if byte < 0x80:
        return byte, position + 1
    value = byte & 0x7F
    for shift in range(7, 70, 7):
        position += 1
        byte = view[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
    raise WireError("malformed message: a number longer than 10 bytes")


def _split(message: bytes | memoryview, number: int) -> tuple[bytes, list[memoryview]]:
    """The fields `number` of `message` as views, and the message without them."""
    view = memoryview(message)
    end = len(view)
    rest: list[memoryview] = []
    taken: list[memoryview] = []
    position = kept = 0
    try:
        while position < end:
            start = position
            tag, position = _varint(view, position)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                size, position = _varint(view, position)
                if tag >> 3 == number:
                    taken.append(view[position : position + size])
                    rest.append(view[kept:start])
                    kept = position + size
                position += size
            elif kind == 0:
                _, position = _varint(view, position)
            elif kind == 1:
                position += 8
            elif kind == 5:
                position += 4
            else:
                raise WireError(f"malformed message: wire type {kind} at byte {start}")
    except IndexError:
        position = end + 1
    if position != end:
        raise WireError(f"malformed message: it ends after {end} bytes within a field")
    rest.append(view[kept:end])
    return b"".join(rest), taken


def _parse(kind: Any, message: bytes) -> Any:
    """`message` parsed as a `kind` of protobuf message."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise WireError(f"malformed {kind.DESCRIPTOR.name}: {error}") from error
