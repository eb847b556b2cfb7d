"""One message for several models, on both fronts: what is decoded, refused and told."""

import threading

import grpc
import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import (
    Answers,
    AsyncClient,
    Client,
    Exhausted,
    InvalidRequest,
    NotFound,
    Request,
    ServerFault,
)
from serve.errors import ModelError, NotReady, QueueFull, VersionReplaced
from serve.server.api import ModelInfo, TensorSpec
from serve.wire.messages import INFER_METHOD, decode_response, encode_request
from tests.rpc.fakes import CLASSES, FEATURES, model_info

X = np.arange(3 * FEATURES, dtype=np.float32).reshape(3, FEATURES)
EDGES = np.array([[0, 1], [1, 2]])
GRAPH = {"x": X, "edge_index": EDGES}


@pytest.fixture
def client(target):
    with Client(target, timeout_s=PATIENCE_S) as found:
        yield found


def ask(channel, tensors=GRAPH, model="gcn", version="", **parameters):
    message = encode_request(model, tensors, version=version, parameters=parameters)
    return decode_response(channel.unary_unary(INFER_METHOD)(message, timeout=PATIENCE_S))


def test_each_model_has_its_outputs_and_facts(engine, client, channel):
    weights = np.ones(2, np.float32)
    found = client.infer(["gcn", "gin:1"], edge_weight=weights, qos_target_s=0.5, **GRAPH)
    assert isinstance(found, Answers)
    assert list(found) == ["gcn", "gin:1"]
    assert not found.errors
    for name, answer in found.items():
        np.testing.assert_array_equal(answer.output, X[:, :CLASSES] + 2)
        assert (answer.model, answer.version) == (name.partition(":")[0], "1")
        assert (answer.qos.run_us, answer.qos.qos_target_us) == (33, 500_000)
    uids = {answer.qos.request_uid for answer in found.values()}
    assert len(uids) == 2
    assert found.request_id == found.joint_uid
    gcn, gin = engine.calls
    assert (set(gcn.tensors), set(gin.tensors)) == ({*GRAPH, "edge_weight"}, set(GRAPH))
    raw = ask(channel, models="gcn, gin")
    assert list(raw.outputs) == ["gcn/output", "gin/output"]
    assert raw.model == "gcn"
    assert raw.parameters["models"] == "gcn,gin"


def test_several_graphs_are_split_for_each_model(client, engine):
    engine.infos["gin"] = model_info("gin", extra=("batch",))
    found = client.infer(["gcn", "gin"], {**GRAPH, "batch": np.array([0, 0, 1])})
    assert {answer.output.shape for answer in found.values()} == {(3, CLASSES)}


def test_asyncio_asks_several_too(target):
    async def main():
        async with AsyncClient(target, timeout_s=PATIENCE_S) as client:
            return await client.infer(("gcn", "gin"), GRAPH)

    import asyncio

    assert list(asyncio.run(main())) == ["gcn", "gin"]


def test_a_model_that_fails_leaves_the_others_answers(engine, client):
    engine.failing["gin"] = ModelError("it raised")
    found = client.infer(["gcn", "gin"], GRAPH)
    assert found["gcn"].output.shape == (3, CLASSES)
    assert {name: type(error) for name, error in found.errors.items()} == {"gin": ServerFault}
    with pytest.raises(ServerFault, match="it raised"):
        _ = found["gin"]


def test_when_all_fail_the_call_fails(engine, client):
    engine.failing |= {"gcn": QueueFull("no room", 10**9), "gin": ModelError("it raised")}
    with pytest.raises(Exhausted, match="no room") as caught:
        client.infer(["gcn", "gin"], GRAPH, retry=False)
    assert caught.value.retry_after_s == 1.0


def test_statistics_count_every_model(engine, client, standard):
    from serve.pb import grpc_service_pb2 as pb

    engine.failing["gin"] = ModelError("it raised")
    client.infer(["gcn", "gin"], GRAPH)
    stats = standard.ModelStatistics(pb.ModelStatisticsRequest()).model_stats
    counted = {
        one.name: (one.inference_stats.success.count, one.inference_stats.fail.count)
        for one in stats
    }
    assert counted == {"gcn": (1, 0), "gin": (0, 1)}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"models": ""}, "parameter 'models': '' is no list of names: gcn,sage:2"),
        ({"models": "gcn,,gin"}, "parameter 'models': 'gcn,,gin' is no list of names"),
        ({"models": "gcn,gcn"}, "parameter 'models': 'gcn,gcn' lists a model twice"),
        (
            {"models": ",".join(f"m{i}" for i in range(9))},
            "parameter 'models': 9 models are listed, at most 8 are taken",
        ),
        (
            {"models": 7},
            "parameter 'models': a whole number (int64_param) is given, expected a text",
        ),
        ({"models": "g" * 2049}, "parameter 'models': 2049 characters, at most 2048 are taken"),
        (
            {"models": "gcn", "version": "1"},
            "model_version: '1' is given beside parameter 'models'; write versions there, as in "
            "gcn:1",
        ),
        (
            {"models": "gin", "model": "gcn"},
            "model_name: 'gcn' is not in parameter 'models', 'gin'",
        ),
        (
            {"models": "gin", "model": "made up"},
            "model_name: 'made up' is not in parameter 'models', 'gin'",
        ),
        (
            {"models": "gcn,gin", "tensors": {**GRAPH, "z": X}},
            "inputs[2]: none of the models gcn, gin has an input 'z'",
        ),
        (
            {"models": "gcn,gin", "tensors": {"x": X}},
            "model 'gcn': tensor 'edge_index' is missing; model 'gcn' requires x, edge_index",
        ),
        (
            {"models": "gcn,wide"},
            "model 'wide': tensor 'x': 4 on axis 1 of shape [3, 4], but 5 is required",
        ),
    ],
)
def test_refusals_name_what_is_wrong(engine, channel, asked, says):
    engine.infos["wide"] = ModelInfo(
        "wide", "1", "READY", inputs=(TensorSpec("x", "FP32", (-1, 5)),),
        outputs=(TensorSpec("output", "FP32", (-1, 3)),),
    )  # fmt: skip
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, **asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(says)
    assert not engine.calls
    ((model, _),) = engine.refusals
    # Names of models are labels of metrics, and the request may name anything.
    assert model in ("gcn", "unknown")


def test_an_unknown_model_refuses_all(client, engine):
    with pytest.raises(NotFound, match="nope"):
        client.infer(["gcn", "nope"], **GRAPH)
    assert not engine.calls


def test_only_outputs_asked_for_are_checked(channel, standard, engine):
    from serve.pb import grpc_service_pb2 as pb

    def message(*outputs):
        found = pb.ModelInferRequest.FromString(encode_request("gcn", GRAPH))
        found.parameters["models"].string_param = "gcn,gin"
        for name in outputs:
            found.outputs.add(name=name)
        return found

    answer = standard.ModelInfer(message("gin/output", "gcn/output"))
    assert [one.name for one in answer.outputs] == ["gcn/output", "gin/output"]
    for outputs, says in [
        (("output",), "outputs[0]: 'output' is no output of one of the models; they are named as"),
        (("gcn/output",), "outputs: none is asked of model 'gin'"),
        (("gcn/x", "gin/output"), "model 'gcn': outputs[0]: model 'gcn' has no output 'x'"),
    ]:
        with pytest.raises(grpc.RpcError) as caught:
            standard.ModelInfer(message(*outputs))
        assert caught.value.details().startswith(says)


def test_a_message_holds_so_many_outputs(engine, channel):
    many = tuple(TensorSpec(f"o{i}", "FP32", (-1, 3)) for i in range(9))
    for name in ("gcn", "gin"):
        engine.infos[name] = model_info(name)
        object.__setattr__(engine.infos[name], "outputs", many)
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, models="gcn,gin")
    assert caught.value.details() == (
        "outputs: the models have 18, and a message holds at most 16; name those that you want"
    )


def test_cancelling_the_call_cancels_all(engine, channel):
    engine.hold_all = True
    call = channel.unary_unary(INFER_METHOD).future(
        encode_request("gcn", GRAPH, parameters={"models": "gcn,gin"})
    )
    engine.wait_for_calls(2)
    call.cancel()
    wait_for(lambda: len(engine.cancelled) == 2, "both cancelled")


def test_a_server_that_starts_refuses_with_its_reason(engine, client):
    engine.refuse_with = NotReady("the server is starting or has stopped")
    with pytest.raises(Exception, match="is starting"):
        client.infer(["gcn", "gin"], retry=False, **GRAPH)
    assert engine.refusals == [("gcn", "NotReady")]


def test_a_version_that_was_unloaded_meanwhile_is_chosen_again(engine, client):
    submit = engine.submit_jointly

    def replaced(_):
        engine.submit_jointly = submit
        raise VersionReplaced("version 1 of model 'gcn' was unloaded meanwhile")

    engine.submit_jointly = replaced
    found = client.infer(["gcn", "gin:1"], retry=False, **GRAPH)
    assert not found.errors
    assert [(call.version, call.chosen) for call in engine.calls] == [("", "1"), ("1", "")]
    assert not engine.refusals


def test_the_client_refuses_what_it_can_see(client, engine):
    with pytest.raises(InvalidRequest, match="the list is empty"):
        client.infer([], GRAPH)
    with pytest.raises(InvalidRequest, match="write 'gcn:2'"):
        client.infer(["gcn"], GRAPH, version="2")
    with pytest.raises(InvalidRequest, match="for infer and ask_jointly"):
        client.ask(Request(model=["gcn"], **GRAPH))
    with pytest.raises(InvalidRequest, match="'gcn' is no list"):
        client.ask_jointly(Request(model="gcn", **GRAPH))
    with pytest.raises(InvalidRequest, match="asks one model"):
        list(client.infer_stream([Request(model=["gcn"], **GRAPH)]))
    assert not engine.calls


def test_streams_of_other_clients_may_ask_several(engine, channel):
    from serve.wire.messages import STREAM_METHOD, decode_stream_answer

    message = encode_request("gcn", GRAPH, request_id="a", parameters={"models": "gcn,gin"})
    stream = channel.stream_stream(STREAM_METHOD)(iter([message]), timeout=PATIENCE_S)
    (answer,) = [decode_stream_answer(one) for one in stream]
    assert (answer.request_id, list(answer.outputs)) == ("a", ["gcn/output", "gin/output"])


def test_many_at_once(engine, client):
    found = []

    def one():
        found.append(client.infer(["gcn", "gin"], **GRAPH))

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len({answers.joint_uid for answers in found}) == 12
