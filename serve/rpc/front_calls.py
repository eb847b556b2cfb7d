"""Requests that the native front hands over: taken in, and answered or refused."""

import math
from collections.abc import Sequence
from functools import partial
from typing import cast

import grpc

from serve.access.callers import Callers
from serve.access.principal import ANYBODY, Principal
from serve.core.types import Outcome
from serve.errors import InvalidInput, ServeError
from serve.native import Front, Message, PlainRequest
from serve.obs.trace_ids import trace_parent_of
from serve.rpc.cancellation import Cancellation
from serve.rpc.elsewhere import Headers, origin_of
from serve.rpc.front_callers import Credentials, FrontCallers
from serve.rpc.gate import Gate
from serve.rpc.plain_calls import PlainCalls
from serve.rpc.refusals import MALFORMED, NO_THREAD, NO_THREAD_TEXT, Refusals
from serve.rpc.replies import Sender, as_message, end_request, fail, refuse
from serve.rpc.service import InferenceService
from serve.rpc.status import Status
from serve.rpc.workers import Work, Workers
from serve.server.ticket import PlainTicket
from serve.wire.messages import WireError, decode_request

#: Stands for a call that nobody has to be told the end of.
_NOBODY = Cancellation()
_NO_THREAD = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, NO_THREAD_TEXT)

#: What the front tells: handle; a request, the method of a call that waits to be admitted, or None
#: for an end; times of the call's beginning, limit and arrival in ns; its credentials, the handle
#: of its stream (0: none), whether an error ends that, its header `traceparent`, and how many calls
#: wait for the same decision.
Event = tuple[
    int, Message | PlainRequest | str | None, int, int, int, Credentials, int, bool, str, int
]


class FrontCalls:
    """Serves requests of a native front. One thread at a time calls `take`."""

    def __init__(
        self,
        service: InferenceService,
        gate: Gate,
        workers: Workers,
        refusals: Refusals,
        callers: Callers,
        plain: PlainCalls | None,
    ) -> None:
        """Have no front yet.

        Args:
            service: Answers the messages.
            gate: Counts requests in flight.
            workers: Threads for the messages.
            refusals: Counts calls for which there is no thread, or which their caller may not make.
            callers: Finds whom calls come from.
            plain: Takes requests that the front has staged; None to have none staged.
        """
        self._service, self._gate = service, gate
        self._workers, self._refusals = workers, refusals
        #: Decides who may call; None: everybody may make every call.
        self.callers = FrontCallers(callers, refusals) if callers.limited else None
        self.plain = plain
        #: Secret of this server's processes.
        self.inside = callers.inside
        #: Where answers go; None: nowhere, as the port is closed.
        self.front: Front | None = None
        #: What is in flight, by call.
        self._open: dict[int, Cancellation | PlainTicket] = {}

    def serve(self, front: Front) -> None:
        """Answer through `front` from now on."""
        self.front = front
        if self.callers is not None:
            self.callers.serve(front)

    def leave(self) -> None:
        """Answer nowhere, as the front is going to be closed."""
        self.front = None
        if self.callers is not None:
            self.callers.leave()

    def take(self, events: Sequence[Event]) -> None:
        """Take in requests, and the beginnings and ends of calls; raises nothing."""
        if self.callers is not None:
            self.callers.follow()
        for event in events:
            (
                handle, request, began_ns, limit_ns, arrived_ns, credentials, within, raises, trace,
                calls,
            ) = event  # fmt: skip
            asked = isinstance(request, str)
            sender = Sender(handle, 0 if asked else within, raises)
            try:
                if request is None:
                    self._ended(handle)
                elif isinstance(request, str):
                    assert self.callers is not None
                    self.callers.decide(handle, request, credentials, calls, stays=within != 0)
                else:
                    remaining_s = math.inf
                    if limit_ns >= 0:
                        remaining_s = (limit_ns - (arrived_ns - began_ns)) / 1e9
                    self._begin(sender, request, arrived_ns, remaining_s, credentials, trace)
            except Exception as error:  # a bug; the front goes on with all other calls
                fail(self.front, sender, error)

    def cancel_all(self) -> None:
        """Cancel the calls in flight, which have nowhere to go."""
        for handle in list(self._open):
            self._ended(handle)

    def _begin(
        self,
        sender: Sender,
        request: Message | PlainRequest,
        arrived_ns: int,
        remaining_s: float,
        credentials: Credentials,
        trace: str,
    ) -> None:
        caller = ANYBODY
        try:
            if self.callers is not None:
                caller = self.callers.caller(sender.stream, credentials)
            self._gate.enter()
        except ServeError as error:  # draining, or credentials that were known have expired
            self._service.not_read(arrived_ns, error)
            refuse(self.front, sender, request, error, self._service.stream_workers)
            return
        self._open[sender.handle] = _NOBODY
        # The credentials of a stream are not kept, and others would want them.
        nameless = sender.stream and self.callers is not None
        headers = None if nameless else credentials or ()
        if isinstance(request, PlainRequest) and self._submit(
            sender,
            request,
            arrived_ns,
            remaining_s,
            caller,
            trace,
            headers or (),
        ):
            return
        cancellation = self._open[sender.handle] = Cancellation()
        work = partial(
            self._serve, sender, request, arrived_ns, cancellation, remaining_s, caller, trace,
            headers,
        )  # fmt: skip
        self._give(sender, work)

    def _give(self, sender: Sender, work: Work) -> None:
        workers = self._service.stream_workers if sender.stream else self._workers
        if not workers.give(work):
            self._refusals.count(NO_THREAD)
            end_request(self.front, sender, _NO_THREAD)

    def _submit(
        self,
        sender: Sender,
        request: PlainRequest,
        arrived_ns: int,
        remaining_s: float,
        caller: Principal,
        trace: str,
        headers: Headers,
    ) -> bool:
        """Submit a staged request; returns False for one that must go the way of messages."""
        if not request.valid:
            return False
        assert self.plain is not None
        try:
            answer = partial(self._answer, sender, request)
            ticket = self.plain.submit(
                request, arrived_ns, remaining_s, answer, caller, trace_parent_of(trace), headers
            )
        except Exception as error:
            request.release()
            fail(self.front, sender, error, request.client_id)
            return True
        if ticket is not None:
            self._open[sender.handle] = ticket
        return ticket is not None

    def _answer(
        self, sender: Sender, request: PlainRequest, ticket: PlainTicket, outcome: Outcome
    ) -> None:
        assert self.plain is not None
        try:
            head, outputs = self.plain.finished(ticket, outcome)
            if (front := self.front) is not None:
                front.answer_staged(sender.handle, head, request, outputs)
        except Exception as error:
            fail(self.front, sender, error, request.client_id)
        if sender.handle in self._open:
            self._open[sender.handle] = _NOBODY

    def _ended(self, handle: int) -> None:
        if self.callers is not None:
            self.callers.ended(handle)
        call = self._open.pop(handle, None)
        if call is not None:
            self._gate.leave()
            call.cancel()

    def _serve(
        self,
        sender: Sender,
        request: Message | PlainRequest,
        arrived_ns: int,
        cancellation: Cancellation,
        remaining_s: float,
        caller: Principal,
        trace: str,
        headers: Headers | None,
    ) -> None:
        request_id = ""
        try:
            message = memoryview(cast("bytes", as_message(request)))
            decoded = decode_request(message)
            request_id = decoded.request_id
            answer = self._service.infer(
                decoded, arrived_ns, cancellation, remaining_s, caller, trace_parent_of(trace),
                None if headers is None else origin_of(message, headers),
            )  # fmt: skip
        except Exception as error:
            if isinstance(error, WireError) and sender.stream:
                self._service.not_read(arrived_ns, InvalidInput(str(error)))
            elif isinstance(error, WireError):
                self._refusals.count(MALFORMED)
            fail(self.front, sender, error, request_id)
        else:
            if (front := self.front) is not None:
                front.answer(sender.handle, answer)
