"""How a lane's run is ended from outside: a word in shared memory, and a signal.

Each lane has a word behind the shared pool. To end the run of a task the main process writes the
task's id there and sends `SIGNAL`. No id is given twice, so a word can never end another run than
it was meant for, however late it is read. The run ends by whatever comes first: the memory meter
refuses its next tensor, or Python, between two instructions, handles the signal.
"""

import ctypes
import mmap
import signal
from types import FrameType

from serve.ipc.shared_pool import RUNS_WORD_BYTES

#: Nothing else in a lane uses it.
SIGNAL = signal.SIGUSR1


class Stopped(BaseException):
    """Nobody waits for the run any more. No handler of a model's may take this for an error."""


class StopWord:
    """The words of this lane, as the lane sees it; for its main thread."""

    def __init__(self, pool: mmap.mmap, offset_bytes: int) -> None:
        self._word = ctypes.c_uint64.from_buffer(pool, offset_bytes)
        #: Tells the server what runs here.
        self._runs = ctypes.c_uint64.from_buffer(pool, offset_bytes + RUNS_WORD_BYTES)
        self._runs.value = 0
        #: For the meter.
        self.address = ctypes.addressof(self._word)
        #: The task whose run may be ended by the signal; 0: none.
        self._task_id = 0

    def begin(self, task_id: int) -> None:
        """From now on the run of the task may be ended; raises Stopped if it already is."""
        self._task_id = self._runs.value = task_id
        if self.asked(task_id):
            self.end()
            raise Stopped

    def end(self) -> None:
        """The signal ends nothing any more."""
        self._task_id = self._runs.value = 0

    def asked(self, task_id: int) -> bool:
        """Whether the server asked for the end of that task's run."""
        return self._word.value == task_id

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler: end the run that is meant, and no other."""
        if self._task_id and self.asked(self._task_id):
            self.end()
            raise Stopped
