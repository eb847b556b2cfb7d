"""TorchServe's path: the protocol's request, or plain nested lists."""

import json

import numpy as np
import pytest

from serve.rest.predictions import write_prediction
from serve.wire.messages import encode_response
from tests.rest.test_paths import EDGES, EXPECTED, X, request
from tests.rpc.fakes import CLASSES

PLAIN = {"x": X.tolist(), "edge_index": EDGES.tolist()}


@pytest.mark.parametrize("path", ["/predictions/gcn", "/predictions/gcn/1"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_the_protocols_request_is_answered_as_by_its_own_path(gateway, path, method):
    told = gateway.ask(method, path, request(id="a")).json
    wanted = gateway.post("/v2/models/gcn/infer", request(id="a")).json
    assert told["outputs"] == wanted["outputs"]
    assert (told["id"], told["model_version"]) == ("a", "1")


def test_nested_lists_are_answered_by_nested_lists(gateway, engine):
    answer = gateway.post("/predictions/gcn", PLAIN)
    assert answer.status == 200, answer.body
    np.testing.assert_array_equal(np.array(answer.json, np.float32), EXPECTED)
    assert engine.calls[0].tensors["x"].datatype == "FP32"
    assert engine.calls[0].tensors["edge_index"].shape == (2, 2)


def test_other_values_are_parameters(gateway, engine):
    body = {"node_ids": [5, 17], "graph": "g", "seed": 7, "tenant": "web", "id": "mine"}
    answer = gateway.post("/predictions/gcn", body)
    assert answer.json == [[5] * CLASSES, [17] * CLASSES]
    (call,) = engine.calls
    assert (call.graph, call.seed, call.tenant, call.client_id) == ("g", 7, "web", "mine")


def test_a_list_may_be_empty(gateway):
    answer = gateway.post("/predictions/gcn", {"x": X.tolist(), "edge_index": [[], []]})
    np.testing.assert_array_equal(np.array(answer.json, np.float32), X[:, :CLASSES])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"x": [[1, 2], [3]], "edge_index": [[0], [0]]}, "tensor 'x': data"),
        ({"x": [["a"] * 4], "edge_index": [[0], [0]]}, "tensor 'x': data: a number is expected"),
        ({**PLAIN, "edge_index": [[0.5], [0]]}, "tensor 'edge_index': data: a whole number"),
        ({**PLAIN, "extra": [1]}, "no input 'extra'"),
        ({"x": X.tolist()}, "tensor 'edge_index' is missing"),
        ({**PLAIN, "x": {"a": 1}}, "body: "),
        ({**PLAIN, "x": [{"a": 1}]}, "body: "),
        ({**PLAIN, "x": json.loads("[" * 12 + "]" * 12)}, "nested more than 8"),
        ({**PLAIN, "id": 5}, "id: 5 is no text"),
        ([[1, 2]], "body: "),
        ("x", "body: "),
    ],
)
def test_what_is_wrong_is_named(gateway, body, words):
    answer = gateway.post("/predictions/gcn", body)
    assert answer.status == 400, answer.body
    assert words in answer.json["error"]


def test_an_unknown_model_is_404(gateway):
    assert gateway.post("/predictions/nope", PLAIN).status == 404
    assert gateway.post("/predictions/gcn/9", PLAIN).status == 404


def test_of_several_models_one_that_failed_is_told_beside_the_outputs():
    facts = {"gcn/facts": '{"run_us":7}', "gat/facts": '{"status":"INTERNAL","message":"raised"}'}
    outputs = {"gcn/output": np.ones((1, 2), np.float32)}
    message = encode_response("gcn", outputs, parameters={"models": "gcn,gat", **facts})
    error = {"status": "INTERNAL", "message": "raised"}
    assert json.loads(write_prediction(message)) == {"gcn/output": [[1, 1]], "gat/error": error}
