"""The client for threads, made from ``aio``: edit that, then `make client`."""

import contextlib
import time
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
)
from types import TracebackType
from typing import Any, Unpack, overload

import grpc

from serve.client.answers import Answer
from serve.client.channel import Credentials, Token, address_of
from serve.client.errors import (
    ClientError,
    InvalidRequest,
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
from serve.client.joint import Answers
from serve.client.requests import (
    GivenFanouts,
    Request,
    RequestFields,
    count_of,
    fanouts_text,
    refuse_unknown,
)
from serve.client.retries import TimeLimit
from serve.client.streaming import Outcome, PendingRequests
from serve.client.sync_connection import Channel, Transport
from serve.client.sync_inference import Requester
from serve.client.sync_jobs import Jobs
from serve.client.sync_versions import Versions
from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import MAX_MESSAGE_BYTES, Response, decode_response

_POLL_S = 0.05
#: Time limit for the loading of a model, which may be calibrated first.
_LOAD_S = 600.0


class Client(Versions, Jobs):
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
                `http://` or `grpc://` it is not. Several, with commas between them, are servers of
                the same models: each call goes to the one with the fewest, and to another when that
                fails.
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
        addresses = [
            address_of(
                each,
                credentials=credentials,
                token=token,
                metadata=metadata,
                max_message_bytes=max_message_bytes,
            )
            for each in target.split(",")
        ]
        if len(addresses) == 1:
            channel = Channel(addresses[0])
            self._connection = Transport(channel, timeout_s, max_in_flight)
        else:
            if shared_memory_bytes:
                raise ValueError("shared_memory_bytes: memory is shared with one server")
            from serve.client.sync_cluster import ClusterTransport  # which others do not need

            self._connection = ClusterTransport(addresses, timeout_s, max_in_flight)
        self._inference = Requester(self._connection, max_message_bytes, shared_memory_bytes)
        self._max_message_bytes = max_message_bytes

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
        self._inference.close()
        self._connection.close()

    @overload
    def infer(self, model: str, data: Any = None, **options: Unpack[RequestFields]) -> Answer: ...

    @overload
    def infer(
        self, model: list[str] | tuple[str, ...], data: Any = None, **options: Unpack[RequestFields]
    ) -> Answers: ...

    def infer(
        self,
        model: str | list[str] | tuple[str, ...],
        data: Any = None,
        **options: Unpack[RequestFields],
    ) -> Answer | Answers:
        """Ask for one prediction: for `data`, for arrays, or for nodes of a resident graph.

        Args:
            model: Name in the server's repository; or a list of names, each with `:version` behind
                it if wanted, to ask several models about the same graph.
            data: A PyG `Data`, `Batch` or `HeteroData`, or a list of `Data`; a mapping from names
                to arrays; or any object with `x` [N, F], `edge_index` [2, E] and what else the
                model takes as attributes. Only what the model takes is sent.
            **options: The fields of ``Request``: arrays by keyword, `node_ids` with `graph`,
                `qos_target_s`, `timeout_s`, `priority`, `tenant`, `seed`, `version`, `request_id`,
                `retry`.

        Returns:
            The answer; its `outputs` are numpy arrays by name, and `output` is the first of them.
            For a list of models, the answer of each by its name in the list.
        """
        refuse_unknown(options)
        request = Request(model=model, data=data, **options)
        return self.ask_jointly(request) if request.is_joint else self.ask(request)

    def ask(self, request: Request) -> Answer:
        """Ask for one prediction by a ``Request`` of one model made before."""
        if request.is_joint:
            raise InvalidRequest.local("model: a list of models is for infer and ask_jointly")
        return Answer.of(*self._asked(request))

    def ask_jointly(self, request: Request) -> Answers:
        """Ask several models by a ``Request`` with a list of them."""
        if not request.is_joint:
            raise InvalidRequest.local(f"model: {request.model!r} is no list of models")
        return Answers.of(*self._asked(request))

    def _asked(
        self, request: Request
    ) -> tuple[Response, tuple[int, ...] | None, Mapping[str, tuple[int, ...]]]:
        """Return the response, and the nodes and rows of each graph if the request held several."""
        with self._connection.place(request.timeout_s) as limit:
            graph = request.read(self._inference.needed(request, limit))
            response = self._inference.send(request, graph.tensors, limit)
        return decode_response(response), graph.graph_nodes, graph.graph_rows

    def infer_stream(
        self,
        requests: Iterable[Request],
        *,
        timeout_s: float | None = None,
    ) -> Iterator[Outcome]:
        """Send many requests over one stream; yields `(position, answer or error)` as they finish.

        A failed request does not end the stream, and is not repeated. One that the client refuses
        is told with the next answer, or at once when none is awaited. `timeout_s` limits all of it;
        a request without a limit has the client's. Requests are read as the server takes them.
        """
        pending = PendingRequests(self._connection.timeout_s)
        broken: list[BaseException] = []
        source, whole, more = iter(requests), TimeLimit(timeout_s), True

        def messages() -> Iterator[bytes]:
            nonlocal more
            try:
                for request in source:
                    entered = pending.enter(request)
                    try:
                        limit = TimeLimit(entered.timeout_s)
                        graph = entered.read(self._inference.needed(entered, limit))
                        pending.sent(entered, graph.graph_nodes, graph.graph_rows)
                        yield entered.encode(graph.tensors, self._max_message_bytes)
                    except ClientError as error:
                        pending.drop(entered, error)
                        if more := not pending.awaited_count:
                            return  # so that it is told: no answer will come
            except Exception as error:
                broken.append(error)

        while more:
            more = False
            call = self._connection.stream(messages(), whole.remaining_s)
            try:
                for message in call:
                    yield pending.settle(message)
                    while pending.unsent:
                        yield pending.unsent.popleft()
            except grpc.RpcError as error:
                raise from_rpc(error) from error
            finally:
                call.cancel()
            while pending.unsent:
                yield pending.unsent.popleft()
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
        fanouts: GivenFanouts | None = None,
        node_type: str = "",
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
            node_type: Type of the ids in a graph with several; empty for the only one possible.
            version: Version of the model; empty for the newest.
        """
        request = gnnserve_pb2.EstimateRequest(
            model=model,
            version=version,
            num_nodes=count_of("num_nodes", num_nodes),
            num_edges=count_of("num_edges", num_edges),
            graph=graph,
            num_ids=count_of("num_ids", num_ids),
            fanouts=fanouts_text(fanouts) or "",
            node_type=node_type,
        )
        method = self._connection.own.Estimate
        return Estimate.of(self._connection.call(method, request, graph=graph))

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
        found = self._connection.call(self._connection.own.ListGraphs, request, graph=name)
        return tuple(map(GraphFacts.of, found.graphs))

    def update_graph(
        self, graph: str, *, if_version: int | None = None, **change: Unpack[GraphChange]
    ) -> GraphFacts:
        """Change a graph that the server holds, wholly or not at all.

        Args:
            graph: Name of the graph.
            if_version: Version that the graph must have, else raises Mismatched; None for any.
            **change: See ``GraphChange``: `add_x`, `set_ids` with `set_x`, `remove_edges`,
                `add_edges`; and for graphs with several types `add_nodes` and `set_nodes`.
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
        limit = TimeLimit(self._connection.timeout_s)
        return self._inference.interface(model, version, limit)

    def load(self, model: str, *, timeout_s: float | None = _LOAD_S) -> None:
        """Load a model from the server's repository, or load it again with its new versions.

        Returns when it serves. A model that was never loaded is calibrated first.
        """
        request = pb.RepositoryModelLoadRequest(model_name=model)
        method = self._connection.standard.RepositoryModelLoad
        self._connection.call(method, request, TimeLimit(timeout_s), changes=True)
        self._inference.forget(model)

    def unload(self, model: str) -> None:
        """Stop serving a model; requests for it raise Unavailable."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        method = self._connection.standard.RepositoryModelUnload
        self._connection.call(method, request, changes=True)
        self._inference.forget(model)

    def ready(self, model: str = "", version: str = "") -> bool:
        """Return True when the server, or the model, accepts requests; False if unreachable."""
        limit = TimeLimit(self._connection.timeout_s)
        return _is_ready(self._connection, model, version, limit)

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the server accepts requests; raises TimedOut."""
        limit = TimeLimit(timeout_s)
        while limit.remaining_s:
            # One that does not answer may be another soon: it is asked again.
            with contextlib.suppress(TimedOut):
                asked = limit.within(self._connection.timeout_s)
                if _is_ready(self._connection, "", "", asked):
                    return
            time.sleep(_POLL_S)
        raise TimedOut.local(f"not ready after {timeout_s:g} s")


def _is_ready(connection: Transport, model: str, version: str, limit: TimeLimit) -> bool:
    standard = connection.standard
    method: Any = standard.ServerReady
    request: Any = pb.ServerReadyRequest()
    if model:
        method = standard.ModelReady
        request = pb.ModelReadyRequest(name=model, version=version)
    try:
        return bool((connection.call(method, request, limit, repeated=False)).ready)
    except Unavailable:
        return False
