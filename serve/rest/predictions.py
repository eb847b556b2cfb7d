"""Predictions in plain JSON: names of inputs with nested lists in, a nested list out.

``{"x": [[0.1, …], …], "edge_index": [[0, 1], [1, 2]]}``; a value that is no list is a parameter of
the request, such as ``"graph": "community"``. A model's metadata gives the datatypes, and nesting
the shapes.
"""

from collections.abc import Mapping

import msgspec

from serve import native
from serve.rest.errors import invalid
from serve.rest.inference import make_message, parse_json
from serve.rest.json_tensors import datatype_of, read_elements, write_elements
from serve.wire.messages import ParameterValue, WireRequest, WireTensor, decode_wire_response
from serve.wire.protobuf import MOST_DIMENSIONS

#: Datatype of an input that the metadata does not list: node ids of a resident graph.
_DEFAULT_DATATYPE = "INT64"
#: Key of the request's id, which is no parameter.
_ID = "id"
#: Behind a model's name: the parameter with what happened to it, and the key of its error.
_FACTS, _ERROR = "/facts", "/error"

_documents = msgspec.json.Decoder(dict[str, list[int] | bool | int | float | str])
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_plain(body: memoryview) -> bool:
    """Return False for a request in the protocol's form, which has `inputs`."""
    rest, _ = native.cut_json_lists(body, 1)
    return "inputs" not in parse_json(_keys, rest)


def read_prediction(
    body: memoryview,
    model: str,
    version: str,
    request_id: str,
    datatypes: Mapping[str, str],
    most_bytes: int,
) -> bytes:
    """Convert a body in plain JSON to a serialized request; see ``inference.read_request``.

    `datatypes` are those of the model's inputs. Raises RestError.
    """
    rest, lists = native.cut_json_lists(body, 1)
    inputs: list[WireTensor] = []
    raws: list[memoryview] = []
    parameters: dict[str, ParameterValue | None] = {}
    for name, value in parse_json(_documents, rest).items():
        if not isinstance(value, list):
            parameters[name] = value
            continue
        begin, end = lists[value[0]]
        text = body[begin:end]
        kind = datatype_of(datatypes.get(name, _DEFAULT_DATATYPE), name)
        try:
            shape = native.shape_of_json_list(text, MOST_DIMENSIONS)
        except ValueError as error:
            raise invalid(f"tensor '{name}': {error}") from error
        raws.append(read_elements(text, kind, shape, name, most_bytes))
        inputs.append(WireTensor(name, kind.name, tuple(shape), {}))
    given_id = parameters.pop(_ID, request_id)
    if not isinstance(given_id, str):
        raise invalid(f"{_ID}: {given_id!r} is no text")
    return make_message(WireRequest(model, version, given_id, parameters, inputs, [], raws))


def write_prediction(message: bytes) -> bytes:
    """Convert a serialized response: its only output, or outputs by name, as nested lists.

    The error of a model that failed while others answered is there too, as `gcn/error`.
    Raises RestError for outputs that JSON cannot hold.
    """
    response = decode_wire_response(message)
    texts = {}
    for head, raw in zip(response.outputs, response.raws, strict=True):
        kind = datatype_of(head.datatype, head.name)
        text = write_elements(raw, kind, head.shape, head.name, nested=True)
        texts[head.name] = msgspec.Raw(text)
    for name, facts in response.parameters.items():
        # Of a request for several models: one that failed, and how.
        if name.endswith(_FACTS) and "status" in _keys.decode(str(facts)):
            texts[name.removesuffix(_FACTS) + _ERROR] = msgspec.Raw(str(facts).encode())
    only = next(iter(texts.values())) if len(texts) == 1 else texts
    return msgspec.json.encode(only)
