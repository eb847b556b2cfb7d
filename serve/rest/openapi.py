"""The API as an OpenAPI 3.1 document, made of the table of paths and the classes of bodies."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import serve
from serve.rest.deadline import HEADER as TIMEOUT_HEADER
from serve.rest.inference import JsonRequest, JsonTensor, Parameters
from serve.rest.replies import JSON, REQUEST_ID, Path

#: Size of an axis of any length in examples; every index below it is valid.
_SIZE = 3
_ERRORS = {
    "400": "The request is malformed; the text names the place and the rule",
    "404": "No such model, version or path",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "Too many requests (`Retry-After` says when to try again), or one that is too big",
    "503": "The server is starting, stopping or full",
    "504": "The time limit passed",
}
_TAGS = (
    ("/trace", "Not offered"),
    ("/logging", "Not offered"),
    ("/cudasharedmemory", "Not offered"),
    ("/predictions", "Inference"),
    ("/infer", "Inference"),
    ("/v2/models", "Models"),
    ("/v2/repository", "Repository"),
    ("sharedmemory", "Shared memory"),
)


class AnswerOutput(msgspec.Struct):
    """Output of an answer."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = {}
    #: Row-major; absent when the output follows in binary form.
    data: list[float | int | bool | str] = []


class InferenceAnswer(msgspec.Struct):
    """Answer to an inference request; its parameters tell what happened to the request."""

    model_name: str
    model_version: str
    id: str
    parameters: Parameters
    outputs: list[AnswerOutput]


class ErrorBody(msgspec.Struct):
    """Body of every error."""

    error: str


def describe(paths: Sequence[Path], examples: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document.

    Args:
        paths: All paths to describe.
        examples: A body of an inference request by model.
    """
    bodies = {each.body for each in paths if each.body is not None}
    kinds = sorted(bodies | {InferenceAnswer, ErrorBody}, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    # The class has what is left when the lists were cut out.
    schemas[JsonTensor.__name__]["properties"]["data"] = {
        "type": "array",
        "items": {},
        "description": "Elements, row-major: nested by shape, or flat",
    }
    table: dict[str, dict[str, Any]] = {}
    for each in paths:
        table.setdefault(each.path, {})[each.method.lower()] = _operation(each, examples)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gnnserve",
            "version": serve.__version__,
            "description": "Inference with graph neural networks: the Open Inference Protocol.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": table,
        "components": {"schemas": schemas},
    }


def example_request(config: Any) -> dict[str, Any]:
    """Return a small valid request, by a model's `ModelConfig`."""
    inputs = []
    for each in config.input:
        if not each.optional:
            datatype = type(each).DESCRIPTOR.fields_by_name["data_type"].enum_type
            name = datatype.values_by_number[each.data_type].name.removeprefix("TYPE_")
            shape = [_SIZE if size < 0 else size for size in each.dims]
            inputs.append(
                {"name": each.name, "datatype": name, "shape": shape, "data": _values(name, shape)}
            )
    return {"inputs": inputs}


def _values(datatype: str, shape: Sequence[int]) -> Any:
    """Return nested lists of that shape: 0, 1, 2, 0, … for integers."""
    if len(shape) > 1:
        return [_values(datatype, shape[1:]) for _ in range(shape[0])]
    count = shape[0] if shape else 1
    if datatype == "BOOL":
        return [False] * count
    if datatype.startswith(("FP", "BF")):
        return [0.5] * count
    return [position % _SIZE for position in range(count)]


def _operation(each: Path, examples: Mapping[str, Any]) -> dict[str, Any]:
    handler = each.handler
    summary = (inspect.getdoc(handler) or "").partition("\n")[0]
    infers = each.body is JsonRequest
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{each.method.lower()}{each.path}").strip("_"),
        "summary": summary.rstrip("."),
        "tags": [next((tag for part, tag in _TAGS if part in each.path), "Server")],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", each.path)
        ],
        "responses": {
            "200": {"description": "Done", "content": {JSON: {"schema": {}}}},
            **{
                status: {
                    "description": text,
                    "content": {JSON: {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
                }
                for status, text in _ERRORS.items()
            },
        },
    }
    if infers:
        operation["parameters"] += [
            {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            for name, text in (
                (TIMEOUT_HEADER, "time limit, such as 250m (ms) or 2S"),
                (REQUEST_ID, "id of a request whose body has none"),
            )
        ]
        operation["responses"]["200"]["content"][JSON]["schema"] = (
            {"$ref": "#/components/schemas/InferenceAnswer"} if each.path.startswith("/v2") else {}
        )
    if each.body is not None:
        content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{each.body.__name__}"}}
        if infers:
            content["examples"] = {name: {"value": value} for name, value in examples.items()}
        operation["requestBody"] = {"required": infers, "content": {JSON: content}}
    return operation
