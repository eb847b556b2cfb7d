"""The native front: compiled code owns the gRPC port, and the gRPC server stands behind it.

One thread polls `serve._core.Front`, which owns all connections: the engine's driver, or a thread
of its own until that runs. A plain request, of ModelInfer or on a ModelStreamInfer stream, comes
staged and is decided and answered on that thread. Any other message of these methods goes to a
worker thread, which runs the same service as the gRPC server does. Calls of other methods, and
calls with compressed messages, are forwarded stream by stream to the gRPC server on a Unix socket
that this user alone can reach: the front's limits do not hold there. Where not everybody may call,
a call waits at its headers until the thread that polls has looked at whom it comes from.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from serve.access.callers import INSIDE, PEER
from serve.access.certificates import Certificates
from serve.native import Front, TlsContext
from serve.rpc import stream
from serve.rpc.front_calls import Event, FrontCalls
from serve.rpc.private_socket import PrivateSocket
from serve.rpc.refusals import FRONT_REASONS, OPEN_CALLS
from serve.rpc.thread_pools import MAX_STREAMS
from serve.threads import Thread
from serve.wire.messages import INFER_METHOD, STREAM_METHOD

_log = logging.getLogger(__name__)

#: A message that has not arrived in time has longer while it comes with so many bytes a second.
_RECEIVE_BYTES_PER_S = 64 << 10
#: Seconds for which a client may read nothing of what it is sent.
_SEND_TIMEOUT_S = 30.0
#: Seconds that a stop waits for the thread that polls.
_LEAVE_S = 2.0
#: Exit code of the process when the front's thread fails.
EXIT_BUG = 70


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What clients may do before a call becomes a request."""

    #: Largest message received.
    max_message_bytes: int
    #: Bytes of incomplete calls, of their places in staging memory, and of unsent answers, each, of
    #: all clients and of one connection.
    max_receiving_bytes: int
    max_receiving_bytes_of_connection: int
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
        self, calls: FrontCalls, limits: FrontLimits, certificates: Certificates | None = None
    ) -> None:
        """Prepare without listening.

        Args:
            calls: Takes the requests.
            limits: What clients may do.
            certificates: For encrypted connections; None for others.
        """
        self._calls = calls
        self._limits = limits
        self._certificates = certificates
        #: Socket of the gRPC server behind; None before there is one.
        self._backend: PrivateSocket | None = None
        self._front: Front | None = None
        #: The front's counts when it was closed; empty before.
        self._last_counts: Mapping[str, int] = {}
        self._found: list[Event] = []
        self._stopping = False
        self._lent = False
        self._thread = Thread(target=self._poll, name="front")

    def make_backend(self) -> str:
        """Make the socket of the gRPC server behind; returns its address, as gRPC writes it.

        Raises OSError.
        """
        self._backend = PrivateSocket()
        return self._backend.address

    def start(self, host: str, port: int, inside: str = "") -> int:
        """Listen, and return the port. Raises OSError when the address cannot be bound.

        Processes of this user also connect to the abstract Unix socket `inside` (empty: they
        cannot), without encryption, and may reset any number of calls there.
        """
        assert self._backend is not None
        limits, plain = self._limits, self._calls.plain
        self._front = front = Front(
            host=host,
            port=port,
            backend=str(self._backend.path),
            method=INFER_METHOD,
            stream_method=STREAM_METHOD,
            max_open_streams=MAX_STREAMS,
            stream_window=stream.WINDOW,
            unread_timeout_s=stream.UNREAD_NS / 1e9,
            max_message_bytes=limits.max_message_bytes,
            max_receiving_bytes=limits.max_receiving_bytes,
            max_receiving_bytes_of_connection=limits.max_receiving_bytes_of_connection,
            max_connections=limits.max_connections,
            max_connections_of_peer=limits.max_connections_of_peer,
            max_streams=limits.max_streams,
            receive_timeout_s=limits.receive_timeout_s,
            receive_bytes_per_s=_RECEIVE_BYTES_PER_S,
            send_timeout_s=_SEND_TIMEOUT_S,
            pool=None if plain is None else plain.plain.blocks,
            check_finite=plain is None or plain.plain.check_finite,
            asks=self._calls.callers is not None,
            tls=None if self._certificates is None else _tls_of(self._certificates),
            inside=inside,
            certified=[(INSIDE, self._calls.inside), (PEER, "")],
        )
        if self._certificates is not None:
            self._certificates.on_change(partial(_renew, front, self._certificates))
        self._calls.serve(front)
        self._thread.start()
        if plain is not None:
            plain.plain.tell_models(front.set_models)
            plain.plain.serve_through(self)
        return int(front.port)

    def announce_end(self) -> None:
        """Tell clients to begin nothing new on their connections."""
        if self._front is not None:
            self._front.announce_end()

    def stop(self) -> None:
        """Close all connections, and cancel the calls that are still in flight.

        Returns within seconds: if the thread that polls hangs, the connections stay open.
        """
        if self._backend is not None:
            self._backend.close()
        front = self._front
        if front is None:
            return
        self._stopping = True
        plain = self._calls.plain
        left = plain is None or plain.plain.leave_port(_LEAVE_S)
        front.wake()
        self._thread.join(_LEAVE_S)
        if not left or self._thread.is_alive():
            # Nobody may close what a thread still polls; the process ends soon.
            _log.error("a thread hangs, and the gRPC port's connections stay open until the end")
            return
        self._last_counts = front.counts()
        self._front = None
        self._calls.leave()
        front.close()
        self._calls.cancel_all()

    def counts(self) -> Mapping[str, int]:
        """Return the counts of refused calls and connections, by reason."""
        counts = self._counts()
        found = {reason: counts.get(reason, 0) for reason in FRONT_REASONS}
        return {**found, OPEN_CALLS: counts.get("open_calls_refused", 0)}

    def ways(self) -> Mapping[str, int]:
        """Return the number of calls and of messages of streams, by the way that they took."""
        if not (counts := self._counts()):
            return {}
        plain = counts["plain"]
        return {
            "plain": plain,
            "message": counts["called"] - plain,
            "stream": counts["streams"],
            "forwarded": counts["forwarded"],
        }

    def _counts(self) -> Mapping[str, int]:
        """Return the front's counts now, or as it was closed; empty before it was opened."""
        try:
            return self._last_counts if (front := self._front) is None else front.counts()
        except ValueError:  # it was closed just now
            return self._last_counts

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
        self._calls.take(found)

    def flush(self) -> None:
        """See ``CallPort``."""
        if (front := self._front) is not None:
            front.flush()

    def end(self) -> None:
        """See ``CallPort``."""
        assert self._front is not None
        self._front.watch_also(-1)

    def _poll(self) -> None:
        """Serve on a thread of its own, until the driver's takes over."""
        try:
            while not (self._stopping or self._lent):
                self.poll(-1)
                self.take()
        except BaseException:
            _log.critical("the front's thread failed; the process ends", exc_info=True)
            os._exit(EXIT_BUG)


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
