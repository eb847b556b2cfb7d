"""Both clients against a real server with an engine in memory."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S
from serve.client import (
    Answer,
    AsyncClient,
    Cancelled,
    Client,
    Exhausted,
    InvalidRequest,
    NotFound,
    Request,
    ServerFault,
    TimedOut,
    Unavailable,
)
from serve.client.errors import from_rpc
from serve.client.streaming import PendingRequests
from serve.errors import ModelError, QueueFull, TooBig
from serve.pb import grpc_service_pb2 as pb
from serve.pb import grpc_service_pb2_grpc
from serve.server.regions import RegionPart
from serve.wire.messages import RETRY_TRAILER
from tests.client.blocking import collect
from tests.rpc.conftest import REPORT
from tests.rpc.fakes import CLASSES, FEATURES

X = np.arange(3 * FEATURES, dtype=np.float32).reshape(3, FEATURES)
EDGES = np.array([[0, 1], [1, 2]], np.int64)
EXPECTED = X[:, :CLASSES] + 2


def data(**more):
    return SimpleNamespace(x=X, edge_index=EDGES, **more)


def test_three_lines_are_enough(make, target):
    with make(target) as client:
        answer = client.infer("gcn", data())
    np.testing.assert_array_equal(answer.output, EXPECTED)
    assert answer.output.dtype == np.float32
    answer.output[0, 0] = 5  # the caller's own


def test_answers_carry_every_fact(client):
    answer = client.infer("gcn", data(), request_id="r-1", qos_target_s=0.0009)
    assert (answer.model, answer.version, answer.request_id) == ("gcn", "1", "r-1")
    qos = answer.qos
    assert (qos.request_uid, qos.queue_us, qos.prepare_us, qos.run_us) == ("uid-1", 11, 22, 33)
    assert (qos.group_id, qos.group_size, qos.lane) == (7, 2, 1)
    assert (qos.policy, qos.discipline, qos.executor) == ("slack", "rolling", "eager")
    assert (qos.solo_estimate_us, qos.qos_target_us, qos.qos_violated) == (50, 900, False)
    assert (qos.pmc_estimate_bytes, qos.pmc_measured_bytes) == (4096, 2048)


def test_unmeasured_memory_is_none(client, engine):
    engine.measured_bytes = None
    assert client.infer("gcn", data()).qos.pmc_measured_bytes is None


def test_arrays_by_keyword_reach_the_engine(client, engine):
    client.infer(
        "gcn",
        x=X.tolist(),
        edge_index=EDGES,
        edge_weight=[0.5, 1],
        batch=[0, 0, 1],
        version="1",
        timeout_s=PATIENCE_S,
        priority=2,
        tenant="acme",
        seed=3,
    )
    [call] = engine.calls
    found = {name: (t.datatype, t.shape) for name, t in call.tensors.items()}
    assert found == {
        "x": ("FP32", (3, FEATURES)),
        "edge_index": ("INT32", (2, 2)),
        "edge_weight": ("FP32", (2,)),
        "batch": ("INT64", (3,)),
    }
    assert np.frombuffer(bytes(call.tensors["edge_index"].data), "<i4").tolist() == [0, 1, 1, 2]
    assert (call.version, call.priority, call.tenant, call.seed) == ("1", 2, "acme", 3)
    assert 0 < call.timeout_ns <= PATIENCE_S * 1e9


@pytest.mark.parametrize(
    ("value", "datatype"),
    [(2**31 - 1, "INT32"), (2**31, "INT64"), (-(2**31), "INT32"), (-(2**31) - 1, "INT64")],
)
def test_edges_are_narrowed_only_when_they_fit(client, engine, value, datatype):
    client.infer("gcn", x=X, edge_index=[[value], [0]])
    tensor = engine.calls[0].tensors["edge_index"]
    assert tensor.datatype == datatype
    dtype = "<i4" if datatype == "INT32" else "<i8"
    assert np.frombuffer(bytes(tensor.data), dtype).tolist() == [value, 0]


@pytest.mark.parametrize("edges", [np.zeros((2, 0)), np.zeros((2, 0), np.int64)])
def test_graphs_without_edges_are_sent(client, engine, edges):
    assert client.infer("gcn", x=X[:1], edge_index=edges).output.shape == (1, CLASSES)
    assert client.infer("gcn", x=X[:0], edge_index=edges).output.shape == (0, CLASSES)


def test_data_is_sent_as_far_as_the_model_takes_it(client, engine):
    full = data(edge_weight=np.ones(2), edge_attr=np.ones((2, 9)), batch=[0, 0, 0], y=[1, 2, 3])
    client.infer("gcn", full)
    client.infer("gin", full)
    assert list(engine.calls[0].tensors) == ["x", "edge_index", "edge_weight", "batch"]
    assert list(engine.calls[1].tensors) == ["x", "edge_index"]


def test_a_reloaded_model_is_asked_again(client, engine):
    from tests.rpc.fakes import model_info

    full = data(edge_weight=np.ones(2))
    client.infer("gcn", full)
    engine.infos["gcn"] = model_info("gcn")
    with pytest.raises(InvalidRequest, match="no input 'edge_weight'"):
        client.infer("gcn", full)
    client.infer("gcn", full)
    assert list(engine.calls[-1].tensors) == ["x", "edge_index"]


def test_nodes_of_resident_graphs(client, engine):
    answer = client.infer("gcn", graph="cora", node_ids=[4, 2])
    assert answer.output.tolist() == [[4] * CLASSES, [2] * CLASSES]
    assert engine.calls[0].graph == "cora"


def test_torch_tensors_and_pyg_data(client):
    torch = pytest.importorskip("torch")
    geometric = pytest.importorskip("torch_geometric.data")
    x = torch.from_numpy(X.copy()).requires_grad_()
    graph = geometric.Data(x=x, edge_index=torch.from_numpy(EDGES), y=torch.zeros(3))
    np.testing.assert_array_equal(client.infer("gcn", graph).output, EXPECTED)
    pair = geometric.Batch.from_data_list([graph, graph])
    assert client.infer("gcn", pair).output.shape == (6, CLASSES)


@pytest.mark.parametrize(
    ("error", "kind", "code", "retry_after_s"),
    [
        (QueueFull("full", 1_500_000_000), Exhausted, "RESOURCE_EXHAUSTED", 1.5),
        (TooBig("needs 5 of 3 bytes"), Exhausted, "RESOURCE_EXHAUSTED", None),
        (ModelError("it raised"), ServerFault, "INTERNAL", None),
    ],
)
def test_errors_say_what_to_do(client, engine, error, kind, code, retry_after_s):
    engine.fail_with = error
    with pytest.raises(kind) as caught:
        client.infer("gcn", data(), retry=False)
    found = caught.value
    assert (found.code, found.message, found.retry_after_s) == (code, str(error), retry_after_s)
    assert str(found) == f"{code}: {error}"


def test_wrong_requests_are_told_apart(client):
    with pytest.raises(NotFound, match="nope"):
        client.infer("nope", data())
    with pytest.raises(InvalidRequest, match="'x': 3 on axis 1"):
        client.infer("gcn", x=X[:, :3], edge_index=EDGES)
    with pytest.raises(InvalidRequest, match=r"'edge_index': integers .* float64"):
        client.infer("gcn", x=X, edge_index=EDGES * 1.5)
    with pytest.raises(InvalidRequest, match="'x'"):
        client.infer("gcn", x=[[1], [1, 2]], edge_index=EDGES)
    with pytest.raises(TypeError):
        client.infer("gcn", data(), qos_target=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 2**63}, r"parameter 'seed': 9223372036854775808 does not fit 64 bits"),
        ({"tenant": "\ud800"}, "surrogates not allowed"),
        ({"timeout_s": float("inf")}, "timeout_s: inf is no number of seconds"),
        ({"qos_target_s": float("nan")}, "qos_target_s: nan is no number of seconds"),
        ({"qos_target_s": -0.5}, r"qos_target_s: -0\.5 is negative"),
        ({"priority": 1.5}, r"priority: 1\.5 is no integer"),
        ({"seed": "7"}, "seed: '7' is no integer"),
        ({"version": 1}, "version: 1 is no text"),
        ({"request_id": 7}, "request_id: 7 is no text"),
    ],
)
def test_a_value_that_cannot_be_sent_is_an_invalid_request(options, said):
    request = Request(model="gcn", **options)
    with pytest.raises(InvalidRequest, match=said):
        request.encode({"x": X}, 1 << 20)


def test_integers_of_numpy_are_integers(client, engine):
    client.infer("gcn", data(), seed=np.int64(7), priority=np.int32(2))
    (call,) = engine.calls
    assert (call.seed, call.priority) == (7, 2)


@pytest.mark.parametrize(("pushback", "retry_after_s"), [("1500", 1.5), ("-1", None), ("", None)])
def test_a_pushback_that_is_no_time_gives_none(pushback, retry_after_s):
    error = SimpleNamespace(
        trailing_metadata=lambda: ((RETRY_TRAILER, pushback),),
        code=lambda: grpc.StatusCode.UNAVAILABLE,
        details=lambda: "later",
    )
    assert from_rpc(error).retry_after_s == retry_after_s


def test_time_limits_hold(make, target, engine):
    engine.hold_all = True
    with make(target, timeout_s=0.05) as client, pytest.raises(TimedOut):
        client.infer("gcn", data())
    with make(target) as client, pytest.raises(TimedOut):
        client.infer("gcn", data(), timeout_s=0.05)


@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_time_limit_of_centuries_is_none(make, target, timeout_s):
    with make(target, timeout_s=timeout_s) as client:
        assert client.infer("gcn", data())
        assert client.describe().slots
        ((_, answer),) = client.infer_stream(
            [Request(model="gcn", x=X, edge_index=EDGES, timeout_s=60.0)], timeout_s=timeout_s
        )
        assert isinstance(answer, Answer)


def test_too_large_requests_name_their_sizes(make, target):
    with make(target, max_message_bytes=1000) as client:
        with pytest.raises(Exhausted, match=r"x 8000, edge_index 16\), more than .* 1000"):
            client.infer("gcn", x=np.zeros((500, FEATURES)), edge_index=EDGES)
        assert client.infer("gcn", data())


def test_the_servers_own_limit_is_told(client):
    with pytest.raises(Exhausted, match="larger than max"):
        client.infer("gcn", x=np.zeros((2**18, FEATURES)), edge_index=EDGES)
    assert client.infer("gcn", data())


def test_a_server_that_is_not_there(make):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    with make(nowhere) as client:
        with pytest.raises(Unavailable):
            client.infer("gcn", data())
        assert not client.ready()
        with pytest.raises(TimedOut, match=r"not ready after 0\.1 s"):
            client.wait_ready(0.1)


@pytest.mark.parametrize(
    ("timeout_s", "wait_s", "silences"), [(0.1, PATIENCE_S, 1), (None, 0.1, 9)]
)
def test_a_server_that_does_not_answer_is_waited_for_as_long_as_asked(
    make, target, engine, monkeypatch, timeout_s, wait_s, silences
):
    over, left = threading.Event(), [None] * silences

    def ready(_):
        if left:
            left.pop()
            over.wait(PATIENCE_S)
        return True

    with make(target, timeout_s=timeout_s) as client:
        monkeypatch.setattr(type(engine), "ready", property(ready), raising=False)
        try:
            if timeout_s is None:
                with pytest.raises(TimedOut, match=r"not ready after 0\.1 s"):
                    client.wait_ready(wait_s)
            else:
                client.wait_ready(wait_s)
        finally:
            over.set()


def test_readiness_and_models(client, engine):
    client.wait_ready(PATIENCE_S)
    assert client.ready()
    assert client.ready("gcn")
    assert not client.ready("nope")
    engine.unload("gin")
    found = {model.name: (model.version, model.state, model.reason) for model in client.models()}
    assert found == {"gcn": ("1", "READY", ""), "gin": ("1", "UNAVAILABLE", "unloaded")}


def test_models_are_loaded_and_unloaded(client, engine):
    client.unload("gin")
    assert not client.ready("gin")
    with pytest.raises(Unavailable):
        client.infer("gin", data(), retry=False)
    client.load("gin")
    assert client.infer("gin", data())
    with pytest.raises(NotFound):
        client.load("nope")


def test_what_a_model_takes_and_gives(client):
    found = client.interface("gcn")
    assert (found.name, found.versions) == ("gcn", ("1",))
    assert [each.name for each in found.inputs] == ["x", "edge_index", "edge_weight", "batch"]
    assert found.inputs[0].datatype == "FP32"
    assert found.inputs[0].shape == (-1, FEATURES)
    assert [(each.name, each.shape) for each in found.outputs] == [("output", (-1, CLASSES))]
    assert found.properties["executor"] == "eager"


def test_answers_are_shown_in_notebooks_and_as_dictionaries(client):
    answer = client.infer("gcn", data(), request_id="r-1")
    facts = answer.qos.to_dict()
    assert (facts["run_us"], facts["policy"], facts["pmc_measured_bytes"]) == (33, "slack", 2048)
    json.dumps(facts)
    page = answer._repr_html_()
    assert "gcn version 1" in page
    assert "float32 [3, 3]" in page
    assert "<td>slack</td>" in answer.qos._repr_html_()
    assert "<b>" not in replace(answer, model="<b>")._repr_html_()


def test_estimate_describe_and_report(client, reports):
    estimate = client.estimate("gcn", num_nodes=10, num_edges=20)
    assert (estimate.version, estimate.peak_bytes, estimate.reserve_bytes) == ("1", 1000, 1024)
    assert (estimate.run_ns, estimate.solo_ns, estimate.qos_target_ns) == (10, 20, 40)
    facts = client.describe()
    assert (facts.device, facts.slots, facts.budget_bytes) == ("cpu", 2, 2**30)
    assert facts.max_message_bytes == 2**20
    report = client.report(since_s=60)
    assert reports == [60]
    for key in ("requests", "violation_rate", "latency_over_qt", "by_cause", "rejected"):
        assert report[key] == REPORT[key]
    assert report["memory"]["budget_bytes"] == 2**40
    assert report["by_model"]["gcn"]["latency_over_qt"]["p50"] == 0.5


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"num_nodes": 2**70}, rf"num_nodes: {2**70} must be at least 0 and less than 2\*\*63"),
        ({"num_edges": -1}, r"num_edges: -1 must be"),
        ({"graph": "g", "num_ids": 0.5}, r"num_ids: 0\.5 is no integer"),
    ],
)
def test_a_size_that_cannot_be_sent_is_named(client, counts, words):
    with pytest.raises(InvalidRequest, match=words):
        client.estimate("gcn", **counts)


def test_streams_give_answers_by_position(client):
    requests = [Request(model="gcn", data=data(), request_id=name) for name in ("", "b", "")]
    found = dict(client.infer_stream(requests))
    assert set(found) == {0, 1, 2}
    assert found[1].request_id == "b"
    for answer in found.values():
        np.testing.assert_array_equal(answer.output, EXPECTED)


def test_streams_go_on_after_errors(client):
    requests = [
        Request(model="nope", data=data()),
        Request(model="gcn", x=X, edge_index=EDGES / 2),
        Request(model="gcn", data=data()),
    ]
    found = dict(client.infer_stream(requests))
    assert isinstance(found[0], NotFound)
    assert isinstance(found[1], InvalidRequest)
    assert isinstance(found[2], Answer)


def test_a_request_that_is_not_sent_is_told_while_the_next_waits_for_that(target):
    told = threading.Event()

    def requests():
        for x, awaited in ((X, False), (None, False), (X, True), (None, False), (X, True)):
            assert not awaited or told.wait(PATIENCE_S)
            told.clear()
            yield Request(model="gcn", x=x, edge_index=EDGES if x is X else EDGES / 2)

    found = []
    with Client(target) as client:
        for position, outcome in client.infer_stream(requests(), timeout_s=PATIENCE_S):
            found.append((position, type(outcome)))
            if isinstance(outcome, InvalidRequest):
                told.set()
    assert sorted(found, key=lambda one: one[0]) == [
        (0, Answer), (1, InvalidRequest), (2, Answer), (3, InvalidRequest), (4, Answer),
    ]  # fmt: skip


def test_an_asyncio_stream_tells_of_it_too(target):
    async def main():
        told, found = asyncio.Event(), []

        async def requests():
            yield Request(model="gcn", x=X, edge_index=EDGES / 2)
            await asyncio.wait_for(told.wait(), PATIENCE_S)
            yield Request(model="gcn", data=data())

        async with AsyncClient(target) as client:
            async for position, outcome in client.infer_stream(requests()):
                found.append((position, type(outcome)))
                told.set()
        return found

    assert asyncio.run(main()) == [(0, InvalidRequest), (1, Answer)]


def test_streams_raise_what_the_requests_raise(client):
    def requests():
        yield Request(model="gcn", data=data())
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        list(client.infer_stream(requests()))


def test_ids_on_one_stream_tell_its_requests_apart():
    pending = PendingRequests()
    pending.enter(Request(model="gcn", request_id="a"))
    assert pending.enter(Request(model="gcn")).request_id == "stream-1"
    with pytest.raises(InvalidRequest, match="request_id 'a' is in use"):
        pending.enter(Request(model="gcn", request_id="a"))


def test_a_stream_may_be_left_early(target, engine):
    with Client(target) as client:
        answers = client.infer_stream(Request(model="gcn", data=data()) for _ in range(9))
        next(answers)
        answers.close()
        assert client.infer("gcn", data())


def test_streams_fail_as_a_whole_when_the_server_is_gone(make):
    with make("127.0.0.1:1", timeout_s=PATIENCE_S) as client, pytest.raises(Unavailable):
        list(client.infer_stream([Request(model="gcn", data=data())]))


def test_async_streams_take_async_iterables(target):
    async def requests():
        for _ in range(3):
            await asyncio.sleep(0)
            yield Request(model="gcn", data=data())

    async def main():
        async with AsyncClient(target) as client:
            return await collect(client.infer_stream(requests()))

    assert sorted(position for position, _ in asyncio.run(main())) == [0, 1, 2]


def test_closing_cancels_calls_in_flight(target, engine):
    import threading

    engine.hold_all = True
    client = Client(target)
    caught = []

    def ask():
        try:
            client.infer("gcn", data())
        except Cancelled as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    engine.wait_for_calls(1)
    client.close()
    thread.join(PATIENCE_S)
    assert len(caught) == 1


# -- shared memory ----------------------------------------------------------------------------

NAMES = Path("/dev/shm")
SHARED_BYTES = 1 << 16


def ours() -> list[str]:
    return [path.name for path in NAMES.glob(f"gnnserve-{os.getpid()}-*")]


def regions(target) -> dict:
    with grpc.insecure_channel(target) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return dict(stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()).regions)


def test_tensors_travel_in_shared_memory(make, target, engine):
    with make(target, shared_memory_bytes=SHARED_BYTES) as client:
        for _ in range(100):  # more than there is room for at once
            answer = client.infer("gcn", data(), request_id="r-1")
        np.testing.assert_array_equal(answer.output, EXPECTED)
        for tensor in engine.calls[-1].tensors.values():
            assert isinstance(tensor.data, RegionPart)
        assert len(regions(target)) == 1
        assert ours() == [], "the name is gone as soon as the server has it open"
        with pytest.raises(NotFound, match="nope"):
            client.infer("nope", data())
        [(_, streamed)] = client.infer_stream([Request(model="gcn", data=data())])
        np.testing.assert_array_equal(streamed.output, EXPECTED)
    assert regions(target) == {}


def test_what_has_no_room_there_is_sent(make, target, engine):
    x = np.ones((2 * SHARED_BYTES // (4 * FEATURES), FEATURES), np.float32)
    with make(target, shared_memory_bytes=SHARED_BYTES) as client:
        answer = client.infer("gcn", x=x, edge_index=EDGES)
        assert answer.output.shape == (len(x), CLASSES)
        assert isinstance(engine.calls[-1].tensors["x"].data, memoryview)
        client.infer("gcn", data())
        assert isinstance(engine.calls[-1].tensors["x"].data, RegionPart)


def test_a_server_that_was_started_anew_is_told_again(make, target, engine):
    with make(target, shared_memory_bytes=SHARED_BYTES) as client:
        client.infer("gcn", data())
        with grpc.insecure_channel(target) as channel:
            stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        for kind in (memoryview, RegionPart):
            answer = client.infer("gcn", data())
            np.testing.assert_array_equal(answer.output, EXPECTED)
            assert isinstance(engine.calls[-1].tensors["x"].data, kind)


def test_shared_memory_that_cannot_be_had_is_told(make, target):
    with (
        make(target, shared_memory_bytes=1 << 62) as client,
        pytest.raises(Exhausted, match="shared memory of"),
    ):
        client.infer("gcn", data())
    assert ours() == []


def test_importing_the_client_is_cheap():
    script = (
        "import sys, serve.client\n"
        "heavy = {'torch', 'torch_geometric', 'serve.core', 'serve.server', 'serve.rpc'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
