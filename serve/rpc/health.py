"""`grpc.health.v1` over the engine's readiness.

Service names: the empty one for the server, both our services, and every model's own name.
`Check` looks at the engine; `Watch` is told of changes by a thread that looks a few times a
second.
"""

import threading
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from serve.rpc import gnnserve_service as own
from serve.rpc import service
from serve.server.api import ModelInfo

Models = Callable[[], tuple[ModelInfo, ...]]

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_PERIOD_S = 0.25


class Health(health.HealthServicer):  # type: ignore[misc]  # the library carries no types
    """Implements `grpc.health.v1.Health`.

    The library's servicer keeps the statuses, needs no thread per watcher, and has whatever methods
    its release of the protocol has.
    """

    def __init__(self, inference: service.InferenceService, models: Models, served: Models) -> None:
        """`models` are all of the repository, `served` those in memory."""
        super().__init__()
        self._inference = inference
        self._models = models
        self._served = served
        self._known: dict[str, int] = {}
        # Apart from the library's own `_lock`.
        self._telling = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="health", daemon=True)

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:
        """The status now, NOT_FOUND for a name never heard of."""
        self.refresh()
        return super().Check(request, context)

    def start(self) -> None:
        """Begin to follow the engine."""
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """Stop following it."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def refresh(self) -> None:
        """Look at the engine and the repository and tell watchers what changed."""
        self._tell(self._models())

    def _tell(self, models: tuple[ModelInfo, ...]) -> None:
        with self._telling:
            ready = self._inference.ready
            now = dict.fromkeys(("", service.NAME, own.NAME), ready)
            for model in models:
                now[model.name] = now.get(model.name, False) or (ready and model.state == "READY")
            for name in self._known.keys() | now.keys():
                status = _SERVING if now.get(name, False) else _NOT_SERVING
                if self._known.get(name) != status:
                    self._known[name] = status
                    self.set(name, status)

    def _follow(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            # To read the repository takes milliseconds, which requests would wait for; a model
            # that is only there is not served either way.
            self._tell(self._served())
