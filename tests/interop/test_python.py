"""Python's clients of gRPC, each against both front ends."""

import asyncio
import threading

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from bench.kit.waiting import PATIENCE_S, eventually
from serve.wire.messages import (
    INFER_METHOD,
    STREAM_METHOD,
    decode_response,
    decode_stream_answer,
)
from tests.rpc.fakes import CLASSES
from tests.rpc.requests import EDGES, features, request

NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", NO_LIMIT) as channel:
        yield channel


def test_grpc_aio(server, engine):
    engine.held = {"held"}

    async def talk():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", NO_LIMIT) as channel:
            infer = channel.unary_unary(INFER_METHOD)
            answers = await asyncio.gather(
                *(infer(request(nodes, str(nodes)), timeout=PATIENCE_S) for nodes in range(1, 101))
            )
            found = [decode_response(answer) for answer in answers]
            assert [one.request_id for one in found] == [str(nodes) for nodes in range(1, 101)]
            large = decode_response(await infer(request(1_250_000), timeout=PATIENCE_S))
            np.testing.assert_array_equal(
                large.outputs["output"], features(1_250_000)[:, :CLASSES] + 2
            )
            call = infer(request(2, "held"))
            held = asyncio.ensure_future(call)
            await asyncio.to_thread(engine.wait_for_calls, 102)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await held
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(request(model="größe"), timeout=PATIENCE_S)
            assert "größe" in caught.value.details()
            stream = channel.stream_stream(STREAM_METHOD)(timeout=PATIENCE_S)
            for number in range(20):
                await stream.write(request(2, str(number)))
            await stream.done_writing()
            ids = {decode_stream_answer(answer).request_id async for answer in stream}
            assert ids == {str(number) for number in range(20)}

    asyncio.run(talk())
    eventually(lambda: [call.client_id for call in engine.cancelled] == ["held"])
    eventually(lambda: server.in_flight == 0)


def test_tritonclients_aio(server):
    triton = pytest.importorskip("tritonclient.grpc.aio")

    def inputs(nodes):
        found = []
        for name, array, kind in (("x", features(nodes), "FP32"), ("edge_index", EDGES, "INT64")):
            found.append(triton.InferInput(name, array.shape, kind))
            found[-1].set_data_from_numpy(array)
        return found

    async def talk():
        async with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_server_ready()
            results = await asyncio.gather(
                *(
                    client.infer("gcn", inputs(nodes), compression_algorithm=compression)
                    for nodes in (2, 100, 20_000)
                    for compression in (None, "gzip", "deflate")
                )
            )
            shapes = [result.as_numpy("output").shape for result in results]
            assert shapes == [(nodes, CLASSES) for nodes in (2, 100, 20_000) for _ in range(3)]

            async def requests():
                for number in range(10):
                    yield {
                        "model_name": "gcn", "inputs": inputs(3), "request_id": str(number)
                    }  # fmt: skip

            ids = set()
            async for result, error in client.stream_infer(requests()):
                assert error is None
                ids.add(result.get_response().id)
            assert ids == {str(number) for number in range(10)}

    asyncio.run(talk())


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_answered(channel, algorithm):
    infer = channel.unary_unary(INFER_METHOD)
    for nodes in (2, 50_000):
        answer = infer(request(nodes), timeout=PATIENCE_S, compression=algorithm)
        assert decode_response(answer).outputs["output"].shape == (nodes, CLASSES)


def test_reflection_tells_the_protocol(channel):
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert service.FindMethodByName("ModelInfer").input_type.full_name.endswith("ModelInferRequest")


def test_metadata_that_nobody_knows_is_passed_over(channel):
    metadata = [("trace-bin", bytes(range(256))), ("x-request", "é".encode().hex())]
    answer = channel.unary_unary(INFER_METHOD)(request(), metadata=metadata, timeout=PATIENCE_S)
    assert decode_response(answer).request_id == "r"


def test_a_draining_server_answers_what_it_accepted_and_tells_its_clients(server, channel, engine):
    engine.held = {"held"}
    infer = channel.unary_unary(INFER_METHOD)
    held = infer.future(request(2, "held"), timeout=PATIENCE_S)
    engine.wait_for_calls(1)
    states = []
    channel.subscribe(states.append)
    stopping = threading.Thread(target=server.stop, args=(PATIENCE_S,))
    stopping.start()
    eventually(lambda: server.draining)
    with pytest.raises(grpc.RpcError) as caught:
        infer(request(), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not held.done()
    engine.let_go()
    assert decode_response(held.result()).request_id == "held"
    stopping.join()
    eventually(lambda: states and states[-1] is not grpc.ChannelConnectivity.READY)
