"""The protocol's best-known client, unchanged, against our server."""

import queue

import numpy as np
import pytest

triton = pytest.importorskip("tritonclient.grpc")

from bench.kit.waiting import PATIENCE_S  # noqa: E402
from tests.rpc.fakes import CLASSES, FEATURES  # noqa: E402

X = np.arange(3 * FEATURES, dtype=np.float32).reshape(3, FEATURES)
EDGES = np.array([[0, 1], [1, 2]], np.int64)
EXPECTED = X[:, :CLASSES] + 2


@pytest.fixture
def client(target):
    with triton.InferenceServerClient(target) as client:
        yield client


def inputs(x=X):
    found = []
    for name, array, datatype in (("x", x, "FP32"), ("edge_index", EDGES, "INT64")):
        found.append(triton.InferInput(name, array.shape, datatype))
        found[-1].set_data_from_numpy(array)
    return found


def test_server_and_model_can_be_asked_about(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("gcn")
    assert not client.is_model_ready("nope")
    assert "statistics" in client.get_server_metadata(as_json=True)["extensions"]
    metadata = client.get_model_metadata("gcn")
    assert [tensor.name for tensor in metadata.outputs] == ["output"]
    config = client.get_model_config("gcn", as_json=True)["config"]
    assert config["name"] == "gcn"
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    index = client.get_model_repository_index()
    assert {model.name: model.state for model in index.models} == {"gcn": "READY", "gin": "READY"}


def test_infer_with_every_option(client, engine):
    result = client.infer(
        "gcn",
        inputs(),
        model_version="1",
        outputs=[triton.InferRequestedOutput("output")],
        request_id="r-1",
        priority=1,
        timeout=5_000_000,
        client_timeout=PATIENCE_S,
        parameters={"qos_target_us": 900, "tenant": "acme"},
    )
    np.testing.assert_array_equal(result.as_numpy("output"), EXPECTED)
    response = result.get_response()
    assert response.id == "r-1"
    assert response.parameters["qos_target_us"].int64_param == 900
    [call] = engine.calls
    assert (call.priority, call.tenant, call.timeout_ns) == (1, "acme", 5_000_000_000)


def test_statistics_rise(client):
    client.infer("gcn", inputs())
    client.infer("gcn", inputs())
    [stats] = client.get_inference_statistics("gcn").model_stats
    assert stats.inference_stats.queue.count == stats.inference_stats.compute_infer.count == 2


def test_stream_infer(client):
    answers = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(4):
        client.async_stream_infer("gcn", inputs(), request_id=str(number))
    client.async_stream_infer("nope", inputs())
    got = [answers.get(timeout=PATIENCE_S) for _ in range(5)]
    client.stop_stream()
    results = {r.get_response().id: r.as_numpy("output") for r, error in got if error is None}
    assert set(results) == set("0123")
    for output in results.values():
        np.testing.assert_array_equal(output, EXPECTED)
    [error] = [error for _, error in got if error is not None]
    assert "nope" in error.message()


def test_errors_are_typed(client):
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("gcn", inputs(X[:, :3]))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(triton.InferenceServerException) as caught:
        client.get_trace_settings()
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_models_are_loaded_and_unloaded(client):
    client.unload_model("gin")
    assert not client.is_model_ready("gin")
    client.load_model("gin")
    assert client.is_model_ready("gin")
