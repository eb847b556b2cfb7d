"""The connections of a client for threads to several servers, made from ``aio_cluster``."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from serve.client.channel import Address
from serve.client.errors import ClientError, InvalidRequest, from_rpc
from serve.client.retries import TimeLimit
from serve.client.several import (
    MOST_SERVERS,
    PROBE_EVERY_S,
    PROBE_S,
    RECONNECT_MS,
    Background,
    Bell,
    CallWithdrawn,
    Routes,
    Unary,
)
from serve.client.several_streams import Calls, graph_of, marked, stream_message
from serve.client.sync_connection import Channel, Transport
from serve.core.cluster.commands import EndRequest, SendAttempt
from serve.core.cluster.probing import Probe
from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import decode_request


class _Methods:
    """Methods of a service, each to be had from the channel of a server."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __getattr__(self, method: str) -> Callable[[Channel], Any]:
        return lambda channel: getattr(getattr(channel, self._service), method)


class ClusterTransport(Transport):
    """Calls one of several servers that serve the same, and another when that fails."""

    def __init__(
        self, addresses: Sequence[Address], timeout_s: float | None, max_in_flight: int | None
    ) -> None:
        """Connect on first use; see ``Transport``."""
        names = [address.target for address in addresses]
        if len(set(names)) != len(names) or len(names) > MOST_SERVERS:
            raise ValueError(
                f"target: up to {MOST_SERVERS} servers, none twice, got {', '.join(names)}"
            )
        options = [
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS // 10),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
        ]
        self._channels = {
            address.target: Channel(replace(address, options=[*address.options, *options]))
            for address in addresses
        }
        super().__init__(self._channels[names[0]], timeout_s, max_in_flight)
        self.infer: Any = lambda channel: channel.infer
        self.standard: Any = _Methods("standard")
        self.own: Any = _Methods("own")
        self._routes = Routes(names)
        self._probes = Background()
        self._probing = False
        self._bells = {name: Bell() for name in names}

    def close(self) -> None:
        """End the connections; calls in flight raise Cancelled. Idempotent."""
        self._closed = True
        self._routes.wake()
        for bell in self._bells.values():
            bell.ring()
        for channel in self._channels.values():
            channel.close()
        self._probes.join()

    def stream(self, messages: Iterator[bytes], timeout_s: float | None) -> Any:
        """Begin a stream of requests, each of which goes to the server that has the fewest.

        Each is a call of its own, so that none is lost with a server.
        """
        self._require_open()
        limit = TimeLimit(timeout_s)

        def answered(message: bytes) -> bytes:
            request = decode_request(message)
            found = self._attempt(
                self.infer, message, limit, changes=False, once=False, graph=graph_of(request)
            )
            return stream_message(found, request.request_id)

        return Calls(answered, messages, limit)

    def _attempt(
        self,
        method: Any,
        request: object,
        limit: TimeLimit,
        *,
        changes: bool,
        once: bool,
        graph: str,
    ) -> Any:
        """Return the answer or the error of one round through the servers."""
        self._require_open()
        if changes:
            return InvalidRequest.local(
                "what changes a server goes to each of them; make a client of each"
            )
        self._start_probes()
        route = self._routes.begin(Bell(), limit.remaining_s, graph)
        try:
            while True:
                self._require_open()
                step = self._routes.next_step(route)
                if step is None:
                    route.bell.wait(self._routes.wait_s())
                elif isinstance(step, EndRequest):
                    return route.error(step)
                else:
                    found = self._sent(route, step, method, request, limit)
                    failure = found if isinstance(found, ClientError) else None
                    if found is not None and self._routes.ended(route, step.attempt, failure, once):
                        # Only answers to requests for inference are bytes.
                        return marked(found, step) if isinstance(found, bytes) else found
        finally:
            self._routes.end(route)

    def _sent(
        self, route: Any, step: SendAttempt, method: Any, request: object, limit: TimeLimit
    ) -> Any:
        """Return the answer or the error of one server; None when the attempt was withdrawn."""
        channel = self._channels[step.machine]
        call = Unary(method(channel), request, limit.remaining_s, channel.metadata())
        self._routes.started(route, step.attempt, call)
        try:
            return call.outcome()
        except CallWithdrawn:
            self._require_open()
            return None
        except ValueError:
            self._require_open()
            raise
        except grpc.RpcError as error:
            self._require_open()
            failure = from_rpc(error)
            failure.__cause__ = error
            return failure

    def _start_probes(self) -> None:
        if not self._probing:
            self._probing = True
            for name in self._channels:
                self._probes.start(self._probe, name)

    def _probe(self, name: str) -> None:
        """Ask one server again and again whether it is ready."""
        while not self._closed:
            began_s = time.monotonic()
            try:
                channel = self._channels[name]
                found = probe(channel)
                if found is Probe.READY and not self._routes.is_ready(name):
                    # It may have been started with others.
                    self._routes.probed(name, found, held_graphs(channel))
                elif self._routes.probed(name, found):
                    channel.renew()
                    if self._closed:
                        channel.close()
            except (CallWithdrawn, ValueError):
                return  # the client was closed
            took_s = time.monotonic() - began_s
            self._bells[name].wait(max(0.0, PROBE_EVERY_S - took_s))


def held_graphs(channel: Channel) -> frozenset[str] | None:
    """Ask a server which graphs it holds; returns None when it does not say."""
    method, request = channel.own.ListGraphs, gnnserve_pb2.ListGraphsRequest()
    try:
        said = Unary(method, request, PROBE_S, channel.metadata()).outcome()
    except grpc.RpcError:
        return None
    return frozenset(graph.name for graph in said.graphs)


def probe(channel: Channel) -> Probe:
    """Ask a server whether it is ready."""
    method, request = channel.standard.ServerReady, pb.ServerReadyRequest()
    try:
        said = Unary(method, request, PROBE_S, channel.metadata()).outcome()
    except grpc.RpcError as error:
        silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return Probe.SILENT if silent else Probe.UNREACHED
    return Probe.READY if said.ready else Probe.NOT_READY
