"""The calibrating processes, which load and measure models beside the serving lanes."""

from collections.abc import Iterator
from contextlib import contextmanager

from serve.errors import NotReady
from serve.ipc.setup import LaneSetup
from serve.server.lanes import processes


class Calibrators:
    """All calibrating processes that run now."""

    def __init__(self) -> None:
        self._running: set[processes.Calibrator] = set()
        #: Upper bound of their niceness: 0 while the server starts and no request waits for a core.
        self.niceness = 0
        #: True once the server stops: no model is measured any more.
        self.interrupted = False

    @contextmanager
    def start(self, setup: LaneSetup, pool_fd: int) -> Iterator[processes.Calibrator]:
        """Start a calibrator for the `with` block; raises NotReady while the server stops."""
        if self.interrupted:
            raise NotReady("no model is measured while the server stops")
        process, (channel,) = processes.start(setup, 1, pool_fd)
        calibrator = processes.Calibrator(process, channel)
        self._running.add(calibrator)
        if self.interrupted:  # just now
            calibrator.kill()
        try:
            yield calibrator
        finally:
            self._running.discard(calibrator)
            calibrator.close()

    def interrupt(self) -> None:
        """End all calibrators for good; their users get NotReady. Any thread; never blocks."""
        self.interrupted = True
        for calibrator in self._running.copy():
            calibrator.kill()
