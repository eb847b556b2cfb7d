"""The HTTP port: health, metrics and the report, for browsers, probes and Prometheus.

=====================  ============================================================
``/v2/health/live``    200 while the process works, else 503
``/v2/health/ready``   200 when requests are taken: warmed up, not draining; else 503
``/metrics``           Prometheus text format
``/report``            the QoS report as a page; ``?since=10m`` limits it
``/report.json``       the same numbers as JSON
=====================  ============================================================
"""

import errno
import logging
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from threading import Thread
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from serve.errors import ConfigError, DeadlineExceeded, NotReady
from serve.obs.duration import parse_duration
from serve.obs.metrics import CONTENT_TYPE as METRICS_TYPE
from serve.obs.offline import make_report

_log = logging.getLogger(__name__)

_REPORT_TYPES: dict[str, tuple[Literal["html", "json"], str]] = {
    "/report": ("html", "text/html; charset=utf-8"),
    "/report.json": ("json", "application/json"),
}
Answer = tuple[HTTPStatus, str, bytes]


class HttpPort:
    """Answers on its own threads; bound when built, serving between `start` and `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        live: Callable[[], bool],
        ready: Callable[[], bool],
        metrics: Callable[[], bytes],
        database: Path,
    ) -> None:
        """Bind `host`:`port` (0: any free one); raises ConfigError naming both and the reason."""
        self._live = live
        self._ready = ready
        self._metrics = metrics
        self._database = database
        try:
            self._server = _Server((host, port), _handler(self._answer))
        except (OSError, OverflowError) as error:
            reason = "already in use" if _is_taken(error) else str(error)
            raise ConfigError(
                f"server.http_port: cannot listen on {host}:{port}: {reason}"
            ) from error
        self.host = host
        #: The port in use, also when 0 was asked for.
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="http")

    def start(self) -> None:
        """Serve until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what is being answered and close the port. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, target: str) -> Answer:
        url = urlsplit(target)
        if url.path == "/v2/health/live":
            return _health(self._live())
        if url.path == "/v2/health/ready":
            return _health(self._ready())
        if url.path == "/metrics":
            return HTTPStatus.OK, METRICS_TYPE, self._metrics()
        if url.path in _REPORT_TYPES:
            return self._report(*_REPORT_TYPES[url.path], parse_qs(url.query).get("since", [""])[0])
        known = "/v2/health/live /v2/health/ready /metrics /report /report.json"
        return _text(HTTPStatus.NOT_FOUND, f"nothing at {url.path}; there is {known}")

    def _report(self, form: Literal["html", "json"], content_type: str, since: str) -> Answer:
        try:
            since_s = parse_duration(since) if since else 0.0
            return HTTPStatus.OK, content_type, make_report(self._database, form, since_s)
        except ConfigError as error:
            return _text(HTTPStatus.BAD_REQUEST, str(error))
        except DeadlineExceeded as error:
            return _text(HTTPStatus.GATEWAY_TIMEOUT, str(error))
        except NotReady as error:
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


class _Server(ThreadingHTTPServer):
    #: Every answering thread is waited for when the server closes.
    daemon_threads = False
    block_on_close = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind, without the look-up of the host's full name, which can take seconds."""
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news; anything else is a bug worth its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            _log.exception("the HTTP request of %s failed", client_address)


def _handler(answer: Callable[[str], Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        #: Seconds a silent client may keep its thread, and so a stop.
        timeout = 5.0
        server_version = "gnnserve"
        sys_version = ""

        def do_GET(self) -> None:
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def _send(self, with_body: bool) -> None:
            try:
                status, content_type, body = answer(self.path)
            except Exception:
                _log.exception("GET %s failed", self.path)
                status, content_type, body = _text(
                    HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the server's log"
                )
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            _log.debug(format, *args)

    return Handler


def _text(status: HTTPStatus, message: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{message}\n".encode()


def _health(good: bool) -> Answer:
    if good:
        return _text(HTTPStatus.OK, "ok")
    return _text(HTTPStatus.SERVICE_UNAVAILABLE, "not now")


def _is_taken(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EADDRINUSE
