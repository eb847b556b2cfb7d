"""Triton's HTTP client, unchanged: every method, and the same answers as by gRPC."""

import numpy as np
import pytest

triton = pytest.importorskip("tritonclient.http")
import tritonclient.grpc  # noqa: E402
import tritonclient.utils.shared_memory as shared_memory  # noqa: E402

from bench.kit.waiting import PATIENCE_S  # noqa: E402
from tests.rpc.fakes import CLASSES, FEATURES  # noqa: E402

X = (np.arange(3 * FEATURES, dtype=np.float32).reshape(3, FEATURES) + 1) / 7
EDGES = np.array([[0, 1], [1, 2]], np.int64)
EXPECTED = X[:, :CLASSES] + 2


@pytest.fixture
def client(gateway):
    limits = {"network_timeout": PATIENCE_S, "connection_timeout": PATIENCE_S}
    with triton.InferenceServerClient(f"127.0.0.1:{gateway.port}", **limits) as client:
        yield client


@pytest.fixture
def by_grpc(gateway):
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{gateway.grpc_port}") as client:
        yield client


def inputs(module=triton, **options):
    found = []
    for name, array, datatype in (("x", X, "FP32"), ("edge_index", EDGES, "INT64")):
        found.append(module.InferInput(name, array.shape, datatype))
        found[-1].set_data_from_numpy(array, **options)
    return found


def test_server_and_models_can_be_asked_about(client, by_grpc):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("gcn")
    assert client.is_model_ready("gcn", "1")
    assert not client.is_model_ready("nope")
    metadata = client.get_server_metadata()
    assert metadata == by_grpc.get_server_metadata(as_json=True)
    told = client.get_model_metadata("gcn")
    wanted = by_grpc.get_model_metadata("gcn")
    assert told["versions"] == list(wanted.versions)
    assert told["properties"]["executor"] == "eager"
    for kind in ("inputs", "outputs"):
        assert told[kind] == [
            {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
            for each in getattr(wanted, kind)
        ]
    config = client.get_model_config("gcn", "1")
    assert [(each["name"], each["dims"]) for each in config["input"]] == [
        (each.name, list(each.dims)) for each in by_grpc.get_model_config("gcn").config.input
    ]


@pytest.mark.parametrize("binary_inputs", [False, True])
@pytest.mark.parametrize("binary_outputs", [False, True, None])
def test_infer_in_every_form_equals_grpc(client, by_grpc, binary_inputs, binary_outputs):
    outputs = None
    if binary_outputs is not None:
        outputs = [triton.InferRequestedOutput("output", binary_data=binary_outputs)]
    given = inputs(binary_data=binary_inputs)
    answer = client.infer("gcn", given, request_id="r", outputs=outputs)
    wanted = by_grpc.infer("gcn", inputs(tritonclient.grpc), request_id="r")
    assert answer.as_numpy("output").tobytes() == wanted.as_numpy("output").tobytes()
    told, message = answer.get_response(), wanted.get_response()
    assert (told["id"], told["model_version"]) == (message.id, message.model_version)
    assert told["parameters"].keys() == message.parameters.keys()


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("wanted", [None, "gzip", "deflate"])
def test_bodies_may_be_compressed(client, sent, wanted):
    x = np.tile(X, (400, 1))
    given = [triton.InferInput("x", x.shape, "FP32"), inputs()[1]]
    given[0].set_data_from_numpy(x)
    answer = client.infer(
        "gcn", given, request_compression_algorithm=sent, response_compression_algorithm=wanted
    )
    np.testing.assert_array_equal(answer.as_numpy("output"), x[:, :CLASSES] + 2)


def test_infer_with_every_option(client, engine):
    client.infer(
        "gcn",
        inputs(),
        model_version="1",
        outputs=[triton.InferRequestedOutput("output")],
        request_id="r-1",
        priority=1,
        timeout=60_000_000,
        parameters={"qos_target_us": 900, "tenant": "acme"},
    )
    (call,) = engine.calls
    assert (call.priority, call.tenant, call.qos_target_ns) == (1, "acme", 900_000)


def test_many_at_once(gateway):
    with triton.InferenceServerClient(
        f"127.0.0.1:{gateway.port}", concurrency=8, network_timeout=PATIENCE_S
    ) as client:
        asked = [client.async_infer("gcn", inputs(), request_id=str(n)) for n in range(40)]
        for number, one in enumerate(asked):
            answer = one.get_result()
            assert answer.get_response()["id"] == str(number)
            np.testing.assert_array_equal(answer.as_numpy("output"), EXPECTED)


def test_bodies_made_and_read_apart(gateway):
    body, length = triton.InferenceServerClient.generate_request_body(inputs())
    answer = gateway.post("/v2/models/gcn/infer", body, Inference_Header_Content_Length=str(length))
    found = triton.InferenceServerClient.parse_response_body(
        answer.body, header_length=int(answer.headers["inference-header-content-length"])
    )
    np.testing.assert_array_equal(found.as_numpy("output"), EXPECTED)


def test_statistics_rise(client):
    (before,) = client.get_inference_statistics("gcn")["model_stats"]
    client.infer("gcn", inputs())
    (after,) = client.get_inference_statistics("gcn")["model_stats"]
    for name in ("queue", "compute_infer", "success"):
        counts = [each["inference_stats"][name]["count"] for each in (before, after)]
        assert counts[1] == counts[0] + 1
    assert len(client.get_inference_statistics()["model_stats"]) == 2


def test_models_are_listed_loaded_and_unloaded(client):
    client.unload_model("gin")
    states = {each["name"]: each["state"] for each in client.get_model_repository_index()}
    assert states == {"gcn": "READY", "gin": "UNAVAILABLE"}
    assert not client.is_model_ready("gin")
    client.load_model("gin")
    assert client.is_model_ready("gin")
    with pytest.raises(triton.InferenceServerException, match="'config'"):
        client.load_model("gin", config="{}")


def test_tensors_may_be_in_shared_memory(client):
    place = shared_memory.create_shared_memory_region("tensors", "/gnnserve-rest-test", 4096)
    try:
        shared_memory.set_shared_memory_region(place, [X, EDGES])
        client.register_system_shared_memory("tensors", "/gnnserve-rest-test", 4096)
        (status,) = client.get_system_shared_memory_status()
        assert status == client.get_system_shared_memory_status("tensors")[0]
        assert (status["name"], status["byte_size"]) == ("tensors", 4096)
        given = inputs()
        given[0].set_shared_memory("tensors", X.nbytes)
        given[1].set_shared_memory("tensors", EDGES.nbytes, X.nbytes)
        wanted = triton.InferRequestedOutput("output")
        wanted.set_shared_memory("tensors", EXPECTED.nbytes, 1024)
        answer = client.infer("gcn", given, outputs=[wanted])
        assert "data" not in answer.get_output("output")
        found = shared_memory.get_contents_as_numpy(place, np.float32, EXPECTED.shape, 1024)
        np.testing.assert_array_equal(found, EXPECTED)
        client.unregister_system_shared_memory("tensors")
        assert client.get_system_shared_memory_status() == []
        client.unregister_system_shared_memory()
    finally:
        shared_memory.destroy_shared_memory_region(place)


def test_what_is_not_offered_is_501_as_by_grpc(client, by_grpc):
    for ask in (
        lambda one: one.get_trace_settings(),
        lambda one: one.get_trace_settings("gcn"),
        lambda one: one.update_trace_settings(settings={"trace_rate": "1"}),
        lambda one: one.get_log_settings(),
        lambda one: one.update_log_settings({"log_info": True}),
        lambda one: one.get_cuda_shared_memory_status(),
        lambda one: one.register_cuda_shared_memory("a", b"YQ==", 0, 4),
        lambda one: one.unregister_cuda_shared_memory("a"),
        lambda one: one.unregister_cuda_shared_memory(),
    ):
        with pytest.raises(triton.InferenceServerException) as caught:
            ask(client)
        assert caught.value.status() == "501"
        with pytest.raises(triton.InferenceServerException) as caught:
            ask(by_grpc)
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_errors_say_what_grpc_says(client, by_grpc):
    said = []
    for module, one in ((triton, client), (tritonclient.grpc, by_grpc)):
        x = module.InferInput("x", (3, 2), "FP32")
        x.set_data_from_numpy(X[:, :2])
        with pytest.raises(triton.InferenceServerException) as caught:
            one.infer("gcn", [x, inputs(module)[1]])
        said.append(caught.value.message())
        with pytest.raises(triton.InferenceServerException) as caught:
            one.infer("nope", inputs(module))
        said.append(caught.value.message())
    assert said[:2] == said[2:]
