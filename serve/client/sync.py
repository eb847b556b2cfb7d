"""The client for threads."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from serve.client.channel import REQUIRED, channel_options, must_ask
from serve.client.errors import ClientError, InvalidRequest, TimedOut, Unavailable, from_rpc
from serve.client.facts import Answer, Estimate, ModelFacts, ServerFacts, models_of, report_of
from serve.client.requests import Options, Request
from serve.client.streaming import Outcome, StreamBook
from serve.pb import gnnserve_pb2, gnnserve_pb2_grpc, grpc_service_pb2_grpc
from serve.pb import grpc_service_pb2 as pb
from serve.wire import INFER_METHOD, MAX_MESSAGE_BYTES, STREAM_METHOD, decode_response

ResultT = TypeVar("ResultT")
_POLL_S = 0.05


class Client:
    """Calls one server; may be shared by threads. Every method raises a ``ClientError``."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Connect on first use.

        Args:
            target: `host:port`.
            timeout_s: For calls that have no time limit of their own; None: wait for ever.
            max_message_bytes: Largest message sent or taken; the server has its own limit.
        """
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._channel = grpc.insecure_channel(target, channel_options(max_message_bytes))
        # Without serializers these two carry bytes: see `serve.wire`.
        self._infer: Any = self._channel.unary_unary(INFER_METHOD)
        self._stream: Any = self._channel.stream_stream(STREAM_METHOD)
        # Generated stubs carry no types.
        self._standard: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._own: Any = gnnserve_pb2_grpc.GnnServeStub(self._channel)  # type: ignore[no-untyped-call]
        self._inputs: dict[tuple[str, str], frozenset[str]] = {}

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight end as Cancelled."""
        self._channel.close()

    def infer(self, model: str, data: Any = None, **options: Unpack[Options]) -> Answer:
        """One prediction: of `data` (a PyG `Data`), of arrays, or of nodes of a resident graph.

        Args:
            model: Name in the server's repository.
            data: Anything with `x` [N, F], `edge_index` [2, E] and maybe `edge_weight` [E],
                `edge_attr` [E, D], `batch` [N]. What the model does not take is not sent.
            **options: The fields of ``Request``: the same arrays by keyword, `node_ids` with
                `graph`, `qos_target_s`, `timeout_s`, `priority`, `tenant`, `seed`, `version`,
                `request_id`.
        """
        return self.ask(Request(model=model, data=data, **options))

    def ask(self, request: Request) -> Answer:
        """The same, as a value made before."""
        message = request.encode(self._taken(request), self._max_message_bytes)
        try:
            response = self._call(self._infer, message, request.timeout_s)
        except InvalidRequest:
            self._inputs.clear()  # perhaps another version of the model was loaded
            raise
        return Answer.of(decode_response(response))

    def infer_stream(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Many predictions over one stream: `(position, answer or error)`, as they finish.

        A request that fails does not end the stream. Requests are taken from the iterable as
        the server can take them, in a thread of their own.
        """
        book = StreamBook()
        broken: list[BaseException] = []

        def messages() -> Iterator[bytes]:
            try:
                for request in requests:
                    entered = book.enter(request)
                    try:
                        yield entered.encode(self._taken(entered), self._max_message_bytes)
                    except ClientError as error:
                        book.drop(entered, error)
            except Exception as error:
                broken.append(error)

        call = self._stream(messages(), timeout=self._timeout_s)
        try:
            for message in call:
                yield book.settle(message)
                while book.unsent:
                    yield book.unsent.popleft()
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        finally:
            call.cancel()
        yield from book.unsent
        if broken:
            raise broken[0]

    def estimate(
        self, model: str, *, num_nodes: int, num_edges: int, version: str = ""
    ) -> Estimate:
        """What a request of that size would need, without running it."""
        request = gnnserve_pb2.EstimateRequest(
            model=model, version=version, num_nodes=num_nodes, num_edges=num_edges
        )
        return Estimate.of(self._call(self._own.Estimate, request))

    def report(self, since_s: float = 0.0) -> dict[str, Any]:
        """The QoS report over the last `since_s` seconds (0: all), as `gnnserve report --json`."""
        return report_of(self._call(self._own.Report, gnnserve_pb2.ReportRequest(since_s=since_s)))

    def describe(self) -> ServerFacts:
        """What the server runs on and how it schedules."""
        return ServerFacts.of(self._call(self._own.Describe, gnnserve_pb2.DescribeRequest()))

    def models(self) -> tuple[ModelFacts, ...]:
        """Every model of the repository, loaded or not."""
        return models_of(self._call(self._standard.RepositoryIndex, pb.RepositoryIndexRequest()))

    def ready(self, model: str = "", version: str = "") -> bool:
        """Whether the server, or the model, takes requests now; False if it cannot be reached."""
        try:
            if not model:
                found = self._call(self._standard.ServerReady, pb.ServerReadyRequest())
                return bool(found.ready)
            request = pb.ModelReadyRequest(name=model, version=version)
            return bool(self._call(self._standard.ModelReady, request).ready)
        except Unavailable:
            return False

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the server takes requests; raises TimedOut."""
        give_up = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > give_up:
                raise TimedOut("DEADLINE_EXCEEDED", f"not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _taken(self, request: Request) -> Collection[str]:
        """Inputs that the model takes, asked once where it matters."""
        if not must_ask(request):
            return REQUIRED
        key = request.model, request.version
        if key not in self._inputs:
            wanted = pb.ModelMetadataRequest(name=request.model, version=request.version)
            found = self._call(self._standard.ModelMetadata, wanted)
            self._inputs[key] = frozenset(tensor.name for tensor in found.inputs)
        return self._inputs[key]

    def _call(
        self, method: Callable[..., ResultT], request: object, timeout_s: float | None = None
    ) -> ResultT:
        """One call, with errors as ours."""
        try:
            return method(request, timeout=self._timeout_s if timeout_s is None else timeout_s)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
