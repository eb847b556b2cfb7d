"""Connection to the server under load."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, TypeVar

from loadgen import patched  # noqa: F401  isort: skip

import gevent
import grpc
from gevent.event import AsyncResult

from loadgen.inputs import Shapes
from serve.errors import NotReady, UnknownName
from serve.pb import gnnserve_pb2, gnnserve_pb2_grpc, grpc_service_pb2, grpc_service_pb2_grpc
from serve.wire.messages import INFER_METHOD, ParameterValue, WireError, decode_response

_RATE_INSTEAD = "rho needs a gnnserve server: give a rate"
ResultT = TypeVar("ResultT")

_CONNECT_S = 10.0
_ASK_S = 30.0
#: Pause before measuring a solo time, which includes that idle cores are slower at first.
_REST_S = 0.01


@dataclass(frozen=True, slots=True)
class Reply:
    """End of one request."""

    #: `perf_counter_ns()` at the arrival of the answer.
    done_ns: int
    #: `OK`, gRPC's name of the status, or MALFORMED.
    status: str
    message: str = ""
    size_bytes: int = 0
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


class Target:
    """Channel to one server."""

    def __init__(self, address: str) -> None:
        """Connect to `address` (HOST:PORT); raises NotReady when no server answers."""
        self.address = address
        self._channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
            ],
        )
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_CONNECT_S)
        except grpc.FutureTimeoutError:
            self.close()
            raise NotReady(f"no gRPC server answers at {address} within {_CONNECT_S:g} s") from None
        self._infer: Any = self._channel.unary_unary(INFER_METHOD)
        # Generated stubs carry no types.
        self._inference: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._own: Any = gnnserve_pb2_grpc.GnnServeStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Cancel all requests in flight and disconnect."""
        self._channel.close()

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that are ready; raises NotReady if the server cannot."""
        request = grpc_service_pb2.RepositoryIndexRequest(ready=True)
        answer = self._ask(self._inference.RepositoryIndex, request, "name one model")
        return tuple(dict.fromkeys(model.name for model in answer.models))

    def inputs(self, model: str) -> Shapes:
        """Return names and shapes of the model's inputs; raises UnknownName or NotReady."""
        request = grpc_service_pb2.ModelMetadataRequest(name=model)
        metadata = self._ask(self._inference.ModelMetadata, request)
        return {tensor.name: tuple(tensor.shape) for tensor in metadata.inputs}

    def lanes(self) -> int:
        """Return the number of lanes; raises NotReady when the server cannot tell it."""
        answer = self._ask(self._own.Describe, gnnserve_pb2.DescribeRequest(), _RATE_INSTEAD)
        return int(answer.lanes)

    def solo_s(self, model: str, num_nodes: int, num_edges: int) -> float:
        """Return the server's estimate of a request's solo time, in seconds."""
        request = gnnserve_pb2.EstimateRequest(
            model=model, num_nodes=num_nodes, num_edges=num_edges
        )
        return float(self._ask(self._own.Estimate, request, _RATE_INSTEAD).solo_ns) / 1e9

    def lone_s(self, message: bytes) -> float:
        """Send an encoded request after a pause; returns its latency in seconds.

        Raises NotReady when there is no answer.
        """
        gevent.sleep(_REST_S)
        sent_ns = perf_counter_ns()
        answer = self.infer(message, _ASK_S)
        if answer.status != "OK":
            raise NotReady(f"{self.address}: {answer.message} ({answer.status})")
        return (answer.done_ns - sent_ns) / 1e9

    def infer(self, message: bytes, timeout_s: float) -> Reply:
        """Send one encoded request; blocks this greenlet only."""
        done = AsyncResult()
        # NOTE: a blocking call would occupy one of the 1,024 threads that gevent gives gRPC, and
        # once they are used up every further send would stall. A future occupies none.
        call = self._infer.future(message, timeout=timeout_s)
        call.add_done_callback(lambda _: done.set(perf_counter_ns()))
        try:
            done_ns: int = done.get()
        finally:
            call.cancel()
        code = call.code()
        if code is not grpc.StatusCode.OK:
            return Reply(done_ns, code.name, call.details() or "")
        data: bytes = call.result()
        try:
            return Reply(done_ns, "OK", "", len(data), decode_response(data).parameters)
        except WireError as error:
            return Reply(done_ns, "MALFORMED", str(error), len(data))

    def _ask(self, method: Callable[..., ResultT], request: Any, instead: str = "") -> ResultT:
        """Call `method`; when the server lacks it, the error says what to do `instead`."""
        try:
            return method(request, timeout=_ASK_S)
        except grpc.RpcError as error:
            text = f"{self.address}: {error.details()}"
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise UnknownName(text) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotReady(f"{text}; {instead}" if instead else text) from None
            raise NotReady(f"{text} ({error.code().name})") from None
