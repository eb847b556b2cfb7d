"""The stop word, by which the main process ends a lane's run: shared memory and a signal.

Each lane has a word behind the shared pool. To end the run of a task, the main process writes the
task's id there and sends `SIGNAL`. Ids are unique, so a word that is read late ends no other run.
The run ends at whichever comes first: the memory meter refuses its next tensor, or Python handles
the signal between two instructions.
"""

import ctypes
import mmap
import signal
from types import FrameType

from serve.ipc.shared_pool import RUNS_WORD_BYTES

#: Used in a lane for nothing else.
SIGNAL = signal.SIGUSR1


class Stopped(BaseException):
    """Ends a run that nobody waits for. A BaseException, so that a model's handlers let it pass."""


class StopWord:
    """This lane's words in shared memory. Main thread only."""

    def __init__(self, pool: mmap.mmap, offset_bytes: int) -> None:
        self._word = ctypes.c_uint64.from_buffer(pool, offset_bytes)
        #: The task that runs here, for the server to read.
        self._runs = ctypes.c_uint64.from_buffer(pool, offset_bytes + RUNS_WORD_BYTES)
        self._runs.value = 0
        #: Read by the memory meter.
        self.address = ctypes.addressof(self._word)
        #: The task whose run the signal may end; 0 for none.
        self._task_id = 0

    def begin(self, task_id: int) -> None:
        """Let the task be ended from now on; raises Stopped if that was asked for already."""
        self._task_id = self._runs.value = task_id
        if self.asked(task_id):
            self.end()
            raise Stopped

    def end(self) -> None:
        """Let the signal end nothing from now on."""
        self._task_id = self._runs.value = 0

    def asked(self, task_id: int) -> bool:
        """Return True when the server asked for the end of that task's run."""
        return self._word.value == task_id

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Handle the signal: raise Stopped if it is meant for the current run."""
        if self._task_id and self.asked(self._task_id):
            self.end()
            raise Stopped
