"""Watch over the disk that the process of a job takes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from serve.errors import NotReady
from serve.scratch import folder_of
from serve.server.lanes.calibrators import Calibrator
from serve.server.lanes.lane_folders import disk_bytes
from serve.server.training.job_folder import JobFolder
from serve.threads import Thread

_EVERY_S = 1.0


class JobDisk:
    """Ends processes of a job that take more disk than they may; looks once a second."""

    def __init__(self, folder: JobFolder, most_bytes: int) -> None:
        """`most_bytes` is apart from the job's graph, as it is now."""
        self._folder, self._most_bytes = folder, most_bytes
        self._graph_bytes = folder.graph_bytes()
        #: Why a process was ended; empty before.
        self.exceeded = ""

    @contextmanager
    def watched(self, process: Calibrator) -> Iterator[None]:
        """Watch a process meanwhile; raises NotReady when the system has no thread for it."""
        over = threading.Event()

        def watch() -> None:
            while not (over.wait(_EVERY_S) or self._look(process)):
                pass

        thread = Thread(target=watch, name="job disk")
        try:
            thread.start()
        except RuntimeError as error:
            raise NotReady(f"the disk of a job cannot be watched: {error}") from error
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look(self, process: Calibrator) -> bool:
        """Return True when the process is over, ended for what it takes or by itself."""
        pid = process.pid
        if pid is None:
            return True
        temporary = folder_of(pid)
        folders = (self._folder.shared, *(() if temporary is None else (temporary,)))
        taken_bytes = disk_bytes(pid, folders, self._graph_bytes + self._most_bytes)
        if taken_bytes <= self._graph_bytes + self._most_bytes:
            return False
        self.exceeded = (
            f"its files take {taken_bytes - self._graph_bytes} bytes beside its graph, of"
            f" {self._most_bytes} (training.max_files)"
        )
        process.kill()
        return True
