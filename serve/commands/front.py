"""`gnnserve front`: one address before several servers, until a signal."""

import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from serve.cluster.front import Front
from serve.errors import ConfigError

_LOOK_S = 0.05


def run_front(host: str, port: int, servers: Sequence[str], on_ready: Callable[[], None]) -> None:
    """Stand before the servers until SIGINT or SIGTERM; calls `on_ready` when one is ready.

    Raises ConfigError when it cannot, or ends by itself.
    """
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: over.set())
    with tempfile.TemporaryDirectory(prefix="gnnserve-front-") as folder:
        front = Front(host, port, servers, Path(folder))
        said = False
        try:
            front.start()
            while not over.wait(_LOOK_S):
                if front.failure is not None:
                    raise ConfigError(front.failure)
                if not said and front.ready_count:
                    said = True
                    on_ready()
        finally:
            front.stop()
