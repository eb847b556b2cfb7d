"""A small server of the protocol, scripted by a test: it counts, refuses, demands and encrypts."""

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np

from bench.kit.result import ROOT
from bench.kit.servers import takes_connections
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import aio_cluster, sync_cluster
from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import RETRY_TRAILER, decode_request, encode_response

SERVICE = "inference.GRPCInferenceService"
OWN = "gnnserve.v1.GnnServe"


def look_patiently(monkeypatch):
    """Have clients and fronts wait long for a server's word, as a busy machine may keep it."""
    for module in (aio_cluster, sync_cluster):
        monkeypatch.setattr(module, "PROBE_S", 5.0)


class SmallServer:
    """Answers ModelInfer with the number of rows of `x`, and ModelMetadata with `inputs`."""

    def __init__(self):
        self.lock = threading.Lock()
        self.calls = Counter()
        self.in_flight = self.most_in_flight = 0
        #: (status, ms after which to try again or None), one for each call of a method to refuse.
        self.refusals = {}
        #: Calls of all methods at once above which it refuses requests.
        self.room = 10**6
        #: Token that calls must bring.
        self.token = None
        #: Metadata and time left of the last call.
        self.metadata = {}
        self.remaining_s = None
        #: What it says of itself.
        self.ready = True
        #: Calls wait for it before they are answered.
        self.go = threading.Event()
        self.go.set()
        #: Graphs that it says it holds; None: it does not say.
        self.graphs = None
        self.inputs = [("x", "FP32", (-1, 2)), ("edge_index", "INT64", (2, -1))]

    def _guarded(self, name: str, behavior: Callable, to_bytes: Callable) -> grpc.RpcMethodHandler:
        def call(message, context):
            with self.lock:
                self.calls[name] += 1
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                self.metadata = dict(context.invocation_metadata())
                self.remaining_s = context.time_remaining()
                full = name == "ModelInfer" and self.in_flight > self.room
                refusal = next(iter(self.refusals.get(name, ())), None)
                if refusal is not None:
                    self.refusals[name].pop(0)
            try:
                if full:
                    context.set_trailing_metadata(((RETRY_TRAILER, "10000000"),))
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                self.go.wait()
                if self.token and self.metadata.get("authorization") != f"Bearer {self.token}":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
                if refusal is not None:
                    status, retry_ms = refusal
                    if retry_ms is not None:
                        context.set_trailing_metadata(((RETRY_TRAILER, str(retry_ms)),))
                    context.abort(status, "refused")
                return to_bytes(behavior(message))
            finally:
                with self.lock:
                    self.in_flight -= 1

        return grpc.unary_unary_rpc_method_handler(call)

    def infer(self, message):
        request = decode_request(message)
        with self.lock:
            self.calls["graph", request.parameters.get("graph")] += 1
        rows = next(each.shape[0] for each in request.inputs if each.name == "x")
        output = np.full((rows, 1), len(request.inputs), np.float32)
        return encode_response(
            request.model, {"output": output}, version="1", request_id=request.request_id
        )

    def held(self, message):
        """Answer ListGraphs; raises what a server without it has."""
        if self.graphs is None:
            raise NotImplementedError
        answer = gnnserve_pb2.ListGraphsResponse()
        for name in self.graphs:
            answer.graphs.add(name=name)
        return answer

    def metadata_of(self, message):
        request = pb.ModelMetadataRequest.FromString(message)
        answer = pb.ModelMetadataResponse(name=request.name, versions=["1"])
        for name, datatype, shape in self.inputs:
            answer.inputs.add(name=name, datatype=datatype, shape=shape)
        answer.outputs.add(name="output", datatype="FP32", shape=(-1, 1))
        return answer

    @contextmanager
    def running(self, credentials=None, port=0):
        """Serve on the port of localhost, 0 for a free one; yields the port."""
        server = grpc.server(ThreadPoolExecutor(128), options=[("grpc.so_reuseport", 0)])
        plain = pb.RepositoryModelLoadResponse
        for service, methods in (
            (
                SERVICE,
                {
                    "ModelInfer": (self.infer, bytes),
                    "ModelMetadata": (self.metadata_of, lambda m: m.SerializeToString()),
                    "ServerReady": (
                        lambda _: pb.ServerReadyResponse(ready=self.ready),
                        lambda m: m.SerializeToString(),
                    ),
                    "RepositoryModelLoad": (lambda _: plain(), lambda m: m.SerializeToString()),
                },
            ),
            (
                OWN,
                {
                    "ListGraphs": (self.held, lambda m: m.SerializeToString()),
                    "UpdateGraph": (
                        lambda _: gnnserve_pb2.UpdateGraphResponse(),
                        lambda m: m.SerializeToString(),
                    ),
                },
            ),
        ):
            handlers = {
                name: self._guarded(name, behavior, to_bytes)
                for name, (behavior, to_bytes) in methods.items()
            }
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        if credentials is None:
            port = server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
        server.start()
        try:
            yield port
        finally:
            self.go.set()
            server.stop(0).wait()


class SmallProcess:
    """A small server in a process, which a test kills, stops and starts."""

    def __init__(self, port):
        self.port = port
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "tests.client.small_server", str(self.port)]
        self.process = subprocess.Popen(command, cwd=ROOT)
        wait_for(lambda: takes_connections(self.port), "the server to listen")

    def end(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(PATIENCE_S)


if __name__ == "__main__":
    with SmallServer().running(port=int(sys.argv[1])):
        threading.Event().wait()
