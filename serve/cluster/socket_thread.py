"""A thread that waits for what comes over a socket, or for the time, until it is stopped."""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod

import zmq

_log = logging.getLogger(__name__)

#: A thread whose work failed waits so long before it goes on.
_AFTER_FAILURE_S = 0.1


class SocketThread(ABC):
    """Base of these threads. The socket is the thread's own, and closed with it."""

    def __init__(
        self, name: str, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]"
    ) -> None:
        self._socket = socket
        self._stopped = context.socket(zmq.PAIR)
        self._stopper = context.socket(zmq.PAIR)
        self._stopped.bind(f"inproc://stop {name}")
        self._stopper.connect(f"inproc://stop {name}")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and close the sockets. Idempotent."""
        if self._stopper.closed:
            return
        if self._thread.is_alive():
            self._stopper.send(b"")
            self._thread.join()
        for socket in (self._socket, self._stopped, self._stopper):
            socket.close(0)

    @abstractmethod
    def wake_ns(self) -> int | None:
        """Return when `waited` is to be called at the latest, by the monotonic clock."""

    @abstractmethod
    def received(self, frames: list[bytes], now_ns: int) -> None:
        """Deal with a message."""

    @abstractmethod
    def waited(self, now_ns: int) -> None:
        """Do what the time asks for."""

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._stopped):
            poller.register(socket, zmq.POLLIN)
        while True:
            wake_ns, now_ns = self.wake_ns(), time.monotonic_ns()
            left_ms = None if wake_ns is None else max(0, math.ceil((wake_ns - now_ns) / 1e6))
            ready = dict(poller.poll(left_ms))
            if self._stopped in ready:
                return
            # NOTE: a message that cannot be dealt with must not end the thread.
            try:
                if self._socket in ready:
                    self.received(self._socket.recv_multipart(), time.monotonic_ns())
                self.waited(time.monotonic_ns())
            except Exception:
                _log.exception("%s: a message was left out", self._thread.name)
                time.sleep(_AFTER_FAILURE_S)
