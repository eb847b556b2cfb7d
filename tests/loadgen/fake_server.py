"""A server that answers every inference after a delay: `fake_server.py DELAY_S FAIL_EVERY HOLD`.

Prints its port, then a line when 20 inferences have come; at the end of its stdin a digest of all
requests, and stops. Every
FAIL_EVERY-th inference is refused, none if 0. None is answered before HOLD have come, and stopping
waits for none. Estimates are made up: 10 µs per node, 3 slots.
"""

import itertools
import os
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import grpc

from serve.pb import gnnserve_pb2, gnnserve_pb2_grpc, grpc_service_pb2, grpc_service_pb2_grpc

TARGET_US = 50_000
EDGES = ("edge_index", "INT64", [2, -1])
DEMO = (("x", "FP32", [-1, 8]), EDGES)
MODELS = dict.fromkeys(("gcn", "sage", "gin", "gat"), DEMO) | {
    "gine": (
        ("x", "FP32", [-1, 4]),
        EDGES,
        ("edge_weight", "FP32", [-1]),
        ("edge_attr", "FP32", [-1, 3]),
        ("batch", "INT64", [-1]),
        ("node_ids", "INT64", [-1]),
    ),
}


class Inference(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, delay_s, fail_every, hold):
        self.delay_s = delay_s
        self.fail_every = fail_every
        self.hold, self.all_came = hold, threading.Event()
        # Counted by a C function, so that threads cannot count alike.
        self.numbers = itertools.count(1)
        self.digests = []

    def ServerReady(self, request, context):
        return grpc_service_pb2.ServerReadyResponse(ready=True)

    def ModelMetadata(self, request, context):
        if request.name not in MODELS:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model '{request.name}'")
        answer = grpc_service_pb2.ModelMetadataResponse(name=request.name, versions=["1"])
        for name, datatype, shape in MODELS[request.name]:
            answer.inputs.add(name=name, datatype=datatype, shape=shape)
        return answer

    def RepositoryIndex(self, request, context):
        answer = grpc_service_pb2.RepositoryIndexResponse()
        for name in MODELS:
            answer.models.add(name=name, version="1", state="READY")
        return answer

    def ModelInfer(self, request, context):
        wanted = [name for name, _, _ in MODELS[request.model_name] if name != "node_ids"]
        if [tensor.name for tensor in request.inputs] != wanted:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"wanted: {wanted}")
        number = next(self.numbers)
        self.digests.append(zlib.crc32(request.SerializeToString(deterministic=True)))
        if number == 20:
            print("called", flush=True)  # noqa: T201
        if number >= self.hold:
            self.all_came.set()
        self.all_came.wait()
        time.sleep(self.delay_s)
        if self.fail_every and number % self.fail_every == 0:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"queue full at call {number}")
        answer = grpc_service_pb2.ModelInferResponse(model_name=request.model_name)
        target = TARGET_US
        if "qos_target_us" in request.parameters:
            target = request.parameters["qos_target_us"].int64_param
        answer.parameters["qos_target_us"].int64_param = target
        answer.parameters["qos_violated"].bool_param = self.delay_s * 1e6 > target
        rows = request.inputs[0].shape[0]
        answer.outputs.add(name="output", datatype="FP32", shape=[rows, 1])
        answer.raw_output_contents.append(bytes(4 * rows))
        return answer


class GnnServe(gnnserve_pb2_grpc.GnnServeServicer):
    def Describe(self, request, context):
        return gnnserve_pb2.DescribeResponse(device="fake", slots=3)

    def Estimate(self, request, context):
        return gnnserve_pb2.EstimateResponse(solo_ns=request.num_nodes * 10_000)


def main():
    delay_s, fail_every, hold = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    server = grpc.server(
        ThreadPoolExecutor(64), options=[("grpc.max_receive_message_length", 64 * 2**20)]
    )
    inference = Inference(delay_s, fail_every, hold)
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, server)
    gnnserve_pb2_grpc.add_GnnServeServicer_to_server(GnnServe(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)  # noqa: T201
    server.start()
    sys.stdin.read()
    print(zlib.crc32(repr(sorted(inference.digests)).encode()), flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    main()
