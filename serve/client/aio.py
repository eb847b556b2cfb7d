"""The client for asyncio, from which ``sync`` is generated: after a change, `make client`."""

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from serve.client.channel import REQUIRED, channel_options, must_ask
from serve.client.errors import (
    ClientError,
    InvalidRequest,
    NotFound,
    TimedOut,
    Unavailable,
    from_rpc,
)
from serve.client.facts import (
    Answer,
    Estimate,
    GraphFacts,
    ModelFacts,
    ServerFacts,
    models_of,
    report_of,
)
from serve.client.graphs import GraphChange, change_request
from serve.client.requests import Request, RequestFields, fanouts_text
from serve.client.shared import SharedMemory
from serve.client.streaming import Outcome, PendingRequests
from serve.pb import gnnserve_pb2, gnnserve_pb2_grpc, grpc_service_pb2_grpc
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import (
    INFER_METHOD,
    MAX_MESSAGE_BYTES,
    STREAM_METHOD,
    Array,
    decode_response,
)

ResultT = TypeVar("ResultT")
_POLL_S = 0.05
#: Time limit for telling the server that the client closes.
_FORGET_S = 1.0


class AsyncClient:
    """Calls one server from one event loop. Methods raise a ``ClientError`` on failure."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        shared_memory_bytes: int = 0,
    ) -> None:
        """Connect on first use; to be made inside a running event loop.

        Args:
            target: `host:port`.
            timeout_s: Time limit of calls that set none; None to wait for ever.
            max_message_bytes: Largest message sent or received; the server has its own limit.
            shared_memory_bytes: Size of the memory to share with a server on this host, if it
                offers that. Tensors of single requests are then passed in shared memory while it
                has room. Those of streams are always sent.
        """
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._shared_memory_bytes = shared_memory_bytes
        self._memory: SharedMemory | None = None
        self._registering = asyncio.Lock()
        self._channel = grpc.aio.insecure_channel(target, channel_options(max_message_bytes))
        # Without serializers these two carry bytes: see `serve.wire.messages`.
        self._infer: Any = self._channel.unary_unary(INFER_METHOD)
        self._stream: Any = self._channel.stream_stream(STREAM_METHOD)
        # Generated stubs carry no types.
        self._standard: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._own: Any = gnnserve_pb2_grpc.GnnServeStub(self._channel)  # type: ignore[no-untyped-call]
        self._inputs: dict[tuple[str, str], frozenset[str]] = {}

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight raise Cancelled."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
            forget = pb.SystemSharedMemoryUnregisterRequest(name=memory.name)
            with contextlib.suppress(ClientError):
                await self._call(self._standard.SystemSharedMemoryUnregister, forget, _FORGET_S)
        await self._channel.close()

    async def infer(self, model: str, data: Any = None, **options: Unpack[RequestFields]) -> Answer:
        """Ask for one prediction: for `data`, for arrays, or for nodes of a resident graph.

        Args:
            model: Name in the server's repository.
            data: A PyG `Data`, or any object with `x` [N, F], `edge_index` [2, E] and optionally
                `edge_weight` [E], `edge_attr` [E, D], `batch` [N]. Only the inputs that the model
                takes are sent.
            **options: The fields of ``Request``: the same arrays by keyword, `node_ids` with
                `graph`, `qos_target_s`, `timeout_s`, `priority`, `tenant`, `seed`, `version`,
                `request_id`.

        Returns:
            The answer; its `output` is FP32 [rows, classes].
        """
        return await self.ask(Request(model=model, data=data, **options))

    async def ask(self, request: Request) -> Answer:
        """Ask for one prediction by a ``Request`` made before."""
        tensors = request.tensors(await self._taken(request))
        try:
            if self._shared_memory_bytes:
                response = await self._infer_shared(request, tensors)
            else:
                message = request.encode(tensors, self._max_message_bytes)
                response = await self._call(self._infer, message, request.timeout_s)
        except InvalidRequest:
            self._inputs.clear()  # perhaps another version of the model was loaded
            raise
        return Answer.of(decode_response(response))

    async def infer_stream(
        self, requests: Iterable[Request] | AsyncIterable[Request]
    ) -> AsyncIterator[Outcome]:
        """Send many requests over one stream; yields `(position, answer or error)` as they finish.

        A failed request does not end the stream. Requests are read from the iterable as fast as
        the server can take them.
        """
        pending = PendingRequests()
        broken: list[BaseException] = []

        async def messages() -> AsyncIterator[bytes]:
            try:
                async for request in _each(requests):
                    entered = pending.enter(request)
                    try:
                        tensors = entered.tensors(await self._taken(entered))
                        yield entered.encode(tensors, self._max_message_bytes)
                    except ClientError as error:
                        pending.drop(entered, error)
            except Exception as error:
                broken.append(error)

        call = self._stream(messages(), timeout=self._timeout_s)
        try:
            async for message in call:
                yield pending.settle(message)
                while pending.unsent:
                    yield pending.unsent.popleft()
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        finally:
            call.cancel()
        for outcome in pending.unsent:
            yield outcome
        if broken:
            raise broken[0]

    async def estimate(
        self,
        model: str,
        *,
        num_nodes: int = 0,
        num_edges: int = 0,
        graph: str = "",
        num_ids: int = 0,
        fanouts: str | Sequence[int] | None = None,
        version: str = "",
    ) -> Estimate:
        """Estimate what a request needs, without running it.

        Args:
            model: Name in the server's repository.
            num_nodes: Nodes of the request's graph.
            num_edges: Edges of the request's graph.
            graph: Resident graph, for a request by node ids; instead of the two sizes.
            num_ids: Number of node ids in such a request.
            fanouts: Fan-outs of such a request; None for the model's own.
            version: Version of the model; empty for the newest.
        """
        request = gnnserve_pb2.EstimateRequest(
            model=model,
            version=version,
            num_nodes=num_nodes,
            num_edges=num_edges,
            graph=graph,
            num_ids=num_ids,
            fanouts=fanouts_text(fanouts) or "",
        )
        return Estimate.of(await self._call(self._own.Estimate, request))

    async def report(self, since_s: float = 0.0) -> dict[str, Any]:
        """Return the QoS report over the last `since_s` seconds (0: all requests kept).

        It has the shape of `gnnserve report --json`.
        """
        request = gnnserve_pb2.ReportRequest(since_s=since_s)
        return report_of(await self._call(self._own.Report, request))

    async def describe(self) -> ServerFacts:
        """Return facts about the server's device and scheduling."""
        return ServerFacts.of(await self._call(self._own.Describe, gnnserve_pb2.DescribeRequest()))

    async def graphs(self, name: str = "") -> tuple[GraphFacts, ...]:
        """Return the graphs that the server holds, or the one named `name`."""
        request = gnnserve_pb2.ListGraphsRequest(name=name)
        found = await self._call(self._own.ListGraphs, request)
        return tuple(map(GraphFacts.of, found.graphs))

    async def update_graph(
        self, graph: str, *, if_version: int | None = None, **change: Unpack[GraphChange]
    ) -> GraphFacts:
        """Change a graph that the server holds, wholly or not at all.

        Args:
            graph: Name of the graph.
            if_version: Version that the graph must have, else raises Mismatched; None for any.
            **change: See ``GraphChange``: `add_x`, `set_ids` with `set_x`, `remove_edges`,
                `add_edges`.
        """
        request = change_request(graph, change, if_version)
        return GraphFacts.of((await self._call(self._own.UpdateGraph, request)).graph)

    async def models(self) -> tuple[ModelFacts, ...]:
        """Return every model of the repository, loaded or not."""
        request = pb.RepositoryIndexRequest()
        return models_of(await self._call(self._standard.RepositoryIndex, request))

    async def ready(self, model: str = "", version: str = "") -> bool:
        """Return True when the server, or the model, accepts requests; False if unreachable."""
        try:
            if not model:
                found = await self._call(self._standard.ServerReady, pb.ServerReadyRequest())
                return bool(found.ready)
            request = pb.ModelReadyRequest(name=model, version=version)
            return bool((await self._call(self._standard.ModelReady, request)).ready)
        except Unavailable:
            return False

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the server accepts requests; raises TimedOut."""
        give_up = time.monotonic() + timeout_s
        while not await self.ready():
            if time.monotonic() > give_up:
                raise TimedOut.local(f"not ready after {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    async def _infer_shared(self, request: Request, tensors: Mapping[str, Array]) -> bytes:
        """Send `request` with `tensors` in shared memory if that has room; returns the response."""
        memory = await self._registered()
        places = memory.place(tensors)
        try:
            message = request.encode(tensors, self._max_message_bytes, places)
            response: bytes = await self._call(self._infer, message, request.timeout_s)
            return response
        except NotFound:
            if places is None or await self._is_known(memory):
                raise
        finally:
            if places is not None:
                memory.release(places)
        # The server was restarted and does not know the memory; the next request registers anew.
        memory.close()
        if self._memory is memory:
            self._memory = None
        message = request.encode(tensors, self._max_message_bytes)
        response = await self._call(self._infer, message, request.timeout_s)
        return response

    async def _registered(self) -> SharedMemory:
        """Return the shared memory, which is created and registered on first use."""
        async with self._registering:
            if self._memory is None:
                memory = SharedMemory(self._shared_memory_bytes)
                try:
                    await self._call(self._standard.SystemSharedMemoryRegister, memory.registration)
                except BaseException:
                    memory.close()
                    raise
                # The server has opened it; without a name nothing outlives the two processes.
                memory.unlink()
                self._memory = memory
            return self._memory

    async def _is_known(self, memory: SharedMemory) -> bool:
        wanted = pb.SystemSharedMemoryStatusRequest(name=memory.name)
        try:
            await self._call(self._standard.SystemSharedMemoryStatus, wanted)
        except NotFound:
            return False
        return True

    async def _taken(self, request: Request) -> Collection[str]:
        """Return the inputs that the model takes; asks the server once, and only if it matters."""
        if not must_ask(request):
            return REQUIRED
        key = request.model, request.version
        if key not in self._inputs:
            wanted = pb.ModelMetadataRequest(name=request.model, version=request.version)
            found = await self._call(self._standard.ModelMetadata, wanted)
            self._inputs[key] = frozenset(tensor.name for tensor in found.inputs)
        return self._inputs[key]

    async def _call(
        self,
        method: Callable[..., Awaitable[ResultT]],
        request: object,
        timeout_s: float | None = None,
    ) -> ResultT:
        """Make a call and convert its errors."""
        try:
            return await method(
                request, timeout=self._timeout_s if timeout_s is None else timeout_s
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from error


async def _each(requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncIterator[Request]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
