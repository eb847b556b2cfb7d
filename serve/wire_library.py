"""Inference messages by the protobuf library: for those that are not plain.

The same as ``serve.native.decode_infer`` and ``encode_infer``, whose test oracle this is, for any
message. Raw contents are still not handed to the library, which would copy each twice more.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from serve.native import Infer, TensorHead
from serve.pb import grpc_service_pb2 as pb

ParameterValue = bool | int | str | float

_STREAM_ANSWER = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_LENGTH_DELIMITED = 2


class WireError(ValueError):
    """Bytes that are no message of the kind asked for; `str(error)` names what is wrong."""


class Unsigned(int):
    """The value of a parameter that was sent as `uint64_param`."""


def decode_infer(is_request: bool, message: bytes | memoryview) -> Infer:
    """A ModelInferRequest or ModelInferResponse; raises WireError."""
    raw_field, kind = _RAW_FIELDS[is_request], _KINDS[is_request]
    rest, raws = _split(message, raw_field)
    head = _parse(kind, rest)
    return (
        head.model_name,
        head.model_version,
        head.id,
        _values(head.parameters),
        [
            (
                tensor.name,
                tensor.datatype,
                tuple(tensor.shape),
                _values(tensor.parameters),
                tensor.contents if tensor.HasField("contents") else None,
            )
            for tensor in (head.inputs if is_request else head.outputs)
        ],
        [(o.name, _values(o.parameters)) for o in head.outputs] if is_request else [],
        raws,
    )


def encode_infer(
    is_request: bool,
    model: str,
    version: str,
    request_id: str,
    parameters: Mapping[str, ParameterValue | None],
    tensors: Sequence[TensorHead],
    raws: Sequence[memoryview],
) -> bytes:
    """A serialized ModelInferRequest or ModelInferResponse; raises WireError."""
    head = _KINDS[is_request](model_name=model, model_version=version, id=request_id)
    _set(head.parameters, parameters)
    for name, datatype, shape, places, _ in tensors:
        sent = (head.inputs if is_request else head.outputs).add(
            name=name, datatype=datatype, shape=shape
        )
        _set(sent.parameters, places)
    parts: list[bytes | memoryview] = [head.SerializeToString()]
    for raw in raws:
        parts += (_prefix(_RAW_FIELDS[is_request], raw.nbytes), raw)
    return b"".join(parts)


def wrap_answer(response: bytes) -> bytes:
    """A ModelStreamInferResponse with a serialized response."""
    return b"".join((_prefix(_STREAM_ANSWER, len(response)), response))


def encode_failure(
    message: str, request_id: str, parameters: Mapping[str, ParameterValue]
) -> bytes:
    """A ModelStreamInferResponse with an error."""
    failure = pb.ModelStreamInferResponse(error_message=message)
    failure.infer_response.id = request_id
    _set(failure.infer_response.parameters, parameters)
    return failure.SerializeToString()


def unwrap_answer(message: bytes) -> tuple[str, bytes | memoryview | None]:
    """The error of a ModelStreamInferResponse and its response, serialized; raises WireError."""
    head, answers = _split(message, _STREAM_ANSWER)
    error: str = _parse(pb.ModelStreamInferResponse, head).error_message
    if not answers:
        return error, None
    return error, answers[0] if len(answers) == 1 else b"".join(answers)


def decode_failure(response: bytes | memoryview) -> tuple[str, dict[str, ParameterValue]]:
    """Id and parameters of the response beside an error."""
    answer = _parse(pb.ModelInferResponse, bytes(response))
    values = _values(answer.parameters)
    return answer.id, {name: value for name, value in values.items() if value is not None}


_KINDS: tuple[Any, Any] = pb.ModelInferResponse, pb.ModelInferRequest
_RAW_FIELDS = (
    pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER,
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,
)


# -- parameters -------------------------------------------------------------------------------


def _values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """By name; None where no value is held."""
    return {name: _value(parameter) for name, parameter in parameters.items()}


def _value(parameter: pb.InferParameter) -> ParameterValue | None:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        return None
    value: ParameterValue = getattr(parameter, choice)
    return Unsigned(value) if choice == "uint64_param" else value


def _set(
    parameters: MutableMapping[str, pb.InferParameter], values: Mapping[str, ParameterValue | None]
) -> None:
    """Each value but None in the member of its Python type; raises WireError for other types."""
    for name, value in values.items():
        if value is None:
            continue
        parameter = parameters[name]
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


# -- bytes ------------------------------------------------------------------------------------


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
