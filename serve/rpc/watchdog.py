"""Asks the server's own gRPC port, again and again, whether it answers.

Readiness and the metrics have a port of their own, which would go on saying that all is well while
no call gets through. What is asked reads neither the engine nor the disk: connection, gRPC's
polling thread and the threads of calls are what this is about.
"""

import logging
import threading
from typing import Any

import grpc

from serve.rpc import service
from serve.server.clock import now_ns

_log = logging.getLogger(__name__)

#: Between an answer and the next question.
_PERIOD_S = 1.0
#: How long one question waits for its answer.
_PATIENCE_S = 5.0
#: The port is silent when questions have waited for so long, one after the other, without any
#: answer. Two of them: the one that waits while the machine is stopped fails, and means nothing.
_SILENT_S = 10.0
_METHOD = f"/{service.NAME}/ServerLive"
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Watchdog:
    """Knows whether a gRPC port answers; asks on a thread from ``start`` to ``stop``."""

    def __init__(
        self,
        *,
        period_s: float = _PERIOD_S,
        patience_s: float = _PATIENCE_S,
        silent_s: float = _SILENT_S,
    ) -> None:
        """Until asked the port counts as answering."""
        self._period_s = period_s
        self._patience_s = patience_s
        self._silent_s = silent_s
        self._answers = True
        self._stopped = threading.Event()
        self._channel: grpc.Channel | None = None
        self._thread = threading.Thread(target=self._watch, name="rpc-watchdog", daemon=True)

    @property
    def answers(self) -> bool:
        """The port has answered of late."""
        return self._answers

    def start(self, address: str) -> None:
        """Begin to ask the server at `address`."""
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; the last answer stands."""
        self._stopped.set()
        if self._channel is not None:
            self._channel.close()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._channel is not None
        ask: Any = self._channel.unary_unary(_METHOD)
        unanswered_s = 0.0
        while not self._stopped.wait(self._period_s):
            asked_ns = now_ns()
            try:
                ask(b"", timeout=self._patience_s)
            except Exception as error:  # also for want of a thread or of memory
                if self._stopped.is_set():
                    return
                waited_s = min((now_ns() - asked_ns) / 1e9, self._patience_s)
                unanswered_s += self._period_s + waited_s
                if self._answers and unanswered_s >= self._silent_s:
                    self._answers = False
                    _log.error("the gRPC port has not answered the server itself: %s", _why(error))
            else:
                unanswered_s = 0.0
                if not self._answers:
                    self._answers = True
                    _log.warning("the gRPC port answers again")


def _why(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
