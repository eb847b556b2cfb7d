"""The decision on calls that reach the gRPC server, before their service sees them."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc

from serve.access.callers import Callers
from serve.access.open_rights import Admit
from serve.access.principal import ADMINISTRATOR, ANYBODY, Principal
from serve.errors import ErrorCode, ServeError
from serve.rpc.refusals import FORBIDDEN, UNAUTHENTICATED, Refusals
from serve.rpc.status import abort

#: Whom the call comes from that the current thread serves.
CALLER: ContextVar[Principal] = ContextVar("caller", default=ANYBODY)


def _anybody() -> Principal:
    return ANYBODY


def _administrator() -> Principal:
    return ADMINISTRATOR


#: Looks at the credentials of that call again; raises ServeError when it may not go on.
ADMIT: ContextVar[Admit] = ContextVar("admit", default=_anybody)
_ALTERNATIVE_NAMES = "x509_subject_alternative_name"
#: Attribute by which gRPC knows methods that need no thread while they have nothing to send.
_NON_BLOCKING = "experimental_non_blocking"


def count_refusal(error: ServeError, refusals: Refusals, calls: int = 1) -> None:
    """Count calls that ``decide`` refused."""
    unknown = error.code is ErrorCode.UNAUTHENTICATED
    refusals.count(UNAUTHENTICATED if unknown else FORBIDDEN, calls)


class Guard(grpc.ServerInterceptor):
    """Refuses calls that their caller may not make, and notes in `CALLER` whom others come from."""

    def __init__(
        self, callers: Callers | None, refusals: Refusals, *, sees_names_late: bool = False
    ) -> None:
        """Prepare.

        Args:
            callers: Finds principals by a call's metadata; None: all are administrators.
            refusals: Counts refused calls.
            sees_names_late: Clients show certificates to this server itself.
        """
        self._callers = callers
        self._refusals = refusals
        self._sees_names_late = sees_names_late

    def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        """Return the method's handler behind the decision; None for an unknown method."""
        handler = continuation(details)
        if handler is None:
            return None
        method: str = details.method
        if not handler.request_streaming and not handler.response_streaming:
            if (error := self._known_to_refuse(method, details.invocation_metadata)) is not None:
                # As a stream, the call ends without its message.
                return grpc.stream_unary_rpc_method_handler(partial(self._refuse, error))
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        make = grpc.unary_stream_rpc_method_handler
        behavior = handler.unary_stream
        if handler.request_streaming:
            make, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        guarded = self._pushed if hasattr(behavior, _NON_BLOCKING) else self._stream
        return make(
            guarded(method, behavior), handler.request_deserializer, handler.response_serializer
        )

    def _known_to_refuse(self, method: str, metadata: Any) -> ServeError | None:
        """Return why a call is refused, as far as its headers tell that."""
        # Names of certificates are in the call's context alone.
        if self._callers is None or self._sees_names_late:
            return None
        try:
            self._callers.admit(method, metadata or ())
        except ServeError as error:
            return error
        return None

    def _refuse(self, error: ServeError, _: Iterator[Any], context: grpc.ServicerContext) -> None:
        count_refusal(error, self._refusals)
        abort(context, error)

    def _unary(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            self._admit(method, context)
            return behavior(request, context)

        return call

    def _stream(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            self._admit(method, context)
            yield from behavior(request, context)

        return call

    def _pushed(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        """Guard a method that is given a function to send its answers with."""

        def call(request: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> Any:
            self._admit(method, context)
            return behavior(request, context, send)

        setattr(call, _NON_BLOCKING, True)
        return call

    def _admit(self, method: str, context: grpc.ServicerContext) -> None:
        """Note whom the call comes from, or end it."""
        if self._callers is None:
            CALLER.set(ADMINISTRATOR)
            ADMIT.set(_administrator)
            return
        names: Any = context.auth_context().get(_ALTERNATIVE_NAMES, ())
        admit = partial(
            self._callers.admit,
            method,
            context.invocation_metadata() or (),
            [name.decode("utf-8", "replace") for name in names],
        )
        try:
            CALLER.set(admit())
        except ServeError as error:
            self._refuse(error, iter(()), context)
        ADMIT.set(admit)
