"""Health, metrics and the report over HTTP, for browsers, probes and Prometheus.

It is the HTTP port of a server without the gateway (``serve.rest``), and what the gateway asks.

=====================  ============================================================
``/v2/health/live``    200 while the process works, else 503
``/v2/health/ready``   200 while requests are accepted: warmed up, not draining; else 503
``/metrics``           Prometheus text format, or OpenMetrics where `Accept` names it
``/report``            the QoS report as a page; ``?since=10m`` limits it, as do the other
                       filters of ``selection``; ``?format=json`` and ``?format=csv``
``/report.json``       the same numbers as JSON
=====================  ============================================================

A client has ten seconds to send its request and ten to receive the answer. At most 64 connections
are open; a new one closes the oldest that waits for its client. At most eight reports are made or
wait. So no client can deny others an answer or keep the server from stopping.
"""

import _thread
import errno
import gzip
import logging
import os
import secrets
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Condition
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from serve.access.callers import Callers
from serve.access.certificates import Certificates, names_of
from serve.access.rules import decide
from serve.errors import ConfigError, ErrorCode, ServeError
from serve.obs.codings import taken_codings
from serve.obs.exposition import wanted_type
from serve.obs.offline import Form, make_report
from serve.obs.selection import selection_of
from serve.threads import Thread

_log = logging.getLogger(__name__)

_REPORTS = {"/report": "html", "/report.json": "json"}
_REPORT_TYPES = {
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
}
_PATHS = ("/v2/health/live", "/v2/health/ready", "/metrics", *_REPORTS)
#: Schemes of credentials that are taken: a browser asks for the second one's.
CHALLENGE = 'Bearer realm="gnnserve", Basic realm="gnnserve"'
#: Alternative names of a client's certificate.
Names = tuple[str, ...]
HttpAnswer = tuple[HTTPStatus, str, bytes]
#: Answers the request for a target, with its headers and the names of its certificate.
_Answer = Callable[[str, Message, Names], HttpAnswer]

#: Process, user and group id.
_CREDENTIALS = struct.Struct("3i")
_MAX_CONNECTIONS = 64
#: Most reports that are made or wait for others; one more is refused, as those that wait hold a
#: connection each, which probes need.
_MOST_REPORTS = 8
#: Time for a client to send its request, and again to receive the answer.
_CLIENT_S = 10.0
#: Shorter answers are not compressed.
_LEAST_COMPRESSED_BYTES = 1024
#: Time for unfinished answers when the port closes.
_STOP_S = 1.0
#: Interval of checking the time limits.
_CHECK_S = 0.1


def listening_socket(host: str, port: int, option: str = "server.http_port") -> socket.socket:
    """Listen on `host`:`port`; port 0 is any free one.

    Raises ConfigError, which names option, host, port and reason, when that is impossible.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=family, backlog=2 * _MAX_CONNECTIONS, dualstack_ipv6=both
        )
    except (OSError, OverflowError) as error:
        reason = "already in use" if _is_taken(error) else str(error)
        raise ConfigError(f"{option}: cannot listen on {host}:{port}: {reason}") from error


def private_socket() -> tuple[str, socket.socket]:
    """Listen on an abstract Unix socket of a name that nobody else uses; return both."""
    name = f"gnnserve-http-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(2 * _MAX_CONNECTIONS)
    return name, listener


class HttpPort:
    """HTTP server on its own threads between `start` and `stop`."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        live: Callable[[], bool],
        ready: Callable[[], bool],
        metrics: Callable[[str], bytes],
        database: Path,
        callers: Callers | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """Take over `listener`; clients wait until `start`.

        Args:
            listener: Listening socket, which `stop` closes.
            live: Tells whether the process works.
            ready: Tells whether requests are accepted.
            metrics: Returns the metrics in the form of a content type of ``exposition``.
            database: Database of the report.
            callers: Finds whom requests come from; None to let everybody do everything, as on a
                Unix socket, where only processes of this user are heard.
            certificates: For encrypted connections; None for others.
        """
        self._live = live
        self._ready = ready
        self._metrics = metrics
        self._database = database
        self._reports = BoundedSemaphore(_MOST_REPORTS)
        self._callers = callers if callers is not None and callers.limited else None
        self._server = _HttpServer(listener, _handler(self._answer), certificates)
        self._thread = Thread(target=self._server.serve_forever, args=(_CHECK_S,), name="http")

    def start(self) -> None:
        """Serve until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port after at most a second for unfinished answers. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.close_connections()

    def _answer(self, target: str, headers: Message, names: Names) -> HttpAnswer:
        try:
            url = urlsplit(target)
        except ValueError as error:
            return _text(HTTPStatus.BAD_REQUEST, f"{target[:100]}: {error}")
        if self._callers is not None and url.path in _PATHS:
            caller = self._callers.find(headers["Authorization"], names)
            if (refused := decide(f"GET {url.path}", caller)) is not None:
                return _text(HTTPStatus(refused.code.http_status), str(refused))
        if url.path == "/v2/health/live":
            return _health(self._live())
        if url.path == "/v2/health/ready":
            return _health(self._ready())
        if url.path == "/metrics":
            content_type = wanted_type(headers["Accept"])
            return HTTPStatus.OK, content_type, self._metrics(content_type)
        if url.path in _REPORTS:
            return self._report(_REPORTS[url.path], url.query)
        known = " ".join(_PATHS)
        return _text(HTTPStatus.NOT_FOUND, f"nothing at {url.path}; known paths: {known}")

    def _report(self, form: str, query: str) -> HttpAnswer:
        filters = {name: values[-1] for name, values in parse_qs(query).items()}
        form = filters.pop("format", form)
        if not self._reports.acquire(blocking=False):
            return _text(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{_MOST_REPORTS} reports are made or wait, as many as may; try again later",
            )
        try:
            if form not in _REPORT_TYPES:
                known = ", ".join(_REPORT_TYPES)
                raise ConfigError(f"unknown format {form!r}; known formats: {known}")
            made = make_report(self._database, cast("Form", form), selection_of(filters))
        except ServeError as error:
            return _text(HTTPStatus(error.code.http_status), str(error))
        finally:
            self._reports.release()
        return HTTPStatus.OK, _REPORT_TYPES[form], made


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    #: `close_connections` waits instead, with a time limit.
    block_on_close = False

    def __init__(
        self,
        listener: socket.socket,
        handler: type[BaseHTTPRequestHandler],
        certificates: Certificates | None,
    ) -> None:
        self._certificates = certificates
        #: Deadline of each open connection's client to send or receive; None while its answer is
        #: being made. Ordered by the start of these turns.
        self._open: dict[socket.socket, float | None] = {}
        self._changed = Condition()
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; its thread makes the handshake."""
        connection, address = super().get_request()
        if self._certificates is None:
            return connection, address
        context = self._certificates.now.context
        return (
            context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False),
            address,
        )

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer on the connection's thread."""
        if self._certificates is not None:
            request.settimeout(_CLIENT_S)
            request.do_handshake()
        super().finish_request(request, client_address)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Hear only processes of this user on a Unix socket, whose name any process can read."""
        return request.family != socket.AF_UNIX or _peer_uid(request) == os.geteuid()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread; beyond the limit, close the oldest that waits for its client."""
        with self._changed:
            self._open[request] = time.monotonic() + _CLIENT_S
            if len(self._open) > _MAX_CONNECTIONS:
                # This is the new connection itself when all others are being answered.
                oldest = next(one for one, until_s in self._open.items() if until_s is not None)
                del self._open[oldest]
                _hang_up(oldest)
        try:
            # The start of a thread waits up to a minute for one that has no memory to begin with,
            # and the port with it. `service_actions` closes the connection of such a thread.
            _thread.start_new_thread(self.process_request_thread, (request, client_address))
        except (RuntimeError, MemoryError) as error:
            _log.warning("no thread for an HTTP request: %s", error)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered or cut off."""
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off clients that exceeded their time limit; close what then has no thread."""
        now_s = time.monotonic()
        with self._changed:
            timed = [one for one in self._open.items() if one[1] is not None and one[1] <= now_s]
            for connection, _ in timed:
                _hang_up(connection)
        for connection, until_s in timed:
            if until_s is not None and until_s + _CLIENT_S <= now_s:
                self.shutdown_request(connection)

    def waits_for_client(self, connection: socket.socket, waits: bool) -> None:
        """Start the client's time limit when it must receive its answer, else suspend the limit."""
        with self._changed:
            if connection in self._open:
                # Inserted anew to keep the order of the turns.
                del self._open[connection]
                self._open[connection] = time.monotonic() + _CLIENT_S if waits else None

    def close_connections(self) -> None:
        """Cut off every client that is not answered within a second."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, _STOP_S)
            for connection in self._open:
                _hang_up(connection)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log unexpected errors with their traceback, and ignore clients that disconnect."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | ssl.SSLError):
            _log.exception("the HTTP request of %s failed", client_address)


def _handler(answer: _Answer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        #: Time limit of each read of the request, and of writing the whole answer.
        timeout = _CLIENT_S
        server: _HttpServer
        server_version = "gnnserve"
        sys_version = ""

        def do_GET(self) -> None:
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def _send(self, with_body: bool) -> None:
            self.server.waits_for_client(self.connection, False)
            try:
                status, content_type, body = answer(self.path, self.headers, self._names())
            except Exception:
                _log.exception("GET %s failed", self.path)
                status, content_type, body = _text(
                    HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the server's log"
                )
            self.server.waits_for_client(self.connection, True)
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            if _is_compressed(self.headers["Accept-Encoding"], body):
                body = gzip.compress(body, compresslevel=1)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Vary", "Accept, Accept-Encoding")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if status == ErrorCode.UNAUTHENTICATED.http_status:
                self.send_header("WWW-Authenticate", CHALLENGE)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _names(self) -> Names:
            if isinstance(self.connection, ssl.SSLSocket):
                return names_of(self.connection.getpeercert())
            return ()

        def log_message(self, format: str, *args: object) -> None:
            _log.debug(format, *args)

    return Handler


def _is_compressed(accepted: str | None, body: bytes) -> bool:
    """Return True when the header `Accept-Encoding` allows gzip and the body is worth it."""
    if len(body) < _LEAST_COMPRESSED_BYTES or accepted is None:
        return False
    return "gzip" in taken_codings(accepted)


def _peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    held = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(held)[1])


def _hang_up(connection: socket.socket) -> None:
    """End a connection, so that its thread stops waiting and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _text(status: HTTPStatus, message: str) -> HttpAnswer:
    return status, "text/plain; charset=utf-8", f"{message}\n".encode()


def _health(good: bool) -> HttpAnswer:
    if good:
        return _text(HTTPStatus.OK, "ok")
    return _text(HTTPStatus.SERVICE_UNAVAILABLE, "not now")


def _is_taken(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EADDRINUSE
