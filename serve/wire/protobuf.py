"""Codec of inference messages by the protobuf library, for messages of any form.

It agrees with ``serve.native.decode_infer`` and ``encode_infer``, which handle common messages, and
is their test oracle. Raw contents bypass the library, which would copy each of them twice more.
"""

from collections.abc import Container, Mapping, MutableMapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from serve.native import Infer, TensorHead
from serve.pb import grpc_service_pb2 as pb
from serve.wire.fields import WireError, fields, prefix, split

ParameterValue = bool | int | str | float

#: Largest head of a message: all bytes outside the contents of tensors. Decoding costs a multiple
#: of the head, so its size is checked before anything is decoded.
MOST_HEAD_BYTES = 16 * 1024
#: Most inputs or outputs, most requested outputs and most raw contents.
MOST_TENSORS = 16
MOST_PARAMETERS = 64
MOST_DIMENSIONS = 8
MOST_NAME_BYTES = 256
#: Largest contents of tensors in the form of numbers; raw contents have no such limit.
MOST_TYPED_BYTES = 256 * 1024

_TENSORS = frozenset({pb.ModelInferRequest.INPUTS_FIELD_NUMBER})
_CONTENTS = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
_STREAM_ANSWER = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER


class Unsigned(int):
    """Value of a parameter that was sent as `uint64_param`."""


def decode_infer(is_request: bool, message: bytes | memoryview) -> Infer:
    """Decode a ModelInferRequest or ModelInferResponse; raises WireError."""
    raw_field, kind = _RAW_FIELDS[is_request], _KINDS[is_request]
    typed_bytes = check_head(message, _TENSORS, _CONTENTS, raw_field)
    if typed_bytes > MOST_TYPED_BYTES:
        raise WireError(
            f"contents: {typed_bytes} bytes of numbers, at most {MOST_TYPED_BYTES} are taken; "
            "give larger tensors in raw form"
        )
    rest, raws = split(message, raw_field)
    head = parse(kind, rest)
    found = (
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
    _check(found)
    return found


def encode_infer(
    is_request: bool,
    model: str,
    version: str,
    request_id: str,
    parameters: Mapping[str, ParameterValue | None],
    tensors: Sequence[TensorHead],
    raws: Sequence[memoryview],
    requested: Sequence[tuple[str, Mapping[str, ParameterValue | None]]] = (),
) -> bytes:
    """Serialize a ModelInferRequest, with the outputs that it asks for, or a ModelInferResponse.

    Raises WireError.
    """
    head = _KINDS[is_request](model_name=model, model_version=version, id=request_id)
    _set(head.parameters, parameters)
    for name, datatype, shape, places, _ in tensors:
        sent = (head.inputs if is_request else head.outputs).add(
            name=name, datatype=datatype, shape=shape
        )
        _set(sent.parameters, places)
    for name, wanted in requested:
        _set(head.outputs.add(name=name).parameters, wanted)
    parts: list[bytes | memoryview] = [head.SerializeToString()]
    for raw in raws:
        parts += (prefix(_RAW_FIELDS[is_request], raw.nbytes), raw)
    return b"".join(parts)


def wrap_answer(response: bytes) -> bytes:
    """Serialize a ModelStreamInferResponse around a serialized response."""
    return b"".join((prefix(_STREAM_ANSWER, len(response)), response))


def encode_failure(
    message: str, request_id: str, parameters: Mapping[str, ParameterValue]
) -> bytes:
    """Serialize a ModelStreamInferResponse with an error."""
    failure = pb.ModelStreamInferResponse(error_message=message)
    failure.infer_response.id = request_id
    _set(failure.infer_response.parameters, parameters)
    return failure.SerializeToString()


def unwrap_answer(message: bytes) -> tuple[str, bytes | memoryview | None]:
    """Return the error of a ModelStreamInferResponse and its serialized response.

    Raises WireError.
    """
    head, answers = split(message, _STREAM_ANSWER)
    error: str = parse(pb.ModelStreamInferResponse, head).error_message
    if not answers:
        return error, None
    return error, answers[0] if len(answers) == 1 else b"".join(answers)


def decode_failure(response: bytes | memoryview) -> tuple[str, dict[str, ParameterValue]]:
    """Return id and parameters of the response beside an error."""
    answer = parse(pb.ModelInferResponse, bytes(response))
    values = _values(answer.parameters)
    return answer.id, {name: value for name, value in values.items() if value is not None}


_KINDS: tuple[Any, Any] = pb.ModelInferResponse, pb.ModelInferRequest
_RAW_FIELDS = (
    pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER,
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,
)


# -- limits -----------------------------------------------------------------------------------


def check_head(
    message: bytes | memoryview, tensors: Container[int], contents: int, raws: int = 0
) -> int:
    """Check that at most MOST_HEAD_BYTES of `message` lie outside the contents of tensors.

    Takes no more time than a head of that size needs.

    Args:
        message: Serialized message.
        tensors: Numbers of the fields that hold tensors.
        contents: Number of the field of a tensor that holds its contents.
        raws: Number of the message's field with raw contents; 0 for none.

    Returns:
        The total size of the fields `contents`, in bytes.

    Raises:
        WireError: The head is too large or malformed.
    """
    view = memoryview(message)
    head_bytes = typed_bytes = 0
    for number, start, content, end in fields(view):
        if number in tensors and content:
            head_bytes += content - start
            for inner, inner_start, inner_content, inner_end in fields(view[content:end]):
                held = inner_end - inner_content if inner == contents and inner_content else 0
                typed_bytes += held
                head_bytes += inner_end - inner_start - held
                _check_head_bytes(head_bytes)
        else:
            head_bytes += (content if number == raws and content else end) - start
        _check_head_bytes(head_bytes)
    return typed_bytes


def _check_head_bytes(head_bytes: int) -> None:
    if head_bytes > MOST_HEAD_BYTES:
        raise WireError(
            f"message: more than {MOST_HEAD_BYTES} bytes beside the contents of tensors; "
            f"at most {MOST_HEAD_BYTES} are taken"
        )


def _check(found: Infer) -> None:
    """Raise WireError when a part of the message is beyond its limit."""
    model, version, _, parameters, tensors, requested, raws = found
    for what, things in (("inputs", tensors), ("outputs", requested), ("raw contents", raws)):
        _check_count(what, len(things), MOST_TENSORS)
    count = len(parameters)
    names = [("model_name", model), ("model_version", version)]
    names += [("name of a parameter", name) for name in parameters]
    for position, (name, datatype, shape, held, _) in enumerate(tensors):
        count += len(held)
        _check_count(f"dimensions of tensor {position}", len(shape), MOST_DIMENSIONS)
        names += [
            (f"name of tensor {position}", name),
            (f"datatype of tensor {position}", datatype),
        ]
        names += [(f"name of a parameter of tensor {position}", key) for key in held]
    for position, (name, held) in enumerate(requested):
        count += len(held)
        names.append((f"name of output {position}", name))
        names += [(f"name of a parameter of output {position}", key) for key in held]
    _check_count("parameters", count, MOST_PARAMETERS)
    for what, text in names:
        if len(text) > MOST_NAME_BYTES or len(text.encode()) > MOST_NAME_BYTES:
            raise WireError(
                f"{what}: {len(text.encode())} bytes, at most {MOST_NAME_BYTES} are taken"
            )


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise WireError(f"{what}: {count} are given, at most {most} are taken")


# -- parameters -------------------------------------------------------------------------------


def _values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return the values by name; None for a parameter that holds none."""
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
    """Set each value that is not None in the member of its type; raises WireError for others."""
    for name, value in values.items():
        if value is None:
            continue
        parameter = parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise WireError(f"parameter '{name}': {value} does not fit 64 bits")
            parameter.int64_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            raise WireError(f"a parameter is bool, int, str or float, not {type(value).__name__}")


def parse(kind: Any, message: bytes) -> Any:
    """Parse `message` as the protobuf message class `kind`; raises WireError."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise WireError(f"malformed {kind.DESCRIPTOR.name}: {error}") from error
