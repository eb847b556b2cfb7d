"""Both fronts of one engine give the same answers and the same refusals, whatever they are sent."""

import gc
import struct
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.kit.http2_frames import DATA, END_STREAM
from bench.kit.waiting import PATIENCE_S
from serve.commands.configured import calibration_cache, device_of
from serve.config import ServerConfig, load_config
from serve.native import front_lacks
from serve.pb import grpc_service_pb2 as pb
from serve.rpc.server import GrpcServer
from serve.server.engine import Engine
from serve.server.ticket import RequestTicket
from serve.wire.messages import (
    INFER_METHOD,
    STREAM_METHOD,
    Failure,
    decode_response,
    decode_stream_answer,
)
from tests.e2e.support import random_graph
from tests.processes import wait_for
from tests.rpc.fakes import FACTS
from tests.rpc.http2 import Http2
from tests.server.test_engine import CONFIG

#: What differs from one answer to the next.
TIMES = {
    "request_uid", "queue_us", "prepare_us", "run_us", "group_id", "group_size", "merged", "lane",
    "solo_estimate_us", "qos_target_us", "qos_violated", "pmc_estimate_bytes", "pmc_measured_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def fronts(tmp_path_factory, trouble):
    with both_fronts(tmp_path_factory.mktemp("fronts"), trouble.root) as found:
        yield found


@contextmanager
def both_fronts(folder, repository):
    """ModelInfer through the Python front and the native one; the native server, the other."""
    if lacks := front_lacks():
        pytest.skip(lacks)
    path = folder / "server.toml"
    path.write_text(CONFIG.format(repository=repository))
    config = load_config(path)
    device = device_of(config)
    engine = Engine(config, device, lambda record: None, calibration_cache(config, device))
    engine.start()
    engine.open()
    engine.wait_loaded()
    engine.wait_loaded()
    servers, channels = [], []
    for front in ("python", "native"):
        options = ServerConfig(grpc_port=0, front=front, max_message="16 MiB")
        server = GrpcServer(engine, lambda: FACTS, lambda since_s: {}, options, engine.plain)
        channels.append(grpc.insecure_channel(f"127.0.0.1:{server.start()}"))
        servers.append(server)
    yield [channel.unary_unary(INFER_METHOD) for channel in channels], *servers[::-1]
    for channel in channels:
        channel.close()
    for server in servers:
        assert server.stop(PATIENCE_S) == 0
    assert engine._parts.shared.used_bytes == 0
    engine.stop()


def message(seed=0, num_nodes=12, num_edges=30, dtype=np.int64):
    graph = random_graph(num_nodes, num_edges, seed, dtype)
    found = pb.ModelInferRequest(model_name="gcn", id="one")
    found.inputs.add(name="x", datatype="FP32", shape=graph.x.shape)
    datatype = "INT32" if dtype is np.int32 else "INT64"
    found.inputs.add(name="edge_index", datatype=datatype, shape=graph.edge_index.shape)
    found.raw_input_contents.extend([graph.x.tobytes(), graph.edge_index.tobytes()])
    return found


def bad_at_the_end(num_nodes):
    """A message of megabytes whose last index points nowhere."""
    found = message(num_nodes=num_nodes)
    put_last(1, np.int64(num_nodes))(found)
    return found.SerializeToString()


def outcome(call, content):
    """Return what the client sees, without what differs from one answer to the next."""
    try:
        found = decode_response(call(content, timeout=PATIENCE_S))
    except grpc.RpcError as error:
        return error.code(), error.details()
    return decoded(found)


def decoded(found):
    """Return an answer without what differs from one to the next."""
    outputs = {name: (one.dtype, one.shape, one.tobytes()) for name, one in found.outputs.items()}
    told = {name: value for name, value in found.parameters.items() if name not in TIMES}
    return found.model, found.version, found.request_id, outputs, told, set(found.parameters)


def bent(change):
    """A change of a message as a strategy that makes it."""
    return st.just(change)


def set_raw(number, change):
    def apply(m):
        if number < len(m.raw_input_contents):
            content = bytearray(m.raw_input_contents[number])
            change(content)
            m.raw_input_contents[number] = bytes(content)

    return apply


def put(number, value):
    """Write a value at the beginning of raw contents."""

    def change(content):
        data = value.tobytes()
        content[: len(data)] = data

    return set_raw(number, change)


def put_last(number, value):
    """Write a value at the end of raw contents."""
    data = value.tobytes()

    def change(content):
        content[-len(data) :] = data

    return set_raw(number, change)


def set_input(number, **fields):
    def apply(m):
        if number < len(m.inputs):
            one = m.inputs[number]
            for name, value in fields.items():
                if name == "shape":
                    del one.shape[:]
                    one.shape.extend(value)
                else:
                    setattr(one, name, value)

    return apply


def set_parameter(name, **value):
    return lambda m: m.parameters[name].MergeFrom(pb.InferParameter(**value))


def swapped(m):
    inputs, raws = list(m.inputs)[::-1], list(m.raw_input_contents)[::-1]
    del m.inputs[:], m.raw_input_contents[:]
    m.inputs.extend(inputs)
    m.raw_input_contents.extend(raws)


def doubled(m):
    m.inputs.add().CopyFrom(m.inputs[0])
    m.raw_input_contents.extend(m.raw_input_contents[:1])


def as_numbers(m):
    for one, raw in zip(m.inputs, m.raw_input_contents, strict=False):
        kind, name = (np.float32, "fp32") if one.datatype == "FP32" else (np.int64, "int64")
        if len(raw) % kind().itemsize == 0:
            getattr(one.contents, f"{name}_contents").extend(np.frombuffer(raw, kind).tolist())
    del m.raw_input_contents[:]


BENDS = st.one_of(
    *map(bent, (
        swapped, doubled, as_numbers,
        lambda m: m.outputs.add(name="output"),
        lambda m: m.outputs.add(name="logits"),
        lambda m: m.inputs.pop(),
        lambda m: m.raw_input_contents.append(b""),
        lambda m: setattr(m, "model_name", "gnc"),
        lambda m: setattr(m, "model_version", "1"),
        lambda m: setattr(m, "model_version", "7"),
        lambda m: setattr(m, "id", "é" * 40),
        lambda m: setattr(m, "id", "i" * 257),
        set_raw(0, lambda content: content.pop()),
        set_raw(1, lambda content: content.extend(b"12345678")),
        set_raw(0, lambda content: content.clear()),
        put(0, np.float32("nan")), put(0, np.float32("-inf")),
        put(1, np.int64(-1)), put(1, np.int64(12)), put(1, np.int64(2**40)),
        set_input(0, shape=(12, 31)), set_input(0, shape=(12,)), set_input(0, shape=(0, 32)),
        set_input(0, shape=(-12, 32)), set_input(0, shape=(2**62, 32)),
        set_input(1, shape=(2, 0)), set_input(1, shape=(3, 20)), set_input(1, shape=(2, 29)),
        set_input(0, datatype="FP64"), set_input(1, datatype="INT32"), set_input(1, name="edges"),
        lambda m: m.inputs[0].parameters["binary_data_size"].MergeFrom(
            pb.InferParameter(int64_param=4)
        ),
        set_parameter("priority", int64_param=3), set_parameter("priority", uint64_param=3),
        set_parameter("priority", int64_param=-1), set_parameter("tenant", string_param="a"),
        set_parameter("tenant", string_param="é"), set_parameter("tenant", bool_param=True),
        set_parameter("tenant", string_param="t" * 300), set_parameter("graph", string_param="g"),
        set_parameter("timeout", int64_param=-5), set_parameter("anything", double_param=0.5),
        set_parameter("qos_target_us", int64_param=10**9), set_parameter("seed", int64_param=4),
        set_parameter("fanouts", string_param="2,x"), set_parameter("nothing"),
    )),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 9), st.sampled_from([np.int32, np.int64]), st.lists(BENDS, max_size=3),
    st.binary(max_size=3), st.integers(0, 40),
)  # fmt: skip
def test_random_messages(fronts, seed, dtype, bends, more, cut):
    calls, *_ = fronts
    sent = message(seed, dtype=dtype)
    for bend in bends:
        if sent.inputs:
            bend(sent)
    content = sent.SerializeToString()
    content = content[: len(content) - cut] if cut > 30 else content + more
    python, native = (outcome(call, content) for call in calls)
    assert native == python


def test_ordinary_messages_are_staged_however_large_they_are(fronts):
    calls, server, _ = fronts
    counts = server._front._front.counts
    for content, staged in (
        (message().SerializeToString(), 1),
        (message(num_nodes=1, num_edges=1, dtype=np.int32).SerializeToString(), 1),
        (message(num_nodes=0, num_edges=0).SerializeToString(), 0),
        (message(num_nodes=40_000).SerializeToString(), 1),
        (bad_at_the_end(40_000), 0),
    ):
        before = counts()["plain"]
        python, native = (outcome(call, content) for call in calls)
        assert native == python
        assert counts()["plain"] == before + staged
    ways = server.ways
    assert ways["plain"] == counts()["plain"]
    assert ways["plain"] + ways["message"] == counts()["called"]


def test_a_staged_request_that_had_better_be_elsewhere_is_asked_about_as_it_came(fronts):
    (_, native), server, _ = fronts
    content = message(num_nodes=5).SerializeToString()
    expected = outcome(native, content)
    asked = []

    def answer(request, origin, task, remaining_s, cancellation):
        asked.append((bytes(origin.message), task.num_nodes))

    moving = server._inference._engine.moving
    moving.moves = lambda task, room: True
    server.pass_on(SimpleNamespace(node="", answer=answer))
    try:
        assert outcome(native, content) == expected
        assert asked == [(content, 5)]
    finally:
        server.pass_on(None)
        moving.moves = None


def test_an_answered_request_is_freed_without_the_collector(fronts):
    calls, *_ = fronts
    gc.collect()
    gc.disable()
    try:
        for call in calls * 2:
            outcome(call, message().SerializeToString())

        def left():
            return [one for one in gc.get_objects() if issubclass(type(one), RequestTicket)]

        wait_for(lambda: not left(), "requests to be freed")
    finally:
        gc.enable()


def sent_on_a_stream(server, contents):
    """Return the outputs and all else that comes of the messages on one stream, by id."""
    outputs, found = {}, {}
    with grpc.insecure_channel(server.own_address) as channel:
        for answer in channel.stream_stream(STREAM_METHOD)(iter(contents), timeout=PATIENCE_S):
            told = decode_stream_answer(answer)
            request_id = told.request_id
            if not isinstance(told, Failure):
                outputs[request_id] = told.outputs
                model, version, _, _, *told = decoded(told)
                told = model, version, *told
            found.setdefault(request_id, []).append(told)
    return outputs, {request_id: sorted(ones, key=str) for request_id, ones in found.items()}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.lists(BENDS, max_size=2), st.integers(1, 2000)), max_size=4))
def test_random_messages_on_a_stream(fronts, sent):
    _, native, python = fronts
    contents = []
    for number, (bends, num_nodes) in enumerate(sent):
        one = message(number, num_nodes)
        for bend in bends:
            if one.inputs:
                bend(one)
        one.id = f"{number} {one.id}"
        contents.append(one.SerializeToString())
    streams = native.ways["stream"]
    outputs, told = sent_on_a_stream(native, contents)
    expected_outputs, expected = sent_on_a_stream(python, contents)
    assert told == expected
    for request_id, output in outputs.items():  # which others it ran with may differ
        wanted = expected_outputs[request_id]["output"]
        np.testing.assert_allclose(output["output"], wanted, rtol=1e-3, atol=1e-3)
    assert native.ways["stream"] == streams + 1


class Framed:
    """A call whose message is sent in frames of the sizes given."""

    def __init__(self, port):
        self._client = Http2(port)

    def close(self):
        self._client.__exit__()

    def outcome(self, content, sizes):
        """Return the bytes of each output by name; None for a refusal."""
        client = self._client
        stream = client.head(INFER_METHOD)
        body = struct.pack(">BI", 0, len(content)) + content
        start, sizes = 0, iter(sizes)
        while start < len(body):
            size = next(sizes, 1 << 14)
            client.data(stream, body[start : start + size], start + size >= len(body))
            start += size
        client.read_until(lambda came: any(flags & END_STREAM for _, flags, _ in came[stream]))
        frames = client.came.pop(stream)
        answer = b"".join(content for kind, _, content in frames if kind == DATA)
        if not answer:
            return None
        return {name: one.tobytes() for name, one in decode_response(answer[5:]).outputs.items()}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 300), st.integers(1, 600), st.sampled_from([np.int32, np.int64]),
    st.sampled_from([None, put(0, np.float32("nan")), put_last(1, np.int32(-1)), swapped]),
    st.lists(st.integers(1, 5000), max_size=30),
)  # fmt: skip
def test_messages_in_frames_of_any_size(fronts, num_nodes, num_edges, dtype, bend, sizes):
    calls, server, _ = fronts
    sent = message(1, num_nodes, num_edges, dtype)
    if bend is not None:
        bend(sent)
    content = sent.SerializeToString()
    expected = outcome(calls[0], content)
    assert outcome(calls[1], content) == expected
    framed = Framed(server.own_address)
    try:
        found = framed.outcome(content, sizes)
    finally:
        framed.close()
    assert found == ({"output": expected[3]["output"][2]} if len(expected) > 2 else None)
