"""Every demo model answers by HTTP, in each form, what it answers by gRPC, bit by bit."""

import json
import urllib.request

import numpy as np
import pytest

triton = pytest.importorskip("tritonclient.http")
import tritonclient.grpc  # noqa: E402

from bench.kit.waiting import PATIENCE_S  # noqa: E402
from serve.client import Client  # noqa: E402
from serve.rest.process import missing_packages  # noqa: E402
from tests.e2e.conftest import server  # noqa: E402
from tests.e2e.support import random_graph  # noqa: E402

__all__ = ["server"]

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="the gateway's packages")
MODELS = ("gcn", "sage", "gin", "gat")


@pytest.fixture(scope="module")
def clients(server):
    with (
        triton.InferenceServerClient(
            f"127.0.0.1:{server.http_port}", network_timeout=PATIENCE_S
        ) as http,
        tritonclient.grpc.InferenceServerClient(server.target) as grpc,
    ):
        yield http, grpc


def inputs(module, arrays, **options):
    found = []
    for name, array in arrays.items():
        datatype = {"float32": "FP32", "int64": "INT64"}[str(array.dtype)]
        found.append(module.InferInput(name, array.shape, datatype))
        found[-1].set_data_from_numpy(array, **options)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 37, 600])
def test_answers_are_those_of_grpc(clients, model, binary, num_nodes):
    http, grpc = clients
    arrays = random_graph(num_nodes, 5 * num_nodes, seed=num_nodes).tensors
    outputs = [triton.InferRequestedOutput("output", binary_data=binary)]
    given = inputs(triton, arrays, binary_data=binary)
    answer = http.infer(model, given, outputs=outputs).as_numpy("output")
    wanted = grpc.infer(model, inputs(tritonclient.grpc, arrays)).as_numpy("output")
    assert (answer.dtype, answer.shape) == (wanted.dtype, wanted.shape)
    assert answer.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("model", MODELS)
def test_nodes_of_a_resident_graph_can_be_asked_for(clients, model):
    http, grpc = clients
    arrays = {"node_ids": np.array([5, 17, 1999])}
    parameters = {"graph": "community", "seed": 1}
    answers = [
        client.infer(model, inputs(module, arrays), parameters=parameters).as_numpy("output")
        for client, module in ((http, triton), (grpc, tritonclient.grpc))
    ]
    assert answers[0].tobytes() == answers[1].tobytes()


@pytest.mark.parametrize("model", MODELS)
def test_models_describe_themselves_alike(clients, model):
    http, grpc = clients
    assert http.is_model_ready(model)
    told, wanted = http.get_model_metadata(model), grpc.get_model_metadata(model)
    for kind in ("inputs", "outputs"):
        assert [(each["name"], each["datatype"], each["shape"]) for each in told[kind]] == [
            (each.name, each.datatype, list(each.shape)) for each in getattr(wanted, kind)
        ]


@pytest.mark.parametrize("binary", [False, True])
def test_several_models_are_asked_at_once(clients, server, binary):
    http, grpc = clients
    arrays = random_graph(300, 1500, seed=5).tensors
    asked = {"models": ",".join(MODELS)}
    given = inputs(triton, arrays, binary_data=binary)
    outputs = [
        triton.InferRequestedOutput(f"{model}/output", binary_data=binary) for model in MODELS
    ]
    by_http = http.infer("gcn", given, outputs=outputs, parameters=asked)
    by_grpc = grpc.infer("gcn", inputs(tritonclient.grpc, arrays), parameters=asked)
    with Client(server.target, timeout_s=PATIENCE_S) as client:
        own = client.infer(list(MODELS), arrays)
    for model in MODELS:
        wanted = grpc.infer(model, inputs(tritonclient.grpc, arrays)).as_numpy("output").tobytes()
        assert own[model].output.tobytes() == wanted
        for answer in (by_http, by_grpc):
            assert answer.as_numpy(f"{model}/output").tobytes() == wanted
        facts = json.loads(by_http.get_response()["parameters"][f"{model}/facts"])
        assert facts["solo_estimate_us"] > 0


def test_plain_json_asks_several_models(server):
    graph = {"x": np.zeros((3, 32)).tolist(), "edge_index": [[0, 1], [1, 2]]}
    url = f"http://127.0.0.1:{server.http_port}/predictions/gcn"
    body = json.dumps({**graph, "models": "gcn,gat"}).encode()
    with urllib.request.urlopen(url, body, PATIENCE_S) as answer:
        found = json.load(answer)
    assert {name: np.shape(rows) for name, rows in found.items()} == {
        "gcn/output": (3, 5),
        "gat/output": (3, 5),
    }
