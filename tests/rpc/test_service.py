"""Every method over a real connection."""

import dataclasses
import threading
import time

import grpc
import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S, eventually, with_growing_limits
from serve.errors import InvalidInput, ModelError, QueueFull, RequestCancelled, TooBig
from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.rpc import describe
from serve.wire.messages import INFER_METHOD, decode_response, encode_request
from tests.rpc.fakes import CLASSES, FEATURES, FakeEngine

X = np.arange(3 * FEATURES, dtype=np.float32).reshape(3, FEATURES)
EDGES = np.array([[0, 1], [1, 2]], np.int64)


def message(request_id="", model="gcn", **parameters):
    return encode_request(
        model, {"x": X, "edge_index": EDGES}, request_id=request_id, parameters=parameters
    )


@pytest.fixture
def infer(channel):
    return channel.unary_unary(INFER_METHOD)


def fails(call, *args, **kwargs):
    """Return the RpcError with which the call ends."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return caught.value


def test_infer_answers_with_what_happened(infer, engine):
    answer = decode_response(infer(message("r-9", qos_target_us=900)))
    assert (answer.model, answer.version, answer.request_id) == ("gcn", "1", "r-9")
    np.testing.assert_array_equal(answer.outputs["output"], X[:, :CLASSES] + 2)
    assert answer.parameters == {
        "request_uid": "uid-1",
        "queue_us": 11,
        "prepare_us": 22,
        "run_us": 33,
        "group_id": 7,
        "group_size": 2,
        "merged": 2,
        "policy": "slack",
        "discipline": "rolling",
        "lane": 1,
        "executor": "eager",
        "solo_estimate_us": 50,
        "qos_target_us": 900,
        "qos_violated": False,
        "pmc_estimate_bytes": 4096,
        "pmc_measured_bytes": 2048,
    }
    assert engine.calls[0].arrived_ns <= time.monotonic_ns()


def test_infer_is_readable_by_the_library_and_ids_are_never_empty(standard, engine):
    engine.measured_bytes = None
    answer = standard.ModelInfer(pb.ModelInferRequest.FromString(message()))
    assert answer.id == answer.parameters["request_uid"].string_param == "uid-1"
    assert "pmc_measured_bytes" not in answer.parameters
    assert list(answer.outputs[0].shape) == [3, CLASSES]
    assert len(answer.raw_output_contents[0]) == 3 * CLASSES * 4
    assert not answer.outputs[0].HasField("contents")


def test_typed_contents_are_answered_in_raw_form(standard):
    request = pb.ModelInferRequest(model_name="gcn")
    x = request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    x.contents.fp32_contents.extend(X.ravel().tolist())
    edges = request.inputs.add(name="edge_index", datatype="INT64", shape=EDGES.shape)
    edges.contents.int64_contents.extend(EDGES.ravel().tolist())
    raw = standard.ModelInfer(request).raw_output_contents[0]
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4").reshape(3, CLASSES), X[:, :CLASSES] + 2)


def test_resident_graphs_answer_one_row_per_node(infer):
    ids = {"node_ids": np.array([5, 1], np.int64)}
    answer = decode_response(infer(encode_request("gcn", ids, parameters={"graph": "cora"})))
    assert answer.outputs["output"].tolist() == [[5] * CLASSES, [1] * CLASSES]


@pytest.mark.parametrize(
    ("send", "code", "says"),
    [
        (message(model="nope"), "NOT_FOUND", "nope"),
        (encode_request("gcn", {}, version="9"), "NOT_FOUND", "'9'"),
        (encode_request("gcn", {"x": X}), "INVALID_ARGUMENT", "'edge_index' is missing"),
        (b"\xff\xff\xff", "INVALID_ARGUMENT", "malformed"),
        (b"\x0a\x02\xff\xff", "INVALID_ARGUMENT", "malformed"),
    ],
)
def test_bad_requests_are_refused_and_the_server_lives(infer, send, code, says):
    error = fails(infer, send)
    assert error.code().name == code
    assert says in error.details()
    assert infer(message())


def test_refusals_are_told_to_the_engine_for_the_report(infer, engine):
    for bad in (message(model="nope"), encode_request("gcn", {"x": X})):
        fails(infer, bad)
    assert engine.refusals == [("nope", "UnknownName"), ("gcn", "InvalidInput")]


@pytest.mark.parametrize("where", ["refuse_with", "fail_with"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TooBig("needs 5 bytes, budget 3 bytes"), "RESOURCE_EXHAUSTED"),
        (InvalidInput("tensor 'x': NaN at [0, 1]"), "INVALID_ARGUMENT"),
        (ModelError("the model raised ValueError"), "INTERNAL"),
    ],
)
def test_the_engines_errors_are_told_as_they_are(infer, engine, where, error, code):
    setattr(engine, where, error)
    found = fails(infer, message())
    assert (found.code().name, found.details()) == (code, str(error))
    assert not [key for key, _ in found.trailing_metadata() if "retry" in key]


def test_a_full_queue_says_when_to_come_back(infer, engine):
    engine.fail_with = QueueFull("512 requests wait", retry_after_ns=40_000_001)
    error = fails(infer, message())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("grpc-retry-pushback-ms", "41") in [tuple(m) for m in error.trailing_metadata()]


def test_bugs_keep_their_text_in_the_log(infer, engine, caplog):
    engine.fail_with = RuntimeError("secret")
    error = fails(infer, message())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert "secret" in caplog.text


def test_the_grpc_deadline_reaches_the_engine(infer, engine):
    infer(message(), timeout=10 * PATIENCE_S)
    infer(message(timeout=1_000_000), timeout=10 * PATIENCE_S)
    infer(message())
    limits = [call.timeout_ns for call in engine.calls]
    assert 9e9 * PATIENCE_S < limits[0] < 11e9 * PATIENCE_S  # gRPC rounds up
    assert limits[1:] == [1_000_000_000, None]


def test_a_cancelled_call_is_cancelled_in_the_engine(infer, engine):
    engine.hold_all = True
    call = infer.future(message("gone"))
    engine.wait_for_calls(1)
    call.cancel()
    eventually(lambda: [c.client_id for c in engine.cancelled] == ["gone"])


def test_a_call_that_ended_before_it_was_looked_at_is_told_for_the_report(server, engine):
    """What clients gave up on while all threads were busy once had no row at all."""

    class Ended:
        def add_callback(self, callback):
            return False

    with pytest.raises(RequestCancelled, match="before the server read it"):
        server._inference.ModelInfer(message("late"), Ended())
    assert engine.refusals == [("unknown", "RequestCancelled")]
    assert server.in_flight == 0


def test_an_expired_deadline_cancels_too(infer, engine):
    def reached_the_engine(limit_s):
        error = fails(infer, message(), timeout=limit_s)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return engine.calls

    engine.hold_all = True
    calls = with_growing_limits(reached_the_engine)
    eventually(lambda: len(engine.cancelled) == len(calls))


def test_an_answered_request_is_not_cancelled_afterwards(infer, engine):
    infer(message())
    infer(message())
    assert engine.cancelled == []


def test_requests_are_served_side_by_side(infer, engine):
    engine.hold_all = True
    calls = [infer.future(message(str(i))) for i in range(16)]
    engine.wait_for_calls(16)
    engine.let_go()
    ids = [decode_response(call.result()).request_id for call in calls]
    assert ids == [str(i) for i in range(16)]


def test_too_large_a_message_is_refused_and_the_server_lives(infer):
    x = np.zeros((2**20, FEATURES), np.float32)
    error = fails(infer, encode_request("gcn", {"x": x, "edge_index": EDGES}))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    assert str(2**20) in error.details()
    assert infer(message())


def test_liveness_readiness_and_metadata(standard, engine):
    assert standard.ServerLive(pb.ServerLiveRequest()).live
    assert standard.ServerReady(pb.ServerReadyRequest()).ready
    assert standard.ModelReady(pb.ModelReadyRequest(name="gcn")).ready
    assert not standard.ModelReady(pb.ModelReadyRequest(name="nope")).ready
    engine.ready = False
    assert standard.ServerLive(pb.ServerLiveRequest()).live
    assert not standard.ServerReady(pb.ServerReadyRequest()).ready
    assert not standard.ModelReady(pb.ModelReadyRequest(name="gcn")).ready
    server = standard.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, server.version) == ("gnnserve", "0.1.0")
    assert {"statistics", "parameters", "system_shared_memory"} <= set(server.extensions)
    assert not {"cuda_shared_memory", "trace", "logging"} & set(server.extensions)


def test_model_metadata_and_config_name_the_tensors(standard):
    found = standard.ModelMetadata(pb.ModelMetadataRequest(name="gcn"))
    assert (found.name, list(found.versions), found.platform) == (
        "gcn",
        ["1"],
        "pytorch_safetensors",
    )
    assert [(t.name, t.datatype, list(t.shape)) for t in found.inputs][:2] == [
        ("x", "FP32", [-1, FEATURES]),
        ("edge_index", "INT64", [2, -1]),
    ]
    assert [(t.name, t.datatype) for t in found.outputs] == [("output", "FP32")]
    assert found.properties["executor"] == "eager"

    config = standard.ModelConfig(pb.ModelConfigRequest(name="gcn")).config
    assert (config.name, config.max_batch_size, config.platform) == ("gcn", 0, found.platform)
    inputs = {i.name: i for i in config.input}
    assert (inputs["x"].data_type, list(inputs["x"].dims)) == (11, [-1, FEATURES])
    assert (inputs["x"].optional, inputs["batch"].optional) == (False, True)
    assert config.instance_group[0].count == 2
    assert config.instance_group[0].kind == 2  # KIND_CPU
    assert list(config.version_policy.specific.versions) == [1]

    error = fails(standard.ModelMetadata, pb.ModelMetadataRequest(name="nope"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_statistics_count_every_request_by_stage(standard, infer, engine):
    for _ in range(3):
        infer(message())
    fails(infer, encode_request("gcn", {"x": X}))
    engine.fail_with = ModelError("no")
    fails(infer, message())
    fails(infer, message(model="nope"))
    wanted = pb.ModelStatisticsRequest(name="gcn")
    [found] = standard.ModelStatistics(wanted).model_stats
    stats = found.inference_stats
    assert (found.name, found.version, found.inference_count, found.execution_count) == (
        "gcn",
        "1",
        3,
        3,
    )
    assert abs(found.last_inference / 1000 - time.time()) < PATIENCE_S
    for stage, ns in (
        (stats.queue, 33_000),
        (stats.compute_input, 66_000),
        (stats.compute_infer, 99_000),
        (stats.compute_output, 12_000),
        (stats.success, 210_000),
    ):
        assert (stage.count, stage.ns) == (3, ns)
    assert stats.fail.count == 2
    assert stats.fail.ns > 0
    assert found.memory_usage[0].type == "CPU"
    assert found.memory_usage[0].byte_size == 1234

    everything = standard.ModelStatistics(pb.ModelStatisticsRequest()).model_stats
    counts = {model.name: model.inference_count for model in everything}
    assert counts == {"gcn": 3, "gin": 0}


def test_the_repository_is_listed_loaded_and_unloaded(standard, infer):
    def states(**only):
        found = standard.RepositoryIndex(pb.RepositoryIndexRequest(**only))
        return {model.name: (model.version, model.state, model.reason) for model in found.models}

    assert states()["gcn"] == ("1", "READY", "")
    unload = pb.RepositoryModelUnloadRequest(model_name="gcn")
    unload.parameters["unload_dependents"].bool_param = False
    standard.RepositoryModelUnload(unload)
    assert states()["gcn"] == ("1", "UNAVAILABLE", "unloaded")
    assert set(states(ready=True)) == {"gin"}
    assert fails(infer, message()).code() is grpc.StatusCode.UNAVAILABLE
    standard.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="gcn"))
    assert infer(message())

    load = pb.RepositoryModelLoadRequest(model_name="gcn")
    load.parameters["config"].string_param = "{}"
    error = fails(standard.RepositoryModelLoad, load)
    assert (error.code().name, "'config'" in error.details()) == ("INVALID_ARGUMENT", True)
    error = fails(standard.RepositoryIndex, pb.RepositoryIndexRequest(repository_name="other"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "method",
    ["CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings"],
)
def test_what_is_not_offered_says_so(standard, method):
    error = fails(getattr(standard, method), getattr(pb, f"{method}Request")())
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method in error.details()


def test_an_estimate_beyond_what_its_fields_hold_is_the_most_that_they_do():
    huge = dataclasses.replace(
        FakeEngine().estimate("gcn", "", 10**12, 0), reserve_bytes=10**24, solo_ns=2**63
    )
    found = describe.estimate(huge)
    assert (found.reserve_bytes, found.solo_ns) == (2**63 - 1, 2**63 - 1)
    assert (found.num_nodes, found.model) == (10**12, "gcn")


def test_describe_estimate_and_report(own, reports):
    facts = own.Describe(gnnserve_pb2.DescribeRequest())
    assert (facts.device, facts.slots, facts.policy, facts.window) == (
        "cpu",
        2,
        "slack",
        "adaptive",
    )
    assert (facts.max_message_bytes, facts.qos_factor) == (2**20, 2.0)

    wanted = gnnserve_pb2.EstimateRequest(model="gcn", num_nodes=10, num_edges=20)
    found = own.Estimate(wanted)
    assert (found.model, found.version, found.reserve_bytes, found.qos_target_ns) == (
        "gcn",
        "1",
        1024,
        40,
    )
    assert found.warning == "an upper bound"
    for wrong, says in (
        ({"num_nodes": -1}, "num_nodes"),
        ({"num_nodes": 1, "num_edges": -1}, "num_edges"),
        ({"num_edges": 1}, "0 nodes"),
        ({"num_nodes": 2**63 - 1}, "num_nodes: 9223372036854775807 is more than 1000000000000"),
        ({"num_ids": 1}, "without a graph"),
        ({"graph": "held", "num_ids": -1}, "num_ids"),
        ({"graph": "held", "num_ids": 1, "num_nodes": 1}, "graph 'held'"),
        ({"graph": "held", "fanouts": "0"}, "fanouts"),
    ):
        error = fails(own.Estimate, gnnserve_pb2.EstimateRequest(model="gcn", **wrong))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says in error.details()

    report = own.Report(gnnserve_pb2.ReportRequest(since_s=1.5))
    assert reports == [1.5]
    assert (report.requests, report.violation_rate, report.latency_over_qt.p90) == (5, 0.25, 0.75)
    assert dict(report.by_cause) == {"queue": 1, "prepare": 0}
    assert report.by_model["gcn"].latency_over_qt.p50 == 0.5
    assert report.memory.budget_bytes == 2**40
    for since_s in (-1.0, float("nan")):
        error = fails(own.Report, gnnserve_pb2.ReportRequest(since_s=since_s))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_many_clients_at_once_get_their_own_answers(target):
    wrong = []

    def ask(number):
        x = np.full((2, FEATURES), number, np.float32)
        with grpc.insecure_channel(target) as channel:
            infer = channel.unary_unary(INFER_METHOD)
            for i in range(10):
                sent = encode_request(
                    "gcn", {"x": x, "edge_index": EDGES}, request_id=f"{number}-{i}"
                )
                answer = decode_response(infer(sent))
                if (
                    answer.request_id != f"{number}-{i}"
                    or answer.outputs["output"][0, 0] != number + 2
                ):
                    wrong.append(answer)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
