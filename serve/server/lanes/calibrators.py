"""The processes that load and measure models, beside the lanes that serve."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from serve.errors import NotReady
from serve.ipc.setup import LaneSetup
from serve.server.lanes import processes
from serve.server.lanes.yielding import Yielding


class Calibrators:
    """Those that run now; at most one of them in the background."""

    def __init__(self, executes_on: Callable[[Sequence[int]], bool]) -> None:
        """`executes_on` says whether a lane executes on one of these cores; none: on any."""
        self._executes_on = executes_on
        self._running: set[processes.Calibrator] = set()
        self._background: Yielding | None = None
        #: Upper bound of their niceness: 0 while the server starts and no request waits for a core.
        self.niceness = 0
        #: No model is measured any more.
        self.interrupted = False

    @contextmanager
    def start(self, setup: LaneSetup, pool_fd: int) -> Iterator[processes.Calibrator]:
        """One of them, which ends with this; raises NotReady while the server stops."""
        if self.interrupted:
            raise NotReady("no model is measured while the server stops")
        process, (channel,) = processes.start(setup, 1, pool_fd)
        calibrator = processes.Calibrator(process, channel)
        self._running.add(calibrator)
        if self.interrupted:  # just now
            calibrator.kill()
        yielding = None
        if setup.background and process.pid is not None:
            yielding = Yielding(process.pid, lambda: self._executes_on(setup.cores))
            self._background = yielding
            yielding.look()
        try:
            yield calibrator
        finally:
            if yielding is not None:
                self._background = None
                yielding.end()
            self._running.discard(calibrator)
            calibrator.close()

    def interrupt(self) -> None:
        """Measure no model any more: whoever does gets NotReady. Any thread; never blocks."""
        self.interrupted = True
        for calibrator in self._running.copy():
            calibrator.kill()

    def look(self) -> None:
        """Lanes execute elsewhere now: background work stands still or goes on. Any thread."""
        if (background := self._background) is not None:
            background.look()
