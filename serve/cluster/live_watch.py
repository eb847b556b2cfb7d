"""Reads the live numbers of one server, as a page that somebody has opened would."""

import http.client
import socket
import threading
import time
from contextlib import suppress

import msgspec

from serve.cluster.live_sum import MachineSeen, Seen, with_changes
from serve.errors import ServeError
from serve.undecodable import UNDECODABLE

#: A server writes once a second; one that is silent for so long does not answer.
SILENT_S = 8.0
_SILENT = f"it has been silent for {SILENT_S:g} s"
#: Longest event that is read; five minutes of 48 models and 32 tenants are 60 KiB.
MOST_EVENT_BYTES = 1 << 20
_MOST_ERROR_BYTES = 1 << 12
#: Shortest and longest pause before the next try.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.5, 5.0
_EVENTS = "/live/events?window=5m"


class _Error(msgspec.Struct):
    error: str = ""


class LiveWatch:
    """The numbers of one server, read by a thread until it is ended."""

    def __init__(self, machine: str, address: str, token: str | None = None) -> None:
        """Read from `address`, `host:port`; `token` is sent where it is given."""
        self._machine, self.address = machine, address
        self._headers = {"Accept": "text/event-stream", "Connection": "close"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._lock = threading.Lock()
        self._seen: Seen | None = None
        self._problem = ""
        self._heard_s = 0.0
        self._socket: socket.socket | None = None
        self._over = threading.Event()
        threading.Thread(target=self._keep, name=f"watch {machine}", daemon=True).start()

    def latest(self, now_s: float) -> MachineSeen:
        """Return what is known at a time, Unix seconds."""
        with self._lock:
            problem = self._problem
            if self._seen is not None and not problem and now_s - self._heard_s > SILENT_S:
                problem = _SILENT
            return MachineSeen(self._machine, self.address, self._seen, problem, self._heard_s)

    def end(self) -> None:
        """Read no more. Idempotent; a connection that is being made ends by itself."""
        self._over.set()
        with self._lock, suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def _keep(self) -> None:
        pause_s = _LEAST_PAUSE_S
        while not self._over.is_set():
            heard_s = self._heard_s
            try:
                self._read()
                problem = "it ended the connection"
            except TimeoutError:
                problem = _SILENT
            except OSError as error:
                problem = error.strerror or str(error)
            except (http.client.HTTPException, ValueError, ServeError, *UNDECODABLE) as error:
                problem = str(error) or type(error).__name__
            if self._heard_s > heard_s:
                pause_s = _LEAST_PAUSE_S
            with self._lock:
                self._problem = problem
            self._over.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _read(self) -> None:
        """Read the stream until it ends; raises what went wrong."""
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=SILENT_S)
        try:
            connection.connect()
            with self._lock:
                self._socket = connection.sock
                if self._over.is_set():
                    return
            connection.request("GET", _EVENTS, headers=self._headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                text = answer.read(_MOST_ERROR_BYTES)
                raise ServeError(f"status {answer.status}: {_error_in(text)}")
            name = ""
            while line := answer.readline(MOST_EVENT_BYTES + 1):
                if len(line) > MOST_EVENT_BYTES:
                    raise ServeError(f"it sent an event of more than {MOST_EVENT_BYTES} bytes")
                field, _, value = line.strip().partition(b": ")
                if field == b"event":
                    name = value.decode()
                elif field == b"data":
                    self._take(name, value)
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _take(self, name: str, data: bytes) -> None:
        """Take in an event; raises ValueError for what is none, and ServeError for a problem."""
        if name not in ("all", "changes"):
            raise ServeError(_error_in(data))
        seen = msgspec.json.decode(data, type=Seen)
        before = self._seen.points if name == "changes" and self._seen is not None else []
        seen = with_changes(before, seen)
        with self._lock:
            self._seen, self._problem, self._heard_s = seen, "", time.time()


def _error_in(text: bytes) -> str:
    """Return what a server says of an error."""
    try:
        said = msgspec.json.decode(text, type=_Error).error
    except UNDECODABLE:
        said = ""
    return said or "it says nothing more"
