"""Clients in other languages, each against both front ends."""

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from bench.kit.waiting import eventually
from serve.wire.messages import (
    INFER_METHOD,
    STREAM_METHOD,
    decode_response,
    decode_stream_answer,
)
from tests.interop.plan import LANGUAGES, Plan
from tests.rpc.fakes import CLASSES
from tests.rpc.requests import request


def output_shape(answer):
    """Return the shape of an answer's output."""
    return decode_response(answer).outputs["output"].shape


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """Return a function that makes a language's client once; it skips the test where it cannot."""
    made = {}

    def command(language):
        if language not in made:
            made[language] = LANGUAGES[language](tmp_path_factory.mktemp("client"))
        return made[language]

    return command


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_client_in_another_language(language, commands, server, engine, tmp_path):
    engine.held = {"held"}
    plan = Plan(commands(language), server.port, tmp_path)
    # From ten bytes, which are refused, to 20 MB, as large as the answer's 15 MB.
    sizes = {nodes: plan.add("unary", INFER_METHOD, request(nodes)) for nodes in (2, 5000, 1250000)}
    tiny = plan.add("unary", INFER_METHOD, b"\x0a\x08no-model")
    packed = plan.add("gzip", INFER_METHOD, request(20_000))
    unknown = plan.add("unary", INFER_METHOD, request(2, model="modèle-π-模型 100 %"))
    late = plan.add("unary", INFER_METHOD, request(2, "held"), deadline_s=0.5)
    cancelled = plan.add("cancel", INFER_METHOD, request(2, "held"), count=300)
    many = plan.add("many", INFER_METHOD, request(50), count=64)
    stream = plan.add("stream", STREAM_METHOD, request(50), count=50)
    health = plan.add("unary", "/grpc.health.v1.Health/Check", b"")
    nowhere = plan.add("unary", "/inference.GRPCInferenceService/Nothing", b"")
    found = plan.run()
    for nodes, place in sizes.items():
        assert (found[place].code, found[place].text) == (0, "")
        assert output_shape(found[place].answer) == (nodes, CLASSES)
    assert found[tiny].code == StatusCode.NOT_FOUND.value[0]
    assert output_shape(found[packed].answer) == (20_000, CLASSES)
    assert found[unknown].code == StatusCode.NOT_FOUND.value[0]
    assert "modèle-π-模型 100 %" in found[unknown].text
    assert found[late].code == StatusCode.DEADLINE_EXCEEDED.value[0]
    assert found[cancelled].code == StatusCode.CANCELLED.value[0]
    eventually(lambda: [call.client_id for call in engine.cancelled] == ["held"] * 2)
    assert (found[many].code, found[many].answers) == (0, 64)
    assert (found[stream].code, found[stream].answers) == (0, 50)
    assert decode_stream_answer(found[stream].answer).request_id == "r"
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert found[health].answer == serving.SerializeToString()
    assert found[nowhere].code == StatusCode.UNIMPLEMENTED.value[0]
    eventually(lambda: server.in_flight == 0)
