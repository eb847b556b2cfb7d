"""Inference requests and answers: the protocol's JSON with binary tensors, and the wire's messages.

A body is JSON alone, or JSON followed by the bytes of tensors, in their order; the header
``Inference-Header-Content-Length`` then gives the length of the JSON.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from serve import native
from serve.rest.errors import invalid
from serve.rest.json_tensors import datatype_of, read_elements, write_elements
from serve.wire.messages import (
    REGION,
    ParameterValue,
    WireError,
    WireOutput,
    WireRequest,
    WireTensor,
    decode_wire_response,
    encode_wire_request,
)

#: Header with the length of the JSON before binary tensors, in requests and answers.
HEADER_LENGTH = "Inference-Header-Content-Length"
_BINARY_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"

Parameters = dict[str, bool | int | float | str]


class JsonTensor(msgspec.Struct):
    """Input of a request."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = {}
    #: `[k]`: the k-th list that was cut out of the document.
    data: list[int] | msgspec.UnsetType = msgspec.UNSET


class JsonOutput(msgspec.Struct):
    """Output that a request asks for."""

    name: str
    parameters: Parameters = {}


class JsonRequest(msgspec.Struct):
    """Body of an inference request."""

    inputs: list[JsonTensor]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[JsonOutput] = []


class AnswerForm(NamedTuple):
    """How a request wants its outputs."""

    #: True to send outputs in binary form that the request does not name.
    binary: bool
    #: The same by output name.
    binary_by_name: Mapping[str, bool]

    def is_binary(self, name: str) -> bool:
        """Return True when output `name` is wanted in binary form."""
        return self.binary_by_name.get(name, self.binary)


class Asked(NamedTuple):
    """A request, ready to be sent."""

    message: bytes
    form: AnswerForm


class Body(NamedTuple):
    """Body of an answer."""

    content: bytes
    #: Length of the JSON when binary tensors follow it, else None.
    header_length: int | None


_requests = msgspec.json.Decoder(JsonRequest)


def read_request(
    body: memoryview,
    header_length: str | None,
    model: str,
    version: str,
    request_id: str,
    most_bytes: int,
) -> Asked:
    """Convert the body of a request.

    Args:
        body: JSON, and binary tensors behind it if `header_length` is given.
        header_length: Value of the header `HEADER_LENGTH`.
        model: Name of the model.
        version: Its version; empty for the server's choice.
        request_id: Id of a request that has none in its body.
        most_bytes: Largest tensor.

    Raises RestError or WireError.
    """
    split = len(body) if header_length is None else _length(header_length, len(body))
    head, tail = body[:split], body[split:]
    rest, lists = native.cut_json_lists(head, 3, "data")
    request = parse_json(_requests, rest)
    places: list[memoryview | None] = [head[begin:end] for begin, end in lists]
    inputs, raws = [], []
    for tensor in request.inputs:
        size_bytes = tensor.parameters.pop(_BINARY_SIZE, None)
        if size_bytes is not None:
            raw, tail = _binary(tensor, size_bytes, tail)
            raws.append(raw)
        elif REGION not in tensor.parameters:
            raws.append(_from_json(tensor, places, most_bytes))
        inputs.append(_wire(tensor))
    if tail:
        raise invalid(f"{len(tail)} bytes follow the last binary tensor")
    form = _take_form(request)
    asked = [WireOutput(output.name, {**output.parameters}) for output in request.outputs]
    wire = WireRequest(
        model, version, request.id or request_id, {**request.parameters}, inputs, asked, raws
    )
    return Asked(make_message(wire), form)


def make_message(request: WireRequest) -> bytes:
    """Serialize a request; raises RestError for a number or a text that the wire cannot hold."""
    try:
        return encode_wire_request(request)
    except (WireError, ValueError, OverflowError, TypeError) as error:
        # A number beyond 64 bits, or a text that is not Unicode.
        raise invalid(f"body: {error}") from error


def write_answer(message: bytes, form: AnswerForm) -> Body:
    """Convert a serialized response. Raises RestError for outputs that JSON cannot hold."""
    response = decode_wire_response(message)
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    for head, raw in zip(response.outputs, response.raws, strict=True):
        told: dict[str, Any] = {
            "name": head.name,
            "datatype": head.datatype,
            "shape": head.shape,
        }
        if head.parameters:
            told["parameters"] = dict(head.parameters)
        if REGION in head.parameters:
            pass  # the elements are in shared memory
        elif form.is_binary(head.name):
            told.setdefault("parameters", {})[_BINARY_SIZE] = len(raw)
            binary.append(raw)
        else:
            kind = datatype_of(head.datatype, head.name)
            told["data"] = msgspec.Raw(write_elements(raw, kind, head.shape, head.name))
        outputs.append(told)
    answer = {
        "model_name": response.model,
        "model_version": response.version,
        "id": response.request_id,
        "parameters": response.parameters,
        "outputs": outputs,
    }
    content = msgspec.json.encode(answer)
    if not binary:
        return Body(content, None)
    return Body(b"".join((content, *binary)), len(content))


def parse_json(decoder: "msgspec.json.Decoder[Any]", text: bytes) -> Any:
    """Decode a document; raises RestError, which says what is wrong and where."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"body: {error}") from error
    except RecursionError:
        raise invalid("body: it is nested too deeply") from None


def _length(text: str, body_bytes: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 20 or int(text) > body_bytes:
        raise invalid(
            f"{HEADER_LENGTH}: {text[:32]!r} is no number of bytes up to the {body_bytes} "
            "of the body"
        )
    return int(text)


def _binary(tensor: JsonTensor, size_bytes: Any, tail: memoryview) -> tuple[memoryview, memoryview]:
    """Return the tensor's bytes and those after them."""
    if tensor.data is not msgspec.UNSET:
        raise invalid(f"tensor '{tensor.name}': {_BINARY_SIZE} is given beside data")
    if type(size_bytes) is not int or not 0 <= size_bytes <= len(tail):
        raise invalid(
            f"tensor '{tensor.name}': {_BINARY_SIZE} {size_bytes!r} is no number of bytes up to "
            f"the {len(tail)} that follow"
        )
    return tail[:size_bytes], tail[size_bytes:]


def _from_json(
    tensor: JsonTensor,
    places: list[memoryview | None],
    most_bytes: int,
) -> memoryview:
    """Read the tensor's data from `places`, the lists that were cut out of the document."""
    if tensor.data is msgspec.UNSET:
        raise invalid(f"tensor '{tensor.name}': it has neither data nor {_BINARY_SIZE}")
    kind = datatype_of(tensor.datatype, tensor.name)
    place = tensor.data[0] if len(tensor.data) == 1 else -1
    text = places[place] if 0 <= place < len(places) else None
    if text is None:
        # The list was not cut out: its key is written with an escape.
        raise invalid(f"tensor '{tensor.name}': data: write its key without escapes")
    places[place] = None
    return read_elements(text, kind, tensor.shape, tensor.name, most_bytes)


def _wire(tensor: JsonTensor) -> WireTensor:
    parameters: dict[str, ParameterValue | None] = {**tensor.parameters}
    return WireTensor(tensor.name, tensor.datatype, tuple(tensor.shape), parameters)


def _take_form(request: JsonRequest) -> AnswerForm:
    """Remove the parameters that say how to answer, and return what they say."""
    binary = _flag(request.parameters, _ALL_BINARY, False)
    return AnswerForm(
        binary,
        {output.name: _flag(output.parameters, _BINARY, binary) for output in request.outputs},
    )


def _flag(parameters: Parameters, name: str, default: bool) -> bool:
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        raise invalid(f"parameter '{name}': {value!r} is neither true nor false")
    return value
