"""Every demo model answers by HTTP, in each form, what it answers by gRPC, bit by bit."""

import numpy as np
import pytest

triton = pytest.importorskip("tritonclient.http")
import tritonclient.grpc  # noqa: E402

from bench.kit.waiting import PATIENCE_S  # noqa: E402
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
