"""Private names of gRPC's Python server, for ``call_threads``; None where gRPC lacks one of them.

This is the only place that depends on gRPC's internals, `grpc._server` and `grpc._cython.cygrpc`.
The public API gives a call a thread as soon as its headers arrive, so it offers no bound on calls
whose message never comes. A release without one of these names still serves, see ``call_threads``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class GrpcInternals:
    """Names with which gRPC's server receives a message and ends a call."""

    #: Functions that gRPC runs on a thread: for calls with one answer, and with many.
    responders: tuple[Any, Any]
    #: (state, call, deserializer) to the callback of a received message.
    receive_message: Any
    #: Marks in a call's state that its message was asked for.
    receive_token: Any
    #: Operation that asks the transport for a message.
    receive_operation: Any
    #: (state, call, code, details): ends the call.
    abort: Any
    #: Tells whether the call of a state still runs.
    is_active: Any
    #: gRPC's status codes as `abort` takes them.
    codes: Any


def find_internals(load: Callable[[str], Any] = import_module) -> GrpcInternals | None:
    """Return gRPC's internals; None when this release lacks one of them."""
    try:
        server, cygrpc = load("grpc._server"), load("grpc._cython.cygrpc")
        return GrpcInternals(
            (server._unary_response_in_pool, server._stream_response_in_pool),
            server._receive_message,
            server._RECEIVE_MESSAGE_TOKEN,
            cygrpc.ReceiveMessageOperation,
            server._abort,
            server._is_rpc_state_active,
            cygrpc.StatusCode,
        )
    except (ImportError, AttributeError):
        return None


INTERNALS = find_internals()
