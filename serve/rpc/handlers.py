"""gRPC handlers for a service, made from its descriptor and an object with its methods.

A method that the object lacks answers UNIMPLEMENTED with its name. An exception becomes the call's
status, see ``serve.rpc.status``.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import grpc
from google.protobuf import message_factory

from serve.errors import Unsupported
from serve.pb import POOL
from serve.rpc.refusals import MALFORMED, Refusals
from serve.rpc.status import abort
from serve.wire.messages import WireError

Behavior = Callable[[Any, grpc.ServicerContext], Any]


def service_handler(
    name: str, servicer: object, as_bytes: Collection[str], refusals: Refusals
) -> grpc.GenericRpcHandler:
    """Return handlers for every method of the service `name` of ``serve.pb``.

    Args:
        name: Full name of the service.
        servicer: Object with a method for each one offered.
        as_bytes: Methods that take and return serialized messages; all others take message objects.
        refusals: Counts the calls whose serialized message is malformed.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in POOL.FindServiceByName(name).methods:
        behavior = getattr(servicer, method.name, None) or _not_offered(method.full_name)
        if method.server_streaming and not method.client_streaming:
            raise ValueError(f"{method.full_name}: one request, many answers is not supported")
        wrap = grpc.unary_unary_rpc_method_handler
        guarded = _guard_unary(behavior, refusals)
        if method.server_streaming:
            wrap, guarded = grpc.stream_stream_rpc_method_handler, _guard_stream(behavior)
        if method.name in as_bytes:
            handlers[method.name] = wrap(guarded)
            continue
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        handlers[method.name] = wrap(guarded, request.FromString, response.SerializeToString)
    return grpc.method_handlers_generic_handler(name, handlers)


def _guard_unary(behavior: Behavior, refusals: Refusals) -> Behavior:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behavior(request, context)
        except Exception as error:
            if isinstance(error, WireError):
                refusals.count(MALFORMED)
            abort(context, error)

    return call


def _guard_stream(behavior: Behavior) -> Behavior:
    def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behavior(requests, context)
        except Exception as error:
            abort(context, error)

    return call


def _not_offered(name: str) -> Behavior:
    def refuse(_request: Any, _context: grpc.ServicerContext) -> Any:
        raise Unsupported(f"{name} is not offered by this server")

    return refuse
