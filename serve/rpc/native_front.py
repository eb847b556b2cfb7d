"""The native front: compiled code owns the gRPC port, and the gRPC server stands behind it.

One thread polls `serve._core.Front`, which owns all connections: the engine's driver, or a thread
of its own until that runs. A plain request, of ModelInfer or on a ModelStreamInfer stream, comes
staged and is decided and answered on that thread. Any other message of these methods goes to a
worker thread, which runs the same service as the gRPC server does. Calls of other methods, and
calls with compressed messages, are forwarded stream by stream to the gRPC server on an abstract
Unix socket. So are streams where not everybody may call.
"""

import logging
import math
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import grpc

from serve.access.callers import INSIDE, PEER, Callers
from serve.access.certificates import Certificates
from serve.access.principal import ANYBODY, Principal
from serve.access.rules import decide
from serve.core.types import Outcome
from serve.errors import InvalidInput, NotReady
from serve.native import Front, Message, PlainRequest, TlsContext
from serve.rpc import stream
from serve.rpc.cancellation import Cancellation
from serve.rpc.gate import Gate
from serve.rpc.guard import count_refusal
from serve.rpc.plain_calls import PlainCalls
from serve.rpc.refusals import (
    FRONT_REASONS,
    MALFORMED,
    NO_THREAD,
    NO_THREAD_TEXT,
    OPEN_CALLS,
    Refusals,
)
from serve.rpc.replies import Sender, as_message, end_request, fail, refuse
from serve.rpc.service import InferenceService
from serve.rpc.status import Status
from serve.rpc.thread_pools import MAX_STREAMS
from serve.rpc.workers import Work, Workers
from serve.server.ticket import PlainTicket
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, WireError, decode_request

_log = logging.getLogger(__name__)

#: Bytes of incomplete calls, and of unsent answers, of all clients: a multiple of the largest
#: message, and at least so many.
_RECEIVING_MESSAGES = 4
_RECEIVING_BYTES = 64 << 20
#: A message that has not arrived in time has longer while it comes with so many bytes a second.
_RECEIVE_BYTES_PER_S = 64 << 10
#: Seconds for which a client may read nothing of what it is sent.
_SEND_TIMEOUT_S = 30.0
#: Seconds that a stop waits for the thread that polls.
_LEAVE_S = 2.0

#: Stands for a call that nobody has to be told the end of.
_NOBODY = Cancellation()
_NO_THREAD = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, NO_THREAD_TEXT)
#: Exit code of the process when the front's thread fails.
EXIT_BUG = 70

#: Headers of a call that tell whom it comes from.
_Credentials = list[tuple[str, str]] | None
#: A request: handle, content (None: it ended), times of its call's beginning, limit and arrival in
#: ns, the call's credentials, and whether it is a stream's and is to end that by an error.
_Event = tuple[int, Message | PlainRequest | None, int, int, int, _Credentials, bool, bool]


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What clients may do before a call becomes a request."""

    #: Largest message received.
    max_message_bytes: int
    #: Calls of one connection at once.
    max_streams: int
    #: Connections at once, of all clients and of one address. Beyond either, the one of them that
    #: has been idle for the longest is closed.
    max_connections: int
    max_connections_of_peer: int
    #: Time for a call's message to arrive.
    receive_timeout_s: float


class NativeFront:
    """Owns the port from ``start`` to ``stop``; implements ``driver.CallPort``."""

    def __init__(
        self,
        service: InferenceService,
        gate: Gate,
        workers: Workers,
        refusals: Refusals,
        callers: Callers,
        plain: PlainCalls | None,
        limits: FrontLimits,
        certificates: Certificates | None = None,
    ) -> None:
        """Prepare without listening.

        Args:
            service: Answers the messages.
            gate: Counts requests in flight.
            workers: Threads for the messages.
            refusals: Counts calls for which there is no thread, or which their caller may not make.
            callers: Finds whom calls come from.
            plain: Takes requests that the front has staged; None to have none staged.
            limits: What clients may do.
            certificates: For encrypted connections; None for others.
        """
        self._service, self._gate = service, gate
        self._workers, self._refusals = workers, refusals
        self._callers = callers if callers.limited else None
        self._inside = callers.inside
        self._plain = plain
        self._limits = limits
        self._certificates = certificates
        name = f"gnnserve-{secrets.token_hex(16)}"
        self._backend = name
        #: Address of the gRPC server behind, as gRPC writes it. Known to this process alone.
        self.backend_address = f"unix-abstract:{name}"
        #: What is in flight, by call.
        self._open: dict[int, Cancellation | PlainTicket] = {}
        self._front: Front | None = None
        #: The front's counts when it was closed; empty before.
        self._last_counts: Mapping[str, int] = {}
        self._found: list[_Event] = []
        self._stopping = False
        self._lent = False
        self._thread = threading.Thread(target=self._poll, name="front", daemon=True)

    def start(self, host: str, port: int, inside: str = "") -> int:
        """Listen, and return the port. Raises OSError when the address cannot be bound.

        With certificates, processes of this user also connect to the abstract Unix socket `inside`,
        without encryption.
        """
        encrypted = self._certificates is not None
        limits = self._limits
        self._front = Front(
            host=host,
            port=port,
            backend=self._backend,
            method=INFER_METHOD,
            # The server behind tells who may begin one.
            stream_method=STREAM_METHOD if self._callers is None else "",
            max_open_streams=MAX_STREAMS,
            stream_window=stream.WINDOW,
            unread_timeout_s=stream.UNREAD_NS / 1e9,
            max_message_bytes=limits.max_message_bytes,
            max_receiving_bytes=max(
                _RECEIVING_MESSAGES * limits.max_message_bytes, _RECEIVING_BYTES
            ),
            max_connections=limits.max_connections,
            max_connections_of_peer=limits.max_connections_of_peer,
            max_streams=limits.max_streams,
            receive_timeout_s=limits.receive_timeout_s,
            receive_bytes_per_s=_RECEIVE_BYTES_PER_S,
            send_timeout_s=_SEND_TIMEOUT_S,
            pool=None if self._plain is None else self._plain.plain.blocks,
            check_finite=self._plain is None or self._plain.plain.check_finite,
            tls=None if self._certificates is None else _tls_of(self._certificates),
            inside=inside if encrypted else "",
            certified=[(INSIDE, self._inside), (PEER, "")],
        )
        if self._certificates is not None:
            self._certificates.on_change(partial(_renew, self._front, self._certificates))
        self._thread.start()
        if self._plain is not None:
            self._plain.plain.tell_models(self._front.set_models)
            self._plain.plain.serve_through(self)
        return int(self._front.port)

    def announce_end(self) -> None:
        """Tell clients to begin nothing new on their connections."""
        if self._front is not None:
            self._front.announce_end()

    def stop(self) -> None:
        """Close all connections, and cancel the calls that are still in flight.

        Returns within seconds: if the thread that polls hangs, the connections stay open.
        """
        front = self._front
        if front is None:
            return
        self._stopping = True
        left = self._plain is None or self._plain.plain.leave_port(_LEAVE_S)
        front.wake()
        self._thread.join(_LEAVE_S)
        if not left or self._thread.is_alive():
            # Nobody may close what a thread still polls; the process ends soon.
            _log.error("a thread hangs, and the gRPC port's connections stay open until the end")
            return
        self._last_counts = front.counts()
        self._front = None
        front.close()
        for handle in list(self._open):
            self._ended(handle)

    def counts(self) -> Mapping[str, int]:
        """Return the counts of refused calls and connections, by reason."""
        counts = self._last_counts if self._front is None else self._front.counts()
        found = {reason: counts.get(reason, 0) for reason in FRONT_REASONS}
        return {**found, OPEN_CALLS: counts.get("open_calls_refused", 0)}

    def ways(self) -> Mapping[str, int]:
        """Return the number of calls and of messages of streams, by the way that they took."""
        if self._front is None:
            return {}
        counts = self._front.counts()
        plain = counts["plain"]
        return {
            "plain": plain,
            "message": counts["called"] - plain,
            "stream": counts["streams"],
            "forwarded": counts["forwarded"],
        }

    # -- driver.CallPort ----------------------------------------------------------------------

    def begin(self, lanes_fd: int) -> None:
        """See ``CallPort``."""
        self._lent = True
        assert self._front is not None
        self._front.wake()
        self._thread.join()
        self._front.watch_also(lanes_fd)

    def poll(self, until_ns: int) -> tuple[bool, list[tuple[int, bytes]]]:
        """See ``CallPort``."""
        assert self._front is not None
        lanes, packets, self._found = self._front.poll(until_ns)
        return lanes, packets

    def watch_packets(self, fd: int) -> None:
        """See ``CallPort``."""
        assert self._front is not None
        self._front.watch_packets(fd)

    def unwatch_packets(self, fd: int) -> None:
        """See ``CallPort``."""
        assert self._front is not None
        self._front.unwatch_packets(fd)

    def take(self) -> None:
        """See ``CallPort``."""
        found, self._found = self._found, []
        for handle, request, began_ns, timeout_ns, arrived_ns, credentials, *stream_facts in found:
            sender = Sender(handle, *stream_facts)
            try:
                if request is None:
                    self._ended(handle)
                else:
                    remaining_s = math.inf
                    if timeout_ns >= 0:
                        remaining_s = (timeout_ns - (arrived_ns - began_ns)) / 1e9
                    self._begin(sender, request, arrived_ns, remaining_s, credentials)
            except Exception as error:  # a bug; the front goes on with all other calls
                fail(self._front, sender, error)

    def flush(self) -> None:
        """See ``CallPort``."""
        if (front := self._front) is not None:
            front.flush()

    def end(self) -> None:
        """See ``CallPort``."""
        assert self._front is not None
        self._front.watch_also(-1)

    # -- calls ----------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Serve on a thread of its own, until the driver's takes over."""
        try:
            while not (self._stopping or self._lent):
                self.poll(-1)
                self.take()
        except BaseException:
            _log.critical("the front's thread failed; the process ends", exc_info=True)
            os._exit(EXIT_BUG)

    def _begin(
        self,
        sender: Sender,
        request: Message | PlainRequest,
        arrived_ns: int,
        remaining_s: float,
        credentials: _Credentials,
    ) -> None:
        caller = ANYBODY
        if self._callers is not None:
            caller = self._callers.of_metadata(credentials or ())
            if (refused := decide(INFER_METHOD, caller)) is not None:
                count_refusal(refused, self._refusals)
                refuse(self._front, sender, request, refused, self._service.stream_workers)
                return
        try:
            self._gate.enter()
        except NotReady as error:
            self._service.not_read(arrived_ns, error)
            refuse(self._front, sender, request, error, self._service.stream_workers)
            return
        self._open[sender.handle] = _NOBODY
        if isinstance(request, PlainRequest) and self._submit(
            sender, request, arrived_ns, remaining_s, caller
        ):
            return
        cancellation = self._open[sender.handle] = Cancellation()
        work = partial(self._serve, sender, request, arrived_ns, cancellation, remaining_s, caller)
        self._give(sender, work)

    def _give(self, sender: Sender, work: Work) -> None:
        workers = self._service.stream_workers if sender.in_stream else self._workers
        if not workers.give(work):
            self._refusals.count(NO_THREAD)
            end_request(self._front, sender, _NO_THREAD)

    def _submit(
        self,
        sender: Sender,
        request: PlainRequest,
        arrived_ns: int,
        remaining_s: float,
        caller: Principal,
    ) -> bool:
        """Submit a staged request; returns False for one that must go the way of messages."""
        if not request.valid:
            return False
        assert self._plain is not None
        try:
            answer = partial(self._answer, sender, request)
            ticket = self._plain.submit(request, arrived_ns, remaining_s, answer, caller)
        except Exception as error:
            request.release()
            fail(self._front, sender, error, request.client_id)
            return True
        if ticket is not None:
            self._open[sender.handle] = ticket
        return ticket is not None

    def _answer(
        self, sender: Sender, request: PlainRequest, ticket: PlainTicket, outcome: Outcome
    ) -> None:
        assert self._plain is not None
        try:
            head, size_bytes = self._plain.finished(ticket, outcome)
            if (front := self._front) is not None:
                front.answer_staged(sender.handle, head, request, size_bytes)
        except Exception as error:
            fail(self._front, sender, error, request.client_id)
        if sender.handle in self._open:
            self._open[sender.handle] = _NOBODY

    def _ended(self, handle: int) -> None:
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
    ) -> None:
        request_id = ""
        try:
            decoded = decode_request(memoryview(cast("bytes", as_message(request))))
            request_id = decoded.request_id
            answer = self._service.infer(decoded, arrived_ns, cancellation, remaining_s, caller)
        except Exception as error:
            if isinstance(error, WireError) and sender.in_stream:
                self._service.not_read(arrived_ns, InvalidInput(str(error)))
            elif isinstance(error, WireError):
                self._refusals.count(MALFORMED)
            fail(self._front, sender, error, request_id)
        else:
            if (front := self._front) is not None:
                front.answer(sender.handle, answer)


def _tls_of(certificates: Certificates) -> TlsContext:
    """Return what the newest files say; raises RuntimeError when they cannot be used."""
    files = certificates.files
    return TlsContext(files.certificate, files.key, files.client_ca or "")


def _renew(front: Front, certificates: Certificates) -> None:
    """Begin connections with the newest certificates from now on."""
    try:
        front.set_tls(_tls_of(certificates))
    except ValueError:
        pass  # the front is closed
    except RuntimeError as error:  # the files are being replaced once more
        _log.error("the certificates stay as they were: %s", error)
