"""`grpc.health.v1`, which reports the engine's readiness.

Service names are the empty one for the server, both our services, and the name of every model.
`Check` looks at the engine. `Watch` hears of changes from a thread that polls the engine a few
times a second.
"""

import threading
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from serve.rpc import gnnserve_service as own
from serve.rpc import service
from serve.server.api import ModelInfo
from serve.threads import Thread

Models = Callable[[], tuple[ModelInfo, ...]]

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_PERIOD_S = 0.25


class Health(health.HealthServicer):  # type: ignore[misc]  # the library carries no types
    """Implements `grpc.health.v1.Health`.

    The library's servicer keeps the statuses, needs no thread per watcher, and has the methods of
    the protocol's installed release.
    """

    def __init__(self, inference: service.InferenceService, models: Models, served: Models) -> None:
        """Start with no status known.

        Args:
            inference: Tells whether the server is ready.
            models: Returns all models of the repository.
            served: Returns the models in memory.
        """
        super().__init__()
        self._inference = inference
        self._models = models
        self._served = served
        self._known: dict[str, int] = {}
        # Not `_lock`, which is the library's.
        self._telling = threading.Lock()
        self._stopped = threading.Event()
        self._thread = Thread(target=self._follow, name="health")

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the current status; NOT_FOUND for an unknown name."""
        self.refresh()
        return super().Check(request, context)

    def start(self) -> None:
        """Begin to poll the engine."""
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """Stop polling the engine."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def refresh(self) -> None:
        """Read the state of the engine and the repository, and tell watchers what changed."""
        self._tell(self._models())

    def _tell(self, models: tuple[ModelInfo, ...]) -> None:
        with self._telling:
            serving = self._inference.serving
            now = dict.fromkeys(("", service.NAME, own.NAME), self._inference.ready)
            for model in models:
                now[model.name] = now.get(model.name, False) or (serving and model.state == "READY")
            for name in self._known.keys() | now.keys():
                status = _SERVING if now.get(name, False) else _NOT_SERVING
                if self._known.get(name) != status:
                    self._known[name] = status
                    self.set(name, status)

    def _follow(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            # Reading the repository takes milliseconds of interpreter time, which would delay
            # requests. A model that is not in memory is not serving either way.
            self._tell(self._served())
