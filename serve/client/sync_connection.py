"""The connection of a client for threads, made from ``aio_connection``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from serve.client.channel import Address, Metadata
from serve.client.errors import Cancelled, ClientError, from_rpc
from serve.client.retries import Attempts, TimeLimit
from serve.client.turns import Turns
from serve.pb import gnnserve_pb2_grpc, grpc_service_pb2_grpc
from serve.wire.messages import INFER_METHOD, STREAM_METHOD

ResultT = TypeVar("ResultT")


class Channel:
    """Connection to one server, with its methods."""

    def __init__(self, address: Address) -> None:
        """Connect on first use."""
        self._address = address
        self._connect()

    def _connect(self) -> None:
        address = self._address
        if address.credentials is None:
            self._channel = grpc.insecure_channel(address.target, address.options)
        else:
            self._channel = grpc.secure_channel(
                address.target, address.credentials, address.options
            )
        # Without serializers these two carry bytes: see `serve.wire.messages`.
        self.infer: Any = self._channel.unary_unary(INFER_METHOD)
        self.stream: Any = self._channel.stream_stream(STREAM_METHOD)
        # Generated stubs carry no types.
        self.standard: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.own: Any = gnnserve_pb2_grpc.GnnServeStub(self._channel)  # type: ignore[no-untyped-call]

    def metadata(self) -> Metadata:
        """Return what to send with a call that begins now."""
        return self._address.metadata()

    def renew(self) -> None:
        """End the connection with its calls, and connect anew on next use."""
        old = self._channel
        self._connect()
        old.close()

    def close(self) -> None:
        """End the connection with its calls."""
        self._channel.close()


class Transport:
    """Calls one server: with metadata, within time limits, repeated where that is safe."""

    def __init__(
        self, channel: Channel, timeout_s: float | None, max_in_flight: int | None
    ) -> None:
        """Call over `channel`.

        Args:
            channel: To the server.
            timeout_s: Time limit of calls that set none; None to wait for ever.
            max_in_flight: Requests at once; None for any number.
        """
        self.timeout_s = timeout_s
        self._channel = channel
        self._places = Turns(max_in_flight, "requests in flight")
        self._closed = False
        self.infer: Any = channel.infer
        self.standard: Any = channel.standard
        self.own: Any = channel.own

    def close(self) -> None:
        """End the connection; calls in flight raise Cancelled. Idempotent."""
        self._closed = True
        self._channel.close()

    @contextmanager
    def place(self, timeout_s: float | None) -> Iterator[TimeLimit]:
        """Hold one of the places for requests; yields the request's time limit.

        A request's own limit `timeout_s` includes the wait for a place. The client's default
        begins with the place, so that ten thousand requests may wait for their turn.
        """
        limit = TimeLimit(timeout_s)
        with self._places.taken(limit.remaining_s):
            yield TimeLimit(self.timeout_s) if timeout_s is None else limit

    def call(
        self,
        method: Callable[..., ResultT],
        request: object,
        limit: TimeLimit | None = None,
        *,
        changes: bool = False,
        repeated: bool = True,
        graph: str = "",
    ) -> ResultT:
        """Make a call, again where that is safe, and convert its errors.

        Args:
            method: A method of ``standard`` or ``own``, or ``infer``.
            request: Its message.
            limit: Time limit of all attempts; None for the client's default from now on.
            changes: True when the call changes the server.
            repeated: False to make the call once.
            graph: Graph that the server must hold; empty for none. One of several servers is chosen
                by it.
        """
        limit = limit or TimeLimit(self.timeout_s)
        attempts = Attempts(limit, changes=changes, repeated=repeated)
        while True:
            failure = self._attempt(
                method, request, limit, changes=changes, once=not repeated, graph=graph
            )
            if not isinstance(failure, ClientError):
                return failure
            wait_s = attempts.wait_s(failure)
            if wait_s is None:
                raise failure
            time.sleep(wait_s)

    def stream(self, messages: Iterator[bytes], timeout_s: float | None) -> Any:
        """Begin a stream of requests; raises Cancelled when the client is closed."""
        self._require_open()
        limit_s = TimeLimit(timeout_s).remaining_s
        return self._channel.stream(messages, timeout=limit_s, metadata=self._channel.metadata())

    def _attempt(
        self,
        method: Callable[..., ResultT],
        request: object,
        limit: TimeLimit,
        *,
        changes: bool,
        once: bool,
        graph: str,
    ) -> ResultT | ClientError:
        """Return the answer or the error of one attempt.

        With several servers it goes to another when one fails, unless it `changes` them or is to be
        made `once`.
        """
        self._require_open()
        try:
            return method(request, timeout=limit.remaining_s, metadata=self._channel.metadata())
        except grpc.RpcError as error:
            failure = from_rpc(error)
            failure.__cause__ = error
            return failure

    def _require_open(self) -> None:
        if self._closed:
            raise Cancelled.local("the client is closed")
