"""Watchdog that calls the server's own gRPC port to learn whether it answers.

Readiness and metrics are served on the HTTP port, which would go on reporting health while no gRPC
call gets through. The watchdog's call reads neither the engine nor the disk: it tests the
connection, gRPC's polling thread and the threads for calls.
"""

import logging
import threading
from typing import Any

import grpc

from serve.rpc import service
from serve.server.clock import now_ns
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Time between an answer and the next call.
_PERIOD_S = 1.0
#: Time limit of one call.
_PATIENCE_S = 5.0
#: Total time of consecutive unanswered calls after which the port counts as silent. It takes two
#: of them, because a call that spans a pause of the whole machine fails without meaning anything.
_SILENT_S = 10.0
_METHOD = f"/{service.NAME}/ServerLive"
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Watchdog:
    """Tells whether a gRPC port answers; calls it on a thread between ``start`` and ``stop``."""

    def __init__(
        self,
        *,
        period_s: float = _PERIOD_S,
        patience_s: float = _PATIENCE_S,
        silent_s: float = _SILENT_S,
    ) -> None:
        """Count the port as answering until a call says otherwise."""
        self._period_s = period_s
        self._patience_s = patience_s
        self._silent_s = silent_s
        self._answers = True
        self._stopped = threading.Event()
        self._channel: grpc.Channel | None = None
        self._thread = Thread(target=self._watch, name="rpc-watchdog")

    @property
    def answers(self) -> bool:
        """True while the port answers."""
        return self._answers

    def start(self, address: str) -> None:
        """Begin to call the server at `address`."""
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._thread.start()

    def stop(self) -> None:
        """Stop calling; the last verdict stands."""
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
            except Exception as error:  # includes a lack of threads or memory
                if self._stopped.is_set():
                    return
                waited_s = min((now_ns() - asked_ns) / 1e9, self._patience_s)
                unanswered_s += self._period_s + waited_s
                if self._answers and unanswered_s >= self._silent_s:
                    self._answers = False
                    _log.error(
                        "the gRPC port does not answer the server's own calls: %s", _why(error)
                    )
            else:
                unanswered_s = 0.0
                if not self._answers:
                    self._answers = True
                    _log.warning("the gRPC port answers again")


def _why(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
