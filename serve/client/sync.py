"""The client for threads, made from ``aio``: edit that, then `make client`."""

import contextlib
import threading
import time
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, Unpack

import grpc

from serve.client.answers import Answer
from serve.client.channel import Credentials, Token, address_of
from serve.client.errors import (
    Cancelled,
    ClientError,
    InvalidRequest,
    NotFound,
    TimedOut,
    Unavailable,
    from_rpc,
)
from serve.client.facts import (
    Estimate,
    GraphFacts,
    ModelFacts,
    ModelInterface,
    ServerFacts,
    models_of,
    report_of,
)
from serve.client.graphs import GraphChange, change_request
from serve.client.places import Places
from serve.client.requests import Request, RequestFields, fanouts_text
from serve.client.retries import TimeLimit
from serve.client.shared import SharedMemory
from serve.client.streaming import Outcome, PendingRequests
from serve.client.sync_connection import Connection
from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import MAX_MESSAGE_BYTES, Array, decode_response

_POLL_S = 0.05
#: Time limit for telling the server that the client closes.
_FORGET_S = 1.0
#: Time limit for the loading of a model, which may be calibrated first.
_LOAD_S = 600.0


class Client:
    """Calls one server; may be shared by threads. Methods raise a ``ClientError`` on failure."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = 60.0,
        max_in_flight: int | None = 64,
        credentials: Credentials | None = None,
        token: Token | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        shared_memory_bytes: int = 0,
    ) -> None:
        """Connect on first use.

        Args:
            target: `host:port`; with `https://` or `grpcs://` the connection is encrypted, with
                `http://` or `grpc://` it is not.
            timeout_s: Time limit of calls that set none; None to wait for ever.
            max_in_flight: Requests at once; further ones wait for their turn. None for any number.
            credentials: Path of the certificates to trust in PEM, ``TlsFiles``, or gRPC's channel
                credentials. They make the connection encrypted. None for public authorities.
            token: Sent as `authorization: Bearer …`; a function is called for every call.
            metadata: Sent with every call.
            max_message_bytes: Largest message sent or received; the server has its own limit.
            shared_memory_bytes: Size of the memory to share with a server on this host, if it
                offers that. Tensors of single requests are then passed in shared memory while it
                has room. Those of streams are always sent.

        Raises ValueError for arguments that contradict each other or cannot be sent, and OSError
        for a file that cannot be read.
        """
        address = address_of(
            target,
            credentials=credentials,
            token=token,
            metadata=metadata,
            max_message_bytes=max_message_bytes,
        )
        self._connection = Connection(address, timeout_s, max_in_flight)
        self._max_message_bytes = max_message_bytes
        self._shared_memory_bytes = shared_memory_bytes
        self._memory: SharedMemory | None = None
        self._registering = threading.Lock()
        self._interfaces: dict[tuple[str, str], Question] = {}

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
        """Close the connection; calls in flight raise Cancelled."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
            forget = pb.SystemSharedMemoryUnregisterRequest(name=memory.name)
            method = self._connection.standard.SystemSharedMemoryUnregister
            with contextlib.suppress(ClientError):
                self._connection.call(method, forget, TimeLimit(_FORGET_S), repeated=False)
        self._connection.close()

    def infer(self, model: str, data: Any = None, **options: Unpack[RequestFields]) -> Answer:
        """Ask for one prediction: for `data`, for arrays, or for nodes of a resident graph.

        Args:
            model: Name in the server's repository.
            data: A PyG `Data`, `Batch` or `HeteroData`, or a list of `Data`; a mapping from names
                to arrays; or any object with `x` [N, F], `edge_index` [2, E] and what else the
                model takes as attributes. Only what the model takes is sent.
            **options: The fields of ``Request``: arrays by keyword, `node_ids` with `graph`,
                `qos_target_s`, `timeout_s`, `priority`, `tenant`, `seed`, `version`, `request_id`,
                `retry`.

        Returns:
            The answer; its `outputs` are numpy arrays by name, and `output` is the first of them.
        """
        return self.ask(Request(model=model, data=data, **options))

    def ask(self, request: Request) -> Answer:
        """Ask for one prediction by a ``Request`` made before."""
        with self._connection.place(request.timeout_s) as limit:
            graph = request.read(self._needed(request, limit))
            try:
                if self._shared_memory_bytes:
                    response = self._infer_shared(request, graph.tensors, limit)
                else:
                    response = self._infer(request, graph.tensors, limit)
            except InvalidRequest:
                # Perhaps another version of the model was loaded.
                self._interfaces.pop((request.model, request.version), None)
                raise
        return Answer.of(decode_response(response), graph.graph_nodes)

    def infer_stream(
        self,
        requests: Iterable[Request],
        *,
        timeout_s: float | None = None,
    ) -> Iterator[Outcome]:
        """Send many requests over one stream; yields `(position, answer or error)` as they finish.

        A failed request does not end the stream, and is not repeated. `timeout_s` limits the whole
        stream; a request without a limit has the client's. Requests are read from the iterable as
        fast as the server can take them, in a thread of their own.
        """
        pending = PendingRequests(self._connection.timeout_s)
        broken: list[BaseException] = []

        def messages() -> Iterator[bytes]:
            try:
                for request in requests:
                    entered = pending.enter(request)
                    try:
                        limit = TimeLimit(entered.timeout_s)
                        graph = entered.read(self._needed(entered, limit))
                        pending.sent(entered, graph.graph_nodes)
                        yield entered.encode(graph.tensors, self._max_message_bytes)
                    except ClientError as error:
                        pending.drop(entered, error)
            except Exception as error:
                broken.append(error)

        call = self._connection.stream(messages(), timeout_s)
        try:
            for message in call:
                yield pending.settle(message)
                while pending.unsent:
                    yield pending.unsent.popleft()
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        finally:
            call.cancel()
        yield from pending.unsent
        if broken:
            raise broken[0]

    def estimate(
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
        return Estimate.of(self._connection.call(self._connection.own.Estimate, request))

    def report(self, since_s: float = 0.0) -> dict[str, Any]:
        """Return the QoS report over the last `since_s` seconds (0: all requests kept).

        It has the shape of `gnnserve report --json`.
        """
        request = gnnserve_pb2.ReportRequest(since_s=since_s)
        return report_of(self._connection.call(self._connection.own.Report, request))

    def describe(self) -> ServerFacts:
        """Return facts about the server's device and scheduling."""
        return ServerFacts.of(
            self._connection.call(self._connection.own.Describe, gnnserve_pb2.DescribeRequest())
        )

    def graphs(self, name: str = "") -> tuple[GraphFacts, ...]:
        """Return the graphs that the server holds, or the one named `name`."""
        request = gnnserve_pb2.ListGraphsRequest(name=name)
        found = self._connection.call(self._connection.own.ListGraphs, request)
        return tuple(map(GraphFacts.of, found.graphs))

    def update_graph(
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
        method = self._connection.own.UpdateGraph
        return GraphFacts.of((self._connection.call(method, request, changes=True)).graph)

    def models(self) -> tuple[ModelFacts, ...]:
        """Return every model of the repository, loaded or not."""
        request = pb.RepositoryIndexRequest()
        return models_of(self._connection.call(self._connection.standard.RepositoryIndex, request))

    def interface(self, model: str, version: str = "") -> ModelInterface:
        """Return a model's inputs and outputs. Asks the server once for all that wait for it."""
        return self._interface(model, version, TimeLimit(self._connection.timeout_s))

    def load(self, model: str, *, timeout_s: float | None = _LOAD_S) -> None:
        """Load a model from the server's repository, or load it again with its new versions.

        Returns when it serves. A model that was never loaded is calibrated first.
        """
        request = pb.RepositoryModelLoadRequest(model_name=model)
        method = self._connection.standard.RepositoryModelLoad
        self._connection.call(method, request, TimeLimit(timeout_s), changes=True)
        self._forget(model)

    def unload(self, model: str) -> None:
        """Stop serving a model; requests for it raise Unavailable."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        method = self._connection.standard.RepositoryModelUnload
        self._connection.call(method, request, changes=True)
        self._forget(model)

    def ready(self, model: str = "", version: str = "") -> bool:
        """Return True when the server, or the model, accepts requests; False if unreachable."""
        standard = self._connection.standard
        method: Any = standard.ServerReady
        request: Any = pb.ServerReadyRequest()
        if model:
            method = standard.ModelReady
            request = pb.ModelReadyRequest(name=model, version=version)
        try:
            return bool((self._connection.call(method, request, repeated=False)).ready)
        except Unavailable:
            return False

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the server accepts requests; raises TimedOut."""
        give_up = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > give_up:
                raise TimedOut.local(f"not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _infer(self, request: Request, tensors: Mapping[str, Array], limit: TimeLimit) -> bytes:
        """Send `request` with `tensors` in the message; returns the response."""
        message = request.encode(tensors, self._max_message_bytes)
        connection = self._connection
        response: bytes = connection.call(connection.infer, message, limit, repeated=request.retry)
        return response

    def _infer_shared(
        self, request: Request, tensors: Mapping[str, Array], limit: TimeLimit
    ) -> bytes:
        """Send `request` with `tensors` in shared memory if that has room; returns the response."""
        memory = self._registered(limit)
        places = memory.place(tensors)
        if places is None:
            return self._infer(request, tensors, limit)
        connection = self._connection
        try:
            message = request.encode(tensors, self._max_message_bytes, places)
            response: bytes = connection.call(
                connection.infer, message, limit, repeated=request.retry
            )
            return response
        except NotFound:
            if self._is_known(memory, limit):
                raise
        finally:
            memory.release(places)
        # The server was restarted and does not know the memory; the next request registers anew.
        memory.close()
        if self._memory is memory:
            self._memory = None
        return self._infer(request, tensors, limit)

    def _registered(self, limit: TimeLimit) -> SharedMemory:
        """Return the shared memory, which is created and registered on first use."""
        with self._registering:
            if self._memory is None:
                memory = SharedMemory(self._shared_memory_bytes)
                method = self._connection.standard.SystemSharedMemoryRegister
                try:
                    self._connection.call(method, memory.registration, limit, changes=True)
                except BaseException:
                    memory.close()
                    raise
                # The server has opened it; without a name nothing outlives the two processes.
                memory.unlink()
                self._memory = memory
            return self._memory

    def _is_known(self, memory: SharedMemory, limit: TimeLimit) -> bool:
        wanted = pb.SystemSharedMemoryStatusRequest(name=memory.name)
        method = self._connection.standard.SystemSharedMemoryStatus
        try:
            self._connection.call(method, wanted, limit)
        except NotFound:
            return False
        return True

    def _needed(self, request: Request, limit: TimeLimit) -> ModelInterface | None:
        """Return what the model takes, None when the request does not depend on it."""
        if not request.needs_interface:
            return None
        return self._interface(request.model, request.version, limit)

    def _interface(self, model: str, version: str, limit: TimeLimit) -> ModelInterface:
        """Return what the model takes; one caller asks the server, and the others wait for it."""
        key = model, version
        asked = self._interfaces.setdefault(key, Question())
        with asked.turn.taken(limit.remaining_s):
            if asked.failure is not None:
                # That of the call that this one has waited for.
                raise type(asked.failure)(asked.failure.code, asked.failure.message)
            if asked.found is None:
                method = self._connection.standard.ModelMetadata
                request = pb.ModelMetadataRequest(name=model, version=version)
                try:
                    found = self._connection.call(method, request, limit)
                except ClientError as error:
                    # A limit that was this caller's own says nothing to the others.
                    if not isinstance(error, TimedOut | Cancelled):
                        asked.failure = error
                        self._interfaces.pop(key, None)
                    raise
                asked.found = ModelInterface.of(found)
            return asked.found

    def _forget(self, model: str) -> None:
        """Have the interface of `model` asked for again."""
        for key in [key for key in self._interfaces if key[0] == model]:
            self._interfaces.pop(key, None)


class Question:
    """The interface of one model, asked for by one caller at a time."""

    def __init__(self) -> None:
        self.turn = Places(1, "questions about the model")
        self.found: ModelInterface | None = None
        self.failure: ClientError | None = None
