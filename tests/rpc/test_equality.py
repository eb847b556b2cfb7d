"""Both front ends give the same answer to the same message, whatever is in it."""

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.kit.waiting import PATIENCE_S
from serve.config import ServerConfig
from serve.native import front_lacks
from serve.pb import grpc_service_pb2 as pb
from serve.rpc.server import GrpcServer
from serve.wire.messages import INFER_METHOD, encode_request
from tests.rpc.fakes import FACTS, FEATURES, FakeEngine

#: Parameters of an answer that differ from one run to the next.
_OF_THE_RUN = ("request_uid",)

NUMBERS = st.integers(-3, 2**40)
OPTIONS = st.dictionaries(
    st.sampled_from(
        ["qos_target_us", "timeout", "priority", "tenant", "seed", "graph", "what", "é"]
    ),
    st.one_of(NUMBERS, st.booleans(), st.text(max_size=5), st.floats(allow_nan=False)),
    max_size=3,
)


@pytest.fixture(scope="module")
def channels():
    """Yield a channel to a server of each front end; their engines are alike."""
    if lacks := front_lacks():
        pytest.skip(lacks)
    servers = [
        GrpcServer(
            FakeEngine(),
            lambda: FACTS,
            lambda _: {},
            ServerConfig(grpc_port=0, max_message="1 MiB", max_queue=16, front=front),
        )
        for front in ("python", "native")
    ]
    channels = [grpc.insecure_channel(f"127.0.0.1:{server.start()}") for server in servers]
    yield channels
    for channel, server in zip(channels, servers, strict=True):
        channel.close()
        server.stop(2.0)


def outcome(channel, message):
    """Return the answer without what differs from run to run, or the status and its text."""
    try:
        content = channel.unary_unary(INFER_METHOD)(message, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return error.code(), error.details()
    answer = pb.ModelInferResponse.FromString(content)
    for name in _OF_THE_RUN:
        answer.parameters.pop(name, None)
    return answer.SerializeToString(deterministic=True)


def put(parameters, options):
    for name, value in options.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(parameters[name], kind[type(value)], value)


@st.composite
def requests(draw):
    """Draw a request that is good, or odd in one way or several."""
    nodes, edges = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    message = pb.ModelInferRequest(
        model_name=draw(st.sampled_from(["gcn", "gcn", "gcn", "gin", "nope", "", "é" * 200])),
        model_version=draw(st.sampled_from(["", "", "1", "2", "x"])),
        id=draw(st.text(max_size=8)),
    )
    put(message.parameters, draw(OPTIONS) if draw(st.booleans()) else {})
    indices = draw(st.sampled_from([np.int64, np.int32]))
    tensors = {
        "x": np.linspace(0, 1, nodes * FEATURES, dtype=np.float32).reshape(nodes, FEATURES),
        "edge_index": np.zeros((2, edges), indices),
        "edge_weight": np.ones(edges, np.float32),
        "batch": np.zeros(nodes, np.int64),
        "node_ids": np.arange(nodes),
        "other": np.zeros(3, np.int8),
    }
    names = draw(
        st.one_of(
            st.just(["x", "edge_index"]),
            st.just(["edge_index", "x"]),
            st.lists(st.sampled_from(sorted(tensors)), max_size=5),
        )
    )
    kinds = {np.float32: "FP32", np.int64: "INT64", np.int32: "INT32", np.int8: "INT8"}
    for name in names:
        array = tensors[name]
        kind = draw(st.sampled_from([kinds[array.dtype.type]] * 9 + ["FP64", "BYTES", "", "INT64"]))
        shape = list(array.shape)
        if draw(st.integers(0, 9)) == 0:
            shape = draw(st.lists(st.integers(-1, 25), max_size=4))
        tensor = message.inputs.add(name=name, datatype=kind, shape=shape)
        if draw(st.integers(0, 9)) == 0:
            put(tensor.parameters, draw(OPTIONS))
        content = array.tobytes()
        if draw(st.integers(0, 9)) == 0:
            content = content[: draw(st.integers(0, 20))]
        if draw(st.integers(0, 19)) == 0 and array.dtype == np.float32:
            tensor.contents.fp32_contents.extend(array.ravel())
        else:
            message.raw_input_contents.append(content)
    if draw(st.integers(0, 4)) == 0:
        message.outputs.add(name=draw(st.sampled_from(["output", "nope", ""])))
    return message.SerializeToString()


@st.composite
def damaged(draw, message):
    """Draw a message with bytes changed, dropped, repeated, or with fields it does not know."""
    content = draw(message)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        match draw(st.integers(0, 3)):
            case 0:
                content = content[:at] + draw(st.binary(max_size=6)) + content[at:]
            case 1:
                content = content[:at] + content[at + draw(st.integers(0, 9)) :]
            case 2:
                content += content[at:]
            case _:
                content = b"\xa0\x06\x01" + content + b"\xa3\x06\xa4\x06"
    return content


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.one_of(requests(), damaged(requests())))
def test_the_same_message_has_the_same_outcome(channels, message):
    python, native = (outcome(channel, message) for channel in channels)
    assert native == python


@pytest.mark.parametrize("indices", [np.int64, np.int32])
def test_a_good_message_is_answered_by_both(channels, indices):
    message = encode_request(
        "gcn",
        {"x": np.ones((5, FEATURES), np.float32), "edge_index": np.zeros((2, 7), indices)},
        request_id="good",
    )
    python, native = (outcome(channel, message) for channel in channels)
    assert native == python
    assert pb.ModelInferResponse.FromString(python).id == "good"
