"""The system shared memory extension, as its best-known client uses it."""

from dataclasses import replace

import numpy as np
import pytest

triton = pytest.importorskip("tritonclient.grpc")
from tritonclient.utils import InferenceServerException  # noqa: E402
from tritonclient.utils import shared_memory as shm  # noqa: E402

from tests.rpc.fakes import CLASSES, FEATURES  # noqa: E402

X = np.arange(3 * FEATURES, dtype=np.float32).reshape(3, FEATURES)
EDGES = np.array([[0, 1], [1, 2]], np.int32)
EXPECTED = X[:, :CLASSES] + 2
OUTPUT_AT = 256


@pytest.fixture
def client(target):
    with triton.InferenceServerClient(target) as client:
        yield client


@pytest.fixture
def region(client):
    """Holds x, the edges behind it, and room for the output at `OUTPUT_AT`."""
    handle = shm.create_shared_memory_region("data", "/gnnserve_test_rpc", 4096)
    shm.set_shared_memory_region(handle, [X, EDGES])
    client.register_system_shared_memory("data", "/gnnserve_test_rpc", 4096)
    yield handle
    client.unregister_system_shared_memory("data")
    shm.destroy_shared_memory_region(handle)


def inputs(name="data", x_bytes=X.nbytes, edges_at=X.nbytes):
    x = triton.InferInput("x", X.shape, "FP32")
    x.set_shared_memory(name, x_bytes)
    edges = triton.InferInput("edge_index", EDGES.shape, "INT32")
    edges.set_shared_memory(name, EDGES.nbytes, edges_at)
    return [x, edges]


def test_inputs_and_output_in_a_region(client, region):
    output = triton.InferRequestedOutput("output")
    output.set_shared_memory("data", 1000, OUTPUT_AT)
    result = client.infer("gcn", inputs(), outputs=[output])
    told = result.get_output("output")
    assert told.parameters["shared_memory_region"].string_param == "data"
    assert told.parameters["shared_memory_offset"].int64_param == OUTPUT_AT
    assert told.parameters["shared_memory_byte_size"].int64_param == EXPECTED.nbytes
    assert list(result.get_response().raw_output_contents) == [b""]
    found = shm.get_contents_as_numpy(region, np.float32, tuple(told.shape), OUTPUT_AT)
    np.testing.assert_array_equal(found, EXPECTED)


def test_some_inputs_in_the_message(client, region):
    x, edges = inputs()
    for first, second in ((x, edges), (edges, x)):
        first.set_data_from_numpy(X if first is x else EDGES)
        result = client.infer("gcn", [first, second])
        np.testing.assert_array_equal(result.as_numpy("output"), EXPECTED)
        x, edges = inputs()


def test_regions_leave_files_for_connections(client, region):
    names = [f"region {number}" for number in range(255)]  # one more is there already
    for name in names:
        client.register_system_shared_memory(name, "/gnnserve_test_rpc", 16)
    with pytest.raises(InferenceServerException, match="256 shared memory regions"):
        client.register_system_shared_memory("one more", "/gnnserve_test_rpc", 16)
    for name in names:
        client.unregister_system_shared_memory(name)


def test_what_is_registered_can_be_asked_for(client, region):
    found = client.get_system_shared_memory_status(as_json=True)["regions"]["data"]
    assert found == {"name": "data", "key": "/gnnserve_test_rpc", "byte_size": "4096"}
    assert "system_shared_memory" in client.get_server_metadata().extensions


@pytest.mark.parametrize(
    ("request_inputs", "output_bytes", "code", "words"),
    [
        (inputs("other"), None, "NOT_FOUND", "tensor 'x': unknown shared memory region 'other'"),
        (inputs(edges_at=4090), None, "INVALID_ARGUMENT", "tensor 'edge_index': .* not within its"),
        (inputs(x_bytes=40), None, "INVALID_ARGUMENT", r"'x': 40 bytes, but shape .* needs 48"),
        (inputs(), 35, "INVALID_ARGUMENT", "output takes 36 bytes, shared_memory_byte_size is 35"),
        (inputs(), 4096, "INVALID_ARGUMENT", "output 'output': .* not within its 4096"),
    ],
)
def test_refusals_name_tensor_and_rule(client, region, request_inputs, output_bytes, code, words):
    outputs = None
    if output_bytes is not None:
        outputs = [triton.InferRequestedOutput("output")]
        outputs[0].set_shared_memory("data", output_bytes, OUTPUT_AT)
    with pytest.raises(InferenceServerException, match=words) as caught:
        client.infer("gcn", request_inputs, outputs=outputs)
    assert caught.value.status() == f"StatusCode.{code}"


def test_an_output_without_room_is_refused_before_the_run_when_its_size_is_known(
    client, region, engine
):
    output = triton.InferRequestedOutput("output")
    output.set_shared_memory("data", EXPECTED.nbytes - 1, OUTPUT_AT)
    for rows, calls in (("node", 0), (None, 1)):
        engine.infos["gcn"] = replace(engine.infos["gcn"], rows=rows)
        with pytest.raises(InferenceServerException, match="the output takes 36 bytes"):
            client.infer("gcn", inputs(), outputs=[output])
        assert len(engine.calls) == calls


def test_registering_twice_and_the_unknown(client, region):
    with pytest.raises(InferenceServerException, match="registered already") as caught:
        client.register_system_shared_memory("data", "/gnnserve_test_rpc", 4096)
    assert caught.value.status() == "StatusCode.ALREADY_EXISTS"
    with pytest.raises(InferenceServerException, match="unknown shared memory region") as caught:
        client.get_system_shared_memory_status("nobody")
    assert caught.value.status() == "StatusCode.NOT_FOUND"
